"""What a monitor is confined to: looked at from outside, and tried from inside its jail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from dsec.backends.vm.instance import MachineInstance
from dsec.backends.vm.monitor import Confines, MonitorProcess, jail_plan, start_ticks
from dsec.core.spec import Substrate
from dsec.testing.hosts import instance_spec
from tests.contract.backends_under_test import BACKENDS, BackendUnderTest

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

NOBODY: Final = 0x7777_0001
_TRIES: Final = """
import os, socket, sys
def tried(name, what):
    try:
        what()
    except OSError:
        return
    print("got", name)
tried("root's files", lambda: os.listdir("/root"))
tried("the host's /etc", lambda: open("/etc/passwd"))
tried("processes", lambda: os.listdir("/proc"))
tried("a device", lambda: os.mknod("/tmp/d", 0o60660, 0))
tried("a place to write", lambda: open("/usr/x", "w"))
tried("the root", lambda: open("/x", "w"))
tried("root", lambda: os.setuid(0))
tried("the network", lambda: socket.create_connection(("127.0.0.1", 22), 1))
tried("a raw socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
tried("a mount", lambda: os.chroot("/usr"))
for name in os.listdir("/dev"):
    if name not in ("null", "zero", "urandom", "random"):
        print("got", name)
print("ids", os.getuid(), os.getgid(), os.getgroups(), "done")
"""


@pytest.fixture
async def backend(short_tmp: Path, native_binaries: dict[str, Path]) -> AsyncIterator[BackendUnderTest]:
    under_test = BACKENDS["microvm"](short_tmp)
    try:
        probe = await under_test.backend.probe()
        if not probe.usable:
            pytest.skip(f"microvm: {probe.reason}")
        yield under_test
    finally:
        await under_test.close()


async def test_a_monitor_has_no_right_no_network_and_nothing_of_the_host_to_see(backend: BackendUnderTest) -> None:
    spec = instance_spec(Substrate.MICROVM, node=backend.node)
    instance = await backend.create(spec)
    assert isinstance(instance, MachineInstance)
    place = Path("/proc", str(instance.pid))

    status = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines() if ":\t" in line)
    uid, gid = (set(status[name].split()) for name in ("Uid", "Gid"))
    assert len(uid) == 1
    assert uid == gid
    assert int(uid.pop()) >= 0x7000_0000
    assert status["Groups"].strip() == ""
    assert {status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for namespace in ("mnt", "net", "ipc", "uts"):
        assert (place / "ns" / namespace).readlink() != Path("/proc/self/ns", namespace).readlink()
    assert {path.name for path in (place / "root").iterdir()} <= _EXPECTED
    mounts = [line.split() for line in (place / "mountinfo").read_text().splitlines()]
    assert all("nosuid" in fields[5] for fields in mounts)
    assert {fields[4] for fields in mounts if "rw" in fields[5].split(",")} <= _WRITABLE
    assert [line.split(":")[0].strip() for line in (place / "net/dev").read_text().splitlines()[2:]] == ["lo"]
    cgroups = (place / "cgroup").read_text()
    assert cgroups.count(instance.id) >= 1


_EXPECTED: Final = {
    "usr", "lib", "lib64", "lib32", "bin", "sbin", "etc", "dev", "vm", "disk", "template", "layers", "boot",
}  # fmt: skip
_WRITABLE: Final = {
    "/", "/vm", "/disk", "/template/ram.img", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
}  # fmt: skip


async def test_what_is_tried_from_inside_a_jail_fails(short_tmp: Path, native_binaries: dict[str, Path]) -> None:
    for name in ("root", "sockets"):
        (short_tmp / name).mkdir(mode=0o700)
    confines = Confines(uid=NOBODY, cgroups=(), root=short_tmp / "root", sockets=short_tmp / "sockets")
    plan = jail_plan(confines, ["/usr/bin/python3", "-c", f"import sys\nsys.stdout = sys.stderr\n{_TRIES}"])
    if not Path("/usr/bin/python3").exists():
        pytest.skip("there is no /usr/bin/python3 to try with")

    process = MonitorProcess.start(plan)
    try:
        await process.ended
        said = process.words()
    finally:
        process.forget()

    assert said == f"ids {NOBODY} {NOBODY} [] done"


async def test_a_jail_of_root_or_beside_its_root_is_refused(short_tmp: Path, native_binaries: dict[str, Path]) -> None:
    (short_tmp / "root").mkdir()
    confines = Confines(uid=0, cgroups=(), root=short_tmp / "root", sockets=short_tmp / "root")

    process = MonitorProcess.start(jail_plan(confines, ["/usr/bin/true"]))
    await process.ended

    assert "names root" in process.words()
    assert start_ticks(process.pid) is None
    process.forget()
