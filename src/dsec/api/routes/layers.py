"""Layers, and environments that are put together from others."""

from __future__ import annotations

from dsec.api.query import Kind, Param
from dsec.api.request import Answer, Request
from dsec.api.routes.environments import named, tell
from dsec.api.routing import Route
from dsec.wire.api import TYPE_NDJSON
from dsec.wire.environments import BuildEvent, BuildRequest, EnvironmentInfo, LayerUse
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


async def compose_environment(request: Request) -> Answer:
    of = await request.record(Composition)
    return await request.forward(
        Method.ENVIRONMENT_COMPOSE, ComposeRequest(name=named(request).name, of=of), EnvironmentInfo
    )


async def update_environment(request: Request) -> Answer:
    return await request.forward(Method.ENVIRONMENT_UPDATE, named(request), EnvironmentInfo)


async def diff_environments(request: Request) -> Answer:
    pair = DiffRequest(one=named(request).name, other=request.query["other"])
    return await request.forward(Method.ENVIRONMENT_DIFF, pair, EnvironmentDiff)


async def collapse_environment(request: Request) -> None:
    await tell(request, Method.ENVIRONMENT_COLLAPSE, CollapseRequest(name=named(request).name))


async def list_layers(request: Request) -> Answer:
    return await request.forward(Method.LAYER_LIST, Nothing(), LayerPage)


async def build_layers(request: Request) -> None:
    await tell(request, Method.ENVIRONMENT_BUILD, await request.record(BuildRequest))


async def get_layer(request: Request) -> Answer:
    return await request.forward(Method.LAYER_GET, _layer(request), LayerInfo)


async def layer_stats(request: Request) -> Answer:
    return await request.forward(Method.LAYER_STATS, _layer(request), LayerUse)


async def remove_layer(request: Request) -> Answer:
    return await request.forward(Method.LAYER_REMOVE, _layer(request), Done)


def _layer(request: Request) -> LayerRef:
    return LayerRef(request.segment("digest"))


_ENVIRONMENT = "/v1/environments/{name}"
_LAYER = "/v1/layers/{digest}"

ROUTES = (
    Route(
        "PUT",
        _ENVIRONMENT,
        compose_environment,
        "Put an environment together from others: a base, a workspace and toolkits.",
        Right.ADMIN,
        body=Composition,
        answer=EnvironmentInfo,
        statuses=(404, 409, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/environments/{name}:update",
        update_environment,
        "Lock an environment that is made of others to what those are now.",
        Right.ADMIN,
        answer=EnvironmentInfo,
        statuses=(404, 501),
        mutates=True,
    ),
    Route(
        "GET",
        "/v1/environments/{name}/diff",
        diff_environments,
        "What another environment has more, less and otherwise.",
        Right.READ,
        params=(Param("other", Kind.TEXT, "NAME, NAME:TAG or NAME@DIGEST", required=True),),
        answer=EnvironmentDiff,
        statuses=(404, 501),
    ),
    Route(
        "POST",
        "/v1/environments/{name}:collapse",
        collapse_environment,
        "Make one layer of runs of an environment's layers. Answers a line for each event.",
        Right.ADMIN,
        answer={TYPE_NDJSON: BuildEvent},
        statuses=(404, 429, 501),
        mutates=True,
    ),
    Route("GET", "/v1/layers", list_layers, "The layers of this node.", Right.READ, answer=LayerPage),
    Route(
        "POST",
        "/v1/layers",
        build_layers,
        "Build the layers of an image: the same as to build an environment.",
        Right.ADMIN,
        body=BuildRequest,
        answer={TYPE_NDJSON: BuildEvent},
        statuses=(404, 409, 429, 501),
        mutates=True,
    ),
    Route("GET", _LAYER, get_layer, "One layer.", Right.READ, answer=LayerInfo, statuses=(404, 501)),
    Route(
        "GET",
        "/v1/layers/{digest}/stats",
        layer_stats,
        "How much of a layer has been loaded from its store.",
        Right.READ,
        answer=LayerUse,
        statuses=(404, 501),
    ),
    Route(
        "DELETE",
        _LAYER,
        remove_layer,
        "Remove a layer that nothing has.",
        Right.ADMIN,
        answer=Done,
        statuses=(404, 409, 501),
        mutates=True,
    ),
)
