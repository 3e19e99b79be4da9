"""The layer store: whole or not at all, held while used, swept after the dead."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsec.core.errors import CapacityError, ConflictError, InvalidArgumentError, NotFoundError, StorageError
from dsec.storage.layers import LayerKind, LayerRecord, LayerStore
from dsec.storage.locks import file_lock
from dsec.storage.space import free_bytes, require_free

DIGEST = "ab" * 32
OTHER = "cd" * 32


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "state")


def publish(store: LayerStore, digest: str = DIGEST, content: str = "x") -> None:
    with store.staging() as work:
        (work / "layer" / "tree").mkdir(parents=True)
        (work / "layer" / "tree" / "file").write_text(content)
        store.publish(work / "layer", record(digest))


def record(digest: str) -> LayerRecord:
    return LayerRecord(digest=digest, kind=LayerKind.DIRECTORY, size_bytes=1, entries=2, created_at=1.0)


def test_a_published_layer_is_found_again_by_a_new_store(store: LayerStore) -> None:
    publish(store)

    found = LayerStore(store.state).get(DIGEST)

    assert found.kind is LayerKind.DIRECTORY
    assert (found.meta / "file").read_text() == "x"
    assert found.blob is None
    assert store.digests() == [DIGEST]


def test_the_first_of_two_equal_layers_wins(store: LayerStore) -> None:
    publish(store, content="first")
    publish(store, content="second")

    assert (store.get(DIGEST).meta / "file").read_text() == "first"
    assert list((store.state / "staging").iterdir()) == []


def test_layers_are_closed_to_other_users(store: LayerStore) -> None:
    for name in ("layers", "staging", "locks"):
        assert (store.state / name).stat().st_mode & 0o777 == 0o700


def test_a_missing_layer_is_not_found(store: LayerStore) -> None:
    with pytest.raises(NotFoundError):
        store.get(DIGEST)
    with pytest.raises(NotFoundError):
        store.lease([DIGEST])
    assert not store.has(DIGEST)


@pytest.mark.parametrize("digest", ["", "../../etc", "AB" * 32, "ab" * 31, "ab" * 32 + "\n", "ab" * 32 + "/"])
def test_what_is_no_digest_never_becomes_a_path(store: LayerStore, digest: str) -> None:
    with pytest.raises(InvalidArgumentError):
        store.get(digest)
    with pytest.raises(InvalidArgumentError):
        store.remove(digest)


def test_a_broken_record_is_a_storage_error(store: LayerStore) -> None:
    publish(store)
    (store.state / "layers" / DIGEST / "layer.json").write_text('{"digest": 7}')

    with pytest.raises(StorageError):
        LayerStore(store.state).get(DIGEST)


def test_a_leased_layer_cannot_be_removed_by_anyone(store: LayerStore) -> None:
    publish(store)
    other = LayerStore(store.state)
    first, second = store.lease([DIGEST, DIGEST]), store.lease([DIGEST])

    first.release()
    first.release()  # twice is once
    for remover in (store, other):
        with pytest.raises(ConflictError):
            remover.remove(DIGEST)
    assert store.leased() == {DIGEST}

    second.release()
    other.remove(DIGEST)
    assert not store.has(DIGEST)
    assert store.leased() == frozenset()


def test_a_lease_is_all_or_nothing(store: LayerStore) -> None:
    publish(store)

    with pytest.raises(NotFoundError):
        store.lease([DIGEST, OTHER])

    store.remove(DIGEST)
    assert store.digests() == []


def test_what_the_journal_lists_is_kept(store: LayerStore) -> None:
    publish(store)

    with pytest.raises(ConflictError):
        store.remove(DIGEST, live={DIGEST})

    assert store.has(DIGEST)


def test_a_failed_build_leaves_nothing(store: LayerStore) -> None:
    def build() -> None:
        with store.staging() as work:
            (work / "half").mkdir()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        build()

    assert list((store.state / "staging").iterdir()) == []


def test_cleaning_spares_the_living_and_removes_the_dead(store: LayerStore) -> None:
    dead = store.state / "staging" / "dead"
    (dead / "tree").mkdir(parents=True)
    (store.state / "staging" / "stray").write_text("x")

    with store.staging() as work:
        (work / "file").write_text("x")
        assert LayerStore(store.state).clean() == 2

        assert (work / "file").read_text() == "x"
    assert not dead.exists()


def test_the_work_of_a_killed_process_is_removed_by_the_next_clean(store: LayerStore) -> None:
    program = (
        "import sys; from dsec.storage.layers import LayerStore\n"
        "with LayerStore(sys.argv[1]).staging() as work:\n"
        "    (work / 'half').mkdir(); print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, os.fspath(store.state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert store.clean() == 0  # it lives
        process.kill()
        process.wait()

    assert store.clean() == 1
    assert list((store.state / "staging").iterdir()) == []


def test_a_lock_file_that_its_holder_removed_still_excludes(tmp_path: Path) -> None:
    inside: list[int] = []
    most = 0
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal most
        for _ in range(50):
            with file_lock(tmp_path / "lock"):
                with lock:
                    inside.append(number)
                    most = max(most, len(inside))
                with lock:
                    inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_room_is_asked_for_before_it_is_taken(tmp_path: Path) -> None:
    require_free(tmp_path, reserve_bytes=0)

    with pytest.raises(CapacityError, match="free"):
        require_free(tmp_path, free_bytes(tmp_path) + 1, reserve_bytes=0)


def test_time_is_told_in_seconds(store: LayerStore) -> None:
    publish(store)

    assert store.record(DIGEST).created_at < time.time()
