"""Layers of stores as the kernel mounts them: their data is a file that `dsec-loader` fills as it is read. Blocking."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec

from dsec.core.errors import CapacityError, DsecError, HostError, NotFoundError, StorageError
from dsec.observe.logs import get_logger
from dsec.storage.layers import LayerLocation, LayerStore
from dsec.storage.loader import Loader
from dsec.storage.store import format
from dsec.storage.store.places import Location, Place, open_place
from dsec.storage.store.publish import read_trace, write_trace
from dsec.storage.store.trusted import ANY_STORE, TrustedStores
from dsec.wire.loader import (
    TRACE_CHUNKS_MAX,
    AddAnswer,
    AddArgs,
    FailureAnswer,
    FailureArgs,
    HelloAnswer,
    HelloArgs,
    LayerArgs,
    LayerStats,
    LoaderOp,
    PrefetchArgs,
    SourceArgs,
    SourceChange,
    StatsAnswer,
    StatsArgs,
    StoreFailure,
    TraceAnswer,
)

_RENEW_BEFORE_S: Final = 24 * 3600.0  # a signed URL is renewed this long before it ends, or at half its time

_FAILURE_S: Final = 1.0  # the end of a command waits for it

_log = get_logger("dsec.storage.remote")


@dataclass(slots=True)
class _Served:
    path: str
    renew_at: float | None  # seconds since the epoch


class RemoteLayers:
    """Serves layers through the loader; each once, however many environments have it."""

    def __init__(self, loader: Loader, *, trusted: TrustedStores = ANY_STORE, blocks: bool = True) -> None:
        """`blocks`: what is asked for as a block device becomes one, where the loader can make any."""
        self.loader = loader
        self.trusted = trusted
        self._blocks = blocks
        self._mutex = threading.Lock()  # for the next
        self._flights: dict[str, threading.Lock] = {}  # of a layer each: a store that is slow holds up its layers only
        self._served: dict[tuple[str, bool], _Served] = {}  # by digest, and whether a block device was asked for
        self._places: dict[str, Place] = {}
        self._failures: dict[str, tuple[StoreFailure, int]] = {}  # with how often something had been fetched

    def serve(self, layer: LayerLocation, *, block: bool = False) -> str:
        """The file of the layer's data. Raises StorageError, UnavailableError (store or loader), HostError, and
        ForbiddenError for a layer of a store that is trusted no longer.

        `block`: rather a block device, where the kernel has ublk; its size is that of the data in whole sectors.
        """
        assert layer.remote is not None
        assert layer.index is not None
        with self._flight(layer.digest):
            known = self._served.get((layer.digest, block))
            if known is not None and not _is_due(known.renew_at) and _exists(known.path):
                return known.path
            place = self._place(layer.remote.store)
            location = place.location(format.object_path("data", layer.digest))
            args = AddArgs(
                digest=layer.digest,
                index=str(layer.index),
                chunk_size=layer.remote.chunk_size,
                size=layer.remote.size,
                source=source_of(location),
            )
            path = self._add(args, block=block and self._blocks)
            self._served[layer.digest, block] = _Served(path, _renew_at(location.expires_at))
        if known is None:
            # Nobody waits for it: what is in the cache can be read while the store is gone.
            threading.Thread(target=self._prefetch_trace, args=(layer, place), name="trace", daemon=True).start()
        return path

    def _add(self, args: AddArgs, *, block: bool) -> str:
        if block and self.loader.hello().blocks:
            try:
                wish = msgspec.structs.replace(args, block=True)
                return self.loader.request(LoaderOp.ADD, wish, AddAnswer).path
            except (HostError, CapacityError) as error:
                # By the front end it reads the same.
                _log.warning("no_block_device", layer=args.digest[:12], error=error.message)
        return self.loader.request(LoaderOp.ADD, args, AddAnswer).path

    def front(self) -> str | None:
        """By which the loader serves, "fuse" or "fanotify"; None while none runs, or none answers."""
        try:
            return self.loader.request(LoaderOp.HELLO, HelloArgs(), HelloAnswer, start=False).front
        except DsecError:
            return None

    def stats(self, digest: str | None = None) -> StatsAnswer:
        """Nothing is served: no layers, and the loader is not started for it."""
        if not self.loader.is_running():
            return StatsAnswer([], 0, 0)
        answer = self.loader.request(LoaderOp.STATS, StatsArgs(digest), StatsAnswer, start=False)
        return msgspec.structs.replace(answer, layers=[self._with_failure(layer) for layer in answer.layers])

    def stats_of(self, digest: str) -> LayerStats:
        """Raises NotFoundError while it is not served."""
        layers = self.stats(digest).layers
        if not layers:
            raise NotFoundError(f"layer {digest[:12]} is not being loaded from a store")
        return layers[0]

    def _with_failure(self, layer: LayerStats) -> LayerStats:
        """The loader tells a failure to the first who asks; it stays true until something has been fetched again."""
        if layer.error is not None:
            self._failures[layer.digest] = (layer.error, layer.fetches)
            return layer
        known = self._failures.get(layer.digest)
        if known is None:
            return layer
        if layer.fetches != known[1]:
            self._failures.pop(layer.digest, None)
            return layer
        return msgspec.structs.replace(layer, error=known[0])

    async def failed_since(self, digests: Sequence[str], since_s: float) -> str | None:
        """Why the last read of one of these layers that got EIO did so, as a StoreFailure says it, if that was since
        `since_s` (monotonic). None also when the loader does not say, or not at once."""
        try:
            args = FailureArgs(tuple(digests))
            failure = (await self.loader.ask(LoaderOp.FAILURE, args, FailureAnswer, timeout_s=_FAILURE_S)).failure
        except DsecError:
            return None
        return failure.cause if failure is not None and failure.at_s >= since_s else None

    def prefetch(self, digest: str) -> None:
        """All of a layer, in the background."""
        self.loader.request(LoaderOp.PREFETCH, PrefetchArgs(digest=digest, whole=True), dict)

    def record_trace(self, layer: LayerLocation) -> int:
        """What has been wanted of it so far becomes the trace that others load first; how many chunks.

        Nothing is not recorded: the trace of before stays.
        """
        assert layer.remote is not None
        chunks = self.loader.request(LoaderOp.TRACE, LayerArgs(layer.digest), TraceAnswer).chunks
        if not chunks:
            return 0
        write_trace(self._place(layer.remote.store), layer.digest, layer.remote.chunk_size, chunks)
        return len(chunks)

    def renew(self, layers: LayerStore) -> None:
        """Tell the loader where served layers are now: signed URLs end, and hosts move. What fails stays as it was."""
        if not self.loader.is_running():
            return
        for digest in layers.digests():
            try:
                self._renew(layers.get(digest))
            except NotFoundError:
                continue  # it is not served, or has just gone
            except DsecError as error:
                _log.warning("source_not_renewed", layer=digest[:12], error=error.message)

    def _renew(self, layer: LayerLocation) -> None:
        if layer.remote is None:
            return
        location = self._place(layer.remote.store).location(format.object_path("data", layer.digest))
        if location.url is None:
            return
        self.loader.request(LoaderOp.SOURCE, SourceChange(layer.digest, source_of(location)), dict, start=False)
        with self._flight(layer.digest):
            for known in self._known(layer.digest):
                known.renew_at = _renew_at(location.expires_at)

    def forget(self, digest: str, *, unless: Callable[[str], bool] = lambda _: False) -> None:
        """No sandbox uses it any more. What is cached stays until the room is needed.

        `unless` is asked while nobody can begin to use it: it may have come back.
        """
        with self._flight(digest):
            if unless(digest):
                return
            self._served.pop((digest, False), None)
            self._served.pop((digest, True), None)
            self._failures.pop(digest, None)
            if self.loader.is_running():
                self.loader.request(LoaderOp.REMOVE, LayerArgs(digest), dict, start=False)

    def _known(self, digest: str) -> list[_Served]:
        return [self._served[key] for key in ((digest, False), (digest, True)) if key in self._served]

    def _flight(self, digest: str) -> threading.Lock:
        with self._mutex:
            return self._flights.setdefault(digest, threading.Lock())

    def _place(self, url: str) -> Place:
        self.trusted.check(url)
        if url not in self._places:
            self._places[url] = open_place(url)
        return self._places[url]

    def _prefetch_trace(self, layer: LayerLocation, place: Place) -> None:
        assert layer.remote is not None
        try:
            if chunks := read_trace(place, layer.digest, layer.remote.chunk_size)[:TRACE_CHUNKS_MAX]:
                args = PrefetchArgs(digest=layer.digest, chunks=chunks)
                self.loader.request(LoaderOp.PREFETCH, args, dict, start=False)
        except DsecError as error:
            # It only makes things quick.
            _log.warning("trace_not_read", layer=layer.digest[:12], error=error.message)


def _exists(path: str) -> bool:
    """False also for the mount of a loader that has died, which says ENOTCONN."""
    return os.path.exists(path)  # noqa: PTH110 - pathlib's raises then


def source_of(location: Location) -> SourceArgs:
    """For the loader, which is static and has no resolver: names become addresses here. Raises StorageError."""
    if location.url is None:
        return SourceArgs(path=location.path)
    parts = urlsplit(location.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise StorageError(f"the host of a store, {parts.hostname}, has no address: {error}") from error
    addresses = dict.fromkeys(_with_port(str(entry[4][0]), port) for entry in found)
    return SourceArgs(url=location.url, addresses=tuple(addresses))


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _renew_at(expires_at: float | None) -> float | None:
    """From now on counted: a URL is asked for when it has been signed."""
    if expires_at is None:
        return None
    return expires_at - min(_RENEW_BEFORE_S, (expires_at - time.time()) / 2)


def _is_due(renew_at: float | None) -> bool:
    return renew_at is not None and time.time() >= renew_at
