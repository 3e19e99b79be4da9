"""Trees made by hostile code are removed and measured without harm to anything else."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from dsec.core.errors import StorageError
from dsec.storage.trees import remove_tree, tree_size


def make_deep(root: Path, depth: int, name: str = "d" * 50) -> None:
    """Directories inside each other, far below what a path can name."""
    fd = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


def test_an_ordinary_tree_is_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").write_text("x")
    (tree / "a" / "b" / "file").write_text("x")

    remove_tree(tree)

    assert list(tmp_path.iterdir()) == []


def test_removing_what_is_not_there_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "missing")
    remove_tree(tmp_path / "missing" / "deeper")


def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    make_deep(tree, 2_000)

    remove_tree(tree)

    assert not tree.exists()


def test_deep_and_bushy_trees_need_few_descriptors(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for branch in range(5):
        (tree / f"b{branch}").mkdir(parents=True)
        make_deep(tree / f"b{branch}", 300)
    highest = os.open(tmp_path, os.O_RDONLY)
    os.close(highest)

    remove_tree(tree)

    again = os.open(tmp_path, os.O_RDONLY)
    os.close(again)
    assert not tree.exists()
    assert again == highest  # none leaked


def test_links_are_removed_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "precious").write_text("x")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "to-directory").symlink_to(outside)
    (tree / "to-file").symlink_to(outside / "precious")
    (tree / "up").symlink_to("../outside")
    link = tmp_path / "link"
    link.symlink_to(outside)

    remove_tree(tree)
    remove_tree(link)

    assert not tree.exists()
    assert not link.is_symlink()
    assert (outside / "precious").read_text() == "x"
    assert (outside / "sub").is_dir()


def test_names_that_are_no_text_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    Path(os.fsdecode(os.fsencode(tree) + b"/\xff\xfe\n")).mkdir()
    os.mkfifo(os.fsencode(tree) + b"/\xff\xfe\n/\x01pipe")

    remove_tree(tree)

    assert not tree.exists()


def test_closed_directories_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "closed" / "below").mkdir(parents=True)
    (tree / "closed").chmod(0)

    remove_tree(tree)

    assert not tree.exists()


@pytest.mark.root
def test_a_file_system_mounted_inside_is_never_entered(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    point = tmp_path / "tree" / "sub" / "point"
    point.mkdir(parents=True)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(os.fsencode(precious), os.fsencode(point), None, 4096, None) == 0  # MS_BIND: the same device
    try:
        with pytest.raises(StorageError, match="mounted"):
            remove_tree(tmp_path / "tree")

        assert (precious / "file").read_text() == "x"
    finally:
        assert libc.umount2(os.fsencode(point), 0) == 0
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_sizes_count_hard_links_once_and_links_not_at_all(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(os.urandom(1 << 20))
    os.link(tree / "file", tree / "again")
    (tmp_path / "big").write_bytes(os.urandom(4 << 20))
    (tree / "link").symlink_to(tmp_path / "big")

    size = tree_size(tree)

    assert size.entries == 4
    assert 1 << 20 <= size.disk_bytes < 2 << 20


def test_sizes_of_trees_deeper_than_any_path(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    make_deep(tree, 1_500)

    assert tree_size(tree).entries == 1_502
    remove_tree(tree)
