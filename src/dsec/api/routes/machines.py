"""Full machines: their screens, and the images that they begin as."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dsec.api.request import Answer, Request
from dsec.api.routes.environments import tell
from dsec.api.routes.sockets import bytes_in, bytes_out, expect_res
from dsec.api.routing import WEBSOCKET, Route
from dsec.api.websocket import Socket, bridge
from dsec.core.ids import parse_name
from dsec.wire.api import TYPE_NDJSON
from dsec.wire.codec import unpack
from dsec.wire.disks import MachineCommit, MachinePull, MachinePush, SandboxCommit
from dsec.wire.environments import BuildEvent, EnvironmentTrace, MachineBuild, PushTarget
from dsec.wire.machines import DiskExport, DiskFile, MachineImport, MachineInfo, MachinePage, MachineRef
from dsec.wire.node import Done, Method, Nothing, Right
from dsec.wire.records import SandboxRef
from dsec.wire.screens import Picture, ScreenInput, ScreenRequest, ScreenSize

_ACT_TIMEOUT_S: Final = 900.0  # as much as one request may type, slowly
_COPY_TIMEOUT_S: Final = 3_600.0  # of a disk of terabytes
TYPE_PNG: Final = "image/png"


async def get_screen(request: Request) -> Answer:
    picture = unpack(await request.call(Method.SCREEN_PICTURE, SandboxRef(request.sandbox)), Picture)
    return Answer(picture.png, type=TYPE_PNG)


async def act_on_screen(request: Request) -> Answer:
    body = ScreenInput(request.sandbox, await request.record(ScreenRequest))
    return await request.forward(Method.SCREEN_ACT, body, ScreenSize, timeout_s=_ACT_TIMEOUT_S)


async def view_screen(request: Request, socket: Socket) -> None:
    stream = await request.open(Method.SCREEN_VIEW, SandboxRef(request.sandbox))
    try:
        await expect_res(stream)
        await socket.accept()
        await bridge(bytes_in(socket, stream), bytes_out(socket, stream))
        await socket.close()
    finally:
        await stream.close()


async def list_machines(request: Request) -> Answer:
    return await request.forward(Method.MACHINE_LIST, Nothing(), MachinePage)


async def import_machine(request: Request) -> Answer:
    body = await request.record(MachineImport)
    answer = await request.forward(Method.MACHINE_IMPORT, body, MachineInfo, timeout_s=_COPY_TIMEOUT_S)
    return replace(answer, status=201)


async def build_machine(request: Request) -> None:
    await tell(request, Method.MACHINE_BUILD, await request.record(MachineBuild))


async def push_machine(request: Request) -> Answer:
    target = await request.record(PushTarget)
    body = MachinePush(name=_name(request), store=target.store)
    return await request.forward(Method.MACHINE_PUSH, body, MachineInfo, timeout_s=_COPY_TIMEOUT_S)


async def pull_machine(request: Request) -> Answer:
    body = await request.record(MachinePull)
    answer = await request.forward(Method.MACHINE_PULL, body, MachineInfo, timeout_s=_COPY_TIMEOUT_S)
    return replace(answer, status=201)


async def commit_machine(request: Request) -> Answer:
    body = SandboxCommit(request.sandbox, await request.record(MachineCommit))
    answer = await request.forward(Method.MACHINE_COMMIT, body, MachineInfo, timeout_s=_COPY_TIMEOUT_S)
    return replace(answer, status=201)


async def collapse_machine(request: Request) -> Answer:
    return await request.forward(
        Method.MACHINE_COLLAPSE, MachineRef(_name(request)), MachineInfo, timeout_s=_COPY_TIMEOUT_S
    )


async def export_disk(request: Request) -> Answer:
    body = await request.record(DiskExport)
    answer = await request.forward(Method.MACHINE_EXPORT, body, DiskFile, timeout_s=_COPY_TIMEOUT_S)
    return replace(answer, status=201)


async def trace_machine(request: Request) -> Answer:
    return await request.forward(Method.MACHINE_TRACE, MachineRef(_name(request)), EnvironmentTrace)


def _name(request: Request) -> str:
    return parse_name(request.segment("name"), "image name")


async def remove_machine(request: Request) -> Answer:
    return await request.forward(Method.MACHINE_REMOVE, MachineRef(_name(request)), Done)


_SCREEN = "/v1/sandboxes/{id}/screen"

ROUTES = (
    Route(
        "GET",
        _SCREEN,
        get_screen,
        "What the screen of a full machine shows, as PNG.",
        Right.USE,
        answer={TYPE_PNG: bytes},
        statuses=(501,),
    ),
    Route(
        "POST",
        f"{_SCREEN}/actions",
        act_on_screen,
        "Move, click, drag, scroll, type and press keys, in this order. The answer is the screen's size.",
        Right.USE,
        body=ScreenRequest,
        answer=ScreenSize,
        statuses=(501,),
    ),
    Route(
        WEBSOCKET,
        f"{_SCREEN}/vnc",
        view_screen,
        "The screen by RFB 3.8 (VNC) without a password: binary messages both ways. Four viewers at once.",
        Right.USE,
    ),
    Route(
        "GET",
        "/v1/machines",
        list_machines,
        "Images that full machines begin as.",
        Right.READ,
        answer=MachinePage,
        statuses=(501,),
    ),
    Route(
        "POST",
        "/v1/machines",
        import_machine,
        "Copy a disk, which is a file of the node, as an image.",
        Right.ADMIN,
        body=MachineImport,
        answer=MachineInfo,
        status=201,
        statuses=(409, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/machines/builds",
        build_machine,
        "Install Debian as an image; NDJSON, one BuildEvent a line.",
        Right.ADMIN,
        body=MachineBuild,
        answer={TYPE_NDJSON: BuildEvent},
        statuses=(409, 429, 501),
    ),
    Route(
        "POST",
        "/v1/machines/pulls",
        pull_machine,
        "An image of a store as one of the node; its disk is loaded as it is read.",
        Right.ADMIN,
        body=MachinePull,
        answer=MachineInfo,
        status=201,
        statuses=(404, 409, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/machines/exports",
        export_disk,
        "The disk of an image, or of a snapshot of a machine, as a new file of the node.",
        Right.ADMIN,
        body=DiskExport,
        answer=DiskFile,
        status=201,
        statuses=(404, 409, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/machines/{name}:push",
        push_machine,
        "Put an image, and the layers of its disk that are not there, into a store.",
        Right.ADMIN,
        body=PushTarget,
        answer=MachineInfo,
        statuses=(404, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/machines/{name}:collapse",
        collapse_machine,
        "Make the layers of an image's disk above the lowest one.",
        Right.ADMIN,
        answer=MachineInfo,
        statuses=(404, 429, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/machines/{name}:trace",
        trace_machine,
        "Record in the stores what has been read of an image's disk, for other nodes to load first.",
        Right.ADMIN,
        answer=EnvironmentTrace,
        statuses=(404, 409, 501),
        mutates=True,
    ),
    Route(
        "POST",
        "/v1/sandboxes/{id}:commit",
        commit_machine,
        "The disk of a full machine, as it is now, as an image: what it has written lies above the image it began as.",
        Right.ADMIN,
        body=MachineCommit,
        answer=MachineInfo,
        status=201,
        statuses=(409, 429, 501),
        mutates=True,
    ),
    Route(
        "DELETE",
        "/v1/machines/{name}",
        remove_machine,
        "Remove an image. Machines of it run on.",
        Right.ADMIN,
        answer=Done,
        statuses=(404, 501),
        mutates=True,
    ),
)
