"""What an operator may set, from a file, the environment and flags, read once; later ones win."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dsec.api.server import TcpAddress, check_socket_path
from dsec.backends.container.config import ContainerConfig
from dsec.backends.fncall.config import CallsConfig, DeviceMode, PoolConfig, Qos
from dsec.backends.fncall.tasks import TaskType, TaskTypes
from dsec.backends.fullvm.config import FullvmConfig
from dsec.backends.microvm.config import MicrovmConfig
from dsec.core import limits
from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import parse_name
from dsec.core.image_names import parse_registry
from dsec.core.spec import Substrate
from dsec.core.units import parse_size
from dsec.core.variables import wherever
from dsec.image.registry.client import RegistrySettings
from dsec.image.residue import check_pattern
from dsec.node.config import CollectConfig, EgressConfig, IdleConfig, NodeConfig, WarmConfig
from dsec.node.volumes import check_datasets
from dsec.observe.logs import LEVELS
from dsec.serve.cluster_settings import ClusterSettings
from dsec.serve.settings import check_names, in_place
from dsec.storage.loader import FRONTS
from dsec.storage.store.trusted import trusted_stores
from dsec.wire.api import DEFAULT_SOCKET_NAME, RUN_DIR_ROOT, STATE_DIR_ROOT
from dsec.wire.codec import from_toml

CONFIG_FILE: Final = Path("/etc/dsec/dsec.toml")

# Of one setting each. Everything else is set in the file.
VARIABLES: Final = {
    "DSEC_RUN_DIR": "run_dir",
    "DSEC_STATE_DIR": "state_dir",
    "DSEC_LISTEN": "api.listen",
    "DSEC_SUBSTRATES": "node.substrates",
    "DSEC_JOIN": "cluster.servers",
    "DSEC_IDENTITY": "cluster.identity",
    "DSEC_LOG_LEVEL": "log.level",
}
_LISTS: Final = ("node.substrates", "cluster.servers")
_FLAGS: Final = {"node.substrates": "substrate", "cluster.servers": "join"}  # those not called as their setting
_RUN_DIR: Final = re.compile(r"""(?m)^\s*run_dir\s*=\s*["'](/[^"']+)["']""")
_LISTEN: Final = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[A-Za-z0-9.-]+)):(?P<port>[0-9]{1,5})\Z")


class ApiConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The local socket is always there; `listen` adds TCP ("127.0.0.1:8080"), where every request needs a token."""

    listen: str | None = None  # "HOST:PORT" on TCP, where every request needs a token; none: the local socket only
    tls_certificate: str | None = None  # PEM file, with `listen`
    tls_key: str | None = None  # PEM file, with `tls_certificate`
    insecure: bool = False  # listen beyond loopback without TLS
    grace_s: float = 5.0  # for requests under way when the service stops

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidArgumentError("tls_certificate and tls_key belong together")
        if not 0 <= self.grace_s <= 3_600:
            raise InvalidArgumentError("grace_s must be between 0 and 3600")
        self.address()

    def address(self) -> TcpAddress | None:
        if self.listen is None:
            return None
        found = _LISTEN.match(self.listen)
        if not found or int(found["port"]) > 65_535:
            raise InvalidArgumentError(
                f"{self.listen[:80]!r} is not an address to listen on", hint="such as 127.0.0.1:8080 or [::1]:8080"
            )
        return TcpAddress(found["v6"] or found["host"], int(found["port"]))


class WarmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`dsec.node.config` says what each is for."""

    spares_max: int = 0
    low: int = 2
    high: int = 16
    memory_bytes_max: int | str = 256 * limits.MIB
    age_s_max: float = 3_600.0
    idle_s: float = 600.0

    def config(self) -> WarmConfig:
        return WarmConfig(
            spares_max=self.spares_max,
            low=self.low,
            high=self.high,
            memory_bytes_max=parse_size(self.memory_bytes_max, "memory_bytes_max"),
            age_s_max=self.age_s_max,
            idle_s=self.idle_s,
        )


class IdleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What becomes of sandboxes that nobody uses, each after so many seconds without use. Use brings them back."""

    pause_s: float = 0.0  # it is paused; 0: nor does the rest happen
    page_out_s: float = 0.0  # its memory goes to swap, where the host has any; 0: not
    sleep_s: float = 0.0  # its memory goes to the disk, as in a deep pause (machines); 0: not
    resume_wait_s: float = 10.0  # for memory, of what has given its own back; then a resume fails

    def config(self) -> IdleConfig:
        return IdleConfig(self.pause_s, self.page_out_s, self.sleep_s, self.resume_wait_s)


class CollectSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`dsec.node.config` says what each is for."""

    free_bytes_min: int | str = 4 * limits.GIB
    record_keep_s: float = 7 * 86_400.0
    blob_keep_s: float = 7 * 86_400.0

    def config(self, *, blob_bytes_max: int) -> CollectConfig:
        return CollectConfig(
            free_bytes_min=parse_size(self.free_bytes_min, "free_bytes_min"),
            record_keep_s=self.record_keep_s,
            blob_keep_s=self.blob_keep_s,
            blob_bytes_max=blob_bytes_max,
        )


class EgressSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What sandboxes with network `proxied` reach beside what their own rules say."""

    offered: bool = True  # false: none are made
    private: tuple[str, ...] = ()  # networks (CIDR) that are not public, which rules of sandboxes may name all the same
    resolvers: tuple[str, ...] = ()  # who is asked for names: ADDRESS or ADDRESS:PORT; none: as this machine does

    def config(self) -> EgressConfig:
        return EgressConfig(self.offered, self.private, self.resolvers)


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes also as text such as "4GiB". `dsec.node.config` says what each is for."""

    substrates: tuple[Substrate, ...] = (Substrate.CONTAINER, Substrate.MICROVM, Substrate.FULLVM)  # what it offers
    sandboxes_max: int = limits.SANDBOXES_PER_NODE_MAX  # that live at once
    memory_overcommit: float = 200.0  # memory promised to sandboxes, over the machine's
    memory_available_bytes_min: int | str = limits.MEMORY_AVAILABLE_BYTES_MIN  # with less left, creates are refused
    disk_free_bytes_min: int | str = limits.DISK_FREE_BYTES_MIN  # with less left, creates and builds are refused
    records_bytes_max: int | str = limits.RECORDS_BYTES_MAX
    ended_records_bytes_max: int | str = limits.ENDED_RECORDS_BYTES_MAX
    pause_deadline_s: float = 10.0  # then a sandbox that does not stop goes on, and the pause has failed
    creates_at_once_max: int = 64
    residue: dict[str, tuple[str, ...]] = {}  # rule → patterns of what is not published; none: the rule is off
    snapshot_freeze_s: float = 30.0  # a sandbox that stands still for longer goes on, and its snapshot has failed
    warm: WarmSettings = WarmSettings()
    collect: CollectSettings = CollectSettings()
    idle: IdleSettings = IdleSettings()
    egress: EgressSettings = EgressSettings()
    datasets: dict[str, str] = {}  # name → directory of the node, which sandboxes of every project may read

    def __post_init__(self) -> None:
        if not self.substrates:
            raise InvalidArgumentError("a node offers at least one substrate")

    def config(self, *, state_dir: Path, run_dir: Path) -> NodeConfig:
        return NodeConfig(
            state_dir=state_dir,
            run_dir=run_dir,
            substrates=frozenset(self.substrates),
            sandboxes_max=self.sandboxes_max,
            memory_overcommit=self.memory_overcommit,
            memory_available_bytes_min=parse_size(self.memory_available_bytes_min, "memory_available_bytes_min"),
            disk_free_bytes_min=parse_size(self.disk_free_bytes_min, "disk_free_bytes_min"),
            records_bytes_max=parse_size(self.records_bytes_max, "records_bytes_max"),
            ended_records_bytes_max=parse_size(self.ended_records_bytes_max, "ended_records_bytes_max"),
            pause_deadline_s=self.pause_deadline_s,
            creates_at_once_max=self.creates_at_once_max,
            residue=_checked_residue(self.residue),
            snapshot_freeze_s=self.snapshot_freeze_s,
            warm=self.warm.config(),
            collect=self.collect.config(blob_bytes_max=limits.IMAGE_CACHE_BYTES_DEFAULT),
            idle=self.idle.config(),
            egress=self.egress.config(),
            datasets=check_datasets(self.datasets, own=(state_dir, run_dir)),
        )


def _checked_residue(rules: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    for name, patterns in rules.items():
        parse_name(name, "name of a rule")
        for pattern in patterns:
            check_pattern(pattern)
    return rules


class ContainerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`dsec.backends.container.config` says what each is for."""

    id_dir: str = "/run/dsec/ids"
    cgroup_parent: str = "dsec"
    disk: str = "auto"  # how a limit on the disk is enforced: "project", "image", "tmpfs", "directory" (not at all)
    shm_bytes: int | str = 64 * limits.MIB  # size of /dev/shm in a sandbox
    prepared: int = 2  # containers made ahead as far as that goes without knowing what will run in them; 0: none
    light_from: int = 64  # sandboxes there are, from which on new ones get network and terminals when first used
    keep_cgroups_from: int = 256  # sandboxes there are, from which on processor cgroups of ended ones serve new ones
    pids_kept_for_host: int = 4096  # of the kernel's, which sandboxes together leave to others
    memory_kept_for_host: int | str = limits.GIB  # which sandboxes together leave; at most a quarter of the machine
    resource_view: str = "auto"  # what programs see of processors and memory: "live" (lxcfs), "static", "host"

    def fields(self) -> dict[str, object]:
        """For ContainerConfig, beside its directories."""
        return {
            "id_dir": Path(self.id_dir),
            "cgroup_parent": self.cgroup_parent,
            "disk": self.disk,
            "shm_bytes": parse_size(self.shm_bytes, "shm_bytes"),
            "prepared": self.prepared,
            "light_from": self.light_from,
            "keep_cgroups_from": self.keep_cgroups_from,
            "pids_kept_for_host": self.pids_kept_for_host,
            "memory_kept_for_host": parse_size(self.memory_kept_for_host, "memory_kept_for_host"),
            "resource_view": self.resource_view,
        }


class MicrovmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`dsec.backends.microvm.config` says what each is for."""

    cache_dir: str = "/var/cache/dsec/vm"  # kernels for guests, shared by all nodes of the host
    monitor: str = "auto"  # "firecracker", "qemu", "auto": Firecracker where it is and guests run on the processor
    firecracker: str = "firecracker"  # a name in PATH, or a path
    memory: str = "mapped"  # of clones under Firecracker: "mapped" from the template, "served" page by page
    diff_snapshots: bool = False  # Firecracker notes what guests write: snapshots stop them less; they are slower
    qemu: str = "qemu-system-x86_64"  # a name in PATH, or a path
    accelerator: str = "auto"  # "kvm", "tcg" (emulated: slow, a lesser boundary), "auto": kvm if it works
    kernel: str = "linux-image-6.12-cloud-amd64"  # Debian package that the guests' kernel comes from
    disk_bytes: int | str = 10 * limits.GIB  # of a sandbox that asks for no other; only what is written takes room
    templates_max: int = 16  # kept; those that were not used for longest go
    layer_device: str = (
        "blk"  # or "pmem": guests share pages of layers, as tenants can measure; not Firecracker before 1.14
    )
    page_out: bool = True  # memory of paused ones goes to swap, where the host has any
    boot_s: float = 120.0  # for a template to come up

    def fields(self) -> dict[str, object]:
        """For MicrovmConfig, beside its directories."""
        return {
            "cache_dir": Path(self.cache_dir),
            "monitor": self.monitor,
            "firecracker": self.firecracker,
            "memory": self.memory,
            "diff_snapshots": self.diff_snapshots,
            "qemu": self.qemu,
            "accelerator": self.accelerator,
            "kernel": self.kernel,
            "disk_bytes": parse_size(self.disk_bytes, "disk_bytes"),
            "templates_max": self.templates_max,
            "layer_device": self.layer_device,
            "page_out": self.page_out,
            "boot_s": self.boot_s,
        }


class FullvmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`dsec.backends.fullvm.config` says what each is for. The monitor is that of microvms."""

    uefi_dir: str = "/usr/share/OVMF"  # firmware of machines that want UEFI
    templates_max: int = 8  # kept; those that were not used for longest go
    boot_s: float = 600.0  # for a template to come up

    def fields(self) -> dict[str, object]:
        """For FullvmConfig, beside its directories and what it shares with microvms."""
        return {"uefi": Path(self.uefi_dir), "templates_max": self.templates_max, "boot_s": self.boot_s}


class StorageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    cache_bytes: int | str = 32 * limits.GIB  # of chunks of layers that are loaded from stores, on this node's disk

    stores: tuple[str, ...] = ()  # that layers are taken of, or pushed to, by URL, or what they lie below; empty: any
    pull: tuple[str, ...] = ()  # stores that an environment is taken of which a create asks for and the node lacks
    loader_front: str = "auto"  # how readers come to chunks: "fuse", "fanotify" (Linux 6.14), "auto": fuse where it is
    block_devices: bool = True  # disks of machines from stores are block devices, where the kernel has ublk (Linux 6.5)

    def __post_init__(self) -> None:
        trusted_stores(self.stores)
        trusted_stores(self.pull)
        if self.loader_front not in FRONTS:
            raise InvalidArgumentError(f"storage.loader_front must be one of {', '.join(FRONTS)}")
        if self.cache_size() < limits.CACHE_BYTES_MIN:
            raise InvalidArgumentError("storage.cache_bytes must be at least 64MiB")

    def cache_size(self) -> int:
        return parse_size(self.cache_bytes, "cache_bytes")


class RegistriesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Images of registries. Accounts are those of the user that the service runs as (~/.docker/config.json)."""

    insecure: tuple[str, ...] = ()  # HOST[:PORT] that may be asked in clear, or with any certificate; loopback may
    cache_bytes: int | str = limits.IMAGE_CACHE_BYTES_DEFAULT  # of blobs kept for the next pull or push

    def __post_init__(self) -> None:
        self.settings()

    def settings(self) -> RegistrySettings:
        return RegistrySettings(
            insecure=tuple(map(parse_registry, self.insecure)),
            cache_bytes=parse_size(self.cache_bytes, "cache_bytes"),
        )


class PoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of the pools that `environment` and `type` fit, the first such table; what is left out is as for all calls."""

    environment: str | None = None  # none: all
    type: str | None = None  # none: all
    places_min: int = 0  # containers kept ready; wants `environment` and `type`
    places_max: int | None = None  # none: as many as there are
    place_memory_bytes: int | str | None = None
    place_cpu: float | None = None
    preload: tuple[str, ...] | None = None
    age_s_max: float = 3_600.0  # then a container is replaced
    calls_max: int = 10_000  # then a container is replaced
    qos: Qos = Qos.NORMAL  # background: runs when nobody else wants the processor
    cpus: str | None = None  # such as "0-3,8": runs on no other processors
    devices: tuple[str, ...] = ()  # names of CDI: vendor.com/class=name
    device_mode: DeviceMode = DeviceMode.SHARED  # exclusive: each container has one of them, which nobody else has

    def config(self, calls: CallsSettings) -> PoolConfig:
        memory = calls.place_memory_bytes if self.place_memory_bytes is None else self.place_memory_bytes
        return PoolConfig(
            environment=self.environment,
            type=self.type,
            places_min=self.places_min,
            places_max=limits.CALL_PLACES_MAX if self.places_max is None else self.places_max,
            place_memory_bytes=parse_size(memory, "place_memory_bytes"),
            place_cpu=calls.place_cpu if self.place_cpu is None else self.place_cpu,
            preload=calls.preload if self.preload is None else self.preload,
            age_s_max=self.age_s_max,
            calls_max=self.calls_max,
            qos=self.qos,
            cpus=self.cpus,
            devices=self.devices,
            device_mode=self.device_mode,
        )


class CallsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`dsec.backends.fncall.config` says what each is for."""

    places_max: int | None = None  # containers for calls; none: two for each processor; 0: no calls
    place_memory_bytes: int | str = 512 * limits.MIB  # of one container, the files of its call included
    place_cpu: float = 1.0  # cores of one container
    idle_s: float = 300.0  # then a container that nobody used goes
    preload: tuple[str, ...] = ()  # modules that Python has imported before a call comes
    types: dict[str, TaskType] = {}  # more task types, or others in place of those that are shipped
    pools: dict[str, PoolSettings] = {}  # containers that are to differ, under any names
    cdi_dirs: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")  # of descriptions of devices; later ones win

    def config(self) -> CallsConfig:
        places = {} if self.places_max is None else {"places_max": self.places_max}
        config = CallsConfig(
            place_memory_bytes=parse_size(self.place_memory_bytes, "place_memory_bytes"),
            place_cpu=self.place_cpu,
            idle_s=self.idle_s,
            preload=self.preload,
            types=self.types,
            pools=tuple(pool.config(self) for pool in self.pools.values()),
            cdi_dirs=tuple(map(Path, self.cdi_dirs)),
            **places,
        )
        known = {type.name for type in TaskTypes(config.types).list()}
        if unknown := [pool.type for pool in config.pools if pool.type is not None and pool.type not in known]:
            raise InvalidArgumentError(f"a pool of calls is for task type {unknown[0]!r}, which is not there")
        return config


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    level: str = "info"  # debug, info, warning or error
    file_bytes_max: int | str = 16 * limits.MIB  # of a detached service; one older file is kept beside it

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise InvalidArgumentError(f"log level must be one of {', '.join(LEVELS)}, and is {self.level[:40]!r}")
        if parse_size(self.file_bytes_max, "file_bytes_max") < limits.MIB:
            raise InvalidArgumentError("file_bytes_max must be at least 1MiB")


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole of it, one record for each part. Directories that are not given depend on who runs it."""

    run_dir: str  # socket, locks and the launcher's files; gone after a reboot
    state_dir: str  # environments, sandboxes' files, journal, records, tokens and logs
    api: ApiConfig = ApiConfig()
    node: NodeSettings = NodeSettings()
    container: ContainerSettings = ContainerSettings()
    microvm: MicrovmSettings = MicrovmSettings()
    fullvm: FullvmSettings = FullvmSettings()
    storage: StorageSettings = StorageSettings()
    registries: RegistriesSettings = RegistriesSettings()
    calls: CallsSettings = CallsSettings()
    cluster: ClusterSettings = ClusterSettings()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        for what, path in (("run_dir", self.run_dir), ("state_dir", self.state_dir)):
            if not path.startswith("/") or "\0" in path:
                raise InvalidArgumentError(
                    f"{what} must be an absolute path, and is {path[:80]!r}", hint="write it whole, such as /run/dsec"
                )
        check_socket_path(self.socket)
        self.node.config(state_dir=Path(self.state_dir), run_dir=Path(self.run_dir))
        self.calls.config()
        if Substrate.CONTAINER in self.node.substrates:
            ContainerConfig(run_dir=Path(self.run_dir), state_dir=Path(self.state_dir), **self.containers())  # type: ignore[arg-type]
        if Substrate.MICROVM in self.node.substrates:
            MicrovmConfig(run_dir=Path(self.run_dir), state_dir=Path(self.state_dir), **self.machines())  # type: ignore[arg-type]
        if Substrate.FULLVM in self.node.substrates:
            FullvmConfig(run_dir=Path(self.run_dir), state_dir=Path(self.state_dir), **self.full_machines())  # type: ignore[arg-type]

    def containers(self) -> dict[str, object]:
        """Fields of ContainerConfig."""
        return {**self.container.fields(), "proxied": self.node.egress.offered}

    def machines(self) -> dict[str, object]:
        """Fields of MicrovmConfig; what both substrates share is set for containers."""
        return {
            **self.microvm.fields(),
            "id_dir": Path(self.container.id_dir),
            "cgroup_parent": self.container.cgroup_parent,
            "proxied": self.node.egress.offered,
        }

    def full_machines(self) -> dict[str, object]:
        """Fields of FullvmConfig."""
        shared = self.machines()
        names = ("cache_dir", "qemu", "accelerator", "kernel", "id_dir", "cgroup_parent", "proxied")
        return {**{name: shared[name] for name in names}, **self.fullvm.fields()}

    @property
    def socket(self) -> Path:
        return Path(self.run_dir) / DEFAULT_SOCKET_NAME

    @property
    def log_file(self) -> Path:
        return Path(self.state_dir) / "dsec.log"


