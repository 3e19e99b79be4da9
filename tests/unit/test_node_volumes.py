"""Volumes of a node: whose they are, and who may do what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec.core.errors import ForbiddenError, UnsupportedError, VolumeNotFoundError
from dsec.core.spec import VolumeMount
from dsec.node.node import Node
from dsec.node.service import Service
from dsec.testing.nodes import FAKE_SPEC, caller_of, make_fake_node
from dsec.wire.codec import pack, unpack
from dsec.wire.collect import GcReport, GcRequest
from dsec.wire.node import Caller, Method, Nothing, Right
from dsec.wire.records import CreateRequest
from dsec.wire.volumes import VolumeInfo, VolumePage, VolumeRef, VolumeRequest

ADMIN = frozenset({Right.READ, Right.USE, Right.ADMIN})
ROOT = caller_of("/", rights=ADMIN)
TEAM, PART, OTHER = caller_of("/team"), caller_of("/team/part"), caller_of("/other")
_ANSWERS = {Method.VOLUME_CREATE: VolumeInfo, Method.VOLUME_LIST: VolumePage, Method.VOLUME_GET: VolumeInfo}


async def ask(node: Node, method: Method, request: Any, caller: Caller) -> Any:
    answer = await Service(node).call(method, pack(request), caller=caller, key=None, timeout_s=30)
    return unpack(answer, _ANSWERS[method]) if method in _ANSWERS else answer


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    found = make_fake_node(tmp_path)
    await found.start()
    for project in ("/team", "/team/part", "/other"):
        maker = caller_of(project, rights=ADMIN)
        await ask(found, Method.VOLUME_CREATE, VolumeRequest(name="data"), maker)
    yield found
    await found.close()


async def test_a_project_sees_its_own_and_those_below(node: Node) -> None:
    async def projects(caller: Caller) -> list[str | None]:
        page = await ask(node, Method.VOLUME_LIST, Nothing(), caller)
        return [volume.project for volume in page.volumes]

    assert await projects(TEAM) == ["/team", "/team/part"]
    assert await projects(PART) == ["/team/part"]
    assert await projects(OTHER) == ["/other"]
    assert await projects(ROOT) == ["/other", "/team", "/team/part"]


async def test_a_name_means_the_callers_own_volume(node: Node) -> None:
    assert (await ask(node, Method.VOLUME_GET, VolumeRef(name="data"), PART)).project == "/team/part"
    named = VolumeRef(name="data", project="/team/part")
    assert (await ask(node, Method.VOLUME_GET, named, TEAM)).project == "/team/part"
    with pytest.raises(VolumeNotFoundError):
        await ask(node, Method.VOLUME_GET, VolumeRef(name="data", project="/team"), PART)
    with pytest.raises(VolumeNotFoundError):
        await ask(node, Method.VOLUME_GET, VolumeRef(name="data", project="/team"), OTHER)


@pytest.mark.parametrize("method", [Method.VOLUME_CREATE, Method.VOLUME_REMOVE, Method.GC])
async def test_making_and_removing_is_for_administrators(node: Node, method: Method) -> None:
    request = {Method.VOLUME_CREATE: VolumeRequest(name="more"), Method.GC: GcRequest()}.get(
        method, VolumeRef(name="data")
    )

    with pytest.raises(ForbiddenError):
        await ask(node, method, request, TEAM)
    await ask(node, method, request, caller_of("/team", rights=ADMIN))


async def test_a_substrate_without_volumes_says_so(node: Node) -> None:
    spec = msgspec.structs.replace(FAKE_SPEC, volumes=(VolumeMount("data", "/data"),))

    with pytest.raises(UnsupportedError, match="volumes"):
        await ask(node, Method.CREATE, CreateRequest(spec=spec), TEAM)
    assert len(node.registry) == 0


async def test_a_collection_leaves_volumes(node: Node) -> None:
    answer = await ask(node, Method.GC, GcRequest(), ROOT)

    assert unpack(answer, GcReport).items == []
    assert len((await ask(node, Method.VOLUME_LIST, Nothing(), ROOT)).volumes) == 3
