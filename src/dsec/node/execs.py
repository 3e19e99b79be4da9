"""One exec as the node knows it, and what it looks like to callers."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from dsec.agent.execs import ExecStream
from dsec.core.errors import DsecError
from dsec.core.ids import main_exec_id
from dsec.core.limits import EXEC_INLINE_OUTPUT_BYTES_MAX
from dsec.node.record import OutputRecord
from dsec.node.recordstore import ERR, OUT
from dsec.node.rows import ExecEndEntry, ExecStartEntry
from dsec.wire import agent
from dsec.wire.codec import pack
from dsec.wire.records import ExecAnswer, ExecInfo, ExecRequest

COMMAND_CHARS_MAX: Final = 200


class NodeExec:
    """One exec. Its runner alone writes; any number of readers wait for `changed`."""

    __slots__ = (
        "_open_record",
        "_readers",
        "_record",
        "_waiters",
        "began_s",
        "end",
        "end_position",
        "followed",
        "oom_kills_before",
        "start",
        "started",
        "stdin_closed",
        "stdin_lock",
        "stream",
    )

    def __init__(self, start: ExecStartEntry, open_record: Callable[[NodeExec], OutputRecord]) -> None:
        self.start = start
        self.end: ExecEndEntry | None = None  # without its output
        self.end_position: int | None = None  # of the entry with the output, in the exec log
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stream: ExecStream | None = None
        self.followed = False  # a runner has it
        self.stdin_lock = asyncio.Lock()
        self.stdin_closed = not start.stdin
        self.oom_kills_before = 0
        self.began_s = math.inf  # monotonic; its desk knows
        self._open_record = open_record
        self._record: OutputRecord | None = None
        self._readers = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def id(self) -> str:
        return self.start.id

    @property
    def live(self) -> bool:
        return self.end is None

    @property
    def record(self) -> OutputRecord:
        if self._record is None:
            self._record = self._open_record(self)
        return self._record

    @record.setter
    def record(self, record: OutputRecord) -> None:
        self._record = record

    # -- readers -----------------------------------------------------------------------------------

    def __enter__(self) -> OutputRecord:
        """The record for the time of the block: an ended exec's is read in when wanted, and let go afterwards."""
        record = self.record
        self._readers += 1
        return record

    def __exit__(self, *_: object) -> None:
        self._readers -= 1
        self.let_go()

    def let_go(self) -> None:
        """Frees memory and descriptor of an ended exec's record when nobody reads it."""
        if self._readers == 0 and self.end_position is not None and self._record is not None:
            self._record.close()
            self._record = None

    def close(self) -> None:
        """Readers that are in the middle of it go on with what they have open."""
        if self._record is not None and self._readers == 0:
            self._record.close()

    def remove_file(self, path: Path) -> None:
        """Readers that are in the middle of it go on with what they have open."""
        path.unlink(missing_ok=True)
        self.let_go()

    async def changed(self) -> None:
        """Returns when there is more output, or the end. Look first, then wait: nothing is missed in between."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def ended(self) -> None:
        while self.live:
            await self.changed()

    def fail_start(self, error: DsecError) -> None:
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # nobody may be waiting

    def mark_started(self) -> None:
        if not self.started.done():
            self.started.set_result(None)

    # -- for callers -------------------------------------------------------------------------------

    def info(self, sandbox: str) -> ExecInfo:
        start, end = self.start, self.end
        name = "main" if start.id == main_exec_id(sandbox) else None
        if end is None:
            return ExecInfo(
                id=start.id,
                name=name,
                sandbox=sandbox,
                state="running",
                command=start.command,
                started_at=start.started_at,
                session=start.session,
                tty=start.tty,
                out_bytes=self.record.out_bytes,
                err_bytes=self.record.err_bytes,
                gaps=self.record.gaps(),
            )
        usage = end.end.usage
        return ExecInfo(
            id=start.id,
            name=name,
            sandbox=sandbox,
            state="ended",
            command=start.command,
            started_at=start.started_at,
            ended_at=end.ended_at,
            session=start.session,
            tty=start.tty,
            status=end.end.status,
            exit_code=end.end.code,
            signal=end.end.signal,
            cause=end.end.cause,
            session_ended=end.end.session_ended,
            out_bytes=end.out_bytes,
            err_bytes=end.err_bytes,
            gaps=end.gaps,
            wall_s=usage.wall_us / 1e6,
            user_s=usage.user_us / 1e6,
            system_s=usage.system_us / 1e6,
            max_rss_bytes=usage.max_rss_bytes,
        )

    def answer(self, sandbox: str, *, with_output: bool, existing: bool) -> ExecAnswer:
        """With the output so far, if that was asked for and fits."""
        info = self.info(sandbox)
        if not with_output:
            return ExecAnswer(exec=info, existing=existing)
        with self as record:
            if record.kept_bytes > EXEC_INLINE_OUTPUT_BYTES_MAX:
                return ExecAnswer(exec=info, existing=existing)
            return ExecAnswer(exec=info, out=record.read_all(OUT), err=record.read_all(ERR), existing=existing)


def describe_command(request: ExecRequest) -> str:
    """The command for people: shortened, and without the values of its secrets."""
    if request.shell is not None:
        text = request.shell
    elif request.argv is not None:
        text = " ".join(request.argv)
    else:
        text = " ".join(item.decode("utf-8", "replace") for item in request.argv_bytes or [])
    for value in request.secrets.values():
        if value:
            text = text.replace(value, "[hidden]")
    text = "".join(c if c.isprintable() else " " for c in text[: COMMAND_CHARS_MAX + 1])
    return text if len(text) <= COMMAND_CHARS_MAX else f"{text[: COMMAND_CHARS_MAX - 1]}…"


def request_hash(request: ExecRequest) -> bytes:
    """Equal for requests that ask for the same. Secrets count by name only: a hash of a value could be tried out."""
    known = msgspec.structs.asdict(request) | {"secrets": dict.fromkeys(request.secrets, ""), "wait_s": None}
    return hashlib.sha256(pack(known)).digest()


def takes_stdin(request: ExecRequest) -> bool:
    """A terminal always does: what is typed comes that way."""
    return request.stdin or request.stdin_data is not None or request.tty is not None


def agent_exec(request: ExecRequest) -> agent.Exec:
    """What the agent is sent. The only place where secrets are used."""
    argv = request.argv_bytes
    if request.argv is not None:
        argv = [_bytes(item) for item in request.argv]
    env = {**request.env, **request.secrets}
    return agent.Exec(
        id=request.id,
        argv=argv,
        shell=None if request.shell is None else _bytes(request.shell),
        cwd=None if request.cwd is None else _bytes(request.cwd),
        env={_bytes(name): _bytes(value) for name, value in env.items()},
        user=request.user,
        stdin=takes_stdin(request),
        tty=None if request.tty is None else agent.Tty(request.tty.cols, request.tty.rows),
        timeout_s=request.timeout_s,
        grace_s=request.grace_s,
        output_bytes_max=request.output_bytes_max,
        merge_stderr=request.merge_stderr,
        rlimits=request.rlimits,
        session=request.session,
    )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
