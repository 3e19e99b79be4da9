"""What a caller asks for: one sandbox, described as plain data and valid once built."""

from __future__ import annotations

import enum
import math
from itertools import pairwise
from typing import Any

import msgspec

from dsec.core import limits
from dsec.core.egress import plain_egress
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import parse_name, parse_node_id
from dsec.core.references import parse_reference
from dsec.core.units import format_number, format_size


class Substrate(enum.StrEnum):
    FNCALL = "fncall"
    CONTAINER = "container"
    MICROVM = "microvm"
    FULLVM = "fullvm"
    FAKE = "fake"  # in-memory; for tests and simulation, refused by a node that is not told to offer it


_NO_VOLUMES = frozenset({"/", "/proc", "/sys", "/dev"})  # the launcher mounts there


class NetworkMode(enum.StrEnum):
    NONE = "none"  # own namespace with nothing but loopback
    PROXIED = "proxied"  # TCP to what `egress` allows, through the node; nothing else of the network
    ROUTED = "routed"


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox starts from: a base, and optionally a workspace and toolkits above it.

    Each by reference: NAME, NAME:TAG or NAME@DIGEST. Later ones hide what earlier ones have in the same place.
    """

    base: str
    workspace: str | None = None
    toolkits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.toolkits, list):
            msgspec.structs.force_setattr(self, "toolkits", tuple(self.toolkits))
        for name in self.names():
            parse_reference(name)
        if len(self.names()) > limits.LOWERS_MAX:
            raise LimitError(f"an environment has at most {limits.LOWERS_MAX} layers, not {len(self.names())}")

    def names(self) -> tuple[str, ...]:
        """Lowest first."""
        return (self.base, *([self.workspace] if self.workspace else []), *self.toolkits)


def check_workspace(name: str | None) -> None:
    """Of what is asked for: what is stored of before may have one without a name, which is none."""
    if name == "":
        raise InvalidArgumentError("the workspace has no name", hint="leave it out, or name one: NAME or NAME:TAG")


class ReadyProbe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a started sandbox is ready: exactly one of a program or shell text that exits with 0, and a TCP port of its
    localhost that accepts. Tried every `interval_s` until it is so, for at most `timeout_s`."""

    argv: tuple[str, ...] | None = None
    shell: str | None = None
    port: int | None = None
    interval_s: float = 0.25
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if [self.argv, self.shell, self.port].count(None) != 2:
            raise InvalidArgumentError("exactly one of argv, shell and port makes a ready probe")
        words = self.argv if self.argv is not None else (self.shell or "",)
        if self.port is not None:
            _within("port", self.port, 1, 65_535, "")
        elif not words or not words[0] or any("\0" in word for word in words):
            raise InvalidArgumentError("the command of a ready probe must not be empty, and must not hold NUL")
        size = sum(len(word.encode("utf-8", "surrogatepass")) + 1 for word in words)
        if len(words) > limits.ARGV_ITEMS_MAX or size > limits.ARGV_BYTES_MAX:
            raise LimitError(f"the command of a ready probe has more than {limits.ARGV_BYTES_MAX} bytes")
        _within("interval_s", self.interval_s, limits.READY_INTERVAL_S_MIN, limits.READY_INTERVAL_S_MAX, "seconds")
        _within("timeout_s", self.timeout_s, 0.001, limits.READY_TIMEOUT_S_MAX, "seconds")