def load_config(flags: Mapping[str, Any], environ: Mapping[str, str], *, file: Path | None = None) -> ServeConfig:
    """`flags` by dotted name ("api.listen"); None = not given. Raises InvalidArgumentError for what is unknown.

    The file: `file`, else DSEC_CONFIG, else /etc/dsec/dsec.toml where there is one.
    """
    environ = wherever(environ)
    settings = _defaults(environ)
    path, tables = _file_settings(file, environ)
    check_names(tables, ServeConfig, str(path))
    _merge(settings, tables)
    origins = dict.fromkeys(_dotted(tables), str(path))
    for variable, name in VARIABLES.items():
        if value := environ.get(variable):
            _set(settings, name, value.split(",") if name in _LISTS else value)
            origins[name] = variable
    for name, given in flags.items():
        if given is not None:
            _set(settings, name, given)
            origins[name] = "--" + _FLAGS.get(name, name.rpartition(".")[2].replace("_", "-"))
    try:
        return from_toml(settings, ServeConfig)
    except InvalidArgumentError as error:
        raise in_place(error, origins) from error


def find_run_dir(
    flags: Mapping[str, Any], environ: Mapping[str, str], *, file: Path | None = None
) -> tuple[Path, InvalidArgumentError | None]:
    """Where a service is that is to be stopped, whatever else is wrong with its settings; and what is wrong."""
    try:
        return Path(load_config(flags, environ, file=file).run_dir), None
    except InvalidArgumentError as error:
        named = flags.get("run_dir") or environ.get("DSEC_RUN_DIR") or _run_dir_in(file, environ)
        return Path(named or _defaults(environ)["run_dir"]).absolute(), error


def _run_dir_in(file: Path | None, environ: Mapping[str, str]) -> str | None:
    """Of a file that may be no TOML at all."""
    try:
        text = Path(file or environ.get("DSEC_CONFIG") or CONFIG_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = _RUN_DIR.search(re.split(r"(?m)^\s*\[", text)[0])
    return None if found is None else found[1]


def _defaults(environ: Mapping[str, str]) -> dict[str, Any]:
    if os.geteuid() == 0:
        return {"run_dir": RUN_DIR_ROOT, "state_dir": STATE_DIR_ROOT}
    home = environ.get("HOME", "/")
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    state = environ.get("XDG_STATE_HOME") or f"{home}/.local/state"
    return {"run_dir": f"{runtime}/dsec", "state_dir": f"{state}/dsec"}


def _dotted(tables: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in tables.items():
        found += _dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return found


def _file_settings(file: Path | None, environ: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    named = file or (Path(environ["DSEC_CONFIG"]) if environ.get("DSEC_CONFIG") else None)
    path = named or CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if named is None:
            return path, {}
        raise InvalidArgumentError(
            f"there is no configuration at {path}",
            hint="--config and DSEC_CONFIG name the file; without it all is default",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read the configuration {path}: {error}") from error
    try:
        return path, from_toml(text, dict)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.message}") from error


def _merge(settings: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            _merge(settings[name], value)
        else:
            settings[name] = value


def _set(settings: dict[str, Any], name: str, value: Any) -> None:
    part, dot, field = name.partition(".")
    if not dot:
        settings[part] = value
        return
    inner = settings.setdefault(part, {})
    if not isinstance(inner, dict):
        raise InvalidArgumentError(f"[{part}] in the configuration must be a table")
    inner[field] = value
