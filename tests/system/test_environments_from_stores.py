"""An environment that one node pushed is built by others from the store, and loaded as its sandboxes read it."""

from __future__ import annotations

import asyncio
import errno
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

import dsec
from dsec.core.errors import ConflictError, LaunchError, UnsupportedError
from dsec.image.environments import EnvironmentStore
from dsec.image.published import push_now
from dsec.sdk.client import AsyncClient
from dsec.serve.retire import retire_launcher
from dsec.storage.layers import LayerKind
from dsec.storage.loader import Loader
from dsec.testing.processes import all_processes, command_line
from dsec.testing.waiting import eventually
from dsec.wire.environments import BuildEvent, PushRequest, StoreSource
from dsec.wire.loader import LoaderOp, PrefetchArgs
from tests.system.container_place import ENVIRONMENT, Place, private_place, served
from tests.system.loader_site import guards

pytestmark = pytest.mark.root

MINE = "mine"  # what the second node calls it
FALSE = ["/usr/bin/python3", "-c", "raise SystemExit(1)"]
PYTHON = ["/usr/bin/python3", "-c", "import json; print(json.dumps([6 * 7]))"]
# Reads files until one cannot be read, and says how often that was so, and why.
READ_ALL = ["/usr/bin/python3", "-c", """
import os, sys
for top in sys.argv[1:]:
    for directory, _, names in os.walk(top):
        for name in sorted(names):
            try:
                with open(os.path.join(directory, name), "rb", buffering=0) as file:
                    while file.read(1 << 20):
                        pass
            except OSError as error:
                print("errno", error.errno)
                sys.exit(3)
print("all read")
"""]  # fmt: skip
WHOLE = [*READ_ALL, "/bin", "/usr"]
NOT_TO_BE_READ = [*READ_ALL, "/proc/self/map_files", "/proc/self/attr", "/proc/1"]  # fails with all code that it takes


