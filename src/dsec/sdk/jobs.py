"""Jobs: sandboxes that are paused, resumed and stopped together, and have a lease that their client renews."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Self

import msgspec

from dsec.core import limits
from dsec.core.errors import ConflictError, DsecError, InvalidArgumentError, NotFoundError, ProtocolError
from dsec.core.ids import parse_name
from dsec.sdk.lines import json_lines
from dsec.sdk.paging import all_pages
from dsec.sdk.reports import JobReport
from dsec.wire import api
from dsec.wire.jobs import JobExtend, JobInfo, JobLine, JobPage, JobRequest, OnMissed

if TYPE_CHECKING:
    from dsec.sdk.client import AsyncClient
    from dsec.sdk.sandbox import AsyncSandbox

_BEATS_A_LEASE: Final = 4  # three may be lost
_RETRY_S: Final = 1.0


class _Nothing(msgspec.Struct):
    pass


class AsyncJob:
    """A job of the client's project. As a context manager it makes the job, renews its lease in the background, and
    stops it at the end; when an error leaves it, or the process ends, the lease decides.

        async with client.job("train-7", lease_s=60) as job:
            sandboxes = await client.create_many(32, "base", job=job.name)
    """

    def __init__(self, client: AsyncClient, name: str, info: JobInfo | None, request: JobRequest | None = None) -> None:
        self._client = client
        self._transport = client._transport
        self._path = f"/jobs/{parse_name(name, 'job name')}"
        self._name = name
        self._info = info
        self._request = request
        self._beating: asyncio.Task[None] | None = None
        self._lost: DsecError | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} {self._info.state if self._info else 'not made yet'}>"

    @property
    def name(self) -> str:
        """Unique in its project; what `job=` of a create takes."""
        return self._name

    @property
    def info(self) -> JobInfo:
        """What was last heard of it; `refresh` asks again. Raises InvalidArgumentError before it was made."""
        if self._info is None:
            raise InvalidArgumentError(f"job {self._name} is not made yet", hint="use it in a `with` block")
        return self._info

    @property
    def lost(self) -> DsecError | None:
        """Why its lease is not renewed any more: it was stopped, or removed. None: all is well."""
        return self._lost

    async def refresh(self) -> JobInfo:
        """Asks for its present state, and for its sandboxes by state. Raises NotFoundError."""
        return await self._told("GET", "")

    async def heartbeat(self) -> JobInfo:
        """Its lease begins anew; if it was paused because that was missed, it goes on.

        Raises ConflictError when it is stopped.
        """
        return await self._told("POST", "/heartbeat")

    async def extend(self, seconds: float) -> JobInfo:
        """Its lease is good for so long from now on, whether heartbeats come or not. Raises ConflictError."""
        return await self._told("POST", "/extend", JobExtend(seconds=seconds))

    async def pause(self) -> JobReport:
        """Pauses all its sandboxes, on all nodes; it takes no new ones until it is resumed."""
        return await self._ordered("/pause")

    async def resume(self) -> JobReport:
        """Lets all its sandboxes go on."""
        return await self._ordered("/resume")

    async def stop(self) -> JobReport:
        """Destroys all its sandboxes, for good: it takes no new ones. Again is fine."""
        return await self._ordered("/stop")

    async def remove(self) -> None:
        """Forgets it, when it is stopped. Raises ConflictError while it is not."""
        await self._transport.call("DELETE", self._path, _Nothing, repeatable=True)

    async def list(self, *, max_items: int = 10_000) -> Sequence[AsyncSandbox]:
        """Its sandboxes that have not ended."""
        return await self._client.list(job=self._name, max_items=max_items)

    async def _told(self, method: str, suffix: str, body: msgspec.Struct | None = None) -> JobInfo:
        self._info = await self._transport.call(method, f"{self._path}{suffix}", JobInfo, body=body, repeatable=True)
        return self._info

    async def _ordered(self, suffix: str) -> JobReport:
        done, failed, missing = 0, [], {}
        job: JobInfo | None = None
        async with self._transport.stream(
            "POST", f"{self._path}{suffix}", headers={"Accept": api.TYPE_NDJSON}
        ) as response:
            async for line in json_lines(response, JobLine):
                if line.part is not None and line.part.error is not None:
                    missing[line.part.node] = line.part.error.message
                elif line.part is not None:
                    wrong = [item for item in line.part.items if item.error is not None]
                    failed += wrong
                    done += len(line.part.items) - len(wrong)
                job = line.job or job
        if job is None:
            raise ProtocolError("the answer to an order ended early")
        self._info = job
        return JobReport(job, done, failed, missing)

    async def __aenter__(self) -> Self:
        if self._request is not None:
            self._info = await self._transport.call("POST", "/jobs", JobInfo, body=self._request, repeatable=True)
        await self.heartbeat()
        if self._info is not None and self._info.lease_s is not None:
            every_s = self._info.lease_s / _BEATS_A_LEASE
            self._beating = asyncio.create_task(self._beat(every_s), name=f"heartbeats of job {self._name}")
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None
        if kind is None:
            try:
                await self.stop()
            except NotFoundError:
                return

    async def _beat(self, every_s: float) -> None:
        wait_s = every_s
        while True:
            await asyncio.sleep(wait_s)
            wait_s = every_s
            try:
                await self.heartbeat()
            except (ConflictError, NotFoundError) as error:
                self._lost = error
                return
            except DsecError:
                wait_s = min(every_s, _RETRY_S)  # as soon as the service is back


class AsyncJobs:
    """`client.jobs`: sandboxes of a project that live and end together, for `Sandbox.create(job=…)`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._transport = client._transport

    async def create(
        self,
        name: str,
        *,
        lease_s: float | None = None,
        on_missed: str = "pause",
        grace_s: float = limits.JOB_GRACE_S_DEFAULT,
    ) -> AsyncJob:
        """A new job; one of that name and with these terms is fine, and one that was stopped makes room.

        With `lease_s` somebody has to renew it: `client.job`, `job.heartbeat` or `job.extend`. When the lease is missed
        its sandboxes are paused, and those that cannot be are stopped `grace_s` later; with `on_missed="stop"` all are
        stopped `grace_s` later. Raises ConflictError when there is another one of that name.
        """
        request = make_job(name, lease_s=lease_s, on_missed=on_missed, grace_s=grace_s)
        info = await self._transport.call("POST", "/jobs", JobInfo, body=request, repeatable=True)
        return AsyncJob(self._client, name, info)

    async def get(self, name: str) -> AsyncJob:
        """A job by its name, with its sandboxes by state. Raises NotFoundError."""
        job = AsyncJob(self._client, name, None)
        await job.refresh()
        return job

    async def list(self, *, max_items: int = 10_000) -> list[JobInfo]:
        """The jobs of the caller's project and of those below it; stopped ones for a day."""
        return await all_pages(self._transport, "/jobs", JobPage, lambda page: page.jobs, max_items=max_items)


def make_job(name: str, *, lease_s: float | None, on_missed: str, grace_s: float) -> JobRequest:
    if on_missed not in tuple(OnMissed):
        raise InvalidArgumentError(f"on_missed is {' or '.join(OnMissed)}, not {on_missed!r}")
    return JobRequest(name=name, lease_s=lease_s, on_missed=OnMissed(on_missed), grace_s=grace_s)
