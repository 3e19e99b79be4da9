"""What goes into a Debian system beside its packages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dsec.core.errors import HostError, InvalidArgumentError, StorageError
from dsec.image import machines
from dsec.image.machines import machine_env, packages_of
from dsec.wire.codec import unpack
from dsec.wire.environments import MachineBuild


@pytest.fixture
def private_umask() -> None:
    """As a service has it, and its builds."""
    old = os.umask(0o077)
    yield  # type: ignore[misc]
    os.umask(old)


@pytest.mark.parametrize("desktop", [False, True])
@pytest.mark.usefixtures("private_umask")
def test_everybody_in_the_system_may_pass_and_read_what_is_ours(tmp_path: Path, desktop: bool) -> None:
    own = tmp_path / "own"

    machines._write_own(own, MachineBuild(name="x", desktop=desktop), "Types: deb\n")

    found = list(own.rglob("*"))
    assert {path.stat().st_mode & 0o7777 for path in [own, *found] if path.is_dir()} == {0o755}
    assert {path.stat().st_mode & 0o777 for path in found if path.is_file()} == {0o644, 0o755}
    assert (own / "etc/systemd/system/dsec-desktop.service").exists() == desktop


@pytest.mark.parametrize("desktop", [False, True])
def test_the_scripts_are_what_a_shell_takes(tmp_path: Path, desktop: bool) -> None:
    machines._write_own(tmp_path, MachineBuild(name="x", desktop=desktop), "")

    for script in (tmp_path / "usr/lib/dsec").iterdir():
        if script.read_bytes().startswith(b"#!/bin/sh"):
            subprocess.run(["sh", "-n", script], check=True)
    config = unpack((tmp_path / "usr/lib/dsec/agent.config").read_bytes(), dict)
    assert config == {"sandbox": "", "caps_exec": 2**64 - 1, "spare": True}


def test_a_machine_with_a_network_card_knows_its_address_and_another_starts_nothing(tmp_path: Path) -> None:
    request = MachineBuild(name="x")
    machines._write_own(tmp_path, request, "")

    lines = (tmp_path / "etc/systemd/network/dsec.network").read_text().splitlines()
    assert {"Kind=!*", "Address=198.18.0.15/24", "Gateway=198.18.0.14"} <= set(lines)
    (rule,) = (tmp_path / "etc/udev/rules.d/80-dsec-network.rules").read_text().replace("\\\n", "").splitlines()
    assert rule.startswith('ACTION=="add", SUBSYSTEM=="net", DEVPATH!="/devices/virtual/*", ')
    assert rule.endswith('ENV{SYSTEMD_WANTS}+="systemd-networkd.service"')
    hooks = machines._hooks(tmp_path, request)
    assert any("echo nameserver 198.18.0.53 > /etc/resolv.conf" in hook for hook in hooks)
    assert not any("networkd" in hook for hook in hooks), "it is enabled for all"


def test_a_desktop_has_the_kernel_that_can_draw() -> None:
    server, desktop = MachineBuild(name="x"), MachineBuild(name="x", desktop=True, packages=("hello",))

    assert "linux-image-cloud-amd64" in packages_of(server)
    assert "linux-image-amd64" in packages_of(desktop)
    assert packages_of(desktop)[-1] == "hello"
    assert "DISPLAY" in machine_env(desktop)
    assert "DISPLAY" not in machine_env(server)


@pytest.mark.parametrize(
    "wrong", [{"name": ".."}, {"packages": ("a b",)}, {"packages": ("--option",)}, {"suite": "/"}, {"disk_bytes": 1}]
)
def test_what_cannot_be_built_is_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError):
        MachineBuild(**{"name": "x", **wrong})  # type: ignore[arg-type]


def test_the_newest_kernel_is_taken_and_a_link_is_not_followed(tmp_path: Path) -> None:
    boot = tmp_path / "boot"
    boot.mkdir()
    (boot / "vmlinuz-6.1.0-1").write_bytes(b"old")
    (boot / "vmlinuz-6.1.0-2").write_bytes(b"new")
    (boot / "initrd.img-6").symlink_to("/etc/passwd")

    machines._take(boot, "vmlinuz-", tmp_path / "kernel")

    assert (tmp_path / "kernel").read_bytes() == b"new"
    with pytest.raises((OSError, StorageError)):
        machines._take(boot, "initrd.img-", tmp_path / "initrd")
    with pytest.raises(HostError):
        machines._take(boot, "nothing-", tmp_path / "other")
