"""A command as root on another kernel: QEMU emulates the machine, this machine's files are shared read-only.

For what this machine's own kernel cannot show: a host with cgroup2 alone, as systemd mounts it, or one without cgroup2.
Emulation needs no /dev/kvm and is some twenty times slower than the processor, so choose few things.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote
from typing import Final

from dsec.backends.vm.initramfs import cpio_entry
from dsec.testing.guest_kernel import GuestUnavailableError, HostLikeKernel

_QEMU: Final = "qemu-system-x86_64"
_CONSOLE_SHOWN: Final = 4_000
_SCRATCH_BYTES: Final = 8 << 30  # sparse
_HANG_UP_S: Final = 10.0

# First: find the share, put a writable layer over it, go there. A failure ends it: the kernel panics, and QEMU with it.
_INIT: Final = """\
#!/busybox sh
set -e
b=/busybox
$b mkdir -p /proc /sys /dev /host /over /root
$b mount -t devtmpfs dev /dev
for module in $($b cat /modules.order); do $b insmod /modules/$module; done
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose,noatime host /host
$b mount -t tmpfs -o mode=755 over /over
$b mkdir /over/upper /over/work
$b mount -t overlay -o lowerdir=/host,upperdir=/over/upper,workdir=/over/work root /root
$b mount -t tmpfs -o mode=755 run /root/run
$b mkdir /root/run/guest
$b cp /busybox /start /command /root/run/guest
exec $b switch_root /root /run/guest/busybox sh /run/guest/start
"""

# Then: what a distribution's first program would have mounted; the command; its output and exit status on two ports.
_START: Final = """\
b=/run/guest/busybox
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
$b mount -t proc -o nosuid,nodev,noexec proc /proc
$b mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
$b mount -t devtmpfs -o nosuid dev /dev
$b mkdir -p /dev/pts /dev/shm /dev/mqueue
$b mount -t devpts -o ptmxmode=666,gid=5,mode=620 devpts /dev/pts
$b mount -t tmpfs shm /dev/shm
$b mount -t mqueue mqueue /dev/mqueue
$b mount -t ext4 /dev/vda /tmp && $b chmod 1777 /tmp
$b ifconfig lo up
$b hostname guest
CGROUPS
for port in /sys/class/virtio-ports/*; do
    export "port_$($b cat $port/name)=/dev/${port##*/}"
done
$b sh /run/guest/command </dev/null >$port_output 2>&1
echo $? >$port_status
$b poweroff -f
"""

# As systemd has it: one hierarchy, borders at namespaces, services in groups of their own, none of them the root's.
_V2: Final = """\
$b mount -t cgroup2 -o nosuid,nodev,noexec,nsdelegate,memory_recursiveprot cgroup2 /sys/fs/cgroup
echo '+cpu +memory +pids' >/sys/fs/cgroup/cgroup.subtree_control
$b mkdir -p /sys/fs/cgroup/system.slice/command.service
echo '+cpu +memory +pids' >/sys/fs/cgroup/system.slice/cgroup.subtree_control
echo $$ >/sys/fs/cgroup/system.slice/command.service/cgroup.procs
"""
_V1: Final = """\
$b mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup
for controller in cpu cpuacct pids freezer; do
    $b mkdir /sys/fs/cgroup/$controller
    $b mount -t cgroup -o $controller cgroup /sys/fs/cgroup/$controller
