"""Private names within a job: sockets on a sandbox's loopback, relayed to ports of the others over their agents.

The sandbox has no other network. What comes out of either side is bytes for the other, and nothing else.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dsec.core import limits
from dsec.core.errors import DsecError, LaunchError
from dsec.core.spec import Link, link_addresses
from dsec.core.states import SandboxState
from dsec.observe.logs import get_logger
from dsec.wire import agent

if TYPE_CHECKING:
    from dsec.agent.transfers import Duplex
    from dsec.backends.base import Instance
    from dsec.node.registry import Registry
    from dsec.node.services import Sleep
    from dsec.node.supervisor import Supervisor
    from dsec.node.tasks import Tasks

log = get_logger(__name__)

_RETRY_S: Final = 5.0
_ACCEPT_AGAIN_S: Final = 1.0
_CONNECT_S: Final = 30.0  # to a port inside: one that drops what comes must not hold a place for ever
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: closing says that it was refused, and not that all was sent


class NodeLinks:
    def __init__(self, registry: Registry, tasks: Tasks, sleep: Sleep, *, is_paused: Callable[[str], bool]) -> None:
        """`is_paused`: of a job by its id, by its last order."""
        self._registry = registry
        self._is_paused = is_paused
        self._tasks = tasks
        self._sleep = sleep
        self._open: dict[str, asyncio.Task[None]] = {}

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
                except OSError as error:
                    raise LaunchError(
                        f"the link to {link.name}:{link.port} cannot be made: {error.strerror}",
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
        if row.spec.job is None:
            return None
        wanted = (name, row.spec.job_id)
        for one in self._registry.of_job(row.project, row.spec.job):
            if (one.row.spec.member, one.row.spec.job_id) == wanted and not one.ended:
                return one
        return None

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


class _Listening:
    """The links of one instance."""

    def __init__(self, links: NodeLinks, sandbox: Supervisor, instance: Instance) -> None:
        self._links = links
        self._sandbox = sandbox
        self._instance = instance
        self._addresses = link_addresses(sandbox.row.spec)
        self._sockets: dict[Link, socket.socket] = {}
        self._room = asyncio.Semaphore(limits.LINK_CONNECTIONS_MAX)

    async def listen(self, link: Link) -> socket.socket:
        found = await self._instance.listen(self._addresses[link.name], link.port)
        self._sockets[link] = found
        return found

    def close(self) -> None:
        for found in self._sockets.values():
            found.close()
        self._sockets.clear()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for link in self._sandbox.row.spec.links:
                group.create_task(self._serve(link, group))

    async def _serve(self, link: Link, group: asyncio.TaskGroup) -> None:
        listening = self._sockets.get(link)
        while listening is None:
            try:
                listening = await self.listen(link)
            except (OSError, DsecError) as error:
                if self._sandbox.ended or self._sandbox.instance is not self._instance:
                    return
                log.warning("a link is tried again", sandbox=self._sandbox.id, port=link.port, error=str(error))
                await self._links.retry()
        loop = asyncio.get_running_loop()
        while True:
            # What has no room waits in the kernel, which bounds it.
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                self._room.release()
                log.warning("a link does not accept", sandbox=self._sandbox.id, error=str(error))
                await asyncio.sleep(_ACCEPT_AGAIN_S)  # of descriptors there are too few, say
                continue
            except BaseException:
                self._room.release()
                raise
            relay = group.create_task(self._relay(link, connection))
            # Also of one that is cancelled before it has begun.
            relay.add_done_callback(partial(_closed, connection))

    async def _relay(self, link: Link, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError, DsecError, TimeoutError):
                connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _RESET
                )  # until it is known that all was sent
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                target = self._links.target(self._sandbox, link.name)
                if target is None or target.state is SandboxState.CREATING or not self._links.may_wake(target):
                    return
                async with target.operating(short=False) as client:
                    async with asyncio.timeout(_CONNECT_S):
                        inside = await client.open_connection(agent.ConnectArgs(port=link.port))
                    async with inside:
                        await _pump(connection, inside)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        finally:
            self._room.release()


def _closed(connection: socket.socket, _: asyncio.Task[None]) -> None:
    connection.close()


async def _pump(connection: socket.socket, inside: Duplex) -> None:
    """Until both sides have ended. Raises what ends one of them before; the other is cut then."""
    loop = asyncio.get_running_loop()

    async def up() -> None:
        while data := await loop.sock_recv(connection, limits.LINK_CHUNK_BYTES):
            await inside.send(data)
        inside.send_end()

    async def down() -> None:
        while (piece := await inside.receive()) is not None:
            await loop.sock_sendall(connection, piece)
        connection.shutdown(socket.SHUT_WR)

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
