"""What code inside, root with every capability of its namespace, cannot do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.security import syscalls
from dsec.wire.launch import ArgRule, BindMount, FilterArgs, FilterSpec, LaunchPlan, LayerMount, SyscallRule
from tests.native import launch_wire as wire
from tests.native.launch_wire import LaunchClient, ask, destroy_args

pytestmark = [pytest.mark.root]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LaunchClient, LaunchPlan, int]]:
    directory = tmp_path_factory.mktemp("confined")
    image = wire.make_image(directory / "image")
    with wire.running_host(directory / "host") as host:
        client = host.start()
        client.call("layer_mount", LayerMount(digest="image", kind="directory", meta=str(image)))
        binds = [
            BindMount(path="/usr/bin/tool", kind="readonly"),
            BindMount(path="/answers", kind="masked"),
            BindMount(path="/etc/passwd", kind="masked"),
        ]
        plan = host.plan(binds=binds)
        launched = client.launch(plan)
        yield client, plan, launched.pid
        client.destroy(destroy_args(plan, launched))


@pytest.fixture
def inside(sandbox: tuple[LaunchClient, LaunchPlan, int]) -> Callable[[str], str]:
    return lambda command: ask(sandbox[1], command)


def test_root_inside_has_every_capability_and_the_attempts_below_mean_something(inside: Callable[[str], str]) -> None:
    assert "CapEff:\t000001ffffffffff" in inside("grep CapEff /proc/self/status")
    assert "exit exit status: 0" in inside("mkdir -p /tmp/m && mount -t tmpfs none /tmp/m && umount /tmp/m")


@pytest.mark.parametrize("path", ["mem", "maps", "environ", "fd/3", "root/etc", "cwd"])
def test_the_agent_cannot_be_read(inside: Callable[[str], str], path: str) -> None:
    assert "Permission denied" in inside(f"head -c 1 /proc/1/{path} > /dev/null")


def test_the_agent_program_cannot_be_read_nor_replaced(inside: Callable[[str], str]) -> None:
    assert "memfd" not in inside("readlink /proc/1/exe")
    assert "denied" in inside("cat /proc/1/exe > /dev/null")
    assert "denied" in inside("echo x > /proc/1/exe")


def test_ids_inside_lie_in_the_range_alone(
    inside: Callable[[str], str], sandbox: tuple[object, LaunchPlan, int]
) -> None:
    base = sandbox[1].id_base
    assert inside("cat /proc/self/uid_map /proc/self/gid_map").split()[:6] == ["0", str(base), "65536"] * 2


def test_a_device_of_the_image_is_dead(inside: Callable[[str], str]) -> None:
    assert "denied" in inside("head -c 1 /zero-device")
    assert "Operation not permitted" in inside("mknod /tmp/zero c 1 5")
    assert "Operation not permitted" in inside("mknod /dev/kmem c 1 2")


@pytest.mark.parametrize("path", ["/proc/kcore", "/proc/keys", "/proc/interrupts", "/proc/timer_list"])
def test_masked_files_are_empty(inside: Callable[[str], str], path: str) -> None:
    assert inside(f"if [ -e {path} ]; then cat {path}; fi") == "exit exit status: 0"


def test_a_masked_directory_is_empty(inside: Callable[[str], str]) -> None:
    assert inside("ls -A /sys/firmware") == "exit exit status: 0"
    assert inside("ls -A /answers") == "exit exit status: 0"
    assert inside("cat /etc/passwd") == "exit exit status: 0"


@pytest.mark.parametrize(
    "attempt",
    [
        "echo x > /usr/bin/tool",
        "rm -f /usr/bin/tool",
        "mv /usr/bin/tool /usr/bin/other",
        "mv /usr/bin /usr/other",
        "mv /usr /other",
        "umount /usr/bin/tool",
        "umount /usr/bin",
        "umount -l /usr",
        "mount -o remount,rw,bind /usr/bin/tool",
        "umount /answers",
        "umount -l /answers",
        "mv /answers /elsewhere",
        "rm -rf /answers && false",
        "umount /etc/passwd",
        "umount /dev",
        "umount /etc/hosts",
        "unshare -m umount /answers",
        "unshare -U -m umount /answers",
        "umount /sys",
        "umount -l /sys/firmware",
        "mount -o remount,rw,bind /sys",
        "mkdir -p /tmp/see && mount --bind / /tmp/see && cat /tmp/see/answers/key",
    ],
)
def test_protected_paths_hold(inside: Callable[[str], str], attempt: str) -> None:
    output = inside(attempt)

    assert "exit exit status: 0" not in output
    assert "secret" not in output
    assert inside("/usr/bin/tool").startswith("original\n")
    assert inside("ls -A /answers") == "exit exit status: 0"


def test_kernel_settings_are_set_and_then_read_only(inside: Callable[[str], str]) -> None:
    assert inside("cat /proc/sys/kernel/shmmni").startswith("64\n")
    assert "Read-only" in inside("echo 1 > /proc/sys/kernel/shmmni")
    assert "Read-only" in inside("mkdir /sys/kernel/x")


def test_sysfs_shows_no_network_but_the_loopback_and_nothing_mounted_in_it(inside: Callable[[str], str]) -> None:
    assert inside("ls /sys/class/net").split()[0] == "lo"
    assert inside("ls -A /sys/fs/cgroup /sys/fs/bpf /sys/kernel/debug 2> /dev/null | grep -v :").split() in (
        ["exit", "exit", "status:", "0"],
        ["exit", "exit", "status:", "1"],
    )


def test_nothing_of_the_host_is_in_sight(inside: Callable[[str], str]) -> None:
    mounts = inside("cat /proc/self/mountinfo")
    assert str(wire.NATIVE) not in mounts
    assert "ext4" not in mounts
    assert inside("ls /proc | grep -c '^[0-9]'").split()[0] in {"2", "3", "4"}
    assert [line.split(":")[0].strip() for line in inside("cat /proc/net/dev").splitlines()[2:-1]] == ["lo"]


# As root of the sandbox who has got out of its root: into the root of the mount namespace, with every right over it.
_BELOW_THE_ROOT = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
files = [os.open(f"/proc/{sys.argv[1]}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt")]
for file in files:
    assert libc.setns(file, 0) == 0, os.strerror(ctypes.get_errno())
print(sorted(os.listdir("/")), os.listdir("/empty/directory"), sorted(os.listdir("/scratch")))
print("secret" in open("/root/answers/key").read() if os.path.exists("/root/answers/key") else "masked")
def attempt(name, result):
    print(name, errno.errorcode.get(ctypes.get_errno()) if result else "done")
attempt("umount", libc.umount2(b"/root", 2))
attempt("move", libc.mount(b"/root", b"/empty/directory", None, 8192, None))
attempt("remount", libc.mount(None, b"/", None, 32 | 4096, None))
attempt("proc", libc.mount(b"proc", b"/empty/directory", b"proc", 0, None))
attempt("mkdir", libc.mkdir(b"/new", 0o755))
"""


