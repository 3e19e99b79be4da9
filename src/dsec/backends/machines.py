"""What a backend offers beside the rest: instances with a screen (`Capabilities.screen`), images of disks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dsec.backends.base import Layer
from dsec.core.spec import Environment
from dsec.wire.screens import Picture, ScreenRequest, ScreenSize

if TYPE_CHECKING:
    from dsec.backends.fullvm.images import MachineImage, MachineImages


class Screen(Protocol):
    """What is wrong with a request raises InvalidArgumentError, and nothing of it is done; a machine that does not
    answer raises HostError or DeadlineError."""

    async def picture(self) -> Picture: ...

    async def act(self, request: ScreenRequest) -> ScreenSize:
        """Done when it returns; the size is that of the screen then."""
        ...

    async def view(self, factory: Callable[[], asyncio.Protocol]) -> asyncio.Transport:
        """A connection that speaks RFB (VNC). Raises SandboxFaultError."""
        ...


@runtime_checkable
class HasScreen(Protocol):
    @property
    def screen(self) -> Screen: ...


@runtime_checkable
class HasImages(Protocol):
    """A backend whose instances begin as an image of a disk."""

    @property
    def images(self) -> MachineImages: ...


@dataclass(frozen=True, slots=True)
class MachineDisk:
    """Lowest first: layers of the node between `below` and `above`. All but the lowest file are qcow2."""

    below: tuple[Path, ...]
    layers: tuple[str, ...]  # digests
    above: tuple[Path, ...]
    format: str  # of the lowest
    size_bytes: int  # to a machine


@runtime_checkable
class SavesDisks(Protocol):
    """A backend of machines that are written down, with their disks."""

    @property
    def jail_root(self) -> Path:
        """An empty directory that jails mount their own root at."""
        ...

    def machine_disk(self, id: str) -> AbstractContextManager[MachineDisk]:
        """What the disk of a machine that was written down is made of; all of it is there, and as it was
        written, while the block runs. Blocking. Raises StorageError."""
        ...


@runtime_checkable
class HasDisks(HasImages, SavesDisks, Protocol):
    """And whose disks may be made of layers."""

    def written(self, id: str) -> AbstractAsyncContextManager[tuple[MachineImage, list[Path]]]:
        """The image that an instance began as, and its files above that, lowest first, which are there while the block
        runs. Raises ConflictError (one of them is gone), GoneError."""
        ...

    def image_of(self, environment: Environment) -> MachineImage:
        """By its name. Blocking. Raises EnvironmentNotFoundError, InvalidArgumentError."""
        ...


@runtime_checkable
class KeepsMachines(Protocol):
    """A backend whose snapshots are machines that stand still: memory and disk. It keeps them by ids of its own."""

    async def sync_machine(self, id: str) -> None:
        """It survives a loss of power from here on. Raises StorageError."""
        ...

    async def keep_machines(self, ids: Collection[str], records: Collection[bytes]) -> None:
        """Removes all but these, those that the instances of these records need, and those that are held."""
        ...


@runtime_checkable
class GivesBack(Protocol):
    """An instance whose memory may go to swap while it is paused."""

    def give_back(self) -> bool:
        """Begins; going on cuts it short. False where that cannot be: the host has no swap."""
        ...

    @property
    def gave_back(self) -> bool:
        """Since it was paused."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """An instance whose memory can be on the disk while it is paused. Called as `Instance` is, one at a time:
    pause, save, (its record is written down), sleep; wake, (its record is written down), resume."""

    @property
    def can_sleep(self) -> bool: ...

    @property
    def asleep(self) -> bool:
        """Nothing of it runs; its record says so."""
        ...

    async def save(self) -> None:
        """Of one that is paused: all of it is on the disk, and its record says that it sleeps. Raises what a snapshot
        raises; then it is paused as before."""
        ...

    async def stay(self) -> None:
        """After `save`: it is paused as before it."""
        ...

    async def sleep(self) -> None:
        """After `save`: it takes neither memory nor processor any more. Raises HostError; it may be asked for again."""
        ...

    async def wake(self, layers: tuple[Layer, ...]) -> None:
        """It is paused again, and its record says that. `layers`: its own. Raises LaunchError, StorageError,
        UnsupportedError: then it sleeps on."""
        ...

    async def sleep_on(self) -> None:
        """After `wake`: it sleeps as before it, and so says its record. Raises HostError."""
        ...
