"""Overlays of a disk that become one: read the same, end as they began when it fails, and never many."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from dsec.backends.vm.merging import merge
from dsec.backends.vm.qcow2 import CLUSTER, write_overlay
from dsec.backends.vm.saved import OVERLAY, SavedMachine, SavedMachines, SavedManifest
from dsec.backends.vm.shortening import shortened
from dsec.core import limits
from dsec.core.errors import CapacityError, StorageError
from dsec.testing.faults import each_nth_failure

NEEDS = {"monitor": "QEMU 7.2"}
SIZE = (1 << 30) + 5 * 4096  # two tables, and a piece of a third
PLACES = (0, 1, 2, 3, 8_000, 8_191, 8_192, 8_193, 16_384)  # clusters, by table and at its edges

needs_qemu = pytest.mark.skipif(shutil.which("qemu-io") is None, reason="needs qemu-io (apt-get install qemu-utils)")


def overlay(file: Path, *written: tuple[int, bytes | None]) -> Path:
    """As a monitor writes it (docs/interop/qcow2.txt): at clusters, what is there; None reads as zeros."""
    write_overlay(file, backing="/below", backing_format="raw", size_bytes=SIZE)
    tables: dict[int, int] = {}
    with file.open("r+b") as out:
        for cluster, content in written:
            number, at = divmod(cluster, CLUSTER // 8)
            if number not in tables:
                tables[number] = -(-out.seek(0, os.SEEK_END) // CLUSTER) * CLUSTER
                out.truncate(tables[number] + CLUSTER)
                out.seek(3 * CLUSTER + 8 * number)
                out.write(struct.pack(">Q", tables[number] | 1 << 63))
            entry = 1
            if content is not None:
                end = -(-out.seek(0, os.SEEK_END) // CLUSTER) * CLUSTER
                out.seek(end)
                out.write(content)
                entry = end | 1 << 63
            out.seek(tables[number] + 8 * at)
            out.write(struct.pack(">Q", entry))
    return file


def random_chain(work: Path, rng: Random, count: int) -> list[Path]:
    def written(cluster: int) -> tuple[int, bytes | None]:
        whole = SIZE - cluster * CLUSTER
        return cluster, rng.choice((None, rng.randbytes(min(CLUSTER, whole)), rng.randbytes(100)))

    return [
        overlay(work / f"{number}.qcow2", *map(written, rng.sample(PLACES, rng.randint(1, 6))))
        for number in range(count)
    ]


def seen(files: Sequence[Path], base: Path, work: Path) -> bytes:
    """By QEMU, of the places that anything is at."""
    node = f'{{"driver":"raw","file":{{"driver":"file","filename":"{base}"}}}}'
    for file in files:
        node = f'{{"driver":"qcow2","file":{{"driver":"file","filename":"{file}"}},"backing":{node}}}'
    out = work / "seen"
    subprocess.run(["qemu-img", "convert", "-O", "raw", f"json:{node}", out], check=True, timeout=60)
    assert out.stat().st_size == SIZE
    with out.open("rb") as file:
        return b"".join(_at(file.fileno(), cluster) for cluster in PLACES)


def _at(fd: int, cluster: int) -> bytes:
    return os.pread(fd, CLUSTER, cluster * CLUSTER)


@pytest.fixture
def base(tmp_path: Path, rng: Random) -> Path:
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.truncate(SIZE)
        for cluster in PLACES:
            file.seek(cluster * CLUSTER)
            file.write(rng.randbytes(100))
    return path


@needs_qemu
def test_qemu_reads_the_same_of_what_was_made_one_and_finds_no_fault_in_it(
    tmp_path: Path, base: Path, rng: Random
) -> None:
    for turn in range(3):
        work = tmp_path / str(turn)
        work.mkdir()
        chain = random_chain(work, rng, 5)
        before = seen(chain, base, work)

        merge(chain[:4], work / "merged")

        assert seen([work / "merged", chain[4]], base, work) == before
        assert all(file.exists() for file in chain)
        check = ["qemu-img", "check", "-f", "qcow2", "--output=json", work / "merged"]
        found = subprocess.run(check, capture_output=True, timeout=60, text=True)
        assert found.returncode == 0, found.stdout
        assert "corruptions" not in found.stdout
        assert "leaks" not in found.stdout


@needs_qemu
def test_what_qemu_itself_has_written_discarded_and_zeroed_reads_the_same(tmp_path: Path, base: Path) -> None:
    chain: list[Path] = []
    below, format = base, "raw"
    orders = (
        "write -P 1 0 300k",
        "write -P 2 100k 4k",
        "discard 0 128k",
        "write -z 512m 1m",
        "write -P 3 512m 5k",
        "write -P 4 1g 20k",
        "write -z -u 64k 64k",
    )
    for number, order in enumerate(orders):
        file = tmp_path / f"{number}.qcow2"
        make = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", below, "-F", format, file]
        subprocess.run(make, check=True, timeout=60)
        io = ["qemu-io", "-f", "qcow2", "-d", "unmap", "-c", order, file]
        subprocess.run(io, check=True, timeout=60, stdout=subprocess.DEVNULL)
        chain.append(file)
        below, format = file, "qcow2"
    before = seen(chain, base, tmp_path)

    merge(chain, tmp_path / "merged")

    assert seen([tmp_path / "merged"], base, tmp_path) == before


def test_a_file_of_many_clusters_has_a_count_for_each(tmp_path: Path) -> None:
    """More than one block of counts has room for."""
    size, many = 3 << 30, 34_000
    for name in ("large", "other"):
        write_overlay(tmp_path / name, backing="/below", backing_format="raw", size_bytes=size)
    with (tmp_path / "large").open("r+b") as out:
        tables = out.seek(0, os.SEEK_END)
        data = tables + 5 * CLUSTER
        entries = [data + number * CLUSTER | 1 << 63 for number in range(many)]
        os.pwrite(out.fileno(), struct.pack(f">{many}Q", *entries), tables)
        os.pwrite(out.fileno(), struct.pack(">5Q", *(tables + n * CLUSTER for n in range(5))), 3 * CLUSTER)
        out.truncate(data + many * CLUSTER)
        os.pwrite(out.fileno(), b"last", data + (many - 1) * CLUSTER)

    merge([tmp_path / "large", tmp_path / "other"], tmp_path / "merged")

    with (tmp_path / "merged").open("rb") as merged:
        end = merged.seek(0, os.SEEK_END) // CLUSTER
        blocks = [place for (place,) in struct.iter_unpack(">Q", os.pread(merged.fileno(), 32, CLUSTER)) if place]
        counts = b"".join(os.pread(merged.fileno(), CLUSTER, place) for place in blocks)
    assert len(blocks) == 2
    assert end > many
    assert counts[: 2 * end] == b"\0\1" * end
    assert not any(counts[2 * end :])
    assert (tmp_path / "merged").stat().st_blocks * 512 < 2 << 20, "nothing that is empty takes room"


@pytest.mark.parametrize(
    "lie", ["compressed", "table", "again", "tables", "size", "clusters", "bits", "short", "elsewhere"]
)
def test_a_file_that_lies_is_refused_and_leaves_nothing(tmp_path: Path, lie: str) -> None:
    good, bad = overlay(tmp_path / "good", (0, b"good")), overlay(tmp_path / "bad", (0, b"bad"), (1, b"more"))
    table = 4 * CLUSTER
    with bad.open("r+b") as out:
        fd = out.fileno()
        if lie == "compressed":
            os.pwrite(fd, struct.pack(">Q", 1 << 62 | 4 * CLUSTER), table)
        elif lie == "table":
            os.pwrite(fd, struct.pack(">Q", 1 << 40), 3 * CLUSTER)
        elif lie == "again":
            os.pwrite(fd, struct.pack(">Q", 5 * CLUSTER | 1 << 63) * (CLUSTER // 8), table)
        elif lie == "tables":
            os.pwrite(fd, struct.pack(">Q", 1 << 45), 24)
            os.pwrite(fd, struct.pack(">I", 1 << 16), 36)
            os.pwrite(fd, struct.pack(">Q", 1 << 20), 40)
            os.pwrite(fd, struct.pack(">Q", table | 1 << 63) * (1 << 16), 1 << 20)
        elif lie == "size":
            os.pwrite(fd, struct.pack(">Q", 1 << 60), 24)
        elif lie == "bits":
            os.pwrite(fd, b"\xff" * 4, 20)
        elif lie == "clusters":
            os.pwrite(fd, struct.pack(">I", 9), 20)
        elif lie == "short":
            os.pwrite(fd, struct.pack(">I", 0), 36)
        else:
            os.pwrite(fd, struct.pack(">Q", 4), 72)

    with pytest.raises(StorageError):
        merge([good, bad], tmp_path / "merged")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "good"]


# ---- of snapshots ----------------------------------------------------------------------------------


def saved_above(store: SavedMachines, below: SavedMachine | None, number: int) -> SavedMachine:
    """As a capture makes it: all of what it stands on by other names, and what it has written itself."""
    work, lock = store.begin()
    try:
        (work / "state.mig").write_bytes(b"state")
        (work / "ram.img").write_bytes(b"memory")
        overlays = below.manifest.overlays if below is not None else 0
        for name in range(1, overlays + 1):
            assert below is not None
            os.link(below.directory / OVERLAY.format(name), work / OVERLAY.format(name))
        overlay(work / OVERLAY.format(overlays + 1), (PLACES[number % len(PLACES)], b"%d" % number))
        manifest = SavedManifest(sandbox="sbx_1", needs=NEEDS, shape={}, overlays=overlays + 1)
        saved = store.finish(work, shortened(store, work, manifest))
    finally:
        os.close(lock)
    store.let_go(saved.id)
    return saved


@pytest.fixture
def store(tmp_path: Path) -> SavedMachines:
    return SavedMachines(tmp_path / "saved")


@needs_qemu
def test_a_chain_of_200_snapshots_stays_short_and_each_of_them_reads_what_was_there(
    store: SavedMachines, base: Path, tmp_path: Path
) -> None:
    last: SavedMachine | None = None
    kept: list[SavedMachine] = []
    for number in range(200):
        last = saved_above(store, last, number)
        assert last.manifest.overlays <= limits.MACHINE_OVERLAYS_MAX
        if number % 60 == 59:
            kept.append(last)
    store.keep([saved.id for saved in kept])

    for saved, number in zip(kept, (59, 119, 179), strict=True):
        again = SavedMachines(store.directory).get(saved.id, NEEDS)
        files = [again.directory / name for name in again.template.overlays]
        content = seen(files, base, tmp_path)
        for place in range(len(PLACES)):
            text = b"%d" % max(n for n in range(number + 1) if n % len(PLACES) == place)
            assert content[place * CLUSTER :].startswith(text + b"\0"), (number, place)
    assert len(list(store.directory.iterdir())) == 3


def test_snapshots_of_one_machine_have_what_was_made_one_in_common_unless_it_is_damaged(
    store: SavedMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MACHINE_OVERLAYS_MAX", 3)
    monkeypatch.setattr(limits, "MACHINE_OVERLAYS_KEPT", 2)
    below: SavedMachine | None = None
    for number in range(3):
        below = saved_above(store, below, number)
    one, two = saved_above(store, below, 7), saved_above(store, below, 8)

    lowest = one.directory / OVERLAY.format(1)
    assert one.manifest.overlays == two.manifest.overlays == 3
    assert lowest.samefile(two.directory / OVERLAY.format(1))
    assert not (one.directory / OVERLAY.format(3)).samefile(two.directory / OVERLAY.format(3))
    lowest.chmod(0o600)
    with lowest.open("r+b") as file:
        file.write(b"damaged")
    os.utime(lowest, ns=(1, 1))
    three = saved_above(store, below, 9)
    assert not lowest.samefile(three.directory / OVERLAY.format(1))
    SavedMachines(store.directory).get(three.id, NEEDS)


def test_one_that_fails_at_any_step_leaves_what_was_there_and_the_next_one_succeeds(
    store: SavedMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MACHINE_OVERLAYS_MAX", 2)
    monkeypatch.setattr(limits, "MACHINE_OVERLAYS_KEPT", 1)
    below = saved_above(store, saved_above(store, None, 0), 1)
    hits = set()
    for faults in each_nth_failure("vm."):
        with faults:
            try:
                saved_above(store, below, 2)
            except StorageError:
                hits.add(faults.hit)
        store.keep([below.id])
        assert [path.name for path in store.directory.iterdir()] == [below.id]
        SavedMachines(store.directory).get(below.id, NEEDS)

    assert {"vm.merge", "vm.merge.tables", "vm.saved.finish"} <= hits
    assert saved_above(store, below, 2).manifest.overlays == 2


def test_a_full_disk_is_said_and_leaves_nothing(store: SavedMachines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MACHINE_OVERLAYS_MAX", 1)
    monkeypatch.setattr(limits, "MACHINE_OVERLAYS_KEPT", 1)
    below = saved_above(store, None, 0)

    def full(*_: object) -> None:
        raise CapacityError("the disk is full")

    monkeypatch.setattr("dsec.backends.vm.shortening.require_free", full)
    with pytest.raises(CapacityError):
        saved_above(store, below, 1)

    store.keep([below.id])
    assert [path.name for path in store.directory.iterdir()] == [below.id]
