"""What a backend offers beside the rest: instances with a screen (`Capabilities.screen`), images of disks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dsec.wire.screens import Picture, ScreenRequest, ScreenSize

if TYPE_CHECKING:
    from dsec.backends.fullvm.images import MachineImages


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
