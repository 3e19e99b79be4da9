"""Usage of thousands of sandboxes is looked at without keeping anybody waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.node.sampling import IDLE_TURNS, Sampling
from dsec.node.supervisor import Supervisor
from dsec.testing.nodes import FAKE_SPEC, fake_node
from dsec.wire import records
from dsec.wire.node import Method

COUNT = 40


async def test_idle_ones_take_turns_busy_ones_are_always_looked_at_and_others_run_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    others = 0

    async def sample(sandbox: Supervisor) -> None:
        looked.append(sandbox.id)

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    async with fake_node(tmp_path) as client:
        request = records.CreateRequest(spec=FAKE_SPEC)
        made = [(await client.call(Method.CREATE, request, records.Sandbox)).id for _ in range(COUNT)]
        sampling = Sampling(client.node.registry)
        with monkeypatch.context() as patched:
            patched.setattr(Supervisor, "sample", sample)
            for _ in range(IDLE_TURNS):
                await sampling.turn()
            assert sorted(looked) == sorted(made)

            looked.clear()
            for sandbox in client.node.registry:
                sandbox.lifetime.begin()
            meanwhile = asyncio.create_task(other())
            await sampling.turn()
            meanwhile.cancel()
            assert sorted(looked) == sorted(made)
            assert others >= 2
