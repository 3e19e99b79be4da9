"""What `group up` tells while it waits: images, members, and who is waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsec.core.errors import DsecError, LaunchError, UnavailableError
from dsec.sdk import starting
from dsec.sdk.environments import AsyncEnvironments
from dsec.sdk.groups import AsyncGroups
from dsec.testing.waiting import eventually
from dsec.wire.environments import BuildEvent
from dsec.wire.groups import GroupInfo, GroupStep

COMPOSE = """
services:
  db: {image: "example.org/db:1", healthcheck: {test: "ready --now"}}
  web: {image: base, depends_on: {db: {condition: service_healthy}}}
"""


class Service:
    """Answers a start when the test says so; its sandboxes are what the test says."""

    def __init__(self) -> None:
        self.done: asyncio.Future[GroupInfo] = asyncio.get_running_loop().create_future()
        self.states: dict[str, str] = {}
        self.pull_fails: DsecError | None = None
        self.pulls = 0
        self._transport = self
        self.environments = self
        self.volumes = self

    async def exists(self, name: str) -> bool:
        return name == "base"

    async def build(self, name: str, source: Any, *, on_event: Any) -> None:
        self.pulls += 1
        await on_event(BuildEvent(kind="progress", stage="fetch", message="1 of 2 layers"))
        if self.pull_fails is not None:
            raise self.pull_fails

    async def call(self, *arguments: Any, **more: Any) -> GroupInfo:
        return await self.done

    async def list(self, **more: Any) -> list[Any]:
        found = [
            SimpleNamespace(id=f"sbx_{name}", member=name, state=state, node="n1")
            for name, state in self.states.items()
        ]
        return [SimpleNamespace(info=info) for info in found]


async def until(steps: list[GroupStep], member: str | None, text: str) -> None:
    await eventually(lambda: any(step.member == member and text in step.message for step in steps))


async def test_a_start_tells_of_images_and_members_and_names_who_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_LOOK_S", 0.01)
    monkeypatch.setattr(starting, "_SILENT_S", 0.05)
    (tmp_path / "compose.yaml").write_text(COMPOSE)
    service, steps = Service(), list[GroupStep]()
    groups = AsyncGroups(service)  # type: ignore[arg-type]
    start = asyncio.create_task(
        groups.from_compose(tmp_path / "compose.yaml", name="shop", variables={}, on_step=steps.append)
    )

    await until(steps, None, "waiting for db, web to be placed")
    service.states["db"] = "creating"
    await until(steps, "db", "is started on node n1, until its healthcheck succeeds")
    await until(steps, None, "waiting for db, and its healthcheck")
    service.states["db"], service.states["web"] = "running", "creating"
    await until(steps, "db", "is healthy")
    await until(steps, None, "waiting for web")
    service.states["web"] = "running"
    monkeypatch.setattr(starting, "_LOOK_S", 3600)  # what has come since the last look is told at the end
    service.done.set_result(
        GroupInfo(name="shop", project="/", principal="p", created_at=0.0, state="active", members={"db": "sbx_db"})
    )

    assert (await start).members == {"db": "sbx_db"}
    assert (steps[-1].member, steps[-1].message) == ("web", "runs")
    assert [step.message for step in steps[:2]] == [
        "image example.org/db:1 is not here, and is pulled",
        "image example.org/db:1: fetch 1 of 2 layers",
    ]
    assert {step.member for step in steps[:2]} == {"db"}
    assert [step.after_s for step in steps] == sorted(step.after_s for step in steps)
    assert [step.kind for step in steps if step.member == "web"] == ["creating", "running"]


async def test_an_image_that_cannot_be_pulled_is_told_with_its_service(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(COMPOSE)
    service = Service()
    service.pull_fails = UnavailableError("example.org cannot be reached: no route")
    groups = AsyncGroups(service)  # type: ignore[arg-type]

    with pytest.raises(
        UnavailableError, match=r"service db: its image example.org/db:1 could not be pulled: .* no route"
    ) as told:
        await groups.from_compose(tmp_path / "compose.yaml", variables={}, on_step=lambda step: None)

    assert told.value.detail["member"] == "db"
    assert "example.org/db:1" in str(told.value.hint)
    service.done.set_exception(LaunchError("never asked for"))
    assert isinstance(service.done.exception(), LaunchError)


async def test_what_the_service_has_tried_often_enough_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def told(*arguments: Any) -> BuildEvent:
        nonlocal asked
        asked += 1
        raise UnavailableError("it cannot be reached", detail={"tried": 6})

    monkeypatch.setattr("dsec.sdk.environments.told", told)
    environments = AsyncEnvironments(None)  # type: ignore[arg-type]

    with pytest.raises(UnavailableError):
        await environments.collapse("base")

    assert asked == 1
