"""Machines that were written down: whole or not there, damaged ones refused, kept while somebody needs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec.backends.vm.copying import Deadline, copy_file, digest_of, link_or_copy, open_written
from dsec.backends.vm.saved import SavedMachine, SavedMachines, SavedManifest
from dsec.core.errors import DeadlineError, SandboxFaultError, StorageError, UnsupportedError
from dsec.testing.faults import Faults

NEEDS = {"monitor": "QEMU 7.2", "machine": "1"}
MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> SavedMachines:
    return SavedMachines(tmp_path / "saved")


def save(store: SavedMachines) -> SavedMachine:
    work, lock = store.begin()
    try:
        (work / "state.mig").write_bytes(b"state")
        with (work / "ram.img").open("wb") as file:
            file.truncate(4 * MIB)
            file.seek(MIB)
            file.write(b"memory")
        manifest = SavedManifest(sandbox="sbx_1", needs=NEEDS, shape={"memory_bytes": 4 * MIB})
        saved = store.finish(work, manifest)
    finally:
        os.close(lock)
    store.let_go(saved.id)
    return saved


def test_what_was_saved_is_found_by_the_next_process_too(store: SavedMachines) -> None:
    saved = save(store)

    found = SavedMachines(store.directory).get(saved.id, NEEDS)

    assert found == saved
    assert found.template.bare


@pytest.mark.parametrize("damage", ["byte", "shorter", "gone", "manifest", "link"])
def test_a_damaged_one_is_refused_by_name(store: SavedMachines, damage: str) -> None:
    saved = save(store)
    memory = saved.directory / "ram.img"
    if damage == "byte":
        with memory.open("r+b") as file:
            file.seek(3 * MIB)
            file.write(b"x")
    elif damage == "shorter":
        os.truncate(memory, MIB)
    elif damage == "gone":
        memory.unlink()
    elif damage == "manifest":
        (saved.directory / "manifest.json").write_bytes(b"{")
    else:
        memory.rename(saved.directory.parent / "elsewhere")
        memory.symlink_to(saved.directory.parent / "elsewhere")

    for again in (store, SavedMachines(store.directory)):
        with pytest.raises(StorageError, match="is damaged"):
            again.get(saved.id, NEEDS)


def test_one_that_is_not_there_or_of_another_monitor_is_told_as_such(store: SavedMachines) -> None:
    saved = save(store)

    with pytest.raises(StorageError, match="not on this node"):
        store.get("snp_none", NEEDS)
    with pytest.raises(UnsupportedError, match=r"monitor 'QEMU 7\.2'"):
        store.get(saved.id, {**NEEDS, "monitor": "QEMU 9.9"})


def test_what_nobody_names_or_holds_goes_and_so_does_what_a_dead_process_was_making(store: SavedMachines) -> None:
    kept, held, gone = save(store), save(store), save(store)
    _, lock = store.begin()  # somebody works there
    dead, left = store.begin()
    os.close(left)

    with store.held(held.id):
        store.keep({kept.id})
        found = {path.name for path in store.directory.iterdir()}
        assert {kept.id, held.id} < found
        assert gone.id not in found
        assert dead.name not in found
        assert len(found) == 3
    os.close(lock)
    store.keep(())

    assert not list(store.directory.iterdir())


def test_one_that_cannot_be_finished_is_not_there(store: SavedMachines) -> None:
    with Faults(1, prefix="vm.saved"), pytest.raises(StorageError):
        save(store)

    store.keep(())

    assert not list(store.directory.iterdir())


def test_the_digest_counts_what_is_in_a_file_and_not_how_it_lies(tmp_path: Path) -> None:
    sparse, full, other = (tmp_path / name for name in ("sparse", "full", "other"))
    content = bytearray(MIB + 12_345)
    content[500_000:500_003] = b"abc"
    full.write_bytes(content)
    with sparse.open("wb") as file:
        file.truncate(len(content))
        file.seek(500_000)
        file.write(b"abc")
    other.write_bytes(bytes(content) + b"\0")

    assert digest_of(sparse) == digest_of(full)
    assert digest_of(other) != digest_of(full)


def test_a_copy_is_as_sparse_as_its_source_and_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(64 * MIB)
        file.seek(40 * MIB)
        file.write(b"here")
    fd = os.open(source, os.O_RDONLY)
    try:
        copied = copy_file(fd, tmp_path / "copy", Deadline(60))
        with pytest.raises(DeadlineError):
            copy_file(fd, tmp_path / "late", Deadline(-1))
        assert link_or_copy(source, fd, tmp_path / "link", Deadline(60)) == 0
        assert link_or_copy(tmp_path / "copy", fd, tmp_path / "other", Deadline(60)) > 0
    finally:
        os.close(fd)

    assert copied < 2 * MIB
    assert digest_of(tmp_path / "copy") == digest_of(source) == digest_of(tmp_path / "other")
    assert (tmp_path / "copy").stat().st_blocks * 512 < 4 * MIB
    assert (tmp_path / "link").samefile(source)


def test_what_a_monitor_puts_where_its_disk_was_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"of the host")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(MIB))
    me = os.geteuid()

    for name, owner in (("link", me), ("pipe", me), ("large", me), ("secret", me + 1), ("none", me)):
        with pytest.raises(SandboxFaultError):
            open_written(tmp_path / name, owner=owner, bytes_max=1024)
    os.close(open_written(tmp_path / "large", owner=me, bytes_max=2 * MIB))
