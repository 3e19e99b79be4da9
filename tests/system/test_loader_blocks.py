"""Layers as block devices (ublk): what the kernel and a loader do together. Needs Linux 6.5 with ublk_drv; a guest has
it where this machine does not (test_v2_guest.py)."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from dsec.backends.vm.disks import bind_of
from dsec.binaries import find_binary
from dsec.storage.disks import DiskLayers
from dsec.storage.layers import LayerStore
from dsec.storage.loader import Loader, why_no_block_devices
from dsec.storage.remote import RemoteLayers
from dsec.storage.store.format import DiskMeta
from dsec.storage.store.places import DirectoryPlace
from dsec.storage.store.publish import attach_layer, publish_disk, require_store
from dsec.wire.jail import JailBind, JailPlan
from tests.system.loader_site import processes, until

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

SECTOR = 512
DISK_BYTES = (24 << 20) + 3 * SECTOR  # not of whole chunks
DEADLINE_S = 300.0


def noise(seed: int, size: int) -> bytes:
    return hashlib.shake_128(b"%d" % seed).digest(size)


class Place:
    """A node with a disk in a store, and its loader."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = DirectoryPlace(root / "store")
        require_store(self.store, make=True)
        self.disks = 0
        self.layers = LayerStore(root / "node")
        (root / "run").mkdir()
        self.loader = Loader(root / "run", root / "cache", cache_bytes=1 << 30)
        self.remote = RemoteLayers(self.loader)

    def put(self, content: bytes, format: str = "raw") -> str:
        """A disk that lies in the store; its digest."""
        file = self.root / f"disk{self.disks}"
        self.disks += 1
        file.write_bytes(content)
        digest = publish_disk(
            LayerStore(self.root / "builder"), file, DiskMeta(format=format, size=1 << 30), self.store
        )
        attach_layer(self.layers, digest, self.store)
        return digest

    def serve(self, digest: str) -> str:
        return self.remote.serve(self.layers.get(digest), block=True)

    def file(self, digest: str) -> Path:
        return DiskLayers(self.layers, self.remote).file(digest)

    def data(self, digest: str) -> Path:
        return self.root / "store" / "data" / digest[:2] / digest

    def numbers(self) -> list[int]:
        """Of devices that the loader says there are."""
        return [int(path.read_text().split()[0]) for path in (self.root / "run" / "loader.blocks").glob("*")]


def nodes() -> set[str]:
    return {path.name for path in Path("/dev").glob("ublk[bc]*")}


