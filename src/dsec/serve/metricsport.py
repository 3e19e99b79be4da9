"""Figures for Prometheus from processes that have no API: `GET /metrics`, and nothing else, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import Final

from dsec.core.errors import HostError
from dsec.core.limits import METRICS_CONNECTIONS_MAX, METRICS_REQUEST_BYTES_MAX, METRICS_REQUEST_S
from dsec.observe import metrics
from dsec.observe.logs import get_logger
from dsec.serve.cluster_settings import METRICS_DEFAULT, host_port

log = get_logger(__name__)

_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPort:
    """No credentials are asked for: figures hold words of ours alone, and the port is of loopback unless it is set."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._open = 0

    async def listen(self, place: str | None) -> tuple[str, int] | None:
        """Where it is, if anywhere. Raises HostError; not for the default, which another process may have."""
        if place is None:
            return None
        host, port = host_port(place)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=METRICS_REQUEST_BYTES_MAX)
        except OSError as error:
            if place == METRICS_DEFAULT and error.errno == errno.EADDRINUSE:
                log.warning("no port for metrics: another process has it", place=place)
                return None
            raise HostError(
                f"cannot give metrics at {place}: {error.strerror or error}", hint="cluster.metrics says where"
            ) from error
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= METRICS_CONNECTIONS_MAX:
                async with asyncio.timeout(METRICS_REQUEST_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_answer(head))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # nobody who reads metrics
        finally:
            self._open -= 1
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(METRICS_REQUEST_S):
                    await writer.wait_closed()


def _answer(head: bytes) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path != b"/metrics":
        return _response("404 Not Found", b"it is at /metrics\n")
    if method not in (b"GET", b"HEAD"):
        return _response("405 Method Not Allowed", b"GET\n")
    body = metrics.render()
    return _response("200 OK", body if method == b"GET" else b"", len(body))


def _response(status: str, body: bytes, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
