"""dsec-launch on the real kernel: what a launch makes, what a destroy and a failure leave, and what outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.wire.launch import EtcFile, FilterArgs, FilterSpec, LayerMount, LayerRef, SyscallRule
from tests.native import launch_wire as wire
from tests.native.launch_wire import Host, LaunchClient, LaunchRefusedError, ask, destroy_args, wait_for

pytestmark = [pytest.mark.root]

OUTSIDE = "check cgroups directories socket clone cgroups_v1 maps overlay binds etc proc masks"
INSIDE = "ids cgroupns network mounts sysctls view root rlimits capabilities seccomp agent"
STEPS = f"{OUTSIDE} {INSIDE}".split()


@pytest.fixture
def client(host: Host) -> LaunchClient:
    return host.connect() if host.process else host.start()


def failure_of(client: LaunchClient, op: str, args: Any) -> tuple[str, str | None]:
    with pytest.raises(LaunchRefusedError) as caught:
        client.call(op, args)
    return caught.value.failure.step, caught.value.failure.errno


def assert_nothing_left(host: Host) -> None:
    wait_for(lambda: not wire.leftovers(host))


def test_nobody_else_may_write_what_lies_in_the_run_directory(host: Host, client: LaunchClient) -> None:
    names = {path.name for path in host.run.iterdir()}

    assert {"launch.pid", "launch.lock", "launch.sock", "launch.mnt"} <= names
    assert [name for name in names if (host.run / name).lstat().st_mode & 0o022] == []


def test_launch_and_destroy_leave_nothing(host: Host, client: LaunchClient) -> None:
    plan = host.plan()

    launched = client.launch(plan)
    output = ask(plan, "id -u; cat /etc/hostname; cat /proc/sys/kernel/hostname; cat /proc/1/cgroup")
    client.destroy(destroy_args(plan, launched))

    assert output.splitlines()[:3] == ["0", "sandbox", "sandbox"]
    assert "0::/agent" in output
    assert set(launched.steps_us) >= set(STEPS) - {"agent", "seccomp"}
    event = client.wait_event(plan.sandbox)
    assert (event.pid, os.WTERMSIG(event.status)) == (launched.pid, signal.SIGKILL)
    assert_nothing_left(host)


def test_destroy_is_idempotent_and_spares_a_reused_pid(host: Host, client: LaunchClient) -> None:
    plan = host.plan()
    launched = client.launch(plan)
    client.destroy(destroy_args(plan, launched))

    client.destroy(destroy_args(plan, launched))
    client.destroy(destroy_args(plan, launched, pid=os.getpid(), start_ticks=1))

    assert_nothing_left(host)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_is_named_and_nothing_is_left(host: Host, client: LaunchClient, step: str) -> None:
    plan = host.plan(upper_tmpfs_bytes=16 << 20)
    (host.run / "fail_step").write_text(step)
    try:
        failure = failure_of(client, "launch", plan)
    finally:
        (host.run / "fail_step").unlink()

    assert failure == (step, "EIO")
    assert_nothing_left(host)
    again = client.launch(plan)
    client.destroy(destroy_args(plan, again))


@pytest.mark.parametrize("step", ["cgroups", "socket", "clone", "maps", "overlay", "etc", "agent"])
def test_a_worker_that_dies_is_cleaned_up_after(host: Host, client: LaunchClient, step: str) -> None:
    plan = host.plan(upper_tmpfs_bytes=16 << 20)
    (host.run / "fail_step").write_text(f"die:{step}")
    try:
        failure = failure_of(client, "launch", plan)
    finally:
        (host.run / "fail_step").unlink()

    assert failure == ("worker", None)
    wait_for(lambda: set(wire.leftovers(host)) <= {plan.directory})
    client.destroy(destroy_args(plan, None))
    assert_nothing_left(host)


def test_what_was_there_before_survives_a_failed_launch(host: Host, client: LaunchClient) -> None:
    plan = host.plan()
    kept = Path(plan.directory) / "upper" / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_text("x")
    (host.run / "fail_step").write_text("agent")
    try:
        failure_of(client, "launch", plan)
    finally:
        (host.run / "fail_step").unlink()

    assert kept.read_text() == "x"
    client.destroy(destroy_args(plan, None))
    assert_nothing_left(host)


def test_files_keep_the_ids_of_the_sandbox_on_disk(host: Host, client: LaunchClient) -> None:
    plan = host.plan()
    launched = client.launch(plan)

    ask(plan, "echo x > /new; echo y >> /usr/bin/tool; touch /tmp/t")

    upper = Path(plan.directory) / "upper"
    assert (upper / "new").stat().st_uid == 0
    assert (upper / "usr/bin/tool").stat().st_uid == 0
    status = Path(f"/proc/{launched.pid}/status").read_text()
    assert f"Uid:\t{plan.id_base + 65_535}\t" in status
    client.destroy(destroy_args(plan, launched))


def test_a_second_run_on_the_same_upper_sees_its_files(host: Host, client: LaunchClient) -> None:
    plan = host.plan()
    launched = client.launch(plan)
    ask(plan, "echo kept > /kept")
    client.destroy(destroy_args(plan, launched, remove_directory=False))

    again = client.launch(plan)

    assert ask(plan, "cat /kept").startswith("kept\n")
    client.destroy(destroy_args(plan, again))
    assert_nothing_left(host)


def test_a_limited_upper_is_full_at_its_limit_and_goes_with_the_sandbox(host: Host, client: LaunchClient) -> None:
    plan = host.plan(upper_tmpfs_bytes=8 << 20)
    launched = client.launch(plan)

    output = ask(plan, "head -c 20000000 /dev/zero > /big; stat -c %s /big")

    assert "No space left" in output
    assert not (Path(plan.directory) / "disk/upper/big").exists(), "visible on the host"
    client.destroy(destroy_args(plan, launched))
    assert_nothing_left(host)


def test_files_of_etc_cover_links_and_missing_places(host: Host, client: LaunchClient) -> None:
    files = [EtcFile(path="/etc/resolv.conf", content=b"dns\n"), EtcFile(path="/etc/deep/new", content=b"new\n")]
    plan = host.plan(etc_files=files)
    launched = client.launch(plan)

    output = ask(plan, "cat /etc/resolv.conf /etc/deep/new; echo own > /etc/deep/new; cat /etc/deep/new")

    assert output.startswith("dns\nnew\nown\n")
    assert not (Path(plan.directory) / "upper/etc/deep").exists(), "would end in a snapshot"
    client.destroy(destroy_args(plan, launched))


def test_an_agent_that_ends_is_told_of(host: Host, client: LaunchClient) -> None:
    plan = host.plan()
    launched = client.launch(plan)

    ask(plan, "!exit")

    event = client.wait_event(plan.sandbox)
    assert (event.pid, os.waitstatus_to_exitcode(event.status)) == (launched.pid, 7)
    assert plan.sandbox not in [known.sandbox for known in client.list().sandboxes]
    client.destroy(destroy_args(plan, launched))
    assert_nothing_left(host)


def test_a_kill_for_memory_is_counted(host: Host, client: LaunchClient) -> None:
    if wire.MEMORY2:
        plan = host.plan(cgroup2_files={"memory.max": str(24 << 20)})
    elif "memory" in wire.CGROUP1:
        plan = host.plan(cgroup1_files={"memory": {"memory.limit_in_bytes": str(24 << 20)}, "cpuset": CPUSET})
    else:
        pytest.skip("no memory controller")
    launched = client.launch(plan)

    said = ask(plan, "head -c 200000000 /dev/zero | sort | wc -c")
    client.destroy(destroy_args(plan, launched))

    assert client.wait_event(plan.sandbox).oom_kills >= 1, said


CPUSET = {"cpuset.cpus": "0", "cpuset.mems": "0"}


def test_events_wait_for_a_connection(host: Host, client: LaunchClient) -> None:
    plan = host.plan()
    launched = client.launch(plan)
    for connection in host.clients:
        connection.close()
    host.clients.clear()
    os.kill(launched.pid, signal.SIGKILL)

    later = host.connect()

    assert later.wait_event(plan.sandbox).pid == launched.pid
    later.destroy(destroy_args(plan, launched))


def test_fifty_launches_at_once(host: Host, client: LaunchClient) -> None:
    plans = [host.plan() for _ in range(50)]
    requests = [client.send("launch", plan) for plan in plans]
    for request in requests:
        client.receive(request)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda plan: ask(plan, "echo here"), plans))
    assert all(answer.startswith("here\n") for answer in answers)
    assert len(client.list().sandboxes) == 50

    requests = [client.send("destroy", destroy_args(plan, None)) for plan in plans]
    for request in requests:
        client.receive(request)
    assert_nothing_left(host)
    assert client.list().sandboxes == []


def test_the_same_sandbox_twice_is_refused_and_the_first_lives_on(host: Host, client: LaunchClient) -> None:
    plan = host.plan()
    first, second = client.send("launch", plan), client.send("launch", plan)
    client.receive(first)

    with pytest.raises(LaunchRefusedError) as caught:
        client.receive(second)

    assert (caught.value.failure.step, caught.value.failure.errno) == ("check", "EEXIST")
    assert ask(plan, "echo here").startswith("here\n")
    client.destroy(destroy_args(plan, None))
    assert_nothing_left(host)


def test_after_kill_dash_nine_sandboxes_and_layers_go_on(host: Host, client: LaunchClient) -> None:
    first, second, third = host.plan(), host.plan(), host.plan()
    launched = client.launch(first)
    ended, ends = client.launch(second), client.launch(third)
    host.kill()
    assert ask(first, "echo alive").startswith("alive\n")
    os.kill(ended.pid, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{ended.pid}").exists())

    later = host.start()

    listed = later.list()
    assert listed.layers == ["image"]
    assert {known.sandbox for known in listed.sandboxes} == {first.sandbox, third.sandbox}
    assert later.wait_event(second.sandbox).status == -1
    assert failure_of(later, "layer_unmount", LayerRef(digest="image")) == ("layer_unmount", "EBUSY")
    os.kill(ends.pid, signal.SIGKILL)
    assert os.WTERMSIG(later.wait_event(third.sandbox).status) in (signal.SIGKILL, 127)

    fresh = host.plan()
    later.launch(fresh)
    for plan, facts in ((first, launched), (second, ended), (third, ends), (fresh, None)):
        later.destroy(destroy_args(plan, facts))
    assert_nothing_left(host)


def test_sandboxes_share_one_sysfs_which_outlives_the_daemon(host: Host, client: LaunchClient) -> None:
    first, second = host.plan(), host.plan(masks=["/sys/kernel"])
    launched = [client.launch(plan) for plan in (first, second)]
    device = "stat -c %d /sys; ls /sys/class/net; ls -A /sys/kernel | wc -l"
    shown = [ask(plan, device).split()[:3] for plan in (first, second)]
    host.kill()

    later = host.start()
    third = host.plan()
    launched.append(later.launch(third))

    assert shown[0][:2] == shown[1][:2]
    assert (shown[0][1], int(shown[0][2]) > 0, shown[1][2]) == ("lo", True, "0")
    assert [ask(plan, device).split()[:3] for plan in (first, third)] == [shown[0]] * 2
    for plan, facts in zip((first, second, third), launched, strict=True):
        later.destroy(destroy_args(plan, facts))
    assert_nothing_left(host)


def test_a_sandbox_without_cgroups_is_destroyed_by_its_name_alone(host: Host, client: LaunchClient) -> None:
    plan = host.plan(cgroup2=None, cgroup1={}, cgroup1_files={})
    launched = client.launch(plan)
    assert launched.cgroup_id == 0
    assert ask(plan, "echo here").startswith("here\n")

    client.destroy(destroy_args(plan, None))

    wait_for(lambda: not Path(f"/proc/{launched.pid}").exists())
    assert_nothing_left(host)


def test_a_place_for_a_layer_that_was_never_mounted_is_not_taken_for_one(host: Host, client: LaunchClient) -> None:
    assert host.process is not None
    place = Path(f"/proc/{host.process.pid}/root{host.run}/layers/half")
    place.mkdir()
    host.kill()

    later = host.start()

    assert later.list().layers == ["image"]


def test_shutdown_leaves_sandboxes_running(host: Host, client: LaunchClient) -> None:
    plan = host.plan()
    launched = client.launch(plan)

    client.call("shutdown")
    assert host.process is not None
    assert host.process.wait(timeout=60) == 0

    assert ask(plan, "echo alive").startswith("alive\n")
    later = host.start()
    later.destroy(destroy_args(plan, launched))
    assert_nothing_left(host)


def test_one_launcher_serves_a_run_directory(host: Host, client: LaunchClient) -> None:
    again = subprocess.run([wire.LAUNCH, "--run", host.run, "--agent", wire.PROBE], capture_output=True, check=False)

    assert again.returncode == 3
    assert client.hello().version == 1


def test_bad_requests_are_answered_and_the_connection_stays(host: Host, client: LaunchClient) -> None:
    plan = msgspec.to_builtins(host.plan())
    assert failure_of(client, "dance", {}) == ("dance", "ENOSYS")
    assert failure_of(client, "hello", {"version": 9}) == ("version", "EINVAL")
    assert failure_of(client, "launch", {"sandbox": "x"}) == ("check", "EINVAL")
    assert failure_of(client, "launch", plan | {"unknown": 1}) == ("check", "EINVAL")
    assert failure_of(client, "launch", plan | {"lowers": ["missing"]}) == ("check", "ENOENT")
    assert failure_of(client, "launch", plan | {"filter_agent": "missing"}) == ("check", "ENOENT")
    assert failure_of(client, "launch", plan | {"rlimits": {"nofile": [1, 1 << 40]}}) == ("rlimits", "EPERM")
    assert failure_of(client, "destroy", {"sandbox": "x", "directory": "/"}) == ("check", "EINVAL")
    assert failure_of(client, "destroy", {"sandbox": "x", "cgroup2": "/sys"}) == ("check", "EINVAL")
    assert failure_of(client, "destroy", {"sandbox": "../x"}) == ("check", "EINVAL")
    client.send_raw(b"\xc1nonsense")

    assert client.hello().version == 1
    assert_nothing_left(host)


def test_a_filter_with_an_unknown_name_is_refused(client: LaunchClient) -> None:
    bad = FilterArgs(name="bad", spec=FilterSpec(allow=[SyscallRule(syscall="frobnicate")]))

    assert failure_of(client, "filter", bad) == ("filter", "EINVAL")
    assert "bad" not in client.list().filters


def test_an_agent_under_a_filter_without_its_calls_is_a_failed_launch(host: Host, client: LaunchClient) -> None:
    spec = FilterSpec(allow=[SyscallRule(syscall=name) for name in ("write", "exit_group")])
    client.call("filter", FilterArgs(name="narrow", spec=spec))

    failure = failure_of(client, "launch", host.plan(filter_agent="narrow"))

    assert failure == ("agent", "ENOSYS")
    assert_nothing_left(host)


def test_layers_are_mounted_once_and_go_when_unused(host: Host, client: LaunchClient, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/added").write_text("added\n")
    layer = LayerMount(digest="sha256:added", kind="directory", meta=str(tmp_path / "tree"))
    client.call("layer_mount", layer)
    client.call("layer_mount", layer)
    plan = host.plan(lowers=["image", "sha256:added"])
    launched = client.launch(plan)

    assert ask(plan, "cat /added").startswith("added\n")
    assert failure_of(client, "layer_unmount", LayerRef(digest="sha256:added"))[1] == "EBUSY"
    client.destroy(destroy_args(plan, launched))
    client.wait_event(plan.sandbox)
    client.call("layer_unmount", LayerRef(digest="sha256:added"))
    client.call("layer_unmount", LayerRef(digest="sha256:added"))
    assert client.list().layers == ["image"]


def test_a_layer_that_cannot_be_mounted_leaves_nothing(client: LaunchClient, tmp_path: Path) -> None:
    (tmp_path / "no-image").write_bytes(b"x" * 8192)
    erofs = LayerMount(digest="bad", kind="erofs", meta=str(tmp_path / "no-image"))

    assert failure_of(client, "layer_mount", erofs)[0] == "layer_mount"
    assert failure_of(client, "layer_mount", LayerMount(digest="bad", kind="zip", meta="/x")) == (
        "layer_mount",
        "EINVAL",
    )
    assert "bad" not in client.list().layers
