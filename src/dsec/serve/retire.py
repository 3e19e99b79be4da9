"""The end of what outlives a service: its sandboxes, if asked for, and the launcher when it holds nothing more."""

from __future__ import annotations

import fcntl
import http.client
import os
import select
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from dsec.backends.container.launcher import Launcher, LauncherRefusal
from dsec.backends.egress import Egress
from dsec.binaries import find_binary
from dsec.core.errors import ConflictError, DsecError, HostError, PlatformError, UnavailableError
from dsec.core.ids import parse_sandbox_id
from dsec.serve.lock import RunLock
from dsec.storage.loader import Loader
from dsec.wire.codec import from_json
from dsec.wire.errors import ErrorBody, error_of
from dsec.wire.records import SandboxPage

_CALL_TIMEOUT_S: Final = 150.0  # above the API's own for a destroy
_END_TIMEOUT_S: Final = 10.0
_OF_PROGRAMS: Final = ("launch", "loader", "egress")  # files of theirs in the run directory


def destroy_all(api_socket: Path) -> int:
    """Destroys every sandbox of the service at this socket; how many there were. Raises what the service answers."""
    ended = 0
    while ids := [sandbox.id for sandbox in _call(api_socket, "GET", "/v1/sandboxes?limit=1000").sandboxes]:
        for id in ids:
            _call(api_socket, "DELETE", f"/v1/sandboxes/{parse_sandbox_id(id)}")
        ended += len(ids)
    return ended


def count_all(api_socket: Path) -> int | None:
    """How many sandboxes there are, of every substrate. None: the service does not say."""
    count, after = 0, ""
    with suppress(DsecError):
        while True:
            page = _call(api_socket, "GET", f"/v1/sandboxes?limit=1000{after}")
            count += len(page.sandboxes)
            if page.next is None:
                return count
            after = f"&cursor={quote(page.next, safe='')}"
    return None


async def retire_launcher(run_dir: Path, *, force: bool = False) -> int:
    """How many sandboxes the launcher holds. With none, or by `force`, it is ended and its layers are let go of.

    Forced, sandboxes run on without one who tells their end. Raises HostError, or UnavailableError when a launcher of
    another version cannot be asked; `force` does not ask.
    """
    held = 0 if force else await _sandboxes_held(run_dir)
    if held == 0:
        _end(run_dir)
        _unpin(run_dir)
        # Last: the mounts of layers read through it.
        Loader(run_dir, run_dir, cache_bytes=0).shutdown()
        await _retire_forwarder(run_dir)
    return held


def tidy(run_dir: Path) -> None:
    """What ended processes have left in a run directory where nothing lives. Locks stay: to remove one would let two
    processes lock two files of one name; and so does whatever a log says."""
    try:
        lock = RunLock.acquire(run_dir)
    except (ConflictError, HostError):
        return  # the next service is here already
    try:
        for name in _OF_PROGRAMS:
            if not _is_held(run_dir / f"{name}.lock"):
                for path in (run_dir / f"{name}.sock", run_dir / f"{name}.pid"):
                    path.unlink(missing_ok=True)
                log = run_dir / f"{name}.log"
                if log.is_file() and not log.stat().st_size:
                    log.unlink()
        for directory in (run_dir / "sb", run_dir / "layers", run_dir / "launch.mnt"):
            with suppress(OSError):
                directory.rmdir()  # with anything in it, it stays
    except OSError:
        return  # somebody else tidies, too
    finally:
        lock.release()


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


async def _retire_forwarder(run_dir: Path) -> None:
    """Unless a sandbox that runs on, a machine say, is carried by it."""
    forwarder = Egress(run_dir)
    try:
        if not any(counts.alive for counts in (await forwarder.counts()).values()):
            await forwarder.shutdown()
    finally:
        await forwarder.close()


async def _sandboxes_held(run_dir: Path) -> int:
    if _launcher_pid(run_dir) is None:
        return 0
    program = find_binary("dsec-launch")
    launcher = Launcher(run_dir, launch_binary=program, agent_binary=program, start_s=_END_TIMEOUT_S)
    try:
        return len((await launcher.listed()).sandboxes)
    except LauncherRefusal as refusal:
        raise UnavailableError(f"dsec-launch does not say what it holds: {refusal}") from refusal
    finally:
        await launcher.close()


def _launcher_pid(run_dir: Path) -> int | None:
    """None when no launcher has the run directory: the lock says, not the file with the pid."""
    try:
        lock = os.open(run_dir / "launch.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = (run_dir / "launch.pid").read_text(encoding="ascii").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(lock)
    return None


def _end(run_dir: Path) -> None:
    pid = _launcher_pid(run_dir)
    if pid is None:
        return
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _launcher_pid(run_dir) != pid:  # it ended meanwhile, and the pid may be another's
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        if not select.select([handle], [], [], _END_TIMEOUT_S)[0]:
            raise HostError(f"dsec-launch, process {pid}, does not end", hint=f"kill -KILL {pid}")
    finally:
        os.close(handle)


def _unpin(run_dir: Path) -> None:
    if not (run_dir / "launch.mnt").exists():
        return
    command = [str(find_binary("dsec-launch")), "--run", str(run_dir), "--unpin"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_END_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.CalledProcessError as error:
        raise HostError(f"the layers' mounts stay: {error.stderr.decode('utf-8', 'replace').strip()[:500]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"the layers' mounts stay: {error}") from error


def _call(path: Path, method: str, target: str) -> Any:
    connection = http.client.HTTPConnection("dsec")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(_CALL_TIMEOUT_S)
        connection.sock.connect(str(path))
        connection.request(method, target)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UnavailableError(f"the service at {path} does not answer: {error}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise error_of(from_json(body, ErrorBody)) if body else PlatformError(f"{target}: status {answer.status}")
    return from_json(body, SandboxPage if method == "GET" else dict)
