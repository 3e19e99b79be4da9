"""Layers hold the same tree whatever mkfs.erofs there is, and the doctor says which."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.core.spec import Environment
from dsec.image import erofs
from dsec.image.environments import EnvironmentStore
from dsec.image.scan import tree_digest
from dsec.image.stack import open_layer
from dsec.image.worker import build_now
from dsec.node.fingerprint import erofs_utils
from dsec.storage.layers import LayerKind
from dsec.storage.trees import remove_tree
from dsec.wire.environments import BuildRequest, TarSource
from tests.images import digest_of, directory, hardlink, member, symlink, tar_of


@pytest.fixture
def store() -> Iterator[EnvironmentStore]:
    """Where images can be mounted: not on tmpfs, where `tmp_path` may be."""
    state = Path(tempfile.mkdtemp(prefix="dsec-mkfs-", dir="/var/tmp"))
    try:
        yield EnvironmentStore(state)
    finally:
        remove_tree(state)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.tar"
    nanoseconds = {"SCHILY.xattr.user.mark": "yes", "mtime": "1700000000.123456789"}
    path.write_bytes(
        tar_of([
            directory("bin"), member("bin/tool", b"#!/bin/sh\n", mode=0o4755, uid=7, gid=8), directory("hollow"),
            member("big", os.urandom(3_000_001)), hardlink("same", "big"), symlink("link", "/etc/passwd"),
            member("marked", b"x", pax_headers=nanoseconds), member("zeros", bytes(2_000_000)),
        ])
    )  # fmt: skip
    return path


def other_mkfs(tmp_path: Path, *options: str, version: str = "1.5") -> str:
    """One that says that it is of this version and has these options, and makes nothing."""
    program = tmp_path / "mkfs.erofs"
    lines = [f"mkfs.erofs {version}", *(f" {option}=X  does what it says" for option in options)]
    program.write_text("#!/bin/sh\nprintf '%s\\n' " + " ".join(f"'{line}'" for line in lines) + "; exit 1\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("options", [(), ("--blobdev", "--chunksize")], ids=["none", "that fail"])
def test_with_an_mkfs_erofs_that_makes_no_images_layers_are_directories(
    source: Path, store: EnvironmentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    program = other_mkfs(tmp_path, *options)
    monkeypatch.setattr(erofs, "mkfs_program", lambda: program)

    info = build_now(store, BuildRequest(name="x", source=TarSource(str(source))), lambda event: None)

    layer = store.resolve(Environment("x")).layers[0]
    assert (info.kind, layer.kind, digest_of(layer.meta)) == ("directory", LayerKind.DIRECTORY, layer.digest)
    told = erofs_utils()
    assert told.detail.startswith(f"1.5 ({program}): ")
    assert told.status == ("ok" if options else "degraded")


@pytest.mark.root
def test_the_systems_own_mkfs_erofs_makes_the_same_layer_however_old_it_is(
    source: Path, store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12 has 1.5: as an image where that holds the tree, or as a directory."""
    program = shutil.which("mkfs.erofs")
    if program is None:
        pytest.skip("the system has no mkfs.erofs")
    ours = build_now(store, BuildRequest(name="ours", source=TarSource(str(source))), lambda event: None)
    store.remove("ours")
    monkeypatch.setattr(erofs, "mkfs_program", lambda: program)

    theirs = build_now(store, BuildRequest(name="theirs", source=TarSource(str(source))), lambda event: None)

    assert theirs.layers == ours.layers
    layer = store.resolve(Environment("theirs")).layers[0]
    mounted = open_layer(layer)
    top = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mounted)
    try:
        assert tree_digest(top).digest == layer.digest
    finally:
        os.close(top)
        os.close(mounted)
    assert program in erofs_utils().detail
