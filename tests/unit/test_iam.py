"""Tokens, principals, grants, projects: who may ask, and who may give what."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.core.errors import (
    AuthError,
    CapacityError,
    ConflictError,
    DsecError,
    ForbiddenError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
)
from dsec.core.limits import IAM_STALE_S
from dsec.iam import directory as directory_module
from dsec.iam import store as store_module
from dsec.iam.peers import Peer, local_principal
from dsec.iam.principals import ALL_RIGHTS, Principal
from dsec.iam.service import Iam
from dsec.iam.store import Batch, OvertakenError, SqliteIamStore
from dsec.wire.iam import Policy, Quota

ADMIN = local_principal(Peer(1, 0, 0))


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def wall_s(self) -> float:
        return self.now

    def monotonic_s(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def iam(tmp_path: Path, clock: Clock) -> AsyncIterator[Iam]:
    opened = await Iam.open(tmp_path, clock=clock)
    yield opened
    await opened.close()


async def holder(
    iam: Iam, name: str, project: str, right: str = "use", *, by: Principal = ADMIN, ttl_s: float | None = None
) -> Principal:
    """One that has shown a token."""
    text, _ = await iam.tokens.create(name, project=project, right=right, ttl_s=ttl_s, by=by)
    return iam.directory.authenticate(text)


# ---- tokens --------------------------------------------------------------------------------------


async def test_a_token_is_its_principal(iam: Iam) -> None:
    text, token = await iam.tokens.create("ci", project="/team", right="use", by=ADMIN)

    who = iam.directory.authenticate(text)

    assert (who.name, who.id, who.project, who.token) == ("ci", "ci@/team", "/team", token.id)
    assert who.rights == {"read", "use"}
    assert text.startswith("dsec_")
    assert len(text) >= 48


class Uncompared(str):
    """A text that may be hashed to something else, and nothing more."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared by itself, which takes the longer the more of it is right")

    __hash__ = __eq__  # type: ignore[assignment]


async def test_a_token_is_compared_by_its_digest_and_in_constant_time(
    iam: Iam, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, _ = await iam.tokens.create("ci", project="/", right="use", by=ADMIN)
    assert iam.directory.authenticate(Uncompared(text)).name == "ci"

    monkeypatch.setattr("dsec.iam.directory.hmac.compare_digest", lambda one, other: False)

    with pytest.raises(AuthError):  # nothing else decides
        iam.directory.authenticate(text)


async def test_tokens_survive_a_restart_and_are_not_in_the_file(tmp_path: Path, clock: Clock, iam: Iam) -> None:
    text, _ = await iam.tokens.create("ci", project="/team", right="read", by=ADMIN)
    revoked, gone = await iam.tokens.create("old", project="/team", right="read", by=ADMIN)
    await iam.tokens.revoke(gone.id, by=ADMIN)

    again = await Iam.open(tmp_path, clock=clock)
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())

    assert again.directory.authenticate(text).id == "ci@/team"
    with pytest.raises(AuthError, match="revoked"):
        again.directory.authenticate(revoked)
    assert text.encode() not in stored
    assert text.removeprefix("dsec_").encode() not in stored
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in ("iam.db", "audit.db"))
    await again.close()


@pytest.mark.parametrize("text", ["", "dsec_", "dsec_" + "a" * 43, "nope", "dsec_" + "a" * 10_000, "dsec_\udcff"])
async def test_other_texts_are_no_token(iam: Iam, text: str) -> None:
    await iam.tokens.create("ci", project="/", right="read", by=ADMIN)

    with pytest.raises(AuthError, match="not valid"):
        iam.directory.authenticate(text)


async def test_a_token_ends_with_its_time_and_with_its_makers(iam: Iam, clock: Clock) -> None:
    text, _ = await iam.tokens.create("ci", project="/t", right="read", ttl_s=60, by=ADMIN)
    short = await holder(iam, "short", "/", "admin", ttl_s=5)
    _, bounded = await iam.tokens.create("x", project="/t", right="read", ttl_s=60, by=short)

    assert bounded.expires_at == clock.now + 5
    iam.directory.authenticate(text)
    clock.now += 60
    with pytest.raises(AuthError, match="expired"):
        iam.directory.authenticate(text)


