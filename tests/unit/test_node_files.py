"""Sessions, files and connections through the node."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.core.errors import (
    DsecError,
    InvalidArgumentError,
    PathNotFoundError,
)
from dsec.testing.nodes import NodeClient, StreamEnd, fake_node
from dsec.wire import agent, records
from dsec.wire.codec import pack, unpack
from dsec.wire.frames import Channel, Frame, FrameType, encode_data_body
from dsec.wire.node import (
    Done,
    FileCall,
    Method,
    SessionStart,
    SessionStop,
)
from tests.node_calls import create, file, output_of, start


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[NodeClient]:
    async with fake_node(tmp_path) as client:
        yield client


async def test_a_session_keeps_its_directory(client: NodeClient) -> None:
    sandbox = await create(client)
    opened = await client.call(
        Method.SESSION_OPEN, SessionStart(sandbox.id, records.SessionRequest(name="main")), records.SessionInfo
    )
    await start(client, sandbox.id, shell="cd /tmp", session="main")
    where = await start(client, sandbox.id, shell="pwd", session="main")
    page = await client.call(Method.SESSION_LIST, records.SandboxRef(sandbox.id), records.SessionPage)
    await client.call(Method.SESSION_CLOSE, SessionStop(sandbox.id, "main"), Done)
    closed = await client.call(Method.SESSION_LIST, records.SandboxRef(sandbox.id), records.SessionPage)

    assert not opened.existing
    assert where.out == b"/tmp\n"
    assert [session.name for session in page.sessions] == ["main"]
    assert closed.sessions == []


async def test_files_are_made_listed_moved_and_removed(client: NodeClient) -> None:
    id = (await create(client)).id
    await file(client, Method.FILE_MKDIR, id, agent.MkdirArgs(path=b"/tmp/d"))
    await start(client, id, shell="echo one > /tmp/d/a")
    await file(client, Method.FILE_MOVE, id, agent.MoveArgs(source=b"/tmp/d/a", target=b"/tmp/d/b"))
    await file(client, Method.FILE_CHMOD, id, agent.ChmodArgs(path=b"/tmp/d/b", mode=0o600))
    await file(client, Method.FILE_CHOWN, id, agent.ChownArgs(path=b"/tmp/d/b", owner="5", group="6"))
    await file(client, Method.FILE_SYMLINK, id, agent.SymlinkArgs(path=b"/tmp/d/c", target=b"b"))

    page = await file(client, Method.FILE_LIST, id, agent.ListArgs(path=b"/tmp/d"), records.FilePage)
    stat = await file(client, Method.FILE_STAT, id, agent.PathArgs(path=b"/tmp/d/b"), records.FileInfo)
    await file(client, Method.FILE_REMOVE, id, agent.RemoveArgs(path=b"/tmp/d", recursive=True))

    assert isinstance(page, records.FilePage)
    assert isinstance(stat, records.FileInfo)
    assert [(entry.name, entry.target) for entry in page.entries] == [("b", None), ("c", "b")]
    assert (stat.size, stat.mode, stat.uid, stat.gid) == (4, 0o600, 5, 6)
    with pytest.raises(PathNotFoundError):
        await file(client, Method.FILE_STAT, id, agent.PathArgs(path=b"/tmp/d"), records.FileInfo)


async def test_a_name_that_is_not_utf8_is_shown_and_told_in_full(client: NodeClient) -> None:
    id = (await create(client)).id
    await file(client, Method.FILE_MKDIR, id, agent.MkdirArgs(path=b"/tmp/d/\xff\xfe"))

    page = await file(client, Method.FILE_LIST, id, agent.ListArgs(path=b"/tmp/d"), records.FilePage)

    assert isinstance(page, records.FilePage)
    assert [(entry.name, entry.name_bytes) for entry in page.entries] == [("\ufffd\ufffd", b"\xff\xfe")]


async def test_listing_goes_on_where_a_page_ended(client: NodeClient) -> None:
    id = (await create(client)).id
    for name in (b"a", b"b", b"c"):
        await file(client, Method.FILE_MKDIR, id, agent.MkdirArgs(path=b"/tmp/d/" + name))

    first = await file(client, Method.FILE_LIST, id, agent.ListArgs(path=b"/tmp/d", limit=2), records.FilePage)
    assert isinstance(first, records.FilePage)
    rest = await file(client, Method.FILE_LIST, id, agent.ListArgs(path=b"/tmp/d", after=first.after), records.FilePage)

    assert isinstance(rest, records.FilePage)
    assert [e.name for e in first.entries + rest.entries] == ["a", "b", "c"]
    assert rest.after is None


@pytest.mark.parametrize(
    ("method", "args"),
    [
        (Method.FILE_STAT, agent.PathArgs(path=b"relative")),
        (Method.FILE_STAT, agent.PathArgs(path=b"")),
        (Method.FILE_STAT, agent.PathArgs(path=b"/a\0b")),
        (Method.FILE_STAT, agent.PathArgs(path=b"/" + b"x" * 5_000)),
        (Method.FILE_STAT, agent.PathArgs(path=b"/x", user="")),
        (Method.FILE_LIST, agent.ListArgs(path=b"/x", limit=0)),
        (Method.FILE_LIST, agent.ListArgs(path=b"/x", limit=10**9)),
        (Method.FILE_CHMOD, agent.ChmodArgs(path=b"/x", mode=-1)),
        (Method.FILE_CHMOD, agent.ChmodArgs(path=b"/x", mode=0o100000)),
        (Method.FILE_MOVE, agent.MoveArgs(source=b"/x", target=b"y")),
        (Method.FILE_STAT, {"path": 7}),
        (Method.FILE_STAT, {"path": b"/x", "invented": 1}),
        (Method.FILE_STAT, ["not a map"]),
    ],
)
async def test_arguments_that_cannot_be_never_reach_the_agent(client: NodeClient, method: Method, args: object) -> None:
    id = (await create(client)).id

    with pytest.raises(InvalidArgumentError):
        await file(client, method, id, args)


async def upload(client: NodeClient, id: str, path: bytes, content: bytes, method: Method = Method.FILE_WRITE) -> int:
    args = agent.WriteArgs(path=path) if method is Method.FILE_WRITE else agent.ExtractArgs(path=path)
    async with client.stream(method, FileCall(id, msgspec.Raw(pack(args)))) as stream:
        for offset in range(0, len(content), 100_000):
            body = encode_data_body(Channel.IN, offset, 0, content[offset : offset + 100_000])
            await stream.send(Frame(FrameType.DATA, 0, body))
        await stream.send(Frame(FrameType.END, 0, pack(agent.StdinEnd(len(content)))))
        frames = await stream.all()
    return unpack(frames[-1].body, records.WriteAnswer).bytes


async def download(client: NodeClient, id: str, args: object, method: Method = Method.FILE_READ) -> bytes:
    async with client.stream(method, FileCall(id, msgspec.Raw(pack(args)))) as stream:
        frames = await stream.all()
    assert frames[0].type == FrameType.RES
    assert frames[-1].type == FrameType.END
    return output_of(frames)[1]


async def test_files_go_in_and_come_back(client: NodeClient) -> None:
    id = (await create(client)).id
    content = bytes(range(256)) * 5_000

    assert await upload(client, id, b"/tmp/f", content) == len(content)
    assert await download(client, id, agent.ReadArgs(path=b"/tmp/f")) == content
    assert await download(client, id, agent.ReadArgs(path=b"/tmp/f", offset=10, length=5)) == content[10:15]


async def test_an_upload_whose_caller_goes_away_leaves_no_trace(client: NodeClient) -> None:
    id = (await create(client)).id
    await upload(client, id, b"/tmp/f", b"before")
    call = FileCall(id, msgspec.Raw(pack(agent.WriteArgs(path=b"/tmp/f"))))

    async with client.stream(Method.FILE_WRITE, call) as stream:
        await stream.send(Frame(FrameType.DATA, 0, encode_data_body(Channel.IN, 0, 0, b"after")))

    assert await download(client, id, agent.ReadArgs(path=b"/tmp/f")) == b"before"


async def test_directories_go_in_and_come_back_as_tar(client: NodeClient) -> None:
    id = (await create(client)).id
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("inner/file")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))

    await upload(client, id, b"/tmp/d", buffer.getvalue(), Method.FILE_EXTRACT)
    back = await download(client, id, agent.PathArgs(path=b"/tmp/d"), Method.FILE_ARCHIVE)

    with tarfile.open(fileobj=io.BytesIO(back)) as archive:
        found = archive.extractfile("inner/file")
        assert found is not None
        assert found.read() == b"hello"


async def test_changes_are_told_until_the_caller_has_enough(client: NodeClient) -> None:
    id = (await create(client)).id
    call = FileCall(id, msgspec.Raw(pack(agent.WatchArgs(path=b"/tmp"))))

    async with client.stream(Method.FILE_WATCH, call) as stream:
        assert (await next_frame(stream)).type == FrameType.RES
        await upload(client, id, b"/tmp/new", b"x")
        notice = unpack((await next_frame(stream)).body, records.WatchNotice)
        await stream.send(Frame(FrameType.END, 0, pack(Done())))
        rest = await stream.all()

    assert notice.path == "new"
    assert rest[-1].type == FrameType.END


async def next_frame(stream: StreamEnd) -> Frame:
    async with asyncio.timeout(60):
        frame = await stream.recv()
    assert frame is not None
    return frame


async def test_a_port_that_nobody_listens_on_is_a_typed_error(client: NodeClient) -> None:
    id = (await create(client)).id
    call = FileCall(id, msgspec.Raw(pack(agent.ConnectArgs(port=9))))

    async with client.stream(Method.CONNECT, call) as stream:
        with pytest.raises(DsecError) as refused:
            await stream.all()

    assert refused.value.detail.get("errno") == "ECONNREFUSED"
