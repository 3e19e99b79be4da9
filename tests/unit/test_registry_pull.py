"""Pulling from registries that break and lie, and what stays of it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dsec.core import limits
from dsec.core.errors import (
    DsecError,
    InvalidArgumentError,
    LimitError,
    NotFoundError,
    StorageError,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.image_names import parse_image_name
from dsec.image.registry.accounts import Accounts
from dsec.image.registry.client import Registry
from dsec.image.registry.pull import fetch_layout, resolve
from dsec.image.registry.web import BrokenError, Patience
from dsec.testing.ports import free_ports
from tests.registries import LARGE, LAYER, Client, Fault, Front

# ---- what an image is ----------------------------------------------------------------------------


def test_an_image_is_pulled_once(front: Front, client: Client) -> None:
    digest = front.put_image("team/tools", [LAYER, LARGE])

    assert client.pull().manifest.digest == digest
    before = len(front.requests)
    assert client.pull().manifest.digest == digest

    assert [path for _, path, _ in front.requests[before:]] == ["/v2/team/tools/manifests/1"]


def test_an_index_gives_the_image_for_this_machine(front: Front, client: Client) -> None:
    wanted = front.put_image("team/tools", [LAYER], tag="x")
    other = front.put_image("team/tools", [LARGE], tag="y")
    entries = [
        entry(front, other, architecture="arm64"),
        entry(front, other, os="windows"),
        entry(front, other, os="unknown", architecture="unknown"),
        entry(front, other, variant="v3"),
        entry(front, wanted),
    ]
    put_index(front, entries)

    assert client.pull().manifest.digest == wanted


def entry(front: Front, digest: str, **platform: str) -> dict[str, Any]:
    kind, content = front.content[f"/v2/team/tools/manifests/{digest}"]
    return {
        "mediaType": kind,
        "digest": digest,
        "size": len(content),
        "platform": {"os": "linux", "architecture": "amd64", **platform},
    }


def put_index(front: Front, entries: list[dict[str, Any]], tag: str = "1") -> str:
    kind = "application/vnd.oci.image.index.v1+json"
    return front.put_manifest("team/tools", json.dumps({"manifests": entries}).encode(), kind, tag)


def test_an_image_for_other_machines_is_refused_by_name(front: Front, client: Client) -> None:
    put_index(front, [entry(front, front.put_image("team/tools", [], tag="x"), architecture="arm64")])

    with pytest.raises(UnsupportedError, match="linux/arm64"):
        client.pull()


def test_indexes_that_lie_in_each_other_are_bounded(front: Front, client: Client) -> None:
    digest = front.put_image("team/tools", [], tag="x")
    for _ in range(6):
        digest = put_index(front, [entry(front, digest)])

    with pytest.raises(LimitError, match="deep"):
        client.pull()


@pytest.mark.parametrize(
    "manifest",
    [
        b"", b"[]", b"null", b"{", b'"x"', b"\xff", b'{"schemaVersion": 2}', b'{"config": {}, "layers": []}',
        b'{"config": {"digest": "sha256:1", "size": 1}, "layers": []}', b'{"layers": [], "config": null}',
        b'{"manifests": [{"digest": "../../../etc/passwd", "size": 1}]}', b'{"manifests": []}', b'{"manifests": 3}',
        b"[" * 200_000, b'{"a":' * 100_000, b'{"schemaVersion": 1, "fsLayers": []}',
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(front: Front, client: Client, manifest: bytes) -> None:
    front.put_manifest("team/tools", manifest, "application/vnd.oci.image.manifest.v1+json", "1")

    with pytest.raises((InvalidArgumentError, UnsupportedError)):
        client.pull()


def changed(front: Front, **fields: Any) -> None:
    """Image 1 with a manifest that says something else."""
    front.put_image("team/tools", [LAYER])
    kind, content = front.content["/v2/team/tools/manifests/1"]
    front.put_manifest("team/tools", json.dumps({**json.loads(content), **fields}).encode(), kind, "1")


def test_a_manifest_with_ten_thousand_layers_is_refused(front: Front, client: Client) -> None:
    changed(
        front, layers=[{"mediaType": "x", "digest": f"sha256:{number:064x}", "size": 1} for number in range(10_000)]
    )

    with pytest.raises(LimitError, match="10000 layers"):
        client.pull()


def test_a_manifest_over_its_bound_is_not_read(front: Front, client: Client) -> None:
    front.put_manifest("team/tools", b" " * (limits.IMAGE_MANIFEST_BYTES_MAX + 1), "application/json", "1")

    with pytest.raises(LimitError, match="more than"):
        client.pull()


@pytest.mark.parametrize(
    "layer",
    [
        {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": "sha256:" + "0" * 64, "size": 1 << 60},
        {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": "sha256:" + "0" * 64, "size": -1},
        {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": "sha256:" + "0" * 63, "size": 1},
        {
            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip+encrypted",
            "digest": "sha256:" + "0" * 64,
            "size": 1,
        },
        {"mediaType": "text/plain", "digest": "sha256:" + "0" * 64, "size": 1},
    ],
)
def test_a_layer_that_cannot_be_is_refused_before_anything_is_fetched(
    front: Front, client: Client, layer: dict[str, Any]
) -> None:
    changed(front, layers=[layer])

    with pytest.raises((InvalidArgumentError, UnsupportedError)):
        client.pull()

    assert not any("/blobs/" in path for _, path, _ in front.requests)


def test_what_is_no_image_is_said_to_be_none(front: Front, client: Client) -> None:
    changed(
        front,
        config={"mediaType": "application/vnd.cncf.helm.config.v1+json", "digest": "sha256:" + "0" * 64, "size": 1},
    )

    with pytest.raises(UnsupportedError, match="helm"):
        client.pull()


def test_a_digest_is_compared_with_what_comes(front: Front, tmp_path: Path) -> None:
    digest = front.put_image("team/tools", [LAYER])
    assert Client(front, tmp_path, name=f"team/tools@{digest}").pull().manifest.digest == digest

    path = f"/v2/team/tools/manifests/{digest}"
    front.content[path] = (front.content[path][0], front.content[path][1] + b" ")
    with pytest.raises(StorageError, match="another digest"):
        Client(front, tmp_path, name=f"team/tools@{digest}").pull()


def test_an_image_that_is_not_there_is_named(client: Client) -> None:
    with pytest.raises(NotFoundError, match=r"there is no image 127\.0\.0\.1:\d+/team/tools:1"):
        client.pull()


# ---- what breaks ---------------------------------------------------------------------------------


def test_a_download_that_breaks_goes_on_where_it_did(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    front.faults = [Fault("/blobs/", cut=400_000, times=3)]

    client.pull()

    begins = [headers.get("Range") for _, path, headers in front.requests if "/blobs/" in path]
    assert sum(begin is not None for begin in begins) >= 2


def test_a_pull_that_was_given_up_goes_on_in_the_next(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    digest = next(path for path, (_, data) in front.content.items() if data == LARGE)
    front.faults = [Fault(digest, cut=400_000), Fault(digest, status=503, times=10)]
    with pytest.raises(UnavailableError):
        client.pull()
    front.faults = []
    before = len(front.requests)

    client.pull()

    assert "bytes=400000-" in [headers.get("Range") for _, _, headers in front.requests[before:]]


def test_a_registry_without_ranges_is_read_from_the_beginning(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    front.ranges = False
    front.faults = [Fault("/blobs/", cut=400_000, times=2)]

    client.pull()


def test_a_part_that_was_not_asked_for_is_refused(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    front.faults = [
        Fault("/blobs/", cut=400_000, times=2),
        Fault("/blobs/", status=206, headers={"Content-Range": "bytes 5-9/10"}, times=9),
    ]

    with pytest.raises(StorageError, match="another part"):
        client.pull()


@pytest.mark.parametrize("spoilt", [LARGE[:-1] + b"x", bytes(len(LARGE)), LARGE + b"more"])
def test_a_blob_that_is_another_is_not_taken(front: Front, client: Client, spoilt: bytes) -> None:
    front.put_image("team/tools", [LARGE])
    digest = next(path for path, (_, data) in front.content.items() if data == LARGE)
    front.content[digest] = ("application/octet-stream", spoilt)

    if spoilt.startswith(LARGE):  # what goes on after its end is not read
        client.pull()
        return
    with pytest.raises(StorageError, match="not what its name says"):
        client.pull()
    assert len(list((client.cache.root / "blobs" / "sha256").iterdir())) <= 1  # the configuration


def test_a_blob_that_came_wrong_once_is_fetched_again(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    digest = next(path for path, (_, data) in front.content.items() if data == LARGE)
    front.faults = [Fault(digest, content=bytes(len(LARGE)))]

    client.pull()


def test_a_body_without_end_is_not_waited_for(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    front.faults = [Fault("/blobs/", endless=True, times=2)]

    client.pull()


def test_a_blob_that_is_too_short_is_given_up(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    digest = next(path for path, (_, data) in front.content.items() if data == LARGE)
    front.content[digest] = ("application/octet-stream", LARGE[:1_000])

    with pytest.raises(UnavailableError):
        client.pull()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_registry_that_is_busy_is_asked_again(front: Front, client: Client, status: int) -> None:
    front.put_image("team/tools", [LAYER])
    front.faults = [Fault("/manifests/", status=status), Fault("/blobs/", status=status, times=2)]

    client.pull()

    assert client.waited


def test_a_registry_says_how_long_to_wait(front: Front, client: Client) -> None:
    front.put_image("team/tools", [])
    front.faults = [Fault("/manifests/", status=429, headers={"Retry-After": "7"})]

    client.pull()

    assert client.waited == [7.0]


@pytest.mark.parametrize("rest", ["3600", "99999999999999999999", "Fri, 31 Dec 2999 23:59:59 GMT"])
def test_a_registry_that_wants_too_long_a_rest_is_not_waited_for(front: Front, client: Client, rest: str) -> None:
    front.faults = [Fault("/manifests/", status=429, headers={"Retry-After": rest}, times=9)]

    with pytest.raises(UnavailableError, match="no more requests") as caught:
        client.pull()

    assert (caught.value.retry_after_s or 0) >= 3_600
    assert client.waited == []


@pytest.mark.parametrize("rest", ["", "-5", "soon", "\u0663", "Mon, 99 Foo 2020", "1e9", "0"])
def test_a_rest_that_makes_no_sense_is_not_kept(front: Front, client: Client, rest: str) -> None:
    front.put_image("team/tools", [])
    if rest.isascii():
        front.faults = [Fault("/manifests/", status=503, headers={"Retry-After": rest})]

    client.pull()

    assert all(0 <= wait < 1 for wait in client.waited)


def test_a_registry_that_never_answers_well_is_given_up(front: Front, client: Client) -> None:
    front.faults = [Fault("/manifests/", status=500, times=100)]

    with pytest.raises(UnavailableError, match="answers 500"):
        client.pull()

    assert len(client.waited) == 5


def test_a_registry_that_is_not_there_is_given_up(front: Front, tmp_path: Path) -> None:
    waited: list[float] = []
    name = parse_image_name(f"127.0.0.1:{free_ports(1)[0]}/x")

    with pytest.raises(UnavailableError, match="cannot be reached"):
        resolve(Registry(name, Accounts({"DOCKER_CONFIG": str(tmp_path)}), sleep=waited.append))

    assert len(waited) == 5


def test_progress_gives_all_tries_back() -> None:
    patience = Patience(lambda _: None, tries=3)
    for _ in range(10):
        patience.progressed()
        patience.wait(BrokenError("x"))
    patience.wait(BrokenError("x"))

    with pytest.raises(UnavailableError):
        patience.wait(BrokenError("x"))


@pytest.mark.parametrize("status", [400, 405, 418, 301, 304, 201])
def test_an_answer_that_makes_no_sense_is_an_error(front: Front, client: Client, status: int) -> None:
    front.faults = [Fault("/manifests/", status=status, body=b"<html>", times=99)]

    with pytest.raises(DsecError):
        client.pull()


def test_what_a_registry_says_of_an_error_is_told(front: Front, client: Client) -> None:
    said = json.dumps({"errors": [{"code": "DENIED", "message": "quota\nover " + "x" * 10_000}]}).encode()
    front.faults = [Fault("/manifests/", status=403, body=said, headers={"Content-Type": "application/json"})]

    with pytest.raises(StorageError, match="DENIED quota over") as caught:
        client.pull()

    assert len(str(caught.value)) < 1_000


# ---- the cache -----------------------------------------------------------------------------------


def test_the_cache_keeps_what_was_used_last(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    client.pull()
    assert client.cache.collect(limits.GIB) == 0
    for path in (client.cache.root / "blobs" / "sha256").iterdir():
        os.utime(path, (time.time() - path.stat().st_size,) * 2)

    assert client.cache.collect(10_000) == len(LARGE)
    assert len(list((client.cache.root / "blobs" / "sha256").iterdir())) == 1

    client.pull()


def test_what_has_not_been_used_for_long_is_removed(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    client.pull()
    for path in (client.cache.root / "blobs" / "sha256").iterdir():
        os.utime(path, (1, 1))

    assert client.cache.collect(limits.GIB) > len(LARGE)


def test_a_broken_download_is_removed_once_it_is_old_and_nobody_is_at_it(client: Client) -> None:
    fresh, old, busy = (client.cache.root / "partial" / f"sha256-{name}" for name in "abc")
    for path in (fresh, old, busy):
        path.write_bytes(b"xyz")
    for path in (old, busy):
        os.utime(path, (1, 1))
    with busy.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        assert client.cache.collect(limits.GIB) == 3

    assert (fresh.exists(), old.exists(), busy.exists()) == (True, False, True)


def test_many_at_once_fetch_each_blob_once(front: Front, tmp_path: Path) -> None:
    digest = front.put_image("team/tools", [LAYER, LARGE])
    clients = [Client(front, tmp_path) for _ in range(6)]
    layouts = [tmp_path / f"many-{number}" for number in range(6)]

    def pull(client: Client, layout: Path) -> None:
        layout.mkdir()
        fetch_layout(client.registry, resolve(client.registry), client.cache, layout)

    with ThreadPoolExecutor() as pool:
        list(pool.map(pull, clients, layouts))

    blobs = [path for _, path, _ in front.requests if "/blobs/" in path]
    assert len(blobs) == len(set(blobs)) == 3
    assert all((layout / "blobs" / digest.replace(":", "/")).exists() for layout in layouts)


def test_a_blob_that_the_disk_has_shortened_is_fetched_again(front: Front, client: Client) -> None:
    front.put_image("team/tools", [LARGE])
    client.pull()
    kept = next(path for path in (client.cache.root / "blobs/sha256").iterdir() if path.stat().st_size == len(LARGE))
    os.truncate(kept, 5)

    client.pull()

    assert kept.stat().st_size == len(LARGE)
