"""The nodes of a cluster as one (`cluster.fleet.Fleet`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec

from dsec.cluster.candidates import Candidates
from dsec.cluster.events import EventDesk, EventTail
from dsec.cluster.holders import held_alone, holders, inspector, needs
from dsec.cluster.members.nodes import Nodes, NodeState, NodeView
from dsec.cluster.names import Claim, Holder, Names
from dsec.cluster.operations import Operation, Operations
from dsec.cluster.pages import check_page, merge_pages, own
from dsec.cluster.placement import (
    Ask,
    Burst,
    Overlay,
    Refusal,
    ask_of,
    choose,
    choose_all,
    refusals,
    shape_of,
    spilling,
)
from dsec.cluster.queue import CreateQueue, Patience, Vetoes
from dsec.cluster.refused import closed_nodes, maybe_there, no_node, only_there
from dsec.cluster.registry import Registry
from dsec.cluster.rpc import Rpc
from dsec.cluster.spreading import Spread
from dsec.cluster.together import Together
from dsec.cluster.tombstones import cause_of
from dsec.core.clock import Clock
from dsec.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    DsecError,
    EnvironmentNotFoundError,
    IdempotencyError,
    InvalidArgumentError,
    NodeRetiredError,
    NotFoundError,
    Outcome,
    ProtocolError,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.ids import NodeId, parse_node_id
from dsec.core.states import ENDED
from dsec.observe.logs import get_logger
from dsec.wire.codec import pack, unpack
from dsec.wire.cursors import decode_cursor
from dsec.wire.errors import error_of
from dsec.wire.events import EventQuery
from dsec.wire.many import Created, CreatedMany, CreateMany
from dsec.wire.node import Caller, Method, Stream
from dsec.wire.records import CreateRequest, Health, ListQuery, NodeLoad, Sandbox, SandboxPage

log = get_logger(__name__)

_NODES_TRIED_MAX: Final = 8  # of one create: each has refused with a reason
_LISTED_AT_ONCE: Final = 64
_LIST_S: Final = 5.0  # for one node: one that does not answer is named, and not waited for
# Nothing of these is about one node: any that is live will do.
_ANYWHERE: Final = frozenset((Method.CALL, Method.CALL_TYPES))
# A refusal of the node itself: it has nothing of this create.
_REFUSALS: Final = (CapacityError, NotFoundError, UnsupportedError)
_COMES_BACK: Final = (NodeState.AWAY, NodeState.LOST)
_AWAY_S: Final = 5.0


class ManyNodes:
    """Creates are placed, and refused ones placed again; listings are merged; keys and names hold over all nodes."""

    def __init__(
        self,
        rpc: Rpc,
        nodes: Nodes,
        registry: Registry,
        clock: Clock,
        *,
        events: EventTail | None = None,
        bursts: Sequence[Burst] = (),
        rng: random.Random | None = None,
    ) -> None:
        """`events`: of the whole cluster; None: there are none to be followed."""
        self._rpc = rpc
        self._nodes = nodes
        self._clock = clock
        self._operations = Operations(registry, clock)
        self._names = Names(registry, clock, self._still_there)
        self._overlay = Overlay()
        self.bursts = tuple(bursts)
        self._queue = CreateQueue(clock)
        nodes.on_news = self._queue.wake
        self._rng = rng or random.Random()
        self._started_at = clock.wall_s()
        self._events = None if events is None else EventDesk(events, clock.wall_s())

    # -- creates -----------------------------------------------------------------------------------

    async def create(
        self,
        request: CreateRequest,
        *,
        caller: Caller,
        key: str | None,
        timeout_s: float,
        patience: Patience | None = None,
        at: NodeId | None = None,
    ) -> Sandbox:
        request = msgspec.structs.replace(request, queue_s=0.0)  # how long it waits is no part of what is asked for
        return await self.go_on(
            request, caller=caller, key=key, timeout_s=timeout_s, patience=patience, at=at, begun=None
        )

    async def go_on(
        self,
        request: CreateRequest,
        *,
        caller: Caller,
        key: str | None,
        timeout_s: float,
        patience: Patience | None,
        begun: tuple[Operation, DsecError | None] | None,
        at: NodeId | None = None,
    ) -> Sandbox:
        """`create`, from where it stands: what was written down, and how the first try of it failed, if it did."""
        until = self._clock.monotonic_s() + timeout_s
        try:
            async with asyncio.timeout(timeout_s + (0.0 if patience is None else patience.left_s)) as limit:
                return await _Create(self, request, caller, key, until, patience, at).run(begun)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(
                f"the create was not done within {timeout_s:g} s", hint="ask again with the same Idempotency-Key"
            ) from error

    def only_there(self, request: CreateRequest, tried: set[NodeId]) -> CapacityError | None:
        return only_there(request.spec.environment.base, self._nodes, tried, self.closed())

    async def node_of_key(self, project: str, key: str) -> NodeId | None:
        return await self._operations.node_of(project, key)

    def nodes(self) -> Sequence[NodeId]:
        now = self._clock.monotonic_s()
        return [view.id for view in self._nodes if view.state(now) in (NodeState.LIVE, NodeState.SUSPECT)]

    def closed(self) -> Mapping[NodeId, Refusal]:
        return closed_nodes(self._nodes, self._clock.monotonic_s())

    def silent(self) -> Sequence[NodeId]:
        now = self._clock.monotonic_s()
        return [view.id for view in self._nodes if view.member is not None and _is_silent(view, now)]

    def absent(self) -> Sequence[NodeId]:
        now, gone = self._clock.monotonic_s(), (NodeState.AWAY, NodeState.LOST)
        return [view.id for view in self._nodes if view.member is not None and view.state(now) in gone]

    def choose(
        self,
        request: CreateRequest,
        tried: set[NodeId],
        project: str = "",
        *,
        counts: bool = True,
        only: NodeId | None = None,
    ) -> NodeId:
        """`only`: this one or none. Raises CapacityError when no node takes it now, UnsupportedError when none ever
        would."""
        now = self._clock.monotonic_s()
        ask = ask_of(request.spec, project)
        bursts = self.bursts if only is None else ()
        views = [view for view in self._nodes.shown if view.id == only] if only is not None else self._nodes.shown
        candidates = Candidates(views, ask, self._overlay, now, bursts)
        found = choose(candidates, ask, overlay=self._overlay, rng=self._rng, tried=tried, bursts=bursts)
        if found is None:
            self._check_named(ask.node, now)
            there = spilling(candidates, ask, self._overlay, bursts) if bursts else {}
            raise no_node(there | refusals(candidates, ask, self._overlay), ask, tried, self.closed())
        if counts:
            self._overlay.add(found.id, ask, now)
        return found.id

    def _check_named(self, node: str | None, now: float) -> None:
        """Raises UnavailableError for one that was asked for, and is only away."""
        view = None if node is None else self._nodes.find(NodeId(node))
        if view is not None and view.member is not None and (state := view.state(now)) in _COMES_BACK:
            raise UnavailableError(
                f"node {node}, which was asked for, is {state}",
                outcome=Outcome.UNCHANGED,
                retry_after_s=_AWAY_S,
                detail={"node_state": str(state)},
            )

    def choose_all(self, request: CreateRequest, project: str, count: int) -> list[tuple[NodeId, int]]:
        """Where so many alike go now, a few together at each. Fewer than `count` when no node takes more."""
        now = self._clock.monotonic_s()
        ask = ask_of(request.spec, project)
        candidates = Candidates(self._nodes.shown, ask, self._overlay, now, self.bursts)
        return choose_all(candidates, ask, count, overlay=self._overlay, now=now, rng=self._rng, bursts=self.bursts)

    def places(
        self,
        members: Mapping[str, CreateRequest],
        refused: Mapping[str, Collection[NodeId]],
        project: str,
        *,
        linked: bool,
    ) -> dict[str, NodeId]:
        now = self._clock.monotonic_s()

        def nodes_for(ask: Ask) -> Candidates:
            return Candidates(self._nodes.shown, ask, self._overlay, now, self.bursts)

        asks = {name: ask_of(one.spec, project) for name, one in members.items()}
        spread = Spread(asks, nodes_for, self._overlay, self._rng, refused, self.bursts, linked)
        found = spread.places()
        if isinstance(found, dict):
            return found
        self._check_named(asks[found].node, now)
        nodes, ask, beside = spread.why_not(found)
        there = spilling(nodes, ask, beside, self.bursts) if self.bursts else {}
        error = no_node(there | refusals(nodes, ask, beside), ask, set(refused.get(found, ())), self.closed())
        error.message = f"the group fits on no node, and over several there is none for {found}: {error.message}"
        error.detail = {**error.detail, "member": found}
        raise error

    async def ask(
        self, node: NodeId, request: CreateRequest, caller: Caller, key: str | None, timeout_s: float
    ) -> Sandbox:
        asked_at = self._clock.monotonic_s()
        answer = await self._rpc.call(node, Method.CREATE, pack(request), caller=caller, timeout_s=timeout_s, key=key)
        self._overlay.seen(node, asked_at)  # the load that came with the answer has it
        return own(unpack(answer, Sandbox), node)

    async def ask_many(
        self, node: NodeId, request: CreateRequest, caller: Caller, keys: tuple[str, ...], timeout_s: float
    ) -> list[Sandbox | DsecError | None]:
        """What came of each of the keys; None: it is under way. Raises what `ask` raises, of all of them."""
        asked_at, body = self._clock.monotonic_s(), pack(CreateMany(request, keys))
        answer = await self._rpc.call(node, Method.CREATE_MANY, body, caller=caller, timeout_s=timeout_s)
        self._overlay.seen(node, asked_at)
        items = unpack(answer, CreatedMany).items
        if len(items) != len(keys):
            raise ProtocolError(f"node {node} has answered with {len(items)} sandboxes for {len(keys)} keys")
        return [_come(item, node) for item in items]

    @property
    def rpc(self) -> Rpc:
        return self._rpc

    @property
    def together(self) -> Together:
        return Together(self)

    @property
    def operations(self) -> Operations:
        return self._operations

    @property
    def names(self) -> Names:
        return self._names

    @property
    def queue(self) -> CreateQueue:
        return self._queue

    @property
    def clock(self) -> Clock:
        return self._clock

    def left_s(self, until: float) -> float:
        return max(until - self._clock.monotonic_s(), 0.001)

    async def _still_there(self, holder: Holder, project: str, name: str) -> bool:
        view = self._nodes.find(NodeId(holder.node))
        if view is None or view.state(self._clock.monotonic_s()) in (NodeState.LOST, NodeState.RETIRED):
            return False  # and it cannot bring the name back: it drops its names when it joins again
        query = ListQuery(name=name, limit=1)
        page = await self._list_one(view.id, query, inspector(project), _LIST_S)
        return any(sandbox.project == project for sandbox in page.sandboxes)

    # -- listings ----------------------------------------------------------------------------------

    async def listing(self, query: ListQuery, *, caller: Caller, timeout_s: float) -> SandboxPage:
        """Nodes that do not answer are named in `missing`: what they hold is not in the page."""
        now = self._clock.monotonic_s()
        if query.cursor is not None:
            decode_cursor(query.cursor)
        asked, missing = [], []
        for view in self._nodes:
            if view.member is None:
                continue
            if view.state(now) == NodeState.LOST and not view.buried:
                missing.append(str(view.id))
            elif cause_of(view, now) is None or ENDED.intersection(query.states):
                asked.append(view.id)
        turn = asyncio.Semaphore(_LISTED_AT_ONCE)
        pages: list[SandboxPage] = []

        async def ask(node: NodeId) -> None:
            async with turn:
                try:
                    pages.append(await self._list_one(node, query, caller, min(timeout_s, _LIST_S)))
                except DsecError as error:  # whatever it says: the others' are told
                    log.info("a node does not list", node=node, error=str(error))
                    missing.append(str(node))

        await _all(ask, asked)
        return merge_pages(pages, query.limit, sorted(missing))

    async def _list_one(self, node: NodeId, query: ListQuery, caller: Caller, timeout_s: float) -> SandboxPage:
        page = unpack(
            await self._rpc.call(node, Method.LIST, pack(query), caller=caller, timeout_s=timeout_s), SandboxPage
        )
        check_page(page, node, query)
        return page

    async def events(self, query: EventQuery, *, caller: Caller) -> Stream:
        if self._events is None:
            raise UnsupportedError("this replica follows no events")
        return await self._events.open(query, caller)

    async def close(self) -> None:
        self._queue.close()
        if self._events is not None:
            await self._events.close()

    # -- the rest ----------------------------------------------------------------------------------

    def node_for(self, method: Method, named: str | None, *, image: str | None = None) -> NodeId:
        if named is not None:
            return parse_node_id(named)
        now = self._clock.monotonic_s()
        live = [view for view in self._nodes if view.state(now) == NodeState.LIVE]
        if not live:
            raise UnavailableError("no node of the cluster is there", outcome=Outcome.UNCHANGED, retry_after_s=1.0)
        if method in _ANYWHERE:
            new = [view for view in live if view.takes_new(now)] or live
            new = [view for view in new if view.card is not None and image in view.card.images] or new
            return min(new, key=lambda view: (_fullness(view), self._rng.random())).id
        if len(live) > 1:
            raise InvalidArgumentError(
                f"what is asked for is of one node, and there are {len(live)}",
                hint="name it: `dsec --node NODE …`, or the header Dsec-Node; `dsec cluster nodes` lists them",
            )
        return live[0].id

    async def health(self, version: str) -> Health:
        now = self._clock.monotonic_s()
        loads = [view.load or NodeLoad() for view in self._nodes if view.state(now) == NodeState.LIVE]
        total = NodeLoad(
            sandboxes=sum(load.sandboxes for load in loads),
            sandboxes_max=sum(load.sandboxes_max for load in loads),
            memory_promised_bytes=sum(load.memory_promised_bytes for load in loads),
            memory_promised_bytes_max=sum(load.memory_promised_bytes_max for load in loads),
        )
        return Health(version=version, node="", started_at=self._started_at, sandboxes=total.sandboxes, load=total)


class _Create:
    """One create, over as many nodes as it takes."""

    def __init__(
        self,
        fleet: ManyNodes,
        request: CreateRequest,
        caller: Caller,
        key: str | None,
        until: float,
        patience: Patience | None,
        only: NodeId | None,
    ) -> None:
        self._fleet = fleet
        self._only = only
        self._looked = False
        self._request = request
        self._caller = caller
        self._key = key
        self._until = until
        self._patience = patience
        self._tried: set[NodeId] = set()
        self._unfit: set[NodeId] = set()  # that lack what no waiting gives them
        self._vetoes = Vetoes(fleet.clock)
        self._claim: Claim | None = None

    async def run(self, begun: tuple[Operation, DsecError | None] | None) -> Sandbox:
        operation, failed = (await self._operation(), None) if begun is None else begun
        node = operation.node if operation is not None else await self._place()
        name = self._request.spec.name
        if name is not None:
            self._claim = await self._fleet.names.claim(self._caller.project, name, node, self._key)
        try:
            while True:
                try:
                    if failed is not None:
                        before, failed = failed, None
                        raise before
                    sandbox = await self._at(node)
                except DsecError as error:
                    operation, node = await self._elsewhere(error, operation, node)
                    continue
                if self._claim is not None:
                    await self._fleet.names.keep(self._claim, sandbox.id)
                return sandbox
        except DsecError as error:
            alone = operation is None or operation.alone  # else another try may make the sandbox yet
            if self._claim is not None and alone and error.outcome != Outcome.UNKNOWN:
                await self._fleet.names.drop(self._claim)
            if operation is not None and alone and isinstance(error, _REFUSALS):
                await self._fleet.operations.over(operation)
            raise

    async def _operation(self) -> Operation | None:
        """Nearly every key is new, so that is tried first: it is one write, and no question."""
        if self._key is None:
            return None
        operations, project = self._fleet.operations, self._caller.project
        while True:
            full: DsecError
            try:
                node = self._choose(self._tried)
                return await operations.begin(project, self._key, self._request, node, timeout_s=self._left_s())
            except (ConflictError, CapacityError, UnsupportedError) as error:
                full = error  # what was made before for the key is answered all the same
            known = await operations.again(project, self._key, self._request, timeout_s=self._left_s())
            if known is not None:
                return known
            if isinstance(full, ConflictError):
                continue
            if not isinstance(full, CapacityError):
                raise full
            node = await self._wait(full)
            try:
                return await operations.begin(project, self._key, self._request, node, timeout_s=self._left_s())
            except ConflictError:
                continue

    async def _place(self) -> NodeId:
        """On a node that has not refused it; with patience, once there is one."""
        try:
            return self._choose(self._tried)
        except CapacityError as error:
            return await self._wait(error)

    async def _wait(self, refused: CapacityError) -> NodeId:
        patience, fleet = self._patience, self._fleet
        if patience is None or refused.detail.get("never"):  # no waiting helps
            raise refused
        before_s = patience.left_s
        node = await fleet.queue.wait(
            self._caller.project,
            (self._only, shape_of(self._request.spec)),
            lambda: self._choose(self._unfit | self._vetoes.now()),
            patience,
            refused,
        )
        self._until += before_s - patience.left_s
        self._tried.clear()
        return node

    async def _holder(self) -> NodeId | None:
        """The node that has the volumes and the snapshot, once one has said that it lacks them."""
        if self._only is not None or self._looked:
            return None
        self._looked = True
        asked, caller = needs(self._request), inspector(self._caller.project)
        found, _ = await holders(self._fleet.rpc, self._fleet.nodes(), asked, caller)
        return next((node for node in found if node not in self._tried), None)

    def _choose(self, but: set[NodeId]) -> NodeId:
        return self._fleet.choose(self._request, but, self._caller.project, only=self._only)

    def _left_s(self) -> float:
        return self._fleet.left_s(self._until)

    async def _at(self, node: NodeId) -> Sandbox:
        if self._claim is not None and self._claim.holder.node != node:
            self._claim = await self._fleet.names.move(self._claim, node)
        return await self._fleet.ask(node, self._request, self._caller, self._key, self._left_s())

    async def _elsewhere(
        self, error: DsecError, operation: Operation | None, node: NodeId
    ) -> tuple[Operation | None, NodeId]:
        """Where to try next. Raises `error` when that is nowhere."""
        first = operation is None or operation.first
        if not _is_refusal(error, first=first):
            if error.outcome == Outcome.UNCHANGED and isinstance(error, UnavailableError) and not first:
                # This try did not reach the node; one before it may have.
                raise UnavailableError(
                    error.message,
                    outcome=Outcome.UNKNOWN,
                    hint="ask again with the same Idempotency-Key",
                    retry_after_s=1.0,
                ) from error
            raise error
        if operation is not None and not operation.alone and not isinstance(error, NodeRetiredError):
            raise error  # another try of the key may be under way there, and succeed: it stays at this node
        new = await self._other(error, node)
        log.info("a create is placed again", refused_by=node, error=error.message)
        if operation is None:
            return None, new
        try:
            operation = await self._fleet.operations.move(operation, new, timeout_s=self._left_s())
        except ConflictError:
            operation = await self._operation()  # another replica has moved it, or tries it
            assert operation is not None
        return operation, operation.node

    async def _other(self, error: DsecError, node: NodeId) -> NodeId:
        """Than those that have refused. Raises `error` when there is none, and waiting does not help."""
        self._tried.add(node)
        self._vetoes.add(node)
        if isinstance(error, (NotFoundError, UnsupportedError)) or error.detail.get("never"):
            self._unfit.add(node)
        if isinstance(error, NotFoundError) and (only := await self._holder()) is not None:
            self._only = only
            try:
                return self._choose(self._tried)
            except CapacityError as full:
                return await self._wait(held_alone(full, only))
        if len(self._tried) < _NODES_TRIED_MAX:
            try:
                return self._choose(self._tried)
            except CapacityError:
                pass  # the node's own word says more
        if isinstance(error, NotFoundError):
            there = self._fleet.only_there(self._request, self._tried)
            if isinstance(error, EnvironmentNotFoundError) and there is not None:
                return await self._wait(there)
            maybe_there(error, self._tried, self._fleet.closed())
        if not isinstance(error, CapacityError):
            raise error
        return await self._wait(error)


def _come(item: Created, node: NodeId) -> Sandbox | DsecError | None:
    if item.sandbox is None:
        return None if item.error is None else error_of(item.error)
    try:
        return own(item.sandbox, node)
    except DsecError as error:
        return error


def _is_silent(view: NodeView, now: float) -> bool:
    state = view.state(now)
    return state == NodeState.AWAY or (state == NodeState.LOST and not view.buried)


def _is_refusal(error: DsecError, *, first: bool) -> bool:
    if isinstance(error, IdempotencyError):
        return False
    if isinstance(error, (NodeRetiredError, *_REFUSALS)):
        return True
    return first and isinstance(error, UnavailableError) and error.outcome == Outcome.UNCHANGED


def _fullness(view: NodeView) -> float:
    load = view.load or NodeLoad()
    return load.sandboxes / max(load.sandboxes_max, 1)


async def _all(work: Callable[[NodeId], object], nodes: Sequence[NodeId]) -> None:
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(work(node))  # type: ignore[arg-type]
