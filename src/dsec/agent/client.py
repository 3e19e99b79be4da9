"""A typed method for every operation of the agent, over one channel."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any, Final, TypeVar

from dsec.agent import checks
from dsec.agent.channel import REQUEST_TIMEOUT_S, AgentChannel, Connect
from dsec.agent.execs import ExecStream
from dsec.agent.streams import Shape
from dsec.agent.transfers import Download, Duplex, Upload, Watch
from dsec.core.clock import Clock
from dsec.core.errors import LimitError
from dsec.core.faults import fault_point
from dsec.core.limits import (
    CLOCK_LATE_S_MAX,
    CLOCK_TRIES_MAX,
    CREDIT_INITIAL_BYTES,
    DOWNLOAD_WINDOW_BYTES,
    LIST_ENTRIES_MAX,
    PREAMBLE_TIMEOUT_S,
)
from dsec.wire import agent
from dsec.wire.agent import Op
from dsec.wire.frames import Channel

T = TypeVar("T")

# Removing or moving a large tree takes the disk's time, not ours.
SLOW_TIMEOUT_S: Final = 600.0


class AgentClient:
    """The agent of one sandbox, as long as one connection lasts.

        client = await AgentClient.connect(instance.connect, sandbox=instance.id)
        stream = await client.exec(agent.Exec(id=new_exec_id(), argv=[b"uname"]))
        output = [data.payload async for data in stream]
        await client.exit_ack(stream.started.id)
        client.close()

    Every method raises, besides what it names: UnavailableError (the connection ended), ProtocolError (the agent broke
    the contract, and the channel is closed), DeadlineError (no answer), CapacityError (too many streams). Execs and
    sessions belong to the agent and outlive the connection; all other streams end with it.
    """

    def __init__(self, channel: AgentChannel, *, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.channel = channel
        self._timeout_s = timeout_s

    @classmethod
    async def connect(
        cls,
        connect: Connect,
        *,
        sandbox: str,
        open_timeout_s: float = PREAMBLE_TIMEOUT_S,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> AgentClient:
        """Opens a channel; it supersedes the one of before. Raises as `AgentChannel.open`."""
        channel = await AgentChannel.open(connect, sandbox=sandbox, timeout_s=open_timeout_s)
        return cls(channel, timeout_s=timeout_s)

    @property
    def hello(self) -> agent.HelloReply:
        return self.channel.hello

    def close(self) -> None:
        """Idempotent. Execs and sessions go on."""
        self.channel.close()

    # -- execs -------------------------------------------------------------------------------------

    async def exec(self, exec: agent.Exec) -> ExecStream:
        """Starts it, or attaches from offset 0 when the id is known (`started.existing`).

        Raises InvalidArgumentError (command, directory, user or limits; nothing has run), SessionNotFoundError,
        ConflictError (session busy), CapacityError (too many execs).
        """
        return await self._exec_stream(Op.EXEC, exec, exec.id, 0, 0)

    async def attach(self, id: str, *, out: int = 0, err: int = 0) -> ExecStream:
        """Output from these offsets on; it supersedes the exec's stream of before. Raises ExecNotFoundError."""
        return await self._exec_stream(Op.ATTACH, agent.Attach(id, out, err), id, out, err)

    async def detach(self, id: str) -> None:
        """Ends the exec's stream with ConflictError `detached`; the exec goes on."""
        await self._unary(Op.DETACH, agent.ExecRef(id))

    async def ack(self, id: str, *, out: int, err: int) -> None:
        """Everything below these offsets is recorded, and the agent may drop it."""
        await self._unary(Op.ACK, agent.Ack(id, out, err))

    async def exit_ack(self, id: str) -> None:
        """The end is recorded: the agent forgets the exec. Raises InvalidArgumentError while it runs."""
        await self._unary(Op.EXIT_ACK, agent.ExecRef(id))

    def exit_ack_later(self, id: str) -> None:
        """As `exit_ack`, soon, and nobody learns whether it came: the agent names the exec again if it did not."""
        self.channel.request_later(Op.EXIT_ACK, agent.ExecRef(id))

    async def signal(self, id: str, signal: int, *, tree: bool = False) -> None:
        """To the leader's process group, or to every process of the exec. Nothing when it has ended."""
        await self._unary(Op.SIGNAL, agent.Signal(id, signal, tree))

    async def kill(self, id: str) -> None:
        """Kills every process of the exec at once; its cause is `killed`. Nothing when it has ended."""
        await self._unary(Op.KILL, agent.ExecRef(id))

    async def resize(self, id: str, *, cols: int, rows: int) -> None:
        """Raises InvalidArgumentError when the exec has no terminal."""
        await self._unary(Op.RESIZE, agent.Resize(id, cols, rows))

    async def execs(self) -> list[agent.ExecState]:
        """Every exec that the agent knows, ended ones until `exit_ack`."""
        return (await self._request(Op.EXECS, {}, agent.ExecList, checks.check_exec_list)).execs

    # -- sessions ----------------------------------------------------------------------------------

    async def session_open(self, session: agent.SessionOpen) -> agent.SessionState:
        """Starts the shell, or gives the one of that name (`existing`)."""
        return await self._request(Op.SESSION_OPEN, session, agent.SessionState, checks.check_session(session.name))

    async def session_close(self, name: str) -> None:
        """Ends the shell and what runs in it. Raises SessionNotFoundError."""
        await self._unary(Op.SESSION_CLOSE, agent.SessionRef(name))

    async def sessions(self) -> list[agent.SessionState]:
        return (await self._request(Op.SESSIONS, {}, agent.SessionList, checks.check_sessions)).sessions

    # -- files: all raise PathNotFoundError, or FileError with the errno ------------------------------

    async def stat(self, args: agent.PathArgs) -> agent.FileStat:
        return await self._request(Op.STAT, args, agent.FileStat, checks.check_stat)

    async def list(self, args: agent.ListArgs) -> agent.ListReply:
        """One sorted page. `args.limit` is at most LIST_ENTRIES_MAX."""
        if not 1 <= args.limit <= LIST_ENTRIES_MAX:
            raise LimitError(f"a page has between 1 and {LIST_ENTRIES_MAX} entries, not {args.limit}")
        return await self._request(Op.LIST, args, agent.ListReply, checks.check_list(args))

    async def mkdir(self, args: agent.MkdirArgs) -> None:
        await self._unary(Op.MKDIR, args)

    async def move(self, args: agent.MoveArgs) -> None:
        await self._unary(Op.MOVE, args, SLOW_TIMEOUT_S)

    async def remove(self, args: agent.RemoveArgs) -> None:
        await self._unary(Op.REMOVE, args, SLOW_TIMEOUT_S)

    async def chmod(self, args: agent.ChmodArgs) -> None:
        await self._unary(Op.CHMOD, args)

    async def chown(self, args: agent.ChownArgs) -> None:
        await self._unary(Op.CHOWN, args)

    async def symlink(self, args: agent.SymlinkArgs) -> None:
        await self._unary(Op.SYMLINK, args)

    async def read(self, args: agent.ReadArgs) -> Download:
        """A regular file's bytes from `offset` on; anything else is a FileError."""
        shape = Shape(
            agent.FileStat, checks.check_stat, offsets=lambda _: {int(Channel.OUT): args.offset}, bytes_max=args.length
        )
        stream, stat = await self.channel.open_stream(Op.READ, args, shape, timeout_s=self._timeout_s)
        stream.widen(DOWNLOAD_WINDOW_BYTES - CREDIT_INITIAL_BYTES)
        return Download(stream, stat)

    async def archive(self, args: agent.PathArgs) -> Download:
        """A tar stream (pax) of a directory's content, or of one file."""
        shape = Shape(agent.FileStat, checks.check_stat, offsets=lambda _: {int(Channel.OUT): 0})
        stream, stat = await self.channel.open_stream(Op.ARCHIVE, args, shape, timeout_s=self._timeout_s)
        return Download(stream, stat)

    async def open_write(self, args: agent.WriteArgs) -> Upload:
        return await self._upload(Op.WRITE, args)

    async def open_extract(self, args: agent.ExtractArgs) -> Upload:
        return await self._upload(Op.EXTRACT, args)

    async def write(self, args: agent.WriteArgs, content: AsyncIterable[bytes] | bytes) -> agent.Written:
        """Replaces, patches or appends (see WriteArgs). A failing `content` leaves a replaced file as it was."""
        return await _send_all(await self.open_write(args), content)

    async def extract(self, args: agent.ExtractArgs, content: AsyncIterable[bytes] | bytes) -> agent.Written:
        """Unpacks a tar stream below `path`; no entry leaves it."""
        return await _send_all(await self.open_extract(args), content)

    async def watch(self, args: agent.WatchArgs) -> Watch:
        """Changes below a directory, from the moment of the reply on. Raises CapacityError (too many watches)."""
        shape = Shape(agent.Empty, event=agent.WatchEvent, event_check=checks.check_watch_event)
        stream, _ = await self.channel.open_stream(Op.WATCH, args, shape, timeout_s=self._timeout_s)
        return Watch(stream)

    async def open_connection(self, args: agent.ConnectArgs) -> Duplex:
        """To a port or socket inside the sandbox. Raises FileError with the errno, such as ECONNREFUSED."""
        shape = Shape(agent.Empty, offsets=lambda _: {int(Channel.OUT): 0}, both_end=True)
        stream, _ = await self.channel.open_stream(Op.CONNECT, args, shape, timeout_s=self._timeout_s)
        return Duplex(stream)

    async def listen(self, args: agent.ListenArgs) -> None:
        """On a port of the sandbox's loopback, until this connection ends; the same again is success. Raises FileError
        with the errno, such as EADDRINUSE; CapacityError."""
        await self._unary(Op.LISTEN, args)

    async def accept(self, args: agent.ListenArgs) -> Duplex:
        """The next connection to a port that is listened on, however long it takes."""
        shape = Shape(agent.Empty, offsets=lambda _: {int(Channel.OUT): 0}, both_end=True)
        stream, _ = await self.channel.open_stream(Op.ACCEPT, args, shape, timeout_s=None)
        return Duplex(stream)

    # -- the rest ----------------------------------------------------------------------------------

    async def usage(self) -> agent.UsageReply:
        return await self._request(Op.USAGE, {}, agent.UsageReply, checks.check_usage)

    async def clock(self, *, paused_s: float, wall_s: float | None = None) -> None:
        """After a pause: timeouts are extended by it."""
        fault_point("agent.clock")
        await self._unary(Op.CLOCK, agent.ClockArgs(paused_s, wall_s))

    async def set_time(self, clock: Clock, *, paused_s: float) -> None:
        """As `clock`, and the time of day: it is late by as much as the message was on its way, so one that took long
        is followed by another."""
        for _ in range(CLOCK_TRIES_MAX):
            sent_s = clock.monotonic_s()
            await self.clock(paused_s=paused_s, wall_s=clock.wall_s())
            paused_s = 0.0
            if clock.monotonic_s() - sent_s <= CLOCK_LATE_S_MAX:
                return

    async def claim(self, args: agent.ClaimArgs) -> None:
        """A spare agent serves `args.sandbox` from here on. Raises InvalidArgumentError when it is none."""
        await self._unary(Op.CLAIM, args)
        self.channel.sandbox = args.sandbox

    async def reseed(self, seed: bytes, *, another: bool = False) -> None:
        """Mixed into the kernel's random pool where the agent may.

        `another`: a machine that has gone on from a copy of somebody's memory. Its agent has another boot id then, is a
        spare until `claim`, and what runs belongs to nobody and stands still until then.
        """
        await self._unary(Op.RESEED, agent.ReseedArgs(seed, another))

    async def freeze_prepare(self) -> None:
        """The agent flushes its queued output before it is frozen, and holds its deadlines until `clock`."""
        fault_point("agent.freeze_prepare")
        await self._unary(Op.FREEZE_PREPARE, {})

    async def shutdown(self) -> None:
        """The agent ends everything and exits; the connection ends after the answer."""
        await self._unary(Op.SHUTDOWN, {})

    # -- inside ------------------------------------------------------------------------------------

    async def _request(self, op: Op, args: Any, reply: type[T], check: Any) -> T:
        return await self.channel.request(op, args, reply, check=check, timeout_s=self._timeout_s)

    async def _unary(self, op: Op, args: Any, timeout_s: float | None = None) -> None:
        await self.channel.request(op, args, agent.Empty, timeout_s=timeout_s or self._timeout_s)

    async def _exec_stream(self, op: Op, args: Any, id: str, out: int, err: int) -> ExecStream:
        shape = Shape(
            agent.ExecStarted,
            checks.check_started(id, out, err),
            offsets=lambda s: {int(Channel.OUT): s.out, int(Channel.ERR): s.err},
            end=agent.ExecEnded,
            end_check=checks.check_exec_end,
        )
        stream, started = await self.channel.open_stream(op, args, shape, timeout_s=self._timeout_s)
        return ExecStream(stream, started, out=out, err=err)

    async def _upload(self, op: Op, args: Any) -> Upload:
        shape = Shape(agent.Empty, end=agent.Written, end_check=checks.check_written)
        stream, _ = await self.channel.open_stream(op, args, shape, timeout_s=self._timeout_s)
        return Upload(stream)


async def _send_all(upload: Upload, content: AsyncIterable[bytes] | bytes) -> agent.Written:
    async with upload:
        if isinstance(content, bytes):
            await upload.send(content)
        else:
            async for piece in content:
                await upload.send(piece)
        return await upload.finish()