class Shared:
    """A store in a directory that all nodes have."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"file://{root}"

    def source(self, url: str | None = None) -> StoreSource:
        return StoreSource(url=url or self.url, environment=ENVIRONMENT)

    @property
    def data(self) -> Path:
        (data,) = (self.root / "data").glob("*/*")
        return data


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory, small_store: Path) -> Path:
    if not Path("/dev/fuse").exists():
        pytest.skip("this host has no FUSE")
    store = EnvironmentStore(small_store)
    if any(store.layers.get(digest).kind is not LayerKind.EROFS for digest in store.layers.digests()):
        pytest.skip("this host makes no EROFS images")
    root = tmp_path_factory.mktemp("pushed") / "store"
    push_now(store, PushRequest(name=ENVIRONMENT, store=f"file://{root}"), lambda event: None)
    return root


@pytest.fixture
def shared(tmp_path: Path, pushed: Path) -> Shared:
    shutil.copytree(pushed, tmp_path / "shared")
    return Shared(tmp_path / "shared")


@pytest.fixture
def place() -> Iterator[Place]:
    with private_place(None) as place:
        yield place


@asynccontextmanager
async def with_it(place: Place, shared: Shared, url: str | None = None) -> AsyncIterator[AsyncClient]:
    """A node that has built the environment from the store."""
    async with served(place) as (_, client):
        await client.environments.build(MINE, shared.source(url))
        yield client


async def use_of(client: AsyncClient) -> dsec.LayerUse:
    (layer,) = (await client.environments.stats(MINE)).layers
    return layer


def loader_of(place: Place) -> list[int]:
    mark = b"\0--run\0" + str(place.run).encode() + b"\0"
    return [pid for pid in all_processes() if b"dsec-loader" in (line := command_line(pid)) and mark in line]


def drop_page_cache() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("1")


async def test_what_is_pushed_is_built_elsewhere_and_only_what_is_read_comes(place: Place, shared: Shared) -> None:
    async with with_it(place, shared) as client:
        before = await use_of(client)
        async with await client.create(MINE) as sb:
            said = await sb.exec(PYTHON, check=True)
        after = await use_of(client)

    assert said.stdout == "[42]\n"
    assert (before.store, before.loaded, before.present_bytes) == (shared.url, False, 0)
    assert after.failure is None
    assert 0 < after.fetched_bytes < after.present_bytes < after.size_bytes // 2
    assert after.touched_bytes > 0 < after.misses


async def test_a_create_takes_what_its_node_lacks_from_a_store_that_the_operator_named(
    place: Place, shared: Shared
) -> None:
    place.settings["storage"] = {"pull": [shared.url]}
    async with served(place) as (_, client):
        async with await client.create(ENVIRONMENT) as sb:
            assert (await sb.exec(PYTHON, check=True)).stdout == "[42]\n"
        with pytest.raises(dsec.errors.EnvironmentNotFoundError):
            await client.create("nobody-has-this")


async def test_the_next_node_loads_first_what_a_trace_says(place: Place, shared: Shared) -> None:
    async with with_it(place, shared) as client:
        with pytest.raises(ConflictError, match="has been read"):
            await client.environments.trace(MINE)
        async with await client.create(MINE) as sb:
            await sb.exec(PYTHON, check=True)
        (traced,) = (await client.environments.trace(MINE)).layers
        untraced_misses = (await use_of(client)).misses

    with private_place(None) as third:
        async with with_it(third, shared) as client, await client.create(MINE) as sb:
            chunk = 256 << 10

            async def all_there() -> bool:
                return (await use_of(client)).present_bytes >= (traced.chunks - 1) * chunk

            await eventually(all_there)
            missed = (await use_of(client)).misses
            await sb.exec(PYTHON, check=True)
            # The kernel reads ahead a little differently each time.
            assert (await use_of(client)).misses - missed < untraced_misses // 4


async def test_pushing_and_building_again_find_it_done(place: Place, shared: Shared, small_store: Path) -> None:
    events: list[BuildEvent] = []
    shutil.rmtree(shared.root)
    with private_place(small_store) as first:
        async with served(first) as (_, client):
            await client.environments.push(ENVIRONMENT, shared.url)
            objects = {path: path.stat().st_ino for path in shared.root.rglob("*/*/*") if path.is_file()}
            await client.environments.push(ENVIRONMENT, shared.url, on_event=events.append)
            with pytest.raises(UnsupportedError, match="read only"):
                await client.environments.push(ENVIRONMENT, "http://127.0.0.1:1/store")
    async with with_it(place, shared) as client:
        first_info = await client.environments.get(MINE)
        again = await client.environments.build(MINE, shared.source())

    assert any("there already" in event.message for event in events)
    assert {path: path.stat().st_ino for path in objects} == objects
    assert not list((shared.root / ".drafts").iterdir())
    assert again == first_info


async def test_a_store_that_is_damaged_is_an_error_inside_and_is_told_outside(place: Place, shared: Shared) -> None:
    good = shared.data.read_bytes()
    async with with_it(place, shared) as client, await client.create(MINE) as sb:
        assert "errno" in (await sb.exec(NOT_TO_BE_READ)).stdout
        shared.data.write_bytes(bytes(len(good)))

        failed = await sb.exec(WHOLE)
        assert (failed.stdout, failed.exit_code, failed.cause) == (f"errno {errno.EIO}\n", 3, "layer_corrupt")
        for _ in range(2):  # it is told to everybody who asks
            told = await use_of(client)
            assert told.failure is not None
            assert (told.failure.cause, told.errors > 0, told.corrupt > 0) == ("corrupt", True, True)
        shared.data.write_bytes(good)
        assert (await sb.exec(FALSE)).cause is None  # what was before it began is not its own
        assert (await sb.exec(WHOLE)).stdout == "all read\n"
        assert (await use_of(client)).failure is None


@pytest.mark.slow  # the store is waited for, for half a minute
async def test_a_store_that_is_gone_is_an_error_until_it_is_back(place: Place, shared: Shared) -> None:
    async with with_it(place, shared) as client, await client.create(MINE) as sb:
        await sb.exec(PYTHON, check=True)
        assert "errno" in (await sb.exec(NOT_TO_BE_READ)).stdout
        shared.root.rename(shared.root.with_name("away"))

        failed = await sb.exec(WHOLE)
        assert (failed.stdout, failed.exit_code, failed.cause) == (f"errno {errno.EIO}\n", 3, "layer_unavailable")

        told = await use_of(client)
        assert told.failure is not None
        assert told.failure.cause == "gone"
        assert (await sb.exec(PYTHON, check=True)).stdout == "[42]\n"  # what is here goes on
        shared.root.with_name("away").rename(shared.root)
        assert (await sb.exec(WHOLE)).stdout == "all read\n"


@pytest.mark.parametrize("front", ["fuse", pytest.param("fanotify", marks=pytest.mark.slow)])
async def test_a_command_that_fails_because_its_store_is_away_says_so(place: Place, shared: Shared, front: str) -> None:
    if front == "fanotify" and not guards(place.state):
        pytest.skip("this kernel or file system has no pre-content events")
    place.settings["storage"] = {"loader_front": front}
    async with with_it(place, shared) as client, await client.create(MINE) as sb:
        assert (await sb.exec(FALSE)).cause is None
        assert "errno" in (await sb.exec(NOT_TO_BE_READ)).stdout
        shared.root.rename(shared.root.with_name("away"))
        loader = Loader(place.run, place.state / "cache", cache_bytes=0)
        layer = (await use_of(client)).digest
        loader.request(LoaderOp.PREFETCH, PrefetchArgs(digest=layer, whole=True), dict, start=False)
        loader.close()

        async def noticed() -> bool:
            return (await use_of(client)).errors > 0

        await eventually(noticed)  # so that readers wait for two seconds, and not for half a minute
        assert (await sb.exec(FALSE)).cause is None  # nobody had to read what could not be fetched ahead
        failed = await sb.exec(WHOLE)
        assert (failed.stdout, failed.exit_code, failed.cause) == (f"errno {errno.EIO}\n", 3, "layer_unavailable")
        shared.root.with_name("away").rename(shared.root)
        assert (await sb.exec(WHOLE)).stdout == "all read\n"
        assert (await sb.exec(FALSE)).cause is None


async def test_kill_9_of_the_loader_s_worker_is_not_noticed_inside(place: Place, shared: Shared) -> None:
    async with with_it(place, shared) as client, await client.create(MINE) as sb:
        loader = Loader(place.run, place.state / "cache", cache_bytes=0)
        if not loader.hello().resends:
            pytest.skip("this kernel does not ask again what a dead worker was asked")
        running = asyncio.ensure_future(sb.exec(WHOLE, check=True))
        for _ in range(3):
            os.kill(loader.hello().pid, signal.SIGKILL)
            await eventually(loader.is_running)
            drop_page_cache()
        assert (await running).stdout == "all read\n"
        assert (await sb.exec(PYTHON, check=True)).stdout == "[42]\n"
        loader.close()


async def test_by_fanotify_kills_are_not_noticed_inside(place: Place, shared: Shared) -> None:
    if not guards(place.state):
        pytest.skip("this kernel or file system has no pre-content events")
    place.settings["storage"] = {"loader_front": "fanotify"}
    async with with_it(place, shared) as client, await client.create(MINE) as sb:
        loader = Loader(place.run, place.state / "cache", cache_bytes=0)
        assert loader.hello().front == "fanotify"
        running = asyncio.ensure_future(sb.exec(WHOLE, check=True))
        for _ in range(2):
            os.kill(loader.hello().pid, signal.SIGKILL)
            await eventually(loader.is_running)
            drop_page_cache()
        assert (await running).stdout == "all read\n"
        loader.close()
        assert (await sb.exec(PYTHON, check=True)).stdout == "[42]\n"
        assert (await use_of(client)).present_bytes > 0


async def test_a_loader_that_is_killed_as_a_whole_is_started_again_for_new_sandboxes(
    place: Place, shared: Shared
) -> None:
    async with with_it(place, shared) as client:
        async with await client.create(MINE) as sb:
            assert "errno" in (await sb.exec(NOT_TO_BE_READ)).stdout
            while pids := loader_of(place):  # as long as the supervisor is there it may start another worker
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            assert (await sb.exec(WHOLE)).stdout == f"errno {errno.EIO}\n"
        async with await client.create(MINE) as sb:
            assert (await sb.exec(WHOLE)).stdout == "all read\n"
        assert (await use_of(client)).loaded


async def test_metadata_that_is_damaged_is_a_typed_error(place: Place, shared: Shared) -> None:
    async with with_it(place, shared) as client:
        (meta,) = place.state.glob("layers/*/meta.erofs")
        meta.write_bytes(bytes(meta.stat().st_size))

        with pytest.raises(LaunchError) as refused:
            await client.create(MINE)

        assert "layer_mount" in str(refused.value)
        assert await client.list() == []


async def test_the_command_line_pushes_builds_and_tells(place: Place, shared: Shared) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dsec", *arguments]
        environment = {**os.environ, "DSEC_URL": place.url}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

    def ask(*arguments: str) -> str:
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async with served(place) as (_, client):
        built = ("env", "build", MINE, "--store", shared.url, "--environment", ENVIRONMENT)
        assert await asyncio.to_thread(ask, *built) == f"{MINE}\n"
        async with await client.create(MINE) as sb:
            await sb.exec(PYTHON, check=True)
        told = await asyncio.to_thread(ask, "env", "stats", MINE)
        told_json = json.loads(await asyncio.to_thread(ask, "env", "stats", MINE, "--json"))
        traced = await asyncio.to_thread(ask, "env", "trace", MINE)
        assert await asyncio.to_thread(ask, "env", "push", MINE, shared.url) == f"{MINE}\n"
        refused = await asyncio.to_thread(run, "env", "push", MINE, f"{shared.url}-new")
        there = json.loads(await asyncio.to_thread(ask, "env", "push", MINE, shared.url, "--json"))["digest"]
        pull = ("env", "pull", shared.url, MINE, "--as", "pinned", "--digest")
        assert await asyncio.to_thread(ask, *pull, there) == "pinned\n"
        other = await asyncio.to_thread(run, *pull, "0" * 12)

    assert shared.url in told
    assert re.search(r"HIT RATE.* \d+% ", told, re.DOTALL)
    assert told_json["layers"][0]["fetched_bytes"] > 0
    assert "chunks" in traced
    assert refused.returncode == 125
    assert "and not here" in refused.stderr  # its data is in the other store
    assert other.returncode == 125
    assert "and not 000000000000" in other.stderr


async def test_down_leaves_neither_loader_nor_mounts(place: Place, shared: Shared) -> None:
    async with with_it(place, shared) as client:
        async with await client.create(MINE) as sb:
            await sb.exec(PYTHON, check=True)
        async with place.no_leaks():  # the loader is there for all sandboxes
            async with await client.create(MINE) as sb:
                await sb.exec(PYTHON, check=True)
    assert len(loader_of(place)) == 2

    assert await retire_launcher(place.run) == 0

    assert loader_of(place) == []
    assert str(place.directory) not in Path("/proc/mounts").read_text()


async def test_an_environment_that_is_removed_is_loaded_no_longer(place: Place, shared: Shared) -> None:
    async with with_it(place, shared) as client:
        async with await client.create(MINE) as sb:
            await sb.exec(PYTHON, check=True)
        await client.environments.remove(MINE)
        await client.environments.build("other", shared.source())
        (layer,) = (await client.environments.stats("other")).layers
        assert not layer.loaded
        async with await client.create("other") as sb:
            assert (await sb.exec(PYTHON, check=True)).stdout == "[42]\n"


async def test_a_web_server_with_ranges_is_a_store(place: Place, shared: Shared) -> None:
    with web_server(shared.root) as (url, served_bytes):
        async with with_it(place, shared, url) as client:
            async with await client.create(MINE) as sb:
                assert (await sb.exec(PYTHON, check=True)).stdout == "[42]\n"
            use = await use_of(client)
            with pytest.raises(UnsupportedError, match="read only"):
                await client.environments.trace(MINE)

    assert use.store == url
    assert 0 < use.fetched_bytes <= sum(served_bytes) < shared.data.stat().st_size


class Ranges(http.server.SimpleHTTPRequestHandler):
    """One range a request, as stores ask for."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *args: object, served_bytes: list[int], **options: object) -> None:
        self.served_bytes = served_bytes
        super().__init__(*args, **options)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            super().do_GET()
            return
        first, last = int(wanted[1]), int(wanted[2])
        with Path(self.translate_path(self.path)).open("rb") as file:
            file.seek(first)
            content = file.read(last - first + 1)
            size = os.fstat(file.fileno()).st_size
        self.served_bytes.append(len(content))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{size}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def web_server(root: Path) -> Iterator[tuple[str, list[int]]]:
    served_bytes: list[int] = []
    handler = partial(Ranges, directory=os.fspath(root), served_bytes=served_bytes)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", served_bytes
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