async def test_revoking_takes_effect_at_once_and_may_be_repeated(iam: Iam) -> None:
    text, token = await iam.tokens.create("ci", project="/t", right="read", by=ADMIN)

    first = await iam.tokens.revoke(token.id, by=ADMIN)
    second = await iam.tokens.revoke(token.id, by=ADMIN)

    assert first.revoked_at == second.revoked_at is not None
    with pytest.raises(AuthError, match="revoked"):
        iam.directory.authenticate(text)


async def test_another_replica_knows_of_a_revocation_within_two_seconds(tmp_path: Path, clock: Clock, iam: Iam) -> None:
    other = await Iam.open(tmp_path, clock=clock)
    text, token = await iam.tokens.create("ci", project="/t", right="read", by=ADMIN)
    clock.now += IAM_STALE_S
    assert other.directory.authenticate(text).name == "ci"

    await iam.tokens.revoke(token.id, by=ADMIN)
    clock.now += IAM_STALE_S

    assert IAM_STALE_S <= 2
    with pytest.raises(AuthError, match="revoked"):
        other.directory.authenticate(text)
    await other.close()


async def test_a_token_is_replaced_without_a_gap(iam: Iam, clock: Clock) -> None:
    old, kept = await iam.tokens.create("ci", project="/team", right="use", by=ADMIN)

    new, token = await iam.tokens.rotate(kept.id, overlap_s=30, by=ADMIN)

    was, now = iam.directory.authenticate(old), iam.directory.authenticate(new)
    assert (was.id, was.held) == (now.id, now.held)
    clock.now += 30
    assert iam.directory.authenticate(new).token == token.id
    with pytest.raises(AuthError, match="expired"):
        iam.directory.authenticate(old)


async def test_who_holds_a_token_may_rotate_it_and_gains_no_time(iam: Iam, clock: Clock) -> None:
    text, token = await iam.tokens.create("ci", project="/team", right="read", ttl_s=100, by=ADMIN)
    who = iam.directory.authenticate(text)
    stranger = await holder(iam, "x", "/other", "manage")

    _, new = await iam.tokens.rotate(token.id, overlap_s=0, ttl_s=1_000, by=who)

    assert new.expires_at == clock.now + 100
    with pytest.raises(AuthError, match="expired"):
        iam.directory.authenticate(text)
    with pytest.raises(NotFoundError):
        await iam.tokens.rotate(new.id, overlap_s=0, by=stranger)


async def test_revoking_a_token_ends_what_a_thief_has_made_of_it(iam: Iam) -> None:
    text, token = await iam.tokens.create("ci", project="/team", right="use", by=ADMIN)
    other, _ = await iam.tokens.create("ci", project="/team", right="use", by=ADMIN)
    stolen = text
    for _ in range(3):
        thief = iam.directory.authenticate(stolen)
        stolen, _ = await iam.tokens.rotate(thief.token or "", overlap_s=100, by=thief)

    await iam.tokens.revoke(token.id, by=ADMIN)

    for bad in (text, stolen):
        with pytest.raises(AuthError, match="revoked"):
            iam.directory.authenticate(bad)
    assert iam.directory.authenticate(other).name == "ci"


