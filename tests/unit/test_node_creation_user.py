"""A user that the environment lacks is told when the sandbox is asked for, not by its first command."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.errors import InvalidArgumentError
from dsec.node.config import WarmConfig
from dsec.testing.nodes import fake_node
from dsec.testing.waiting import eventually
from tests.node_calls import create, host_of, start


@pytest.mark.parametrize("warm", [None, WarmConfig(spares_max=2, low=1, high=2)])
async def test_a_sandbox_for_somebody_who_is_not_there_is_not_made(tmp_path: Path, warm: WarmConfig | None) -> None:
    settings = {} if warm is None else {"warm": warm}
    async with fake_node(tmp_path, **settings) as client:
        if warm is not None:
            for _ in range(2):
                await create(client)
            await eventually(lambda: len(client.node.warm) == 1)
        before = len(client.node.registry)

        with pytest.raises(InvalidArgumentError, match="nobody-here"):
            await create(client, user="nobody-here")

        assert len(client.node.registry) == before
        assert len(client.node.journal.sandboxes()) == before
        assert sum(not one.spare for one in host_of(client).sandboxes.values()) == before
        made = await create(client, user="user", env={"A": "b"})
        assert made.state == "running"
        assert (await start(client, made.id, shell="id -u; echo $A")).out == b"1000\nb\n"
