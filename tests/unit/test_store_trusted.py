"""An operator says which stores layers are taken of, and pushed to; what lies beside these is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.core.errors import ForbiddenError, InvalidArgumentError
from dsec.image.environments import EnvironmentStore
from dsec.node.environments import StoredEnvironments
from dsec.serve.config import StorageSettings
from dsec.storage.loader import Loader
from dsec.storage.remote import RemoteLayers
from dsec.storage.store.trusted import ANY_STORE, TrustedStores
from dsec.wire.environments import BuildRequest, PushRequest, StoreSource

STORES = TrustedStores(("file:///srv/layers", "https://Store.example/v1/", "s3://bucket/a"))


@pytest.mark.parametrize(
    "url",
    [
        "file:///srv/layers",
        "file://localhost/srv/layers/",
        "file:///srv//layers/./team",
        "https://store.example/v1/team",
        "s3://bucket/a",
        "s3://bucket/a/b",
    ],
)
def test_a_store_that_is_named_or_lies_below_one_is_taken(url: str) -> None:
    STORES.check(url)
    ANY_STORE.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "file:///srv",
        "file:///srv/layers2",
        "file:///srv/layers/../secret",
        "file:///srv/layers/%2e%2e/secret",
        "http://store.example/v1",
        "https://store.example",
        "https://store.example:8443/v1",
        "https://store.example.evil/v1",
        "s3://bucket",
        "s3://bucket/ab",
        "s3://bucket2/a",
    ],
)
def test_any_other_store_is_refused_by_name(url: str) -> None:
    with pytest.raises(ForbiddenError) as refusal:
        STORES.check(url)
    assert url in refusal.value.message
    assert "storage.stores" in (refusal.value.hint or "")


def test_a_node_neither_takes_from_another_store_nor_gives_to_it(tmp_path: Path) -> None:
    loader = Loader(tmp_path, tmp_path / "cache", cache_bytes=1 << 30)
    node = StoredEnvironments(EnvironmentStore(tmp_path / "state"), RemoteLayers(loader, trusted=STORES))
    other = f"file://{tmp_path}/store"

    with pytest.raises(ForbiddenError):
        node.build(BuildRequest(name="tools", source=StoreSource(url=other, environment="tools")))
    with pytest.raises(ForbiddenError):
        node.push(PushRequest(name="tools", store=other))


def test_what_is_no_store_cannot_be_set() -> None:
    with pytest.raises(InvalidArgumentError, match=r"storage\.stores"):
        StorageSettings(stores=("ftp://example/layers",))
