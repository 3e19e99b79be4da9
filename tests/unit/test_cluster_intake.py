"""What nodes send is looked at in measure, and one that floods is not listened to for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from dsec.cluster.engine import intake
from dsec.cluster.engine.connection import Engine
from dsec.cluster.engine.intake import Intake
from dsec.core.errors import UnavailableError
from dsec.core.ids import NodeId
from dsec.testing.waiting import eventually

LOUD, QUIET, NEW = NodeId("aaaaaaaa"), NodeId("bbbbbbbb"), NodeId("cccccccc")


@dataclass
class Subscribed:
    engine: Server
    subject: str
    heard: Any

    async def unsubscribe(self) -> None:
        self.engine.open.remove(self)


@dataclass
class Server:
    """Sends what is published to who has subscribed to it."""

    open: list[Subscribed] = field(default_factory=list)
    refuses: bool = False
    shed_after: list[set[str]] = field(default_factory=list)

    async def listen(self, subject: str, heard: Any, *, queue: str = "", waiting_max: int = 0) -> Subscribed:
        if self.refuses:
            raise UnavailableError("not now")
        self.open.append(Subscribed(self, subject, heard))
        return self.open[-1]

    def shed(self) -> None:
        self.shed_after.append(self.subjects())

    async def publish(self, node: NodeId, count: int = 1, body: bytes = b"") -> None:
        message = Msg(cast(Any, None), subject=f"hb.{node}", data=body)
        for one in list(self.open):
            if one.subject in ("hb.*", message.subject):
                for _ in range(count):
                    await one.heard(message)

    def subjects(self) -> set[str]:
        return {one.subject for one in self.open}


@dataclass
class Scene:
    server: Server
    intake: Intake
    members: set[NodeId]
    heard: list[NodeId]
    flooded: list[NodeId]


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(intake, "_LOOK_S", 0.02)
    server, members = Server(), {LOUD, QUIET}
    heard: list[NodeId] = []
    flooded: list[NodeId] = []
    found = Intake(
        cast(Engine, server),
        lambda node: f"hb.{node}",
        lambda node, _: heard.append(node),
        members=lambda: members,
        rate=1e-6,  # nothing comes back while a test runs
        burst=5,
        bytes_max=100,
        waiting_max=10,
        flooded=flooded.append,
    )
    await found.open()
    try:
        yield Scene(server, found, members, heard, flooded)
    finally:
        await found.close()
        assert server.open == []


async def test_what_is_above_its_measure_or_too_large_is_dropped_and_others_are_heard(scene: Scene) -> None:
    await scene.server.publish(LOUD, 50)
    await scene.server.publish(QUIET, 1, b"x" * 101)
    await scene.server.publish(QUIET, 3)

    assert (scene.heard.count(LOUD), scene.heard.count(QUIET)) == (5, 3)
    assert scene.flooded == []
    assert scene.server.subjects() == {"hb.*"}


async def test_one_that_floods_is_left_out_at_the_server_and_heard_again_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.server.publish(LOUD, 2_000)
    await eventually(lambda: scene.server.subjects() == {f"hb.{QUIET}"})
    assert scene.flooded == [LOUD]
    await eventually(lambda: scene.server.shed_after == [{f"hb.{QUIET}"}])

    await scene.server.publish(QUIET)
    assert scene.heard[-1] == QUIET
    scene.members.add(NEW)
    await eventually(lambda: scene.server.subjects() == {f"hb.{QUIET}", f"hb.{NEW}"})
    scene.intake._left_out[LOUD] = 0.0  # its time is over
    await eventually(lambda: scene.server.subjects() == {"hb.*"})

    await scene.server.publish(LOUD, 2_000)
    await eventually(lambda: scene.server.subjects() == {f"hb.{QUIET}", f"hb.{NEW}"})
    assert scene.flooded == [LOUD, LOUD]


@pytest.mark.parametrize(("count", "size"), [(1_000, 101), (10, 10_100)])
async def test_one_that_floods_with_what_is_too_large_is_left_out_too(scene: Scene, count: int, size: int) -> None:
    await scene.server.publish(LOUD, count - 1, bytes(size))
    assert scene.flooded == []
    await scene.server.publish(LOUD, 1, bytes(size))
    await eventually(lambda: scene.server.subjects() == {f"hb.{QUIET}"})
    assert scene.flooded == [LOUD]
    assert scene.heard == []


async def test_an_engine_that_cannot_be_listened_to_now_is_listened_to_later(scene: Scene) -> None:
    scene.server.refuses = True
    await scene.server.publish(LOUD, 2_000)
    await eventually(lambda: scene.server.subjects() == set())
    scene.server.refuses = False
    await eventually(lambda: scene.server.subjects() == {f"hb.{QUIET}"})


async def test_one_that_is_no_member_any_more_is_not_listened_to_meanwhile(scene: Scene) -> None:
    await scene.server.publish(LOUD, 2_000)
    await eventually(lambda: scene.server.subjects() == {f"hb.{QUIET}"})
    scene.members.discard(QUIET)
    await eventually(lambda: scene.server.subjects() == set())
