"""A guest without QEMU: its archive of first files, its kernel out of a bzImage, what is said without."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import zstandard

from dsec.backends.vm.initramfs import cpio_entry
from dsec.backends.vm.kernel import cut_vmlinux
from dsec.core.errors import HostError
from dsec.testing import guest_kernel as kernels
from dsec.testing.guest import qemu
from dsec.testing.guest_kernel import GuestUnavailableError, guest_kernel


def bzimage(payload: bytes, *, sectors: int = 3) -> bytes:
    head = bytearray((sectors + 1) * 512)
    head[0x1F1] = sectors
    struct.pack_into("<II", head, 0x248, 100, len(payload))
    return bytes(head) + bytes(100) + payload + b"more"


def test_the_kernel_is_cut_out_of_its_image() -> None:
    assert cut_vmlinux(bzimage(zstandard.compress(b"\x7fELF kernel"))) == b"\x7fELF kernel"
    with pytest.raises(HostError, match="zstd"):
        cut_vmlinux(bzimage(b"\x1f\x8b another packer"))


def test_entries_of_the_archive_are_aligned_and_carry_their_content() -> None:
    for content in (b"", b"x", b"12345678"):
        entry = cpio_entry("modules/a.ko", 0o100755, content)

        assert len(entry) % 4 == 0
        assert entry[:14] == b"07070100000000"
        assert int(entry[14:22], 16) == 0o100755
        assert int(entry[54:62], 16) == len(content)
        assert entry.rstrip(b"\0").endswith(content)


@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio is not installed")
def test_the_archive_is_one_for_other_programs_too() -> None:
    archive = cpio_entry("d", 0o040755) + cpio_entry("d/f", 0o100644, b"abc") + cpio_entry("TRAILER!!!", 0)

    listed = subprocess.run(["cpio", "-t", "--quiet"], input=archive, capture_output=True, check=True).stdout

    assert listed.split() == [b"d", b"d/f"]


def test_a_kernel_in_the_cache_is_used_and_needs_no_package_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    kept = kernels.cache_directory() / f"{kernels.PACKAGE}=6.12.1-1"
    kept.mkdir(parents=True)
    (kept / "modules.order").write_text("a.ko\nb.ko\n")
    (kept / "wanted").write_text(" ".join(kernels._MODULES))
    (kept / "busybox").touch()

    kernel = guest_kernel()

    assert (kernel.name, kernel.vmlinux) == (kept.name, kept / "vmlinux")
    assert [module.name for module in kernel.modules] == ["a.ko", "b.ko"]


def test_what_is_missing_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(GuestUnavailableError, match="no apt-get"):
        guest_kernel()
    with pytest.raises(GuestUnavailableError, match="apt-get install qemu-system-x86"):
        qemu()

    assert list(tmp_path.rglob("*")) == []
