"""The real `dsec-agent`, started in the ways that its tests need."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.native.agent_wire import AgentWire

DEADLINE_S = 60.0
AGENT_UID = 65_535
# What the launcher leaves the agent: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, sys_chroot.
AGENT_CAPS = ("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap", "sys_chroot")


@dataclass
class Agent:
    pid: int
    socket: Path
    wires: list[AgentWire] = field(default_factory=list)

    def connect(self, **options: Any) -> AgentWire:
        wire = AgentWire(self.socket, **options)
        self.wires.append(wire)
        return wire

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def status(self, key: str) -> str:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return line.split(":", 1)[1].strip()
        raise KeyError(key)


@contextmanager
def listening_agent(binary: Path, directory: Path, *, root: Path | None = None) -> Iterator[Agent]:
    """Stand-alone; with `root` in a chroot, where the binary is at the top."""
    inside = Path("/") if root is not None else directory
    command = ["/dsec-agent" if root is not None else str(binary), "--listen", str(inside / "agent.sock")]

    def enter() -> None:
        if root is not None:
            os.chroot(root)
            os.chdir("/")

    process = subprocess.Popen(command, env={}, preexec_fn=enter, stdin=subprocess.DEVNULL)
    agent = Agent(process.pid, (root or directory) / "agent.sock")
    try:
        eventually(agent.socket.exists)
        yield agent
    finally:
        for wire in agent.wires:
            wire.close()
        # Asked to end it takes what it started along.
        process.terminate()
        process.wait(DEADLINE_S)


@contextmanager
def handed_agent(
    binary: Path,
    directory: Path,
    *,
    cgroup: Path | None = None,
    unprivileged: bool = False,
    **config: Any,
) -> Iterator[Agent]:
    """As `dsec-launch` starts it: descriptors 3, 4 and 5; `unprivileged` as its own user with few capabilities."""
    path = directory / "agent.sock"
    command = [str(binary), "--fd"]
    if unprivileged:
        caps = ",".join(f"+{name}" for name in AGENT_CAPS)
        ids = [f"--reuid={AGENT_UID}", f"--regid={AGENT_UID}", "--clear-groups"]
        command = ["setpriv", *ids, f"--inh-caps={caps}", f"--ambient-caps={caps}", *command]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        places = [(listener.fileno(), 3), (config_memfd(config), 5)]
        if cgroup is not None:
            places.append((os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY), 4))
        pid = spawn_with(command, places)
        for fd, _ in places[1:]:
            os.close(fd)
    agent = Agent(pid, path)
    try:
        yield agent
    finally:
        for wire in agent.wires:
            wire.close()
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid)


def config_memfd(config: dict[str, Any]) -> int:
    record = {
        "sandbox": "test",
        "env": {},
        "user": None,
        "workdir": None,
        "caps_exec": 2**64 - 1,
        "filter_exec": b"",
        "no_new_privs": False,
        "nofile": None,
    } | config
    fd = os.memfd_create("config")
    os.write(fd, msgspec.msgpack.encode(record))
    return fd


def spawn_with(command: list[str], places: list[tuple[int, int]]) -> int:
    """First far above the target numbers, then to them, so that none is overwritten before it is moved."""
    actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, 100 + number) for fd, number in places]
    actions += [(os.POSIX_SPAWN_DUP2, 100 + number, number) for _, number in places]
    actions += [(os.POSIX_SPAWN_CLOSE, 100 + number) for _, number in places]
    program = shutil.which(command[0])
    assert program is not None
    return os.posix_spawn(program, command, {}, file_actions=actions)


def eventually(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition never held")
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] not in (b"Z", b"X")


def copy_program(root: Path, program: str) -> None:
    """A program of this host and the libraries that it needs, into a root of its own."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    libraries = [word for word in listed.split() if word.startswith("/")]
    for source in [program, *libraries]:
        target = root / source.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(source).resolve(), target)


def cgroup2_root() -> Path | None:
    """Where this host has its cgroup2 tree."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind = line.split()[:3]
        if kind == "cgroup2":
            return Path(where)
    return None


def usable_copy(binary: Path, directory: Path) -> Path:
    """Where other users can run it."""
    directory.chmod(0o755)
    return Path(shutil.copy(binary, directory / "dsec-agent"))
