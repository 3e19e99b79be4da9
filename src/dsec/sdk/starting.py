"""What becomes of the members of a group while it is started: told as it happens."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from dsec.core.errors import DsecError, InvalidArgumentError, NotFoundError, UnavailableError
from dsec.wire.environments import BuildEvent, RegistrySource
from dsec.wire.groups import GroupMember, GroupStep

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient
    from dsec.wire.records import Sandbox

_LOOK_S: Final = 0.5
_SILENT_S: Final = 10.0  # after so long without news the one that is waited for is named

OnStep = Callable[[GroupStep], Any]


class Story:
    """Tells the steps of one start, each with the time since its beginning."""

    def __init__(self, on_step: OnStep | None) -> None:
        self._on_step = on_step
        self._began = _now()
        self._told = self._began

    @property
    def heard(self) -> bool:
        return self._on_step is not None

    def silent_s(self) -> float:
        return _now() - self._told

    async def tell(self, kind: str, member: str | None, message: str) -> None:
        self._told = _now()
        if self._on_step is not None:
            given = self._on_step(
                GroupStep(kind=kind, member=member, message=message, after_s=round(self._told - self._began, 3))
            )
            if inspect.isawaitable(given):
                await asyncio.ensure_future(given)


async def have_image(client: AsyncClient, image: str, environment: str, services: str, story: Story) -> None:
    """Pulls what is not there. Raises what the pull does, with the services that want it."""
    try:
        if await client.environments.exists(environment):
            return
    except InvalidArgumentError:
        return  # there are several nodes: that of the group says whether it has it
    await story.tell("image", services, f"image {image} is not here, and is pulled")

    async def hear(event: BuildEvent) -> None:
        if event.kind == "progress":
            await story.tell("image", services, f"image {image}: {event.stage or ''} {event.message}".strip())

    try:
        await client.environments.build(environment, RegistrySource(image), on_event=hear if story.heard else None)
    except DsecError as error:
        error.message = f"service {services}: its image {image} could not be pulled: {error.message}"
        error.detail = {**error.detail, "member": services}
        if isinstance(error, (NotFoundError, UnavailableError)):
            error.hint = error.hint or f"is it {image!r}, and does the node reach its registry? `dsec env ls` shows all"
        raise


@contextlib.asynccontextmanager
async def followed(
    client: AsyncClient, name: str, members: Mapping[str, GroupMember], story: Story
) -> AsyncIterator[None]:
    """Meanwhile the group is started. What cannot be asked is not told; nothing fails by it."""
    if not story.heard:
        yield
        return
    watch = _Watch(client, name, members, story)
    watching = asyncio.create_task(watch.run(), name=f"start of group {name}")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await watch.look()  # what has come since


class _Watch:
    def __init__(self, client: AsyncClient, name: str, members: Mapping[str, GroupMember], story: Story) -> None:
        self._client = client
        self._name = name
        self._members = members
        self._story = story
        self._states: dict[str, str] = {}

    async def run(self) -> None:
        while True:
            await self.look()
            if self._story.silent_s() >= _SILENT_S:
                await self._story.tell("waiting", None, self._waited_for())
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        with contextlib.suppress(Exception):  # also of who hears it: the group is there all the same
            for sandbox in await self._client.list(job=self._name, max_items=2 * len(self._members)):
                await self._see(sandbox.info)

    async def _see(self, info: Sandbox) -> None:
        member = info.member
        if member is None or member not in self._members or self._states.get(info.id) == info.state:
            return
        self._states[info.id] = info.state
        self._states[member] = info.state
        probed = self._members[member].spec.ready is not None
        text = {
            "creating": f"is started on node {info.node}" + (", until its healthcheck succeeds" if probed else ""),
            "running": "is healthy" if probed else "runs",
        }
        await self._story.tell(str(info.state), member, text.get(info.state, f"is {info.state}"))

    def _waited_for(self) -> str:
        starting = [name for name in self._members if self._states.get(name) == "creating"]
        if starting:
            probed = [name for name in starting if self._members[name].spec.ready is not None]
            what = "their healthchecks" if len(probed) > 1 else "its healthcheck"
            return f"waiting for {', '.join(starting)}" + (f", and {what}" if probed == starting else "")
        left = [name for name in self._members if name not in self._states]
        return f"waiting for {', '.join(left)} to be placed" if left else "waiting for the service"


def _now() -> float:
    return asyncio.get_running_loop().time()
