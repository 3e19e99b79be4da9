"""What a command gave: chunks while it runs, an ExecResult at its end."""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from dsec.wire.frames import Channel
from dsec.wire.records import ExecInfo, Gap

StreamName = Literal["stdout", "stderr"]
_SHOWN = 80  # characters of output in a repr
_NAMES: dict[int, StreamName] = {Channel.OUT: "stdout", Channel.ERR: "stderr"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output. `text` is decoded incrementally: a character is never split between two chunks."""

    stream: StreamName
    offset: int  # bytes of this stream before these
    data: bytes
    text: str


@dataclass(frozen=True, slots=True)
class ExecUsage:
    """What the command and its waited-for children used. None: not known."""

    wall_s: float | None = None
    user_s: float | None = None
    system_s: float | None = None
    max_rss_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended, with its output. A command that fails is a result, not an exception.

    `exit_code` is None when a signal ended the command (`signal` says which) or when nobody saw its end (`status` is
    "unknown" and `cause` says why). `stdout` and `stderr` replace what is not UTF-8; the bytes are beside them.

    `cause` says what ended or spoiled it, if anything did: timed_out, oom, output_budget, disk_full, layer_unavailable,
    layer_corrupt, agent_lost, node_lost, killed, rolled_back.
    """

    id: str
    status: str  # exited | signaled | unknown
    exit_code: int | None
    signal: int | None
    cause: str | None  # timed_out | oom | disk_full | …, as above
    stdout_bytes: bytes
    stderr_bytes: bytes
    gaps: list[Gap] = field(default_factory=list)
    usage: ExecUsage = ExecUsage()
    session_ended: bool = False

    @property
    def stdout(self) -> str:
        """As text; what is not UTF-8 becomes U+FFFD. `stdout_bytes` is as it was."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """As `stdout`."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def timed_out(self) -> bool:
        """Its `timeout_s` ended it."""
        return self.cause == "timed_out"

    @property
    def truncated(self) -> bool:
        """Some output was produced and is not in the result; `gaps` says which bytes."""
        return bool(self.gaps)

    @property
    def ok(self) -> bool:
        """It ended by itself, with 0."""
        return self.status == "exited" and self.exit_code == 0

    def __repr__(self) -> str:
        """Short: output may be megabytes."""
        streams = f"stdout={_beginning(self.stdout)}, stderr={_beginning(self.stderr)}"
        return f"<ExecResult {self.id}: {self.summary()}, {streams}>"

    def summary(self) -> str:
        """One phrase for people: "exited with 3", "was killed by signal 9 (oom)"."""
        if self.status == "exited":
            text = f"exited with {self.exit_code}"
        elif self.status == "signaled":
            text = f"was ended by signal {self.signal}"
        else:
            text = "ended in a way that nobody saw"
        return f"{text} ({self.cause})" if self.cause else text


def _beginning(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


class Decoder:
    """Bytes of both streams become text, never split within a character."""

    def __init__(self) -> None:
        self._decoders = {c: codecs.getincrementaldecoder("utf-8")("replace") for c in _NAMES}

    def chunk(self, channel: int, offset: int, data: bytes) -> Chunk:
        return Chunk(_NAMES[channel], offset, data, self._decoders[channel].decode(data))

    def broken(self, channel: int, offset: int) -> Chunk | None:
        """No more bytes follow what came so far: what is left of a character, replaced, as a chunk without data."""
        text = self._decoders[channel].decode(b"", True)
        self._decoders[channel].reset()
        return Chunk(_NAMES[channel], offset, b"", text) if text else None


class Tape:
    """Output of one channel put together from pieces that may overlap. Keeps at most `bytes_max`: head and tail."""

    def __init__(self, channel: int, *, start: int = 0, bytes_max: int) -> None:
        self.channel = channel
        self.end = start  # everything below is had, or known to be lost
        self.gaps: list[Gap] = []
        self._head: list[bytes] = []
        self._head_left = bytes_max - bytes_max // 2
        self._tail: deque[tuple[int, bytes]] = deque()  # (offset, piece)
        self._tail_bytes = 0
        self._tail_max = bytes_max // 2
        self._dropped: Gap | None = None  # by this tape, for its own bound

    def add(self, offset: int, data: bytes) -> bytes:
        """Takes a piece; gives the part of it that is new."""
        if offset > self.end:
            self.skip(offset)
        fresh = data[self.end - offset :] if offset < self.end else data
        if not fresh:
            return b""
        at, self.end = self.end, self.end + len(fresh)
        self._keep(at, fresh)
        return fresh

    def skip(self, end: int) -> None:
        """Bytes up to `end` are lost."""
        if end <= self.end:
            return
        last = self.gaps[-1] if self.gaps else None
        if last is not None and last.end == self.end:
            self.gaps[-1] = Gap(self.channel, last.start, end)
        else:
            self.gaps.append(Gap(self.channel, self.end, end))
        self.end = end

    def _keep(self, at: int, data: bytes) -> None:
        if self._head_left > 0:
            head = data[: self._head_left]
            self._head.append(head)
            self._head_left -= len(head)
            at, data = at + len(head), data[len(head) :]
        if data:
            self._tail.append((at, data))
            self._tail_bytes += len(data)
        while self._tail_bytes > self._tail_max:
            self._drop_first(self._tail_bytes - self._tail_max)

    def _drop_first(self, excess: int) -> None:
        at, piece = self._tail.popleft()
        cut = min(excess, len(piece))
        if cut < len(piece):
            self._tail.appendleft((at + cut, piece[cut:]))
        self._tail_bytes -= cut
        start = self._dropped.start if self._dropped else at
        self._dropped = Gap(self.channel, start, at + cut)

    def data(self) -> bytes:
        return b"".join([*self._head, *(piece for _, piece in self._tail)])

    def all_gaps(self) -> list[Gap]:
        if self._dropped is None:
            return list(self.gaps)
        # What this tape dropped may hold or touch gaps of the record: told as one.
        start, end = self._dropped.start, self._dropped.end
        apart = [g for g in self.gaps if g.end < start or g.start > end]
        for gap in self.gaps:
            if gap not in apart:
                start, end = min(start, gap.start), max(end, gap.end)
        return sorted([*apart, Gap(self.channel, start, end)], key=lambda g: g.start)


def result_of(info: ExecInfo, out: bytes, err: bytes, gaps: list[Gap]) -> ExecResult:
    return ExecResult(
        id=info.id,
        status=info.status or "unknown",
        exit_code=info.exit_code,
        signal=info.signal,
        cause=info.cause,
        stdout_bytes=out,
        stderr_bytes=err,
        gaps=gaps,
        usage=ExecUsage(info.wall_s, info.user_s, info.system_s, info.max_rss_bytes),
        session_ended=info.session_ended,
    )
