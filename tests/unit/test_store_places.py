"""Stores of every kind keep whole objects, and say in the same words what went wrong."""

from __future__ import annotations

import http.client
import http.server
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from dsec.core.errors import InvalidArgumentError, NotFoundError, StorageError, UnavailableError, UnsupportedError
from dsec.storage.store import places
from dsec.storage.store.places import DirectoryPlace, Place, WebPlace, open_place
from dsec.storage.store.publish import read_trace


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    root = tmp_path / "www"
    root.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=os.fspath(root)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", root
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # Of its own: what moto has is shared by all of its servers in one process.
        name = f"layers-{os.urandom(4).hex()}"
        boto3.Session().client("s3").create_bucket(Bucket=name)
        yield open_place(f"s3://{name}/prod")
    finally:
        server.stop()


def keeps_objects(place: Place, file: Path) -> None:
    place.put("layers/ab/one.json", b"first")
    place.put("layers/ab/one.json", b"second")
    file.write_bytes(b"z" * 100_000)
    place.put_file("data/ab/two", file)

    assert place.get("layers/ab/one.json") == b"second"
    assert (place.size("data/ab/two"), place.get("data/ab/two")) == (100_000, b"z" * 100_000)
    assert place.names("layers") == ["layers/ab/one.json"]
    with pytest.raises(NotFoundError):
        place.get("layers/ab/none.json")
    with pytest.raises(NotFoundError):
        place.size("layers/ab/none.json")
    place.remove("data/ab/two")
    place.remove("data/ab/two")
    with pytest.raises(NotFoundError):
        place.get("data/ab/two")


def test_a_directory_keeps_objects(tmp_path: Path) -> None:
    keeps_objects(DirectoryPlace(tmp_path / "store"), tmp_path / "file")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto's and boto3's own code
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_bucket_keeps_objects_and_signs_for_the_loader(bucket: Place, tmp_path: Path) -> None:
    keeps_objects(bucket, tmp_path / "file")

    bucket.put("data/ab/three", b"content")
    location = bucket.location("data/ab/three")

    assert location.url is not None
    assert location.expires_at is not None
    assert WebPlace(location.url.split("/data/")[0]).url.startswith("http://")
    assert "secret" not in location.url


def test_a_web_server_is_read_and_not_written(web: tuple[str, Path], tmp_path: Path) -> None:
    url, root = web
    DirectoryPlace(root).put("layers/ab/one.json", b"text")
    place = open_place(f"{url}/")

    assert (place.get("layers/ab/one.json"), place.size("layers/ab/one.json")) == (b"text", 4)
    with pytest.raises(NotFoundError):
        place.get("layers/ab/none.json")
    with pytest.raises(UnsupportedError):
        place.put("x", b"")
    with pytest.raises(UnsupportedError):
        place.names("layers")


def test_a_server_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_PAUSE_S", 0.0)
    with pytest.raises(UnavailableError):
        open_place("http://127.0.0.1:1/store").get("layers/ab/one.json")


def test_a_write_that_fails_leaves_the_old_object_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = DirectoryPlace(tmp_path)
    place.put("meta/ab/one", b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space"):
        place.put("meta/ab/one", b"new")

    assert place.get("meta/ab/one") == b"old"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["one"]


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../b", "", "a//b", "a/.hidden", "a b", "x" * 5000])
def test_no_name_leads_out_of_a_store(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidArgumentError):
        DirectoryPlace(tmp_path).get(path)


def test_a_server_that_gives_a_byte_now_and_then_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drips:
        length = 100

        def read1(self, size: int) -> bytes:
            return b"x"

    monkeypatch.setattr(places, "_ANSWER_S", -1.0)
    with pytest.raises(TimeoutError):
        places._read_in_time(Drips())


def test_an_answer_that_breaks_off_is_not_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        length = 3

        def read1(self, size: int) -> bytes:
            return b""

    with pytest.raises(http.client.IncompleteRead):
        places._read_in_time(Broken())


def test_a_proxy_is_not_used_since_the_loader_has_none(web: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url, root = web
    (root / "one").write_bytes(b"text")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    assert open_place(url).get("one") == b"text"


@pytest.mark.parametrize(
    "url",
    ["https://me:secret@host/x", "s3://key:secret@bucket", "https://host/x?token=secret", "https://host/x#secret"],
)
def test_credentials_in_the_url_of_a_store_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        open_place(url)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "content",
    [
        b"not json",
        b"[" * 100_000,
        b" " * (2 << 20),
        b'{"digest": "%s", "chunk_size": 4096, "chunks": [1]}' % (b"ab" * 32),
        b'{"digest": "%s", "chunk_size": 262144, "chunks": [-1, 3, 4294967296]}' % (b"ab" * 32),
    ],
)
def test_a_trace_of_a_store_is_used_as_far_as_it_makes_sense(tmp_path: Path, content: bytes) -> None:
    place = DirectoryPlace(tmp_path)
    place.put(f"traces/{'ab' * 32}.json", content)
    try:
        chunks = read_trace(place, "ab" * 32, 256 << 10)
    except StorageError:
        chunks = ()
    assert chunks in ((), (3,))


@pytest.mark.parametrize("url", ["", "ftp://x/y", "file://host/x", "s3://", "http://", "relative/path"])
def test_what_is_no_store_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError):
        open_place(url)
