"""The agent of a fake sandbox: every operation of docs/internals/protocol.md, in memory."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from dsec.backends.fake.connection import AgentConnection, ServerStream
from dsec.backends.fake.execs import FakeExec, World
from dsec.backends.fake.failures import AgentFailure
from dsec.backends.fake.files import FileTree
from dsec.backends.fake.ports import Ports
from dsec.backends.fake.starts import FakeSession, prepare_exec, prepare_session
from dsec.backends.fake.transfers import connect_echo, extract_tar, read_file, send_archive, watch_tree, write_file
from dsec.backends.fake.users import find_account, find_group, user_of
from dsec.core.errors import ProtocolError
from dsec.core.faults import fault_point
from dsec.core.limits import (
    DATA_BYTES_MAX,
    EXECS_KEPT_MAX,
    EXECS_LIVE_MAX,
    LIST_ENTRIES_MAX,
    SESSIONS_MAX,
    WATCHES_MAX,
)
from dsec.wire import agent
from dsec.wire.agent import Op
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import Channel

VERSION: Final = "fake"
_OF_A_SPARE: Final = frozenset({Op.CLAIM, Op.USAGE, Op.SHUTDOWN})


class Sandbox(World, Protocol):
    """What the agent needs of the sandbox that it is in."""

    @property
    def env(self) -> dict[bytes, bytes]: ...

    @property
    def user(self) -> str | None: ...

    @property
    def workdir(self) -> bytes | None: ...

    @property
    def orphans_live(self) -> int: ...

    def wall_s(self) -> float: ...

    def wall_ns(self) -> int: ...

    def listen(self, address: str, port: int) -> socket.socket: ...

    def first_files(self, now_ns: Callable[[], int]) -> FileTree: ...

    @property
    def spare(self) -> bool: ...

    def claimed(self, args: agent.ClaimArgs) -> None: ...

    def agent_exited(self) -> None: ...


class FakeAgent:
    """Lives as long as its sandbox. The newest connection wins; execs and sessions outlive connections."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.boot_id = secrets.token_hex(8)
        self.files = sandbox.first_files(sandbox.wall_ns)
        if not self.files.exists(b"/home/user"):
            self.files.mkdir(b"/home/user", parents=True)
            self.files.chown(b"/home/user", uid=1000, gid=1000, follow=True)
        self.execs: dict[str, FakeExec] = {}
        self.sessions: dict[str, FakeSession] = {}
        self.paused_s = 0.0
        self._ports = Ports(sandbox.listen)
        self._connection: AgentConnection | None = None
        self._connections: set[AgentConnection] = set()
        self._watches = 0
        self._last_pid = 1

    # -- the connection ----------------------------------------------------------------------------

    def connection(self) -> AgentConnection:
        connection = AgentConnection(self)
        self._connections.add(connection)
        return connection

    def opened(self, connection: AgentConnection) -> None:
        old, self._connection = self._connection, connection
        if old is not None and old is not connection:
            for exec in self.execs.values():
                exec.reader = None
            self._ports.close()
            old.abort()

    def lost(self, connection: AgentConnection) -> None:
        self._connections.discard(connection)
        if connection is self._connection:
            self._connection = None
            self._ports.close()
            for exec in self.execs.values():
                exec.reader = None

    def drop_connections(self) -> None:
        for connection in list(self._connections):
            connection.abort()

    def pause_connections(self) -> None:
        for connection in self._connections:
            connection.pause()

    def resume_connections(self) -> None:
        for connection in self._connections:
            connection.resume()

    def hello(self) -> agent.HelloReply:
        return agent.HelloReply(agent.GENERATION_MAX, VERSION, self.boot_id, self._states(), ["listen"])

    def request(self, stream: ServerStream, op: str, args: Any) -> None:
        try:
            fault_point(f"fake.agent.{op}")
        except OSError as error:
            raise ProtocolError("the connection breaks here") from error
        try:
            handler = _HANDLERS.get(op)
            if handler is None:
                raise AgentFailure("unknown_op", f"there is no operation {op[:40]!r}")
            if self.sandbox.spare and op not in _OF_A_SPARE:
                raise AgentFailure("invalid", "this agent serves no sandbox yet")
            handler(self, stream, _decode(args, _ARGS[Op(op)]))
        except AgentFailure as failure:
            stream.fail(failure)

    # -- execs -------------------------------------------------------------------------------------

    def start_exec(self, stream: ServerStream, request: agent.Exec) -> None:
        known = self.execs.get(request.id)
        if known is not None:
            self._attach(stream, known, 0, 0, existing=True)
            return
        live = sum(exec.end is None for exec in self.execs.values())
        if live >= EXECS_LIVE_MAX or len(self.execs) - live >= EXECS_KEPT_MAX:
            raise AgentFailure("too_many_execs", f"{live} execs run and {len(self.execs) - live} are kept")
        started = prepare_exec(self, request, self.next_pid())
        self.execs[request.id] = started.exec
        self._attach(stream, started.exec, 0, 0, existing=False)
        started.exec.start(started.process, started.main, self._exec_ended)
        if request.session is not None:
            self.sessions[request.session].busy = request.id

    def attach(self, stream: ServerStream, args: agent.Attach) -> None:
        self._attach(stream, self._exec(args.id), args.out, args.err, existing=True)

    def _attach(self, stream: ServerStream, exec: FakeExec, out: int, err: int, *, existing: bool) -> None:
        if isinstance(exec.reader, ExecReader):
            exec.reader.leave(AgentFailure("superseded", "another stream reads this exec now"))
        out, err = max(out, exec.out.acked), max(err, exec.err.acked)
        stream.reply(
            agent.ExecStarted(id=exec.id, pid=exec.pid, existing=existing, stdin=exec.stdin.taken, out=out, err=err)
        )
        exec.reader = ExecReader(stream, exec, out, err)
        exec.reader.pump()

    def detach(self, stream: ServerStream, args: agent.ExecRef) -> None:
        exec = self._exec(args.id)
        if isinstance(exec.reader, ExecReader):
            exec.reader.leave(AgentFailure("detached", "detached by the host"))
        stream.reply(agent.Empty(), last=True)

    def ack(self, stream: ServerStream, args: agent.Ack) -> None:
        if args.out < 0 or args.err < 0:
            raise AgentFailure("invalid", "an offset is negative")
        self._exec(args.id).ack(args.out, args.err)
        stream.reply(agent.Empty(), last=True)

    def exit_ack(self, stream: ServerStream, args: agent.ExecRef) -> None:
        exec = self.execs.get(args.id)
        if exec is not None and exec.end is None:
            raise AgentFailure("invalid", f"{args.id} has not ended")
        if exec is not None:
            if isinstance(exec.reader, ExecReader):
                exec.reader.leave(AgentFailure("detached", "its end was acknowledged"))
            del self.execs[args.id]
        stream.reply(agent.Empty(), last=True)

    def signal(self, stream: ServerStream, args: agent.Signal) -> None:
        if not 0 <= args.signal <= 64:
            raise AgentFailure("invalid", f"there is no signal {args.signal}", "EINVAL")
        self._exec(args.id).signal(args.signal)
        stream.reply(agent.Empty(), last=True)

    def kill(self, stream: ServerStream, args: agent.ExecRef) -> None:
        self._exec(args.id).kill("killed")
        stream.reply(agent.Empty(), last=True)

    def resize(self, stream: ServerStream, args: agent.Resize) -> None:
        exec = self._exec(args.id)
        if not (1 <= args.cols <= 65_535 and 1 <= args.rows <= 65_535):
            raise AgentFailure("invalid", "a terminal of that size cannot be")
        if not exec.resize(args.cols, args.rows):
            raise AgentFailure("invalid", f"{args.id} has no terminal")
        stream.reply(agent.Empty(), last=True)

    def list_execs(self, stream: ServerStream, args: Nothing) -> None:
        stream.reply(agent.ExecList(self._states()), last=True)

    def _exec(self, id: str) -> FakeExec:
        exec = self.execs.get(id)
        if exec is None:
            raise AgentFailure("exec_not_found", f"there is no exec {id[:40]!r}")
        return exec

    def _exec_ended(self, exec: FakeExec) -> None:
        session = self.sessions.get(exec.session) if exec.session is not None else None
        if session is not None:
            session.busy = None
            if exec.session_ended:
                del self.sessions[session.name]

    def _states(self) -> list[agent.ExecState]:
        return [
            agent.ExecState(
                id=exec.id,
                pid=exec.pid,
                out=exec.out.produced,
                err=exec.err.produced,
                stdin=exec.stdin.taken,
                end=exec.end,
                session=exec.session,
            )
            for exec in self.execs.values()
        ]

    def next_pid(self) -> int:
        self._last_pid += 1
        return self._last_pid

    # -- sessions ----------------------------------------------------------------------------------

    def open_session(self, stream: ServerStream, args: agent.SessionOpen) -> None:
        session = self.sessions.get(args.name)
        existing = session is not None
        if session is None:
            if len(self.sessions) >= SESSIONS_MAX:
                raise AgentFailure("too_many_sessions", f"{SESSIONS_MAX} sessions are open")
            session = prepare_session(self, args, self.next_pid())
            self.sessions[args.name] = session
        stream.reply(session.state(existing=existing), last=True)

    def close_session(self, stream: ServerStream, args: agent.SessionRef) -> None:
        session = self.sessions.pop(args.name, None)
        if session is None:
            raise AgentFailure("session_not_found", f"there is no session {args.name[:40]!r}")
        if session.busy is not None:
            exec = self._exec(session.busy)
            exec.session_ended = True
            exec.kill("killed")
        stream.reply(agent.Empty(), last=True)

    def list_sessions(self, stream: ServerStream, args: Nothing) -> None:
        states = [session.state() for session in self.sessions.values()]
        stream.reply(agent.SessionList(states), last=True)

    # -- files -------------------------------------------------------------------------------------

    def stat(self, stream: ServerStream, args: agent.PathArgs) -> None:
        stream.reply(self.files.stat(args.path, follow=args.follow, user=user_of(args.user)), last=True)

    def list_files(self, stream: ServerStream, args: agent.ListArgs) -> None:
        if not 1 <= args.limit <= LIST_ENTRIES_MAX:
            raise AgentFailure("invalid", f"a page of {args.limit} entries")
        entries = self.files.list(args.path, user=user_of(args.user))
        if args.after is not None:
            entries = [entry for entry in entries if entry.name > args.after]
        stream.reply(agent.ListReply(entries[: args.limit], len(entries) > args.limit), last=True)

    def mkdir(self, stream: ServerStream, args: agent.MkdirArgs) -> None:
        self.files.mkdir(args.path, parents=args.parents, mode=args.mode, user=user_of(args.user))
        stream.reply(agent.Empty(), last=True)

    def move(self, stream: ServerStream, args: agent.MoveArgs) -> None:
        self.files.move(args.source, args.target, replace=args.replace, user=user_of(args.user))
        stream.reply(agent.Empty(), last=True)

    def remove(self, stream: ServerStream, args: agent.RemoveArgs) -> None:
        user = user_of(args.user)
        self.files.remove(args.path, recursive=args.recursive, missing_ok=args.missing_ok, user=user)
        stream.reply(agent.Empty(), last=True)

    def chmod(self, stream: ServerStream, args: agent.ChmodArgs) -> None:
        self.files.chmod(args.path, args.mode, user=user_of(args.user))
        stream.reply(agent.Empty(), last=True)

    def chown(self, stream: ServerStream, args: agent.ChownArgs) -> None:
        uid = None if args.owner is None else find_account(args.owner).uid
        gid = None if args.group is None else find_group(args.group)
        self.files.chown(args.path, uid=uid, gid=gid, follow=args.follow)
        stream.reply(agent.Empty(), last=True)

    def symlink(self, stream: ServerStream, args: agent.SymlinkArgs) -> None:
        self.files.symlink(args.path, args.target, user=user_of(args.user))
        stream.reply(agent.Empty(), last=True)

    def read(self, stream: ServerStream, args: agent.ReadArgs) -> None:
        stream.run(read_file(stream, self.files, args))

    def write(self, stream: ServerStream, args: agent.WriteArgs) -> None:
        write_file(stream, self.files, args)

    def archive(self, stream: ServerStream, args: agent.PathArgs) -> None:
        stream.run(send_archive(stream, self.files, args))

    def extract(self, stream: ServerStream, args: agent.ExtractArgs) -> None:
        extract_tar(stream, self.files, args)

    def watch(self, stream: ServerStream, args: agent.WatchArgs) -> None:
        if self._watches >= WATCHES_MAX:
            raise AgentFailure("too_many_watches", f"{WATCHES_MAX} watches are open")

        def over() -> None:
            self._watches -= 1

        watch_tree(stream, self.files, args, over)
        self._watches += 1

    # -- the rest ----------------------------------------------------------------------------------

    def connect(self, stream: ServerStream, args: agent.ConnectArgs) -> None:
        connect_echo(stream, self.files, args)

    def listen(self, stream: ServerStream, args: agent.ListenArgs) -> None:
        self._ports.listen(stream, args)

    def accept(self, stream: ServerStream, args: agent.ListenArgs) -> None:
        self._ports.accept(stream, args)

    def usage(self, stream: ServerStream, args: Nothing) -> None:
        live = sum(exec.end is None for exec in self.execs.values())
        reply = agent.UsageReply(
            processes=1 + live + len(self.sessions) + self.sandbox.orphans_live,
            execs=live,
            sessions=len(self.sessions),
            disk_used_bytes=self.files.used_bytes,
        )
        stream.reply(reply, last=True)

    def clock(self, stream: ServerStream, args: agent.ClockArgs) -> None:
        # The fake's timers count unfrozen time by themselves; what was told is kept for tests to see.
        self.paused_s += args.paused_s
        stream.reply(agent.Empty(), last=True)

    def claim(self, stream: ServerStream, args: agent.ClaimArgs) -> None:
        if not self.sandbox.spare:
            raise AgentFailure("invalid", "this agent serves a sandbox already")
        self.sandbox.claimed(args)
        stream.reply(agent.Empty(), last=True)

    def reseed(self, stream: ServerStream, args: agent.ReseedArgs) -> None:
        stream.reply(agent.Empty(), last=True)

    def freeze_prepare(self, stream: ServerStream, args: Nothing) -> None:
        for exec in self.execs.values():
            if exec.reader is not None:
                exec.reader.pump()
        stream.reply(agent.Empty(), last=True)

    def shutdown(self, stream: ServerStream, args: Nothing) -> None:
        stream.reply(agent.Empty(), last=True)
        if self._connection is not None:
            self._connection.close()
        self.sandbox.agent_exited()


