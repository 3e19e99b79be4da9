"""What a monitor under Firecracker says that it has written is taken for what it is: files of somebody hostile."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.vm.capture import STATE_BYTES_MAX, Source
from dsec.backends.vm.firecracker_capture import FirecrackerCapture
from dsec.backends.vm.firecracker_machine import FirecrackerMachine
from dsec.backends.vm.saved import SavedMachines, SavedManifest
from dsec.backends.vm.templates import DISK, RAM, STATE
from dsec.core.errors import SandboxFaultError
from dsec.core.limits import MIB

MEMORY_BYTES = 4 * MIB
MANIFEST = SavedManifest(sandbox="sbx", needs={}, shape={})


class Writing:
    """A monitor that writes what it is told to, and notes nothing of what the machine has written."""

    notes_writes = False
    differs_from = None

    def __init__(self, directory: Path, write: Callable[[Path, Path], None]) -> None:
        self._directory = directory
        self._write = write

    async def write_down(self, *, memory: str, state: str, timeout_s: float, differences: bool) -> None:
        assert not differences
        self._write(self._directory / memory, self._directory / state)


def honest(memory: Path, state: Path) -> None:
    memory.write_bytes(b"m" + bytes(MEMORY_BYTES - 1))
    state.write_bytes(b"state")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    own = tmp_path / "own"
    own.mkdir()
    (own / DISK).write_bytes(b"disk" + bytes(MIB))
    return own


def capture_of(tmp_path: Path, own: Path, write: Callable[[Path, Path], None], **changes: Any) -> FirecrackerCapture:
    source = Source(
        sandbox="sbx", pid=1, uid=os.geteuid(), directory=own, disk=DISK, memory_bytes=MEMORY_BYTES, disk_bytes=MIB,
        below=(), overlays=0, flat=True,
    )  # fmt: skip
    return FirecrackerCapture(SavedMachines(tmp_path / "saved"), source, MANIFEST, Writing(own, write), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [True, False])
async def test_memory_state_and_disk_are_copied_and_nothing_is_left_in_the_machine_s_own_directory(
    tmp_path: Path, own: Path, whole: bool
) -> None:
    capture = capture_of(tmp_path, own, honest, whole=whole)

    assert await capture.look()
    await capture.take(within_s=60)
    kept = await capture.keep()
    await capture.close()

    directory = tmp_path / "saved" / kept.machine
    names = {path.name for path in directory.iterdir()} - {"manifest.json"}
    assert names == ({RAM, STATE, DISK} if whole else {RAM, STATE})
    assert (directory / STATE).read_bytes() == b"state"
    assert (directory / RAM).stat().st_size == MEMORY_BYTES
    assert (directory / RAM).stat().st_mode & 0o777 == 0o444
    assert [path.name for path in own.iterdir()] == [DISK]


def too_short(memory: Path, state: Path) -> None:
    honest(memory, state)
    os.truncate(memory, MEMORY_BYTES - 1)


def too_long(memory: Path, state: Path) -> None:
    honest(memory, state)
    os.truncate(memory, MEMORY_BYTES + 1)


def no_state(memory: Path, state: Path) -> None:
    honest(memory, state)
    os.truncate(state, 0)


def endless_state(memory: Path, state: Path) -> None:
    honest(memory, state)
    os.truncate(state, STATE_BYTES_MAX + 1)


def of_the_host(memory: Path, state: Path) -> None:
    honest(memory, state)
    state.unlink()
    state.symlink_to("/etc/hostname")


def a_pipe(memory: Path, state: Path) -> None:
    honest(memory, state)
    memory.unlink()
    os.mkfifo(memory)


def nothing(memory: Path, state: Path) -> None:
    pass


@pytest.mark.parametrize("write", [too_short, too_long, no_state, endless_state, of_the_host, a_pipe, nothing])
async def test_anything_else_than_was_asked_for_is_its_fault_and_leaves_nothing(
    tmp_path: Path, own: Path, write: Callable[[Path, Path], None]
) -> None:
    capture = capture_of(tmp_path, own, write)

    with pytest.raises(SandboxFaultError):
        await capture.take(within_s=60)
    await capture.close()
    await capture.close()

    assert list((tmp_path / "saved").iterdir()) == []
    assert [path.name for path in own.iterdir()] == [DISK]


class Closing(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


async def test_a_machine_that_was_written_down_is_spoken_to_anew_once_it_goes_on(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guest is told to forget its connections: who speaks next must not speak by the old one."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"OK 1\n")
        await writer.drain()
        await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        gone.set()

    gone = asyncio.Event()
    server = await asyncio.start_unix_server(answer, short_tmp / "vsock")
    machine = FirecrackerMachine(short_tmp, owner=os.geteuid())

    async def fine(*_: object, **__: object) -> dict[str, str]:
        return {"state": "Paused"}

    for call in ("get", "put", "patch"):
        monkeypatch.setattr(machine.api, call, fine)
    protocol = Closing()
    await machine.connect(lambda: protocol, timeout_s=60)
    await machine.resume(timeout_s=60)
    assert not protocol.lost

    await machine.write_down(memory=".memory", state=".state", timeout_s=60)
    assert not protocol.lost
    await machine.resume(timeout_s=60)
    assert protocol.lost

    await asyncio.wait_for(gone.wait(), 60)
    server.close()
    await server.wait_closed()


async def test_what_an_earlier_one_left_is_not_taken_for_this_one_s(tmp_path: Path, own: Path) -> None:
    honest(own / ".memory", own / ".state")

    capture = capture_of(tmp_path, own, nothing)
    with pytest.raises(SandboxFaultError):
        await capture.take(within_s=60)
    await capture.close()

    assert [path.name for path in own.iterdir()] == [DISK]
