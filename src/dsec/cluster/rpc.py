"""Calls and streams to nodes: bytes in, bytes out, whatever carries them. Here the form within one process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from dsec.cluster.streams import StreamEnd, stream_pair
from dsec.core.errors import (
    CapacityError,
    DeadlineError,
    DsecError,
    NodeRetiredError,
    PlatformError,
    UnavailableError,
)
from dsec.core.ids import NodeId
from dsec.core.limits import NODE_STREAMS_MAX, STREAM_LINGER_S
from dsec.observe.logs import get_logger
from dsec.wire.errors import body_of
from dsec.wire.node import Caller, Method, NodeService, Stream
from dsec.wire.records import NodeLoad

log = get_logger(__name__)


class Rpc(Protocol):
    async def call(
        self,
        node: NodeId,
        method: Method,
        body: bytes,
        *,
        caller: Caller,
        timeout_s: float,
        key: str | None = None,
    ) -> bytes:
        """One request, one answer. Raises NodeRetiredError for a node that is not known (any more), DeadlineError
        (outcome unknown) after `timeout_s`, UnavailableError when the node cannot be reached, and the node's error.
        Cancelling the caller cancels the work.
        """
        ...

    def load(self, node: NodeId) -> NodeLoad | None:
        """What the node said of itself with its last reply, an error or not; None before the first."""
        ...

    async def open(self, node: NodeId, method: Method, body: bytes, *, caller: Caller) -> Stream:
        """A stream whose other end the node serves. The caller closes it, in every case; closing ends the work."""
        ...

    async def close(self) -> None: ...


class EmbeddedRpc:
    """The node of this process (`dsec up`)."""

    def __init__(self, service: NodeService, node: NodeId) -> None:
        self._service = service
        self._node = node
        self._streams: set[asyncio.Task[None]] = set()
        self._closed = False
        self._load: NodeLoad | None = None

    def load(self, node: NodeId) -> NodeLoad | None:
        return self._load if node == self._node else None

    @property
    def streams_open(self) -> int:
        return sum(not task.done() for task in self._streams)

    async def call(
        self,
        node: NodeId,
        method: Method,
        body: bytes,
        *,
        caller: Caller,
        timeout_s: float,
        key: str | None = None,
    ) -> bytes:
        self._check(node)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self._service.call(method, body, caller=caller, key=key, timeout_s=timeout_s)
        except TimeoutError as error:
            if limit.expired():
                raise DeadlineError(f"{method} was not done within {timeout_s:g} s") from error
            raise told(error, method) from error
        except DsecError:
            raise
        except Exception as error:
            raise told(error, method) from error
        finally:
            self._load = self._service.load()

    async def open(self, node: NodeId, method: Method, body: bytes, *, caller: Caller) -> Stream:
        self._check(node)
        if len(self._streams) >= NODE_STREAMS_MAX:
            raise CapacityError(f"the node has {NODE_STREAMS_MAX} streams open", retry_after_s=1.0)
        ours, theirs = stream_pair()
        task = asyncio.create_task(self._serve(method, body, theirs, caller), name=f"stream {method}")
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)
        return _CallerEnd(ours, task)

    async def close(self) -> None:
        """Ends all streams; the callers see UnavailableError."""
        self._closed = True
        tasks = list(self._streams)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, method: Method, body: bytes, stream: StreamEnd, caller: Caller) -> None:
        error: BaseException | None = None
        try:
            await self._service.serve_stream(method, body, stream, caller=caller)
        except asyncio.CancelledError:
            error = UnavailableError("the node has ended the stream")
            raise
        except DsecError as failure:
            error = failure
        except Exception as failure:
            error = told(failure, method)
        finally:
            stream.shut(error)

    def _check(self, node: NodeId) -> None:
        if node != self._node:
            raise NodeRetiredError(
                f"there is no node {node} here", hint="the machine was reinstalled, or the id is of another service"
            )
        if self._closed:
            raise UnavailableError("the node is stopping", retry_after_s=1.0)


class _CallerEnd:
    """The caller's end: closing it also ends the node's work, after a moment for what is under way."""

    def __init__(self, end: StreamEnd, task: asyncio.Task[None]) -> None:
        self._end = end
        self._task = task
        self.send = end.send
        self.recv = end.recv

    async def close(self, error: BaseException | None = None) -> None:
        self._end.shut(error)
        if self._task.done():
            return
        try:
            await asyncio.wait({self._task}, timeout=STREAM_LINGER_S)
        finally:
            if not self._task.done():
                self._task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({self._task}, timeout=STREAM_LINGER_S)


def told(error: Exception, method: str) -> DsecError:
    """What a caller is told of a failure that is not in the error tree: as over a wire, its text stays here."""
    log.error("a node method failed", method=str(method), exc_info=error)
    body = body_of(error)
    return PlatformError(body.message, hint=body.hint)