class VolumeMount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A named volume of the project, or a dataset of the node, at a path of the sandbox.

    The path is made where the environment has none. A dataset is read-only, whatever is asked.
    """

    name: str
    path: str
    readonly: bool = False
    dataset: bool = False

    def __post_init__(self) -> None:
        parse_name(self.name, "dataset name" if self.dataset else "volume name")
        try:
            self.path.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError("the path of a volume must be UTF-8") from error
        check_path(self.path, "path of a volume")
        parts = self.path.split("/")
        if parts[0] or "" in parts[1:] or "." in parts or ".." in parts:
            raise InvalidArgumentError(
                f"the path of a volume must be absolute and plain, and is {self.path[:80]!r}", hint="such as /data"
            )
        if any(len(part.encode("utf-8", "surrogatepass")) > limits.NAME_BYTES_MAX for part in parts):
            raise LimitError(f"a name in the path of a volume has at most {limits.NAME_BYTES_MAX} bytes")
        if f"/{parts[1]}" in _NO_VOLUMES or self.path == "/etc":
            raise InvalidArgumentError(
                f"no volume can be at {self.path[:80]!r}", hint="/proc, /sys, /dev and /etc are the sandbox's own"
            )


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Which nodes a sandbox may be on. Those of one `group` spread over nodes; `apart`: no two of it on one node."""

    labels: dict[str, str] = {}  # that the node has
    features: tuple[str, ...] = ()  # that the node has, such as "pause" or "kvm"
    group: str | None = None
    apart: bool = False
    node: str | None = None  # only this one
    devices: tuple[str, ...] = ()  # kinds that the node has, as CDI has them: vendor.com/class

    def __post_init__(self) -> None:
        if len(self.devices) > limits.LABELS_MAX:
            raise LimitError(f"at most {limits.LABELS_MAX} kinds of devices, not {len(self.devices)}")
        for kind in self.devices:
            vendor, slash, name = kind[:256].partition("/")
            if not (vendor and slash and name) or not kind.isascii() or not kind.isprintable() or len(kind) > 255:
                raise InvalidArgumentError(f"{kind[:80]!r} is no kind of device", hint="such as nvidia.com/gpu")
        check_labels(self.labels)
        if self.node is not None:
            parse_node_id(self.node)
        if len(self.features) > limits.LABELS_MAX:
            raise LimitError(f"at most {limits.LABELS_MAX} features, not {len(self.features)}")
        for feature in self.features:
            parse_name(feature, "feature of a node")
        if self.group is not None:
            parse_name(self.group, "group of sandboxes")
        if self.apart and self.group is None:
            raise InvalidArgumentError("apart says so of the sandboxes of a group", hint="give the group, too")


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Within a sandbox, TCP to `name:port` reaches that port of the sandbox of its job that is called `name` there."""

    name: str
    port: int

    def __post_init__(self) -> None:
        parse_name(self.name, "name of a link")
        _within("port", self.port, 1, 65_535, "")


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One sandbox as asked for. Sizes in bytes, durations in seconds; None means "none".

    Defaults are left out when it is stored or hashed: a field added later changes nothing for who does not use it.
    """

    environment: Environment
    substrate: Substrate = Substrate.CONTAINER
    cpu: float = 1.0  # cores
    memory_bytes: int = limits.GIB
    disk_bytes: int | None = None  # what it may write; refused where the node cannot enforce it
    pids_max: int = 1024
    network: NetworkMode = NetworkMode.NONE
    egress: tuple[str, ...] | None = None  # with "proxied", rules of core.egress; None: all that is public
    env: dict[str, str] = {}
    user: str | None = None  # default of its execs: "name", "uid", "name:group" or "uid:gid"
    workdir: str | None = None  # default of its execs
    labels: dict[str, str] = {}
    name: str | None = None
    ttl_running_s: float | None = None
    ttl_idle_s: float | None = None
    privilege_gain: bool = False  # True drops no_new_privs, for images that need sudo (ruling 15)
    keepalive: bool = False  # background processes count against idleness (ruling 18)
    start: bool = False  # runs the environment's ENTRYPOINT and CMD, as exec "main"
    entrypoint: tuple[str, ...] | None = None  # in place of the environment's, whose CMD then counts for nothing
    command: tuple[str, ...] | None = None  # in place of its CMD
    ready: ReadyProbe | None = None  # the create returns once it succeeds
    volumes: tuple[VolumeMount, ...] = ()
    place: Place | None = None  # which nodes it may be on
    job: str | None = None  # of its project: it is paused and stopped with the others of the job
    job_id: str | None = None  # tells a job from an earlier one of its name; the service sets it
    member: str | None = None  # what the others of its job call it
    links: tuple[Link, ...] = ()  # others of its job that it reaches

    def __post_init__(self) -> None:
        _within("cpu", self.cpu, limits.CPU_MIN, limits.CPU_MAX, "cores")
        _within("memory", self.memory_bytes, limits.MEMORY_BYTES_MIN, limits.MEMORY_BYTES_MAX, "bytes")
        if self.disk_bytes is not None:
            _within("disk", self.disk_bytes, limits.DISK_BYTES_MIN, limits.DISK_BYTES_MAX, "bytes")
        _within("pids", self.pids_max, limits.PIDS_MIN, limits.PIDS_MAX, "processes")
        for what, ttl in (("ttl_running_s", self.ttl_running_s), ("ttl_idle_s", self.ttl_idle_s)):
            if ttl is not None:
                _within(what, ttl, 0.001, limits.TTL_S_MAX, "seconds")
        if self.ready is not None and not self.start:
            raise InvalidArgumentError(
                "a ready probe waits for what is started", hint="ask for its start, too: start=True, --start"
            )
        _check_program(self)
        if self.name is not None:
            parse_name(self.name, "sandbox name")
        if self.job is not None:
            parse_name(self.job, "job name")
        check_links(self)
        _settle_egress(self)
        check_env(self.env)
        check_labels(self.labels)
        check_volumes(self.volumes)
        if self.workdir is not None:
            check_path(self.workdir, "workdir")
            if not self.workdir.startswith("/"):
                raise InvalidArgumentError(
                    f"workdir must be absolute, and is {self.workdir[:80]!r}", hint="such as /work"
                )
        if self.user is not None and (not self.user or len(self.user) > 255 or "\0" in self.user):
            raise InvalidArgumentError(
                "user must be 1 to 255 characters without NUL", hint="such as root, 1000 or 1000:100"
            )


