"""Files, ports and the service itself, through the asynchronous SDK."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
from dsec import errors
from dsec.backends.fake.transfers import ECHO_PORT
from tests.contract.sdk_service import RunningService


@pytest.fixture
async def client(service: RunningService) -> AsyncIterator[dsec.AsyncClient]:
    async with dsec.AsyncClient(service.url) as found:
        yield found


@pytest.fixture
async def sb(client: dsec.AsyncClient) -> AsyncIterator[dsec.AsyncSandbox]:
    async with await client.create("base", backend="fake") as found:
        yield found


# ---- files ----


async def test_files_are_written_read_and_described(sb: dsec.AsyncSandbox) -> None:
    written = await sb.files.write("/d/é", "añ", mode=0o600)
    info = await sb.files.stat("/d/é")

    assert written == info.size == 3
    assert (info.kind, info.mode) == ("file", 0o600)
    assert await sb.files.read("/d/é") == "añ"
    assert await sb.files.read_bytes("/d/é", offset=1, length=1) == "ñ".encode()[:1]
    assert await sb.files.read_bytes("/d/é", offset=3) == b""
    assert await sb.files.read_bytes("/d/é", offset=99) == b""


async def test_files_are_appended_to_and_written_at_an_offset(sb: dsec.AsyncSandbox) -> None:
    await sb.files.write("/f", "abc")
    await sb.files.write("/f", "def", append=True)
    await sb.files.write("/f", "XY", offset=2)

    assert await sb.files.read("/f") == "abXYef"


async def test_an_empty_file_is_empty(sb: dsec.AsyncSandbox) -> None:
    await sb.files.write("/empty", b"")

    assert await sb.files.read_bytes("/empty") == b""


async def test_directories_are_made_listed_moved_and_removed(sb: dsec.AsyncSandbox) -> None:
    await sb.files.mkdir("/a/b/c")
    await sb.files.write("/a/f", "1")
    await sb.files.symlink("/a/l", "f")
    await sb.files.chmod("/a/f", 0o640)

    assert [(e.name, e.kind) for e in await sb.files.list("/a")] == [
        ("b", "directory"),
        ("f", "file"),
        ("l", "symlink"),
    ]
    assert (await sb.files.stat("/a/l", follow=False)).target == "f"
    assert (await sb.files.stat("/a/l")).mode == 0o640

    await sb.files.move("/a/f", "/a/g")
    assert not await sb.files.exists("/a/f")
    assert not await sb.files.exists("/a/g/below")
    assert await sb.files.exists("/a/g")

    await sb.files.remove("/a", recursive=True)
    await sb.files.remove("/a", missing_ok=True)
    with pytest.raises(errors.PathNotFoundError):
        await sb.files.remove("/a")


async def test_a_long_list_comes_whole(sb: dsec.AsyncSandbox) -> None:
    names = [f"f{n:05}" for n in range(1_205)]
    await sb.exec(["touch", *(f"/tmp/{name}" for name in names)], check=True)

    assert [e.name for e in await sb.files.list("/tmp")] == names
    with pytest.raises(errors.LimitError):
        await sb.files.list("/tmp", max_entries=1_000)


async def test_a_file_that_is_too_large_to_be_read_is_refused(sb: dsec.AsyncSandbox) -> None:
    await sb.files.write("/big", bytes(100_000))

    with pytest.raises(errors.LimitError):
        await sb.files.read("/big", max_bytes=99_999)


async def test_changes_are_watched_from_the_call_on(sb: dsec.AsyncSandbox) -> None:
    await sb.files.mkdir("/w")

    async with await sb.files.watch("/w") as watch:
        await sb.files.write("/w/new", "x")
        async with asyncio.timeout(60):
            notice = await anext(watch.__aiter__())

    assert (notice.kind, notice.path) == ("created", "new")


async def test_a_tree_goes_up_and_comes_down_the_same(sb: dsec.AsyncSandbox, tmp_path: Path) -> None:
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/a").write_bytes(b"hello")
    (tmp_path / "in/sub/tool").write_bytes(os.urandom(700_000))
    (tmp_path / "in/sub/tool").chmod(0o755)
    (tmp_path / "in/sub/link").symlink_to("../a")

    await sb.upload(tmp_path / "in", "/work")
    done = await sb.download("/work", tmp_path / "out")

    assert sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*")) == [
        "a",
        "sub",
        "sub/link",
        "sub/tool",
    ]
    assert (tmp_path / "out/sub/tool").read_bytes() == (tmp_path / "in/sub/tool").read_bytes()
    assert (tmp_path / "out/sub/tool").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out/sub/link").readlink() == Path("../a")
    assert done.skipped == []


@pytest.mark.parametrize("size", [0, 10, 9 << 20])
async def test_a_file_goes_up_and_comes_down_the_same(sb: dsec.AsyncSandbox, tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(os.urandom(size))
    (tmp_path / "f").chmod(0o750)
    (tmp_path / "d").mkdir()

    await sb.upload(tmp_path / "f", "/to/g")
    await sb.upload(tmp_path / "f", "/to")
    await sb.download("/to/g", tmp_path / "back")
    await sb.download("/to/f", f"{tmp_path}/d/")

    assert (tmp_path / "back").read_bytes() == (tmp_path / "d/f").read_bytes() == (tmp_path / "f").read_bytes()
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o750
    assert sorted(e.name for e in await sb.files.list("/to")) == ["f", "g"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "d", "f"]


async def test_a_download_above_its_bound_leaves_nothing(sb: dsec.AsyncSandbox, tmp_path: Path) -> None:
    await sb.files.write("/big", bytes(100_000))

    with pytest.raises(errors.LimitError):
        await sb.download("/big", tmp_path / "f", max_bytes=1_000)

    assert list(tmp_path.iterdir()) == []


async def test_what_cannot_be_uploaded_is_said(sb: dsec.AsyncSandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    for name in ("missing", "fifo"):
        with pytest.raises(errors.InvalidArgumentError) as told:
            await sb.upload(tmp_path / name, "/x")
        assert told.value.hint


async def test_a_download_that_has_no_place_here_says_what_would_be_one(sb: dsec.AsyncSandbox, tmp_path: Path) -> None:
    await sb.files.write("/d/f", b"x")
    (tmp_path / "file").write_bytes(b"")

    for remote, local in (("/d/f", "missing/x"), ("/d", "file"), ("/d", "file/below"), ("/d/f", "file/below")):
        with pytest.raises(errors.InvalidArgumentError) as told:
            await sb.download(remote, tmp_path / local)
        assert told.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- ports ----


async def test_a_port_is_a_stream_both_ways(sb: dsec.AsyncSandbox) -> None:
    data = os.urandom(1_000_000)

    async with await sb.connect_port(ECHO_PORT) as connection:

        async def send() -> None:
            await connection.write(data)
            await connection.write_eof()

        sending = asyncio.create_task(send())
        back = b"".join([piece async for piece in connection])
        await sending
        assert await connection.read() == b""

    assert back == data


async def test_a_port_where_nobody_listens_has_its_errno(sb: dsec.AsyncSandbox) -> None:
    with pytest.raises(errors.FileError) as caught:
        await sb.connect_port(9)

    assert caught.value.detail["errno"] == "ECONNREFUSED"


# ---- the service ----


async def test_over_tcp_a_token_decides(service: RunningService, client: dsec.AsyncClient) -> None:
    url = f"http://127.0.0.1:{service.tcp_port}"
    made = await client.tokens.create("test", project="/team", rights=("use",))

    async with dsec.AsyncClient(url) as nobody, dsec.AsyncClient(url, made.token) as somebody:
        with pytest.raises(errors.AuthError):
            await nobody.list()
        async with await somebody.create("base", backend="fake") as sandbox:
            assert sandbox.info.project == "/team"
            assert (await sandbox.exec("echo hi")).stdout == "hi\n"
            async with await sandbox.connect_port(ECHO_PORT) as connection:
                await connection.write(b"x")
                assert await connection.read_exactly(1) == b"x"
        with pytest.raises(errors.ForbiddenError):
            await somebody.tokens.list()
        await client.tokens.revoke(made.info.id)
        with pytest.raises(errors.AuthError):
            await somebody.list()
    assert made.info.id in [token.id for token in await client.tokens.list()]


async def test_environments_are_listed_and_a_build_that_cannot_be_is_said(client: dsec.AsyncClient) -> None:
    assert [e.name for e in await client.environments.list()] == ["base"]
    assert (await client.environments.get("base")).kind == "fake"
    with pytest.raises(errors.UnsupportedError):
        await client.environments.build("x", dsec.DebianSource(packages=("bash",)))


async def test_the_service_says_what_it_is(client: dsec.AsyncClient) -> None:
    assert (await client.health()).version == dsec.__version__
    assert (await client.doctor()).substrates == {"fake": "ok"}


async def test_bytes_that_are_not_text_are_a_typed_error(sb: dsec.AsyncSandbox) -> None:
    await sb.files.write("/binary", b"ab\xff\x00")

    with pytest.raises(errors.FileError, match=r"not text in utf-8.*at byte 2") as told:
        await sb.files.read("/binary")

    assert "read_bytes" in (told.value.hint or "")
    assert await sb.files.read("/binary", errors="replace") == "ab\ufffd\0"


async def test_an_archive_that_is_refused_in_its_middle_says_why(sb: dsec.AsyncSandbox, tmp_path: Path) -> None:
    """The refusal comes while the rest is still being sent."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"first")
    (source / "z").write_bytes(bytes(32 << 20))
    await sb.files.write("/full/a/inside", b"a directory where a file is to be")

    with pytest.raises(errors.FileError):
        await sb.upload(source, "/full")
