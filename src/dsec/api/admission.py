"""Whether a create may be: the policies and the caps of its project and of those above it. Then the node decides."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from dsec.api.explaining import cap_verdict, caps_of_levels, group_places, node_verdicts
from dsec.cluster.fleet import Fleet
from dsec.cluster.placement import Refusal
from dsec.cluster.rpc import Rpc
from dsec.core.errors import DeadlineError, DsecError, ForbiddenError, Outcome, QuotaError, UnavailableError
from dsec.core.ids import NodeId, SandboxId, node_of
from dsec.core.spec import SandboxSpec
from dsec.iam.directory import Directory
from dsec.iam.ledger import Charge, Ledger, LocalSlices, SliceStore
from dsec.iam.policies import check_policies, check_ttl
from dsec.iam.view import Rules
from dsec.wire.codec import pack, unpack
from dsec.wire.errors import body_of
from dsec.wire.groups import GroupRequest, create_request, levels
from dsec.wire.iam import Holdings, HoldingsQuery
from dsec.wire.node import Caller, Method, Right
from dsec.wire.plans import CreatePlan, Explanation, GroupExplanation, PlanRequest
from dsec.wire.records import CreateRequest, Sandbox, SandboxRef
from dsec.wire.snapshots import Fork

_TIMEOUT_S: Final = 10.0
_EXPLAINED_AT_ONCE: Final = 4  # members of a group: of each all nodes are asked
_ABSENT_S: Final = 5.0
_HOLDINGS_S: Final = 3.0  # a node that does not say what it has holds up creates of capped projects, not longer
# Within one process: a create whose caller was told nothing is among what the node has, or will never be.
_UNKNOWN_S: Final = 1.0
_SELF: Final = Caller(principal="api", project="/", rights=frozenset({Right.READ, Right.ADMIN}))

T = TypeVar("T")


class Admission:
    def __init__(
        self,
        directory: Directory,
        rpc: Rpc,
        fleet: Fleet,
        *,
        slices: SliceStore | None = None,
    ) -> None:
        """`slices`: shared with other replicas; None: there are none."""
        self._directory = directory
        self._rpc = rpc
        self._fleet = fleet
        if slices is None:
            self.ledger = Ledger(LocalSlices(), self.holdings, unknown_s=_UNKNOWN_S)
        else:
            self.ledger = Ledger(slices, self.holdings)

    def nodes(self) -> Sequence[NodeId]:
        return self._fleet.nodes()

    async def create(
        self, body: CreateRequest, work: Callable[[], Coroutine[Any, Any, T]], caller: Caller, key: str | None
    ) -> T:
        """`work` is the call to the node. What was made before for the same key is answered again, whatever the rules
        have become. Raises ForbiddenError, QuotaError, and what `work` raises."""
        rules = self._directory.rules(caller.project)
        if not rules:
            return await work()
        request = PlanRequest(create=body)
        spec = body.spec
        if body.snapshot is not None:
            spec = (await self._plan(self._fleet.nodes()[0], request, caller, None)).spec

        async def is_known() -> bool:
            node = None if key is None else await self._fleet.node_of_key(caller.project, key)
            return node is not None and await self._is_known(node, request, caller, key)

        return await self._admitted(rules, spec, 1, work, is_known)

    async def take(self, body: CreateRequest, count: int, caller: Caller) -> Charge:
        """For so many alike, all of them or none. Raises what `create` raises of itself; what was made before for their
        keys is nothing of its business."""
        rules = self._directory.rules(caller.project)
        if not rules:
            return Charge(self.ledger, [], count)
        check_policies(body.spec, rules.policies)
        return await self.ledger.take(rules.quotas, body.spec, count=count)

    async def fork(self, fork: Fork, work: Callable[[], Coroutine[Any, Any, T]], caller: Caller, key: str | None) -> T:
        """The children are of the sandbox's project, and count there."""
        if not self._directory.ruled:
            return await work()
        node, request = node_of(SandboxId(fork.sandbox)), PlanRequest(fork=fork)
        plan = await self._plan(node, request, caller, None)
        rules, count = self._directory.rules(plan.project), fork.request.count
        return await self._admitted(rules, plan.spec, count, work, lambda: self._is_known(node, request, caller, key))

    async def explain(self, body: CreateRequest, caller: Caller) -> Explanation:
        """What `create` would do now, with the same checks. Raises what is wrong with the request itself."""
        return (await self._explain(body, caller))[0]

    async def explain_group(self, asked: GroupRequest, caller: Caller) -> GroupExplanation:
        """The same of a group: where each member would go, or which of them goes nowhere, and why."""
        turn = asyncio.Semaphore(_EXPLAINED_AT_ONCE)

        async def one(name: str) -> tuple[Explanation, list[CreatePlan], dict[NodeId, Refusal]]:
            async with turn:
                return await self._explain(create_request(asked, name), caller)

        found = dict(zip(asked.members, await asyncio.gather(*map(one, asked.members)), strict=True))
        members = {name: explanation for name, (explanation, _, _) in found.items()}
        caps = caps_of_levels([cap for name in level for cap in members[name].caps] for level in levels(asked))
        nodes, missing, why = group_places(
            {name: plans for name, (_, plans, _) in found.items()},
            {name: explanation.spec for name, explanation in members.items()},
            caller.project,
            self._fleet.bursts,
            {node: why for _, _, closed in found.values() for node, why in closed.items()},
            linked=bool(asked.links),
        )
        forbidden = any(explanation.policy is not None for explanation in members.values())
        return GroupExplanation(
            project=caller.project,
            would_be_made=missing is None and not forbidden and all(cap.fits for cap in caps),
            nodes=nodes,
            missing=missing,
            why=why,
            caps=caps,
            members=members,
        )

    async def _explain(
        self, body: CreateRequest, caller: Caller
    ) -> tuple[Explanation, list[CreatePlan], dict[NodeId, Refusal]]:
        """With why nothing new goes to nodes, of those that do not answer, too."""
        request, asked = PlanRequest(create=body), self._fleet.nodes()
        answers = await asyncio.gather(
            *(self._plan(node, request, caller, None) for node in asked), return_exceptions=True
        )
        plans = [answer for answer in answers if isinstance(answer, CreatePlan)]
        closed = {
            node: Refusal("unavailable", f"it does not answer: {answer.message}", answer.hint)
            for node, answer in zip(asked, answers, strict=True)
            if isinstance(answer, (UnavailableError, DeadlineError))
        } | dict(self._fleet.closed())
        if not plans:
            self._check_explainable(body, [answer for answer in answers if isinstance(answer, BaseException)], closed)
        spec, rules = plans[0].spec if plans else body.spec, self._directory.rules(caller.project)
        policy = None
        try:
            check_policies(spec, rules.policies)
        except ForbiddenError as error:
            policy = body_of(error)
        caps = [cap_verdict(use, spec) for use in await self.ledger.uses(rules.quotas)]
        nodes = node_verdicts(plans, spec, caller.project, self._fleet.bursts, closed)
        explanation = Explanation(
            project=caller.project,
            would_be_made=policy is None and all(cap.fits for cap in caps) and any(node.fits for node in nodes),
            spec=spec,
            policy=policy,
            caps=caps,
            nodes=nodes,
        )
        return explanation, plans, closed

    def _check_explainable(
        self, body: CreateRequest, errors: list[BaseException], closed: dict[NodeId, Refusal]
    ) -> None:
        """Raises what is wrong where no node has said what it would do, and that is no answer by itself."""
        wrong = [error for error in errors if not isinstance(error, (UnavailableError, DeadlineError))]
        if wrong:
            raise wrong[0]
        if body.snapshot is not None or not closed:
            first = next(iter(closed.items()), None)
            text = "no node of the cluster is there" + (f": node {first[0]}: {first[1].text}" if first else "")
            raise UnavailableError(
                text, outcome=Outcome.UNCHANGED, hint=first[1].hint if first else None, retry_after_s=1.0
            )

    async def check_ttl(self, sandbox: SandboxId, ttl_running_s: float | None, caller: Caller) -> None:
        """Raises ForbiddenError."""
        if self._directory.ruled:
            body = pack(SandboxRef(sandbox))
            answer = await self._rpc.call(node_of(sandbox), Method.GET, body, caller=caller, timeout_s=_TIMEOUT_S)
            check_ttl(ttl_running_s, self._directory.rules(unpack(answer, Sandbox).project).policies)

    async def holdings(self, projects: Sequence[str]) -> dict[str, dict[str, int]]:
        """What the sandboxes of each of these projects, and of those below, have now."""
        body = pack(HoldingsQuery(tuple(projects)))
        answers = await asyncio.gather(
            *(
                self._rpc.call(node, Method.HOLDINGS, body, caller=_SELF, timeout_s=_HOLDINGS_S)
                for node in self._fleet.nodes()
            )
        )
        total: dict[str, Counter[str]] = {}
        for answer in answers:
            for project, amounts in unpack(answer, Holdings).by_project.items():
                total.setdefault(project, Counter()).update(amounts)
        return {project: dict(amounts) for project, amounts in total.items()}

    async def left_of(self, project: str, *, strict: bool) -> dict[str, int]:
        """What there is of it and below it: sandboxes, snapshots, volumes. `strict`: raises UnavailableError where a
        node that may have some does not say."""
        absent = self._fleet.absent() if strict else ()
        if absent:
            raise UnavailableError(
                f"node {absent[0]} may have something of {project}, and does not answer",
                outcome=Outcome.UNCHANGED,
                hint="wait until it is back; `dsec cluster retire` says that it never comes",
                retry_after_s=_ABSENT_S,
            )
        body = pack(HoldingsQuery((project,), kept=True))
        calls = [
            self._rpc.call(node, Method.HOLDINGS, body, caller=_SELF, timeout_s=_HOLDINGS_S)
            for node in self._fleet.nodes()
        ]
        total: Counter[str] = Counter()
        for answer in await asyncio.gather(*calls, return_exceptions=not strict):
            if isinstance(answer, bytes):
                found = unpack(answer, Holdings)
                total.update(found.kept.get(project, {}))
                total["sandboxes"] += found.by_project.get(project, {}).get("sandboxes", 0)
            elif isinstance(answer, BaseException) and not isinstance(answer, DsecError):
                raise answer
        return +total

    async def close(self) -> None:
        await self.ledger.close()

    async def _admitted(
        self,
        rules: Rules,
        spec: SandboxSpec,
        count: int,
        work: Callable[[], Coroutine[Any, Any, T]],
        is_known: Callable[[], Coroutine[Any, Any, bool]],
    ) -> T:
        try:
            check_policies(spec, rules.policies)
            charge = await self.ledger.take(rules.quotas, spec, count=count)
        except (ForbiddenError, QuotaError):
            if await is_known():
                return await work()
            raise
        try:
            answer = await work()
        except DsecError as error:
            if error.outcome is Outcome.UNKNOWN:
                charge.leave()
            else:
                charge.settle()
            raise
        except BaseException:
            charge.leave()
            raise
        charge.settle()
        return answer

    async def _plan(self, node: NodeId, request: PlanRequest, caller: Caller, key: str | None) -> CreatePlan:
        body = pack(request)
        call = self._rpc.call(node, Method.CREATE_PLAN, body, caller=caller, timeout_s=_TIMEOUT_S, key=key)
        return unpack(await call, CreatePlan)

    async def _is_known(self, node: NodeId, request: PlanRequest, caller: Caller, key: str | None) -> bool:
        return key is not None and (await self._plan(node, request, caller, key)).known