class ExecReader:
    """The one stream that reads an exec: sends what is retained from its positions on, as credit allows."""

    def __init__(self, stream: ServerStream, exec: FakeExec, out: int, err: int) -> None:
        self._stream = stream
        self._exec = exec
        self._at = {Channel.OUT: out, Channel.ERR: err}
        stream.skips = True
        stream.on_credit = self.pump
        stream.on_cancel = self._cancelled
        stream.on_data = self._stdin
        stream.on_end = self._stdin_end
        exec.stdin.on_read = stream.grant

    def pump(self) -> None:
        while self._stream.open and self._stream.credit > 0:
            pieces = [
                (piece, channel)
                for channel, kept in ((Channel.OUT, self._exec.out), (Channel.ERR, self._exec.err))
                if (piece := kept.at(self._at[channel])) is not None
            ]
            if not pieces:
                if self._exec.end is not None:
                    self._exec.reader = None
                    self._stream.end(agent.ExecEnded(self._exec.end))
                return
            piece, channel = min(pieces, key=lambda found: found[0].sequence)
            size = min(len(piece.data), self._stream.credit, DATA_BYTES_MAX)
            self._at[channel] += size
            self._stream.data(channel, piece.offset, piece.sequence, piece.data[:size])

    def leave(self, failure: AgentFailure) -> None:
        self._exec.reader = None
        self._stream.fail(failure)

    def _cancelled(self) -> None:
        if self._exec.reader is self:
            self._exec.reader = None

    def _stdin(self, offset: int, data: bytes) -> None:
        if not self._exec.request.stdin:
            raise ProtocolError("stdin for an exec that has none")
        if not self._exec.stdin.feed(offset, data):
            self.leave(AgentFailure("stdin_gap", f"stdin goes on at {self._exec.stdin.taken}, not at {offset}"))

    def _stdin_end(self) -> None:
        self._exec.stdin.end()


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of an operation that has none."""


def _decode(args: Any, kind: type[Any]) -> Any:
    try:
        return unpack(pack(args), kind)
    except ProtocolError as error:
        raise AgentFailure("invalid", error.message) from error


_ARGS: Final[dict[Op, type[Any]]] = {
    Op.EXEC: agent.Exec,
    Op.ATTACH: agent.Attach,
    Op.DETACH: agent.ExecRef,
    Op.ACK: agent.Ack,
    Op.EXIT_ACK: agent.ExecRef,
    Op.SIGNAL: agent.Signal,
    Op.KILL: agent.ExecRef,
    Op.RESIZE: agent.Resize,
    Op.EXECS: Nothing,
    Op.SESSION_OPEN: agent.SessionOpen,
    Op.SESSION_CLOSE: agent.SessionRef,
    Op.SESSIONS: Nothing,
    Op.STAT: agent.PathArgs,
    Op.LIST: agent.ListArgs,
    Op.READ: agent.ReadArgs,
    Op.WRITE: agent.WriteArgs,
    Op.MKDIR: agent.MkdirArgs,
    Op.MOVE: agent.MoveArgs,
    Op.REMOVE: agent.RemoveArgs,
    Op.CHMOD: agent.ChmodArgs,
    Op.CHOWN: agent.ChownArgs,
    Op.SYMLINK: agent.SymlinkArgs,
    Op.ARCHIVE: agent.PathArgs,
    Op.EXTRACT: agent.ExtractArgs,
    Op.WATCH: agent.WatchArgs,
    Op.CONNECT: agent.ConnectArgs,
    Op.LISTEN: agent.ListenArgs,
    Op.ACCEPT: agent.ListenArgs,
    Op.USAGE: Nothing,
    Op.CLOCK: agent.ClockArgs,
    Op.RESEED: agent.ReseedArgs,
    Op.CLAIM: agent.ClaimArgs,
    Op.FREEZE_PREPARE: Nothing,
    Op.SHUTDOWN: Nothing,
}
_HANDLERS: Final[dict[str, Callable[[FakeAgent, ServerStream, Any], None]]] = {
    Op.EXEC: FakeAgent.start_exec,
    Op.ATTACH: FakeAgent.attach,
    Op.DETACH: FakeAgent.detach,
    Op.ACK: FakeAgent.ack,
    Op.EXIT_ACK: FakeAgent.exit_ack,
    Op.SIGNAL: FakeAgent.signal,
    Op.KILL: FakeAgent.kill,
    Op.RESIZE: FakeAgent.resize,
    Op.EXECS: FakeAgent.list_execs,
    Op.SESSION_OPEN: FakeAgent.open_session,
    Op.SESSION_CLOSE: FakeAgent.close_session,
    Op.SESSIONS: FakeAgent.list_sessions,
    Op.STAT: FakeAgent.stat,
    Op.LIST: FakeAgent.list_files,
    Op.READ: FakeAgent.read,
    Op.WRITE: FakeAgent.write,
    Op.MKDIR: FakeAgent.mkdir,
    Op.MOVE: FakeAgent.move,
    Op.REMOVE: FakeAgent.remove,
    Op.CHMOD: FakeAgent.chmod,
    Op.CHOWN: FakeAgent.chown,
    Op.SYMLINK: FakeAgent.symlink,
    Op.ARCHIVE: FakeAgent.archive,
    Op.EXTRACT: FakeAgent.extract,
    Op.WATCH: FakeAgent.watch,
    Op.CONNECT: FakeAgent.connect,
    Op.LISTEN: FakeAgent.listen,
    Op.ACCEPT: FakeAgent.accept,
    Op.USAGE: FakeAgent.usage,
    Op.CLOCK: FakeAgent.clock,
    Op.RESEED: FakeAgent.reseed,
    Op.CLAIM: FakeAgent.claim,
    Op.FREEZE_PREPARE: FakeAgent.freeze_prepare,
    Op.SHUTDOWN: FakeAgent.shutdown,
}
