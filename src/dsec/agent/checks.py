"""Replies of the agent are decoded by type, and held against the contract here. Every check raises ProtocolError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dsec.core.errors import InvalidArgumentError, ProtocolError
from dsec.core.ids import parse_exec_id, parse_name
from dsec.core.limits import (
    EXECS_KEPT_MAX,
    EXECS_LIVE_MAX,
    NAME_BYTES_MAX,
    PATH_BYTES_MAX,
    SESSIONS_MAX,
)
from dsec.wire import agent

COUNT_MAX: Final = 1 << 62
EXECS_MAX: Final = EXECS_LIVE_MAX + EXECS_KEPT_MAX
FEATURES_MAX: Final = 64
TEXT_CHARS_MAX: Final = 128
_STATUSES: Final = frozenset(agent.ExecStatus)
_CAUSES: Final = frozenset({"timed_out", "oom", "output_budget", "disk_full", "killed"})
_KINDS: Final = frozenset({"file", "directory", "symlink", "fifo", "socket", "char", "block"})
_EVENTS: Final = frozenset({"created", "modified", "deleted", "moved", "attributes", "overflow"})


def check_hello(hello: agent.HelloReply) -> None:
    _text("version", hello.version)
    _text("boot id", hello.boot_id)
    if not hello.boot_id:
        raise ProtocolError("hello without a boot id")
    if len(hello.features) > FEATURES_MAX:
        raise ProtocolError(f"hello with {len(hello.features)} features")
    for feature in hello.features:
        _text("feature", feature)
    _execs(hello.execs)


def check_exec_list(listing: agent.ExecList) -> None:
    _execs(listing.execs)


def check_exec_end(ended: agent.ExecEnded) -> None:
    _exec_end(ended.end)


def check_started(id: str, out: int, err: int) -> Callable[[agent.ExecStarted], None]:
    """For the reply to exec and attach: it is about this exec, and no output comes from below what was asked for."""

    def check(started: agent.ExecStarted) -> None:
        if started.id != id:
            raise ProtocolError(f"the reply for exec {id} is about another")
        _counts(started.pid, started.stdin, started.out, started.err)
        if started.out < out or started.err < err:
            raise ProtocolError(f"exec {id}: output from before the offset that was asked for")

    return check


def check_session(name: str) -> Callable[[agent.SessionState], None]:
    def check(state: agent.SessionState) -> None:
        if state.name != name:
            raise ProtocolError("the reply for a session is about another")
        _session(state)

    return check


def check_sessions(listing: agent.SessionList) -> None:
    if len(listing.sessions) > SESSIONS_MAX:
        raise ProtocolError(f"{len(listing.sessions)} sessions")
    for state in listing.sessions:
        _session(state)
    if len({state.name for state in listing.sessions}) != len(listing.sessions):
        raise ProtocolError("two sessions of one name")


def check_stat(stat: agent.FileStat) -> None:
    if stat.kind not in _KINDS:
        raise ProtocolError("a file of a kind that does not exist")
    if len(stat.name) > NAME_BYTES_MAX or b"\0" in stat.name:
        raise ProtocolError("a file name that cannot be one")
    if stat.target is not None and (len(stat.target) > PATH_BYTES_MAX or b"\0" in stat.target):
        raise ProtocolError("a link target that cannot be one")
    _counts(stat.size, stat.mode, stat.uid, stat.gid, stat.nlink)
    if stat.mode > 0o7777 or abs(stat.mtime_ns) > COUNT_MAX * 2:
        raise ProtocolError("a file with impossible attributes")


def check_list(args: agent.ListArgs) -> Callable[[agent.ListReply], None]:
    """For one page: no more than asked for, sorted, after the cursor, every name one component."""

    def check(reply: agent.ListReply) -> None:
        if len(reply.entries) > args.limit:
            raise ProtocolError(f"a page of {len(reply.entries)} entries where {args.limit} were asked for")
        last = args.after or b""
        for entry in reply.entries:
            check_stat(entry)
            if entry.name in (b"", b".", b"..") or b"/" in entry.name or entry.name <= last:
                raise ProtocolError("directory entries that are not sorted names")
            last = entry.name
        if reply.more and not reply.entries:
            raise ProtocolError("an empty page that is not the last")

    return check


def check_written(written: agent.Written) -> None:
    _counts(written.bytes, written.entries)


def check_usage(usage: agent.UsageReply) -> None:
    _counts(usage.processes, usage.execs, usage.sessions, usage.agent_rss_bytes)
    _counts(usage.disk_used_bytes, usage.disk_total_bytes)


def check_watch_event(event: agent.WatchEvent) -> None:
    if event.kind not in _EVENTS:
        raise ProtocolError("a watch event of a kind that does not exist")
    for path in (event.path, event.source or b""):
        if len(path) > PATH_BYTES_MAX or b"\0" in path or path.startswith(b"/") or b".." in path.split(b"/"):
            raise ProtocolError("a watch event outside the watched directory")


def _execs(execs: list[agent.ExecState]) -> None:
    if len(execs) > EXECS_MAX:
        raise ProtocolError(f"{len(execs)} execs; at most {EXECS_MAX} are kept")
    for state in execs:
        _exec_id(state.id)
        _counts(state.pid, state.out, state.err, state.stdin)
        if state.end is not None:
            _exec_end(state.end)
        if state.session is not None:
            _name(state.session)
    if len({state.id for state in execs}) != len(execs):
        raise ProtocolError("two execs of one id")


def _exec_end(end: agent.ExecEnd) -> None:
    if end.status not in _STATUSES:
        raise ProtocolError("an exec with a status that does not exist")
    if (end.code is None) == (end.status == agent.ExecStatus.EXITED):
        raise ProtocolError("an exec has an exit code exactly when it exited")
    if (end.signal is None) == (end.status == agent.ExecStatus.SIGNALED):
        raise ProtocolError("an exec has a signal exactly when it was killed by one")
    if end.code is not None and not 0 <= end.code <= 255:
        raise ProtocolError(f"exit code {end.code}")
    if end.signal is not None and not 1 <= end.signal <= 64:
        raise ProtocolError(f"signal {end.signal}")
    if end.cause is not None and end.cause not in _CAUSES:
        raise ProtocolError("an exec ended by a cause that does not exist")
    usage = end.usage
    _counts(end.out_bytes, end.err_bytes, usage.wall_us, usage.user_us, usage.system_us, usage.max_rss_bytes)


def _session(state: agent.SessionState) -> None:
    _name(state.name)
    _counts(state.pid)
    if state.busy is not None:
        _exec_id(state.busy)


def _exec_id(text: str) -> None:
    try:
        parse_exec_id(text)
    except InvalidArgumentError as error:
        raise ProtocolError("an exec with an id that cannot be one") from error


def _name(text: str) -> None:
    try:
        parse_name(text)
    except InvalidArgumentError as error:
        raise ProtocolError("a session with a name that cannot be one") from error


def _text(what: str, text: str) -> None:
    if len(text) > TEXT_CHARS_MAX or not text.isprintable():
        raise ProtocolError(f"a {what} of {len(text)} characters")


def _counts(*counts: int) -> None:
    for count in counts:
        if not 0 <= count <= COUNT_MAX:
            raise ProtocolError("a count that is impossible")