def write_through(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, b"x" * SECTOR, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    if why := why_no_block_devices(find_binary("dsec-loader")):
        pytest.skip(why)
    before = nodes()
    place = Place(tmp_path)
    yield place
    place.loader.shutdown()
    until(lambda: not processes(tmp_path))
    until(lambda: nodes() == before)
    assert place.numbers() == []


def read_all(path: str) -> bytes:
    return Path(path).read_bytes()


def test_a_device_reads_as_the_disk_does_and_cannot_be_written(place: Place) -> None:
    content = noise(1, DISK_BYTES)
    path = place.serve(place.put(content))

    assert Path(path).is_block_device()
    assert read_all(path) == content
    with pytest.raises(OSError, match=r"Read-only|not permitted|denied"):
        write_through(path)
    assert read_all(path) == content


def test_only_what_is_read_is_loaded_and_many_may_read_at_once(place: Place) -> None:
    content = noise(2, DISK_BYTES)
    digest = place.put(content)
    path = place.serve(digest)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(fd, SECTOR, 8 << 20) == content[8 << 20 :][:SECTOR]
        assert place.remote.stats_of(digest).present < place.remote.stats_of(digest).chunks // 2
        wrong: list[int] = []

        def look(worker: int) -> None:
            for turn in range(60):
                at = (worker * 977 + turn * 1_313) * 4096 % (DISK_BYTES - (1 << 16))
                if os.pread(fd, 1 << 16, at) != content[at : at + (1 << 16)]:
                    wrong.append(at)

        threads = [threading.Thread(target=look, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert wrong == []
    finally:
        os.close(fd)


def test_a_last_sector_that_the_layer_does_not_fill_ends_in_zeros(place: Place) -> None:
    content = noise(3, (1 << 20) + 100)

    path = place.serve(place.put(content, "qcow2"))

    assert read_all(path) == content + bytes(SECTOR - 100)


def test_what_a_disk_says_of_partitions_is_not_looked_at(place: Place) -> None:
    content = bytearray(noise(4, 4 << 20))
    entry = bytes([0x80, 0, 0, 0, 0x83, 0, 0, 0]) + (64).to_bytes(4, "little") + (4_096).to_bytes(4, "little")
    content[446:512] = entry + bytes(48) + b"\x55\xaa"
    digest = place.put(bytes(content))

    path = place.serve(digest)
    until(lambda: Path(path).is_block_device())

    assert place.remote.stats_of(digest).read_bytes == 0  # nobody has looked
    name = Path(path).name
    assert [entry.name for entry in Path("/sys/block", name).glob(f"{name}p*")] == []


def test_the_same_layer_is_a_file_too_and_one_device_however_often_it_is_asked_for(place: Place) -> None:
    content = noise(5, 4 << 20)
    digest = place.put(content)

    path = place.serve(digest)

    assert place.serve(digest) == path
    assert RemoteLayers(place.loader).serve(place.layers.get(digest), block=True) == path
    file = place.file(digest)
    assert file.is_file()
    assert file.read_bytes() == content
    assert len(place.numbers()) == 1


def test_readers_of_a_loader_that_is_killed_go_on_with_the_next_worker(place: Place) -> None:
    content = noise(6, DISK_BYTES)
    path = place.serve(place.put(content))
    got = bytearray()
    killed = 0
    with Path(path).open("rb", buffering=0) as device:
        while piece := device.read(1 << 20):
            got += piece
            if len(got) >> 20 in (3, 9, 15) and killed < 3:
                killed += 1
                for pid in processes(place.root, "--worker"):
                    os.kill(pid, signal.SIGKILL)
    assert bytes(got) == content
    assert killed == 3


def test_a_loader_that_is_killed_whole_is_followed_by_one_that_has_its_devices(place: Place) -> None:
    content = noise(7, DISK_BYTES)
    digest = place.put(content)
    path = place.serve(digest)
    device = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(device, SECTOR, 0) == content[:SECTOR]
        for role in ("--supervise", "--worker"):
            for pid in processes(place.root, role):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not processes(place.root))
        reads: list[bytes] = []
        reader = threading.Thread(target=lambda: reads.append(os.pread(device, 1 << 20, 16 << 20)))
        reader.start()

        place.loader.hello()  # as a node does that begins anew

        reader.join(DEADLINE_S)
        assert reads == [content[16 << 20 : 17 << 20]]
        assert Path(place.serve(digest)).samefile(Path(f"/dev/ublkb{place.numbers()[0]}"))
    finally:
        os.close(device)


def test_a_store_that_has_lost_the_layer_is_an_error_and_not_zeros_and_may_come_back(place: Place) -> None:
    content = noise(8, DISK_BYTES)
    digest = place.put(content)
    path = place.serve(digest)
    data = place.data(digest)
    away = data.with_suffix(".away")
    data.rename(away)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Input/output"):
            os.pread(fd, SECTOR, 12 << 20)
        away.rename(data)
        assert os.pread(fd, SECTOR, 12 << 20) == content[12 << 20 :][:SECTOR]
    finally:
        os.close(fd)


def test_what_is_not_served_any_more_gives_errors_to_who_has_it_open_and_goes_after_that(place: Place) -> None:
    """Gone at once it would be a device that has ended: QEMU takes what lies beyond an end for zeros."""
    content = noise(9, 4 << 20)
    digest = place.put(content)
    path = place.serve(digest)
    (number,) = place.numbers()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    page = mmap.mmap(-1, 4096)  # as O_DIRECT wants it
    try:
        place.remote.forget(digest)
        with pytest.raises(OSError, match="Input/output"):
            os.preadv(fd, [page], 1 << 20)
        assert place.numbers() == [number]
        assert place.serve(digest) == path  # it has come back
        assert os.preadv(fd, [page], 1 << 20) == 4096
        assert page[:] == content[1 << 20 :][:4096]
        place.remote.forget(digest)
    finally:
        os.close(fd)
    until(lambda: not Path(f"/dev/ublkb{number}").exists())
    until(lambda: place.numbers() == [])
    again = place.serve(digest)
    assert read_all(again) == content
    assert place.numbers() != [number]


def test_a_loader_that_ends_in_order_leaves_what_is_open_to_the_next(place: Place) -> None:
    content = noise(10, DISK_BYTES)
    digest = place.put(content)
    path = place.serve(digest)
    (number,) = place.numbers()
    fd = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(fd, SECTOR, 0) == content[:SECTOR]
        place.loader.shutdown()
        until(lambda: not processes(place.root))
        assert place.numbers() == [number]
        place.loader.hello()
        assert os.pread(fd, 1 << 20, 16 << 20) == content[16 << 20 : 17 << 20]
    finally:
        os.close(fd)


def test_an_end_while_somebody_waits_for_a_store_that_hangs_ends(place: Place) -> None:
    digest = place.put(noise(11, DISK_BYTES))
    path = place.serve(digest)
    data = place.data(digest)
    data.unlink()
    os.mkfifo(data)  # whoever opens it waits
    failed: list[int] = []

    def read() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(fd, [mmap.mmap(-1, 4096)], 20 << 20)
        except OSError as error:
            failed.append(error.errno or 0)
        finally:
            os.close(fd)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        until(lambda: place.remote.stats_of(digest).waiting > 0)
        place.loader.shutdown()
        reader.join(DEADLINE_S)
        assert failed == [errno.EIO]
    finally:
        with suppress(OSError):
            os.close(os.open(data, os.O_WRONLY | os.O_NONBLOCK))
    place.loader.hello()  # whose end takes away what was open at the end of this one


def test_a_monitor_reads_it_in_its_jail_as_nobody(place: Place, tmp_path: Path) -> None:
    content = noise(12, 8 << 20)
    path = place.serve(place.put(content))
    root = tmp_path / "jail"
    root.mkdir()
    tops = [Path(top) for top in ("/usr", "/lib", "/lib64", "/bin") if Path(top).is_dir()]
    binds = [bind_of(path, "/dev/base0"), *(JailBind(str(top), str(top)) for top in tops if not top.is_symlink())]
    links = {str(top): str(top.readlink()) for top in tops if top.is_symlink()}
    argv = [b"/usr/bin/dd", b"if=/dev/base0", b"bs=1M", b"status=none"]
    plan = JailPlan(uid=65_534, gid=65_534, cgroups=[], root=str(root), binds=binds, links=links, argv=argv)

    done = subprocess.run(
        [find_binary("dsec-jail")], input=msgspec.msgpack.encode(plan), capture_output=True, check=False, timeout=120
    )

    assert done.stderr == b""
    assert done.stdout == content
