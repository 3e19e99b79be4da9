"""The launch plan of a container, and the filters that it names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dsec.backends.base import InstanceSpec, Layer
from dsec.backends.container.config import ContainerConfig
from dsec.backends.container.plan import FILTERS, HostFacts, lighten, plan_launch, shape_of
from dsec.backends.container.record import parse_record, record_of
from dsec.core.errors import InvalidArgumentError, StorageError, UnsupportedError
from dsec.core.ids import NodeId, SandboxId
from dsec.core.spec import Environment, NetworkMode, SandboxSpec
from dsec.density.cgroups import CgroupHost
from dsec.security import syscalls
from dsec.security.capabilities import mask
from dsec.wire.codec import pack
from dsec.wire.egress import NAMESERVER
from dsec.wire.launch import MESSAGE_BYTES_MAX

ID = SandboxId("sbx_aaaaaaaa_bbbbbbbbbbbbbbbb")
FACTS = HostFacts(CgroupHost(Path("/cg"), frozenset({"memory", "cpu", "pids"})), "dsec/n", 20_000)
CONFIG = ContainerConfig(run_dir=Path("/run/d"), state_dir=Path("/var/d"))


def instance(**changes: object) -> InstanceSpec:
    spec = SandboxSpec(environment=Environment("base"), **changes)  # type: ignore[arg-type]
    layers = (Layer("low", "erofs", "/l/low"), Layer("high", "erofs", "/l/high"))
    return InstanceSpec(ID, NodeId("aaaaaaaa"), spec, layers, {"A": "b"}, None, "/w")


def test_a_plan_names_layers_lowest_first_and_everything_the_sandbox_leaves() -> None:
    plan = plan_launch(instance(), CONFIG, FACTS, id_base=0x7000_0000)

    assert plan.lowers == ["low", "high"]
    assert plan.directory == f"/var/d/sandboxes/{ID}"
    assert plan.socket == f"/run/d/sb/{ID}.sock"
    assert plan.cgroup2 == f"/cg/dsec/n/{ID}"
    assert plan.env == {b"A": b"b"}


def test_the_socket_path_fits_where_the_kernel_keeps_it() -> None:
    longest = ContainerConfig(run_dir=Path("/" + "r" * 59), state_dir=Path("/s"))

    assert len(plan_launch(instance(), longest, FACTS, id_base=0).socket) < 108
    with pytest.raises(InvalidArgumentError, match="shorter"):
        ContainerConfig(run_dir=Path("/" + "r" * 60), state_dir=Path("/s"))


def test_new_privileges_are_possible_only_when_asked_for() -> None:
    plain, gaining = (plan_launch(instance(privilege_gain=gain), CONFIG, FACTS, id_base=0) for gain in (False, True))

    assert (plain.no_new_privs, gaining.no_new_privs) == (True, False)
    # A filter is loaded by right of no_new_privs, or of the agent's sys_admin; commands have that in neither case.
    assert gaining.caps_agent == plain.caps_agent | mask("sys_admin")
    assert gaining.caps_exec == plain.caps_exec == plain.caps_exec & ~mask("sys_admin")


def test_open_files_stay_below_what_the_host_can_give() -> None:
    assert plan_launch(instance(), CONFIG, FACTS, id_base=0).rlimits["nofile"] == [20_000, 20_000]


def test_files_in_memory_are_bounded_by_the_limit_asked_for_or_by_the_memory() -> None:
    in_memory = ContainerConfig(run_dir=Path("/run/d"), state_dir=Path("/var/d"), disk="tmpfs")

    assert plan_launch(instance(), CONFIG, FACTS, id_base=0).upper_tmpfs_bytes is None
    assert plan_launch(instance(memory_bytes=1 << 30), in_memory, FACTS, id_base=0).upper_tmpfs_bytes == 1 << 30
    assert plan_launch(instance(disk_bytes=1 << 25), in_memory, FACTS, id_base=0).upper_tmpfs_bytes == 1 << 25


def test_a_network_is_a_resolver_and_nothing_else_of_the_plan_so_that_a_spare_may_become_one() -> None:
    none, proxied = (
        plan_launch(instance(network=mode), CONFIG, FACTS, id_base=0)
        for mode in (NetworkMode.NONE, NetworkMode.PROXIED)
    )
    resolvers = {file.path: file.content for file in proxied.etc_files}

    assert resolvers["/etc/resolv.conf"] == f"nameserver {NAMESERVER}\n".encode()
    assert {file.path: file.content for file in none.etc_files}["/etc/resolv.conf"] == b""
    assert shape_of(none) == shape_of(proxied)


def test_a_network_that_containers_do_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="routed"):
        plan_launch(instance(network=NetworkMode.ROUTED), CONFIG, FACTS, id_base=0)


def test_a_plan_and_each_filter_fit_into_a_message() -> None:
    assert len(pack(plan_launch(instance(), CONFIG, FACTS, id_base=0))) < MESSAGE_BYTES_MAX
    assert len(pack(syscalls.EXEC)) < MESSAGE_BYTES_MAX


def test_a_record_survives_the_journal_and_later_versions_are_refused() -> None:
    record = record_of(plan_launch(instance(), CONFIG, FACTS, id_base=0), "boot")
    later = {**msgspec.msgpack.decode(record.to_bytes()), "version": 2}

    assert parse_record(record.to_bytes()) == record
    for bad in (b"", b"\xff", pack({"version": 1})):
        with pytest.raises(StorageError):
            parse_record(bad)
    with pytest.raises(StorageError, match="newer"):
        parse_record(pack(later))


@pytest.mark.parametrize("call", ["bpf", "mount", "unshare", "io_uring_setup", "userfaultfd", "open_by_handle_at"])
def test_calls_that_reach_for_the_host_are_denied_and_never_allowed(call: str) -> None:
    assert call in {rule.syscall for rule in syscalls.EXEC.deny if not rule.when}
    assert call not in {rule.syscall for rule in syscalls.EXEC.allow}


def test_clone3_makes_commands_fall_back_and_is_left_to_the_agent() -> None:
    assert "clone3" in {rule.syscall for rule in syscalls.EXEC.nosys}
    assert "clone3" in {rule.syscall for rule in syscalls.AGENT.allow}


def test_terminal_injection_is_not_among_the_allowed_requests() -> None:
    allowed = {condition.equals for r in syscalls.EXEC.allow if r.syscall == "ioctl" for condition in r.when}

    assert 0x5412 not in allowed  # TIOCSTI
    assert 0x541C not in allowed  # TIOCLINUX
    assert 0x5413 in allowed  # TIOCGWINSZ


def test_a_light_plan_differs_by_that_and_by_the_filter_of_the_agent() -> None:
    plan = plan_launch(instance(), CONFIG, FACTS, id_base=0)
    light = lighten(plan)

    assert light.light
    assert light.filter_agent != plan.filter_agent
    assert light.filter_agent in FILTERS
    assert msgspec.structs.replace(light, light=False, filter_agent=plan.filter_agent) == plan


@pytest.mark.parametrize("changes", [{"spare": True}, {"no_new_privs": False}])
def test_neither_spares_nor_those_that_may_gain_privileges_are_light(changes: dict[str, bool]) -> None:
    plan = msgspec.structs.replace(plan_launch(instance(), CONFIG, FACTS, id_base=0), **changes)

    assert lighten(plan) == plan


def test_the_agent_of_a_light_sandbox_may_mount_with_two_sets_of_flags_only() -> None:
    rules = [rule for rule in syscalls.LIGHT_AGENT.allow if rule.syscall == "mount"]
    denied = [rule for rule in syscalls.LIGHT_AGENT.deny if rule.syscall == "mount"]

    assert [[(when.index, when.equals, when.wide) for when in rule.when] for rule in rules] == [
        [(3, 0b1010, True)],
        [(3, 0b1110, True)],
    ]
    assert [all(when.negate and when.wide for when in rule.when) for rule in denied] == [True]
    assert "mount" in {rule.syscall for rule in syscalls.EXEC.deny if not rule.when}
