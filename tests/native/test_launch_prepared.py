"""Sandboxes that dsec-launch makes ahead: what a launch makes of one, and that one that nobody wants leaves nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.wire.launch import Launched, LaunchPlan, LayerMount
from tests.native import launch_wire as wire
from tests.native.launch_wire import Host, LaunchClient, LaunchRefusedError, ask, destroy_args, wait_for

pytestmark = [pytest.mark.root]

AHEAD = ["cgroups", "socket", "clone", "directories", "cgroups_v1", "maps", "binds", "proc", "masks", "sysctls"]
AFTER_OUTSIDE = ["check", "cgroups", "clone", "overlay", "binds", "etc"]
AFTER_INSIDE = ["cgroupns", "rlimits", "mounts", "sysctls", "view", "root", "capabilities", "seccomp", "agent"]
POLLS = {"7", "271"}  # poll, ppoll
AS_SEEN = (
    "cat /proc/self/mountinfo; grep -e ^Cap -e ^Cpus -e ^Sec -e ^NoNew -e ^Uid -e ^Groups -e ^Umask /proc/self/status"
    "; cat /proc/1/cgroup /proc/sys/kernel/shmmni /etc/hosts /proc/sys/kernel/hostname; ls -l /dev /dev/shm /proc/sys"
)


@pytest.fixture
def client(host: Host) -> LaunchClient:
    return host.connect()


def _new_process(plan: LaunchPlan) -> int:
    """The one that waits to become the agent."""
    assert plan.cgroup2 is not None
    processes = Path(plan.cgroup2) / "agent/cgroup.procs"
    wait_for(lambda: processes.exists() and processes.read_text())
    return int(processes.read_text())


def _worker(host: Host, plan: LaunchPlan) -> int:
    """The one that has made it and waits for an order. Both are the daemon's children."""
    assert host.process is not None
    waiting = _new_process(plan)
    daemon = host.process.pid
    children = Path(f"/proc/{daemon}/task/{daemon}/children")

    def others() -> list[int]:
        return [pid for pid in map(int, children.read_text().split()) if pid != waiting]

    wait_for(lambda: len(others()) == 1)  # one that empties trash of before ends by itself
    return others()[0]


def _prepared(host: Host, client: LaunchClient, **changes: Any) -> LaunchPlan:
    plan = host.plan(**changes)
    client.call("prepare", plan)
    return plan


def _comparable(said: str, plan: LaunchPlan) -> list[str]:
    """Without what differs from one sandbox to the next: numbers of mounts, names, times."""
    said = re.sub(r"[ug]id=\d+", "ID", said.replace(plan.sandbox, "SANDBOX"))
    said = re.sub(r"(?m)^\d+ \d+ \d+:\d+ ", "", said)
    return re.sub(r"[A-Z][a-z][a-z] +\d+ \d\d:\d\d", "TIME", said).splitlines()


def _assert_nothing_left(host: Host) -> None:
    wait_for(lambda: not wire.leftovers(host))


def test_what_is_launched_on_one_is_as_any_other(host: Host, client: LaunchClient) -> None:
    views = []
    for prepares in (True, False):
        plan = host.plan()
        if prepares:
            client.call("prepare", plan)
            _new_process(plan)
        launched = client.launch(plan)
        views.append(_comparable(ask(plan, AS_SEEN), plan))
        client.destroy(destroy_args(plan, launched))

    assert views[0] == views[1]
    assert any(line.startswith("/ / ") and "overlay" in line for line in views[0])
    _assert_nothing_left(host)


