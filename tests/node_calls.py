"""Calls of a node that many tests make."""

from __future__ import annotations

import msgspec

from dsec.backends.fake.backend import FakeBackend
from dsec.backends.fake.host import FakeHost
from dsec.core.ids import new_exec_id
from dsec.core.spec import Substrate
from dsec.testing.nodes import FAKE_SPEC, NodeClient
from dsec.wire import records
from dsec.wire.codec import pack
from dsec.wire.frames import Frame, FrameType, data_of
from dsec.wire.node import (
    Done,
    ExecStart,
    FileCall,
    Method,
)


async def create(client: NodeClient, key: str | None = None, **changes: object) -> records.Sandbox:
    spec = msgspec.structs.replace(FAKE_SPEC, **changes)
    return await client.call(Method.CREATE, records.CreateRequest(spec=spec), records.Sandbox, key=key)


async def start(client: NodeClient, sandbox: str, *argv: str, **options: object) -> records.ExecAnswer:
    fields: dict[str, object] = {"id": new_exec_id(), "wait_s": 20.0, **options}
    if argv:
        fields["argv"] = list(argv)
    return await client.call(
        Method.EXEC_START,
        ExecStart(sandbox, records.ExecRequest(**fields)),  # type: ignore[arg-type]
        records.ExecAnswer,
    )


async def get(client: NodeClient, id: str) -> records.Sandbox:
    return await client.call(Method.GET, records.SandboxRef(id), records.Sandbox)


async def destroy(client: NodeClient, id: str) -> records.Sandbox:
    return await client.call(Method.DESTROY, records.SandboxRef(id), records.Sandbox)


async def file(client: NodeClient, method: Method, id: str, args: object, answer: type = Done) -> object:
    return await client.call(method, FileCall(id, msgspec.Raw(pack(args))), answer)


def host_of(client: NodeClient) -> FakeHost:
    backend = client.node.backends[Substrate.FAKE]
    assert isinstance(backend, FakeBackend)
    return backend.host


def output_of(frames: list[Frame]) -> dict[int, bytes]:
    """Bytes by channel. A gap leaves nothing."""
    found = {1: b"", 2: b""}
    for frame in frames:
        if frame.type == FrameType.DATA:
            data = data_of(frame)
            found[data.channel] += data.payload
    return found
