"""Bodies of frames between node and agent. docs/internals/protocol.md says when each is sent.

Requests (host → agent) refuse unknown fields; what comes back ignores them and is hostile input: the node checks
counts, sizes and ids before it uses them. Paths, argv and environment are bytes.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

GENERATION_MIN = 1
GENERATION_MAX = 1


class Op(enum.StrEnum):
    EXEC = "exec"
    ATTACH = "attach"
    DETACH = "detach"
    ACK = "ack"
    EXIT_ACK = "exit_ack"
    SIGNAL = "signal"
    KILL = "kill"
    RESIZE = "resize"
    EXECS = "execs"
    SESSION_OPEN = "session_open"
    SESSION_CLOSE = "session_close"
    SESSIONS = "sessions"
    STAT = "stat"
    LIST = "list"
    READ = "read"
    WRITE = "write"
    MKDIR = "mkdir"
    MOVE = "move"
    REMOVE = "remove"
    CHMOD = "chmod"
    CHOWN = "chown"
    SYMLINK = "symlink"
    ARCHIVE = "archive"
    EXTRACT = "extract"
    WATCH = "watch"
    CONNECT = "connect"
    LISTEN = "listen"
    ACCEPT = "accept"
    USAGE = "usage"
    CLOCK = "clock"
    RESEED = "reseed"
    FREEZE_PREPARE = "freeze_prepare"
    CLAIM = "claim"
    SHUTDOWN = "shutdown"


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of REQ: opens a stream. `args` is the record named after the operation below."""

    op: str
    args: Any = {}


class AgentError(msgspec.Struct, frozen=True):
    """Body of ERR: ends a stream."""

    code: str
    message: str
    errno: str | None = None  # such as ENOENT, for failures of a system call


# ---- hello ---------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    generation_min: int
    generation_max: int
    sandbox: str
    features: list[str] = []


class HelloReply(msgspec.Struct, frozen=True):
    generation: int
    version: str
    boot_id: str  # minted at the agent's start: another value means another agent
    execs: list[ExecState] = []
    features: list[str] = []


# ---- execs ---------------------------------------------------------------------------------------


class Tty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cols: int
    rows: int


class Exec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `argv` and `shell`. `env` is added to the sandbox's own."""

    id: str
    argv: list[bytes] | None = None
    shell: bytes | None = None
    cwd: bytes | None = None
    env: dict[bytes, bytes] = {}
    user: str | None = None
    stdin: bool = False
    tty: Tty | None = None
    timeout_s: float | None = None
    grace_s: float = 2.0
    output_bytes_max: int | None = None  # produced bytes after which the exec is killed with cause output_budget
    merge_stderr: bool = False
    rlimits: dict[str, int] = {}  # "nofile", "core", "fsize", "nproc", "stack", "as", "cpu", "data", "memlock"
    session: str | None = None


class ExecStatus(enum.StrEnum):
    EXITED = "exited"
    SIGNALED = "signaled"
    UNKNOWN = "unknown"


class ExecUsage(msgspec.Struct, frozen=True):
    wall_us: int = 0
    user_us: int = 0
    system_us: int = 0
    max_rss_bytes: int = 0


class ExecEnd(msgspec.Struct, frozen=True, kw_only=True):
    status: str  # ExecStatus
    code: int | None = None
    signal: int | None = None
    # timed_out | oom | output_budget | disk_full | killed; the node adds layer_unavailable | layer_corrupt |
    # agent_lost | node_lost | rolled_back
    cause: str | None = None
    out_bytes: int = 0
    err_bytes: int = 0
    usage: ExecUsage = ExecUsage()
    session_ended: bool = False  # the command ended its session's shell


