"""Who may put environments together, and what the node answers about layers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import EnvironmentNotFoundError, ForbiddenError, NotFoundError
from dsec.testing.nodes import NodeClient, caller_of, fake_node
from dsec.wire.codec import unpack
from dsec.wire.environments import BuildRequest, EnvironmentInfo, EnvironmentRef, GitSource, LayerUse
from dsec.wire.layers import (
    CollapseRequest,
    ComposeRequest,
    Composition,
    DiffRequest,
    EnvironmentDiff,
    LayerInfo,
    LayerPage,
    LayerRef,
)
from dsec.wire.node import Done, Method, Nothing, Right

COMMIT = "0" * 40


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client.of(caller_of(rights=frozenset({Right.ADMIN})))


async def test_environments_are_put_together_by_administrators_and_compared_by_readers(client: NodeClient) -> None:
    reader = client.of(caller_of(rights=frozenset({Right.READ})))
    request = ComposeRequest(name="mine", of=Composition(base="base"))

    made = await client.call(Method.ENVIRONMENT_COMPOSE, request, EnvironmentInfo)

    assert (made.name, [part.reference for part in made.parts]) == ("mine", ["base"])
    found = await reader.call(Method.ENVIRONMENT_DIFF, DiffRequest(one="base", other="mine"), EnvironmentDiff)
    assert (found.added, found.removed) == ((), ())
    assert (await client.call(Method.ENVIRONMENT_UPDATE, EnvironmentRef("mine"), EnvironmentInfo)) == made
    for method, record in (
        (Method.ENVIRONMENT_COMPOSE, request),
        (Method.ENVIRONMENT_UPDATE, EnvironmentRef("mine")),
        (Method.LAYER_REMOVE, LayerRef("0" * 12)),
    ):
        with pytest.raises(ForbiddenError):
            await reader.call(method, record, Done)
    with pytest.raises(EnvironmentNotFoundError):
        await client.call(
            Method.ENVIRONMENT_COMPOSE, ComposeRequest(name="x", of=Composition(base="none")), EnvironmentInfo
        )


async def test_layers_are_told_to_readers(client: NodeClient) -> None:
    reader = client.of(caller_of(rights=frozenset({Right.READ})))

    assert (await reader.call(Method.LAYER_LIST, Nothing(), LayerPage)).layers == []
    for method, answer in ((Method.LAYER_GET, LayerInfo), (Method.LAYER_STATS, LayerUse)):
        with pytest.raises(NotFoundError):
            await reader.call(method, LayerRef("0" * 12), answer)
    with pytest.raises(NotFoundError):
        await client.call(Method.LAYER_REMOVE, LayerRef("0" * 12), Done)


async def test_a_collapse_is_a_story_for_administrators(client: NodeClient) -> None:
    reader = client.of(caller_of(rights=frozenset({Right.READ, Right.USE})))

    async with client.stream(Method.ENVIRONMENT_COLLAPSE, CollapseRequest(name="base")) as stream:
        assert unpack((await stream.all())[-1].body, EnvironmentInfo).name == "base"
    async with reader.stream(Method.ENVIRONMENT_COLLAPSE, CollapseRequest(name="base")) as stream:
        with pytest.raises(ForbiddenError):
            await stream.all()


async def test_a_repository_on_the_node_is_named_over_its_own_socket_only(client: NodeClient) -> None:
    remote = client.of(caller_of(rights=frozenset({Right.ADMIN})))
    local = client.of(msgspec.structs.replace(caller_of(rights=frozenset({Right.ADMIN})), local=True))

    async def build(who: NodeClient, url: str) -> str:
        request = BuildRequest(name="repo:1", source=GitSource(url=url, commit=COMMIT))
        async with who.stream(Method.ENVIRONMENT_BUILD, request) as stream:
            return unpack((await stream.all())[-1].body, EnvironmentInfo).name

    for url in ("file:///srv/repo", "http://127.0.0.1/repo"):
        with pytest.raises(ForbiddenError, match="its own socket"):
            await build(remote, url)
    assert await build(remote, "https://host/repo") == "repo:1"
    assert await build(local, "file:///srv/repo") == "repo:1"
