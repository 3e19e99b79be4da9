"""Containers on a host with cgroup2 alone, and on one without it, and block devices of layers (ublk): Debian's kernel
6.12 in an emulated machine.

Needs QEMU and, once, apt to fetch the kernel: see `dsec.testing.guest`. Minutes, for everything in there is emulated.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from dsec.testing.guest import GuestError, GuestResult, qemu, run_in_guest
from dsec.testing.guest_kernel import GuestUnavailableError, HostLikeKernel, guest_kernel
from dsec.testing.processes import command_line, descendants

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1_800)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1_700.0

# What depends on the hierarchy, and what depends on the kernel.
V2_TESTS = (
    "tests/system/test_container_limits.py",
    "tests/system/test_container_lives.py::test_time_stands_still_for_what_is_paused",
    "tests/system/test_container_lives.py::test_a_paused_sandbox_is_found_paused_by_the_next_node",
    "tests/system/test_container_kills.py::test_kill_9_of_an_agent_fails_its_sandbox_alone_and_says_so",
    "tests/system/test_node_containers.py::test_kill_9_of_the_node_loses_no_sandbox_and_no_output",
    "tests/native/test_launch_sandboxes.py::test_launch_and_destroy_leave_nothing",
    "tests/native/test_launch_sandboxes.py::test_a_kill_for_memory_is_counted",
    "tests/native/test_launch_sandboxes.py::test_files_keep_the_ids_of_the_sandbox_on_disk",
    "tests/native/test_launch_erofs.py",
    "tests/native/test_launch_confinement.py",
    "tests/native/test_launch_prepared.py::test_what_is_launched_on_one_is_as_any_other",
    "tests/native/test_launch_prepared.py::test_they_end_with_the_connection_that_asked_for_them",
    "tests/system/test_container_prepared.py::test_a_sandbox_that_takes_one_cannot_be_told_from_one_that_was_made",
)
# Its kernel limits memory in cgroup2 only.
V1_TESTS = (
    "tests/system/test_container_limits.py",
    "tests/system/test_container_kills.py::test_kill_9_of_an_agent_fails_its_sandbox_alone_and_says_so",
)
# A unit with Delegate=yes and DelegateSubgroup=node: its processes are one below, and beside them is ours.
UNIT = "system.slice/command.service"
DELEGATED = (
    f"unit=/sys/fs/cgroup/{UNIT}; mkdir $unit/node"
    " && for pid in $(cat $unit/cgroup.procs); do echo $pid >$unit/node/cgroup.procs; done"
    f" && export DSEC_TEST_CGROUPS={UNIT}/"
)
# A file system with project quota, which not every kernel has.
WITH_QUOTA = (
    "umount /tmp && /sbin/mke2fs -q -F -t ext4 -O quota,project -E quotatype=prjquota /dev/vda"
    " && /bin/mount -o prjquota /dev/vda /tmp && chmod 1777 /tmp"
)
QUOTA_TESTS = (
    "tests/system/test_container_disk.py::test_a_sandbox_is_full_at_its_limit_and_says_how_full_it_is[project]",
    "tests/system/test_container_disk.py::test_a_limited_sandbox_survives_its_node_and_leaves_nothing",
    "tests/system/test_container_volumes.py::test_a_volume_is_full_at_its_size_and_the_sandbox_is_not",
)
# A driver that serves block devices from a program.
UBLK_TESTS = (
    "tests/system/test_loader_blocks.py",
    "tests/system/test_fullvm_layers.py::test_a_machine_boots_from_a_disk_that_lies_in_a_store[ublk]",
)
DELEGATED_TESTS = ("tests/system/test_container_limits.py::test_limits_are_where_the_kernel_keeps_them",)


@pytest.fixture(scope="module")
def kernel(native_binaries: dict[str, Path]) -> HostLikeKernel:
    try:
        qemu()
        return guest_kernel()
    except GuestUnavailableError as error:
        pytest.skip(str(error))


def run_tests(kernel: HostLikeKernel, tests: Iterable[str], *, cgroups: str, before: str = ":") -> GuestResult:
    # Only what these tests need is loaded: each module costs the emulated processor its time.
    plugins = ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    command = shlex.join([sys.executable, "-m", "pytest", *plugins, "--timeout", "900", "-v", *tests])
    env = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "DSEC_TEST_BUILT": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": "/root",
    }
    script = ["sh", "-c", f"{before}; {command}"]
    result = run_in_guest(kernel, script, cgroups=cgroups, cwd=ROOT, env=env, deadline_s=DEADLINE_S)
    print(result.output.decode(errors="replace"), f"{result.took_s:.0f} s")
    return result


def test_output_and_exit_status_come_back_and_nothing_is_written_outside(kernel: HostLikeKernel) -> None:
    script = f"uname -r; echo wrong >&2; echo x > {ROOT}/from-the-guest && cat {ROOT}/from-the-guest; exit 3"

    result = run_in_guest(kernel, ["sh", "-c", script], deadline_s=300)

    assert (result.exit_code, result.output.split()[1:]) == (3, [b"wrong", b"x"])
    assert result.output.startswith(b"6.12.")
    assert not (ROOT / "from-the-guest").exists()


def test_a_guest_that_takes_too_long_is_ended(kernel: HostLikeKernel) -> None:
    with pytest.raises(GuestError, match=r"(?s)not done after 60 s.*begun"):
        run_in_guest(kernel, ["sh", "-c", "echo begun; sleep 600"], deadline_s=60)

    assert not [line for pid in descendants(frozenset({os.getpid()})) if b"qemu" in (line := command_line(pid))]


def test_containers_on_a_host_with_cgroup2_alone(kernel: HostLikeKernel) -> None:
    result = run_tests(kernel, V2_TESTS, cgroups="v2")

    assert result.exit_code == 0
    assert result.output.count(b" PASSED") >= 23
    assert b" SKIPPED" not in result.output


def test_a_host_without_cgroup2_runs_containers_and_says_what_they_lack(kernel: HostLikeKernel) -> None:
    doctor = shlex.join([sys.executable, "-m", "dsec.cli.main", "doctor"])

    result = run_tests(kernel, V1_TESTS, cgroups="v1", before=doctor)

    assert b"v1 only: cpu freezer pids" in result.output
    assert b"mount -t cgroup2" in result.output
    assert result.exit_code == 0
    assert result.output.count(b" PASSED") >= 5


def test_project_quota_keeps_sandboxes_and_volumes_to_their_size(kernel: HostLikeKernel) -> None:
    result = run_tests(kernel, QUOTA_TESTS, cgroups="v2", before=WITH_QUOTA)

    assert result.exit_code == 0
    assert result.output.count(b" PASSED") == len(QUOTA_TESTS)


def test_containers_in_a_unit_to_which_systemd_has_delegated_its_cgroups(kernel: HostLikeKernel) -> None:
    result = run_tests(kernel, DELEGATED_TESTS, cgroups="v2", before=DELEGATED)

    assert result.exit_code == 0
    assert result.output.count(b" PASSED") == len(DELEGATED_TESTS)


def test_layers_are_block_devices_on_a_kernel_that_has_ublk(kernel: HostLikeKernel) -> None:
    result = run_tests(kernel, UBLK_TESTS, cgroups="v2")

    assert result.exit_code == 0
    assert result.output.count(b" PASSED") >= 13
    assert b" SKIPPED" not in result.output
