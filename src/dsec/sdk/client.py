"""A client: one service, one identity, and what may be asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self, Unpack

from dsec.core import limits
from dsec.core.errors import (
    ConflictError,
    DsecError,
    GoneError,
    InvalidArgumentError,
    LimitError,
    Outcome,
    ProtocolError,
    SandboxNotFoundError,
    UnavailableError,
)
from dsec.core.ids import parse_sandbox_id
from dsec.core.spec import Environment
from dsec.core.states import ENDED
from dsec.sdk.calls import CallOptions, CallResult, make_call, send_call
from dsec.sdk.endpoint import find_endpoint
from dsec.sdk.environments import AsyncEnvironments
from dsec.sdk.events import follow_events
from dsec.sdk.grants import AsyncGrants
from dsec.sdk.groups import AsyncGroups
from dsec.sdk.jobs import AsyncJob, AsyncJobs, make_job
from dsec.sdk.layers import AsyncLayers
from dsec.sdk.lines import json_lines
from dsec.sdk.machines import AsyncMachines
from dsec.sdk.projects import AsyncProjects
from dsec.sdk.requests import CreateOptions, make_spec, said_of
from dsec.sdk.sandbox import AsyncSandbox
from dsec.sdk.snapshots import AsyncSnapshot, AsyncSnapshots
from dsec.sdk.tokens import AsyncTokens
from dsec.sdk.transport import Transport
from dsec.sdk.volumes import AsyncVolumes
from dsec.wire import api
from dsec.wire.calls import CallPool, CallPoolPage, CallRequest, TaskTypeInfo, TaskTypePage
from dsec.wire.collect import GcReport, GcRequest
from dsec.wire.errors import ErrorBody, error_of
from dsec.wire.events import Event
from dsec.wire.iam import AuditPage, WhoAmI
from dsec.wire.plans import Explanation
from dsec.wire.records import BatchItem, BatchRequest, CreateRequest, DoctorReport, Health, SandboxPage
from dsec.wire.records import Sandbox as SandboxInfo
from dsec.wire.usage import UsagePage

_MARGIN_S: Final = 10.0  # beyond the service's own deadline, for its answer to arrive
_GC_TIMEOUT_S: Final = 600.0
_UNDO_TIMEOUT_S: Final = 15.0
_BATCH_STALLS_MAX: Final = 6


@dataclass(frozen=True, slots=True)
class AsyncCreated:
    """One of many: exactly one of `sandbox` and `error`."""

    index: int
    sandbox: AsyncSandbox | None = None
    error: DsecError | None = None


class AsyncClient:
    """Speaks to one service. Arguments win over DSEC_URL, DSEC_TOKEN, DSEC_PROJECT and DSEC_NODE; without any of them
    it is the service of this machine, which is started when it does not run. `project`: that it acts in, and no higher.
    `node`: of a cluster, which is meant by all that is of one node (environments, volumes), and where creates go.

        async with dsec.AsyncClient() as client:
            sandboxes = await client.list()
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        project: str | None = None,
        node: str | None = None,
        request_timeout_s: float = 60.0,
    ) -> None:
        self._transport = Transport(find_endpoint(url, token, project, node), request_timeout_s=request_timeout_s)
        self._projects = AsyncProjects(self._transport)
        self._grants = AsyncGrants(self._transport)
        self._environments = AsyncEnvironments(self._transport)
        self._layers = AsyncLayers(self._transport, self._environments)
        self._volumes = AsyncVolumes(self._transport)
        self._machines = AsyncMachines(self._transport)
        self._tokens = AsyncTokens(self._transport)
        self._snapshots = AsyncSnapshots(self, self._transport)
        self._jobs = AsyncJobs(self)
        self._groups = AsyncGroups(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    def url(self) -> str:
        """Where the service is."""
        return str(self._transport.endpoint)

    @property
    def environments(self) -> AsyncEnvironments:
        """What sandboxes start from."""
        return self._environments

    @property
    def layers(self) -> AsyncLayers:
        """What environments are made of."""
        return self._layers

    @property
    def snapshots(self) -> AsyncSnapshots:
        """What sandboxes had on their disks, kept by name."""
        return self._snapshots

    @property
    def machines(self) -> AsyncMachines:
        """Images that full machines begin as."""
        return self._machines

    @property
    def volumes(self) -> AsyncVolumes:
        """Directories that outlive sandboxes."""
        return self._volumes

    @property
    def jobs(self) -> AsyncJobs:
        """Sandboxes that are paused, resumed and stopped together, and have a lease."""
        return self._jobs

    @property
    def groups(self) -> AsyncGroups:
        """Several sandboxes with private names, all of them or none."""
        return self._groups

    def job(
        self,
        name: str,
        *,
        lease_s: float | None = limits.JOB_LEASE_S_DEFAULT,
        on_missed: str = "pause",
        grace_s: float = limits.JOB_GRACE_S_DEFAULT,
    ) -> AsyncJob:
        """A job for an `async with` block: made or found at its beginning, its lease renewed within it, and stopped at
        its end. When an error leaves the block, or this process ends, nobody renews the lease: what then becomes of its
        sandboxes is `on_missed`. Arguments as those of `client.jobs.create`."""
        request = make_job(name, lease_s=lease_s, on_missed=on_missed, grace_s=grace_s)
        return AsyncJob(self, name, None, request)

    @property
    def tokens(self) -> AsyncTokens:
        """Who may call over the network."""
        return self._tokens

    @property
    def projects(self) -> AsyncProjects:
        """Whose sandboxes they are: projects in projects, with their quotas and policies."""
        return self._projects

    @property
    def grants(self) -> AsyncGrants:
        """Who may do what in which project."""
        return self._grants

    async def explain(
        self, environment: str | Environment = "base", *, snapshot: str | None = None, **options: Unpack[CreateOptions]
    ) -> Explanation:
        """What would become of `create` with the same arguments now, and why: the policy that forbids it, the caps that
        bind it, and for each node whether it could take it. Nothing happens."""
        request = CreateRequest(
            spec=make_spec(environment, **options),
            snapshot=snapshot,
            given=said_of(options, snapshot),
        )
        return await self._transport.call("POST", "/sandboxes:explain", Explanation, body=request, repeatable=True)

    async def usage(
        self,
        project: str | None = None,
        *,
        by: str = "project",
        job: str | None = None,
        since: float = 0.0,
        until: float | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> UsagePage:
        """What sandboxes of a project, by default the caller's, and of those below it have used.

        `by`: "project", "day" or "job" give totals, "sandbox" a record of each, `limit` at a time. `job`: of this one,
        by job or sandbox. Of those that ended in
        [since, until) (seconds since the epoch; totals in whole days, UTC), and without `until` of those that live.
        """
        query = {"by": by, "since": f"{since:.3f}", "limit": str(limit)}
        given = {"project": project, "job": job, "until": None if until is None else f"{until:.3f}", "cursor": cursor}
        query.update({name: value for name, value in given.items() if value is not None})
        return await self._transport.call("GET", "/usage", UsagePage, query=query)

    async def whoami(self) -> WhoAmI:
        """Who the service takes this client for, and what they may do where."""
        return await self._transport.call("GET", "/whoami", WhoAmI)

    async def audit(self, *, principal: str | None = None, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Who changed what, newest first, in projects that the caller manages; `next` is the cursor of the next page.

        `principal`: only of this one, such as "ci@/team".
        """
        query = {"limit": str(limit)}
        query.update({name: value for name, value in (("principal", principal), ("cursor", cursor)) if value})
        return await self._transport.call("GET", "/audit", AuditPage, query=query)

    async def events(
        self,
        after: str | None = None,
        *,
        follow: bool = True,
        project: str | None = None,
        labels: Mapping[str, str] | None = None,
        sandbox: str | None = None,
        job: str | None = None,
        kinds: Sequence[str] = (),
    ) -> AsyncGenerator[Event, None]:
        """What happens to sandboxes, in order, over lost connections: created, running, paused, resumed, rested,
        snapshot, rolled_back, egress_denied, destroyed, expired, failed. `kinds`: only these; operators see nodes, too.

            async for event in client.events(labels={"run": "7"}):
                print(event.kind, event.sandbox, event.cause)

        Each has a `position`. `after` one goes on there; "oldest" begins with what is kept; None begins now, or with
        `follow=False`, which ends at what has happened by now, with the oldest. Where something is not kept any more,
        an event of kind "gap" says so. What was read by another process may come once more: by `node` and `number`.
        """
        found = follow_events(
            self._transport,
            after=after,
            follow=follow,
            project=project,
            labels=labels,
            sandbox=sandbox,
            job=job,
            kinds=kinds,
        )
        async with contextlib.aclosing(found) as events:
            async for event in events:
                yield event

    # ---- calls ----

    async def call(
        self,
        type: str,
        code: str,
        **options: Unpack[CallOptions],
    ) -> CallResult:
        """Runs `code` once, in a place made before, and gives what came of it; nothing of it stays.

        `type` is the kind of task: "python", "bash", "c", "cpp", … (`call_types`); compiled ones are compiled first.
        `environment` is "base" unless given. `stdin`, `args`, `env` and `files` (relative path → content) are what it
        finds; `collect` names files to give back. Limits of the run: `run_timeout_s` (10), `cpu_s` (all its processes),
        `memory`, `output_bytes` (each of stdout and stderr), `pids`, `file_bytes`; of the compiler
        `compile_timeout_s` (30); of the wait for a place `queue_timeout_s` (60).

        With `cases`, of (stdin, expected output or None), it is compiled once and run for each, to the first that is
        not right unless `stop_early` is False. `compare`: "exact", "lines", "tokens" or "numbers"; or `checker`: Python
        code (or a `dsec.Checker`) that finds the files input, output and expected, and exits 0 for right, 1 for wrong.

        Raises UnsupportedError (no such type, or the environment lacks its toolchain), EnvironmentNotFoundError,
        CapacityError (no place was free within `queue_timeout_s`), LimitError. Code that fails is a result.
        """
        return await send_call(self._transport, make_call(type, code, **options))

    async def call_many(
        self, requests: Iterable[CallRequest], *, concurrency: int = 64
    ) -> list[CallResult | DsecError]:
        """Many calls, `concurrency` of them under way at once: for each, in order, its result or the error that it
        failed with. `dsec.make_call` makes a request from the arguments of `call`."""
        if not 1 <= concurrency <= limits.CALLS_QUEUED_PER_PROJECT_MAX:
            most = limits.CALLS_QUEUED_PER_PROJECT_MAX
            raise LimitError(f"concurrency must be between 1 and {most}, and is {concurrency}")
        todo = enumerate(requests)
        found: dict[int, CallResult | DsecError] = {}

        async def work() -> None:
            for index, request in todo:
                try:
                    if not isinstance(request, CallRequest):
                        raise InvalidArgumentError(
                            f"{str(request)[:40]!r} is no call", hint="dsec.make_call makes them"
                        )
                    found[index] = await send_call(self._transport, request)
                except DsecError as error:
                    found[index] = error

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
        return [found[index] for index in range(len(found))]

    async def call_types(self) -> list[TaskTypeInfo]:
        """What calls can be of; whether an environment has what it takes shows at its first use."""
        return (await self._transport.call("GET", "/calls/types", TaskTypePage)).types

    async def call_pools(self) -> list[CallPool]:
        """The places for calls of the node, now."""
        return (await self._transport.call("GET", "/calls/pools", CallPoolPage)).pools

    # ---- sandboxes ----

    async def create(
        self,
        environment: str | Environment = "base",
        *,
        idempotency_key: str | None = None,
        snapshot: str | AsyncSnapshot | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        **options: Unpack[CreateOptions],
    ) -> AsyncSandbox:
        """A new sandbox; arguments as those of `Sandbox.create`."""
        on = snapshot.id if isinstance(snapshot, AsyncSnapshot) else snapshot
        spec = make_spec(environment, **options)
        given = said_of(options, on)
        request = CreateRequest(spec=spec, timeout_s=timeout_s, snapshot=on, queue_s=queue_s, given=given)
        key = _key(idempotency_key)
        try:
            return AsyncSandbox(self, await self._create(request, key))
        except asyncio.CancelledError:
            # It may exist by now, and nobody would ever hear of it.
            with contextlib.suppress(Exception):
                await asyncio.shield(asyncio.wait_for(self._undo(request, key), _UNDO_TIMEOUT_S))
            raise

    async def _create(self, request: CreateRequest, key: str) -> SandboxInfo:
        return await self._transport.call(
            "POST",
            "/sandboxes",
            SandboxInfo,
            body=request,
            key=key,
            long=True,
            timeout_s=request.queue_s + request.timeout_s + _MARGIN_S,
            headers={"Prefer": f"wait={request.timeout_s:g}"},
        )

    async def _undo(self, request: CreateRequest, key: str) -> None:
        import msgspec

        again = msgspec.structs.replace(request, queue_s=0.0)  # what still waits for room ends with its connection
        await AsyncSandbox(self, await self._create(again, key)).destroy()

    async def create_many(
        self,
        count: int,
        environment: str | Environment = "base",
        *,
        idempotency_key: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        **options: Unpack[CreateOptions],
    ) -> list[AsyncSandbox | DsecError]:
        """`count` sandboxes alike: for each, in order, the sandbox or the error that it failed with."""
        found: dict[int, AsyncSandbox | DsecError] = {}
        made = self.iter_create(
            count, environment, idempotency_key=idempotency_key, timeout_s=timeout_s, queue_s=queue_s, **options
        )
        async with contextlib.aclosing(made) as items:
            async for item in items:
                found[item.index] = item.sandbox or item.error or ProtocolError("an item without sandbox and error")
        return [found[index] for index in range(count)]

    async def iter_create(
        self,
        count: int,
        environment: str | Environment = "base",
        *,
        idempotency_key: str | None = None,
        timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT,
        queue_s: float = 0.0,
        **options: Unpack[CreateOptions],
    ) -> AsyncGenerator[AsyncCreated, None]:
        """`count` sandboxes alike, each as soon as it is there (or has failed); every index comes once."""
        if not 1 <= count <= _MANY_MAX:
            raise LimitError(f"count must be between 1 and {_MANY_MAX}, and is {count}")
        spec = make_spec(environment, **options)
        key = _key(idempotency_key)
        for first in range(0, count, limits.BATCH_ITEMS_MAX):
            size = min(limits.BATCH_ITEMS_MAX, count - first)
            request = BatchRequest(spec=spec, count=size, timeout_s=timeout_s, queue_s=queue_s)
            part = key if first == 0 else f"{key}.{first}"
            async with contextlib.aclosing(self._batch(request, part)) as items:
                async for item in items:
                    yield self._created(first, item)

    async def _batch(self, request: BatchRequest, key: str) -> AsyncGenerator[BatchItem, None]:
        """Each item once. Asking again after a lost connection gives the same sandboxes, by their keys."""
        seen: set[int] = set()
        stalls = 0
        while len(seen) < request.count:
            try:
                async with self._transport.stream(
                    "POST", "/sandboxes:batch", body=request, key=key, headers={"Accept": api.TYPE_NDJSON}
                ) as response:
                    async for item in json_lines(response, BatchItem):
                        if not 0 <= item.index < request.count:
                            raise ProtocolError(f"item {item.index} of a batch of {request.count}")
                        if item.index not in seen:
                            seen.add(item.index)
                            stalls = 0
                            yield item
                if len(seen) < request.count:
                    raise UnavailableError("the answer to a batch ended early")
            except UnavailableError as error:
                stalls += 1
                await self._transport.pause(error, stalls, most=_BATCH_STALLS_MAX)

    def _created(self, first: int, item: BatchItem) -> AsyncCreated:
        index = first + item.index
        if item.sandbox is not None:
            return AsyncCreated(index, sandbox=AsyncSandbox(self, item.sandbox))
        return AsyncCreated(index, error=_error_of(item.error))

    async def connect(self, id: str) -> AsyncSandbox:
        """A sandbox that exists, by its id, or by its name while it lives.

        Raises SandboxNotFoundError, GoneError when it has ended, ConflictError when several have the name.
        """
        sandbox = await self.get(id) if id.startswith("sbx_") else await self.find(id)
        if sandbox.ended:
            raise _gone(sandbox.info)
        return sandbox

    async def find(self, name: str, *, ended: bool = False) -> AsyncSandbox:
        """The sandbox of this name that lives; with `ended` also the one of this name that ended last.

        Raises SandboxNotFoundError, GoneError when the only one has ended, ConflictError when several live, and
        UnavailableError when it may be on a node that does not answer.
        """
        silent: set[str] = set()
        live = await self.list(name=name, max_items=2, missing=silent)
        if len(live) == 1:
            return live[0]
        if live:
            raise ConflictError(f"several sandboxes are named {name[:80]!r}", hint="use the id: `dsec ls` shows it")
        if silent:
            nodes = ", ".join(sorted(silent))
            raise UnavailableError(
                f"no sandbox named {name[:80]!r} was found, and these nodes do not answer: {nodes[:200]}",
                outcome=Outcome.UNCHANGED,
                hint="ask again in a moment, or use the id",
                retry_after_s=1.0,
            )
        past = await self.list(name=name, states=tuple(ENDED))
        if not past:
            raise SandboxNotFoundError(f"there is no sandbox named {name[:80]!r}", hint=await self._meant(name))
        last = max(past, key=lambda sandbox: sandbox.info.ended_at or 0.0)
        if not ended:
            raise _gone(last.info)
        return last

    async def _meant(self, name: str) -> str | None:
        import difflib

        names = [sandbox.name for sandbox in await self.list(max_items=1_000) if sandbox.name is not None]
        near = difflib.get_close_matches(name, names, n=1)
        return f"did you mean {near[0]}?" if near else None

    async def get(self, id: str) -> AsyncSandbox:
        """A sandbox by its id, also one that has ended within the last day. Raises SandboxNotFoundError."""
        info = await self._transport.call("GET", f"/sandboxes/{parse_sandbox_id(id)}", SandboxInfo)
        return AsyncSandbox(self, info)

    async def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        job: str | None = None,
        states: tuple[str, ...] = (),
        max_items: int = 10_000,
        metrics: bool = False,
        missing: set[str] | None = None,
    ) -> list[AsyncSandbox]:
        """The sandboxes that have all of `labels`; without `states` those that have not ended. With `metrics` each
        one's `info` has its figures as they are now. Nodes of a cluster that did not answer are added to `missing`."""
        found: list[AsyncSandbox] = []
        cursor: str | None = None
        while len(found) < max_items:
            path = _list_path(labels, name, job, states, cursor, max_items, metrics)
            page = await self._transport.call("GET", path, SandboxPage)
            found += [AsyncSandbox(self, info) for info in page.sandboxes]
            if missing is not None:
                missing.update(page.missing)
            if page.next is None or page.next == cursor:
                break
            cursor = page.next
        return found[:max_items]

    # ---- the service ----

    async def health(self) -> Health:
        """The service's version and node."""
        return await self._transport.call("GET", "/health", Health)

    async def doctor(self) -> DoctorReport:
        """What the node can do, and what it lacks."""
        return await self._transport.call("GET", "/doctor", DoctorReport)

    async def collect_garbage(self, *, dry_run: bool = False) -> GcReport:
        """Removes what nothing needs on the node: what names of environments stood for, layers, caches past their time,
        remains of killed processes. Never volumes. `dry_run` only says what that is."""
        request = GcRequest(dry_run=dry_run)
        return await self._transport.call(
            "POST", "/gc", GcReport, body=request, repeatable=True, long=True, timeout_s=_GC_TIMEOUT_S
        )

    async def close(self) -> None:
        """Closes the connections. The client may be used again; sandboxes are not touched."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


_MANY_MAX: Final = 1_000_000


def _gone(info: SandboxInfo) -> GoneError:
    return GoneError(
        f"sandbox {info.id}{f' ({info.name})' if info.name else ''} has ended: {info.cause or info.state}"
        + (f" ({info.cause_detail})" if info.cause_detail else ""),
        sandbox=info.id,
        detail={"state": info.state, "cause": info.cause, "ended_at": info.ended_at},
    )


def _key(given: str | None) -> str:
    if given is None:
        return secrets.token_hex(16)
    if not given or len(given) > limits.IDEMPOTENCY_KEY_BYTES_MAX or not given.isascii() or not given.isprintable():
        raise InvalidArgumentError(
            f"an idempotency key is 1 to {limits.IDEMPOTENCY_KEY_BYTES_MAX} printable ASCII characters"
        )
    return given


def _list_path(
    labels: Mapping[str, str] | None,
    name: str | None,
    job: str | None,
    states: tuple[str, ...],
    cursor: str | None,
    most: int,
    metrics: bool,
) -> str:
    """A query may hold several labels and states, so it is written here."""
    from dsec.sdk.transport import encode_query

    parts = [encode_query({"label": f"{k}={v}"}) for k, v in (labels or {}).items()]
    parts += [encode_query({"state": state}) for state in states]
    parts.append(encode_query({"name": name, "job": job, "limit": min(limits.LIST_PAGE_MAX, most), "cursor": cursor}))
    if metrics:
        parts.append(encode_query({"metrics": True}))
    return "/sandboxes?" + "&".join(part for part in parts if part)


def _error_of(body: dict[str, Any] | None) -> DsecError:
    import msgspec

    if body is None:
        return ProtocolError("an item of a batch holds neither sandbox nor error")
    try:
        return error_of(msgspec.convert(body, ErrorBody))
    except msgspec.ValidationError:
        return ProtocolError("the error of an item of a batch is not understood")


@cache
def default_client() -> AsyncClient:
    """The client that is used when none is named: DSEC_URL, or the service of this machine."""
    return AsyncClient()
