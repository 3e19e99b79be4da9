"""Stores of all kinds, by both front ends, slow, flaky, corrupt, gone, silent: what is read is right, or EIO."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsec.storage.store.places import open_place
from dsec.storage.store.publish import publish_layer
from tests.system.loader_site import DEADLINE_S, FILES, Site, content, made_site, read, until
from tests.system.store_servers import (
    BUCKET_KEY,
    BUCKET_SECRET,
    FaultyFront,
    bucket_server,
    nginx_server,
    python_server,
    signed_bucket_server,
)
from tests.system.test_loader_guard import mounted, waiting_reader

pytestmark = [
    pytest.mark.root,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of moto's and boto3's own code
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KINDS = ["directory", "web", "nginx", "bucket", "signed"]


@dataclass
class Faulty:
    """A node's layer in a store of some kind, which can be told to misbehave."""

    site: Site
    set: Callable[[str], None]


@pytest.fixture(params=["fuse", "fanotify"])
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def faulty(
    request: pytest.FixtureRequest, front: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Faulty]:
    with made_site(tmp_path, front) as site, ExitStack() as stack:
        if request.param == "directory":
            with misbehaving_directory(site.data) as change:
                yield Faulty(site, change)
            return
        store = tmp_path / "store"
        if request.param == "web":
            upstream = stack.enter_context(python_server(store))
        elif request.param == "nginx":
            upstream = stack.enter_context(nginx_server(store, tmp_path / "nginx"))
        elif request.param == "signed":
            upstream = stack.enter_context(signed_bucket_server(tmp_path / "s3"))
        else:
            upstream = stack.enter_context(bucket_server())
        proxy = FaultyFront(upstream)
        stack.callback(proxy.close)
        url = f"http://127.0.0.1:{proxy.port}"
        if request.param in ("bucket", "signed"):
            url = stack.enter_context(bucket(monkeypatch, site, url))
        site.place = open_place(url)
        yield Faulty(site, proxy.set)


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch, site: Site, endpoint: str) -> Iterator[str]:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", BUCKET_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", BUCKET_SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.Session().client("s3").create_bucket(Bucket="layers")
    publish_layer(site.builder, site.built, open_place("s3://layers/prod"))
    yield "s3://layers/prod"


@contextmanager
def misbehaving_directory(data: Path) -> Iterator[Callable[[str], None]]:
    """Of a file system that is mounted: files are there, or not, or are others."""
    good = data.read_bytes()
    away = data.with_name("away")
    ends = threading.Event()
    flickering: list[threading.Thread] = []

    def flicker() -> None:
        while not ends.wait(0.05):
            data.rename(away)
            ends.wait(0.05)
            away.rename(data)

    def change(mode: str) -> None:
        ends.set()
        for thread in flickering:
            thread.join()
        flickering.clear()
        ends.clear()
        for other in (away, data):
            other.unlink(missing_ok=True)
        if mode in ("good", "slow", "flaky"):
            data.write_bytes(good)
        elif mode == "corrupt":
            data.write_bytes(bytes(byte ^ 0xFF for byte in good[:4096]) + bytes(len(good) - 4096))
        if mode == "flaky":
            flickering.append(threading.Thread(target=flicker))
            flickering[0].start()

    try:
        yield change
    finally:
        change("good")


def outcome(top: int, number: int) -> str:
    try:
        return "right" if read(top, number) == content(number) else "wrong"
    except OSError as error:
        return errno.errorcode[error.errno or 0]


@pytest.mark.parametrize(
    "faulty",
    [pytest.param(kind, marks=[pytest.mark.slow] if kind in ("nginx", "bucket") else []) for kind in KINDS],
    indirect=True,
)
def test_what_is_read_is_right_or_an_error_whatever_the_store_does(faulty: Faulty) -> None:
    with mounted(faulty.site) as top:
        faulty.set("slow")
        assert outcome(top, 0) == "right"
        faulty.set("flaky")
        assert outcome(top, 1) == "right"
        faulty.set("corrupt")
        outcomes = {outcome(top, number) for number in range(2, FILES)}
        assert outcomes <= {"right", "EIO"}
        assert "EIO" in outcomes
        assert faulty.site.remote.stats_of(faulty.site.digest).corrupt > 0
        faulty.set("gone")
        threading.Timer(0.5, faulty.set, ["good"]).start()
        # Readers wait for a store that has failed before, but not for long: a busy machine may bring it back later.
        assert {outcome(top, number) for number in range(FILES)} <= {"right", "EIO"}
        until(lambda: [outcome(top, number) for number in range(FILES)] == ["right"] * FILES)


@pytest.mark.parametrize("faulty", ["web"], indirect=True)
def test_a_reader_of_a_store_that_says_nothing_can_be_killed(faulty: Faulty) -> None:
    with mounted(faulty.site) as top:
        faulty.set("hang")
        with waiting_reader(faulty.site, top, 4) as reader:
            reader.send_signal(signal.SIGKILL)
            assert reader.wait(DEADLINE_S) == -signal.SIGKILL
        faulty.set("good")
        assert outcome(top, 4) == "right"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", ["hang", "gone"])
def test_a_read_of_a_store_that_stays_away_ends_with_eio(faulty: Faulty, mode: str) -> None:
    with mounted(faulty.site) as top:
        faulty.set(mode)
        began = time.monotonic()
        assert outcome(top, 5) == "EIO"
        assert time.monotonic() - began < 4 * DEADLINE_S
        error = faulty.site.remote.stats_of(faulty.site.digest).error
        assert error is not None
        assert error.cause in ("gone", "unreachable")
        faulty.set("good")
        deadline = time.monotonic() + DEADLINE_S
        while outcome(top, 5) != "right":
            assert time.monotonic() < deadline


@pytest.mark.parametrize("faulty", ["nginx", "bucket", "signed"], indirect=True)
def test_the_servers_are_what_they_seem(faulty: Faulty) -> None:
    """The loader has the data by ranges: no answer is the whole object."""
    with mounted(faulty.site) as top:
        fd = os.open("file6", os.O_RDONLY, dir_fd=top)
        with os.fdopen(fd, "rb") as file:
            assert file.read(4096) == content(6)[:4096]
    stats = faulty.site.remote.stats_of(faulty.site.digest)
    assert 0 < stats.fetched_bytes < stats.size // 2
