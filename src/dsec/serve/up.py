"""A service in this process, until it is told to stop: of `dsec up`, or of a process of a cluster."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvloop

from dsec.core.errors import DsecError, HostError
from dsec.core.units import parse_size
from dsec.observe.logs import configure_logs, get_logger
from dsec.serve.config import ServeConfig
from dsec.serve.lock import FILE_NAME, RunLock
from dsec.serve.logfile import RotatingLog
from dsec.serve.service import LocalService, Running

log = get_logger(__name__)

_FORCED: Final = 130  # exit status after the third signal
_M_ARENA_MAX: Final = -8  # malloc.h


def run_up(config: ServeConfig, *, ready: Callable[[], None] | None = None, to_file: bool = False) -> int:
    """`dsec up`."""
    return run_service(config, LocalService(config), ready=ready, to_file=to_file)


def run_service(
    config: ServeConfig,
    service: Running,
    *,
    lock_name: str = FILE_NAME,
    ready: Callable[[], None] | None = None,
    to_file: bool = False,
) -> int:
    """Returns the exit status once it has been stopped. `ready` is called when the socket answers.

    SIGTERM or SIGINT: requests under way get their grace; a second one: they do not; a third: out at once. Sandboxes
    that outlive their node run on in every case. Raises ConflictError when another service has the run directory.
    """
    os.umask(0o077)
    _share_heap()
    _raise_descriptors()
    _make_directories(config)
    lock = RunLock.acquire(Path(config.run_dir), lock_name)
    try:
        _start_logs(config, to_file=to_file)
        failure = uvloop.run(_serve(service, ready))
    finally:
        lock.release()
    if failure is not None:
        raise failure
    return 0


def _share_heap() -> None:
    """By default each thread gets a heap of its own, which keeps what its busiest moment took: memory would grow for as
    long as there are busier ones (mallopt(3), M_ARENA_MAX of glibc). Other C libraries have nothing to set."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)


def _settle_garbage() -> None:
    """What is there once it has started stays, and is not looked through for garbage again and again (gc.freeze)."""
    gc.collect()
    gc.freeze()


async def _serve(service: Running, ready: Callable[[], None] | None) -> DsecError | None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    _handle_signals(stop, hurry)
    starting = asyncio.create_task(service.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
    try:
        await starting
    except asyncio.CancelledError:
        log.info("stopped while starting")
        return None
    finally:
        stopping.cancel()
    _settle_garbage()
    log.info("ready", **service.told(), pid=os.getpid())
    if ready is not None:
        ready()
    failing = asyncio.create_task(service.failed())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
    failure = failing.result() if failing.done() else None
    for task in (failing, stopping):
        task.cancel()
    await asyncio.gather(failing, stopping, return_exceptions=True)
    log.info("stopping", why=None if failure is None else failure.message)
    await service.close(hurry=hurry)
    log.info("stopped")
    return failure


def _handle_signals(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    def handle() -> None:
        if not stop.is_set():
            stop.set()
        elif not hurry.is_set():
            hurry.set()
        else:
            os._exit(_FORCED)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle)


def _raise_descriptors() -> None:
    # Every connection, sandbox and recorded exec is one or more; the soft limit is for programs that use select().
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _make_directories(config: ServeConfig) -> None:
    for path in (Path(config.run_dir), Path(config.state_dir)):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(
                f"cannot make {path}: {error.strerror}", hint="choose others with --run-dir and --state-dir"
            ) from error


def _start_logs(config: ServeConfig, *, to_file: bool) -> None:
    if not to_file:
        configure_logs(level=config.log.level)
        return
    try:
        stream = RotatingLog(config.log_file, bytes_max=parse_size(config.log.file_bytes_max))
    except OSError as error:
        raise HostError(f"cannot write {config.log_file}: {error.strerror}") from error
    configure_logs(level=config.log.level, form="json", stream=stream)  # type: ignore[arg-type]
    sys.stdout.flush()
