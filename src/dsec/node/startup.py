"""The environment's own program: what it is, and waiting until it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from dsec.agent.client import AgentClient
from dsec.core import limits
from dsec.core.errors import DsecError, InvalidArgumentError, LaunchError
from dsec.core.ids import main_exec_id, new_exec_id
from dsec.core.spec import ReadyProbe, SandboxSpec
from dsec.core.states import SandboxState
from dsec.node.environments import Resolved
from dsec.node.execs import NodeExec
from dsec.node.journal import Journal
from dsec.node.recordstore import ERR, OUT
from dsec.node.rows import ImageRow
from dsec.node.supervisor import Supervisor
from dsec.wire import agent
from dsec.wire.agent import ExecStatus
from dsec.wire.frames import Channel
from dsec.wire.records import ExecRequest

_OF_CALLER = 0.95  # of the time that its caller waits: beside the rest of a create it is over first
_LONGER = "its time to start was over, and not that of its probe: give it a longer timeout"
_BY_HAND = "make it without the probe, and run that by hand: dsec exec SANDBOX …"
_SHOWN = 60  # characters of a probe in a message
_OUTPUT_TOLD_BYTES = 2_000  # of each channel of a main that ended: nobody can ask for it afterwards


def main_request(id: str, spec: SandboxSpec, image: Resolved | ImageRow) -> ExecRequest | None:
    """What `start` runs; None without it. Raises InvalidArgumentError when there is nothing to run."""
    if not spec.start:
        return None
    entrypoint = image.entrypoint if spec.entrypoint is None else spec.entrypoint
    command = image.command if spec.entrypoint is None else ()
    argv = [*entrypoint, *(command if spec.command is None else spec.command)]
    if not argv:
        raise InvalidArgumentError(
            "the environment names no program to start", hint="leave start out, and run commands with exec"
        )
    return ExecRequest(id=main_exec_id(id), argv=argv)


async def start_again(sandbox: Supervisor, journal: Journal) -> None:
    """The program of a sandbox that was rolled back, unless it has been started since; returns once it is ready.

    Raises LaunchError, StorageError, GoneError: then the sandbox runs without it, and it is not tried again.
    """
    main = await sandbox.serially(lambda: _started_again(sandbox, journal))
    if main is not None and sandbox.row.spec.ready is not None:
        await Readiness(sandbox.row.spec.ready, main, sandbox.client).wait(sandbox.id)


async def _started_again(sandbox: Supervisor, journal: Journal) -> NodeExec | None:
    row = sandbox.row
    program = main_request(row.id, row.spec, row.image)
    if row.main_due_at is None or program is None or sandbox.state is not SandboxState.RUNNING:
        return None
    known = sandbox.execs.find(program.id)
    try:
        if known is not None and known.start.started_at >= row.main_due_at:
            return None  # the node has ended after its start
        sandbox.execs.forget(program.id)
        return await sandbox.start_main(program)
    except DsecError as error:
        raise LaunchError(
            f"the sandbox was rolled back, and its program could not be started: {error.message}",
            hint=error.hint,
            step="start",
            sandbox=sandbox.id,
        ) from error
    finally:
        sandbox.row = msgspec.structs.replace(sandbox.row, main_due_at=None)
        await journal.put(sandbox.row)


class Readiness:
    """Waits until a probe succeeds. Its tries are the agent's execs, and on no record of the node."""

    def __init__(self, probe: ReadyProbe, main: NodeExec, client: Callable[[], Awaitable[AgentClient]]) -> None:
        self._probe = probe
        self._main = main
        self._client = client
        self._name = _shown(probe)
        self._last = f"no try of its probe ({self._name}) has ended"

    async def wait(self, sandbox: str, within_s: float | None = None) -> None:
        """Raises LaunchError when main ends before or time is over, and what the channel raises once it is given up.

        `within_s`: all that its caller waits: a little before, what was tried last is told.
        """
        left_s = self._probe.timeout_s
        if short := within_s is not None and within_s * _OF_CALLER < left_s:
            left_s = (within_s or 0.0) * _OF_CALLER
        asking = asyncio.create_task(self._ask())
        ended = asyncio.create_task(self._main.ended())
        try:
            await asyncio.wait({asking, ended}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._main.live:
                raise _ended_early(self._main, sandbox)
            if not asking.done():
                raise LaunchError(
                    f"the sandbox was not ready within {left_s:.3g} s: {self._last}",
                    hint=_LONGER if short else _BY_HAND,
                    step="ready",
                    sandbox=sandbox,
                    detail=_output_of(self._main),
                )
            asking.result()
        finally:
            asking.cancel()
            ended.cancel()
            await asyncio.gather(asking, ended, return_exceptions=True)

    async def _ask(self) -> None:
        while True:
            client = await self._client()
            try:
                if await self._try(client):
                    return
            except DsecError as error:  # it may be so only for now: a program, a port, or the channel is not there yet
                errno = f" {error.detail['errno']}" if "errno" in error.detail else ""
                self._last = f"its probe ({self._name}): {error.message}{errno}"
            await asyncio.sleep(self._probe.interval_s)

    async def _try(self, client: AgentClient) -> bool:
        if self._probe.port is not None:
            async with await client.open_connection(agent.ConnectArgs(port=self._probe.port)):
                return True
        end = await self._run(client)
        self._last = f"its probe ({self._name}) ended with {_how(end.status, end.code, end.signal, end.cause)}"
        return end.status == ExecStatus.EXITED and end.code == 0

    async def _run(self, client: AgentClient) -> agent.ExecEnd:
        """Its output is taken and thrown away, so that it never blocks."""
        argv, shell = self._probe.argv, self._probe.shell
        exec = agent.Exec(
            id=new_exec_id(),
            argv=None if argv is None else [_bytes(word) for word in argv],
            shell=None if shell is None else _bytes(shell),
            timeout_s=self._probe.timeout_s,
            merge_stderr=True,
        )
        stream = await client.exec(exec)
        acknowledged = 0
        async for data in stream:
            taken = data.offset + len(data.payload)
            if data.channel == Channel.OUT and taken - acknowledged >= limits.EXEC_UNACKED_BYTES_MAX // 4:
                acknowledged = taken
                await client.ack(exec.id, out=taken, err=0)
        with suppress(DsecError):
            await client.exit_ack(exec.id)
        return stream.end


def _shown(probe: ReadyProbe) -> str:
    if probe.port is not None:
        return f"port {probe.port}"
    text = " ".join(" ".join(probe.argv or (probe.shell or "",)).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _ended_early(main: NodeExec, sandbox: str) -> LaunchError:
    info = main.info(sandbox)
    how = _how(info.status, info.exit_code, info.signal, info.cause)
    return LaunchError(
        f"the environment's program ended with {how} before the sandbox was ready",
        hint="its last output is in the detail of this error",
        step="ready",
        sandbox=sandbox,
        detail=_output_of(main),
    )


def _how(status: str | None, code: int | None, signal: int | None, cause: str | None) -> str:
    text = f"exit code {code}" if status == ExecStatus.EXITED else f"signal {signal}"
    if status not in (ExecStatus.EXITED, ExecStatus.SIGNALED):
        text = "an unknown status"
    return f"{text} ({cause})" if cause else text


def _output_of(main: NodeExec) -> dict[str, str]:
    with main as record:
        if record.kept_bytes > limits.EXEC_INLINE_OUTPUT_BYTES_MAX:
            return {}
        kept = {"stdout": record.read_all(OUT), "stderr": record.read_all(ERR)}
    return {name: output[-_OUTPUT_TOLD_BYTES:].decode("utf-8", "replace") for name, output in kept.items()}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
