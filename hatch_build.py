"""Compiles the native programs into the wheel, at dsec/_bin.

An editable install builds nothing: there `dsec.binaries` finds what `tools/setup` (or `cargo build`) has left below
`native/target`, so that changing Rust code needs no new install.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = (
    "dsec-agent",
    "dsec-call",
    "dsec-egress",
    "dsec-guest",
    "dsec-jail",
    "dsec-launch",
    "dsec-loader",
    "dsec-pages",
)
TARGET = "x86_64-unknown-linux-gnu"


class NativeBuildHook(BuildHookInterface[Any]):
    """One wheel for every Python 3 on x86-64 Linux: the programs are static and need no C library of the host."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        # tools/cargo finds a toolchain that is new enough, or says how to get one.
        command = [str(root / "tools" / "cargo"), "build", "--release", "--locked", "--target-dir", "target"]
        subprocess.run(command, cwd=root / "native", check=True)
        release = root / "native" / "target" / TARGET / "release"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux2014_x86_64"
        for program in PROGRAMS:
            build_data["force_include"][str(release / program)] = f"dsec/_bin/{program}"
