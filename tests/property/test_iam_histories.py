"""Whatever is done, by whomever, in whatever order: nobody gives what they do not have."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.core.errors import AuthError, DsecError
from dsec.core.limits import IAM_STALE_S
from dsec.iam.audit import Audit
from dsec.iam.peers import Peer, local_principal
from dsec.iam.principals import ORDER, Principal, Right
from dsec.iam.projects import lineage, parent_of
from dsec.iam.service import Iam
from dsec.iam.store import Batch, Changes, Entry, OvertakenError
from dsec.wire.iam import Caps, Policy, Quota

T = TypeVar("T")

ROOT_USER = local_principal(Peer(1, 0, 0))
PROJECTS = ("/", "/a", "/a/x", "/a/x/y", "/b", "/b/x")
NAMES = ("p", "q")
RIGHTS = tuple(map(str, Right))
ACTS = ("token", "token", "grant", "grant", "rotate", "revoke", "ungrant", "rm", "mk", "rmp", "rules", "time")
Powers = dict[str, frozenset[tuple[str, str]]]


class MemoryStore:
    """What a key-value store with atomic batches does, and nothing else. Readers see it when they look."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 0

    def changes(self, after: int) -> Changes | None:
        if after == self.revision:
            return None
        newer = sorted((e for e in self.entries.values() if e.revision > after), key=lambda e: e.revision)
        return Changes(self.revision, newer)

    async def apply(self, batch: Batch) -> int:
        for key, wanted in batch.expect.items():
            found = self.entries.get(key)
            if wanted != (found.revision if found is not None and found.value is not None else 0):
                raise OvertakenError(key)
        for key, value in batch.puts.items():
            self.revision += 1
            self.entries[key] = Entry(key, self.revision, value)
        return self.revision

    def close(self) -> None:
        """Nothing is open."""


class Clock:
    def __init__(self) -> None:
        self.wall = 1_000.0
        self.monotonic = 0.0

    def wall_s(self) -> float:
        return self.wall

    def monotonic_s(self) -> float:
        return self.monotonic


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Nothing waits for anything here."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    raise AssertionError("it waits")


