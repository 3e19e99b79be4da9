"""Each step of a build fails once: a typed error, names as before, nothing left that is not swept."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsec.core.errors import CapacityError, DsecError
from dsec.core.spec import Environment
from dsec.image import erofs, make, worker
from dsec.image.environments import EnvironmentStore
from dsec.image.make import typed
from dsec.image.sources import tarball
from dsec.image.stage import Stage
from dsec.image.worker import build_now
from dsec.storage import layers
from dsec.storage.layers import LayerKind, LayerStore
from dsec.wire.environments import BuildRequest, EnvironmentInfo, TarSource
from tests.images import digest_of, member, tar_of

STEPS: list[tuple[Any, str]] = [
    (tarball, "build_key"),
    (LayerStore, "single_flight"),
    (LayerStore, "staging"),
    (worker, "require_free"),
    (Stage, "file"),
    (Stage, "finish"),
    (make, "tree_digest"),
    (LayerStore, "publish"),
    (layers, "write_synced"),
    (EnvironmentStore, "put_built"),
    (EnvironmentStore, "put"),
]


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    return EnvironmentStore(tmp_path / "state")


def make(store: EnvironmentStore, content: bytes) -> EnvironmentInfo:
    path = store.state.parent / "source.tar"
    path.write_bytes(tar_of([member("file", content)]))
    request = BuildRequest(name="x", source=TarSource(str(path)), replace=True)
    try:
        return build_now(store, request, lambda event: None)
    except Exception as error:
        raise typed(error) from error


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[name for _, name in STEPS])
def test_a_step_that_fails_changes_no_name_and_leaves_nothing(
    store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    before = make(store, b"before")
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, full)
        with pytest.raises(DsecError):
            make(store, b"after")

    assert store.list() == [before]
    assert list((store.state / "staging").iterdir()) == []
    assert [path.name for path in (store.state / "locks").iterdir()] == ["collect"]
    store.collect()
    assert store.layers.digests() == list(before.layers)

    assert make(store, b"after").layers != before.layers


def test_a_full_disk_is_said_to_be_full(store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "file", full)

    with pytest.raises(CapacityError, match="full"):
        make(store, b"x")


def wrong_image(tree: Path, into: Path, *, digest: str) -> None:
    """An image that mounts, and holds something else."""
    other = tree.parent / "other"
    other.mkdir()
    (other / "file").write_bytes(b"tampered")
    _make_image(other, into, digest=digest)


def no_image(tree: Path, into: Path, *, digest: str) -> None:
    (into / "meta.erofs").write_bytes(b"\0" * 8192)
    (into / "data.blob").write_bytes(b"")


_make_image = erofs.make_image


@pytest.mark.root
@pytest.mark.parametrize("make_image", [wrong_image, no_image])
def test_an_image_that_is_not_the_tree_is_never_published(
    store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch, make_image: Callable[..., None]
) -> None:
    usable = erofs.probe_erofs(store.layers)
    if not usable.usable:
        pytest.skip(usable.reason)
    monkeypatch.setattr(erofs, "probe_erofs", lambda layers: usable)
    monkeypatch.setattr(erofs, "make_image", make_image)

    info = make(store, b"content")

    layer = store.resolve(Environment("x")).layers[0]
    assert info.kind == layer.kind == LayerKind.DIRECTORY
    assert digest_of(layer.meta) == layer.digest
    assert sorted(path.name for path in layer.meta.parent.iterdir()) == ["layer.json", "tree"]
