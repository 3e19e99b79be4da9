"""A bare client of dsec-launch, and what its tests need around it: a daemon, an image, plans."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from dsec.wire.launch import (
    MESSAGE_BYTES_MAX,
    DestroyArgs,
    EtcFile,
    ExitEvent,
    FilterArgs,
    FilterSpec,
    HelloAnswer,
    HelloArgs,
    Launched,
    LaunchFailure,
    LaunchPlan,
    LaunchRequest,
    Listed,
    SyscallRule,
)

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native" / "target" / "x86_64-unknown-linux-gnu" / "release"
LAUNCH = NATIVE / "dsec-launch"
PROBE = NATIVE / "examples" / "probe"
CGROUP2 = Path("/sys/fs/cgroup/unified") if Path("/sys/fs/cgroup/unified").is_dir() else Path("/sys/fs/cgroup")
CGROUP1 = [c for c in ("memory", "pids", "cpu", "cpuset") if (Path("/sys/fs/cgroup") / c / "cgroup.procs").exists()]
MEMORY2 = "memory" in (CGROUP2 / "cgroup.controllers").read_text().split() if CGROUP2.is_dir() else False
CAP_DAC_OVERRIDE, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP = 1 << 1, 1 << 5, 1 << 6, 1 << 7, 1 << 8
ALL_CAPS = (1 << 41) - 1
PROGRAMS = "sh cat ls mount umount mv rm id mknod head grep sleep stat readlink unshare touch mkdir dd chmod sort wc"


class LaunchRefusedError(Exception):
    def __init__(self, failure: LaunchFailure) -> None:
        super().__init__(f"{failure.step}: {failure.errno}: {failure.detail}")
        self.failure = failure


class LaunchClient:
    """One connection. Replies may come in any order; events are collected as they pass."""

    def __init__(self, run: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(60)
        descriptor = os.open(run, os.O_PATH)
        try:  # the run directory of a test may be deeper than a socket's address is long
            self._socket.connect(f"/proc/self/fd/{descriptor}/launch.sock")
        except OSError:
            self._socket.close()
            raise
        finally:
            os.close(descriptor)
        self._id = 0
        self._replies: dict[int, dict[str, Any]] = {}
        self.events: list[ExitEvent] = []

    def close(self) -> None:
        self._socket.close()

    def send(self, op: str, args: Any) -> int:
        self._id += 1
        self.send_raw(msgspec.msgpack.encode(LaunchRequest(id=self._id, op=op, args=args)))
        return self._id

    def send_raw(self, message: bytes) -> None:
        self._socket.send(message)

    def receive(self, request: int) -> Any:
        while request not in self._replies:
            self._read()
        reply = self._replies.pop(request)
        if reply["error"] is not None:
            raise LaunchRefusedError(msgspec.convert(reply["error"], LaunchFailure))
        return reply["ok"]

    def _read(self) -> None:
        message = self._socket.recv(MESSAGE_BYTES_MAX)
        if not message:
            raise ConnectionError("the launcher has closed the connection")
        reply = msgspec.msgpack.decode(message)
        if reply.get("event") is not None:
            self.events.append(msgspec.convert(reply["event"], ExitEvent))
        else:
            self._replies[reply["id"]] = reply

    def call(self, op: str, args: Any = None) -> Any:
        return self.receive(self.send(op, {} if args is None else args))

    def wait_event(self, sandbox: str) -> ExitEvent:
        while True:
            for event in self.events:
                if event.sandbox == sandbox:
                    self.events.remove(event)
                    return event
            self._read()

    def hello(self) -> HelloAnswer:
        return msgspec.convert(self.call("hello", HelloArgs(version=1)), HelloAnswer)

    def launch(self, plan: LaunchPlan) -> Launched:
        return msgspec.convert(self.call("launch", plan), Launched)

    def destroy(self, args: DestroyArgs) -> None:
        self.call("destroy", args)

    def list(self) -> Listed:
        return msgspec.convert(self.call("list"), Listed)

    def open_filter(self) -> None:
        """A filter named `open` that allows what the tests do."""
        names = "read write open close stat fstat execve execveat exit_group"
        rules = [SyscallRule(syscall=name) for name in names.split()]
        self.call("filter", FilterArgs(name="open", spec=FilterSpec(allow=rules)))


@cache
def build() -> None:
    """The launcher and the probe, from the present source; in a guest (`dsec.testing.guest`) as they are.

    With all programs and not by itself: for one package cargo would make what all use again, with other features.
    """
    if "DSEC_TEST_BUILT" in os.environ:
        return
    options = ["--release", "--locked", "--target-dir", "target", "--bins", "--example", "probe"]
    command = [str(ROOT / "tools" / "cargo"), "build", "--quiet", *options]
    subprocess.run(command, cwd=ROOT / "native", check=True, timeout=1_200, stdin=subprocess.DEVNULL)


@dataclass
class Host:
    """A launcher on a directory of its own, and the plans of sandboxes on it. `close` removes all of it."""

    directory: Path
    program: Path = LAUNCH
    agent: Path = PROBE
    process: subprocess.Popen[bytes] | None = None
    counter: int = 0
    clients: list[LaunchClient] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.directory / "run"

    @property
    def cgroup_name(self) -> str:
        return f"dsec-test-{os.getpid()}-{id(self):x}"

    def start(self, *arguments: str) -> LaunchClient:
        self.run.mkdir(exist_ok=True)
        for parent in self.cgroup_parents():
            parent.mkdir(exist_ok=True)
            if (parent / "cpuset.cpus").exists() and not (parent / "cpuset.cpus").read_text().strip():
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (parent / name).write_text((parent.parent / name).read_text())
        if MEMORY2:
            for above in (CGROUP2, CGROUP2 / self.cgroup_name):
                (above / "cgroup.subtree_control").write_text("+memory")
        options = ["--foreground", "--test-hooks", *arguments]
        command = [str(self.program), "--run", str(self.run), "--agent", str(self.agent), *options]
        self.process = subprocess.Popen(command)
        wait_for(lambda: self._answers() or self.process is None or self.process.poll() is not None)
        assert self.process.poll() is None, "the launcher has ended"
        return self.connect()

    def _answers(self) -> bool:
        """It writes its pid once it listens. No connection tries: events of before would go to that, and be lost."""
        with contextlib.suppress(OSError):
            return (self.run / "launch.pid").read_text().strip() == str(self.process.pid if self.process else 0)
        return False

    def connect(self) -> LaunchClient:
        client = LaunchClient(self.run)
        self.clients.append(client)
        return client

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def cgroup_parents(self) -> list[Path]:
        v1 = [Path("/sys/fs/cgroup") / controller / self.cgroup_name for controller in CGROUP1]
        return [CGROUP2 / self.cgroup_name, *v1]

    def plan(self, **changes: Any) -> LaunchPlan:
        self.counter += 1
        name = "sbx_testnode_" + f"{self.counter:016d}".translate(str.maketrans("0123456789", "abcdefghij"))
        values: dict[str, Any] = {
            "sandbox": name,
            "id_base": 0x70000000 + 65_537 * self.counter,
            "lowers": ["image"],
            "directory": str(self.directory / "state" / name),
            "socket": str(self.directory / "sockets" / f"{name}.sock"),
            "hostname": "sandbox",
            "etc_files": [
                EtcFile(path="/etc/hosts", content=b"127.0.0.1 localhost sandbox\n"),
                EtcFile(path="/etc/hostname", content=b"sandbox\n"),
                EtcFile(path="/etc/resolv.conf", content=b"nameserver 127.0.0.53\n"),
            ],
            "masks": [
                "/proc/kcore",
                "/proc/keys",
                "/proc/timer_list",
                "/proc/scsi",
                "/sys/firmware",
                "/proc/interrupts",
            ],
            "readonly_proc": ["/proc/sys", "/proc/bus", "/proc/irq", "/proc/sysrq-trigger"],
            "cgroup2": str(CGROUP2 / self.cgroup_name / name),
            "cgroup1": {c: f"/sys/fs/cgroup/{c}/{self.cgroup_name}/{name}" for c in CGROUP1},
            "cgroup1_files": self._limits(),
            "rlimits": {"nofile": [1024, 4096], "core": [0, 0]},
            "sysctls": {"net.ipv4.ip_unprivileged_port_start": "0", "kernel.shmmni": "64"},
            "caps_agent": CAP_DAC_OVERRIDE | CAP_KILL | CAP_SETGID | CAP_SETUID | CAP_SETPCAP,
            "caps_exec": ALL_CAPS,
        }
        return LaunchPlan(**(values | changes))

    def _limits(self) -> dict[str, dict[str, str]]:
        limits = {
            "memory": {"memory.limit_in_bytes": str(256 << 20)},
            "pids": {"pids.max": "256"},
            "cpu": {"cpu.cfs_quota_us": "100000"},
            "cpuset": {"cpuset.cpus": "0", "cpuset.mems": "0"},
        }
        return {controller: limits[controller] for controller in CGROUP1}

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=60)
        subprocess.run([self.program, "--run", self.run, "--unpin"], check=True)
        for parent in self.cgroup_parents():
            wait_for(partial(removed, parent))
        shutil.rmtree(self.directory)


def removed(top: Path) -> bool:
    """Tries it with all that is there now: workers of a launcher that was killed may still make and remove some."""
    for directory, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            Path(directory, "cgroup.kill").write_text("1")
        with contextlib.suppress(OSError):
            Path(directory).rmdir()
    return not top.exists()


def destroy_args(plan: LaunchPlan, launched: Launched | None, **changes: Any) -> DestroyArgs:
    values: dict[str, Any] = {
        "sandbox": plan.sandbox,
        "pid": launched.pid if launched else None,
        "start_ticks": launched.start_ticks if launched else None,
        "directory": plan.directory,
        "socket": plan.socket,
        "cgroup2": plan.cgroup2,
        "cgroup1": plan.cgroup1,
    }
    return DestroyArgs(**(values | changes))


def ask(plan: LaunchPlan, command: str) -> str:
    """Runs a shell command as root of the sandbox; with `!` first, asks the probe about itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        directory = os.open(Path(plan.socket).parent, os.O_PATH)
        try:
            connection.connect(f"/proc/self/fd/{directory}/{Path(plan.socket).name}")
        finally:
            os.close(directory)
        connection.sendall(command.encode())
        connection.shutdown(socket.SHUT_WR)
        parts = []
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")


