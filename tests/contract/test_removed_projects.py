"""Projects that are removed, and made again under the same path: what an earlier one had is never a later one's."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsec.api import openstreams
from dsec.api.openstreams import OpenStreams
from dsec.core.errors import CapacityError
from dsec.node.node import Node
from dsec.node.volumes import Volumes
from dsec.wire.volumes import VolumeRequest
from tests.contract.served import Served, serve_fake, until

SPEC: dict[str, Any] = {"environment": {"base": "base"}, "substrate": "fake", "memory_bytes": 64 << 20}
PATHS = ("/team", "/team/run", "/other")
KINDS = ("volumes", "snapshots", "jobs", "sandboxes")
STEPS = 100


@pytest.fixture
async def api(short_tmp: Path) -> AsyncIterator[Served]:
    async with serve_fake(short_tmp) as served:
        yield served


@dataclass
class Caller:
    """Root of the machine, within a project."""

    api: Served
    made: int = 0
    owners: dict[str, str] = field(default_factory=dict)  # what was made → which life of which project it was made in

    async def ask(
        self, method: str, route: str, body: Any = None, *, within: str = "/", **more: str
    ) -> tuple[int, Any]:
        headers = {"Dsec-Project": within}
        async with self.api.local.request(method, route, json=body, params=more, headers=headers) as answer:
            return answer.status, await answer.json()

    @property
    def node(self) -> Node:
        return self.api.rpc._service._node  # type: ignore[attr-defined, no-any-return]

    @property
    def volumes(self) -> Volumes:
        return self.node.volumes

    async def destroy(self, id: str, project: str) -> None:
        """Returns when nothing of it is left, which is after its end was answered."""
        await self.ask("DELETE", f"/v1/sandboxes/{id}", within=project)
        await until(lambda: not any(sandbox.id == id for sandbox in self.node.registry))

    async def make(self, project: str) -> bool:
        return (await self.ask("POST", "/v1/projects", {"path": project}))[0] == 201

    async def remove(self, project: str) -> tuple[int, Any]:
        return await self.ask("DELETE", "/v1/project", path=project)

    async def put(self, kind: str, project: str) -> str | None:
        self.made += 1
        name = f"x{self.made}"
        if kind == "volumes":  # which takes the right admin over the project
            await self.volumes.create(VolumeRequest(name=name), project)
            status = 200
        elif kind == "jobs":
            status, _ = await self.ask("POST", "/v1/jobs", {"name": name}, within=project)
        else:
            spec = {**SPEC, "name": name}
            status, found = await self.ask("POST", "/v1/sandboxes", {"spec": spec}, within=project)
            if kind == "snapshots" and status == 201:
                route = f"/v1/sandboxes/{found['id']}:snapshot"
                status, _ = await self.ask("POST", route, {"name": name}, within=project)
                await self.destroy(found["id"], project)
        return name if status in (200, 201) else None

    async def names(self, kind: str, project: str) -> list[str]:
        """Of this project alone."""
        status, found = await self.ask("GET", f"/v1/{kind}", within=project)
        if status != 200:
            return []
        return [one["name"] for one in found[kind] if one.get("project", project) == project and one["name"]]

    async def drop(self, kind: str, project: str, name: str) -> None:
        if kind == "sandboxes":
            _, found = await self.ask("GET", "/v1/sandboxes", within=project, name=name)
            for one in found["sandboxes"]:
                await self.destroy(one["id"], project)
        elif kind == "volumes":
            await self.volumes.remove(name, project)
        elif kind == "snapshots":
            await self.ask("DELETE", f"/v1/snapshots/{name}", within=project)


async def test_a_project_goes_when_nothing_of_it_is_left_and_its_jobs_go_with_it(api: Served) -> None:
    caller = Caller(api)
    assert await caller.make("/team")
    for kind in KINDS:
        assert await caller.put(kind, "/team")
    await caller.ask("PUT", "/v1/project/quota", {"total": {"sandboxes": 9}}, path="/team")

    status, refused = await caller.remove("/team")
    assert (status, refused["detail"]["left"]) == (409, {"sandboxes": 1, "snapshots": 1, "volumes": 1})
    assert "sandboxes (1), snapshots (1), volumes (1)" in refused["message"]
    for kind in KINDS:
        for name in await caller.names(kind, "/team"):
            await caller.drop(kind, "/team", name)
    assert (await caller.remove("/team"))[0] == 200

    assert await caller.make("/team")
    assert [await caller.names(kind, "/team") for kind in KINDS] == [[], [], [], []]


async def test_nothing_of_an_earlier_project_is_ever_a_later_ones(api: Served, rng: random.Random) -> None:
    caller = Caller(api)
    lives: dict[str, int] = {}
    there: set[str] = set()
    seen = 0
    for _ in range(STEPS):
        project, kind = rng.choice(PATHS), rng.choice(KINDS)
        action = rng.choice(("make", "remove", "put", "put", "drop", "drop"))
        if action == "make":
            if await caller.make(project):
                lives[project] = lives.get(project, 0) + 1
                there.add(project)
        elif action == "remove":
            if (await caller.remove(project))[0] == 200:
                there.discard(project)
        elif action == "put" and project in there:
            name = await caller.put(kind, project)
            if name is not None:
                caller.owners[name] = f"{project} {lives[project]}"
        elif action == "drop" and project in there:
            for name in await caller.names(kind, project):
                await caller.drop(kind, project, name)
        for project in there:
            for kind in KINDS:
                for name in await caller.names(kind, project):
                    assert caller.owners.get(name) == f"{project} {lives[project]}"
                    seen += 1

    assert seen > STEPS
    assert max(lives.values()) > 1


async def test_what_a_late_request_has_left_keeps_a_project_of_the_path_from_being_made(api: Served) -> None:
    caller = Caller(api)
    assert await caller.make("/team")
    assert (await caller.remove("/team"))[0] == 200
    # One that was let in before the project was removed, and came to its node after.
    await caller.volumes.create(VolumeRequest(name="late"), "/team")

    status, refused = await caller.ask("POST", "/v1/projects", {"path": "/team"})

    assert (status, refused["detail"]["left"]) == (409, {"volumes": 1})


async def test_streams_are_counted_with_those_of_projects_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openstreams, "PROJECT_STREAMS_MAX", 2)
    streams = OpenStreams()
    streams.reserve("/team")
    streams.reserve("/team/a/b")

    with pytest.raises(CapacityError, match="/team and the projects below it"):
        streams.reserve("/team/another")
    streams.reserve("/teammate")
    streams.free("/team/a/b")
    streams.reserve("/team/another")

    assert len(streams) == 3
