"""An agent that was taken over, as a process of its own: its sandbox fails, and nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from dsec.core.errors import DsecError
from dsec.core.limits import MIB
from dsec.sdk.client import AsyncClient
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.waiting import eventually
from dsec.wire import agent
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import PREAMBLE_MAGIC, FrameDecoder, FrameType, encode_frame
from tests.security import hostile_process
from tests.system.container_place import ENVIRONMENT, Place, private_place, served

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

# Too slow to be told from an agent that is busy: callers are told so at their own time, and may destroy it.
SLOW: Final = {
    "another_marker",
    "byte_by_byte",
    "half_a_frame",
    "half_a_marker_for_ever",
    "nothing_is_read",
    "silence",
}
# Says nothing that an agent may not say.
HARMLESS: Final = {"errors_that_forge_lines"}

_GROWTH_BYTES_MAX: Final = 128 * MIB
_PATIENCE_S: Final = 60.0


@dataclass
class Ending:
    """What the caller of a sandbox with such an agent saw."""

    error: BaseException | None = None
    state: str = ""
    cause: str | None = None


@dataclass
class Attack:
    endings: dict[str, Ending] = field(default_factory=dict)
    neighbours: list[str] = field(default_factory=list)  # what their commands said meanwhile
    growth_bytes: int = 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attack(small_store: Path) -> AsyncIterator[Attack]:
    with private_place(small_store) as place:
        async with served(place) as (_, client):
            found = Attack()
            async with await client.create(ENVIRONMENT, memory="64MiB") as neighbour:
                over = asyncio.Event()

                async def go_on() -> None:
                    while not over.is_set():
                        found.neighbours.append((await neighbour.exec("echo untouched", timeout_s=60)).stdout)

                going = asyncio.create_task(go_on())
                before = _peak_bytes()
                endings = await asyncio.gather(*[_suffer(place, client, way) for way in hostile_process.WAYS])
                found.growth_bytes = _peak_bytes(reset=False) - before
                over.set()
                await going
            found.endings = dict(zip(hostile_process.WAYS, endings, strict=True))
            yield found


def _peak_bytes(*, reset: bool = True) -> int:
    """The most memory that this process has had since the last reset."""
    if reset:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


async def _suffer(place: Place, client: AsyncClient, way: str) -> Ending:
    """Creates a sandbox, puts the hostile program in its agent's place, and uses it."""
    ending = Ending()
    sandbox = await client.create(ENVIRONMENT, memory="64MiB")
    path = place.run / "sb" / f"{sandbox.id}.sock"
    real = path.rename(path.with_suffix(".real"))
    with _hostile(path, way) as process:
        await asyncio.to_thread(_let_go, process, real, sandbox.id)
        try:
            async with asyncio.timeout(3 if way in SLOW else _PATIENCE_S):
                await sandbox.exec("echo never")
        except (DsecError, TimeoutError) as error:
            ending.error = error
        if way not in SLOW | HARMLESS:
            with suppress(AssertionError):  # the state tells
                await eventually(lambda: _has_failed(sandbox), deadline_s=_PATIENCE_S)
        info = await sandbox.refresh()
        ending.state, ending.cause = info.state, info.cause
        async with asyncio.timeout(_PATIENCE_S):
            await sandbox.destroy()
    return ending


async def _has_failed(sandbox: AsyncSandbox) -> bool:
    return (await sandbox.refresh()).state == "failed"


@contextmanager
def _hostile(path: Path, way: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-I", hostile_process.__file__, str(path), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _let_go(process: subprocess.Popen[bytes], real: Path, sandbox: str) -> None:
    """Tells the program who the agent is; in asking, the agent drops the node, which then turns to the program."""
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"listening\n"
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(_PATIENCE_S)
        link.connect(str(real))
        marker = PREAMBLE_MAGIC + bytes(16)
        link.sendall(marker + encode_frame(FrameType.HELLO, 0, pack(agent.Hello(1, 1, sandbox))))
        data, frames = b"", []
        while not frames:
            data += link.recv(65_536)
            frames = list(FrameDecoder().feed(data.partition(marker)[2]))
        process.stdin.write(unpack(frames[0].body, agent.HelloReply).boot_id.encode() + b"\n")
        process.stdin.flush()


@pytest.mark.parametrize("way", [way for way in hostile_process.WAYS if way not in SLOW | HARMLESS])
async def test_a_sandbox_whose_agent_breaks_the_contract_has_failed(attack: Attack, way: str) -> None:
    ending = attack.endings[way]

    assert (ending.state, ending.cause) == ("failed", "sandbox_fault"), ending
    assert ending.error is None or isinstance(ending.error, DsecError), ending


@pytest.mark.parametrize("way", sorted(SLOW))
async def test_a_sandbox_whose_agent_is_slow_holds_nobody_who_has_a_deadline(attack: Attack, way: str) -> None:
    ending = attack.endings[way]

    assert isinstance(ending.error, (TimeoutError, DsecError)), ending


async def test_what_such_an_agent_says_is_made_printable_and_short(attack: Attack) -> None:
    error = attack.endings["errors_that_forge_lines"].error

    assert isinstance(error, DsecError)
    assert error.message.isprintable()
    assert len(error.message) < 1_000


async def test_other_sandboxes_do_not_notice(attack: Attack) -> None:
    assert set(attack.neighbours) == {"untouched\n"}
    assert len(attack.neighbours) > 2


async def test_the_node_does_not_grow(attack: Attack) -> None:
    assert attack.growth_bytes < _GROWTH_BYTES_MAX
