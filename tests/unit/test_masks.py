"""Which paths of the kernel are worth a mount in every sandbox."""

from __future__ import annotations

from pathlib import Path

from dsec.security import masks


def test_a_file_for_the_hosts_root_alone_needs_no_mask(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    for name, mode in {"kcore": 0o400, "sysrq-trigger": 0o200, "keys": 0o444, "slabinfo": 0o440}.items():
        (tmp_path / "proc" / name).touch()
        (tmp_path / "proc" / name).chmod(mode)
    (tmp_path / "proc" / "driver").mkdir(mode=0o700)
    owned_by_root = (tmp_path / "proc" / "kcore").stat().st_uid == 0

    needed = set(masks.needed(tmp_path))

    assert set(masks.HIDDEN) - needed == ({"/proc/kcore", "/proc/sysrq-trigger"} if owned_by_root else set())


def test_what_this_kernel_lacks_stays_masked_for_the_case_that_a_module_brings_it(tmp_path: Path) -> None:
    assert masks.needed(tmp_path) == masks.HIDDEN
