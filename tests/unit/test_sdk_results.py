"""Output put together: decoding, overlaps, gaps, bounds."""

from __future__ import annotations

import random

from dsec.sdk.results import Decoder, ExecResult, Tape
from dsec.wire.frames import Channel
from dsec.wire.records import Gap

TEXT = "añ漢🎈\n" * 50


def test_a_character_is_never_split_between_two_chunks() -> None:
    raw = TEXT.encode()
    decoder = Decoder()

    chunks = [decoder.chunk(Channel.OUT, i, raw[i : i + 1]) for i in range(len(raw))]

    assert "".join(c.text for c in chunks) == TEXT
    assert "\ufffd" not in "".join(c.text for c in chunks)
    assert b"".join(c.data for c in chunks) == raw


def test_the_two_streams_are_decoded_apart() -> None:
    decoder = Decoder()

    first = decoder.chunk(Channel.OUT, 0, "é".encode()[:1])
    between = decoder.chunk(Channel.ERR, 0, b"x")
    last = decoder.chunk(Channel.OUT, 1, "é".encode()[1:])

    assert (first.text, between.text, last.text) == ("", "x", "é")
    assert between.stream == "stderr"


def test_half_a_character_at_the_end_is_told_as_replaced() -> None:
    decoder = Decoder()
    decoder.chunk(Channel.OUT, 0, "🎈".encode()[:2])

    rest = decoder.broken(Channel.OUT, 2)

    assert rest is not None
    assert (rest.text, rest.data, rest.offset) == ("\ufffd", b"", 2)
    assert decoder.broken(Channel.OUT, 2) is None


def test_pieces_that_overlap_are_taken_once(rng: random.Random) -> None:
    data = rng.randbytes(5_000)
    tape = Tape(1, bytes_max=1 << 20)
    fresh = bytearray()

    while tape.end < len(data):
        start = rng.randrange(0, tape.end + 1)
        fresh += tape.add(start, data[start : start + rng.randrange(1, 700)])

    assert tape.data() == bytes(fresh) == data
    assert tape.all_gaps() == []


def test_a_hole_becomes_a_gap() -> None:
    tape = Tape(1, bytes_max=100)

    tape.add(0, b"abc")
    tape.add(10, b"xyz")
    tape.skip(20)
    tape.skip(25)

    assert tape.data() == b"abcxyz"
    assert tape.all_gaps() == [Gap(1, 3, 10), Gap(1, 13, 25)]


def test_above_its_bound_a_tape_keeps_head_and_tail_and_says_what_is_missing(rng: random.Random) -> None:
    data = rng.randbytes(10_000)
    tape = Tape(1, bytes_max=1_001)

    for start in range(0, len(data), 77):
        tape.add(start, data[start : start + 77])

    assert tape.data() == data[:501] + data[-500:]
    assert tape.all_gaps() == [Gap(1, 501, 9_500)]


def test_a_gap_within_what_was_dropped_is_told_as_one() -> None:
    tape = Tape(1, bytes_max=10)

    tape.add(0, b"0123456789abcdef")
    tape.skip(30)
    tape.add(30, bytes(20))

    assert tape.data() == b"01234" + bytes(5)
    assert tape.all_gaps() == [Gap(1, 5, 45)]


def test_a_tape_without_room_keeps_nothing_and_says_so() -> None:
    tape = Tape(2, bytes_max=0)

    tape.add(0, b"abc")

    assert tape.data() == b""
    assert tape.all_gaps() == [Gap(2, 0, 3)]


def _result(**more: object) -> ExecResult:
    fields: dict[str, object] = {
        "id": "exe_aaaaaaaaaaaaaaaa",
        "status": "exited",
        "exit_code": 0,
        "signal": None,
        "cause": None,
        "stdout_bytes": b"a\xff",
        "stderr_bytes": b"",
    }
    return ExecResult(**{**fields, **more})  # type: ignore[arg-type]


def test_a_result_shows_text_with_bad_bytes_replaced() -> None:
    assert _result().stdout == "a\ufffd"
    assert _result().ok


def test_a_signal_or_an_unseen_end_is_not_success() -> None:
    killed = _result(status="signaled", exit_code=None, signal=9, cause="oom")
    unseen = _result(status="unknown", exit_code=None, cause="node_lost")

    assert not killed.ok
    assert killed.summary() == "was ended by signal 9 (oom)"
    assert not unseen.ok
    assert "nobody saw" in unseen.summary()
    assert _result(cause="timed_out").timed_out
