"""tools/cargo takes a Rust toolchain that is new enough, wherever it is, and says what to do without one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.style.tree import ROOT

OLD, NEW, BROKEN = "cargo 1.63.0", "cargo 1.95.0 (abc 2026-01-01)", "error: no default toolchain"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with nothing in its PATH but what the script itself needs."""
    for name in ("bash", "dirname", "sort", "env"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(program)
    return tmp_path


def add_cargo(folder: Path, version: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cargo = folder / "cargo"
    cargo.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" || echo "ran {folder.name} $*"\n')
    cargo.chmod(0o755)


def run(machine: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    folders = ":".join(map(str, [*path, machine / "bin"]))
    return subprocess.run(
        [ROOT / "tools" / "cargo", "build"], env={"PATH": folders, "HOME": str(machine / "home")},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_the_first_of_the_path_is_taken_when_it_is_new_enough(machine: Path) -> None:
    add_cargo(machine / "first", NEW)
    add_cargo(machine / "home" / ".cargo" / "bin", NEW)

    assert run(machine, machine / "first").stdout == "ran first build\n"


@pytest.mark.parametrize("version", [OLD, BROKEN])
def test_an_old_or_broken_one_is_passed_over(machine: Path, version: str) -> None:
    add_cargo(machine / "first", version)
    add_cargo(machine / "second", NEW)

    assert run(machine, machine / "first", machine / "second").stdout == "ran second build\n"


def test_one_of_the_home_directory_serves(machine: Path) -> None:
    add_cargo(machine / "home" / ".cargo" / "bin", NEW)

    assert run(machine).stdout == "ran bin build\n"


@pytest.mark.skipif(any(Path("/usr/bin").glob("cargo-1.*")), reason="this machine has a versioned cargo")
def test_without_one_it_says_what_to_do(machine: Path) -> None:
    add_cargo(machine / "first", OLD)

    done = run(machine, machine / "first")

    assert done.returncode == 127
    assert "tools/setup" in done.stderr
