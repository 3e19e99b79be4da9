"""Frames come out as they went in, however the bytes are cut; anything else is one typed error. tools/fuzz_frames.py
looks longer, native/fuzz at the other side.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.errors import ProtocolError
from dsec.core.limits import DATA_BYTES_MAX, FRAME_BYTES_MAX
from dsec.wire import agent
from dsec.wire.codec import unpack
from dsec.wire.frames import Frame, FrameDecoder, decode_data, encode_data, encode_frame

frames = st.builds(
    Frame,
    type=st.integers(1, 8),
    stream=st.integers(0, 2**32 - 1),
    body=st.binary(max_size=300),
    payload=st.just(b""),
)


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 200)))
def test_frames_survive_any_cutting(sent: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(frame.type, frame.stream, frame.body) for frame in sent)
    decoder = FrameDecoder()
    received: list[Frame] = []

    for cut in [*cuts, len(stream) + 1]:
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]

    assert received == sent
    assert decoder.pending_bytes == 0


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=500),
)
def test_data_survives(stream: int, channel: int, offset: int, sequence: int, payload: bytes) -> None:
    (frame,) = FrameDecoder().feed(encode_data(stream, channel, offset, sequence, payload))

    assert decode_data(frame.body) == (channel, offset, sequence, payload)


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_random_bytes_give_frames_or_one_error_and_hold_at_most_a_frame(pieces: list[bytes]) -> None:
    decoder = FrameDecoder()

    with contextlib.suppress(ProtocolError):
        for piece in pieces:
            for frame in decoder.feed(piece):
                assert len(frame.body) <= FRAME_BYTES_MAX
            assert decoder.pending_bytes <= 4 + FRAME_BYTES_MAX


@given(st.binary(max_size=200))
def test_a_random_body_is_a_record_or_an_error(body: bytes) -> None:
    for kind in (agent.HelloReply, agent.ExecEnded, agent.FileStat, agent.Request):
        with contextlib.suppress(ProtocolError):
            assert isinstance(unpack(body, kind), kind)


def test_a_frame_over_the_bound_is_neither_made_nor_taken() -> None:
    encode_frame(1, 0, bytes(FRAME_BYTES_MAX - 5))
    with pytest.raises(ProtocolError):
        encode_frame(1, 0, bytes(FRAME_BYTES_MAX - 4))
    with pytest.raises(ProtocolError):
        encode_data(1, 1, 0, 0, bytes(DATA_BYTES_MAX + 1))
    with pytest.raises(ProtocolError):
        list(FrameDecoder().feed((FRAME_BYTES_MAX + 1).to_bytes(4, "big") + bytes(5)))