def wait_for(condition: Callable[[], Any], *, deadline_s: float = 60.0) -> None:
    """Polls until the condition holds; an assertion fails when it does not in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def make_image(directory: Path) -> Path:
    """A root file system with a shell and a few programs of this machine."""
    directory.mkdir(parents=True)
    for name in ("bin", "etc", "lib", "lib64", "usr/bin", "home", "answers"):
        (directory / name).mkdir(parents=True)
    needed: set[str] = set()
    for program in PROGRAMS.split():
        path = shutil.which(program)
        assert path is not None, program
        shutil.copy2(path, directory / "bin" / program)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        needed.update(word for word in listed.split() if word.startswith("/"))
    for library in needed:
        target = directory / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    (directory / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (directory / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
    (directory / "answers/key").write_text("secret\n")
    (directory / "usr/bin/tool").write_text("#!/bin/sh\necho original\n")
    (directory / "usr/bin/tool").chmod(0o755)
    os.mknod(directory / "zero-device", 0o20666, os.makedev(1, 5))
    return directory


def leftovers(host: Host) -> list[str]:
    """Whatever of sandboxes is still on this machine: cgroups, mounts, processes, files."""
    found: list[str] = []
    for parent in host.cgroup_parents():
        found += [str(path) for path in parent.iterdir() if path.is_dir()]
    for place in ("state", "sockets"):
        found += [str(path) for path in (host.directory / place).iterdir()]
    if host.process is not None:
        mounts = Path(f"/proc/{host.process.pid}/mountinfo").read_text().splitlines()
        found += [line for line in mounts if f"{host.directory}/state" in line or " - overlay dsec " in line]
        children = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text().split()
        found += [f"process {pid}" for pid in children]
    return found


@contextlib.contextmanager
def running_host(directory: Path) -> Iterator[Host]:
    build()
    host = Host(directory)
    for place in ("state", "sockets"):
        (directory / place).mkdir(parents=True)
    try:
        yield host
    finally:
        host.close()
