"""Monitors as programs of this host: what is none or too old is told; one that was replaced makes templates anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsec.backends.microvm import backend as microvm
from dsec.backends.microvm.backend import MicrovmBackend
from dsec.backends.microvm.config import MicrovmConfig
from dsec.backends.microvm.monitors import Chosen
from dsec.backends.vm.driver import Driver
from dsec.backends.vm.firecracker import find_firecracker
from dsec.backends.vm.qemu import find_qemu
from dsec.backends.vm.templates import template_key
from dsec.core.errors import HostError
from dsec.core.ids import new_node_id
from dsec.core.spec import Substrate
from dsec.testing.hosts import instance_spec


def program(directory: Path, says: str, *, code: int = 0) -> Path:
    """As a package manager puts it there: by a rename."""
    path = directory / "bin" / "monitor"
    path.parent.mkdir(exist_ok=True)
    (directory / "share" / "qemu").mkdir(parents=True, exist_ok=True)
    (directory / "share" / "qemu" / "qboot.rom").touch()
    draft = path.with_suffix(".new")
    draft.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    draft.chmod(0o755)
    draft.replace(path)
    return path


@pytest.mark.parametrize(
    ("says", "code", "told"),
    [
        ("QEMU emulator version 7.1.0", 0, "of version 7.1; 7.2 is the oldest that works"),
        ("QEMU emulator version seven", 0, "a strange version"),
        ("", 1, "does not tell its version"),
    ],
)
def test_a_monitor_that_cannot_be_used_is_told(tmp_path: Path, says: str, code: int, told: str) -> None:
    with pytest.raises(HostError, match=told):
        find_qemu(str(program(tmp_path, says, code=code)))


def test_a_program_that_was_replaced_is_another_one(tmp_path: Path) -> None:
    for find, first, second in (
        (find_qemu, "QEMU emulator version 7.2.1", "QEMU emulator version 7.2.9"),
        (find_firecracker, "Firecracker v1.12.0", "Firecracker v1.12.1"),
    ):
        path = program(tmp_path, first)
        before: Any = find(str(path))
        assert before.is_current
        program(tmp_path, second)

        assert not before.is_current
        assert find(str(path)).text == second
        assert find(str(path)).is_current


async def test_a_node_makes_no_clone_of_a_template_of_the_monitor_before(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(short_tmp, "QEMU emulator version 7.2.1")

    async def choose(config: MicrovmConfig) -> Chosen:
        driver = Driver(find_qemu(str(path)), "tcg", short_tmp / "vmlinux", short_tmp / "initramfs")
        return Chosen(driver, driver.identity, {}, {})

    monkeypatch.setattr(microvm, "choose_monitor", choose)
    config = MicrovmConfig(short_tmp / "r", short_tmp / "s", id_dir=short_tmp / "i", proxied=False)
    backend = MicrovmBackend(config, node=new_node_id())
    monkeypatch.setattr(backend._place, "open", lambda: None)
    spec = instance_spec(Substrate.MICROVM)

    async def key() -> str:
        return template_key((await backend._wanted(spec)).facts.identity)

    first = await key()
    assert await key() == first
    program(short_tmp, "QEMU emulator version 7.2.9")
    assert await key() != first

    path.unlink()
    with pytest.raises(HostError, match="there is no"):
        await key()
    await backend._open()  # what runs can still be ended
