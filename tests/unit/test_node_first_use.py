"""On a machine that can make no sandbox, that is said before a missing environment is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.backends.base import Probe
from dsec.core.errors import EnvironmentNotFoundError, UnsupportedError
from dsec.core.spec import Environment, Substrate
from dsec.node.environments import Resolved
from dsec.testing.nodes import FakeEnvironments, fake_node
from tests.node_calls import create


class Nothing(FakeEnvironments):
    async def acquire(self, environment: Environment) -> Resolved:
        raise EnvironmentNotFoundError(f"no environment {environment.base!r} on this node")


@pytest.mark.parametrize("usable", [True, False])
async def test_a_substrate_that_cannot_work_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: bool
) -> None:
    async with fake_node(tmp_path, environments=Nothing()) as client:

        async def probe() -> Probe:
            return Probe(usable, "" if usable else "containers need root on the node", "start `dsec up` as root")

        monkeypatch.setattr(client.node.backends[Substrate.FAKE], "probe", probe)

        with pytest.raises(EnvironmentNotFoundError if usable else UnsupportedError) as caught:
            await create(client)

        assert ("root" in caught.value.message) is not usable
        assert len(client.node.registry) == 0
