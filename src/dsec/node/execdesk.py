"""Starts and follows the execs of one sandbox; its supervisor says when it may."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from dsec.agent.client import AgentClient
from dsec.core.clock import Clock
from dsec.core.errors import ConflictError, DsecError
from dsec.core.spec import Substrate
from dsec.node.execs import NodeExec, agent_exec, describe_command, takes_stdin
from dsec.node.exectable import ExecTable
from dsec.node.link import AgentLink
from dsec.node.rows import ExecStartEntry
from dsec.node.runner import ExecRunner, feed_stdin
from dsec.node.tasks import Tasks
from dsec.observe import metrics
from dsec.wire import agent
from dsec.wire.agent import ExecEnd, ExecStatus
from dsec.wire.records import ExecRequest


class ExecDesk:
    """`on_begin` and `on_end` are called once for every exec that runs: they keep the sandbox from being idle."""

    def __init__(
        self,
        table: ExecTable,
        *,
        link: Callable[[], AgentLink],
        clock: Clock,
        tasks: Tasks,
        substrate: Substrate,
        oom_kills_seen: Callable[[], int],
        limit_hit: Callable[[NodeExec], Awaitable[str | None]],
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._table = table
        self._clock = clock
        self._tasks = tasks
        self._substrate = substrate
        self._on_begin = on_begin
        self._on_end = on_end
        self._oom_kills_seen = oom_kills_seen  # without asking the host again: a start must not wait for that
        self._runner = ExecRunner(table=table, link=link, clock=clock, limit_hit=limit_hit, on_end=on_end)

    async def known(self, request: ExecRequest, hash: bytes) -> NodeExec | None:
        """The exec of this id, once it has started. Raises ConflictError when it was another request, and the error
        with which its start failed."""
        found = self._table.find(request.id)
        if found is None:
            return None
        if found.start.request_hash != hash:
            raise ConflictError(
                f"exec {request.id} was a different request",
                hint="choose a fresh id for every command",
                sandbox=self._table.sandbox,
                exec=request.id,
            )
        if request.stdin_data is not None and found.live and not found.stdin_closed:
            # Its rest died with the node that had it. Who asks again has it too.
            self._tasks.spawn(feed_stdin(found, request.stdin_data))
        if found.live:
            await asyncio.shield(found.started)
        return found

    async def start(self, request: ExecRequest, hash: bytes) -> NodeExec:
        """Journalled, then asked for; returns when the agent has started it. It goes on if its caller goes away."""
        exec = self._table.begin(
            ExecStartEntry(
                id=request.id,
                command=describe_command(request),
                request_hash=hash,
                started_at=self._clock.wall_s(),
                session=request.session,
                tty=request.tty is not None,
                one_channel=request.tty is not None or request.merge_stderr,
                stdin=takes_stdin(request),
                record_bytes_max=request.record_bytes_max,
            )
        )
        exec.oom_kills_before = self._oom_kills_seen()
        exec.began_s = self._clock.monotonic_s()
        metrics.EXECS.labels(self._substrate).inc()
        self._on_begin()
        self._run(exec, agent_exec(request))
        if request.stdin_data is not None:
            self._tasks.spawn(feed_stdin(exec, request.stdin_data))
        await asyncio.shield(exec.started)
        return exec

    def load(self) -> None:
        """What another node process has left."""
        self._table.load()
        for exec in self._table:
            if exec.live:
                exec.began_s = self._clock.monotonic_s() - max(0.0, self._clock.wall_s() - exec.start.started_at)
                self._on_begin()

    def reconcile(self, client: AgentClient) -> None:
        """After every hello, before anybody gets the channel: what the agent knows against what we know."""
        told = {state.id: state for state in client.hello.execs}
        for exec in self._table:
            state = told.pop(exec.id, None)
            if exec.live and not exec.followed:
                self._follow(exec, known=state is not None)
            elif not exec.live and state is not None and self._table.is_journalled(exec):
                self._tasks.spawn(_acknowledge(client, exec.id))
        for state in told.values():
            # Its record was dropped here, and the acknowledgement of that was lost.
            if state.end is not None:
                self._tasks.spawn(_acknowledge(client, state.id))

    def end_all(self, cause: str) -> None:
        """The sandbox has ended. How its execs did nobody saw, and nothing is invented."""
        for exec in self._table:
            if exec.live:
                self._finish(exec, cause)

    def _follow(self, exec: NodeExec, *, known: bool) -> None:
        if known:
            self._run(exec, None)
        else:
            self._finish(exec, "node_lost")

    def _run(self, exec: NodeExec, request: agent.Exec | None) -> None:
        exec.followed = True
        self._tasks.spawn(self._runner.run(exec, request))

    def _finish(self, exec: NodeExec, cause: str) -> None:
        self._table.finish(exec, ExecEnd(status=ExecStatus.UNKNOWN, cause=cause), self._clock.wall_s())
        self._on_end()


async def _acknowledge(client: AgentClient, id: str) -> None:
    with suppress(DsecError):
        await client.exit_ack(id)