def test_limits_name_and_files_are_those_of_the_launch(host: Host, client: LaunchClient) -> None:
    if "pids" not in wire.CGROUP1:
        pytest.skip("no controller of version 1")
    plan = _prepared(host, client, named="")
    limits = plan.cgroup1_files | {"pids": {"pids.max": "99"}, "memory": {"memory.limit_in_bytes": str(99 << 20)}}
    wanted = msgspec.structs.replace(plan, hostname="mine", cgroup1_files=limits)

    launched = client.launch(wanted)

    assert ask(plan, "cat /proc/sys/kernel/hostname").startswith("mine\n")
    assert Path(plan.cgroup1["pids"], "pids.max").read_text() == "99\n"
    assert Path(plan.cgroup1["memory"], "memory.limit_in_bytes").read_text() == f"{99 << 20}\n"
    client.destroy(destroy_args(plan, launched))
    _assert_nothing_left(host)


def test_one_that_does_not_serve_gives_way_to_a_launch_from_nothing(host: Host, client: LaunchClient) -> None:
    plan = _prepared(host, client)
    wanted = msgspec.structs.replace(plan, shm_bytes=2 << 20, upper_tmpfs_bytes=8 << 20)

    launched = client.launch(wanted)

    assert "No space left" in ask(plan, "head -c 9000000 /dev/zero > /big")
    client.destroy(destroy_args(plan, launched))
    _assert_nothing_left(host)


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_is_left_of_one_that_is_destroyed(host: Host, client: LaunchClient, waits: bool) -> None:
    plan = _prepared(host, client)
    if waits:
        _new_process(plan)

    client.destroy(destroy_args(plan, None))

    _assert_nothing_left(host)


def test_they_end_with_the_connection_that_asked_for_them(host: Host, client: LaunchClient) -> None:
    first, second = _prepared(host, client), _prepared(host, client)
    other = host.connect()
    kept = _prepared(host, other)
    _new_process(first), _new_process(second)

    client.close()

    assert kept.cgroup2 is not None
    for gone in (first, second):
        wait_for(lambda gone=gone: not any(gone.sandbox in path for path in wire.leftovers(host)))
    launched = other.launch(kept)
    other.destroy(destroy_args(kept, launched))
    _assert_nothing_left(host)


def test_whoever_of_the_two_is_killed_nothing_is_left_and_a_launch_works(host: Host, client: LaunchClient) -> None:
    for victim in ("worker", "process"):
        plan = _prepared(host, client)
        pid = _worker(host, plan) if victim == "worker" else _new_process(plan)

        os.kill(pid, signal.SIGKILL)

        _assert_nothing_left(host)
        launched = client.launch(plan)
        assert ask(plan, "echo here").startswith("here\n")
        client.destroy(destroy_args(plan, launched))
        _assert_nothing_left(host)


def test_one_whose_process_ends_just_before_it_is_told_its_order_says_so(host: Host, client: LaunchClient) -> None:
    plan = _prepared(host, client)
    worker, process = _worker(host, plan), _new_process(plan)
    wait_for(lambda: Path(f"/proc/{worker}/syscall").read_text().split()[0] in POLLS)  # it waits for an order
    os.kill(worker, signal.SIGSTOP)
    os.kill(process, signal.SIGKILL)
    request = client.send("launch", plan)
    client.list()  # answered after that has been handed on
    os.kill(worker, signal.SIGCONT)

    with pytest.raises(LaunchRefusedError) as caught:
        client.receive(request)

    assert caught.value.failure.errno is None  # as of whatever died: nodes launch it again
    launched = client.launch(plan)
    client.destroy(destroy_args(plan, launched))
    _assert_nothing_left(host)


