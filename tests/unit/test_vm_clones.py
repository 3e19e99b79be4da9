"""Clones that begin: what is asked of their agents before anybody else may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from dsec.backends.vm import clones, machine
from dsec.backends.vm.clones import awaken, rehearse
from dsec.core.errors import InvalidArgumentError, LaunchError, SandboxFaultError
from dsec.core.spec import Substrate
from dsec.testing.hosts import instance_spec
from dsec.wire.agent import Exec


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


class Stage:
    """An agent that is nobody's, as far as a rehearsal asks it."""

    def __init__(self, *, refuses: bool = False, ends: bool = True) -> None:
        self.refuses = refuses
        self.ends = ends
        self.runs: list[Exec] = []
        self.forgotten: list[str] = []

    async def exec(self, exec: Exec) -> AsyncIterator[bytes]:
        if self.refuses:
            raise InvalidArgumentError("this agent serves no sandbox yet")
        self.runs.append(exec)
        return self._output()

    async def _output(self) -> AsyncIterator[bytes]:
        yield b"whatever a shell has to say"
        if not self.ends:
            await asyncio.Event().wait()

    async def exit_ack(self, id: str) -> None:
        self.forgotten.append(id)


async def test_a_rehearsal_is_bounded_and_leaves_no_exec() -> None:
    stage = Stage()

    await rehearse(cast(Any, stage))

    assert [run.id for run in stage.runs] == stage.forgotten
    assert len(set(stage.forgotten)) == len(stage.runs) > 0
    for run in stage.runs:
        assert run.timeout_s is not None
        assert run.output_bytes_max is not None
        assert (run.env, run.user, run.stdin, run.tty, run.session) == ({}, None, False, None, None)


async def test_a_machine_that_cannot_be_rehearsed_is_as_good_as_before() -> None:
    stage = Stage(refuses=True)  # an agent of before, or an image without a shell

    await rehearse(cast(Any, stage))

    assert stage.forgotten == []


async def test_a_rehearsal_that_does_not_end_is_no_machine_for_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clones, "_REHEARSAL_S", 0.01)

    with pytest.raises(LaunchError, match="does not end") as failed:
        await rehearse(cast(Any, Stage(ends=False)))

    assert failed.value.step == "agent"


def test_only_an_emulated_kernel_is_told_to_leave_programs_at_the_same_addresses() -> None:
    def line(*, emulated: bool) -> list[str]:
        words = machine.boot_arguments(kernel="k", initramfs="i", emulated=emulated, tsc_khz=None)
        return words[words.index("-append") + 1].split()

    assert "norandmaps" in line(emulated=True)
    assert "norandmaps" not in line(emulated=False)
