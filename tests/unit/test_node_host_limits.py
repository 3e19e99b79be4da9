"""`dsec doctor` tells when the kernel's shared pools are too small for the sandboxes that a node may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.node.fingerprint import host_limits


@pytest.fixture
def sysctls(tmp_path: Path) -> Path:
    values = {
        "kernel/pid_max": 32_768,
        "kernel/threads-max": 190_000,
        "kernel/pty/max": 4_096,
        "fs/file-max": 2_400_000,
    }
    for name, value in values.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    return tmp_path


def test_pools_that_suffice_are_fine(sysctls: Path) -> None:
    assert host_limits(3_000, sysctls).status == "ok"


def test_a_pool_that_is_too_small_is_named_with_what_it_should_be(sysctls: Path) -> None:
    found = host_limits(4_000, sysctls)

    assert found.status == "degraded"
    assert found.detail == "for 4000 sandboxes: kernel.pty.max is 4096"
    assert found.hint == "sysctl -w kernel.pty.max=5024; or a lower sandboxes_max"


def test_what_this_kernel_does_not_have_is_no_lack(tmp_path: Path) -> None:
    assert host_limits(4_000, tmp_path).status == "ok"
