"""A spec and what is known of the host become a launch plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dsec.backends.base import InstanceSpec, VolumeSource
from dsec.backends.container.config import ContainerConfig
from dsec.backends.container.record import ContainerRecord
from dsec.backends.container.view import STATIC, view_of
from dsec.core.errors import InvalidArgumentError, UnsupportedError
from dsec.core.limits import LOWERS_MAX
from dsec.core.spec import NetworkMode, SandboxSpec, link_addresses
from dsec.density.cgroups import CgroupHost, plan_cgroups
from dsec.security import capabilities, masks, syscalls
from dsec.security.syscalls import filter_name
from dsec.wire.codec import pack
from dsec.wire.egress import NAMESERVER
from dsec.wire.launch import ClaimArgs, DevicePlan, EtcFile, LaunchPlan, ResourceView, VolumeBind

AGENT_FILTER = filter_name(syscalls.AGENT)
LIGHT_AGENT_FILTER = filter_name(syscalls.LIGHT_AGENT)
EXEC_FILTER = filter_name(syscalls.EXEC)
FILTERS = {AGENT_FILTER: syscalls.AGENT, LIGHT_AGENT_FILTER: syscalls.LIGHT_AGENT, EXEC_FILTER: syscalls.EXEC}

# The agent itself, and its short-lived forks for archives and big removals.
_AGENT_PIDS = 8
_OPEN_FILES_SOFT = 65_536
# What a claim puts in place, or what is the spare's own business.
_OF_NOBODY: dict[str, Any] = {
    "sandbox": "",
    "id_base": 0,
    "directory": "",
    "socket": "",
    "hostname": "",
    "cgroup2": None,
    "cgroup1": {},
    "env": {},
    "user": None,
    "workdir": None,
    "spare": False,
}


@dataclass(frozen=True, slots=True)
class HostFacts:
    cgroups: CgroupHost
    cgroup_parent: str  # of this node, below each hierarchy's root
    open_files_hard: int  # RLIMIT_NOFILE: without CAP_SYS_RESOURCE nothing above it can be given
    view: str = STATIC  # live | static | host
    masks: tuple[str, ...] = masks.HIDDEN


def holder_directory(facts: HostFacts, sandbox: str) -> str:
    """The cgroup directory whose existence says that the sandbox is on the host."""
    roots = [facts.cgroups.v2] if facts.cgroups.v2 else list(facts.cgroups.v1.values())
    if not roots:
        raise UnsupportedError("this host has no cgroup hierarchy", hint="mount cgroup2 at /sys/fs/cgroup")
    return f"{roots[0]}/{facts.cgroup_parent}/{sandbox}"


def plan_launch(instance: InstanceSpec, config: ContainerConfig, facts: HostFacts, *, id_base: int) -> LaunchPlan:
    """Raises UnsupportedError or InvalidArgumentError for what a container cannot give."""
    spec = instance.spec
    if spec.network not in (NetworkMode.NONE, NetworkMode.PROXIED):
        raise UnsupportedError(f"containers have no network mode {spec.network.value!r} yet", hint="use network='none'")
    if len(instance.layers) > LOWERS_MAX:
        raise InvalidArgumentError(f"an environment has at most {LOWERS_MAX} layers, not {len(instance.layers)}")
    cgroups = plan_cgroups(
        facts.cgroups,
        facts.cgroup_parent,
        instance.id,
        cpu=spec.cpu,
        memory_bytes=spec.memory_bytes,
        pids=spec.pids_max + _AGENT_PIDS,
        background=instance.background,
        cpus=instance.cpus,
    )
    hostname = instance.hostname
    open_files = min(_OPEN_FILES_SOFT, facts.open_files_hard)
    return LaunchPlan(
        sandbox=instance.id,
        id_base=id_base,
        lowers=[layer.digest for layer in instance.layers],
        directory=sandbox_directory(config, instance.id),
        # Files in memory count against the memory limit anyway, so that is the bound where none is asked for.
        upper_tmpfs_bytes=(
            (spec.disk_bytes or spec.memory_bytes) if config.disk == "tmpfs" or instance.upper_in_memory else None
        ),
        socket=socket_path(config, instance.id),
        hostname=hostname,
        etc_files=_etc_files(hostname, spec),
        masks=list(facts.masks),
        readonly_proc=list(masks.READONLY),
        # As everywhere half of the memory at most: a full /dev/shm is an error of whoever fills it, and not the end of
        # the sandbox, whose agent is all that is left to kill when memory is held by files.
        shm_bytes=min(config.shm_bytes, spec.memory_bytes // 2),
        cgroup2=cgroups.cgroup2,
        cgroup2_files=cgroups.cgroup2_files,
        cgroup1=cgroups.cgroup1,
        cgroup1_files=cgroups.cgroup1_files,
        # A core file of one byte is none, and at 1 alone the kernel does not run a crash handler of the host either.
        rlimits={"nofile": [open_files, facts.open_files_hard], "core": [1, 1]},
        sysctls=_sysctls(spec.memory_bytes),
        caps_agent=capabilities.AGENT_WITH_PRIVILEGE_GAIN if spec.privilege_gain else capabilities.AGENT,
        caps_exec=capabilities.EXEC,
        filter_agent=AGENT_FILTER,
        filter_exec=EXEC_FILTER,
        no_new_privs=not spec.privilege_gain,
        env={key.encode(): value.encode("utf-8", "surrogateescape") for key, value in instance.env.items()},
        user=instance.user,
        workdir=instance.workdir.encode("utf-8", "surrogateescape") if instance.workdir else None,
        spare=instance.spare,
        view=view_of(facts.view, spec),
        volumes=[_volume(volume) for volume in instance.volumes],
        devices=[DevicePlan(device.path, device.major, device.minor, device.readonly) for device in instance.devices],
    )


def lighten(plan: LaunchPlan) -> LaunchPlan:
    """Without what costs most of an idle one; its first operation makes it, and takes half a millisecond longer for it.

    A spare is to be quick when it is claimed. Where privileges may be gained the agent keeps a right that it would have
    to give up.
    """
    if plan.spare or not plan.no_new_privs:
        return plan
    return msgspec.structs.replace(plan, light=True, filter_agent=LIGHT_AGENT_FILTER)


def _volume(volume: VolumeSource) -> VolumeBind:
    """One with an image gets its device when it is mounted."""
    return VolumeBind(
        path=volume.path, source=volume.source, readonly=volume.readonly, inode=volume.inode, file=volume.file
    )


def shape_of(plan: LaunchPlan) -> bytes:
    """All of a plan that no claim can change. What a later version adds to plans is in it by itself."""
    bare = msgspec.structs.replace(
        plan,
        **_OF_NOBODY,
        view=plan.view and ResourceView(cpus=0, memory_bytes=0, live=plan.view.live),
        etc_files=[EtcFile(file.path, b"") for file in plan.etc_files],
        cgroup2_files=dict.fromkeys(plan.cgroup2_files, ""),
        cgroup1_files={controller: dict.fromkeys(files, "") for controller, files in plan.cgroup1_files.items()},
    )
    return pack(bare)


def plan_claim(plan: LaunchPlan, spare: ContainerRecord, limits: Mapping[str, str]) -> ClaimArgs:
    """`plan` is for the sandbox, `limits` are what the spare has: those that agree are not written again."""
    wanted = limit_files(plan, cgroup2=spare.cgroup2, cgroup1=spare.cgroup1)
    return ClaimArgs(
        sandbox=spare.launched_as,
        pid=spare.pid,
        start_ticks=spare.start_ticks,
        hostname=plan.hostname,
        etc_files=plan.etc_files,
        cgroup_files={path: value for path, value in wanted.items() if limits.get(path) != value},
    )


def limit_files(plan: LaunchPlan, *, cgroup2: str | None, cgroup1: Mapping[str, str]) -> dict[str, str]:
    """Path → value of every limit of the plan, in these cgroups."""
    files = {f"{cgroup2}/{name}": value for name, value in plan.cgroup2_files.items()}
    for controller, values in plan.cgroup1_files.items():
        files |= {f"{cgroup1[controller]}/{name}": value for name, value in values.items()}
    return files


def sandbox_directory(config: ContainerConfig, sandbox: str) -> str:
    return f"{config.state_dir}/sandboxes/{sandbox}"


def socket_path(config: ContainerConfig, sandbox: str) -> str:
    return f"{config.run_dir}/sb/{sandbox}.sock"


def under_names(plan: LaunchPlan, config: ContainerConfig, name: str) -> LaunchPlan:
    """The same for another sandbox, by what the launcher calls it."""
    return msgspec.structs.replace(
        plan,
        sandbox=name,
        directory=sandbox_directory(config, name),
        socket=socket_path(config, name),
        cgroup2=plan.cgroup2 and str(Path(plan.cgroup2).parent / name),
        cgroup1={controller: str(Path(path).parent / name) for controller, path in plan.cgroup1.items()},
    )


def _etc_files(hostname: str, spec: SandboxSpec) -> list[EtcFile]:
    own = hostname if spec.member in (None, hostname) else f"{hostname} {spec.member}"
    hosts = f"127.0.0.1\tlocalhost {own}\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    hosts += "".join(f"{address}\t{name}\n" for name, address in link_addresses(spec).items())
    return [
        EtcFile("/etc/hosts", hosts.encode()),
        EtcFile("/etc/hostname", f"{hostname}\n".encode()),
        EtcFile("/etc/resolv.conf", _resolvers(spec.network)),
    ]


def _resolvers(network: NetworkMode) -> bytes:
    """Without a network none is reachable: an empty file makes look-ups fail at once instead of timing out."""
    return f"nameserver {NAMESERVER}\n".encode() if network is NetworkMode.PROXIED else b""


def _sysctls(memory_bytes: int) -> dict[str, str]:
    """Bounds on what namespaces let root inside make: nested namespaces, System V and POSIX IPC objects."""
    return {
        "user.max_user_namespaces": "0",
        "kernel.shmall": str(max(1, memory_bytes // 4096)),
        "kernel.shmmni": "256",
        "kernel.sem": "250 32000 32 128",
        "kernel.msgmni": "256",
        "fs.mqueue.queues_max": "64",
    }
