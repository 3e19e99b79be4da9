"""Tokens, principals, projects: who may ask, and who may give what."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.errors import (
    AuthError,
    CapacityError,
    ForbiddenError,
    InvalidArgumentError,
    NotFoundError,
    StorageError,
)
from dsec.iam import tokens as tokens_module
from dsec.iam.peers import Peer, local_principal, peer_of
from dsec.iam.principals import ALL_RIGHTS, Principal, Right, closed_rights
from dsec.iam.projects import parse_project, reaches
from dsec.iam.tokens import TokenStore
from dsec.wire.node import Right as WireRight

ADMIN = Principal("root", project="/", rights=ALL_RIGHTS)


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
def store(tmp_path: Path, clock: Clock) -> Iterator[TokenStore]:
    opened = TokenStore.open(tmp_path / "iam.db", clock=clock)
    yield opened
    opened.close()


# ---- tokens --------------------------------------------------------------------------------------


async def test_a_token_is_its_principal(store: TokenStore) -> None:
    text, token = await store.create("ci", project="/team", rights={"use"}, by=ADMIN)

    assert store.authenticate(text) == token.principal
    assert token.principal == Principal("ci", project="/team", rights=frozenset({"read", "use"}))
    assert text.startswith("dsec_")
    assert len(text) >= 48


async def test_tokens_survive_a_restart_and_are_not_in_the_file(tmp_path: Path, store: TokenStore) -> None:
    text, token = await store.create("ci", project="/team", rights={"read"}, by=ADMIN)
    revoked, gone = await store.create("old", project="/team", rights={"read"}, by=ADMIN)
    await store.revoke(gone.id, by=ADMIN)
    store.close()

    again = TokenStore.open(tmp_path / "iam.db")
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())

    assert again.authenticate(text) == token.principal
    with pytest.raises(AuthError, match="revoked"):
        again.authenticate(revoked)
    assert text.encode() not in stored
    assert text.removeprefix("dsec_").encode() not in stored
    assert (tmp_path / "iam.db").stat().st_mode & 0o777 == 0o600
    again.close()


@pytest.mark.parametrize("text", ["", "dsec_", "dsec_" + "a" * 43, "nope", "dsec_" + "a" * 10_000, "dsec_\udcff"])
async def test_other_texts_are_no_token(store: TokenStore, text: str) -> None:
    await store.create("ci", project="/", rights={"read"}, by=ADMIN)

    with pytest.raises(AuthError, match="not valid"):
        store.authenticate(text)


async def test_a_token_ends_with_its_time_and_with_its_makers(store: TokenStore, clock: Clock) -> None:
    text, _ = await store.create("ci", project="/t", rights={"read"}, ttl_s=60, by=ADMIN)
    short = Principal("short", project="/", rights=ALL_RIGHTS, expires_at=clock.now + 5)
    _, bounded = await store.create("ci", project="/t", rights={"read"}, ttl_s=60, by=short)

    assert bounded.principal.expires_at == clock.now + 5
    store.authenticate(text)
    clock.now += 60
    with pytest.raises(AuthError, match="expired"):
        store.authenticate(text)


async def test_revoking_takes_effect_at_once_and_may_be_repeated(store: TokenStore) -> None:
    text, token = await store.create("ci", project="/t", rights={"read"}, by=ADMIN)

    first = await store.revoke(token.id, by=ADMIN)
    second = await store.revoke(token.id, by=ADMIN)

    assert first.revoked_at == second.revoked_at is not None
    with pytest.raises(AuthError, match="revoked"):
        store.authenticate(text)


async def test_a_token_is_replaced_without_a_gap(store: TokenStore) -> None:
    old, kept = await store.create("ci", project="/team", rights={"use"}, by=ADMIN)
    new, _ = await store.create("ci", project="/team", rights={"use"}, by=ADMIN)

    assert store.authenticate(old) == store.authenticate(new)
    await store.revoke(kept.id, by=ADMIN)

    assert store.authenticate(new).name == "ci"
    with pytest.raises(AuthError, match="revoked"):
        store.authenticate(old)


async def test_tokens_that_have_ended_make_room_when_there_are_too_many(
    tmp_path: Path, store: TokenStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "TOKENS_MAX", 3)
    lasting, _ = await store.create("lasting", project="/", rights={"use"}, by=ADMIN)
    short, _ = await store.create("short", project="/", rights={"use"}, ttl_s=10, by=ADMIN)
    _, revoked = await store.create("revoked", project="/", rights={"use"}, by=ADMIN)
    await store.revoke(revoked.id, by=ADMIN)
    clock.now += 11

    for _ in range(2):
        await store.create("new", project="/", rights={"use"}, by=ADMIN)
    with pytest.raises(CapacityError):
        await store.create("one too many", project="/", rights={"use"}, by=ADMIN)

    names = ["lasting", "new", "new"]
    assert sorted(token.principal.name for token in store.tokens(by=ADMIN)) == names
    assert store.authenticate(lasting).name == "lasting"
    with pytest.raises(AuthError):
        store.authenticate(short)
    again = TokenStore.open(tmp_path / "iam.db", clock=clock)
    assert sorted(token.principal.name for token in again.tokens(by=ADMIN)) == names
    again.close()


async def test_nobody_gives_more_than_they_have(store: TokenStore) -> None:
    lead = Principal("lead", project="/team", rights=frozenset({"read", "use"}))

    for project, rights in (("/", {"read"}), ("/other", {"read"}), ("/teams", {"read"})):
        with pytest.raises(ForbiddenError):
            await store.create("x", project=project, rights=rights, by=lead)
    with pytest.raises(ForbiddenError):
        await store.create("x", project="/", rights={"admin"}, by=Principal("r", rights=frozenset({"read"})))
    with pytest.raises(InvalidArgumentError, match="whole service"):
        await store.create("x", project="/team", rights={"admin"}, by=ADMIN)
    with pytest.raises(InvalidArgumentError):
        await store.create("x", project="team", rights={"read"}, by=ADMIN)
    await store.create("x", project="/team/sub", rights={"use"}, by=lead)


async def test_tokens_of_other_projects_are_not_seen(store: TokenStore) -> None:
    _, theirs = await store.create("x", project="/theirs", rights={"read"}, by=ADMIN)
    _, ours = await store.create("x", project="/ours/run", rights={"read"}, by=ADMIN)
    lead = Principal("lead", project="/ours", rights=ALL_RIGHTS)

    assert store.tokens(by=lead) == [ours]
    with pytest.raises(NotFoundError):
        await store.revoke(theirs.id, by=lead)


async def test_a_change_that_cannot_be_written_does_not_count(store: TokenStore) -> None:
    text, token = await store.create("x", project="/t", rights={"read"}, by=ADMIN)
    store.close()

    with pytest.raises(StorageError):
        await store.revoke(token.id, by=ADMIN)
    with pytest.raises(StorageError):
        await store.create("y", project="/t", rights={"read"}, by=ADMIN)
    assert store.authenticate(text)
    assert len(store.tokens(by=ADMIN)) == 1


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_bytes(b"not a database" * 100)
    with sqlite3.connect(tmp_path / "new.db") as later:
        later.execute("PRAGMA user_version = 99")
    later.close()

    for name in ("bad.db", "new.db", "missing/iam.db"):
        with pytest.raises(StorageError):
            TokenStore.open(tmp_path / name)


# ---- principals and projects ---------------------------------------------------------------------


def test_rights_include_lesser_ones_and_are_the_words_of_the_wire() -> None:
    assert closed_rights({"use"}) == {"read", "use"}
    assert closed_rights({"admin"}) == ALL_RIGHTS == {str(right) for right in WireRight}
    assert closed_rights(set()) == frozenset()
    assert [str(right) for right in Right] == [str(right) for right in WireRight]
    with pytest.raises(ValueError, match="root"):
        closed_rights({"root"})


@pytest.mark.parametrize("path", ["/", "/team", "/team/run-7", "/a/b.c/d_e"])
def test_project_paths_are_read(path: str) -> None:
    assert parse_project(path) == path


@pytest.mark.parametrize(
    "path", ["", "team", "/team/", "//", "/a//b", "/..", "/a b", "/ü", "/" + "a" * 64, "/a" * 17, "/a\n"]
)
def test_other_texts_are_no_project_path(path: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_project(path)


NAMES = st.lists(st.sampled_from(["a", "ab", "b"]), max_size=4).map(lambda parts: "/" + "/".join(parts))


@given(NAMES, NAMES, NAMES)
def test_reaching_is_an_order(one: str, two: str, three: str) -> None:
    assert reaches(one, one)
    assert reaches("/", one)
    if reaches(one, two) and reaches(two, three):
        assert reaches(one, three)
    if reaches(one, two) and reaches(two, one):
        assert one == two
    assert reaches(one, two) == (two.split("/")[: len(one.split("/"))] == one.split("/") or one == "/")


# ---- the local socket ----------------------------------------------------------------------------


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        peer = peer_of(one)
    with socket.socket(socket.AF_INET) as tcp:
        assert peer_of(tcp) is None

    assert peer == Peer(os.getpid(), os.geteuid(), os.getegid())


def test_root_and_the_nodes_own_uid_are_admin_and_nobody_else_is() -> None:
    for uid in (0, 1000):
        who = local_principal(Peer(1, uid, uid), own_uid=1000)
        assert (who.project, who.rights) == ("/", ALL_RIGHTS)
    with pytest.raises(ForbiddenError, match="uid 1001"):
        local_principal(Peer(1, 1001, 0), own_uid=1000)