class World:
    """Two replicas on one store, and all that hold tokens."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.store = MemoryStore()
        self.clock = Clock()
        self.replicas = [drive(Iam.on(self.store, cast(Audit, None), clock=self.clock)) for _ in range(2)]
        self.texts: list[str] = []

    def powers(self) -> Powers:
        """Each token → every right that it gives, over every project there might be."""
        self.clock.monotonic += IAM_STALE_S
        found: Powers = {}
        for text in self.texts:
            with suppress(AuthError):
                who = self.replicas[0].directory.authenticate(text)
                found[text] = frozenset((p, r) for p in PROJECTS for r in RIGHTS if who.best(p, r) is not None)
        return found

    def quotas(self) -> dict[str, Any]:
        rows = self.replicas[0].projects.visible(by=ROOT_USER)
        return {row.path: (row.quota, row.policy) for row in rows}

    def step(self) -> None:
        iam = self.draw.choice(self.replicas)
        who = self.somebody(iam)
        before, laid_down = self.powers(), self.quotas()
        mine = {(p, r) for p in PROJECTS for r in RIGHTS if who.best(p, r) is not None}
        what = self.draw.choice(ACTS)
        if what == "time":
            self.clock.wall += self.draw.choice((1, 20, -3))  # it may step back, and what was over is not
            return
        if what == "rotate" and who.token is not None:
            mine |= self.powers_of_token(who.token)  # a holder has all of it, whichever project they act in
        with suppress(DsecError):
            self.act(what, iam, who)
        after = self.powers()
        for text, powers in after.items():
            gained = powers - before.get(text, frozenset())
            self.check_gain(what, gained, mine, who)
        for path, laid in self.quotas().items():
            if path in laid_down and laid != laid_down[path]:
                above = parent_of(path)
                assert who.best(above or "/", Right.MANAGE if above else Right.ADMIN) is not None
        self.check_chains()

    def check_gain(
        self, what: str, gained: frozenset[tuple[str, str]], mine: set[tuple[str, str]], who: Principal
    ) -> None:
        assert gained <= mine, f"{who.id} has given {sorted(gained - mine)}"
        if gained and who.token is not None:
            # To hand anything on takes the right manage there; to renew one's own takes nothing.
            own = {(p, r) for p, r in gained if (p, Right.MANAGE) not in mine}
            assert own == set() or what == "rotate", f"{who.id} manages nothing of {sorted(own)}"

    def powers_of_token(self, id: str) -> set[tuple[str, str]]:
        view = self.replicas[0].directory.view
        token = view.token(id)
        held = () if token is None else view.held_by(token, self.clock.wall)
        return {(p, r) for p in PROJECTS for r in RIGHTS if any(item.covers(p, r) for item in held)}

    def check_chains(self) -> None:
        """What is in force stands on what is in force, and is within it."""
        view, now = self.replicas[0].directory.view, self.clock.wall
        for row in view.rows.values():
            if getattr(row, "parent", None) is None:
                continue
            until = view.in_force(row, now)  # type: ignore[arg-type]
            if until is None:
                continue
            parent = view.grant(row.parent)  # type: ignore[union-attr,arg-type]
            assert parent is not None
            above = view.in_force(parent, now)
            assert above is not None
            assert until <= above
            assert parent.project in lineage(row.project)  # type: ignore[union-attr]
            assert ORDER[parent.right] >= max(ORDER[Right.MANAGE], ORDER[row.right])  # type: ignore[union-attr]

    def somebody(self, iam: Iam) -> Principal:
        """Whom this replica takes them for: its memory may be behind by IAM_STALE_S."""
        if not self.texts or self.draw.random() < 0.1:
            return ROOT_USER
        try:
            who = iam.directory.authenticate(self.draw.choice(self.texts))
            inside = self.draw.choice((None, None, *PROJECTS))
            return iam.directory.acting_in(who, inside)
        except DsecError:
            return ROOT_USER if self.draw.random() < 0.2 else Principal("nobody")

    def act(self, what: str, iam: Iam, who: Principal) -> None:
        pick = self.draw.choice
        project, ttl = pick(PROJECTS), pick((None, 5.0, 50.0))
        name = pick((*NAMES, *(f"{n}@{p}" for n in NAMES for p in PROJECTS)))
        match what:
            case "token":
                self.texts.append(
                    drive(iam.tokens.create(name, project=project, right=pick(RIGHTS), ttl_s=ttl, by=who))[0]
                )
            case "grant":
                drive(iam.delegation.grant(name, project=project, right=pick(RIGHTS), ttl_s=ttl, by=who))
            case "rotate":
                tokens = [who.token or "", *(row.id for row in iam.tokens.list(by=ROOT_USER))]
                self.texts.append(drive(iam.tokens.rotate(pick(tokens), overlap_s=pick((0, 9)), ttl_s=ttl, by=who))[0])
            case "revoke":
                drive(iam.tokens.revoke(pick([row.id for row in iam.tokens.list(by=ROOT_USER)] or ["x"]), by=who))
            case "ungrant":
                grants = [row.id for row, _ in iam.delegation.grants(by=ROOT_USER)]
                drive(iam.delegation.revoke(pick(grants or ["x"]), by=who))
            case "rm":
                drive(iam.projects.remove(project, by=who))
            case "mk":
                drive(iam.projects.create(project, by=who))
            case "rmp":
                drive(iam.delegation.remove_principal(name, by=who))
            case "rules":
                quota = Quota(sandboxes=pick((None, 1, 5)), substrates=pick(({}, {"container": Caps(cpu=1)})))
                drive(iam.projects.lay_down(project, quota=quota, policy=pick((None, Policy(cpu_max=1))), by=who))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(10, 60))
def test_no_history_gives_anybody_what_its_giver_did_not_have(draw: random.Random, steps: int) -> None:
    world = World(draw)
    for _ in range(3):
        world.texts.append(
            drive(
                world.replicas[0].tokens.create(
                    draw.choice(NAMES), project=draw.choice(PROJECTS[1:]), right="manage", by=ROOT_USER
                )
            )[0]
        )
    for _ in range(steps):
        world.step()


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(20, 200))
def test_no_long_history_does_either(draw: random.Random, steps: int) -> None:
    test_no_history_gives_anybody_what_its_giver_did_not_have.hypothesis.inner_test(draw, steps)  # type: ignore[attr-defined]
