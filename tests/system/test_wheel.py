"""The wheel carries the programs, and finds them where it is installed."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.style.tree import ROOT


@pytest.mark.slow
def test_a_wheel_holds_the_programs_and_its_code_finds_them(tmp_path: Path, native_binaries: dict[str, Path]) -> None:
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, timeout=600, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")

    with zipfile.ZipFile(wheel) as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, timeout=600, stdin=subprocess.DEVNULL)
    # -S: without this environment's editable install of the checkout.
    code = "import dsec.binaries as b; print(b.find_binary('dsec-agent')); print(b.find_binary('dsec-launch'))"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, check=True,
        timeout=60, cwd=tmp_path,
    )  # fmt: skip

    assert wheel.name.endswith("-py3-none-manylinux2014_x86_64.whl")
    assert all(modes[f"dsec/_bin/{name}"] & 0o111 for name in native_binaries)
    assert {f"dsec/_bin/{name}" for name in programs_looked_for()} <= set(modes)
    assert {"dsec/backends/fncall/types.toml", "dsec/backends/fncall/zygote.py", "dsec/py.typed"} <= set(modes)
    assert found.stdout.decode().split() == [str(tmp_path / "site/dsec/_bin" / name) for name in native_binaries]


def programs_looked_for() -> set[str]:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return {name for source in sources for name in re.findall(r"find_binary\(\"(dsec-[a-z]+)\"\)", source)}
