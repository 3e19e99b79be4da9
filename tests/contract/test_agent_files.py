"""Files, archives, watches and connections, the same on every agent."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from dsec.agent.client import AgentClient
from dsec.agent.transfers import Watch
from dsec.core.errors import (
    CapacityError,
    FileError,
    InvalidArgumentError,
    PathNotFoundError,
    UnavailableError,
    UnsupportedError,
)
from dsec.core.limits import WATCHES_MAX
from dsec.testing.waiting import eventually
from dsec.wire import agent
from tests.contract.agents_under_test import AgentUnderTest, run

BIG = bytes(range(256)) * 8_000  # 2 MB, more than any window


async def content(client: AgentClient, path: bytes, **fields: object) -> bytes:
    async with await client.read(agent.ReadArgs(path=path, **fields)) as download:  # type: ignore[arg-type]
        return b"".join([piece async for piece in download])


# ---- read and write ------------------------------------------------------------------------------


async def test_what_is_written_is_read(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    path = under_test.path("new/deep/file")

    written = await client.write(agent.WriteArgs(path=path, mode=0o600), BIG)
    stat = await client.stat(agent.PathArgs(path=path))

    assert written.bytes == len(BIG)
    assert (stat.name, stat.kind, stat.size, stat.mode) == (b"file", "file", len(BIG), 0o600)
    assert await content(client, path) == BIG


async def test_a_part_of_a_file_is_read(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    path = under_test.path("f")
    await client.write(agent.WriteArgs(path=path), BIG)

    assert await content(client, path, offset=1_000_001, length=300_000) == BIG[1_000_001:1_300_001]
    assert await content(client, path, offset=len(BIG) - 3, length=100) == BIG[-3:]
    assert await content(client, path, offset=len(BIG) + 5) == b""
    assert await content(client, path, length=0) == b""


async def test_a_write_in_place_keeps_the_rest(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    path = under_test.path("f")
    await client.write(agent.WriteArgs(path=path), b"0123456789")

    await client.write(agent.WriteArgs(path=path, offset=3), b"abc")
    await client.write(agent.WriteArgs(path=path, append=True), b"!")
    await client.write(agent.WriteArgs(path=path, offset=13), b"z")

    assert await content(client, path) == b"012abc6789!\0\0z"


async def test_a_replaced_file_keeps_its_mode(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    path = under_test.path("f")
    await client.write(agent.WriteArgs(path=path), b"a")
    assert (await client.stat(agent.PathArgs(path=path))).mode == 0o644
    await client.chmod(agent.ChmodArgs(path=path, mode=0o751))

    await client.write(agent.WriteArgs(path=path), b"b")

    assert (await client.stat(agent.PathArgs(path=path))).mode == 0o751


async def test_an_upload_that_is_given_up_leaves_no_trace(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    path = under_test.path("f")
    await client.write(agent.WriteArgs(path=path), b"old")

    async def failing() -> AsyncIterator[bytes]:
        yield BIG
        raise ValueError("the source broke")

    with pytest.raises(ValueError, match="the source broke"):
        await client.write(agent.WriteArgs(path=path), failing())

    await client.usage()
    assert await content(client, path) == b"old"
    listing = await client.list(agent.ListArgs(path=under_test.place))
    assert [entry.name for entry in listing.entries] == [b"f"]


async def test_an_upload_cut_off_with_its_connection_leaves_no_trace(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    upload = await client.open_write(agent.WriteArgs(path=under_test.path("f")))
    await upload.send(b"half")

    other = await under_test.client()

    with pytest.raises(UnavailableError):
        await upload.finish()

    async def clean() -> bool:
        return not (await other.list(agent.ListArgs(path=under_test.place))).entries

    await eventually(clean)


async def test_a_download_that_is_given_up_frees_its_stream(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    path = under_test.path("f")
    await client.write(agent.WriteArgs(path=path), BIG)

    for _ in range(20):
        async with await client.read(agent.ReadArgs(path=path)) as download:
            assert await download.receive()

    assert await content(client, path) == BIG


async def test_several_transfers_share_the_channel(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    paths = [under_test.path(f"f{n}") for n in range(8)]

    await asyncio.gather(*(client.write(agent.WriteArgs(path=path), BIG) for path in paths))

    assert await asyncio.gather(*(content(client, path) for path in paths)) == [BIG] * 8


@pytest.mark.parametrize(
    ("name", "kind", "errno"),
    [
        ("missing", PathNotFoundError, "ENOENT"),
        ("missing/deeper", PathNotFoundError, "ENOENT"),
        ("f/x", FileError, "ENOTDIR"),
    ],
)
async def test_a_path_that_is_not_there_is_named_with_its_errno(
    under_test: AgentUnderTest, name: str, kind: type[Exception], errno: str
) -> None:
    client = await under_test.client()
    await client.write(agent.WriteArgs(path=under_test.path("f")), b"")
    path = under_test.path(name)

    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: client.stat(agent.PathArgs(path=path)),
        lambda: client.read(agent.ReadArgs(path=path)),
        lambda: client.list(agent.ListArgs(path=path)),
        lambda: client.archive(agent.PathArgs(path=path)),
        lambda: client.chmod(agent.ChmodArgs(path=path, mode=0o600)),
        lambda: client.remove(agent.RemoveArgs(path=path)),
        lambda: client.move(agent.MoveArgs(source=path, target=under_test.path("g"))),
        lambda: client.watch(agent.WatchArgs(path=path)),
    ]
    for attempt in attempts:
        with pytest.raises(kind) as error:
            await attempt()
        assert error.value.detail["errno"] == errno  # type: ignore[attr-defined]


async def test_only_files_are_read(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    with pytest.raises(FileError) as error:
        await client.read(agent.ReadArgs(path=under_test.place))

    assert error.value.detail["code"] == "not_a_file"


async def test_a_directory_is_not_overwritten(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.mkdir(agent.MkdirArgs(path=under_test.path("d")))

    with pytest.raises(FileError):
        await client.write(agent.WriteArgs(path=under_test.path("d")), b"x")

    assert (await client.stat(agent.PathArgs(path=under_test.path("d")))).kind == "directory"


@pytest.mark.parametrize("path", [b"relative", b"", b"/a\0b", b"/" + b"n" * 300, b"/n" * 3000])
async def test_a_path_that_cannot_be_one_is_refused(under_test: AgentUnderTest, path: bytes) -> None:
    client = await under_test.client()

    with pytest.raises((InvalidArgumentError, FileError, PathNotFoundError)):
        await client.stat(agent.PathArgs(path=path))

    await client.usage()


@pytest.mark.parametrize(
    "attempt",
    [
        lambda client, path: client.read(agent.ReadArgs(path=path, user="nobody")),
        lambda client, path: client.write(agent.WriteArgs(path=path, user="nobody"), b"y"),
        lambda client, path: client.write(agent.WriteArgs(path=path, offset=0, user="nobody"), b"y"),
        lambda client, path: client.write(agent.WriteArgs(path=path + b"2", user="nobody"), b"y"),
        lambda client, path: client.remove(agent.RemoveArgs(path=path, user="nobody")),
        lambda client, path: client.chmod(agent.ChmodArgs(path=path, mode=0o666, user="nobody")),
    ],
    ids=["read", "replace", "patch", "create", "remove", "chmod"],
)
async def test_a_user_s_rights_are_the_user_s(
    under_test: AgentUnderTest, attempt: Callable[[AgentClient, bytes], Awaitable[object]]
) -> None:
    client = await under_test.client()
    path = under_test.path("secret")
    await client.write(agent.WriteArgs(path=path, mode=0o600), b"x")

    with pytest.raises(FileError) as error:
        await attempt(client, path)

    assert error.value.detail["errno"] in ("EACCES", "EPERM")
    assert await content(client, path) == b"x"


# ---- directories ---------------------------------------------------------------------------------


async def test_a_listing_comes_in_sorted_pages(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    names = [b"b", b"a", b"c\xff", b"d e", b".h"]
    for name in names:
        await client.write(agent.WriteArgs(path=under_test.place + b"/" + name), b"")

    first = await client.list(agent.ListArgs(path=under_test.place, limit=3))
    rest = await client.list(agent.ListArgs(path=under_test.place, limit=3, after=first.entries[-1].name))

    assert [entry.name for entry in first.entries + rest.entries] == sorted(names)
    assert (first.more, rest.more) == (True, False)


async def test_directories_are_made_moved_and_removed(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.mkdir(agent.MkdirArgs(path=under_test.path("a/b"), mode=0o700))
    await client.mkdir(agent.MkdirArgs(path=under_test.path("a/b")))
    assert (await client.stat(agent.PathArgs(path=under_test.path("a/b")))).mode == 0o700
    with pytest.raises(FileError):
        await client.mkdir(agent.MkdirArgs(path=under_test.path("a/b"), parents=False))
    with pytest.raises(PathNotFoundError):
        await client.mkdir(agent.MkdirArgs(path=under_test.path("x/y"), parents=False))

    await client.write(agent.WriteArgs(path=under_test.path("a/b/f")), b"x")
    await client.move(agent.MoveArgs(source=under_test.path("a"), target=under_test.path("c")))
    assert await content(client, under_test.path("c/b/f")) == b"x"

    with pytest.raises(FileError):
        await client.remove(agent.RemoveArgs(path=under_test.path("c")))
    await client.remove(agent.RemoveArgs(path=under_test.path("c"), recursive=True))
    await client.remove(agent.RemoveArgs(path=under_test.path("c"), recursive=True, missing_ok=True))
    assert (await client.list(agent.ListArgs(path=under_test.place))).entries == []


async def test_a_move_replaces_only_when_told(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    for name in ("a", "b"):
        await client.write(agent.WriteArgs(path=under_test.path(name)), name.encode())
    move = {"source": under_test.path("a"), "target": under_test.path("b")}

    with pytest.raises(FileError) as error:
        await client.move(agent.MoveArgs(**move, replace=False))
    assert error.value.detail["errno"] == "EEXIST"
    await client.move(agent.MoveArgs(**move))

    assert await content(client, under_test.path("b")) == b"a"


async def test_symlinks_are_followed_or_looked_at(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.write(agent.WriteArgs(path=under_test.path("f")), b"x")
    await client.symlink(agent.SymlinkArgs(path=under_test.path("l"), target=b"f"))

    followed = await client.stat(agent.PathArgs(path=under_test.path("l")))
    itself = await client.stat(agent.PathArgs(path=under_test.path("l"), follow=False))

    assert (followed.kind, followed.size) == ("file", 1)
    assert (itself.kind, itself.target) == ("symlink", b"f")
    await client.remove(agent.RemoveArgs(path=under_test.path("l")))
    assert await content(client, under_test.path("f")) == b"x"


async def test_a_loop_of_symlinks_is_an_error(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.symlink(agent.SymlinkArgs(path=under_test.path("l"), target=b"l"))

    with pytest.raises(FileError) as error:
        await client.stat(agent.PathArgs(path=under_test.path("l")))

    assert error.value.detail["errno"] == "ELOOP"


async def test_owners_are_set_by_name_and_number(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    path = under_test.path("f")
    await client.write(agent.WriteArgs(path=path), b"")

    await client.chown(agent.ChownArgs(path=path, owner="nobody", group="77"))
    stat = await client.stat(agent.PathArgs(path=path))

    assert (stat.uid, stat.gid) == (65_534, 77)
    with pytest.raises(InvalidArgumentError):
        await client.chown(agent.ChownArgs(path=path, owner="no-such-user"))


# ---- archives ------------------------------------------------------------------------------------


async def test_an_archive_extracted_elsewhere_is_the_same_tree(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.write(agent.WriteArgs(path=under_test.path("src/d/big"), mode=0o640), BIG)
    await client.write(agent.WriteArgs(path=under_test.path("src/" + "n" * 150), mode=0o755), b"long name")
    await client.symlink(agent.SymlinkArgs(path=under_test.path("src/link"), target=b"d/big"))
    await client.mkdir(agent.MkdirArgs(path=under_test.path("src/empty"), mode=0o711))

    async with await client.archive(agent.PathArgs(path=under_test.path("src"))) as download:
        stream = [piece async for piece in download]
    await client.extract(agent.ExtractArgs(path=under_test.path("dst")), b"".join(stream))

    assert await content(client, under_test.path("dst/d/big")) == BIG
    assert await content(client, under_test.path("dst/" + "n" * 150)) == b"long name"
    stats = [
        await client.stat(agent.PathArgs(path=under_test.path("dst/" + n), follow=False))
        for n in ("d/big", "link", "empty")
    ]
    assert [(stat.kind, stat.mode if stat.kind != "symlink" else stat.target) for stat in stats] == [
        ("file", 0o640),
        ("symlink", b"d/big"),
        ("directory", 0o711),
    ]


async def test_an_archive_is_a_tar_that_others_read(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.write(agent.WriteArgs(path=under_test.path("src/a")), b"1")
    await client.write(agent.WriteArgs(path=under_test.path("src/d/b")), b"22")

    async with await client.archive(agent.PathArgs(path=under_test.path("src"))) as download:
        data = b"".join([piece async for piece in download])

    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {entry.name.removeprefix("./").rstrip("/"): entry.size for entry in archive}
    assert {name: size for name, size in found.items() if name not in ("", ".")} == {"a": 1, "d": 0, "d/b": 2}


async def test_one_file_makes_an_archive_too(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    await client.write(agent.WriteArgs(path=under_test.path("a")), b"1")

    async with await client.archive(agent.PathArgs(path=under_test.path("a"))) as download:
        data = b"".join([piece async for piece in download])

    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert [(entry.name, entry.size) for entry in archive] == [("a", 1)]


def hostile_tar(entries: list[tuple[str, str, str]]) -> bytes:
    """(name, kind, content or target)"""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, text in entries:
            entry = tarfile.TarInfo(name)
            if kind == "link":
                entry.type, entry.linkname = tarfile.SYMTYPE, text
                archive.addfile(entry)
            else:
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "entries",
    [
        [("../escaped", "file", "x")],
        [("a/../../escaped", "file", "x")],
        [("l", "link", ".."), ("l/escaped", "file", "x")],
        [("l", "link", "../escaped"), ("l", "file", "x")],
    ],
)
async def test_no_entry_leaves_the_directory(under_test: AgentUnderTest, entries: list[tuple[str, str, str]]) -> None:
    client = await under_test.client()
    with suppress(FileError, InvalidArgumentError):  # refused, or kept inside: both hold
        await client.extract(agent.ExtractArgs(path=under_test.path("in")), hostile_tar(entries))

    names = [entry.name for entry in (await client.list(agent.ListArgs(path=under_test.place))).entries]
    assert names in ([b"in"], [])


async def test_an_absolute_entry_lands_inside(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    await client.extract(agent.ExtractArgs(path=under_test.path("in")), hostile_tar([("/abs", "file", "x")]))

    assert await content(client, under_test.path("in/abs")) == b"x"


async def test_what_is_no_tar_is_refused(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    with pytest.raises((InvalidArgumentError, FileError)):
        await client.extract(agent.ExtractArgs(path=under_test.path("in")), b"\x01" * 2048)


# ---- watch ---------------------------------------------------------------------------------------


async def wait_for(watch: Watch, kind: str, path: bytes) -> agent.WatchEvent:
    async with asyncio.timeout(60):
        async for event in watch:
            if (event.kind, event.path) == (kind, path):
                return event
    raise AssertionError("the watch ended")


async def test_changes_are_seen_from_the_reply_on(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    async with await client.watch(agent.WatchArgs(path=under_test.place)) as watch:
        await run(client, "echo x > f; mv f g; mkdir d; rm g", cwd=under_test.place)

        await wait_for(watch, "created", b"f")
        assert (await wait_for(watch, "moved", b"g")).source == b"f"
        assert (await wait_for(watch, "created", b"d")).directory
        await wait_for(watch, "deleted", b"g")


async def test_a_recursive_watch_sees_new_directories(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    async with await client.watch(agent.WatchArgs(path=under_test.place, recursive=True)) as watch:
        await client.mkdir(agent.MkdirArgs(path=under_test.path("d")))
        await wait_for(watch, "created", b"d")
        await client.write(agent.WriteArgs(path=under_test.path("d/f"), offset=0), b"x")

        await wait_for(watch, "created", b"d/f")


async def test_a_watch_ends_when_it_is_stopped(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    watch = await client.watch(agent.WatchArgs(path=under_test.place))

    watch.stop()

    async with asyncio.timeout(60):
        assert [event async for event in watch] == []


async def test_watches_are_bounded_and_given_back(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    watches = [await client.watch(agent.WatchArgs(path=under_test.place)) for _ in range(WATCHES_MAX)]
    with pytest.raises(CapacityError):
        await client.watch(agent.WatchArgs(path=under_test.place))

    watches[0].cancel()

    (await client.watch(agent.WatchArgs(path=under_test.place))).cancel()


# ---- connections ---------------------------------------------------------------------------------


async def test_a_connection_carries_bytes_both_ways(under_test: AgentUnderTest) -> None:
    port = await under_test.echo_port()
    client = await under_test.client()
    connection = await client.open_connection(agent.ConnectArgs(host="127.0.0.1", port=port))

    async def send() -> None:
        for start in range(0, len(BIG), 100_000):
            await connection.send(BIG[start : start + 100_000])
        connection.send_end()

    received = bytearray()
    async with asyncio.TaskGroup() as group, asyncio.timeout(60):
        group.create_task(send())
        while (piece := await connection.receive()) is not None:
            received += piece

    assert bytes(received) == BIG


async def test_a_port_that_nobody_listens_on_is_an_error_with_its_errno(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    with pytest.raises(FileError) as error:
        await client.open_connection(agent.ConnectArgs(port=1))
    assert error.value.detail == {"code": "connect_failed", "errno": "ECONNREFUSED"}
    with pytest.raises(PathNotFoundError):
        await client.open_connection(agent.ConnectArgs(path=under_test.path("no-socket")))
    with pytest.raises(InvalidArgumentError):
        await client.open_connection(agent.ConnectArgs())


async def test_a_connection_that_is_dropped_frees_its_stream(under_test: AgentUnderTest) -> None:
    port = await under_test.echo_port()
    client = await under_test.client()

    for _ in range(20):
        async with await client.open_connection(agent.ConnectArgs(port=port)) as connection:
            await connection.send(b"ping")
            assert await connection.receive() == b"ping"

    await client.usage()


# ---- the rest ------------------------------------------------------------------------------------


async def test_usage_counts_what_runs(under_test: AgentUnderTest) -> None:
    client = await under_test.client()
    assert (await client.usage()).execs == 0
    await client.session_open(agent.SessionOpen(name="s"))

    usage = await client.usage()

    assert usage.sessions == 1
    assert usage.processes >= 2


async def test_clock_reseed_and_freeze_are_answered(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    await client.clock(paused_s=1.5)
    await client.reseed(b"0123456789abcdef")
    await client.freeze_prepare()


async def test_an_operation_that_does_not_exist_is_refused(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    with pytest.raises(UnsupportedError):
        await client.channel.request("no_such_op", {}, agent.Empty)
    with pytest.raises(InvalidArgumentError):
        await client.channel.request(agent.Op.STAT, {"path": b"/", "surprise": 1}, agent.FileStat)
    with pytest.raises(InvalidArgumentError):
        await client.channel.request(agent.Op.STAT, {"path": 7}, agent.FileStat)
    await client.usage()


async def test_shutdown_is_answered_and_then_the_connection_ends(under_test: AgentUnderTest) -> None:
    client = await under_test.client()

    await client.shutdown()

    async with asyncio.timeout(60):
        assert isinstance(await client.channel.closed(), UnavailableError)
