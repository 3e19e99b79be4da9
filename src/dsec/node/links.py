"""Private names within a job: sockets on a sandbox's loopback, relayed to ports of the others over their agents; those
of a group on other nodes are reached through these.

The sandbox has no other network. What comes out of either side is bytes for the other, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from dsec.core import limits
from dsec.core.errors import DsecError, FileError, LaunchError, NotFoundError, UnavailableError
from dsec.core.spec import Link, link_addresses
from dsec.core.states import SandboxState
from dsec.node.farlinks import FarConnection, InPieces
from dsec.node.linkdoors import AgentDoor, Arrived, Door, SocketDoor, name_inside
from dsec.node.streams import relay
from dsec.observe.logs import get_logger
from dsec.wire import agent
from dsec.wire.peers import LinkDial

if TYPE_CHECKING:
    from dsec.backends.base import Instance
    from dsec.node.farlinks import Far
    from dsec.node.registry import Registry
    from dsec.node.services import Sleep
    from dsec.node.supervisor import Supervisor
    from dsec.node.tasks import Tasks
    from dsec.wire.node import Stream

log = get_logger(__name__)

_RETRY_S: Final = 5.0
_ACCEPT_AGAIN_S: Final = 1.0
_CONNECT_S: Final = 30.0  # to a port inside: one that drops what comes must not hold a place for ever


class NodeLinks:
    def __init__(self, registry: Registry, tasks: Tasks, sleep: Sleep, *, is_paused: Callable[[str], bool]) -> None:
        """`is_paused`: of a job by its id, by its last order."""
        self._registry = registry
        self._is_paused = is_paused
        self._tasks = tasks
        self._sleep = sleep
        self._open: dict[str, asyncio.Task[None]] = {}
        self.far: Far | None = None  # other nodes, where there are some

    async def open(self, sandbox: Supervisor) -> None:
        """All its links listen when this returns; those of an instance before are closed.

        Raises LaunchError when a port is taken, or the instance has ended.
        """
        if not sandbox.row.spec.links:
            return
        assert sandbox.instance is not None
        self.drop(sandbox.id)
        work = _Listening(self, sandbox, sandbox.instance)
        try:
            for link in sandbox.row.spec.links:
                try:
                    await work.listen(link)
                except (OSError, FileError) as error:
                    why = error.strerror if isinstance(error, OSError) else error.message
                    raise LaunchError(
                        f"the link to {link.name}:{link.port} cannot be made: {why}",
                        step="links",
                        sandbox=sandbox.id,
                        hint="does the sandbox itself listen on that port?",
                    ) from error
        except BaseException:
            work.close()
            raise
        self._serve(sandbox.id, work)

    def reopen(self, sandbox: Supervisor) -> None:
        """After a restart of the node, and in the background: a port that is taken meanwhile is tried again."""
        if sandbox.row.spec.links and sandbox.instance is not None:
            self._serve(sandbox.id, _Listening(self, sandbox, sandbox.instance))

    def drop(self, id: str) -> None:
        """The instance has ended."""
        task = self._open.pop(id, None)
        if task is not None:
            task.cancel()

    def target(self, source: Supervisor, name: str) -> Supervisor | None:
        """The sandbox of its project and job that is called so; None: there is none on this node now."""
        row = source.row
        return None if row.spec.job is None else self._find(row.project, row.spec.job, row.spec.job_id, name)

    def _find(self, project: str, job: str, job_id: str | None, name: str) -> Supervisor | None:
        for one in self._registry.of_job(project, job):
            if (one.row.spec.member, one.row.spec.job_id) == (name, job_id) and not one.ended:
                return one
        return None

    # -- for other nodes ---------------------------------------------------------------------------

    def has(self, dial: LinkDial) -> bool:
        """See `cluster.peers.Here`."""
        return self._find(dial.project, dial.job, dial.id, dial.target) is not None

    async def answer(self, dial: LinkDial, stream: Stream) -> None:
        target = self._find(dial.project, dial.job, dial.id, dial.target)
        if target is None or not self.is_there(target):
            raise UnavailableError(f"{dial.target} does not run now")
        async with target.operating(short=False) as client:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    inside = await client.open_connection(agent.ConnectArgs(port=dial.port))
            except TimeoutError:
                raise UnavailableError(f"{dial.target} does not take the connection") from None
            await relay(InPieces(inside), stream)

    # -- the sandboxes -----------------------------------------------------------------------------

    def is_there(self, target: Supervisor) -> bool:
        return target.state is not SandboxState.CREATING and self.may_wake(target)

    def may_wake(self, target: Supervisor) -> bool:
        """What of a job still runs while it is being paused must not let the rest of it go on."""
        job = target.row.spec.job_id
        return target.state is SandboxState.RUNNING or job is None or not self._is_paused(job)

    async def retry(self) -> None:
        await self._sleep(_RETRY_S)

    def _serve(self, id: str, work: _Listening) -> None:
        self.drop(id)
        try:
            task = self._tasks.spawn(work.run())
        except DsecError:
            work.close()
            raise
        # Closed whether it has begun to run or was cancelled before.
        task.add_done_callback(lambda _: work.close())
        self._open[id] = task


class _Bytes(Protocol):
    async def receive(self) -> bytes | None: ...

    async def send(self, data: bytes) -> None: ...


class _Listening:
    """The links of one instance."""

    def __init__(self, links: NodeLinks, sandbox: Supervisor, instance: Instance) -> None:
        self._links = links
        self._sandbox = sandbox
        self._instance = instance
        self._addresses = link_addresses(sandbox.row.spec)
        self._doors: dict[Link, Door] = {}
        self._room = asyncio.Semaphore(limits.LINK_CONNECTIONS_MAX)

    async def listen(self, link: Link) -> Door:
        address = self._addresses[link.name]
        door: Door
        if self._sandbox.backend.capabilities.links:
            door = SocketDoor(await self._instance.listen(address, link.port))
        else:
            door = AgentDoor(self._sandbox, address, link.port)
            client = await door.open()
            if link == self._sandbox.row.spec.links[0]:
                await name_inside(client, self._addresses)
        self._doors[link] = door
        return door

    def close(self) -> None:
        for found in self._doors.values():
            found.close()
        self._doors.clear()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for link in self._sandbox.row.spec.links:
                group.create_task(self._serve(link, group))

    async def _serve(self, link: Link, group: asyncio.TaskGroup) -> None:
        door = self._doors.get(link)
        while door is None:
            try:
                door = await self.listen(link)
            except (OSError, DsecError) as error:
                if self._is_over():
                    return
                log.warning("a link is tried again", sandbox=self._sandbox.id, port=link.port, error=str(error))
                await self._links.retry()
        while True:
            # What has no room waits in the kernel, which bounds it.
            await self._room.acquire()
            try:
                connection = await door.accept()
            except (OSError, DsecError) as error:
                self._room.release()
                if self._is_over():
                    return
                # Of descriptors there are too few, say; or a machine sleeps on the disk until it is resumed.
                if self._sandbox.state is SandboxState.RUNNING:
                    log.warning("a link does not accept", sandbox=self._sandbox.id, error=str(error))
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            except BaseException:
                self._room.release()
                raise
            relay = group.create_task(self._relay(link, connection))
            # Also of one that is cancelled before it has begun.
            relay.add_done_callback(partial(_closed, connection))

    def _is_over(self) -> bool:
        return self._sandbox.ended or self._sandbox.instance is not self._instance

    async def _relay(self, link: Link, connection: Arrived) -> None:
        try:
            with closing(connection), suppress(OSError, DsecError, TimeoutError):
                target = self._links.target(self._sandbox, link.name)
                if target is None:
                    await self._relay_far(link, connection)
                elif self._links.is_there(target):
                    await self._relay_here(target, link, connection)
                else:
                    return
                connection.whole()
        finally:
            self._room.release()

    async def _relay_here(self, target: Supervisor, link: Link, connection: Arrived) -> None:
        async with target.operating(short=False) as client:
            async with asyncio.timeout(_CONNECT_S):
                inside = await client.open_connection(agent.ConnectArgs(port=link.port))
            async with inside:

                async def end() -> None:
                    inside.send_end()

                await _pump(connection, inside, end)

    async def _relay_far(self, link: Link, connection: Arrived) -> None:
        """Raises DsecError."""
        row, far = self._sandbox.row, self._links.far
        if far is None or row.spec.job is None or row.spec.job_id is None or row.spec.member is None:
            raise NotFoundError(f"there is no {link.name} on this node")
        dial = LinkDial(
            project=row.project,
            job=row.spec.job,
            id=row.spec.job_id,
            source=row.spec.member,
            target=link.name,
            port=link.port,
        )
        async with asyncio.timeout(_CONNECT_S):
            there = FarConnection(await far.dial(dial))
        async with there:
            async with asyncio.timeout(_CONNECT_S):
                await there.begun()
            await _pump(connection, there, there.end)


def _closed(connection: Arrived, _: asyncio.Task[None]) -> None:
    connection.close()


async def _pump(connection: Arrived, inside: _Bytes, end: Callable[[], Awaitable[None]]) -> None:
    """Until both sides have ended. Raises what ends one of them before; the other is cut then."""

    async def up() -> None:
        while data := await connection.receive():
            await inside.send(data)
        await end()

    async def down() -> None:
        while (piece := await inside.receive()) is not None:
            await connection.send(piece)
        await connection.end()

    await _both(up, down)


async def _both(*works: Callable[[], Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