def test_below_the_root_there_is_nothing(sandbox: tuple[LaunchClient, LaunchPlan, int]) -> None:
    command = [sys.executable, "-c", _BELOW_THE_ROOT, str(sandbox[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout.splitlines() == [
        "['empty', 'root', 'scratch'] [] ['dev', 'etc', 'proc', 'shm']",  # the last is the sandbox's own
        "masked",
        "umount EINVAL",
        "move EINVAL",
        "remount EPERM",
        "proc EPERM",
        "mkdir EROFS",
    ], done.stderr


def test_the_agent_gets_its_descriptors_and_no_others(inside: Callable[[str], str]) -> None:
    lines = dict(line.split(" ", 1) for line in inside("!fds").splitlines())
    assert {lines[str(number)] for number in range(3)} == {"/dev/null"}
    assert lines["3"].startswith("socket:")
    assert lines["5"].startswith("/memfd:dsec-agent-config")
    assert lines["6"].endswith("/oom_score_adj")
    own = {"7", "8"}  # the probe's duplicate of 3, and the connection that asks
    assert set(lines) <= {"0", "1", "2", "3", "4", "5", "6"} | own


def test_the_agent_has_its_capabilities_and_no_more(inside: Callable[[str], str]) -> None:
    status = inside("!status")
    assert "CapEff:\t00000000000001e2" in status
    assert "CapPrm:\t00000000000001e2" in status
    assert "Uid:\t65535\t65535\t65535\t65535" in status


def test_a_filter_answers_as_its_words_say(tmp_path: Path) -> None:
    image = wire.make_image(tmp_path / "image")
    with wire.running_host(tmp_path / "host") as host:
        client = host.start()
        client.call("layer_mount", LayerMount(digest="image", kind="directory", meta=str(image)))
        spec = FilterSpec(
            deny=[
                SyscallRule(syscall="mount"),
                SyscallRule(syscall="socket", when=[ArgRule(index=0, equals=1, negate=True)]),
            ],
            nosys=[SyscallRule(syscall="clone3"), SyscallRule(syscall="mkdir")],
            allow=syscalls.AGENT.allow,
        )
        client.call("filter", FilterArgs(name="some", spec=spec))
        plan = host.plan(filter_agent="some", filter_exec="some")
        launched = client.launch(plan)

        assert ask(plan, "echo works").startswith("works\n")
        mount = ask(plan, "mount -t tmpfs none /home").lower()
        assert "permission denied" in mount or "not permitted" in mount
        assert "not implemented" in ask(plan, "mkdir /new")
        assert "Seccomp:\t2" in ask(plan, "grep Seccomp: /proc/self/status")
        client.destroy(destroy_args(plan, launched))
