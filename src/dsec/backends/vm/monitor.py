"""A monitor's process: started in its jail, watched, ended. It runs on when this process ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.backends.vm.machine import SOCKETS
from dsec.binaries import find_binary
from dsec.core.errors import HostError, LaunchError
from dsec.core.faults import fault_point
from dsec.wire.codec import pack
from dsec.wire.jail import JailBind, JailFile, JailPlan, JailTap

_STDERR_BYTES_MAX: Final = 8 * 1024
_GONE_S: Final = 30.0
_POLL_S: Final = 0.01
_OPEN_FILES: Final = 1024
_LIBRARIES: Final = ("lib", "lib64", "lib32", "bin", "sbin")
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True, slots=True)
class Confines:
    """Of one monitor: who it is, what it pays with, what it sees besides the programs of the host."""

    uid: int
    cgroups: tuple[str, ...]  # directories, one of each hierarchy
    root: Path  # an empty directory that exists
    sockets: Path  # a directory of its own, which it may write
    binds: tuple[JailBind, ...] = ()
    kvm: bool = False
    files: tuple[JailFile, ...] = ()
    tap: JailTap | None = None


def jail_plan(confines: Confines, argv: Sequence[str], *, programs: bool = True) -> JailPlan:
    """Programs and libraries of the host are there, to read, and nothing else of it; or not even they."""
    binds, links = _programs_of_host() if programs else ([], {})
    binds += [JailBind(name, name, device=True) for name in _DEVICES]
    if confines.kvm:
        # The host's is root's, or a group's.
        binds.append(JailBind("/dev/kvm", "/dev/kvm", device=True, owned=True))
    return JailPlan(
        uid=confines.uid,
        gid=confines.uid,
        cgroups=[f"{directory}/cgroup.procs" for directory in confines.cgroups],
        root=str(confines.root),
        binds=[*binds, JailBind(str(confines.sockets), SOCKETS, writable=True), *confines.binds],
        links=links,
        files=list(confines.files),
        tap=confines.tap,
        limits={"nofile": _OPEN_FILES, "core": 0},
        argv=[os.fsencode(word) for word in argv],
        env=[b"PATH=/usr/bin:/bin", b"LC_ALL=C"],
    )


def _programs_of_host() -> tuple[list[JailBind], dict[str, str]]:
    binds, links = [JailBind("/usr", "/usr")], {}
    for name in _LIBRARIES:
        path = Path("/", name)
        if path.is_symlink():
            links[str(path)] = str(path.readlink())
        elif path.is_dir():
            binds.append(JailBind(str(path), str(path)))
    binds += [JailBind(name, name) for name in ("/etc/ld.so.cache", "/etc/ld.so.conf") if os.path.exists(name)]  # noqa: PTH110
    return binds, links


class MonitorProcess:
    """By a descriptor that names it for ever. One that was adopted is nobody's child of ours."""

    def __init__(self, pid: int, start_ticks: int, pidfd: int, said: int | None = None) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self._pidfd: int | None = pidfd
        self._said = said
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(pidfd, self._has_ended)

    @classmethod
    def start(cls, plan: JailPlan, *, output: Path | None = None, jail: Path | None = None) -> MonitorProcess:
        """Raises LaunchError when the jail's program cannot be run. What the monitor has to say is in `words`; what it
        prints goes to `output`, a file that exists, or nowhere."""
        fault_point("vm.start")
        program = os.fspath(jail or find_binary("dsec-jail"))
        with ExitStack() as stack:
            told, tell = _pipe(stack)
            said, say = _pipe(stack)
            os.set_blocking(said, False)
            printed = os.open(output or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, printed)
            actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((told, printed, say))]
            try:
                pid = os.posix_spawn(program, [program], {}, file_actions=actions)
            except OSError as error:
                raise LaunchError(f"{program} cannot be run: {error}", step="monitor") from error
            try:
                _write_all(tell, pack(plan))
                started = cls(pid, start_ticks(pid) or 0, os.pidfd_open(pid), os.dup(said))
            except BaseException:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
            return started

    @classmethod
    def adopt(cls, pid: int, ticks: int) -> MonitorProcess | None:
        """None: it runs no more."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        # Only now that the descriptor pins the process does its start time prove that it is the one of then. One that
        # has ended, and that nobody has waited for, has it still.
        if start_ticks(pid) != ticks or select.select([pidfd], [], [], 0)[0]:
            os.close(pidfd)
            return None
        return cls(pid, ticks, pidfd)

    def words(self) -> str:
        """What it said, at its start, on its error stream."""
        if self._said is None:
            return ""
        with contextlib.suppress(OSError):
            return os.read(self._said, _STDERR_BYTES_MAX).decode("utf-8", "replace").strip()
        return ""

    def hush(self) -> None:
        """Nobody listens any more: what it says from now on goes nowhere, and costs nothing."""
        said, self._said = self._said, None
        if said is not None:
            os.close(said)

    def kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """It has ended when this returns. Raises HostError when it does not."""
        self.kill()
        try:
            async with asyncio.timeout(_GONE_S):
                await asyncio.shield(self.ended)
        except TimeoutError as error:
            raise HostError(f"the monitor {self.pid} does not die") from error

    def forget(self) -> None:
        """Stops watching; it runs on."""
        self.hush()
        self._unwatch()

    def _has_ended(self) -> None:
        with contextlib.suppress(ChildProcessError):  # one that was adopted is init's
            os.waitpid(self.pid, os.WNOHANG)
        self._unwatch()
        if not self.ended.done():
            self.ended.set_result(None)

    def _unwatch(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)


def start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name may hold blanks and parentheses; what follows the last one is plain. Start time is field 22.
    return int(text.rpartition(")")[2].split()[19])


def _pipe(stack: ExitStack) -> tuple[int, int]:
    ends = os.pipe2(os.O_CLOEXEC)
    for end in ends:
        stack.callback(os.close, end)
    return ends


def _write_all(fd: int, data: bytes) -> None:
    """A plan fits a pipe, or its reader is there; one that has ended says why by its error stream."""
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]


def make_cgroups(files: Mapping[str, Mapping[str, str]]) -> None:
    """Directory → file → value. Raises OSError; what was made stays for `remove_cgroups`."""
    for directory, values in files.items():
        fault_point("vm.cgroup")
        Path(directory).mkdir()
        for name, value in values.items():
            Path(directory, name).write_text(value)


async def empty_cgroups(directories: Sequence[str]) -> None:
    """Nothing runs in them any more; those that are not there are fine. Raises HostError when something resists."""
    until = asyncio.get_running_loop().time() + _GONE_S
    for directory in map(Path, directories):
        while _has_processes(directory):
            if asyncio.get_running_loop().time() > until:
                raise HostError(f"what runs in the cgroup {directory} does not end")
            _kill_in(directory)
            await asyncio.sleep(_POLL_S)


def _has_processes(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool((directory / "cgroup.procs").read_text().strip())
    return False


async def remove_cgroups(directories: Sequence[str]) -> None:
    """With all that runs in them. Raises HostError when something resists."""
    until = asyncio.get_running_loop().time() + _GONE_S
    pause_s = 0.001
    left = [Path(directory) for directory in directories]
    while left:
        for directory in list(left):
            try:
                directory.rmdir()
                left.remove(directory)
            except FileNotFoundError:
                left.remove(directory)
            except OSError as error:
                if asyncio.get_running_loop().time() > until:
                    raise HostError(f"the cgroup {directory} cannot be removed: {error}") from error
                _kill_in(directory)
        if left:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.1)


def _kill_in(directory: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / "cgroup.procs").read_text().split():
            os.kill(int(line), signal.SIGKILL)
