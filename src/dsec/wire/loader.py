"""The contract between a node and `dsec-loader`; twin of native/loader/src/wire.rs.

SOCK_SEQPACKET, one msgpack map a message.

`docs/internals/loader.md` says what each operation does.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

LOADER_VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 128 * 1024
TRACE_CHUNKS_MAX: Final = 20_000  # as many as fit a message


class LoaderOp(enum.StrEnum):
    HELLO = "hello"  # HelloArgs → HelloAnswer
    ADD = "add"  # AddArgs → AddAnswer; again: success, with the source as it is given now
    SOURCE = "source"  # SourceChange → {}
    REMOVE = "remove"  # LayerArgs → {}; what is cached stays until the room is needed
    PREFETCH = "prefetch"  # PrefetchArgs → {}
    TRACE = "trace"  # LayerArgs → TraceAnswer
    STATS = "stats"  # StatsArgs → StatsAnswer
    FAILURE = "failure"  # FailureArgs → FailureAnswer
    EVICT = "evict"  # EvictArgs → EvictAnswer
    SHUTDOWN = "shutdown"  # {} → {}


class LoaderRequest(msgspec.Struct, frozen=True):
    id: int
    op: str
    args: Any


class LoaderFailure(msgspec.Struct, frozen=True):
    code: str  # host | invalid | not_found | busy
    message: str


class LoaderReply(msgspec.Struct, frozen=True):
    id: int
    ok: Any = None
    error: LoaderFailure | None = None


class HelloArgs(msgspec.Struct, frozen=True):
    version: int = LOADER_VERSION


class HelloAnswer(msgspec.Struct, frozen=True):
    version: int
    pid: int
    resends: bool  # readers that a dead worker left waiting are answered by the next
    front: str
    blocks: bool = False  # layers can be block devices


class SourceArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Where the data object of a layer is: a file, or a URL with the addresses of its host."""

    path: str | None = None
    url: str | None = None
    addresses: tuple[str, ...] = ()


class AddArgs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    digest: str
    block: bool = False  # as a block device too, whose path is the answer
    index: str
    chunk_size: int
    size: int
    source: SourceArgs


class AddAnswer(msgspec.Struct, frozen=True):
    path: str


class LayerArgs(msgspec.Struct, frozen=True):
    digest: str


class SourceChange(msgspec.Struct, frozen=True):
    digest: str
    source: SourceArgs


class PrefetchArgs(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    chunks: tuple[int, ...] = ()
    whole: bool = False


class TraceAnswer(msgspec.Struct, frozen=True):
    chunks: tuple[int, ...]


class StatsArgs(msgspec.Struct, frozen=True):
    digest: str | None = None


class StoreFailure(msgspec.Struct, frozen=True):
    cause: str  # gone | denied | unreachable | unavailable | corrupt
    detail: str


class LayerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Of one layer, since it is served; bytes of chunks unless said otherwise."""

    digest: str
    size: int
    chunk_size: int
    chunks: int
    present: int
    touched: int  # chunks that somebody wanted
    waiting: int  # reads that wait now
    read_bytes: int  # given to readers
    fetched_bytes: int  # from the store, compressed
    fetches: int
    hits: int  # reads answered from the cache
    misses: int
    errors: int
    corrupt: int
    evicted_bytes: int
    held_bytes: int
    error: StoreFailure | None = None  # since somebody last asked


class StatsAnswer(msgspec.Struct, frozen=True):
    layers: list[LayerStats]
    cache_bytes: int
    cache_bytes_max: int


class FailureArgs(msgspec.Struct, frozen=True):
    digests: tuple[str, ...]


class ReadFailure(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    cause: str  # as of StoreFailure
    at_s: float  # of CLOCK_MONOTONIC


class FailureAnswer(msgspec.Struct, frozen=True):
    """The last read of one of the layers that failed because of its store, by the worker that answers."""

    failure: ReadFailure | None = None


class EvictArgs(msgspec.Struct, frozen=True):
    bytes: int


class EvictAnswer(msgspec.Struct, frozen=True):
    freed_bytes: int
