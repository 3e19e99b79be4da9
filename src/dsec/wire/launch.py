"""Messages between a node and its `dsec-launch`. docs/internals/launcher.md says what each does.

One msgpack map per SOCK_SEQPACKET message, at most 128 KiB.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

LAUNCH_VERSION = 1
MESSAGE_BYTES_MAX = 128 * 1024


class LaunchOp(enum.StrEnum):
    HELLO = "hello"
    FILTER = "filter"
    LAYER_MOUNT = "layer_mount"
    LAYER_UNMOUNT = "layer_unmount"
    PREPARE = "prepare"
    LAUNCH = "launch"
    DESTROY = "destroy"
    CLAIM = "claim"
    TIDY = "tidy"
    VIEW = "view"
    LIST = "list"
    SHUTDOWN = "shutdown"


class LaunchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: int
    op: str
    args: Any = {}


class LaunchReply(msgspec.Struct, frozen=True):
    """Either `ok` or `error` for a request; or, with id 0, an `event`."""

    id: int
    ok: Any = None
    error: LaunchFailure | None = None
    event: ExitEvent | None = None


class LaunchFailure(msgspec.Struct, frozen=True):
    step: str
    errno: str | None = None
    detail: str = ""


class ExitEvent(msgspec.Struct, frozen=True):
    """The agent (pid 1 of a sandbox) has ended and been reaped."""

    sandbox: str
    pid: int
    status: int  # wait status as of waitpid(2)
    oom_kills: int = 0  # of the sandbox's memory cgroup


class HelloArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int


class HelloAnswer(msgspec.Struct, frozen=True):
    version: int
    pid: int
    agent_digest: str  # sha256 of the sealed agent file
    views: bool = False  # it knows plans with a `view`
    no_live_view: str | None = None  # why no live view of resources can be given just now
    light: bool = False  # it knows plans that are `light`
    keeps_cgroups: bool = False  # it knows `cgroup1_from` and `cgroup1_to`
    prepares: bool = False  # it knows `prepare`, and of plans `named`


class ArgRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One condition on an argument: `(value & mask) == equals`; negate turns it round."""

    index: int
    equals: int
    mask: int = 0xFFFFFFFFFFFFFFFF
    negate: bool = False
    wide: bool = False  # compare 64 bits, else the low 32


class SyscallRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Applies when all conditions hold (none = always)."""

    syscall: str
    when: list[ArgRule] = []


class FilterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """seccomp in words. First match wins: deny (EPERM), ignore (0, and nothing is done), nosys (ENOSYS), allow; every
    other number is ENOSYS.

    A name that the launcher's table does not know is an error. Other architectures (i386, x32) are killed.
    """

    deny: list[SyscallRule] = []
    ignore: list[SyscallRule] = []
    nosys: list[SyscallRule] = []
    allow: list[SyscallRule] = []


class FilterArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compile and keep a filter under `name` (its digest), for plans to refer to. Idempotent."""

    name: str
    spec: FilterSpec


class LayerMount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Make a layer available under its digest in the launcher's mount namespace. Idempotent."""

    digest: str
    kind: str  # "erofs" | "directory"
    meta: str  # image file, or the directory
    blob: str | None = None  # data device file of an EROFS image


class LayerRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: str


class BindMount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A path inside the sandbox that code there, root included, can neither change nor see past."""

    path: str
    kind: str  # "readonly": locked read-only self-bind | "masked": an empty file or directory over it


class EtcFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str  # below /etc
    content: bytes


class ResourceView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox is shown of the machine: its own share."""

    cpus: int
    memory_bytes: int
    live: bool = False  # memory as it is at each read, where lxcfs runs; else all of it is shown as free


class ViewArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Show a sandbox that runs another share, because its limits have changed."""

    sandbox: str
    view: ResourceView


class Viewed(msgspec.Struct, frozen=True):
    view: str  # "live" | "static"


class VolumeBind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A directory of the host, or the file system on a device, at a path inside: nosuid, nodev, ids as on the disk."""

    path: str  # inside; directories that the image lacks are made, a symbolic link on the way is an error
    source: str  # the directory; with a device only its name
    device: str | None = None  # of an ext4
    readonly: bool = False
    inode: int = 0  # of the directory, so that another one is not taken for it; 0: whatever it is
    file: bool = False  # both are files


class DevicePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A character device below /dev of the sandbox. Never one of memory, ports or the kernel's log."""

    path: str  # directories on the way are made
    major: int
    minor: int
    readonly: bool = False


class LaunchPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Everything the launcher does for one sandbox, decided beforehand (backends/container/plan.py).

    Defaults are left out: a launcher of before that still runs refuses only what it does not know.
    """

    version: int = LAUNCH_VERSION
    sandbox: str
    id_base: int  # first of 65,536 host ids, inside 0 … 65,535
    lowers: list[str]  # digests of mounted layers, lowest first; may be empty only if skeleton is all there is
    directory: str  # state directory of the sandbox: the launcher makes upper/ and work/ in it if missing
    upper_tmpfs_bytes: int | None = None  # a size-limited tmpfs below directory for upper and work; None: plain
    upper_device: str | None = None  # of an ext4 for upper and work instead
    socket: str  # where the agent's listening socket is bound, 0600
    hostname: str
    etc_files: list[EtcFile] = []
    binds: list[BindMount] = []
    masks: list[str] = []  # paths below /proc and /sys that are hidden; missing ones are skipped
    readonly_proc: list[str] = []  # paths below /proc that become read-only; missing ones are skipped
    shm_bytes: int = 64 * 1024 * 1024
    cgroup2: str | None = None  # directory to make, with agent/ and work/ below it
    cgroup2_files: dict[str, str] = {}  # on v2 hosts: memory.max, cpu.max, pids.max, …
    cgroup1: dict[str, str] = {}  # controller → directory to make
    cgroup1_files: dict[str, dict[str, str]] = {}  # controller → file → value
    # controller → a directory beside the one in `cgroup1`, with limits that are these already: it is renamed
    cgroup1_from: dict[str, str] = {}
    rlimits: dict[str, list[int]] = {}  # "nofile" → [soft, hard]
    sysctls: dict[str, str] = {}  # written inside the new namespaces, before /proc/sys is read-only
    caps_agent: int = 0  # bit masks of capabilities
    caps_exec: int = 0
    filter_agent: str | None = None  # names given by `filter`
    filter_exec: str | None = None
    no_new_privs: bool = True
    env: dict[bytes, bytes] = {}
    user: str | None = None
    workdir: bytes | None = None
    nofile: int | None = None
    spare: bool = False  # the agent serves nobody until it is told whom
    named: str = ""  # what the agent is to call itself, where that is not `sandbox`: it was prepared for nobody yet
    light: bool = False  # network, ipc and terminals are made when something is first done in it
    view: ResourceView | None = None  # None: the whole machine is shown
    volumes: list[VolumeBind] = []
    devices: list[DevicePlan] = []


class Launched(msgspec.Struct, frozen=True):
    pid: int  # host pid of the agent
    start_ticks: int  # field 22 of /proc/<pid>/stat: with boot id, tells a reused pid
    cgroup_id: int  # inode of the cgroup2 directory, 0 without one
    steps_us: dict[str, int] = {}
    view: str = "host"  # "live" | "static" | "host"


class DestroyArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Kill everything of a sandbox, wait until it is gone, remove its cgroups, socket and tmpfs. Idempotent.

    A state directory with much in it is renamed into the trash beside it, and removed later.

    Works from this record alone, also for a sandbox that the launcher has never heard of (it was restarted). The state
    directory's content is the node's to remove; `remove_directory` asks the launcher to do it.
    """

    sandbox: str
    pid: int | None = None
    start_ticks: int | None = None
    directory: str | None = None
    remove_directory: bool = True
    socket: str | None = None
    cgroup2: str | None = None
    cgroup1: dict[str, str] = {}
    cgroup1_to: dict[str, str] = {}  # controller → what its directory is called from now on; not removed then


class ClaimArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A spare becomes somebody's sandbox: limits that differ, its host name, its files of /etc. It keeps the name by
    which the launcher knows it. One for which this fails is of no use any more."""

    sandbox: str
    pid: int
    start_ticks: int
    hostname: str
    etc_files: list[EtcFile] = []
    cgroup_files: dict[str, str] = {}  # path → value


class TidyArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Go on removing the trees of ended sandboxes that are left in the trash of this directory. Returns at once."""

    sandboxes: str


class ListArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An answer is one message, so it has so many sandboxes, in the order of their names; `after`: those behind it."""

    after: str | None = None


class Listed(msgspec.Struct, frozen=True):
    """With layers and filters in the first page alone."""

    sandboxes: list[ListedSandbox] = []
    more: bool = False
    layers: list[str] = []
    filters: list[str] = []


class ListedSandbox(msgspec.Struct, frozen=True):
    sandbox: str
    pid: int
    start_ticks: int
