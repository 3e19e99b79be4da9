"""Starts the local service when nobody answers at its socket."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from dsec.core.errors import DsecError, HostError
from dsec.core.variables import wherever
from dsec.wire.codec import from_json
from dsec.wire.errors import ErrorBody

START_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.02
_TAIL_BYTES: Final = 2_000
_ERROR_BYTES_MAX: Final = 64 << 10
_COMMAND: Final = ("-m", "dsec.serve", "up", "--detach", "--json")


async def answers(socket: str) -> bool:
    """Whether somebody accepts connections there."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_unix_connection(socket), 5.0)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def ensure_running(socket: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
    """Returns once the service answers at `socket`, starting it if need be. Raises HostError with its reason.

    Any number of processes may do this at once: one starts it, the others wait for that one.
    """
    deadline = time.monotonic() + timeout_s
    run_dir = Path(socket).parent
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"the run directory {run_dir} cannot be made: {error.strerror}", hint=_HINT) from error
    async with _lock(run_dir / "start.lock", deadline):
        if await answers(socket):
            return
        await _start(socket, run_dir / "start.log", deadline)


_HINT = "start the service with `dsec up` and read what it says, or name one by url= or DSEC_URL"


@contextlib.asynccontextmanager
async def _lock(path: Path, deadline: float) -> AsyncIterator[None]:
    # The kernel drops the lock with its holder, so a starter that dies blocks nobody.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise HostError(f"{path} cannot be opened: {error.strerror}", hint=_HINT) from error
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise HostError(
                        "another process is starting the service and does not finish", hint=_HINT
                    ) from error
                await asyncio.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


async def _start(socket: str, log: Path, deadline: float) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *_COMMAND,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,  # Ctrl-C in the caller's terminal must not end the service
            # Its modules must not be taken from the caller's directory; what variables name lies there all the same.
            cwd="/",
            env=wherever(os.environ),
        )
    except OSError as error:
        raise HostError(f"the service cannot be started: {error}", hint=_HINT) from error
    finally:
        os.close(descriptor)
    try:
        await _wait_until_up(process, socket, log, deadline)
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        raise


async def _wait_until_up(process: asyncio.subprocess.Process, socket: str, log: Path, deadline: float) -> None:
    exited = asyncio.ensure_future(process.wait())
    try:
        while not await answers(socket):
            if exited.done() and exited.result() != 0:
                raise _failure(log, exited.result())
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                raise HostError(f"the service does not answer at {socket}{_tail(log)}", hint=_HINT)
            await asyncio.wait([exited], timeout=_POLL_S)
            if exited.done():
                await asyncio.sleep(_POLL_S)
    finally:
        if not exited.done():
            exited.cancel()
            await asyncio.gather(exited, return_exceptions=True)


def _failure(log: Path, status: int) -> HostError:
    """What the service said of itself: its own error, or else the end of its log."""
    try:
        lines = log.read_bytes()[-_ERROR_BYTES_MAX:].splitlines()
        said = from_json(lines[-1], dict[str, ErrorBody])["error"]
    except (OSError, IndexError, KeyError, DsecError):
        return HostError(f"the service did not start (exit status {status}){_tail(log)}", hint=_HINT)
    return HostError(
        f"the service of this machine does not start: {said.message}",
        hint=said.hint or _HINT,
        detail={"code": said.code},
    )


def _tail(log: Path) -> str:
    try:
        text = log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return f":\n{text}\n" if text else " and said nothing"
