"""Which sandboxes a node takes by where they are to be: the node decides last."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import CapacityError, UnsupportedError
from dsec.core.spec import Place
from dsec.testing.nodes import FAKE_SPEC, fake_node
from dsec.wire.node import Method
from dsec.wire.records import CreateRequest, Sandbox, SandboxRef


async def test_a_node_takes_no_second_one_of_a_group_that_is_apart(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        apart = CreateRequest(spec=msgspec.structs.replace(FAKE_SPEC, place=Place(group="g", apart=True)))
        other = CreateRequest(spec=msgspec.structs.replace(FAKE_SPEC, place=Place(group="h", apart=True)))
        first = await client.call(Method.CREATE, apart, Sandbox)

        with pytest.raises(CapacityError, match="apart"):
            await client.call(Method.CREATE, apart, Sandbox)
        await client.call(Method.CREATE, other, Sandbox)
        await client.call(Method.DESTROY, SandboxRef(first.id), Sandbox)
        assert await client.call(Method.CREATE, apart, Sandbox)


async def test_a_node_refuses_what_is_for_another(tmp_path: Path) -> None:
    async with fake_node(tmp_path) as client:
        for place in (
            Place(labels={"zone": "x"}),
            Place(features=("gpu",)),
            Place(node="zzzzzzzz"),
            Place(devices=("a.com/b",)),
        ):
            wanted = CreateRequest(spec=msgspec.structs.replace(FAKE_SPEC, place=place))
            with pytest.raises(UnsupportedError):
                await client.call(Method.CREATE, wanted, Sandbox)
