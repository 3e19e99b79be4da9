"""A Debian system on a disk, for full machines: packages, our agent as a service, and a kernel beside the disk.

No loop device, no mount of ours: the tree becomes a file system by `mke2fs -d`. The machine boots the kernel directly,
so that no boot loader is needed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from dsec.binaries import find_binary
from dsec.core.errors import HostError, StorageError
from dsec.core.limits import GIB, MIB
from dsec.core.machines import ADDRESS, GATEWAY, PREFIX, Agent, Bus, Firmware
from dsec.image.recipes import DEBIAN_ENV
from dsec.image.sources import debian
from dsec.image.sources.apt import host_sources, host_suite
from dsec.storage.space import require_free
from dsec.wire.codec import pack
from dsec.wire.egress import NAMESERVER
from dsec.wire.environments import DebianSource, MachineBuild
from dsec.wire.machines import MachineInfo

COMMAND_LINE: Final = (
    "root=/dev/vda rw console=tty0 console=ttyS0 quiet panic=-1 oops=panic mitigations=off random.trust_cpu=on "
    "no_timer_check tsc=reliable init_on_alloc=0 audit=0 apparmor=0 net.ifnames=0 fsck.mode=skip"
)
DESKTOP_WAIT_S: Final = 5.0  # until the last window is drawn
_SYSTEM: Final = ("systemd-sysv", "udev", "dbus", "kmod", "initramfs-tools", "procps")
_SERVER: Final = ("linux-image-cloud-amd64",)
# The "cloud" kernel has no screen, no keyboard and no mouse.
_DESKTOP: Final = (
    "linux-image-amd64",
    "xserver-xorg-core",
    "xserver-xorg-input-libinput",
    "xinit",
    "x11-xserver-utils",
    "openbox",
    "xterm",
    "fonts-dejavu-core",
)
_USER: Final = "user"
_HOME: Final = "usr/lib/dsec"
_MAKE_S: Final = 1_800
_SPARE_BYTES: Final = 512 * MIB  # beside the files: tables, and room until the file system has grown

_FSTAB: Final = "/dev/vda / ext4 noatime,x-systemd.growfs 0 0\n"
_AGENT_UNIT: Final = """\
[Unit]
Description=The agent of dsec
After=systemd-user-sessions.service systemd-growfs-root.service dsec-desktop.service
FailureAction=reboot-force

[Service]
ExecStart=/usr/lib/dsec/start
Delegate=yes
OOMScoreAdjust=-900
TasksMax=infinity
LimitNOFILE=1048576
Restart=no

[Install]
WantedBy=multi-user.target
"""
# Commands get cgroups of their own below the service's, as everywhere.
_START: Final = """\
#!/bin/sh
set -e
cgroup=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
mkdir "$cgroup/agent" "$cgroup/work"
echo $$ > "$cgroup/agent/cgroup.procs"
for controller in $(cat "$cgroup/cgroup.controllers"); do
    echo "+$controller" > "$cgroup/cgroup.subtree_control"
    echo "+$controller" > "$cgroup/work/cgroup.subtree_control"
