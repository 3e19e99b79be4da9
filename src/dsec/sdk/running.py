"""Runs one command to its end: the way of `exec`, in sandboxes and sessions alike."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import msgspec

from dsec.core.errors import (
    CommandError,
    DeadlineError,
    DsecError,
    ExecNotFoundError,
    Outcome,
    ProtocolError,
    UnavailableError,
)
from dsec.sdk.process import AsyncProcess
from dsec.sdk.requests import INLINE_WAIT_S
from dsec.sdk.results import ExecResult
from dsec.sdk.transport import Transport
from dsec.wire.records import ExecAnswer, ExecRequest

OutputCallback = Callable[[str], Any]
_MARGIN_S: Final = 30.0  # beyond a command's own timeout, for its end to reach us
_KILL_TIMEOUT_S: Final = 10.0


async def start_process(transport: Transport, sandbox: str, request: ExecRequest) -> AsyncProcess:
    """Starts it and gives it. When this call is cancelled, the command is killed: nobody would ever hear of it."""
    process = AsyncProcess(transport, sandbox, request.id, record_bytes_max=request.record_bytes_max)
    try:
        await _start(transport, process, request)
    except asyncio.CancelledError:
        await _kill(process)
        raise
    return process


async def _start(transport: Transport, process: AsyncProcess, request: ExecRequest) -> ExecAnswer:
    """Sends the request; it is safe to repeat, since the same exec id never runs twice."""
    answer = await transport.call(
        "POST",
        f"/sandboxes/{process.sandbox_id}/execs",
        ExecAnswer,
        body=request,
        key=request.id,
        long=request.wait_s is not None,
        timeout_s=transport.request_timeout_s + (request.wait_s or 0.0),
    )
    if answer.exec.id != request.id:
        raise ProtocolError("the service answered for another exec")
    return answer


async def run_command(
    transport: Transport,
    sandbox: str,
    request: ExecRequest,
    *,
    stdin: bytes | None = None,
    on_stdout: OutputCallback | None = None,
    on_stderr: OutputCallback | None = None,
    check: bool = False,
) -> ExecResult:
    """Runs it and gives its result. When this call is cancelled, or a callback raises, the command is killed."""
    live = on_stdout is not None or on_stderr is not None or stdin is not None
    if not live:
        request = msgspec.structs.replace(request, wait_s=INLINE_WAIT_S)
    process = AsyncProcess(transport, sandbox, request.id, record_bytes_max=request.record_bytes_max)
    started = False
    try:
        async with _within(request, sandbox):
            answer = await _start(transport, process, request)
            started = True
            result = await _result(process, answer, stdin, on_stdout, on_stderr)
    except UnavailableError:
        raise  # the command goes on, and can be attached to by its id
    except BaseException as error:
        if started or not isinstance(error, DsecError):
            await _kill(process)
        raise
    if check and not result.ok:
        raise failure_of(result, sandbox)
    return result


async def _result(
    process: AsyncProcess,
    answer: ExecAnswer,
    stdin: bytes | None,
    on_stdout: OutputCallback | None,
    on_stderr: OutputCallback | None,
) -> ExecResult:
    live = on_stdout is not None or on_stderr is not None
    inline = process._take_inline(answer.exec, answer.out, answer.err)
    if inline is not None and not live:
        return inline
    async with _fed(process, stdin):
        if live:
            async with contextlib.aclosing(process.__aiter__()) as chunks:
                async for chunk in chunks:
                    await _tell(on_stdout if chunk.stream == "stdout" else on_stderr, chunk.text)
        return await process.wait()


@contextlib.asynccontextmanager
async def _fed(process: AsyncProcess, stdin: bytes | None) -> AsyncIterator[None]:
    """Feeds stdin beside what is inside; a command that ends without reading it all is no error."""
    if stdin is None:
        yield
        return
    feeding = asyncio.create_task(_feed(process, stdin))
    try:
        yield
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


async def _feed(process: AsyncProcess, data: bytes) -> None:
    try:
        await process.write(data)
        await process.close_stdin()
    except DsecError:
        # It had ended, or closed its stdin: its result tells. If the service is away, following the output tells.
        return


async def _tell(callback: OutputCallback | None, text: str) -> None:
    if callback is not None and text:
        given = callback(text)
        if inspect.isawaitable(given):
            await _awaited(given)


async def _awaited(value: Awaitable[Any]) -> None:
    await value


@contextlib.asynccontextmanager
async def _within(request: ExecRequest, sandbox: str) -> AsyncIterator[None]:
    """The node ends the command at its timeout; should that not reach us, we do not wait for ever."""
    limit = None if request.timeout_s is None else request.timeout_s + request.grace_s + _MARGIN_S
    try:
        async with asyncio.timeout(limit) as deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineError(
            f"nothing was heard of exec {request.id} for {_MARGIN_S:g} s after its own timeout",
            outcome=Outcome.UNKNOWN,
            sandbox=sandbox,
            exec=request.id,
        ) from error


async def _kill(process: AsyncProcess) -> None:
    """Best effort, bounded. The start may still be on its way, so "no such exec" is asked again for a while."""

    async def until_known() -> None:
        for pause_s in (0.05, 0.1, 0.2, 0.4, 0.8, 0.0):
            try:
                await process.kill()
                return
            except ExecNotFoundError:
                await asyncio.sleep(pause_s)

    with contextlib.suppress(Exception, asyncio.CancelledError):
        await asyncio.shield(asyncio.wait_for(until_known(), _KILL_TIMEOUT_S))


def failure_of(result: ExecResult, sandbox: str) -> CommandError:
    tail = (result.stderr or result.stdout).strip()[-500:]
    error = CommandError(
        f"the command {result.summary()}" + (f": {tail}" if tail else ""),
        sandbox=sandbox,
        exec=result.id,
        detail={"exit_code": result.exit_code, "signal": result.signal, "cause": result.cause},
    )
    error.result = result
    return error
