"""Any history of calls, failures and restarts: no output is wrong, nothing runs twice, nothing is left."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.backends.fake.host import FakeHost
from dsec.core.errors import DsecError, GoneError
from dsec.core.ids import new_exec_id
from dsec.core.states import SandboxState, may_move
from dsec.node.journal import Journal
from dsec.node.rows import KeyRow, SandboxRow, Tombstone
from dsec.testing.faults import Faults
from dsec.testing.nodes import FAKE_SPEC, NodeClient, crash, fake_instance, fake_node, make_fake_node
from dsec.testing.waiting import eventually
from dsec.wire import records
from dsec.wire.node import ExecStart, Method

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "exec", "again", "pause", "resume", "destroy", "kill", "restart", "die", "drop"]),
        st.integers(0, 3),
        st.integers(0, 12),  # which call of a fault point fails during the step; most steps have fewer
    ),
    max_size=14,
)


async def soon(seconds: float) -> None:
    """Back-off without the wait."""
    await asyncio.sleep(min(seconds, 0.002))


@dataclass
class Ran:
    """An exec that was asked for: it appends one line to a file of its own and prints the file."""

    sandbox: str
    id: str = field(default_factory=new_exec_id)
    ended: records.ExecAnswer | None = None


class Moves:
    """Watches what is journalled: every change of a state is one of the table, whatever fails and whoever dies."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[SandboxState, SandboxState]] = set()
        self._states: dict[str, SandboxState] = {}
        intend, put, bury = Journal.intend, Journal.put, Journal.bury

        async def watched_intend(journal: Journal, row: SandboxRow, key: KeyRow | None) -> None:
            self._states[row.id] = SandboxState(row.state)
            await intend(journal, row, key)

        async def watched_put(journal: Journal, row: SandboxRow) -> None:
            self._move(row.id, row.state)
            await put(journal, row)

        async def watched_bury(journal: Journal, tombstone: Tombstone) -> None:
            self._move(tombstone.sandbox.id, tombstone.sandbox.state)
            await bury(journal, tombstone)

        patch.setattr(Journal, "intend", watched_intend)
        patch.setattr(Journal, "put", watched_put)
        patch.setattr(Journal, "bury", watched_bury)

    def _move(self, id: str, state: str) -> None:
        old, new = self._states.get(id, SandboxState.CREATING), SandboxState(state)
        self._states[id] = new
        if old is not new:
            self.seen.add((old, new))


class History:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.host = FakeHost()
        self.client: NodeClient
        self.sandboxes: list[str] = []
        self.execs: list[Ran] = []

    async def start(self) -> None:
        node = make_fake_node(self.state, host=self.host, sleep=soon)
        await node.start()
        self.client = NodeClient(node)

    async def step(self, what: str, which: int) -> None:
        known = self.sandboxes[which % len(self.sandboxes)] if self.sandboxes else None
        if what == "create":
            create = records.CreateRequest(spec=FAKE_SPEC)
            key = f"k{len(self.sandboxes)}-{which}"
            made = await self.client.call(Method.CREATE, create, records.Sandbox, key=key)
            if made.id not in self.sandboxes:
                self.sandboxes.append(made.id)
        elif what == "restart":
            await self.client.node.close()
            await self.start()
        elif what == "kill":
            await crash(self.client.node)
            await self.start()
        elif what == "again" and self.execs:
            await self.run(self.execs[which % len(self.execs)])
        elif known is None:
            return
        elif what == "exec":
            self.execs.append(Ran(known))
            await self.run(self.execs[-1])
        elif what == "die":
            await self.die(known)
        elif what == "drop":
            await self.drop_channel(known)
        else:
            method = {"pause": Method.PAUSE, "resume": Method.RESUME, "destroy": Method.DESTROY}.get(what)
            if method is not None:
                await self.client.call(method, records.SandboxRef(known), records.Sandbox)

    async def run(self, ran: Ran) -> None:
        shell = f"echo x >> /tmp/{ran.id}; cat /tmp/{ran.id}; seq 1 3000 >&2"
        request = records.ExecRequest(id=ran.id, shell=shell, wait_s=20.0)
        answer = await self.client.call(Method.EXEC_START, ExecStart(ran.sandbox, request), records.ExecAnswer)
        if answer.exec.status == "exited":
            assert answer.out == b"x\n", "it ran once"
            assert answer.err == b"".join(b"%d\n" % n for n in range(1, 3_001))
            assert ran.ended is None or ran.ended.exec == answer.exec, "an end does not change"
            ran.ended = answer
        else:
            assert answer.exec.status == "unknown"
            assert answer.exec.exit_code is None

    async def die(self, id: str) -> None:
        if (found := self.client.node.registry.find(id)) is not None and found.instance is not None:
            await fake_instance(self.client.node, id).crash()

    async def drop_channel(self, id: str) -> None:
        found = self.client.node.registry.find(id)
        if found is not None and found._link is not None and found._link.is_open:
            (await found._link.client()).close()

    async def finish(self) -> None:
        for id in self.sandboxes:
            with suppress(DsecError):
                await self.client.call(Method.DESTROY, records.SandboxRef(id), records.Sandbox)
        await eventually(lambda: len(self.client.node.registry) == 0)
        for id in self.sandboxes:
            view = await self.client.call(Method.GET, records.SandboxRef(id), records.Sandbox)
            assert view.state in ("gone", "failed")
            assert view.cause is not None
        assert self.host.leftovers() == []
        assert self.client.node.journal.sandboxes() == []
        assert list(self.client.node.config.records_dir.iterdir()) == []
        await self.client.node.close()


@settings(max_examples=60)
@given(steps=STEPS)
def test_any_history_ends_with_nothing_left_and_nothing_wrong(steps: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
            moves = Moves(patch)
            history = History(Path(directory))
            await history.start()
            for what, which, nth in steps:
                restarting = what in ("kill", "restart")  # a node that does not start has no history
                with Faults(0 if restarting else nth), suppress(DsecError):
                    await history.step(what, which)
            await history.finish()
            assert {move for move in moves.seen if not may_move(*move)} == set()

    asyncio.run(asyncio.wait_for(play(), 100))


async def test_many_lives_leave_no_task_no_descriptor_and_no_growth(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:

        async def live() -> None:
            create = records.CreateRequest(spec=FAKE_SPEC)
            sandbox = await client.call(Method.CREATE, create, records.Sandbox)
            request = records.ExecRequest(id=new_exec_id(), shell="seq 1 20000", wait_s=20.0)
            await client.call(Method.EXEC_START, ExecStart(sandbox.id, request), records.ExecAnswer)
            await client.call(Method.DESTROY, records.SandboxRef(sandbox.id), records.Sandbox)
            with suppress(GoneError):
                await client.call(Method.PAUSE, records.SandboxRef(sandbox.id), records.Sandbox)

        await live()
        tasks, descriptors = len(asyncio.all_tasks()), len(list(Path("/proc/self/fd").iterdir()))

        for _ in range(20):
            await asyncio.gather(*(live() for _ in range(10)))
        await asyncio.sleep(0)

        assert len(asyncio.all_tasks()) <= tasks
        assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
        assert len(client.node._reaper._timers) == 0
        assert len(client.node.creation._once) == 0