done
until test -c /dev/virtio-ports/agent && test -c /dev/virtio-ports/bell; do sleep 0.1; done
# Machines begin with their network, if they have one: here they wait for it once.
tries=0
for card in /sys/class/net/*/device; do
    test -e "$card" || continue
    until grep -q '^[a-z0-9]*[[:space:]]00000000' /proc/net/route || test $tries -ge 600; do
        tries=$((tries + 1)); sleep 0.1
    done
done
READY
exec 4< "$cgroup" 5< /usr/lib/dsec/agent.config
exec /usr/lib/dsec/dsec-agent --ports /dev/virtio-ports/agent /dev/virtio-ports/bell
"""
# Some minutes at most: who looks for what is wrong with it needs the agent.
_DESKTOP_READY: Final = """\
tries=0
until pgrep -x xterm > /dev/null || test $tries -ge 600; do tries=$((tries + 1)); sleep 0.5; done"""
_DESKTOP_UNIT: Final = """\
[Unit]
Description=A desktop on the screen
After=systemd-user-sessions.service
Conflicts=getty@tty1.service
StartLimitIntervalSec=0

[Service]
ExecStartPre=/bin/sh -c 'until test -c /dev/dri/card0; do sleep 0.2; done'
TimeoutStartSec=300
ExecStart=/usr/bin/xinit /usr/lib/dsec/session -- /usr/lib/xorg/Xorg :0 vt1 -nolisten tcp -s 0 -dpms -ac
Restart=always
RestartSec=1

[Install]
WantedBy=multi-user.target
"""
# Of a machine with a network card, by the rule of the device: nothing is started for others. Not by DHCP: a clone has
# another hardware address, would be given another address than the machine that it was, and has it all from the start.
_NETWORK: Final = f"""\
[Match]
Type=ether
Kind=!*

[Network]
Address={ADDRESS}/{PREFIX}
Gateway={GATEWAY}
LinkLocalAddressing=no
IPv6AcceptRA=no
"""
_NETWORK_RULE: Final = """\
ACTION=="add", SUBSYSTEM=="net", DEVPATH!="/devices/virtual/*", TAG+="systemd", \\
ENV{SYSTEMD_WANTS}+="systemd-networkd.service"
"""
_SESSION: Final = """\
#!/bin/sh
xset s off
cd /home/user
exec setpriv --reuid user --regid user --init-groups \\
    env HOME=/home/user USER=user DISPLAY=:0 PATH=/usr/local/bin:/usr/bin:/bin openbox --startup xterm
"""


def machine_env(request: MachineBuild) -> dict[str, str]:
    """Of its commands."""
    return {**DEBIAN_ENV, **({"DISPLAY": ":0"} if request.desktop else {})}


def packages_of(request: MachineBuild) -> tuple[str, ...]:
    return (*_SYSTEM, *(_DESKTOP if request.desktop else _SERVER), *request.packages)


def build_machine(
    request: MachineBuild,
    target: Path,
    work: Path,
    *,
    log: Callable[[str], None],
    progress: Callable[[str, str], None],
    proxies: Mapping[str, str],
) -> MachineInfo:
    """Puts `disk`, `kernel` and `initrd` into `target`. Blocking; in a process that may be killed, with `work` its own.

    Raises InvalidArgumentError for a package that does not exist, HostError when the machine cannot do it.
    """
    host = host_suite()
    suite = request.suite or host
    sources = host_sources(suite, host=host)
    progress("fetch", f"installing Debian {suite}")
    own = work / "own"
    _write_own(own, request, "\n".join(item.without_credentials().text() for item in sources))
    source = DebianSource(packages=packages_of(request), suite=request.suite)
    debian.install(source, suite, sources, work, log=log, proxies=proxies, hooks=_hooks(own, request))
    tree = work / "debian"
    progress("pack", "making the disk")
    _take(tree / "boot", "vmlinuz-", target / "kernel")
    _take(tree / "boot", "initrd.img-", target / "initrd")
    _make_disk(tree, target / "disk")
    return MachineInfo(
        name=request.name,
        format="raw",
        firmware=Firmware.KERNEL,
        agent=Agent.DSEC,
        bus=Bus.VIRTIO,
        boot_wait_s=DESKTOP_WAIT_S if request.desktop else 0.0,
        disk_bytes=request.disk_bytes,
        used_bytes=sum(path.stat().st_blocks * 512 for path in target.iterdir()),
        sha256=_digest(target / "disk"),
        created_at=time.time(),
    )


def _hooks(own: Path, request: MachineBuild) -> list[str]:
    """What mmdebstrap does with the tree at the end, inside of it: no link there leads out."""
    hooks = [f"--customize-hook=sync-in {shlex.quote(os.fspath(own))} /"]
    forget = "rm -f /etc/machine-id /etc/resolv.conf /etc/apt/sources.list && touch /etc/machine-id"
    # The same for all machines.
    forget += f" && echo nameserver {NAMESERVER} > /etc/resolv.conf"
    hooks.append(f'--customize-hook=chroot "$1" sh -c "{forget}"')
    mask = "systemctl mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer fstrim.timer"
    hooks.append(f'--customize-hook=chroot "$1" sh -c "{mask}"')
    units = "dsec-agent.service" + (" dsec-desktop.service" if request.desktop else "")
    if request.desktop:
        hooks.append(f'--customize-hook=chroot "$1" useradd -m -s /bin/bash {_USER}')
    hooks.append(f'--customize-hook=chroot "$1" systemctl enable {units}')
    return hooks


def _write_own(own: Path, request: MachineBuild, sources: str) -> None:
    config = {"sandbox": "", "caps_exec": 2**64 - 1, "spare": True}
    files: dict[str, tuple[int, bytes]] = {
        f"{_HOME}/dsec-agent": (0o755, find_binary("dsec-agent").read_bytes()),
        f"{_HOME}/start": (0o755, _START.replace("READY", _DESKTOP_READY if request.desktop else ":").encode()),
        f"{_HOME}/agent.config": (0o644, pack(config)),
        "etc/systemd/system/dsec-agent.service": (0o644, _AGENT_UNIT.encode()),
        "etc/modules-load.d/dsec.conf": (0o644, b"virtio_console\nvirtio_rng\n"),
        "etc/fstab": (0o644, _FSTAB.encode()),
        "etc/systemd/network/dsec.network": (0o644, _NETWORK.encode()),
        "etc/udev/rules.d/80-dsec-network.rules": (0o644, _NETWORK_RULE.encode()),
        "etc/hostname": (0o644, b"machine\n"),
        "etc/apt/sources.list.d/debian.sources": (0o644, sources.encode()),
    }
    if request.desktop:
        files["etc/systemd/system/dsec-desktop.service"] = (0o644, _DESKTOP_UNIT.encode())
        files[f"{_HOME}/session"] = (0o755, _SESSION.encode())
    for name, (mode, content) in files.items():
        path = own / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
    # They become those of the system, whose users are to pass them, whatever the mask of this process is.
    for directory, _, _ in os.walk(own):
        Path(directory).chmod(0o755)


def _take(boot: Path, prefix: str, target: Path) -> None:
    """The newest file of that name. What is in the tree is of packages: a link is not followed."""
    found = sorted(path for path in boot.iterdir() if path.name.startswith(prefix))
    if not found:
        raise HostError(f"the packages have put no {prefix}… into /boot", hint="the log says why")
    fd = os.open(found[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file, target.open("xb") as out:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StorageError(f"{found[-1].name} is no regular file")
        shutil.copyfileobj(file, out)


def _make_disk(tree: Path, disk: Path) -> None:
    used = _SPARE_BYTES
    for directory, _, names in os.walk(tree):
        for name in names:
            used += Path(directory, name).lstat().st_blocks * 512 + 1024
    size = -(-used * 5 // 4 // MIB) * MIB
    require_free(disk.parent)
    # No journal: what a machine has written that has died is not used again.
    options = ["-q", "-F", "-t", "ext4", "-L", "root", "-b", "4096", "-O", "^has_journal", "-m", "1"]
    # Tables for a file system that grows: the machine's disk is larger.
    options += ["-E", f"lazy_itable_init=1,resize={max(size * 64, 64 * GIB) // 4096}", "-d", os.fspath(tree)]
    with disk.open("xb") as file:
        file.truncate(size)
    program = shutil.which("mke2fs", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if program is None:
        raise HostError("mke2fs is not installed", hint="apt-get install e2fsprogs")
    try:
        done = subprocess.run(
            [program, *options, os.fspath(disk)],
            capture_output=True,
            timeout=_MAKE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"mke2fs: {error}") from error
    if done.returncode != 0:
        raise StorageError(f"mke2fs failed with {done.returncode}: {done.stderr.decode(errors='replace')[-500:]}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
