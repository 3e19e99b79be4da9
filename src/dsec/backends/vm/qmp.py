"""A monitor's control socket (QEMU's docs/interop/qmp-spec.rst). What answers there runs a hostile guest, so nothing of
it is believed beyond its form, and everything is bounded."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from pathlib import Path
from typing import Any, Final

from dsec.core.errors import DeadlineError, HostError, InvalidArgumentError
from dsec.core.faults import fault_point
from dsec.wire.codec import from_json, to_json

_LINE_BYTES_MAX: Final = 1 << 20
_EVENTS_PASSED_MAX: Final = 10_000  # while one answer is waited for
_SHOWN: Final = 300


class MonitorError(HostError):
    """The monitor refused a command, or its end of the socket is gone."""


class Monitor:
    """One connection. Commands go one at a time; the monitor serves one connection at a time, too."""

    def __init__(self, connection: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connection = connection
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def connect(cls, path: Path, *, timeout_s: float, owner: int) -> Monitor:
        """Raises MonitorError; DeadlineError when nobody greets in time."""
        connection = await connect_socket(path, timeout_s=timeout_s, owner=owner)
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_LINE_BYTES_MAX)
        monitor = cls(connection, reader, writer)
        try:
            async with asyncio.timeout(timeout_s):
                await monitor._line()
                await monitor.execute("qmp_capabilities", timeout_s=timeout_s)
        except TimeoutError as error:
            monitor.close()
            raise DeadlineError(f"the monitor at {path.name} did not greet within {timeout_s:g} s") from error
        except BaseException:
            monitor.close()
            raise
        return monitor

    async def execute(self, command: str, arguments: dict[str, Any] | None = None, *, timeout_s: float = 30.0) -> Any:
        """Its answer. Raises MonitorError with the monitor's words, or DeadlineError: it may still be done."""
        fault_point(f"vm.qmp.{command}")
        message = {"execute": command, **({"arguments": arguments} if arguments else {})}
        async with self._turn:
            try:
                async with asyncio.timeout(timeout_s):
                    self._writer.write(to_json(message) + b"\n")
                    await self._writer.drain()
                    return await self._answer(command)
            except TimeoutError as error:
                self.close()  # a late answer would be taken for that of the next command
                raise DeadlineError(f"the monitor did not answer {command} within {timeout_s:g} s") from error
            except asyncio.CancelledError:
                self.close()
                raise
            except OSError as error:
                raise MonitorError(f"the monitor is gone: {error}") from error

    async def give(self, name: str, descriptor: int) -> None:
        """The monitor knows the open file as `name` from then on."""
        await self._send_with("getfd", {"fdname": name}, descriptor)

    async def write_to(self, descriptor: int, command: str, arguments: dict[str, Any], *, timeout_s: float) -> None:
        """A command that writes a file, which is this one: open for writing, and maybe without a name."""
        answer = await self._send_with("add-fd", {}, descriptor)
        number = answer.get("fdset-id") if isinstance(answer, dict) else None
        try:
            await self.execute(command, {**arguments, "filename": f"/dev/fdset/{number}"}, timeout_s=timeout_s)
        finally:
            if not self.closed:
                await self.execute("remove-fd", {"fdset-id": number})

    async def _send_with(self, command: str, arguments: dict[str, Any], descriptor: int) -> Any:
        message = to_json({"execute": command, "arguments": arguments}) + b"\n"
        async with self._turn:
            await self._writer.drain()
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            own = socket.socket(fileno=os.dup(self._connection.fileno()))
            try:
                own.sendmsg([message], ancillary)
            except OSError as error:
                raise MonitorError(f"the monitor is gone: {error}") from error
            finally:
                own.close()
            async with asyncio.timeout(30.0):
                return await self._answer(command)

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    def close(self) -> None:
        self._writer.transport.abort()

    async def _answer(self, command: str) -> Any:
        for _ in range(_EVENTS_PASSED_MAX):
            message = await self._line()
            if "return" in message:
                return message["return"]
            if "error" in message:
                said = message["error"]
                words = said.get("desc") if isinstance(said, dict) else said
                raise MonitorError(f"the monitor refused {command}: {str(words)[:_SHOWN]}")
        raise MonitorError(f"the monitor says much, and does not answer {command}")

    async def _line(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise MonitorError("the monitor sent a line that is too long") from error
        except OSError as error:
            raise MonitorError(f"the monitor is gone: {error}") from error
        if not line:
            raise MonitorError("the monitor has ended")
        try:
            return from_json(line, dict)
        except InvalidArgumentError as error:
            raise MonitorError("the monitor sent what is no JSON object") from error


async def connect_socket(path: Path, *, timeout_s: float, owner: int) -> socket.socket:
    """A connection to the socket at `path`, in a directory that the monitor can write: only a socket, never what a link
    there names, and only its own. Raises MonitorError."""
    try:
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise MonitorError(f"{path.name} of the monitor is not there: {error.strerror}") from error
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        if os.fstat(found).st_uid != owner:
            raise MonitorError(f"{path.name} of the monitor is another's")
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(connection, f"/proc/self/fd/{found}")
    except (OSError, TimeoutError) as error:
        connection.close()
        raise MonitorError(f"{path.name} of the monitor takes no connection: {error}") from error
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(found)
    return connection