done
"""
CGROUPS: Final = {"v2": _V2, "v1": _V1}


class GuestError(Exception):
    """The guest ended, or was ended, before the command did."""


@dataclass(frozen=True, slots=True)
class GuestResult:
    exit_code: int
    output: bytes
    console: bytes
    took_s: float


def qemu() -> str:
    """Raises GuestUnavailableError."""
    for name in (_QEMU, "setpriv", "mke2fs"):
        if shutil.which(name) is None:
            package = {_QEMU: "qemu-system-x86", "setpriv": "util-linux", "mke2fs": "e2fsprogs"}[name]
            raise GuestUnavailableError(f"there is no {name}: apt-get install {package}")
    return _QEMU


def run_in_guest(
    kernel: HostLikeKernel,
    command: Sequence[str],
    *,
    cgroups: str = "v2",
    cwd: Path = Path("/"),
    env: Mapping[str, str] | None = None,
    memory_mib: int = 3_072,
    processors: int = 2,
    deadline_s: float = 600.0,
) -> GuestResult:
    """Boots, runs the command as root, brings back its output (both streams, in order) and exit status, powers off.

    The guest sees this machine's `/`; what it writes is gone with it. /tmp is a disk of its own (ext4), /run a tmpfs.
    `cgroups` is "v2" for a host as systemd makes it, "v1" for one without cgroup2. QEMU ends with the thread that calls
    this. Raises GuestError, with the console's last words, when the guest ends early or the deadline passes.
    """
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dsec-guest-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        lines = [f"cd {quote(str(cwd))} || exit 125", *(f"export {k}={quote(v)}" for k, v in (env or {}).items())]
        _write_initrd(work / "initrd", kernel, _START.replace("CGROUPS\n", CGROUPS[cgroups]), [*lines, join(command)])
        _make_disk(work / "disk")
        for port in ("output", "status", "console"):
            (work / port).touch()
        process = subprocess.Popen(_machine(kernel, work, memory_mib, processors), stdin=subprocess.DEVNULL)
        try:
            process.wait(deadline_s)
            why = "the guest ended before the command"
        except subprocess.TimeoutExpired:
            why = f"the guest was not done after {deadline_s:g} s"
        finally:
            process.kill()
            process.wait(_HANG_UP_S)
        status, output = (work / "status").read_bytes().strip(), (work / "output").read_bytes()
        console = (work / "console").read_bytes()
    if not status.isdigit():
        shown = (output + b"\nconsole:\n" + console)[-_CONSOLE_SHOWN:].decode(errors="replace")
        raise GuestError(f"{why}; {shown}")
    return GuestResult(int(status), output, console, time.monotonic() - began_s)


def _machine(kernel: HostLikeKernel, work: Path, memory_mib: int, processors: int) -> list[str]:
    # setpriv: QEMU is killed when its parent is, also by SIGKILL.
    command = ["setpriv", "--pdeathsig", "KILL", "--", qemu(), "-nodefaults", "-no-user-config", "-no-reboot"]
    command += ["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", str(memory_mib)]
    command += ["-smp", str(processors), "-display", "none", "-nic", "none", "-device", "virtio-rng-pci"]
    command += ["-kernel", str(kernel.vmlinux), "-initrd", str(work / "initrd")]
    # tsc=reliable: without it a loaded machine makes the kernel doubt its clock, which costs each look at the time.
    command += ["-append", "console=ttyS0 quiet panic=-1 oops=panic tsc=reliable mitigations=off rdinit=/init"]
    command += ["-serial", f"file:{work / 'console'}", "-device", "virtio-serial-pci"]
    for number, port in enumerate(("output", "status"), 1):
        command += ["-chardev", f"file,id={port},path={work / port}"]
        command += ["-device", f"virtserialport,chardev={port},nr={number},name={port}"]
    command += ["-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"]
    command += ["-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]
    return [*command, "-drive", f"file={work / 'disk'},format=raw,if=virtio,cache=unsafe,discard=unmap"]


def _make_disk(path: Path) -> None:
    with path.open("wb") as disk:
        disk.truncate(_SCRATCH_BYTES)
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", str(path)]
    subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)


def _write_initrd(path: Path, kernel: HostLikeKernel, start: str, command: Sequence[str]) -> None:
    files = {
        "init": _INIT.encode(),
        "start": start.encode(),
        "command": "\n".join([*command, ""]).encode(),
        "busybox": kernel.busybox.read_bytes(),
        "modules.order": "".join(f"{module.name}\n" for module in kernel.modules).encode(),
        **{f"modules/{module.name}": module.read_bytes() for module in kernel.modules},
    }
    entries = [cpio_entry("modules", 0o040755)]
    entries += [cpio_entry(name, 0o100755, content) for name, content in files.items()]
    path.write_bytes(b"".join(entries) + cpio_entry("TRAILER!!!", 0))