async def test_tokens_that_have_ended_make_room_when_there_are_too_many(
    tmp_path: Path, iam: Iam, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(directory_module._MOST, "tokens", 3)
    lasting, _ = await iam.tokens.create("lasting", project="/", right="use", by=ADMIN)
    short, _ = await iam.tokens.create("short", project="/", right="use", ttl_s=10, by=ADMIN)
    _, revoked = await iam.tokens.create("revoked", project="/", right="use", by=ADMIN)
    await iam.tokens.revoke(revoked.id, by=ADMIN)
    clock.now += 11

    for _ in range(2):
        await iam.tokens.create("new", project="/", right="use", by=ADMIN)
    with pytest.raises(CapacityError):
        await iam.tokens.create("one too many", project="/", right="use", by=ADMIN)

    names = ["lasting@/", "new@/", "new@/"]
    assert sorted(token.principal for token in iam.tokens.list(by=ADMIN)) == names
    assert iam.directory.authenticate(lasting).name == "lasting"
    with pytest.raises(AuthError):
        iam.directory.authenticate(short)
    again = await Iam.open(tmp_path, clock=clock)
    assert sorted(token.principal for token in again.tokens.list(by=ADMIN)) == names
    await again.close()


async def test_a_token_of_a_project_that_has_many_is_rotated_when_some_are_over(
    iam: Iam, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(directory_module._MOST, "tokens", 6)
    text, token = await iam.tokens.create("ci", project="/a", right="use", by=ADMIN)
    for _ in range(2):
        await iam.tokens.create("short", project="/a", right="use", ttl_s=10, by=ADMIN)
    clock.now += 11

    _, new = await iam.tokens.rotate(token.id, overlap_s=60, by=iam.directory.authenticate(text))
    assert new.family == token.id


async def test_one_project_leaves_room_for_others(iam: Iam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(directory_module._MOST, "tokens", 8)
    agent = await holder(iam, "agent", "/a/b", "manage")

    for _ in range(3):
        await iam.tokens.create("x", project="/a/b", right="read", by=agent)
    with pytest.raises(CapacityError, match="/a and the projects below"):
        await iam.tokens.create("x", project="/a/b", right="read", by=agent)
    for _ in range(4):
        await iam.tokens.create("x", project="/other", right="read", by=ADMIN)


async def test_nobody_gives_more_than_they_have(iam: Iam) -> None:
    lead = await holder(iam, "lead", "/team", "manage")
    user = await holder(iam, "user", "/team", "use")
    await iam.projects.create("/other", by=ADMIN)

    for project in ("/", "/other", "/teams"):
        with pytest.raises(NotFoundError if project != "/" else (NotFoundError, ForbiddenError)):
            await iam.tokens.create("x", project=project, right="read", by=lead)
    with pytest.raises(ForbiddenError) as refused:
        await iam.tokens.create("x", project="/team", right="read", by=user)
    assert refused.value.detail == {"right": "manage", "project": "/team", "held": "use"}
    with pytest.raises(ForbiddenError):
        await iam.tokens.create("x", project="/", right="admin", by=await holder(iam, "m", "/", "manage"))
    with pytest.raises(InvalidArgumentError, match="whole service"):
        await iam.tokens.create("x", project="/team", right="admin", by=ADMIN)
    with pytest.raises(InvalidArgumentError):
        await iam.tokens.create("x", project="team", right="read", by=ADMIN)
    await iam.tokens.create("x", project="/team/sub", right="manage", by=lead)


async def test_tokens_of_other_projects_are_not_seen(iam: Iam) -> None:
    _, theirs = await iam.tokens.create("x", project="/theirs", right="read", by=ADMIN)
    _, ours = await iam.tokens.create("x", project="/ours/run", right="read", by=ADMIN)
    lead = await holder(iam, "lead", "/ours", "manage")

    assert {token.id for token in iam.tokens.list(by=lead)} == {ours.id, lead.token}
    with pytest.raises(NotFoundError):
        await iam.tokens.revoke(theirs.id, by=lead)


async def test_a_change_that_cannot_be_written_does_not_count(iam: Iam) -> None:
    text, token = await iam.tokens.create("x", project="/t", right="read", by=ADMIN)
    iam.directory._store._writer.close()  # type: ignore[attr-defined]

    with pytest.raises(StorageError):
        await iam.tokens.revoke(token.id, by=ADMIN)
    with pytest.raises(StorageError):
        await iam.tokens.create("y", project="/t", right="read", by=ADMIN)
    assert iam.directory.authenticate(text)
    assert len(iam.tokens.list(by=ADMIN)) == 1


# ---- the store -----------------------------------------------------------------------------------


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_bytes(b"not a database" * 100)
    with sqlite3.connect(tmp_path / "new.db") as later:
        later.execute("PRAGMA user_version = 99")
    later.close()

    for name in ("bad.db", "new.db", "missing/iam.db"):
        with pytest.raises(StorageError):
            SqliteIamStore.open(tmp_path / name)


async def test_tokens_of_the_first_version_are_good_for_what_they_were(tmp_path: Path, clock: Clock) -> None:
    from dsec.iam.secrets import digest_of, new_token

    texts = [new_token() for _ in range(4)]
    rows = [
        ("tok_1", digest_of(texts[0]), "root", "/", "admin read use", 1.0, None, None),
        ("tok_2", digest_of(texts[1]), "ci", "/team/run", "read use", 2.0, None, None),
        ("tok_3", digest_of(texts[2]), "ci", "/team/run", "read", 3.0, 1_010.0, None),
        ("tok_4", digest_of(texts[3]), "old", "/team", "read", 4.0, None, 5.0),
    ]
    with sqlite3.connect(tmp_path / "iam.db") as db:
        db.execute(
            "CREATE TABLE tokens (id TEXT PRIMARY KEY, hash BLOB NOT NULL UNIQUE, principal TEXT NOT NULL, "
            "project TEXT NOT NULL, rights TEXT NOT NULL, created_at REAL NOT NULL, expires_at REAL, revoked_at REAL)"
        )
        db.executemany("INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        db.execute("PRAGMA user_version = 1")
    db.close()

    iam = await Iam.open(tmp_path, clock=clock)

    ask = iam.directory.authenticate
    assert (ask(texts[0]).project, ask(texts[0]).rights) == ("/", ALL_RIGHTS)
    assert (ask(texts[1]).project, ask(texts[1]).rights) == ("/team/run", {"read", "use"})
    assert ask(texts[2]).rights == {"read"}
    with pytest.raises(AuthError, match="revoked"):
        ask(texts[3])
    clock.now = 1_010
    with pytest.raises(AuthError, match="expired"):
        ask(texts[2])
    assert [row.path for row in iam.projects.visible(by=ADMIN)] == ["/", "/team", "/team/run"]
    await iam.close()


async def test_a_batch_happens_whole_or_not_at_all(tmp_path: Path) -> None:
    store = SqliteIamStore.open(tmp_path / "iam.db")
    first = await store.apply(Batch({"project/a": b"1", "project/b": b"1"}, {"project/a": 0}))

    with pytest.raises(OvertakenError):
        await store.apply(Batch({"project/a": b"2", "project/c": b"2"}, {"project/b": 99}))
    with pytest.raises(OvertakenError):
        await store.apply(Batch({"project/a": b"2"}, {"project/a": 0}))

    found = store.changes(0)
    assert found is not None
    assert {entry.key: entry.value for entry in found.entries} == {"project/a": b"1", "project/b": b"1"}
    assert found.revision == first
    assert store.changes(first) is None
    store.close()


async def test_a_replica_that_is_far_behind_reads_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "IAM_CHANGES_KEPT", 3)
    store, late = (SqliteIamStore.open(tmp_path / "iam.db") for _ in range(2))
    behind = await store.apply(Batch({"project/kept": b"1", "project/gone": b"1"}))
    for number in range(5):
        await store.apply(Batch({f"project/{number}": b"1"}))
        await store.apply(Batch({f"project/{number}": None, "project/gone": None}))

    found = late.changes(behind)

    assert found is not None
    assert found.whole
    assert [entry.key for entry in found.entries] == ["project/kept"]
    store.close()
    late.close()


# ---- grants and projects -------------------------------------------------------------------------


async def test_what_was_given_goes_with_what_it_was_given_by(iam: Iam) -> None:
    lead = await holder(iam, "lead", "/team", "manage")
    agent = await holder(iam, "agent", "/team/run", "manage", by=lead)
    text, _ = await iam.tokens.create("worker", project="/team/run/w", right="use", by=agent)
    iam.directory.authenticate(text)

    await iam.delegation.revoke(lead.held[0].grant or "", by=ADMIN)

    with pytest.raises(AuthError, match="revoked"):
        iam.directory.authenticate(text)
    in_force = {row.principal: alive for row, alive in iam.delegation.grants(by=ADMIN)}
    assert in_force == {"agent@/team/run": False, "worker@/team/run/w": False}


async def test_what_was_given_goes_with_its_giver(iam: Iam) -> None:
    await holder(iam, "lead", "/team", "manage")
    text, _ = await iam.tokens.create("lead", project="/team", right="manage", by=ADMIN)
    worker, _ = await iam.tokens.create("worker", project="/team/run", right="use", by=iam.directory.authenticate(text))

    await iam.delegation.remove_principal("lead@/team", by=ADMIN)
    again = await holder(iam, "lead", "/team", "manage")

    assert again.id == "lead@/team"
    for gone in (text, worker):
        with pytest.raises(AuthError):
            iam.directory.authenticate(gone)


async def test_a_principal_may_have_rights_over_several_projects_and_a_token_for_each(iam: Iam) -> None:
    ours, _ = await iam.tokens.create("ci", project="/a", right="use", by=ADMIN)
    lead = await holder(iam, "lead", "/b", "manage")

    theirs, _ = await iam.tokens.create("ci@/a", project="/b", right="read", by=lead)

    one, other = iam.directory.authenticate(ours), iam.directory.authenticate(theirs)
    assert (one.id, one.project, one.rights) == ("ci@/a", "/a", {"read", "use"})
    assert (other.id, other.project, other.rights) == ("ci@/a", "/b", {"read"})
    with pytest.raises(NotFoundError):
        iam.directory.acting_in(other, "/a")
    with pytest.raises(NotFoundError):
        await iam.tokens.create("new@/a", project="/b", right="read", by=lead)  # whose principals are of /a
    await iam.delegation.remove_principal("ci@/a", by=ADMIN)
    for text in (ours, theirs):
        with pytest.raises(AuthError):
            iam.directory.authenticate(text)


async def test_a_token_that_another_project_made_for_a_principal_does_not_reach_its_grants_elsewhere(iam: Iam) -> None:
    await holder(iam, "ci", "/a", "manage")
    lead = await holder(iam, "lead", "/b", "manage")
    theirs = await holder(iam, "ci@/a", "/b", "manage", by=lead)
    reader = await holder(iam, "ci", "/a", "read")
    (own,) = [row for row, _ in iam.delegation.grants(by=ADMIN) if (row.principal, row.project) == ("ci@/a", "/a")]

    assert {row.project for row, _ in iam.delegation.grants(by=theirs)} == {"/b"}
    assert own.id in {row.id for row, _ in iam.delegation.grants(by=reader)}
    with pytest.raises(NotFoundError):
        await iam.delegation.revoke(own.id, by=theirs)
    with pytest.raises(NotFoundError):
        await iam.delegation.revoke(own.id, by=reader)
    assert iam.directory.view.grant(own.id) == own


async def test_acting_within_a_project_is_having_no_more_than_that(iam: Iam) -> None:
    await iam.projects.create("/team", by=ADMIN)
    await iam.projects.create("/team/run", by=ADMIN)

    inside = iam.directory.acting_in(ADMIN, "/team")

    assert (inside.project, inside.rights) == ("/team", {"read", "use", "manage"})
    assert [row.path for row in iam.projects.visible(by=inside)] == ["/team", "/team/run"]
    with pytest.raises(NotFoundError):
        await iam.projects.create("/elsewhere", by=inside)
    for missing in ("/nowhere", "/team/nowhere"):
        with pytest.raises(NotFoundError):
            iam.directory.acting_in(ADMIN, missing)


async def test_agents_make_projects_below_their_own_and_hand_on_what_they_have(iam: Iam) -> None:
    agent = await holder(iam, "agent", "/team/run", "manage")

    await iam.projects.create("/team/run/sub", by=agent)
    sub = await holder(iam, "worker", "/team/run/sub", "use", by=agent)

    assert sub.rights == {"read", "use"}
    for path, error in (("/team/other", ForbiddenError), ("/x", NotFoundError), ("/team/run/a/b", NotFoundError)):
        with pytest.raises((error, NotFoundError)):
            await iam.projects.create(path, by=agent)
    with pytest.raises(ConflictError):
        await iam.projects.create("/team/run/sub", by=agent)
    with pytest.raises(ForbiddenError):
        await iam.projects.create("/team/run/sub/x", by=sub)


async def test_rights_are_handed_on_a_bounded_number_of_times(iam: Iam) -> None:
    from dsec.core.limits import DELEGATIONS_MAX

    who = await holder(iam, "m0", "/team", "manage")
    for number in range(DELEGATIONS_MAX):
        who = await holder(iam, f"n{number}", "/team", "manage", by=who)
    with pytest.raises(CapacityError, match="handed on"):
        await holder(iam, "last", "/team", "manage", by=who)


async def test_a_project_goes_with_all_that_is_its_own(iam: Iam, monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = await iam.tokens.create("ci", project="/team/run", right="use", by=ADMIN)
    for _ in range(7):
        await iam.tokens.create("x", project="/team/run", right="read", by=ADMIN)
    kept, _ = await iam.tokens.create("ci", project="/team", right="use", by=ADMIN)
    from dsec.core import limits

    monkeypatch.setattr(limits, "IAM_BATCH_MAX", 4)  # it takes several batches

    with pytest.raises(ConflictError, match="below"):
        await iam.projects.remove("/team", by=ADMIN)
    await iam.projects.remove("/team/run", by=ADMIN)
    monkeypatch.undo()
    await iam.projects.create("/team/run", by=ADMIN)

    with pytest.raises(AuthError):
        iam.directory.authenticate(text)
    assert iam.directory.authenticate(kept).project == "/team"
    assert [row.path for row in iam.projects.visible(by=ADMIN)] == ["/", "/team", "/team/run"]
    assert [token.project for token in iam.tokens.list(by=ADMIN)] == ["/team"]
    assert iam.directory.view.count("tokens", "/team/run") == 0


async def test_nobody_sets_what_binds_their_own_project(iam: Iam) -> None:
    lead = await holder(iam, "lead", "/team", "manage")
    await iam.projects.create("/team/run", by=lead)

    with pytest.raises(ForbiddenError) as refused:
        await iam.projects.lay_down("/team", quota=Quota(sandboxes=10), by=lead)
    assert refused.value.detail["project"] == "/"
    await iam.projects.lay_down("/team", quota=Quota(sandboxes=10), policy=Policy(cpu_max=2), by=ADMIN)
    with pytest.raises(InvalidArgumentError) as above:
        await iam.projects.lay_down("/team/run", quota=Quota(sandboxes=11), by=lead)
    await iam.projects.lay_down("/team/run", quota=Quota(sandboxes=10, cpu=3), by=lead)

    assert above.value.detail == {"project": "/team", "cap": "sandboxes", "limit": 10, "asked": 11}
    rules = iam.directory.rules("/team/run")
    assert rules.quotas == (("/team", Quota(sandboxes=10)), ("/team/run", Quota(sandboxes=10, cpu=3)))
    assert rules.policies == (("/team", Policy(cpu_max=2)),)
    assert iam.directory.ruled
    await iam.projects.lay_down("/team", quota=Quota(), policy=Policy(), by=ADMIN)
    await iam.projects.lay_down("/team/run", quota=Quota(), by=lead)
    assert not iam.directory.ruled


async def test_two_replicas_that_change_the_same_do_not_lose_either(tmp_path: Path, clock: Clock, iam: Iam) -> None:
    import asyncio

    other = await Iam.open(tmp_path, clock=clock)

    done = await asyncio.gather(
        *(
            which.tokens.create("ci", project=f"/t{n % 3}", right="use", by=ADMIN)
            for n in range(6)
            for which in (iam, other)
        ),
        return_exceptions=True,
    )

    made = [each for each in done if not isinstance(each, BaseException)]
    assert all(isinstance(each, DsecError) for each in done if isinstance(each, BaseException))
    iam.directory.refresh()
    assert {token.id for _, token in made} == {token.id for token in iam.tokens.list(by=ADMIN)}
    assert [row.path for row in iam.projects.visible(by=ADMIN)] == ["/", "/t0", "/t1", "/t2"]
    for text, _ in made:
        assert iam.directory.authenticate(text).name == "ci"
    await other.close()
