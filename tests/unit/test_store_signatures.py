"""What is asked of an S3 bucket is signed as AWS says: a checker that AWS's own examples prove stands before moto."""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from dsec.core.errors import StorageError
from dsec.storage.store import places
from dsec.storage.store.places import Place, open_place
from tests.s3_signing import SignatureError, SignedRequest, check_signature, signature

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of moto's and boto3's own code
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# From "Authenticating Requests (AWS Signature Version 4)" of the Amazon S3 API Reference.
SECRET: Final = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
KEY: Final = "AKIAIOSFODNN7EXAMPLE"
DATE: Final = "20130524T000000Z"
SCOPE: Final = "20130524/us-east-1/s3/aws4_request"
EMPTY: Final = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
COMMON: Final = {"host": "examplebucket.s3.amazonaws.com", "x-amz-date": DATE, "x-amz-content-sha256": EMPTY}
PRESIGNED: Final = (
    f"/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={KEY}%2F{SCOPE.replace('/', '%2F')}"
    f"&X-Amz-Date={DATE}&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
)
PUT_SHA256: Final = "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"
EXAMPLES: Final = {
    "GET of a range": (
        SignedRequest("GET", "/test.txt", {**COMMON, "range": "bytes=0-9"}),
        EMPTY,
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
    "PUT of an object": (
        SignedRequest(
            "PUT",
            "/test%24file.text",
            {
                **COMMON,
                "date": "Fri, 24 May 2013 00:00:00 GMT",
                "x-amz-content-sha256": PUT_SHA256,
                "x-amz-storage-class": "REDUCED_REDUNDANCY",
            },
        ),
        PUT_SHA256,
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    ),
    "a name without a value": (
        SignedRequest("GET", "/?lifecycle", COMMON),
        EMPTY,
        "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
    ),
    "a list": (
        SignedRequest("GET", "/?max-keys=2&prefix=J", COMMON),
        EMPTY,
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
    "a signed URL": (
        SignedRequest("GET", PRESIGNED, {"host": COMMON["host"]}),
        "UNSIGNED-PAYLOAD",
        "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_checker_finds_what_aws_has_published(name: str) -> None:
    request, payload, published = EXAMPLES[name]

    assert signature(request, request.headers, payload, SECRET, DATE, SCOPE) == published


class Checking(http.server.BaseHTTPRequestHandler):
    """Passes on what is signed, and answers 403 to the rest."""

    protocol_version = "HTTP/1.1"

    def __init__(self, upstream: tuple[str, int], seen: list[str], *rest: Any) -> None:
        self.upstream = upstream
        self.seen = seen
        super().__init__(*rest)

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        if headers.get("expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(headers.get("content-length") or 0))
        try:
            check_signature(SignedRequest(self.command, self.path, headers), body, key=KEY, secret=SECRET)
        except SignatureError as error:
            self.seen.append(f"{self.command}: {error}")
            self.answer(403, [], b"")
            return
        self.seen.append(self.command)
        link = http.client.HTTPConnection(*self.upstream, timeout=30)
        try:
            link.request(self.command, self.path, body or None, {**self.headers, "Connection": "close"})
            reply = link.getresponse()
            skipped = ("connection", "transfer-encoding")
            self.answer(reply.status, [(n, v) for n, v in reply.getheaders() if n.lower() not in skipped], reply.read())
        finally:
            link.close()

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        if not any(name.lower() == "content-length" for name, _ in headers):
            headers = [*headers, ("Content-Length", str(len(content)))]
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on


@contextmanager
def checked(upstream: tuple[str, int]) -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Checking, upstream, seen))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Place, list[str]]]:
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        with checked(server.get_host_and_port()) as (endpoint, seen):
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
            monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            boto3.Session().client("s3").create_bucket(Bucket="signed")
            yield open_place("s3://signed/a place"), seen
    finally:
        server.stop()


def status_of(url: str, **headers: str) -> tuple[int, bytes]:
    """As the loader asks: the host of the URL, and a range."""
    parts = urlsplit(url)
    link = http.client.HTTPConnection(parts.netloc, timeout=30)
    try:
        link.request("GET", f"{parts.path}?{parts.query}", headers=headers)
        answer = link.getresponse()
        return answer.status, answer.read()
    finally:
        link.close()


def test_all_that_is_asked_of_a_bucket_is_signed(bucket: tuple[Place, list[str]], tmp_path: Path) -> None:
    place, seen = bucket
    (tmp_path / "large").write_bytes(b"0123456789" * (1 << 20))  # so large that it goes in parts

    place.put("layers/ab/one@1:2.json", b"text")
    place.put_file("data/ab/two", tmp_path / "large")

    assert place.get("layers/ab/one@1:2.json") == b"text"
    assert place.size("data/ab/two") == 10 << 20
    assert place.names("layers") == ["layers/ab/one@1:2.json"]
    place.remove("layers/ab/one@1:2.json")
    assert set(seen) == {"GET", "HEAD", "PUT", "POST", "DELETE"}


def test_the_loaders_url_is_good_for_its_object_and_no_other(bucket: tuple[Place, list[str]]) -> None:
    place, _ = bucket
    place.put("data/ab/one", b"first one")
    place.put("data/ab/two", b"second")

    url = place.location("data/ab/one").url

    assert url is not None
    assert SECRET not in url
    assert status_of(url, Range="bytes=0-4") == (206, b"first")
    assert status_of(url.replace("/ab/one", "/ab/two"))[0] == 403
    assert status_of(url.replace("X-Amz-Expires=604800", "X-Amz-Expires=604801"))[0] == 403
    assert status_of(url.split("?")[0] + "?")[0] == 403


def test_another_secret_is_refused_in_words(
    bucket: tuple[Place, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    place = open_place("s3://signed/a place")
    (tmp_path / "large").write_bytes(bytes(10 << 20))

    with pytest.raises(StorageError, match="refuses") as refusal:
        place.put("layers/ab/one", b"text")
    with pytest.raises(StorageError, match="refuses"):
        place.put_file("data/ab/two", tmp_path / "large")
    assert refusal.value.hint is not None


def test_a_url_signed_by_a_role_is_renewed_before_the_role_ends(
    bucket: tuple[Place, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    monkeypatch.setattr(places.time, "time", lambda: 1000.0)

    location = open_place("s3://signed/a place").location("data/ab/one")

    assert location.expires_at == 1600.0
    assert location.url is not None
    assert "X-Amz-Security-Token=token" in location.url


def test_a_node_without_credentials_says_so(bucket: tuple[Place, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    place = open_place("s3://signed/a place")

    for ask in (place.get, place.location):
        with pytest.raises(StorageError, match="no credentials"):
            ask("layers/ab/one")
