"""What is left out of a workspace or toolkit: which paths the rules mean, what is removed, what is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dsec.core.errors import InvalidArgumentError
from dsec.image.residue import RULES, check_pattern, find_residue, remove_residue, rules_for
from dsec.wire.snapshots import Removed

ROOT, USER = "/root", "/home/user"
LEFT = (
    "/tmp/x",
    "/tmp/.hidden/y",
    f"{ROOT}/.bash_history",
    f"{USER}/.python_history",
    f"{USER}/.cache/pip/a",
    "/var/lib/apt/lists/mirror_dists_InRelease",
    "/usr/lib/python3/a/__pycache__/a.pyc",
    "/__pycache__/b.pyc",
    f"{ROOT}/.ssh/id_ed25519",
    f"{ROOT}/.git-credentials",
    f"{USER}/.docker/config.json",
    "/var/log/apt/history.log",
    "/run/x.pid",
)
KEPT = (
    "/work/tmp/x",
    f"{USER}/.bashrc",
    f"{USER}/cache/a",
    f"{USER}/deep/.cache/a",
    "/usr/lib/python3/a/__pycache__.py",
    f"{ROOT}/.docker/plugins/a",
    "/var/cache/other/a",
    "/home/.cache",
)


def tree(top: Path, paths: tuple[str, ...]) -> int:
    for path in paths:
        place = top / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"12345")
    return os.open(top, os.O_RDONLY | os.O_DIRECTORY)


def files(top: Path) -> set[str]:
    return {f"/{path.relative_to(top)}" for path in top.rglob("*") if path.is_file()}


def clean(top: Path, rules: Mapping[str, tuple[str, ...]]) -> list[Removed]:
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        residue = find_residue(fd, rules)
        remove_residue(fd, residue)
        return residue.report()
    finally:
        os.close(fd)


def test_residue_goes_and_all_else_stays(tmp_path: Path) -> None:
    os.close(tree(tmp_path, LEFT + KEPT))

    report = clean(tmp_path, RULES)

    assert files(tmp_path) == set(KEPT)
    assert (tmp_path / "tmp").is_dir()
    assert {removed.rule for removed in report} == set(RULES)
    temporary = next(removed for removed in report if removed.rule == "temporary")
    assert (temporary.entries, temporary.size_bytes) == (4, 15)
    assert set(temporary.paths) == {"/run/x.pid", "/tmp/.hidden", "/tmp/x"}


def test_directories_keep_their_times(tmp_path: Path) -> None:
    os.close(tree(tmp_path, ("/tmp/x",)))
    os.utime(tmp_path / "tmp", ns=(10**18, 10**18))

    clean(tmp_path, RULES)

    assert (tmp_path / "tmp").stat().st_mtime_ns == 10**18


def test_a_link_is_removed_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    top = tmp_path / "top"
    (top / "tmp").mkdir(parents=True)
    (top / "tmp/link").symlink_to(outside)
    (top / "root").symlink_to(outside)

    clean(top, RULES)

    assert not (top / "tmp/link").is_symlink()
    assert (outside / "kept").exists()


def test_rules_can_be_kept_added_and_replaced() -> None:
    rules = rules_for({"mine": ("/opt/x",), "logs": ("/var/log/only",), "ssh": ()}, ["caches"])

    assert rules["mine"] == ("/opt/x",)
    assert rules["logs"] == ("/var/log/only",)
    assert not {"ssh", "caches"} & set(rules)
    with pytest.raises(InvalidArgumentError, match="nothing"):
        rules_for({}, ["nothing"])


@pytest.mark.parametrize("pattern", ["relative", "/", "/*", "/**", "**/*", "**/", ""])
def test_patterns_that_mean_everything_or_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError):
        check_pattern(pattern)


def test_our_own_patterns_are_patterns() -> None:
    for patterns in RULES.values():
        for pattern in patterns:
            check_pattern(pattern)