@pytest.mark.parametrize("what", ["socket", "upper", "work", "directory", "cgroup"])
def test_one_that_somebody_has_damaged_says_so_and_the_launch_is_made_from_nothing(
    host: Host, client: LaunchClient, what: str
) -> None:
    plan = _prepared(host, client)
    assert plan.cgroup2 is not None
    worker, cgroup = _worker(host, plan), Path(plan.cgroup2) / "work"
    wait_for(lambda: Path(f"/proc/{worker}/syscall").read_text().split()[0] in POLLS)  # it waits for an order
    directory = Path(plan.directory)
    damaged = {"socket": Path(plan.socket), "cgroup": cgroup, "directory": directory}.get(what, directory / what)
    if what == "socket":
        damaged.unlink()
    elif what == "cgroup":
        damaged.rmdir()
    else:
        shutil.rmtree(damaged)

    with pytest.raises(LaunchRefusedError) as caught:
        client.launch(plan)

    assert caught.value.failure.errno is None  # as of whatever died: nodes launch it again
    assert str(damaged) in caught.value.failure.detail
    _assert_nothing_left(host)
    launched = client.launch(plan)
    assert ask(plan, "echo here").startswith("here\n")
    client.destroy(destroy_args(plan, launched))
    _assert_nothing_left(host)


@pytest.mark.parametrize("way", ["free", "kept", "set"])
@pytest.mark.parametrize("allowed", ["0", "all"])
def test_it_runs_where_one_made_from_nothing_does(tmp_path: Path, image: Path, way: str, allowed: str) -> None:
    """Whatever the launcher itself is kept to: by its own mask, or by a cpuset that is not its sandboxes'."""
    if "cpuset" not in wire.CGROUP1:
        pytest.skip("no cpusets of version 1")
    top = Path("/sys/fs/cgroup/cpuset")
    every = (top / "cpuset.cpus").read_text().strip()
    with wire.running_host(tmp_path / "host") as host:
        client = host.start()
        client.call("layer_mount", LayerMount(digest="image", kind="directory", meta=str(image)))
        assert host.process is not None
        if way == "kept":
            os.sched_setaffinity(host.process.pid, {max(os.sched_getaffinity(0))})
        elif way == "set":
            narrow = top / host.cgroup_name / "narrow"
            narrow.mkdir()
            (narrow / "cpuset.cpus").write_text("0")
            (narrow / "cpuset.mems").write_text((top / "cpuset.mems").read_text())
            (narrow / "cgroup.procs").write_text(str(host.process.pid))
        seen = []
        for prepares in (False, True):
            plan = host.plan()
            files = dict(plan.cgroup1_files["cpuset"], **{"cpuset.cpus": every if allowed == "all" else "0"})
            wanted = msgspec.structs.replace(plan, cgroup1_files=plan.cgroup1_files | {"cpuset": files})
            if prepares:
                client.call("prepare", plan)
                _new_process(plan)
            launched = client.launch(wanted)
            seen.append(os.sched_getaffinity(launched.pid))
            client.destroy(destroy_args(plan, launched))
        if way == "set":
            (top / "cgroup.procs").write_text(str(host.process.pid))

    assert seen[0] == seen[1]


@pytest.mark.parametrize("way", ["destroyed", "daemon"])
def test_one_ends_while_a_launch_that_began_later_hangs(tmp_path: Path, image: Path, way: str) -> None:
    with wire.running_host(tmp_path / "host") as host:
        client = host.start()
        client.call("layer_mount", LayerMount(digest="image", kind="directory", meta=str(image)))
        plan = _prepared(host, client)
        _new_process(plan)
        frozen = wire.CGROUP2 / host.cgroup_name / "frozen"
        frozen.mkdir()
        if not (frozen / "cgroup.freeze").exists():
            pytest.skip("no cgroup can be frozen")
        other = host.plan()
        hung = Path(frozen / other.sandbox)
        (frozen / "cgroup.freeze").write_text("1")
        try:
            launch = client.send("launch", msgspec.structs.replace(other, cgroup2=str(hung)))
            wait_for(lambda: hung.exists() and (hung / "cgroup.procs").read_text())

            if way == "daemon":
                host.kill()
            else:
                client.destroy(destroy_args(plan, None))

            wait_for(lambda: not any(plan.sandbox in path for path in wire.leftovers(host)))
            assert (hung / "cgroup.procs").read_text()
        finally:
            if way == "daemon":
                (hung / "cgroup.kill").write_text("1")
            (frozen / "cgroup.freeze").write_text("0")
        if way != "daemon":
            launched = msgspec.convert(client.receive(launch), Launched)
            client.destroy(destroy_args(other, launched, cgroup2=str(hung)))


