"""Limits become files of the hierarchy that has the controller."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import HostError, UnsupportedError
from dsec.density.cgroups import (
    CgroupHost,
    detect,
    memory_for_all,
    plan_cgroups,
    prepare_cpuset,
    prepare_parent,
    read_keyed,
    read_number,
    read_pressure_s,
)

LINE = "{id} 1 0:{id} / {mount} rw,relatime shared:1 - {kind} none {options}\n"


def mountinfo(tmp_path: Path, *rows: tuple[str, Path, str]) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text("".join(LINE.format(id=30 + i, kind=k, mount=m, options=o) for i, (k, m, o) in enumerate(rows)))
    return path


def test_a_hybrid_host_limits_on_v1_and_freezes_on_v2(tmp_path: Path) -> None:
    unified = tmp_path / "unified"
    unified.mkdir()
    (unified / "cgroup.controllers").write_text("hugetlb\n")

    host = detect(
        mountinfo(
            tmp_path,
            ("cgroup", tmp_path / "memory", "rw,memory"),
            ("cgroup", tmp_path / "cpu", "rw,cpu,cpuacct"),
            ("cgroup2", unified, "rw"),
        )
    )

    assert host.mode == "hybrid"
    assert host.v2 == unified
    assert (host.limits("memory"), host.limits("cpu"), host.limits("pids")) == ("v1", "v1", None)


def test_a_v2_host_puts_every_limit_into_one_directory() -> None:
    host = CgroupHost(Path("/cg"), frozenset({"memory", "cpu", "pids"}))

    plan = plan_cgroups(host, "dsec/n", "sbx", cpu=1.5, memory_bytes=1 << 30, pids=64)

    assert plan.cgroup2 == "/cg/dsec/n/sbx"
    assert plan.cgroup2_files == {
        "memory.max": "1073741824",
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
        "pids.max": "64",
    }
    assert plan.cgroup1 == {}


def test_a_hybrid_host_gets_v1_directories_for_limits_only() -> None:
    host = CgroupHost(Path("/cg/unified"), frozenset(), {c: Path(f"/cg/{c}") for c in ("memory", "cpu", "pids")})

    plan = plan_cgroups(host, "dsec/n", "sbx", cpu=0.001, memory_bytes=1 << 30, pids=64)

    assert plan.cgroup2_files == {}
    assert plan.cgroup1["memory"] == "/cg/memory/dsec/n/sbx"
    assert plan.cgroup1_files["cpu"] == {"cpu.cfs_quota_us": "1000"}
    assert plan.cgroup1_files["pids"] == {"pids.max": "64"}


def test_v1_bounds_the_memory_of_sockets_where_the_kernel_can(tmp_path: Path) -> None:
    (tmp_path / "memory.kmem.tcp.limit_in_bytes").write_text("")
    host = detect(mountinfo(tmp_path, ("cgroup", tmp_path, "rw,memory")))

    plan = plan_cgroups(host, "dsec/n", "sbx", cpu=1, memory_bytes=1 << 30, pids=64)

    assert plan.cgroup1_files["memory"] == {
        "memory.limit_in_bytes": "1073741824",
        "memory.kmem.tcp.limit_in_bytes": "268435456",
    }


def test_v1_gives_no_swap_where_the_kernel_counts_it(tmp_path: Path) -> None:
    (tmp_path / "memory.memsw.limit_in_bytes").write_text("")
    host = detect(mountinfo(tmp_path, ("cgroup", tmp_path, "rw,memory")))

    plan = plan_cgroups(host, "dsec/n", "sbx", cpu=1, memory_bytes=1 << 30, pids=64)

    files = plan.cgroup1_files["memory"]
    assert files == {"memory.limit_in_bytes": "1073741824", "memory.memsw.limit_in_bytes": "1073741824"}
    assert list(files) == sorted(files), "the launcher writes them in this order, and the kernel takes no other"


@pytest.mark.parametrize(
    ("mounts", "where"),
    [
        ({"cpu": "rw,cpu", "cpuacct": "rw,cpuacct"}, "cpuacct"),
        ({"cpu": "rw,cpuacct,cpu"}, None),
    ],
)
def test_processor_time_is_counted_on_v1_where_there_is_no_cgroup2(
    tmp_path: Path, mounts: dict[str, str], where: str | None
) -> None:
    rows = [("cgroup", tmp_path / name, options) for name, options in mounts.items()]
    plan = plan_cgroups(detect(mountinfo(tmp_path, *rows)), "dsec/n", "sbx", cpu=1, memory_bytes=1 << 30, pids=64)

    assert plan.cgroup1.get("cpuacct") == (None if where is None else str(tmp_path / where / "dsec/n/sbx"))
    assert "cpu" in plan.cgroup1


def test_a_cgroup2_counts_processor_time_alone(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("")
    rows = [("cgroup2", tmp_path, "rw"), ("cgroup", tmp_path / "cpuacct", "rw,cpuacct")]

    assert detect(mountinfo(tmp_path, *rows)).v1 == {}


def test_preparing_hands_controllers_down_each_level(tmp_path: Path) -> None:
    prepare_parent(CgroupHost(tmp_path, frozenset({"memory", "pids"})), "dsec/node", pids_max=99)

    for directory in (tmp_path, tmp_path / "dsec", tmp_path / "dsec/node"):
        assert (directory / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "dsec/node/pids.max").read_text() == "99"


def test_what_is_handed_down_already_is_not_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")

    prepare_parent(CgroupHost(tmp_path, frozenset({"memory", "pids"})), "node", pids_max=99)

    assert (tmp_path / "cgroup.subtree_control").read_text() == "cpu memory pids"
    assert (tmp_path / "node/cgroup.subtree_control").read_text() == "+memory +pids"


def test_a_group_with_processes_that_cannot_hand_down_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> int:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(Path, "write_text", refuse)

    with pytest.raises(HostError, match="subtree_control") as caught:
        prepare_parent(CgroupHost(tmp_path, frozenset({"memory"})), "node", pids_max=99)

    assert "move them" in (caught.value.hint or "")


def test_all_sandboxes_together_leave_memory_to_the_host(tmp_path: Path) -> None:
    v2, v1 = tmp_path / "v2", tmp_path / "v1"
    v2.mkdir()
    v1.mkdir()

    prepare_parent(CgroupHost(v2, frozenset({"memory"})), "node", pids_max=9, memory_max=4096)
    prepare_parent(CgroupHost(None, v1={"memory": v1}), "node", pids_max=9, memory_max=4096)

    assert (v2 / "node/memory.max").read_text() == "4096"
    assert (v1 / "node/memory.limit_in_bytes").read_text() == "4096"
    assert memory_for_all(16 << 30, 1 << 30) == 15 << 30
    assert memory_for_all(2 << 30, 1 << 30) == 1536 << 20


def test_a_bound_below_what_is_used_already_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def refuse(path: Path, text: str) -> int:
        if path.name.startswith("memory"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", refuse)

    prepare_parent(CgroupHost(None, v1={"memory": tmp_path}), "node", pids_max=9, memory_max=4096)


def test_a_kernel_without_swap_has_no_limit_of_it() -> None:
    host = CgroupHost(Path("/cg"), frozenset({"memory"}), swap=False)

    assert plan_cgroups(host, "n", "s", cpu=1, memory_bytes=1, pids=1).cgroup2_files == {"memory.max": "1"}


def test_what_runs_behind_others_is_idle_or_has_the_least_weight() -> None:
    v2 = CgroupHost(Path("/cg"), frozenset({"cpu"}))
    v1 = CgroupHost(None, v1={"cpu": Path("/cg/cpu")})

    def files(host: CgroupHost) -> dict[str, str]:
        plan = plan_cgroups(host, "n", "s", cpu=1, memory_bytes=1, pids=1, background=True)
        return {**plan.cgroup2_files, **plan.cgroup1_files.get("cpu", {})}

    assert files(v2) == {"cpu.max": "100000 100000", "cpu.weight": "1"}
    assert files(v1) == {"cpu.cfs_quota_us": "100000", "cpu.shares": "2"}
    for host in (v1, v2):
        assert files(replace(host, cpu_idle=True))["cpu.idle"] == "1"


def test_who_is_kept_to_some_processors_is_in_a_cpuset_and_nobody_else() -> None:
    bounds: dict[str, Any] = {"cpu": 1, "memory_bytes": 1, "pids": 1}
    v2 = CgroupHost(Path("/cg"), frozenset({"cpu"}), cpuset=Path("/cg"), cpuset_v2=True)
    v1 = CgroupHost(Path("/cg/u"), cpuset=Path("/cg/cpuset"), cpuset_memories="0-1")

    kept1 = plan_cgroups(v1, "n", "s", cpus="0-1", **bounds)

    assert plan_cgroups(v2, "n", "s", cpus="3", **bounds).cgroup2_files["cpuset.cpus"] == "3"
    assert kept1.cgroup1 == {"cpuset": "/cg/cpuset/n/s"}
    assert kept1.cgroup1_files == {"cpuset": {"cpuset.cpus": "0-1", "cpuset.mems": "0-1"}}
    assert plan_cgroups(v1, "n", "s", **bounds).cgroup1 == {}
    with pytest.raises(UnsupportedError):
        plan_cgroups(CgroupHost(Path("/cg")), "n", "s", cpus="0", **bounds)


def test_a_cpuset_of_the_node_has_what_is_above_it(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "dsec", tmp_path / "dsec/n"):
        directory.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            (directory / name).write_text("\n")
    (tmp_path / "cpuset.cpus").write_text("0-3\n")
    (tmp_path / "cpuset.mems").write_text("0\n")
    (tmp_path / "dsec/cpuset.cpus").write_text("1-2\n")

    prepare_cpuset(CgroupHost(None, cpuset=tmp_path), "dsec/n")
    prepare_cpuset(CgroupHost(None), "dsec/n")

    assert [(tmp_path / "dsec/n" / name).read_text() for name in ("cpuset.cpus", "cpuset.mems")] == ["1-2\n", "0\n"]


def test_a_host_that_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="dsec/node"):
        prepare_parent(CgroupHost(tmp_path / "absent", frozenset({"memory"})), "dsec/node", pids_max=9)


def test_readers_take_absent_and_odd_files_for_unknown(tmp_path: Path) -> None:
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "keyed").write_text("oom_kill 3\nunder_oom x\n\n")
    (tmp_path / "pressure").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0 total=1\n")

    assert read_number(tmp_path / "max") is None
    assert read_number(tmp_path / "absent") is None
    assert read_keyed(tmp_path / "keyed") == {"oom_kill": 3}
    assert read_pressure_s(tmp_path / "pressure") == 2.5
    assert read_pressure_s(tmp_path / "absent") is None
