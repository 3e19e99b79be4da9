"""Building environments from a running program: each build is a process of its own, told about line by line."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Final

from dsec.core.errors import (
    CapacityError,
    DeadlineError,
    InvalidArgumentError,
    Outcome,
    StorageError,
    UnsupportedError,
)
from dsec.core.limits import BUILD_TIMEOUT_S_DEFAULT, BUILDS_MAX, MIB
from dsec.core.spec import Environment
from dsec.image.environments import EnvironmentStore
from dsec.image.make import typed
from dsec.image.registry.client import DEFAULT_SETTINGS, RegistrySettings
from dsec.image.worker import Job, build_key, error_event, ready_result
from dsec.storage.layers import LayerLocation, Lease
from dsec.storage.store.places import clean_directory
from dsec.wire import codec
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    DebianSource,
    EnvironmentInfo,
    MachineBuild,
    OciSource,
    PushRequest,
    is_on_node,
)
from dsec.wire.errors import error_of
from dsec.wire.images import ExportedImage, ExportRequest
from dsec.wire.layers import CollapseRequest
from dsec.wire.machines import MachineInfo

_LINE_BYTES_MAX: Final = 32 * MIB  # `done` holds the configuration of an image, escaped
_RETRY_AFTER_S: Final = 10.0
_EVENTS_QUEUED_MAX: Final = 1_000


Done = EnvironmentInfo | ExportedImage | MachineInfo
"""What a worker has made."""


async def build(
    store: EnvironmentStore,
    request: BuildRequest,
    progress: Callable[[BuildEvent], None] = lambda event: None,
    *,
    registries: RegistrySettings = DEFAULT_SETTINGS,
    timeout_s: float = BUILD_TIMEOUT_S_DEFAULT,
) -> EnvironmentInfo:
    """Make the environment, or find that it is there. `progress` gets the `progress` and `log` events as they come.

    Raises what the source or the store raises, ConflictError when the name stands for something else,
    CapacityError when too many builds run, DeadlineError.
    After an error or a cancellation nothing of the build is left, on disk or running.
    """
    ready = await asyncio.to_thread(_ready, store, request)
    if ready is not None:
        progress(BuildEvent(kind="progress", stage="cached", message=f"{request.name} is built already"))
        return ready
    job = Job(os.fspath(store.state), build=request, registries=registries)
    return _environment(await _bounded(store, job, f"building {request.name!r}", progress, timeout_s))


async def push(
    store: EnvironmentStore,
    request: PushRequest,
    progress: Callable[[BuildEvent], None] = lambda event: None,
    *,
    timeout_s: float = BUILD_TIMEOUT_S_DEFAULT,
) -> EnvironmentInfo:
    """Put an environment into a store; what is there already is left as it is.

    Raises EnvironmentNotFoundError, UnsupportedError for layers or stores that cannot be, what the store raises,
    CapacityError when too many builds and pushes run, DeadlineError.
    After an error or a cancellation nothing runs on, and the store names nothing that is not whole.
    """
    await asyncio.to_thread(store.get, request.name)
    try:
        job = Job(os.fspath(store.state), push=request)
        return _environment(await _bounded(store, job, f"pushing {request.name!r}", progress, timeout_s))
    finally:
        if is_on_node(request.store):
            await asyncio.shield(asyncio.to_thread(clean_directory, request.store))


async def export(
    store: EnvironmentStore,
    request: ExportRequest,
    progress: Callable[[BuildEvent], None] = lambda event: None,
    *,
    registries: RegistrySettings = DEFAULT_SETTINGS,
    serve: Callable[[LayerLocation], str] | None = None,
    timeout_s: float = BUILD_TIMEOUT_S_DEFAULT,
) -> ExportedImage:
    """Make an environment an image of a registry, or in a file. `serve` gives the data of layers of stores as files.

    Raises EnvironmentNotFoundError, UnsupportedError for such layers without `serve`, what the registry or disk raises,
    CapacityError when too many builds and pushes run, DeadlineError.
    After an error or a cancellation nothing runs on, and no image is there that is not whole.
    """
    with await asyncio.to_thread(_held, store, request.name) as held:
        files = await asyncio.to_thread(_data_of, store, held.digests, serve)
        try:
            data = {digest: f"/proc/self/fd/{fd}" for digest, fd in files.items()}
            job = Job(os.fspath(store.state), export=request, data=data, registries=registries)
            done = await _bounded(
                store, job, f"exporting {request.name!r}", progress, timeout_s, files=tuple(files.values())
            )
        finally:
            for fd in files.values():
                os.close(fd)
    if not isinstance(done, ExportedImage):
        raise StorageError("the build process says that it has done something else")
    return done


async def collapse(
    store: EnvironmentStore,
    request: CollapseRequest,
    progress: Callable[[BuildEvent], None] = lambda event: None,
    *,
    timeout_s: float = BUILD_TIMEOUT_S_DEFAULT,
) -> EnvironmentInfo:
    """Make one layer of runs of an environment's layers; creates use it from then on.

    Raises EnvironmentNotFoundError, StorageError, DeadlineError, CapacityError when too many builds run, or for the
    disk.
    """
    await asyncio.to_thread(store.get, request.name)
    job = Job(os.fspath(store.state), collapse=request)
    return _environment(await _bounded(store, job, f"collapsing {request.name!r}", progress, timeout_s))


async def build_machine(
    store: EnvironmentStore,
    request: MachineBuild,
    target: Path,
    progress: Callable[[BuildEvent], None] = lambda event: None,
    *,
    timeout_s: float = BUILD_TIMEOUT_S_DEFAULT,
) -> MachineInfo:
    """Fills the directory with what a full machine begins as. What is in it after an error is the caller's to remove.

    Raises what the packages raise, CapacityError when too many builds run, or for the disk, DeadlineError.
    """
    job = Job(os.fspath(store.state), machine=request, target=os.fspath(target))
    done = await _bounded(store, job, f"building {request.name!r}", progress, timeout_s)
    if not isinstance(done, MachineInfo):
        raise StorageError("the build process says that it has done something else")
    return done


def _held(store: EnvironmentStore, name: str) -> Lease:
    return store.acquire(Environment(base=name), collapsed=False)[1]


def _data_of(
    store: EnvironmentStore, digests: tuple[str, ...], serve: Callable[[LayerLocation], str] | None
) -> dict[str, int]:
    """Open files: the worker has a /proc of its own, where the loader's paths lead nowhere."""
    remote = [layer for layer in map(store.layers.get, digests) if layer.remote is not None]
    if remote and serve is None:
        raise UnsupportedError("layers that are loaded from a store can be exported by a running service only")
    files: dict[str, int] = {}
    try:
        for layer in remote:
            assert serve is not None
            files[layer.digest] = os.open(serve(layer), os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        for fd in files.values():
            os.close(fd)
        raise
    return files


async def build_events(
    store: EnvironmentStore,
    request: BuildRequest,
    *,
    registries: RegistrySettings = DEFAULT_SETTINGS,
    timeout_s: float = BUILD_TIMEOUT_S_DEFAULT,
) -> AsyncIterator[BuildEvent]:
    """The same as a stream that always ends with `done` or `error`. Closing it early cancels the build.

    A slow reader loses log lines in the middle, never the end.
    """
    work = partial(build, store, request, registries=registries, timeout_s=timeout_s)
    async with aclosing(_events(work)) as events:
        async for event in events:
            yield event


async def push_events(
    store: EnvironmentStore, request: PushRequest, *, timeout_s: float = BUILD_TIMEOUT_S_DEFAULT
) -> AsyncIterator[BuildEvent]:
    """`push` as a stream, as `build_events` is."""
    async with aclosing(_events(lambda put: push(store, request, put, timeout_s=timeout_s))) as events:
        async for event in events:
            yield event


async def export_events(
    store: EnvironmentStore,
    request: ExportRequest,
    *,
    registries: RegistrySettings = DEFAULT_SETTINGS,
    serve: Callable[[LayerLocation], str] | None = None,
    timeout_s: float = BUILD_TIMEOUT_S_DEFAULT,
) -> AsyncIterator[BuildEvent]:
    """`export` as a stream, as `build_events` is."""
    work = partial(export, store, request, registries=registries, serve=serve, timeout_s=timeout_s)
    async with aclosing(_events(work)) as events:
        async for event in events:
            yield event


async def collapse_events(
    store: EnvironmentStore, request: CollapseRequest, *, timeout_s: float = BUILD_TIMEOUT_S_DEFAULT
) -> AsyncIterator[BuildEvent]:
    """`collapse` as a stream, as `build_events` is."""
    async with aclosing(_events(partial(collapse, store, request, timeout_s=timeout_s))) as events:
        async for event in events:
            yield event


async def machine_events(
    store: EnvironmentStore, request: MachineBuild, target: Path, *, timeout_s: float = BUILD_TIMEOUT_S_DEFAULT
) -> AsyncGenerator[BuildEvent]:
    """`build_machine` as a stream, as `build_events` is."""
    work = partial(build_machine, store, request, target, timeout_s=timeout_s)
    async with aclosing(_events(work)) as events:
        async for event in events:
            yield event


async def _events(
    work: Callable[[Callable[[BuildEvent], None]], Awaitable[Done]],
) -> AsyncGenerator[BuildEvent]:
    queue: asyncio.Queue[BuildEvent] = asyncio.Queue(_EVENTS_QUEUED_MAX)

    def put(event: BuildEvent) -> None:
        with suppress(asyncio.QueueFull):
            queue.put_nowait(event)

    async def run() -> None:
        try:
            done = await work(put)
            last = _told(done)
        except Exception as error:
            last = error_event(error)
        await queue.put(last)

    task = asyncio.create_task(run())
    try:
        while True:
            event = await queue.get()
            yield event
            if event.kind in ("done", "error"):
                break
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _told(done: Done) -> BuildEvent:
    if isinstance(done, ExportedImage):
        return BuildEvent(kind="done", exported=done)
    if isinstance(done, MachineInfo):
        return BuildEvent(kind="done", machine=done)
    return BuildEvent(kind="done", environment=done)


async def _bounded(
    store: EnvironmentStore,
    job: Job,
    what: str,
    progress: Callable[[BuildEvent], None],
    timeout_s: float,
    *,
    files: tuple[int, ...] = (),
) -> Done:
    """One worker process among those that may run at once, for as long as it may take."""
    if store.builds_running >= BUILDS_MAX:
        raise CapacityError(
            f"{BUILDS_MAX} environments are being built or pushed already", retry_after_s=_RETRY_AFTER_S
        )
    store.builds_running += 1
    try:
        async with asyncio.timeout(timeout_s):
            return await _supervise(store, job, progress, files)
    except TimeoutError:
        raise DeadlineError(f"{what} took more than {timeout_s:g} s", outcome=Outcome.UNCHANGED) from None
    finally:
        store.builds_running -= 1


def _environment(done: Done) -> EnvironmentInfo:
    if not isinstance(done, EnvironmentInfo):
        raise StorageError("the build process says that it has done something else")
    return done


def _ready(store: EnvironmentStore, request: BuildRequest) -> EnvironmentInfo | None:
    """Answers without a process where the key is cheap: a tree or a tar file would have to be read in full."""
    if not isinstance(request.source, (DebianSource, OciSource)):
        return None
    try:
        return ready_result(store, request, build_key(request.source))
    except OSError as error:
        raise typed(error) from error


async def _supervise(
    store: EnvironmentStore, job: Job, progress: Callable[[BuildEvent], None], files: tuple[int, ...]
) -> Done:
    process = await asyncio.create_subprocess_exec(
        *_command(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES_MAX,
        start_new_session=True,
        pass_fds=files,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    errors = asyncio.create_task(_tail(process))
    try:
        result = await _follow(process, job, progress)
        if result is None:
            words = (await errors).decode(errors="replace").strip()[-500:]
            raise StorageError(f"the build process ended without a result: {words or 'no message'}")
        return result
    finally:
        await asyncio.shield(_end(store, process, errors))


def _command() -> list[str]:
    """The worker; as root in process and mount namespaces of its own: its end is the end of all that it has started."""
    worker = [sys.executable, "-m", "dsec.image.worker"]
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        return worker
    return [unshare, "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", *worker]


async def _follow(process: Process, job: Job, progress: Callable[[BuildEvent], None]) -> Done | None:
    """The result that the worker tells; None when it ends without one. Raises the error that it tells."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(codec.to_json(job) + b"\n")
    with suppress(ConnectionError):
        await process.stdin.drain()
    while line := await _line(process.stdout):
        try:
            event = codec.from_json(line, BuildEvent)
        except InvalidArgumentError:
            continue  # a program of the build wrote to its own stdout
        if event.kind == "done" and (done := event.environment or event.exported or event.machine) is not None:
            return done
        if event.kind == "error" and event.error is not None:
            raise error_of(event.error)
        progress(event)
    return None


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readline()
    except ValueError as error:
        raise StorageError(f"the build process wrote a line of more than {_LINE_BYTES_MAX} bytes") from error


async def _tail(process: Process) -> bytes:
    """The last of stderr, read so that it never fills."""
    assert process.stderr is not None
    tail = b""
    while data := await process.stderr.read(65_536):
        tail = (tail + data)[-4_096:]
    return tail


async def _end(store: EnvironmentStore, process: Process, errors: asyncio.Task[bytes]) -> None:
    """Kill what is left of the build, and remove what it had made."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)  # its result is on the disk before it tells it
    await process.wait()
    await errors
    await asyncio.to_thread(store.layers.clean)