@pytest.mark.parametrize("step", AHEAD)
def test_one_that_cannot_be_made_leaves_nothing_and_the_launch_is_made_from_nothing(
    host: Host, client: LaunchClient, step: str
) -> None:
    for how in ("", "die:"):
        (host.run / "fail_step").write_text(how + step)
        try:
            plan = _prepared(host, client)
            _assert_nothing_left(host)
        finally:
            (host.run / "fail_step").unlink()

        launched = client.launch(plan)
        client.destroy(destroy_args(plan, launched))
        _assert_nothing_left(host)


@pytest.mark.parametrize("step", [*AFTER_OUTSIDE, *AFTER_INSIDE])
def test_a_step_of_the_launch_that_fails_is_named_and_leaves_nothing(
    host: Host, client: LaunchClient, step: str
) -> None:
    for how, failure in (("", (step, "EIO")), ("die:", None)):
        plan = _prepared(host, client)
        (host.run / "fail_step").write_text(how + step)
        try:
            with pytest.raises(LaunchRefusedError) as caught:
                client.launch(plan)
        finally:
            (host.run / "fail_step").unlink()

        told = caught.value.failure
        assert failure is None or (told.step, told.errno) == failure
        client.destroy(destroy_args(plan, None))
        _assert_nothing_left(host)


def test_a_launch_that_comes_before_one_is_ready_waits_for_it(host: Host, client: LaunchClient) -> None:
    plans = [host.plan() for _ in range(8)]
    requests = [client.send(op, plan) for plan in plans for op in ("prepare", "launch")]
    for request in requests:
        client.receive(request)

    assert all(ask(plan, "echo here").startswith("here\n") for plan in plans)
    for plan in plans:
        client.destroy(destroy_args(plan, None))
    _assert_nothing_left(host)


def test_what_cannot_be_prepared_is_refused(host: Host, client: LaunchClient) -> None:
    def failure(plan: LaunchPlan) -> tuple[str, str | None]:
        with pytest.raises(LaunchRefusedError) as caught:
            client.call("prepare", plan)
        return caught.value.failure.step, caught.value.failure.errno

    assert failure(host.plan(light=True)) == ("check", "EINVAL")
    assert failure(host.plan(upper_tmpfs_bytes=8 << 20)) == ("check", "EINVAL")
    assert failure(host.plan(directory="relative")) == ("check", "EINVAL")
    assert failure(host.plan(filter_agent="unknown")) == ("check", "ENOENT")
    plan = _prepared(host, client)
    assert failure(plan) == ("check", "EEXIST")
    client.destroy(destroy_args(plan, None))
    _assert_nothing_left(host)


def test_there_are_not_too_many(host: Host, client: LaunchClient) -> None:
    plans = [host.plan() for _ in range(64)]
    for plan in plans:
        client.call("prepare", plan)

    with pytest.raises(LaunchRefusedError) as caught:
        client.call("prepare", host.plan())

    assert caught.value.failure.errno == "EAGAIN"
    client.close()
    _assert_nothing_left(host)


def test_nothing_is_left_when_the_daemon_is_killed_or_stopped(tmp_path: Path, image: Path) -> None:
    for way in ("kill", "stop"):
        with wire.running_host(tmp_path / way) as host:
            client = host.start()
            plans = [_prepared(host, client) for _ in range(3)]
            for plan in plans:
                _new_process(plan)
            assert host.process is not None
            if way == "kill":
                host.kill()
            else:
                host.process.send_signal(signal.SIGTERM)
                host.process.wait(60)
                host.process = None

            _assert_nothing_left(host)