class ExecState(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    pid: int = 0
    out: int = 0  # bytes produced
    err: int = 0
    stdin: int = 0  # bytes of stdin taken
    end: ExecEnd | None = None
    session: str | None = None


class ExecStarted(msgspec.Struct, frozen=True):
    """RES of exec and attach: DATA follows from the offsets asked for, then END."""

    id: str
    pid: int = 0
    existing: bool = False  # this id was running or had ended already; nothing was started
    stdin: int = 0  # offset of the next stdin byte that the agent will take
    out: int = 0  # offset of the first output byte that will come: above what was asked for = a gap
    err: int = 0


class Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    out: int = 0
    err: int = 0


class ExecRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of detach, exit_ack and kill."""

    id: str


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    out: int
    err: int


class Signal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    signal: int
    tree: bool = False  # every process of the exec, not only the leader's group


class Resize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    cols: int
    rows: int


class ExecList(msgspec.Struct, frozen=True):
    execs: list[ExecState] = []


class ExecEnded(msgspec.Struct, frozen=True):
    """Body of END on an exec stream, from the agent."""

    end: ExecEnd


class StdinEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of END on an exec, write, extract or connect stream, from the host: no more input."""

    offset: int = 0  # bytes sent in all, so that a repeated END is recognised


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of CREDIT: the other side may send this many payload bytes more on the stream."""

    bytes: int


# ---- sessions ------------------------------------------------------------------------------------


class SessionOpen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    shell: bytes | None = None  # default: /bin/bash, else /bin/sh
    cwd: bytes | None = None
    env: dict[bytes, bytes] = {}
    user: str | None = None


class SessionRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int = 0
    busy: str | None = None  # id of the exec that runs in it
    existing: bool = False


class SessionList(msgspec.Struct, frozen=True):
    sessions: list[SessionState] = []


# ---- files ---------------------------------------------------------------------------------------


class PathArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of stat and archive."""

    path: bytes
    follow: bool = True
    user: str | None = None


class FileStat(msgspec.Struct, frozen=True, kw_only=True):
    name: bytes
    kind: str  # file | directory | symlink | fifo | socket | char | block
    size: int = 0
    mode: int = 0  # permission bits
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    target: bytes | None = None  # of a symlink
    nlink: int = 1


class ListArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: bytes
    after: bytes | None = None  # name of the last entry of the page before; entries are sorted by name
    limit: int = 1000
    user: str | None = None


class ListReply(msgspec.Struct, frozen=True):
    entries: list[FileStat] = []
    more: bool = False


class ReadArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: bytes
    offset: int = 0
    length: int | None = None
    user: str | None = None


class WriteArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Without an offset the file is replaced atomically (temporary name, then rename) when END comes.

    With one, bytes are written in place from there; the file is made if missing and keeps the rest of its content.
    `append` writes at the end, wherever that is.
    """

    path: bytes
    offset: int | None = None
    append: bool = False
    mode: int | None = None  # None: keep, or 0644 for a new file
    parents: bool = True
    user: str | None = None


class Written(msgspec.Struct, frozen=True):
    """Body of END on write and extract streams, from the agent: it is done."""

    bytes: int = 0
    entries: int = 0


class MkdirArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: bytes
    parents: bool = True
    mode: int = 0o755
    user: str | None = None


class MoveArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    source: bytes
    target: bytes
    replace: bool = True
    user: str | None = None


class RemoveArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: bytes
    recursive: bool = False
    missing_ok: bool = False
    user: str | None = None


class ChmodArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: bytes
    mode: int
    user: str | None = None


class ChownArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: bytes
    owner: str | None = None  # name or number
    group: str | None = None
    follow: bool = True


class SymlinkArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: bytes
    target: bytes
    user: str | None = None


class ExtractArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tar stream (pax or GNU) follows as DATA; it is unpacked below `path`, which is made if missing."""

    path: bytes
    user: str | None = None  # owner of what is made; None keeps the owners of the archive when the agent may


class WatchArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    path: bytes
    recursive: bool = False


class WatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Body of EVENT on a watch stream."""

    kind: str  # created | modified | deleted | moved | attributes | overflow
    path: bytes = b""  # relative to the watched directory
    source: bytes | None = None  # for moved
    directory: bool = False


# ---- the rest ------------------------------------------------------------------------------------


class ConnectArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A TCP port (IP literal or localhost) or a UNIX socket path, both inside the sandbox."""

    host: str = "localhost"
    port: int | None = None
    path: bytes | None = None


class ListenArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of `listen` and of `accept`: an address of the loopback, and a port."""

    host: str
    port: int


class UsageReply(msgspec.Struct, frozen=True, kw_only=True):
    processes: int = 0
    execs: int = 0
    sessions: int = 0
    agent_rss_bytes: int = 0
    disk_used_bytes: int = 0
    disk_total_bytes: int = 0


class ClockArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    paused_s: float
    wall_s: float | None = None


class ReseedArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    seed: bytes
    another: bool = False  # of a machine of its own: it has been somebody else's until here


class ClaimArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a spare agent becomes: the sandbox that it serves from here on, and the defaults of its execs."""

    sandbox: str
    env: dict[bytes, bytes] = {}
    user: str | None = None
    workdir: bytes | None = None
    hostname: str | None = None  # of a machine of its own; elsewhere who made it has named it


class Empty(msgspec.Struct, frozen=True):
    """RES of an operation that has nothing to say, and END of a stream likewise."""