def _within(what: str, value: Any, low: float, high: float, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidArgumentError(f"{what} must be a number{f' of {unit}' if unit else ''}, not {value!r}")
    if not low <= value <= high:
        if unit == "bytes":
            shown = f"{format_size(int(low))} and {format_size(int(high))}, and is {format_size(int(value))}"
            raise LimitError(
                f"{what} must be between {shown}", hint='a size is a number of bytes, or text such as "512MiB"'
            )
        bounds = f"{format_number(low)} and {format_number(high)}"
        raise LimitError(f"{what} must be between {bounds}{f' {unit}' if unit else ''}, and is {format_number(value)}")


def check_env(env: dict[str, str]) -> None:
    """Raises InvalidArgumentError or LimitError unless every variable can be given to execve."""
    if len(env) > limits.ENV_ITEMS_MAX:
        raise LimitError(f"at most {limits.ENV_ITEMS_MAX} environment variables, not {len(env)}")
    for key, value in env.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgumentError(f"environment variable {str(key)[:40]!r} must map text to text")
        if not key or "=" in key or "\0" in key or "\0" in value:
            raise InvalidArgumentError(f"environment variable {key[:40]!r} is empty or holds '=' or NUL")


def _check_program(spec: SandboxSpec) -> None:
    given = [words for words in (spec.entrypoint, spec.command) if words is not None]
    if given and not spec.start:
        raise InvalidArgumentError("entrypoint and command are what start=True starts", hint="set start=True, too")
    words = [word for part in given for word in part]
    if len(words) > limits.ARGV_ITEMS_MAX or sum(len(word.encode("utf-8", "surrogatepass")) for word in words) > (
        limits.ARGV_BYTES_MAX
    ):
        raise LimitError(f"entrypoint and command have at most {limits.ARGV_BYTES_MAX} bytes")
    if any("\0" in word for word in words):
        raise InvalidArgumentError("entrypoint and command must not hold NUL")


def check_links(spec: SandboxSpec) -> None:
    """Raises LimitError or InvalidArgumentError."""
    if spec.member is not None:
        parse_name(spec.member, "name within a job")
    if (spec.links or spec.member is not None) and spec.job is None:
        raise InvalidArgumentError("only sandboxes of a job have names and links within it", hint="give the job, too")
    if len(spec.links) > limits.SANDBOX_LINKS_MAX:
        raise LimitError(f"at most {limits.SANDBOX_LINKS_MAX} links of a sandbox, not {len(spec.links)}")
    if len(set(spec.links)) < len(spec.links):
        raise InvalidArgumentError("a link is there twice")
    if any(link.name in (spec.member, "localhost") for link in spec.links):
        raise InvalidArgumentError("a link leads to another sandbox: its name is not localhost, nor that of its own")


def _settle_egress(spec: SandboxSpec) -> None:
    """Rules that mean the same are the same text from here on."""
    if spec.egress is None:
        return
    if spec.network is not NetworkMode.PROXIED:
        raise InvalidArgumentError(
            "egress says what a sandbox with network proxied reaches", hint="ask for network proxied, too"
        )
    msgspec.structs.force_setattr(spec, "egress", plain_egress(spec.egress))


def link_addresses(spec: SandboxSpec) -> dict[str, str]:
    """An address of its own for each name, on the sandbox's loopback: two that have the same port do not collide."""
    names = sorted({link.name for link in spec.links})
    return {name: f"127.77.{number >> 8}.{number & 255}" for number, name in enumerate(names, 1)}


def check_volumes(volumes: tuple[VolumeMount, ...]) -> None:
    """Raises LimitError or InvalidArgumentError for too many, or for one that would lie in another."""
    if len(volumes) > limits.VOLUMES_PER_SANDBOX_MAX:
        raise LimitError(f"at most {limits.VOLUMES_PER_SANDBOX_MAX} volumes in a sandbox, not {len(volumes)}")
    paths = sorted(f"{volume.path}/" for volume in volumes)
    for above, below in pairwise(paths):
        if below.startswith(above):
            raise InvalidArgumentError(f"two volumes are at or below {above[:-1][:80]!r}")


def parse_volume(text: str, *, dataset: bool = False) -> VolumeMount:
    """`NAME:/path` or `NAME:/path:ro`. Raises InvalidArgumentError."""
    name, colon, rest = text.partition(":")
    path, _, how = rest.partition(":")
    if not colon or how not in ("", "ro", "rw") or (dataset and how == "rw"):
        what, shape = ("dataset", "NAME:/path") if dataset else ("volume", "NAME:/path, or NAME:/path:ro")
        raise InvalidArgumentError(f"{text[:80]!r} does not name a {what} and where it is to be", hint=shape)
    return VolumeMount(name, path, readonly=how == "ro", dataset=dataset)


def check_labels(labels: dict[str, str]) -> None:
    if len(labels) > limits.LABELS_MAX:
        raise LimitError(f"at most {limits.LABELS_MAX} labels, not {len(labels)}")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgumentError(f"label {str(key)[:40]!r} must map text to text")
        if not key or len(key.encode()) > limits.LABEL_KEY_BYTES_MAX:
            raise LimitError(f"label key {key[:40]!r} must be 1 to {limits.LABEL_KEY_BYTES_MAX} bytes")
        if len(value.encode()) > limits.LABEL_VALUE_BYTES_MAX:
            raise LimitError(f"label {key!r} must be at most {limits.LABEL_VALUE_BYTES_MAX} bytes")


def shown_path(path: bytes) -> str:
    """As a message shows it: quoted, on one line, and not longer than a line."""
    return repr(path[:80].decode("utf-8", "backslashreplace"))


def check_path(path: str | bytes, what: str = "path") -> bytes:
    """`path` as bytes for the agent. Raises InvalidArgumentError or LimitError; says nothing about existence."""
    if not isinstance(path, (str, bytes)):
        raise InvalidArgumentError(f"{what} must be text or bytes, not {type(path).__name__}")
    raw = path.encode("utf-8", "surrogateescape") if isinstance(path, str) else path
    if not raw or b"\0" in raw:
        raise InvalidArgumentError(f"{what} must not be empty and must not hold NUL")
    if len(raw) > limits.PATH_BYTES_MAX:
        raise LimitError(f"{what} has {len(raw)} bytes; the most is {limits.PATH_BYTES_MAX}")
    return raw
