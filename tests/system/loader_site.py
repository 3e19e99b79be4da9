"""A node that has a layer from a store in a directory, and its loader."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dsec.binaries import find_binary
from dsec.image.make import make_layer
from dsec.storage.layers import LayerKind, LayerLocation, LayerStore
from dsec.storage.loader import Loader
from dsec.storage.mounts import mount_erofs
from dsec.storage.remote import RemoteLayers
from dsec.storage.store.places import DirectoryPlace, Place
from dsec.storage.store.publish import attach_layer, publish_layer
from dsec.wire.loader import EvictAnswer, EvictArgs, LoaderOp

FILE_BYTES = 3 << 20
FILES = 8
DEADLINE_S = 60.0


def content(number: int) -> bytes:
    return hashlib.shake_128(b"%d" % number).digest(FILE_BYTES // 2) + b"words " * (FILE_BYTES // 12)


class Site:
    """A layer that was published to a store in a directory, and a node that has it from there."""

    def __init__(self, root: Path, front: str = "fuse") -> None:
        self.front = front
        self.store = DirectoryPlace(root / "store")
        builder = LayerStore(root / "builder")
        tree = root / "tree"
        tree.mkdir()
        for number in range(FILES):
            (tree / f"file{number}").write_bytes(content(number))
        with builder.staging() as work, make_layer(builder, tree, work, lambda event: None) as held:
            self.digest = held.digests[0]
        if builder.get(self.digest).kind is not LayerKind.EROFS:
            pytest.skip("this host makes no EROFS images")
        self.built = self.digest  # the builder's name for it
        self.digest = publish_layer(builder, self.built, self.store).digest
        self.layers = LayerStore(root / "node")
        (root / "run").mkdir()
        self.loader = Loader(root / "run", root / "cache", cache_bytes=1 << 30, front=front)
        self.remote = RemoteLayers(self.loader)
        self.data = root / "store" / "data" / self.digest[:2] / self.digest
        self.place: Place = self.store  # where the node has it from
        self.builder = builder

    def attach(self) -> LayerLocation:
        return attach_layer(self.layers, self.digest, self.place)

    def mount(self) -> int:
        layer = self.attach()
        return mount_erofs(layer.meta, Path(self.remote.serve(layer)))

    def forget_everything(self) -> None:
        """Chunks leave the loader's cache, where holes are made in what is served, and the kernel's."""
        self.loader.request(LoaderOp.EVICT, EvictArgs(1 << 40), EvictAnswer)
        drop_page_cache()


def drop_page_cache() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("1")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.02)


def read(top: int, number: int) -> bytes:
    fd = os.open(f"file{number}", os.O_RDONLY, dir_fd=top)
    with os.fdopen(fd, "rb") as file:
        return file.read()


@contextmanager
def made_site(root: Path, front: str = "fuse") -> Iterator[Site]:
    """Ends its loader after, and looks whether everything is unmounted and every process gone."""
    if front == "fuse" and not Path("/dev/fuse").exists():
        pytest.skip("this host has no FUSE")
    if front == "fanotify" and not guards(root):
        pytest.skip("this kernel or file system has no pre-content events")
    site = Site(root, front)
    yield site
    site.loader.shutdown()
    until(lambda: str(root) not in Path("/proc/mounts").read_text())
    until(lambda: not processes(root))


def guards(root: Path) -> bool:
    """Whether files below can be guarded by fanotify."""
    loader = find_binary("dsec-loader")
    words = [loader, "--probe", "--run", root, "--cache", root / "probe", "--cache-bytes", "1"]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def processes(root: Path, role: str = "") -> list[int]:
    """Of the loader in `root`; `role` is a word that those have who are asked for."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if words[0].endswith((b"dsec-loader", b"exe")) and os.fsencode(root / "run") in words:
                found += [int(entry.parent.name)] if not role or role.encode() in words else []
    return found
