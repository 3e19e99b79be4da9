"""Builds as a node runs them: real processes, real images, killed and cancelled in the middle."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.core.errors import CapacityError, ConflictError, DeadlineError, DsecError, InvalidArgumentError, StorageError
from dsec.core.limits import BUILDS_MAX
from dsec.core.spec import Environment
from dsec.image import erofs
from dsec.image.build import build, build_events
from dsec.image.environments import EnvironmentStore
from dsec.image.erofs import probe_erofs
from dsec.image.scan import tree_digest
from dsec.image.worker import build_key, build_now
from dsec.node.doctor import of_environments
from dsec.storage.layers import LayerKind
from dsec.storage.mounts import mount_erofs
from dsec.storage.trees import remove_tree
from dsec.wire.environments import (
    BuildEvent,
    BuildRequest,
    DebianSource,
    DirectorySource,
    EnvironmentInfo,
    OciSource,
    Ownership,
    TarSource,
)
from tests.images import Layout, digest_of, directory, hardlink, member, symlink, tar_of

WAIT_S = 60.0


@pytest.fixture
def store() -> Iterator[EnvironmentStore]:
    """On a real file system: the kernel does not mount images that lie on tmpfs, where `tmp_path` may be."""
    state = Path(tempfile.mkdtemp(prefix="dsec-build-", dir="/var/tmp"))
    try:
        yield EnvironmentStore(state)
    finally:
        remove_tree(state)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.tar"
    path.write_bytes(
        tar_of([
            directory("bin", mode=0o755), member("bin/tool", b"#!/bin/sh\n", mode=0o4755, uid=7, gid=8),
            directory("data", mode=0o1777, mtime=5_000), member("data/empty"),
            member("data/big", os.urandom(3_000_001)),
            hardlink("data/same", "data/big"), symlink("data/link", "/etc/passwd"),
            member("data/marked", b"x", pax_headers={"SCHILY.xattr.user.mark": "yes", "mtime": "1700000000.123456789"}),
            member("zeros", b"\0" * 2_000_000), directory("hollow"),
        ])
    )  # fmt: skip
    return path


@pytest.fixture
def endless(tmp_path: Path) -> OciSource:
    """An image whose only layer takes minutes to unpack: a file of zeros, 100 GiB, of which the disk holds nothing."""
    layout = Layout(tmp_path / "endless")
    descriptor = layout.image([b""])
    info, _ = member("zeros", size=100 << 30)
    head = info.tobuf()
    manifest_path = layout.blob_path(descriptor)
    blob = layout.blob(head, "application/vnd.oci.image.layer.v1.tar")
    os.truncate(layout.blob_path(blob), 512 + (100 << 30))
    text = manifest_path.read_text()
    empty = layout.blob(b"", "")["digest"]
    text = text.replace(empty, blob["digest"]).replace('"size": 0', f'"size": {512 + (100 << 30)}')
    changed = layout.blob(text.encode(), descriptor["mediaType"])
    layout.manifests = [changed]
    layout.write_index()
    return OciSource(str(layout.root))


def leftovers(store: EnvironmentStore) -> list[str]:
    """Files, and anything in staging. The lock of collectors is one file for ever."""
    found = {path for path in store.state.rglob("*") if not path.is_dir() or path.parent.name == "staging"}
    return sorted(str(path.relative_to(store.state)) for path in found - {store.state / "locks" / "collect"})


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
        time.sleep(0.01)  # between two looks at a condition that nothing announces


@pytest.fixture(autouse=True)
def before() -> None:
    """Processes that other tests may have left are not ours."""
    _OTHERS.clear()
    _OTHERS.update(descendants(os.getpid()))


_OTHERS: set[int] = set()


def own_processes() -> set[int]:
    return descendants(os.getpid()) - _OTHERS


def descendants(pid: int) -> set[int]:
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), set()).add(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), set()):
            found.add(child)
            todo.append(child)
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}/stat").exists()}


# ---- what comes out --------------------------------------------------------------------------------


async def test_a_build_tells_its_story_and_leaves_only_the_environment(store: EnvironmentStore, source: Path) -> None:
    events: list[BuildEvent] = []

    info = await build(store, BuildRequest(name="x", source=TarSource(str(source))), events.append)

    assert store.get("x") == info
    assert [event.stage for event in events if event.kind == "progress"][:3] == ["resolve", "wait", "stage"]
    assert list((store.state / "staging").iterdir()) == []
    assert own_processes() == set()


@pytest.mark.root
def test_the_mounted_image_is_the_tree_that_went_in(store: EnvironmentStore, source: Path, tmp_path: Path) -> None:
    verdict = probe_erofs(store.layers)
    if not verdict.usable:
        pytest.skip(verdict.reason)
    plain = tmp_path / "plain"
    plain.mkdir()
    subprocess.run(["tar", "-C", plain, "--xattrs", "--same-owner", "-xpf", source], check=True)
    # What tar does not know from the archive: the top itself.
    plain.chmod(0o755)
    os.utime(plain, ns=(0, 0))

    info = build_now(store, BuildRequest(name="x", source=TarSource(str(source))), lambda event: None)

    layer = store.resolve(Environment("x")).layers[0]
    assert layer.kind is LayerKind.EROFS
    top = mount_erofs(layer.meta, layer.blob)
    try:
        assert tree_digest(top).digest == info.layers[0] == digest_of(plain)
        tool = os.stat("bin/tool", dir_fd=top)
        assert (tool.st_mode & 0o7777, tool.st_uid, tool.st_gid) == (0o4755, 7, 8)
        assert os.stat("data/marked", dir_fd=top).st_mtime_ns == 1_700_000_000_123_456_789
    finally:
        os.close(top)


@pytest.mark.root
def test_where_images_cannot_be_mounted_layers_are_directories_and_it_says_why(source: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    state = Path(tempfile.mkdtemp(prefix="dsec-build-", dir="/dev/shm"))
    events: list[BuildEvent] = []
    try:
        store = EnvironmentStore(state)
        info = build_now(store, BuildRequest(name="x", source=TarSource(str(source))), events.append)

        layer = store.resolve(Environment("x")).layers[0]
        assert (info.kind, layer.kind, layer.blob) == ("directory", LayerKind.DIRECTORY, None)
        assert digest_of(layer.meta) == layer.digest
        assert any("tmpfs" in event.message for event in events if event.kind == "log")
        assert "tmpfs" in store.describe().reason
        store.remove("x")
        assert store.layers.digests() == []
    finally:
        remove_tree(state)


def test_without_mkfs_erofs_layers_are_directories_and_the_doctor_says_how_to_get_it(
    source: Path, store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erofs, "mkfs_program", lambda: None)
    events: list[BuildEvent] = []

    info = build_now(store, BuildRequest(name="x", source=TarSource(str(source))), events.append)

    layer = store.resolve(Environment("x")).layers[0]
    assert (info.kind, layer.kind, digest_of(layer.meta)) == ("directory", LayerKind.DIRECTORY, layer.digest)
    assert any("mkfs.erofs is not installed" in event.message for event in events if event.kind == "log")
    told = of_environments(store.describe())
    assert (told.status, told.hint) == ("degraded", "apt install erofs-utils (1.8 or newer)")


@pytest.mark.root
def test_a_builder_who_is_not_root_gives_all_files_to_root(source: Path) -> None:
    state = Path(tempfile.mkdtemp(prefix="dsec-build-", dir="/var/tmp"))
    os.chown(state, 65_534, 65_534)
    shutil.copy(source, state / "source.tar")
    (state / "source.tar").chmod(0o644)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65_534, 65_534, 65_534)
            os.setresuid(65_534, 65_534, 65_534)
            store = EnvironmentStore(state / "store")
            build_now(store, BuildRequest(name="x", source=TarSource(str(state / "source.tar"))), lambda event: None)
            layer = store.resolve(Environment("x")).layers[0]
            fd = os.open(layer.meta, os.O_RDONLY)
            code = 0 if tree_digest(fd, as_root=True).digest == layer.digest else 2
            store.remove("x")
            code = code or len(store.layers.digests())
        finally:
            os._exit(code)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        remove_tree(state)


async def test_a_directory_is_copied_with_its_links_and_without_its_sockets(
    store: EnvironmentStore, tmp_path: Path
) -> None:
    origin = tmp_path / "origin"
    (origin / "sub").mkdir(parents=True)
    (origin / "sub" / "file").write_text("x")
    os.link(origin / "sub" / "file", origin / "again")
    (origin / "link").symlink_to("/etc")
    clean = digest_of(origin)
    top_time_ns = origin.stat().st_mtime_ns
    os.mkfifo(origin / "pipe")
    (origin / "pipe").unlink()
    os.utime(origin, ns=(0, top_time_ns))

    info = await build(store, BuildRequest(name="x", source=DirectorySource(str(origin))))
    again = await build(store, BuildRequest(name="x", source=DirectorySource(str(origin))))

    assert info.layers == (clean,)
    assert again == info


async def test_the_story_always_has_an_end(store: EnvironmentStore, source: Path, tmp_path: Path) -> None:
    good = [event async for event in build_events(store, BuildRequest(name="x", source=TarSource(str(source))))]
    bad = [
        event
        async for event in build_events(store, BuildRequest(name="y", source=TarSource(str(tmp_path / "missing"))))
    ]

    assert good[-1].kind == "done"
    assert good[-1].environment == store.get("x")
    assert bad[-1].kind == "error"
    assert bad[-1].error is not None
    assert bad[-1].error.code == "invalid_argument"
    assert "missing" in bad[-1].error.message


async def test_names_that_are_no_text_can_be_told_of(store: EnvironmentStore, tmp_path: Path) -> None:
    path = tmp_path / "odd.tar"
    path.write_bytes(tar_of([member("\udcff\udcfe" * 3, b"x", uid=70_000)]))

    with pytest.raises(InvalidArgumentError, match="70000"):
        await build(store, BuildRequest(name="x", source=TarSource(str(path))))


async def test_more_builds_than_the_machine_can_take_are_refused(store: EnvironmentStore, endless: OciSource) -> None:
    all_run = asyncio.Event()
    started: set[str] = set()

    def start(name: str) -> asyncio.Task[EnvironmentInfo]:
        def note(event: BuildEvent) -> None:
            started.add(name)
            if len(started) == BUILDS_MAX:
                all_run.set()

        return asyncio.create_task(build(store, BuildRequest(name=name, source=endless), note))

    running = [start(f"x{number}") for number in range(BUILDS_MAX)]
    async with asyncio.timeout(WAIT_S):
        await all_run.wait()

    with pytest.raises(CapacityError) as error:
        await build(store, BuildRequest(name="x", source=endless))
    assert error.value.retry_after_s

    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert store.builds_running == 0
    assert leftovers(store) == []


async def test_a_hostile_archive_fails_with_its_reason_and_leaves_nothing(
    store: EnvironmentStore, tmp_path: Path
) -> None:
    path = tmp_path / "hostile.tar"
    path.write_bytes(tar_of([member("fine", b"x" * 100_000), member("../../evil", b"x")]))

    with pytest.raises(InvalidArgumentError, match="leads out"):
        await build(store, BuildRequest(name="x", source=TarSource(str(path))))

    assert leftovers(store) == []


# ---- interrupted -----------------------------------------------------------------------------------


async def test_a_cancelled_build_leaves_nothing(store: EnvironmentStore, endless: OciSource) -> None:
    staging = asyncio.Event()
    task = asyncio.create_task(
        build(
            store,
            BuildRequest(name="x", source=endless),
            lambda event: staging.set() if event.stage == "stage" else None,
        )
    )
    async with asyncio.timeout(WAIT_S):
        await staging.wait()
    assert own_processes() != set()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert own_processes() == set()
    assert leftovers(store) == []


async def test_a_build_that_takes_too_long_is_ended(store: EnvironmentStore, endless: OciSource) -> None:
    with pytest.raises(DeadlineError):
        await build(store, BuildRequest(name="x", source=endless), timeout_s=1.0)

    assert own_processes() == set()
    assert leftovers(store) == []


async def test_a_stream_that_is_closed_early_ends_the_build(store: EnvironmentStore, endless: OciSource) -> None:
    stream = build_events(store, BuildRequest(name="x", source=endless))
    async for event in stream:
        if event.stage == "stage":
            break
    await stream.aclose()  # type: ignore[attr-defined]  # an async generator

    assert own_processes() == set()
    assert leftovers(store) == []


async def test_a_killed_worker_is_an_error_that_says_so(store: EnvironmentStore, endless: OciSource) -> None:
    def kill(event: BuildEvent) -> None:
        if event.stage == "stage":
            for pid in own_processes():
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(StorageError, match="ended without a result"):
        await build(store, BuildRequest(name="x", source=endless), kill)

    assert leftovers(store) == []


def command(store: EnvironmentStore, name: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "dsec.image", "build", name, *options, "--state", os.fspath(store.state)]


def test_when_the_parent_is_killed_the_build_ends_and_the_next_start_sweeps(
    store: EnvironmentStore, endless: OciSource
) -> None:
    with subprocess.Popen(
        command(store, "x", "--oci", endless.path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stderr is not None
        while "[stage]" not in parent.stderr.readline():
            assert parent.poll() is None
        family = descendants(parent.pid)
        assert family != set()
        parent.kill()
        parent.wait()

    until(lambda: alive(family) == set(), "the worker ends with its parent")
    EnvironmentStore(store.state).layers.clean()

    assert leftovers(store) == []
    assert store.list() == []


def test_two_processes_that_build_the_same_are_one(store: EnvironmentStore, source: Path) -> None:
    key = build_key(TarSource(str(source)))
    with store.layers.single_flight(key):
        builders = [
            subprocess.Popen(
                command(store, name, "--tar", os.fspath(source)),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in ("one", "two")
        ]
        heads = [head_until(builder, "[wait]") for builder in builders]
    stories = [head + builder.communicate(timeout=WAIT_S)[1] for head, builder in zip(heads, builders, strict=True)]

    assert [builder.returncode for builder in builders] == [0, 0]
    assert sum(story.count("[stage]") for story in stories) == 1
    assert store.get("one").layers == store.get("two").layers
    assert len(store.layers.digests()) == 1


def head_until(process: subprocess.Popen[str], mark: str) -> str:
    assert process.stderr is not None
    head = ""
    while mark not in head:
        line = process.stderr.readline()
        assert line, head
        head += line
    return head


async def test_many_builds_of_one_name_at_once_agree(store: EnvironmentStore, source: Path) -> None:
    request = BuildRequest(name="x", source=TarSource(str(source)))

    results = await asyncio.gather(*(build(store, request) for _ in range(4)))

    assert len({result.layers for result in results}) == 1
    assert len(store.layers.digests()) == 1
    assert list((store.state / "staging").iterdir()) == []


async def test_removing_while_building_never_breaks_an_environment(store: EnvironmentStore, source: Path) -> None:
    request = BuildRequest(name="x", source=TarSource(str(source), Ownership.ROOT))

    async def remove() -> None:
        for _ in range(20):
            try:
                await asyncio.to_thread(store.remove, "x")
            except DsecError:
                await asyncio.sleep(0)
            await asyncio.to_thread(store.collect)

    for _ in range(3):
        await asyncio.gather(build(store, request), remove())
        for name in store.names():
            assert store.resolve(Environment(name)).layers[0].meta.exists()


# ---- Debian ----------------------------------------------------------------------------------------


@pytest.fixture
def debian() -> None:
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")


@pytest.mark.root
@pytest.mark.usefixtures("debian")
async def test_debian_packages_become_an_environment_without_traces_of_this_machine(store: EnvironmentStore) -> None:
    lines: list[str] = []
    request = BuildRequest(name="tiny", source=DebianSource(("busybox-static",), variant="extract"))

    info = await build(store, request, lambda event: lines.append(event.message))
    stages: list[str] = []
    again = await build(store, request, lambda event: stages.append(event.stage))

    assert again == info
    assert "stage" not in stages  # no process, no network
    assert any("busybox-static" in line for line in lines)
    layer = store.resolve(Environment("tiny")).layers[0]
    top = mount_erofs(layer.meta, layer.blob) if layer.kind is LayerKind.EROFS else os.open(layer.meta, os.O_RDONLY)
    try:
        assert os.stat("bin/busybox", dir_fd=top).st_mode & 0o111
        for path in ("etc/hostname", "etc/resolv.conf", "etc/apt/apt.conf.d/99mmdebstrap"):
            with pytest.raises(FileNotFoundError):
                os.stat(path, dir_fd=top)
    finally:
        os.close(top)
    assert Path("/proc/self/mountinfo").read_text().count(os.fspath(store.state)) == 0


@pytest.mark.root
@pytest.mark.usefixtures("debian")
async def test_a_package_that_does_not_exist_is_named(store: EnvironmentStore) -> None:
    source = DebianSource(("no-such-package-anywhere",), variant="extract")

    with pytest.raises(InvalidArgumentError, match="no-such-package-anywhere"):
        await build(store, BuildRequest(name="x", source=source))

    assert leftovers(store) == []


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.usefixtures("debian")
def test_a_minimal_debian_with_python_runs() -> None:
    state = Path(
        tempfile.mkdtemp(prefix="dsec-build-", dir="/dev/shm")
    )  # where layers are directories: chroot takes one
    try:
        store = EnvironmentStore(state)
        asyncio.run(build(store, BuildRequest(name="py", source=DebianSource(("python3-minimal",)))))

        tree = store.resolve(Environment("py")).layers[0].meta
        done = subprocess.run(
            ["chroot", tree, "/usr/bin/python3", "-c", "print(6 * 7)"], capture_output=True, text=True, check=False
        )
        assert done.stdout == "42\n", done.stderr
        assert not (tree / "usr/share/man/man1").exists() or list((tree / "usr/share/man/man1").iterdir()) == []
    finally:
        remove_tree(state)


# ---- images made by others -------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed")
def test_an_image_made_by_umoci_is_read(store: EnvironmentStore, source: Path, tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    for arguments in (
        ["init", "--layout", str(layout)],
        ["new", "--image", f"{layout}:one"],
        ["raw", "add-layer", "--image", f"{layout}:one", str(source)],
        ["config", "--image", f"{layout}:one", "--config.env", "A=b", "--config.workingdir", "/data"],
    ):
        subprocess.run(["umoci", *arguments], check=True)

    info = build_now(store, BuildRequest(name="x", source=OciSource(str(layout), "one")), lambda event: None)

    assert info.env["A"] == "b"
    assert info.workdir == "/data"


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_an_image_copied_by_skopeo_is_the_same_tree(
    store: EnvironmentStore, source: Path, tmp_path: Path, compression: str
) -> None:
    ours = Layout(tmp_path / "ours")
    ours.image([source.read_bytes()], name="one")
    theirs = tmp_path / "theirs"
    compress = ["--dest-compress", "--dest-compress-format", compression]
    copy = ["skopeo", "--insecure-policy", "copy", *compress, f"oci:{ours.root}:one", f"oci:{theirs}:two"]
    subprocess.run(copy, check=True, capture_output=True)

    one = build_now(store, BuildRequest(name="one", source=OciSource(str(ours.root), "one")), lambda event: None)
    two = build_now(store, BuildRequest(name="two", source=OciSource(str(theirs), "two")), lambda event: None)

    assert one.layers == two.layers


def test_a_name_that_stands_for_something_else_is_a_conflict(store: EnvironmentStore, source: Path) -> None:
    build_now(store, BuildRequest(name="x", source=TarSource(str(source))), lambda event: None)

    with pytest.raises(ConflictError):
        build_now(store, BuildRequest(name="x", source=TarSource(str(source), Ownership.ROOT)), lambda event: None)
