"""Execs: start, look, feed, signal. Their output is in `output.py`."""

from __future__ import annotations

from dsec.api.query import Kind, Param
from dsec.api.request import CALL_TIMEOUT_S, Answer, Request
from dsec.api.routing import Route
from dsec.core.limits import DATA_BYTES_MAX, WAIT_S_MAX
from dsec.wire.api import TYPE_BYTES
from dsec.wire.codec import to_json, unpack
from dsec.wire.node import ExecResize, ExecSignal, ExecStart, Method, Right, StdinWrite
from dsec.wire.records import (
    ExecAnswer,
    ExecInfo,
    ExecPage,
    ExecQuery,
    ExecRequest,
    SandboxRef,
    SignalRequest,
    StdinAnswer,
    TtySize,
)


async def start_exec(request: Request) -> Answer:
    body = await request.record(ExecRequest)
    return await request.forward(
        Method.EXEC_START,
        ExecStart(request.sandbox, body),
        ExecAnswer,
        timeout_s=CALL_TIMEOUT_S + (body.wait_s or 0.0),
    )


async def list_execs(request: Request) -> Answer:
    return await request.forward(Method.EXEC_LIST, SandboxRef(request.sandbox), ExecPage)


async def get_exec(request: Request) -> Answer:
    wait_s = request.query["wait_s"]
    query = ExecQuery(sandbox=request.sandbox, exec=request.exec, wait_s=wait_s)
    return await request.forward(Method.EXEC_GET, query, ExecInfo, timeout_s=CALL_TIMEOUT_S + (wait_s or 0.0))


async def write_stdin(request: Request) -> Answer:
    """The body goes on piece by piece; a piece that is not taken whole ends it, and the answer says where."""
    sandbox, exec, eof = request.sandbox, request.exec, request.query["eof"]
    offset = request.query["offset"]
    held = b""
    async for chunk in request.chunks():
        held += chunk
        while len(held) > DATA_BYTES_MAX:
            piece, held = held[:DATA_BYTES_MAX], held[DATA_BYTES_MAX:]
            taken = await _write(request, StdinWrite(sandbox=sandbox, exec=exec, data=piece, offset=offset))
            if offset is not None and taken.offset < offset + len(piece):
                return Answer(to_json(taken))
            offset = taken.offset
    last = await _write(request, StdinWrite(sandbox=sandbox, exec=exec, data=held, offset=offset, eof=eof))
    return Answer(to_json(last))


async def _write(request: Request, piece: StdinWrite) -> StdinAnswer:
    return unpack(await request.call(Method.EXEC_STDIN, piece), StdinAnswer)


async def signal_exec(request: Request) -> Answer:
    body = await request.record(SignalRequest)
    return await request.forward(Method.EXEC_SIGNAL, ExecSignal(request.sandbox, request.exec, body), ExecInfo)


async def kill_exec(request: Request) -> Answer:
    query = ExecQuery(sandbox=request.sandbox, exec=request.exec)
    return await request.forward(Method.EXEC_KILL, query, ExecInfo)


async def resize_exec(request: Request) -> Answer:
    body = await request.record(TtySize)
    return await request.forward(Method.EXEC_RESIZE, ExecResize(request.sandbox, request.exec, body), ExecInfo)


_EXEC = "/v1/sandboxes/{id}/execs/{exec}"

ROUTES = (
    Route(
        "POST",
        "/v1/sandboxes/{id}/execs",
        start_exec,
        "Run a command. The same exec id never runs twice. With `wait_s` it answers at the end, or after that long.",
        Right.USE,
        body=ExecRequest,
        answer=ExecAnswer,
        statuses=(429,),
        mutates=True,
    ),
    Route("GET", "/v1/sandboxes/{id}/execs", list_execs, "The execs that are known.", Right.READ, answer=ExecPage),
    Route(
        "GET",
        _EXEC,
        get_exec,
        "One exec.",
        Right.READ,
        params=(Param("wait_s", Kind.SECONDS, "answer at its end, or after this long", maximum=WAIT_S_MAX),),
        answer=ExecInfo,
    ),
    Route(
        "POST",
        f"{_EXEC}/stdin",
        write_stdin,
        "Write to its standard input. The answer says where the next piece begins.",
        Right.USE,
        params=(
            Param("offset", Kind.INT, "of the first byte; what was taken before is skipped"),
            Param("eof", Kind.BOOL, "close it afterwards", default=False),
        ),
        body={TYPE_BYTES: bytes},
        answer=StdinAnswer,
        mutates=True,
    ),
    Route(
        "POST",
        f"{_EXEC}/signal",
        signal_exec,
        "Send a signal to its process group, or to its whole tree.",
        Right.USE,
        body=SignalRequest,
        answer=ExecInfo,
        mutates=True,
    ),
    Route("POST", f"{_EXEC}/kill", kill_exec, "Kill all of it.", Right.USE, answer=ExecInfo, mutates=True),
    Route(
        "POST",
        f"{_EXEC}/resize",
        resize_exec,
        "Set the size of its terminal.",
        Right.USE,
        body=TtySize,
        answer=ExecInfo,
        mutates=True,
    ),
)
