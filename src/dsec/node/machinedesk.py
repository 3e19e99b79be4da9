"""What callers ask of screens of full machines, and of the images that these begin as."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dsec.backends.machines import HasImages, HasScreen, Screen
from dsec.core.errors import DsecError, StorageError, UnsupportedError
from dsec.core.limits import READ_CHUNK_BYTES
from dsec.core.machines import Agent, Bus, Firmware
from dsec.core.spec import Substrate
from dsec.image.machines import COMMAND_LINE, machine_env
from dsec.node import streams
from dsec.node.node import Node
from dsec.node.rights import check_machine_source, project_seen
from dsec.storage.space import require_free
from dsec.wire.environments import BuildEvent, MachineBuild
from dsec.wire.machines import MachineImport, MachineInfo, MachinePage, MachineRef
from dsec.wire.node import Caller, Done, Method, Nothing, Stream
from dsec.wire.records import SandboxRef
from dsec.wire.screens import Picture, ScreenInput, ScreenSize

if TYPE_CHECKING:
    from dsec.backends.fullvm.images import MachineImage, MachineImages, Manifest

_HINT: Final = 'create it with backend="fullvm"'


class MachineDesk:
    def __init__(self, node: Node) -> None:
        self._node = node

    def unary(self) -> dict[Method, tuple[Any, Callable[..., Awaitable[Any]]]]:
        return {
            Method.SCREEN_PICTURE: (SandboxRef, self._picture),
            Method.SCREEN_ACT: (ScreenInput, self._act),
            Method.MACHINE_LIST: (Nothing, self._list),
            Method.MACHINE_IMPORT: (MachineImport, self._import),
            Method.MACHINE_REMOVE: (MachineRef, self._remove),
        }

    def streaming(self) -> dict[Method, tuple[Any, Callable[..., Awaitable[None]]]]:
        return {
            Method.SCREEN_VIEW: (SandboxRef, self._view),
            Method.MACHINE_BUILD: (MachineBuild, self._build),
        }

    # -- screens -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _screen(self, id: str, caller: Caller, *, short: bool = True) -> AsyncIterator[Screen]:
        """Raises UnsupportedError where there is none."""
        sandbox = self._node.find(id, project=project_seen(caller))
        if not sandbox.backend.capabilities.screen:
            raise UnsupportedError(f"sandboxes of {sandbox.row.spec.substrate} have no screen", hint=_HINT, sandbox=id)
        async with sandbox.operating(short=short):
            assert isinstance(sandbox.instance, HasScreen)
            yield sandbox.instance.screen

    async def _picture(self, request: SandboxRef, caller: Caller, _: str | None) -> Picture:
        async with self._screen(request.id, caller) as screen:
            return await screen.picture()

    async def _act(self, request: ScreenInput, caller: Caller, _: str | None) -> ScreenSize:
        async with self._screen(request.sandbox, caller) as screen:
            return await screen.act(request.request)

    async def _view(self, request: SandboxRef, caller: Caller, stream: Stream) -> None:
        async with self._screen(request.id, caller, short=False) as screen:
            await streams.relay(await View.open(screen), stream)

    # -- images ------------------------------------------------------------------------------------

    def _images(self) -> MachineImages:
        backend = self._node.backends.get(Substrate.FULLVM)
        if not isinstance(backend, HasImages):
            raise UnsupportedError("this node offers no full machines", hint="offer the substrate fullvm: `dsec up`")
        return backend.images

    async def _list(self, request: Nothing, caller: Caller, _: str | None) -> MachinePage:
        images = self._images()
        return MachinePage(await asyncio.to_thread(lambda: [info_of(image) for image in images.list()]))

    async def _import(self, request: MachineImport, caller: Caller, _: str | None) -> MachineInfo:
        check_machine_source(caller)
        images = self._images()
        config = self._node.config

        return await asyncio.to_thread(
            import_now, images, request, config.state_dir, reserve_bytes=config.disk_free_bytes_min
        )

    async def _build(self, request: MachineBuild, caller: Caller, stream: Stream) -> None:
        await streams.send_build(self._building(request), stream)

    async def _building(self, request: MachineBuild) -> AsyncIterator[BuildEvent]:
        images = self._images()
        work = await asyncio.to_thread(images.begin, request.name)
        try:
            async with aclosing(self._node.environments.build_machine(request, work)) as events:
                async for event in events:
                    if event.machine is None:
                        yield event
                        continue
                    manifest = _manifest(request, event.machine)
                    made = await asyncio.to_thread(images.finish, work, request.name, manifest)
                    yield BuildEvent(kind="done", machine=info_of(made))
        finally:
            await asyncio.shield(asyncio.to_thread(images.give_up, work))

    async def _remove(self, request: MachineRef, caller: Caller, _: str | None) -> Done:
        await asyncio.to_thread(self._images().remove, request.name)
        await self._node.let_layers_go()  # and templates
        return Done()


def info_of(image: MachineImage) -> MachineInfo:
    manifest = image.manifest
    return MachineInfo(
        name=image.name,
        format=manifest.format,
        firmware=manifest.firmware,
        agent=manifest.agent,
        bus=manifest.bus,
        boot_wait_s=manifest.boot_wait_s,
        disk_bytes=manifest.disk_bytes,
        used_bytes=image.used_bytes(),
        sha256=manifest.sha256,
        created_at=manifest.created_at,
        layers=manifest.layers,
    )


def _manifest(request: MachineBuild, made: MachineInfo) -> Manifest:
    from dsec.backends.fullvm.images import Manifest

    return Manifest(
        format=made.format,
        firmware=Firmware(made.firmware),
        agent=Agent(made.agent),
        bus=Bus(made.bus),
        boot_wait_s=made.boot_wait_s,
        command_line=COMMAND_LINE,
        env=machine_env(request),
        disk_bytes=made.disk_bytes,
        sha256=made.sha256,
        created_at=made.created_at,
    )


def import_now(images: MachineImages, request: MachineImport, state: Path, *, reserve_bytes: int) -> MachineInfo:
    """Blocking. A node that runs finds the image when it is asked for it. Raises ConflictError, InvalidArgumentError,
    CapacityError, StorageError."""
    from dsec.backends.fullvm.images import Manifest, copy_disk

    def fill(directory: Path) -> Manifest:
        size, sha256 = copy_disk(Path(request.path), directory / "disk", format=request.format)
        return Manifest(
            format=request.format,
            firmware=request.firmware,
            agent=request.agent,
            bus=request.bus,
            boot_wait_s=request.boot_wait_s,
            disk_bytes=size,
            sha256=sha256,
            created_at=time.time(),
        )

    with suppress(OSError):  # what is wrong with it is told by who copies it
        require_free(state, Path(request.path).stat().st_blocks * 512, reserve_bytes=reserve_bytes)
    try:
        return info_of(images.add(request.name, fill))
    except DsecError:
        raise
    except OSError as error:
        raise StorageError(f"the disk could not be copied: {error.strerror or error}") from error


class View:
    """A screen's connection as `streams.relay` takes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, screen: Screen) -> View:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=READ_CHUNK_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport = await screen.view(lambda: protocol)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def receive(self) -> bytes | None:
        try:
            return await self._reader.read(READ_CHUNK_BYTES) or None
        except OSError:
            return None

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        try:
            await self._writer.drain()
        except OSError:
            return  # its end is told by `receive`

    def send_end(self) -> None:
        if self._writer.can_write_eof() and not self._writer.is_closing():
            self._writer.write_eof()

    async def __aenter__(self) -> View:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.transport.abort()
