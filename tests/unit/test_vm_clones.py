"""Clones that begin: what is asked of their agents before anybody else may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from dsec.backends.vm.clones import awaken
from dsec.core.errors import LaunchError, SandboxFaultError
from dsec.core.spec import Substrate
from dsec.testing.hosts import instance_spec


class Silent:
    """A clone among many others, whose agent has not had a processor yet."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    async def connect(self, factory: Callable[[], asyncio.Protocol], *, timeout_s: float) -> asyncio.Transport:
        self.waited.append(timeout_s)
        raise SandboxFaultError("nobody answers")


async def test_an_agent_has_all_of_the_time_that_its_clone_is_given() -> None:
    made = Silent()

    with pytest.raises(LaunchError, match="the agent of a clone does not answer: nobody answers") as failed:
        await awaken(cast(Any, made), instance_spec(Substrate.MICROVM), None, None, wait_s=42.0)

    assert failed.value.step == "agent"
    assert made.waited == [42.0]
