"""Volumes of projects, and datasets of the node: what sandboxes can have mounted."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dsec.api.query import Kind, Param
from dsec.api.request import Answer, Request
from dsec.api.routes import everywhere
from dsec.api.routing import Route
from dsec.core.ids import parse_name
from dsec.iam.projects import parse_project
from dsec.wire.codec import to_json
from dsec.wire.node import Done, Method, Right
from dsec.wire.volumes import VolumeInfo, VolumePage, VolumeRef, VolumeRequest

_CREATE_TIMEOUT_S: Final = 180.0  # a file system of terabytes takes its time


async def create_volume(request: Request) -> Answer:
    body = await request.record(VolumeRequest)
    answer = await request.forward(Method.VOLUME_CREATE, body, VolumeInfo, timeout_s=_CREATE_TIMEOUT_S)
    return replace(answer, status=201)


async def list_volumes(request: Request) -> Answer:
    return Answer(to_json(await everywhere.volumes(request)))


async def get_volume(request: Request) -> Answer:
    return await request.forward(Method.VOLUME_GET, _named(request), VolumeInfo)


async def remove_volume(request: Request) -> Answer:
    return await request.forward(Method.VOLUME_REMOVE, _named(request), Done)


def _named(request: Request) -> VolumeRef:
    project = request.query["project"]
    return VolumeRef(
        name=parse_name(request.segment("name"), "volume name"),
        project=None if project is None else parse_project(project),
    )


_ONE = "/v1/volumes/{name}"
_PROJECT = (Param("project", Kind.TEXT, "Whose it is; without it, yours."),)

ROUTES = (
    Route(
        "POST",
        "/v1/volumes",
        create_volume,
        "Make a volume of your project. The same again is success.",
        Right.ADMIN,
        body=VolumeRequest,
        answer=VolumeInfo,
        status=201,
        statuses=(409, 429, 501),
        mutates=True,
    ),
    Route(
        "GET",
        "/v1/volumes",
        list_volumes,
        "The volumes of your projects, and the datasets of this node.",
        Right.READ,
        answer=VolumePage,
    ),
    Route(
        "GET",
        _ONE,
        get_volume,
        "One volume, and what it takes of the disk.",
        Right.READ,
        answer=VolumeInfo,
        params=_PROJECT,
        statuses=(404,),
    ),
    Route(
        "DELETE",
        _ONE,
        remove_volume,
        "Remove a volume with all that is in it. 409 while a sandbox has it.",
        Right.ADMIN,
        answer=Done,
        params=_PROJECT,
        statuses=(404, 409),
        mutates=True,
    ),
)
