"""Groups as callers have them: private names, all or nothing, one end."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dsec
from dsec import errors
from dsec.backends.fake.transfers import ECHO_PORT
from tests.contract.sdk_service import RunningService

FAKE: dict[str, Any] = {"backend": "fake", "memory": "64MiB"}


@pytest.fixture
def client(service: RunningService) -> Iterator[dsec.Client]:
    with dsec.Client(service.url) as found:
        yield found


@pytest.fixture
def name() -> str:
    return f"group-{secrets.token_hex(4)}"


def test_a_group_is_started_shown_and_ended_as_one(client: dsec.Client, name: str) -> None:
    members = {"db": FAKE, "web": {**FAKE, "after": ["db"], "env": {"DB": "db:7"}}}

    with client.groups.create(members, links=[f"db:{ECHO_PORT}"], name=name) as group:
        assert set(group.members) == {"db", "web"}
        web, db = group.sandbox("web"), group.sandbox("db")
        assert (web.info.name, web.info.job, web.info.member) == (f"{name}-web", name, "web")
        assert db.info.created_at < web.info.created_at
        assert {one.member for one in group.info.sandboxes or []} == {"db", "web"}
        assert name in {one.name for one in client.groups.list()}

        again = client.groups.create(members, links=[f"db:{ECHO_PORT}"], name=name)
        assert again.members == group.members
        with pytest.raises(errors.ConflictError):
            client.groups.create({"db": FAKE}, name=name)
        with pytest.raises(errors.ConflictError):
            client.jobs.create(name)

        assert client.jobs.get(name).pause().done == 2
        assert group.refresh().state == "paused"
        assert client.jobs.get(name).resume().ok

    assert web.refresh().state == db.refresh().state == "gone"
    with pytest.raises(errors.NotFoundError):
        client.groups.get(name)
    group.down()


def test_a_member_that_fails_takes_the_others_with_it_and_is_named(client: dsec.Client, name: str) -> None:
    members = {"a": FAKE, "b": {**FAKE, "after": ["a"], "network": "routed"}, "c": {**FAKE, "after": ["b"]}}

    with pytest.raises(errors.UnsupportedError, match="member b of group") as found:
        client.groups.create(members, name=name)

    assert found.value.detail["member"] == "b"
    with pytest.raises(errors.NotFoundError):
        client.groups.get(name)
    assert client.list(job=name) == []
    with client.groups.create({"a": FAKE}, name=name):
        pass


@pytest.mark.parametrize(
    ("members", "links", "said"),
    [
        ({}, [], "between 1 and"),
        ({"A": FAKE}, [], "no name of a member"),
        ({"localhost": FAKE}, [], "no name of a member"),
        ({"a": {**FAKE, "after": ["b"]}, "b": {**FAKE, "after": ["a"]}}, [], "wait for each other: a, b"),
        ({"a": {**FAKE, "after": ["z"]}}, [], "which is no member"),
        ({"a": FAKE}, ["z:1"], "which is no member"),
        ({"a": FAKE}, ["a"], "is no link"),
        ({"a": FAKE, "b": FAKE}, ["a:80", "b:80"], "listens on port 80 itself"),
        ({"a": {**FAKE, "job": "other"}}, [], "the group's to set"),
        ({"a": {**FAKE, "memori": 1}}, [], "memori"),
    ],
)
def test_groups_that_make_no_sense_are_refused(
    client: dsec.Client, members: dict[str, Any], links: list[str], said: str
) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=said):
        client.groups.create(members, links=links)


def test_two_that_have_the_same_port_may_be_told_apart(client: dsec.Client, name: str) -> None:
    links = [dsec.GroupLink(name="a", port=80, by=("c",)), dsec.GroupLink(name="b", port=80, by=("c",))]

    with client.groups.create({"a": FAKE, "b": FAKE, "c": FAKE}, links=links, name=name) as group:
        assert len(group.members) == 3


def test_another_project_has_no_such_group(service: RunningService, client: dsec.Client, name: str) -> None:
    token = client.tokens.create("groups-other", project="/groups-other")

    with client.groups.create({"a": FAKE}, name=name) as group:
        with dsec.Client(f"http://127.0.0.1:{service.tcp_port}", token.token) as other:
            with pytest.raises(errors.NotFoundError):
                other.groups.get(name)
            assert other.groups.list() == []
            with other.groups.create({"a": FAKE}, name=name) as own:
                assert own.members != group.members
        assert group.refresh().state == "running"


def test_a_quota_holds_for_members(service: RunningService, client: dsec.Client, name: str) -> None:
    token = client.tokens.create("groups-poor", project="/groups-poor")
    client.projects.set_quota("/groups-poor", dsec.Quota(sandboxes=1))

    with dsec.Client(f"http://127.0.0.1:{service.tcp_port}", token.token) as poor:
        with pytest.raises(errors.QuotaError, match="member"):
            poor.groups.create({"a": FAKE, "b": {**FAKE, "after": ["a"]}}, name=name)
        assert poor.list() == []


def test_a_compose_file_becomes_a_group(service: RunningService, tmp_path: Path, name: str) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {web: {image: base, expose: [80], restart: always}}")

    def cli(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "dsec", "group", *arguments],
            capture_output=True, text=True, env=service.environment, timeout=200,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done

    refused = cli("up", str(file), "--name", name, status=2)
    assert "service web, restart" in refused.stderr
    with dsec.Client(service.url) as client:
        with client.groups.create({"web": FAKE}, name=name):
            assert "running" in cli("show", name).stdout
            cli("down", name)
        assert "dsec group ls" in cli("show", name, status=125).stderr
        assert client.list(job=name) == []
