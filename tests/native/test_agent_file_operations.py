"""Files through the real agent."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dsec.wire.frames import FrameType
from tests.native.agent_process import Agent, eventually, handed_agent, usable_copy
from tests.native.agent_wire import AgentWire, Refused


def raw(path: Path) -> bytes:
    return os.fsencode(path)


def write(wire: AgentWire, path: Path, content: bytes, **args: Any) -> dict[str, Any]:
    stream = wire.open("write", path=raw(path), **args)
    wire.result(stream)
    return send(wire, stream, content)


def send(wire: AgentWire, stream: int, content: bytes) -> dict[str, Any]:
    """All of it with the credit there is; gives the END."""
    credit, at = 256 << 10, 0
    while at < len(content):
        if credit == 0:
            credit += wire.body(wire.frame(stream), FrameType.CREDIT)["bytes"]
        piece = content[at : at + min(credit, 60_000)]
        wire.data(stream, at, piece)
        at += len(piece)
        credit -= len(piece)
    wire.end(stream, at)
    while (frame := wire.frame(stream)).type == FrameType.CREDIT:
        pass
    return wire.body(frame, FrameType.END)


def read(wire: AgentWire, path: Path, **args: Any) -> bytes:
    stream = wire.open("read", path=raw(path), **args)
    wire.result(stream)
    return wire.collect(stream).out


def archive(wire: AgentWire, path: Path) -> tarfile.TarFile:
    stream = wire.open("archive", path=raw(path))
    wire.result(stream)
    return tarfile.open(fileobj=io.BytesIO(wire.collect(stream).out))


def extract(wire: AgentWire, path: Path, content: bytes, **args: Any) -> dict[str, Any]:
    stream = wire.open("extract", path=raw(path), **args)
    wire.result(stream)
    return send(wire, stream, content)


def refused_errno(wire: AgentWire, op: str, **args: Any) -> tuple[str, str | None]:
    with pytest.raises(Refused) as refused:
        wire.call(op, **args)
    return refused.value.code, refused.value.errno


def test_a_file_survives_the_round_trip(wire: AgentWire, tmp_path: Path) -> None:
    content = os.urandom(2_000_000)
    path = tmp_path / "new" / "deep" / "file"

    assert write(wire, path, content) == {"bytes": len(content), "entries": 1}

    assert read(wire, path) == content
    assert read(wire, path, offset=1_999_990, length=5) == content[-10:-5]
    assert read(wire, path, offset=1 << 62) == b""
    assert path.stat().st_mode & 0o7777 == 0o644


def test_a_replacement_is_all_or_nothing(agent: Agent, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o640)
    wire = agent.connect()
    stream = wire.open("write", path=raw(path))
    wire.result(stream)
    wire.data(stream, 0, b"half")
    assert path.read_text() == "old"
    wire.close()

    wire = agent.connect()
    eventually(lambda: list(tmp_path.iterdir()) == [path])
    assert path.read_text() == "old"
    stream = wire.open("write", path=raw(path))
    wire.result(stream)
    wire.body(wire.frame(stream), FrameType.CREDIT)
    wire.send(FrameType.ERR, stream, {"code": "cancelled", "message": ""})
    with pytest.raises(Refused):
        wire.body(wire.frame(stream), FrameType.END)
    assert list(tmp_path.iterdir()) == [path]

    write(wire, path, b"new")
    assert (path.read_text(), path.stat().st_mode & 0o7777) == ("new", 0o640)


def test_in_place_and_appending_writes(wire: AgentWire, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")

    write(wire, path, b"ab", offset=4)
    write(wire, path, b"END", append=True)

    assert path.read_bytes() == b"0123ab6789END"
    write(wire, tmp_path / "sparse", b"x", offset=5, mode=0o600)
    assert (tmp_path / "sparse").read_bytes() == bytes(5) + b"x"


def test_a_symlink_is_written_through(wire: AgentWire, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")

    write(wire, tmp_path / "link", b"new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_what_is_no_file_is_neither_read_nor_written(wire: AgentWire, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    for path in (b"/dev/null", raw(tmp_path / "fifo"), raw(tmp_path)):
        assert refused_errno(wire, "read", path=path)[0] == "not_a_file"
    assert refused_errno(wire, "write", path=b"/dev/null") == ("not_a_file", None)
    assert refused_errno(wire, "write", path=raw(tmp_path)) == ("file", "EISDIR")
    assert refused_errno(wire, "write", path=raw(tmp_path / "no" / "f"), parents=False) == ("file", "ENOENT")


def test_lists_come_sorted_and_in_pages(wire: AgentWire, tmp_path: Path) -> None:
    names = sorted([b"n%03d" % number for number in range(250)] + [b"\xff\xfe", b"dir"])
    for name in names:
        Path(os.fsdecode(raw(tmp_path) + b"/" + name)).touch()
    after, seen = None, []

    while True:
        page = wire.call("list", path=raw(tmp_path), after=after, limit=100)
        seen += [entry["name"] for entry in page["entries"]]
        after = seen[-1]
        if not page["more"]:
            break

    assert seen == names


def test_pages_of_a_large_directory_follow_it_as_it_changes(wire: AgentWire, tmp_path: Path) -> None:
    for number in range(3_000):
        (tmp_path / f"n{number:05}").touch()

    def page(after: bytes | None) -> tuple[list[bytes], bool]:
        found = wire.call("list", path=raw(tmp_path), after=after, limit=1_000)
        return [entry["name"] for entry in found["entries"]], found["more"]

    first, more = page(None)
    assert (first[0], first[-1], len(first), more) == (b"n00000", b"n00999", 1_000, True)
    second, _ = page(first[-1])
    assert second == [b"n%05d" % number for number in range(1_000, 2_000)]

    (tmp_path / "n01500").unlink()
    (tmp_path / "n02000a").touch()
    again, more = page(first[-1])
    assert again == [*(name for name in second if name != b"n01500"), b"n02000"]
    assert more
    last, more = page(again[-1])
    assert (last[0], last[-1], len(last), more) == (b"n02000a", b"n02999", 1_000, False)
    assert page(last[-1]) == ([], False)
    assert page(None)[0] == first


def test_pages_of_several_directories_at_once_are_of_each(wire: AgentWire, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(400):
            (tmp_path / name / f"{name}{number:03}").touch()
    seen: dict[str, list[bytes]] = {"a": [], "b": []}

    for _ in range(4):
        for name, found in seen.items():
            page = wire.call("list", path=raw(tmp_path / name), after=found[-1] if found else None, limit=100)
            found += [entry["name"] for entry in page["entries"]]

    assert all(found == [b"%s%03d" % (name.encode(), n) for n in range(400)] for name, found in seen.items())


def test_small_operations_do_what_they_say(wire: AgentWire, tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    wire.call("mkdir", path=raw(deep), mode=0o2750)
    wire.call("mkdir", path=raw(deep))
    assert deep.stat().st_mode & 0o7777 == 0o2750
    assert refused_errno(wire, "mkdir", path=raw(deep), parents=False) == ("file", "EEXIST")

    (deep / "f").write_text("x")
    wire.call("chmod", path=raw(deep / "f"), mode=0o4711)
    assert wire.call("stat", path=raw(deep / "f"))["mode"] == 0o4711
    wire.call("symlink", path=raw(deep / "l"), target=b"f")
    link = wire.call("stat", path=raw(deep / "l"), follow=False)
    assert (link["kind"], link["target"], link["name"]) == ("symlink", b"f", b"l")
    assert wire.call("stat", path=raw(deep / "l"))["kind"] == "file"

    wire.call("move", source=raw(deep / "f"), target=raw(deep / "g"))
    (deep / "f").write_text("y")
    assert refused_errno(wire, "move", source=raw(deep / "f"), target=raw(deep / "g"), replace=False)[1] == "EEXIST"

    assert refused_errno(wire, "remove", path=raw(deep)) == ("file", "ENOTEMPTY")
    assert wire.call("remove", path=raw(tmp_path / "a"), recursive=True) == {}
    assert not (tmp_path / "a").exists()
    assert refused_errno(wire, "remove", path=raw(deep)) == ("file", "ENOENT")
    assert wire.call("remove", path=raw(deep), missing_ok=True) == {}


def test_a_tree_survives_archive_and_extract(wire: AgentWire, tmp_path: Path) -> None:
    source = tmp_path / "source"
    long = source / ("d" * 120) / ("e" * 120)
    long.mkdir(parents=True)
    (long / "file").write_bytes(os.urandom(100_000))
    (long / "file").chmod(0o751)
    (source / "empty").mkdir(mode=0o700)
    os.link(long / "file", source / "hard")
    (source / "soft").symlink_to("x" * 150)
    os.mkfifo(source / "fifo")
    Path(os.fsdecode(raw(source) + b"/\xff")).write_text("odd name")
    stream = wire.open("archive", path=raw(source))
    wire.result(stream)
    content = wire.collect(stream).out
    target = tmp_path / "target"

    written = extract(wire, target, content)

    assert written["entries"] == 8
    assert (target / long.relative_to(source) / "file").read_bytes() == (long / "file").read_bytes()
    assert (target / long.relative_to(source) / "file").stat().st_mode & 0o7777 == 0o751
    assert (target / "hard").samefile(target / long.relative_to(source) / "file")
    assert (target / "empty").stat().st_mode & 0o7777 == 0o700
    assert (target / "empty").stat().st_mtime_ns == (source / "empty").stat().st_mtime_ns
    assert (target / "soft").readlink() == Path("x" * 150)
    assert (target / "fifo").is_fifo()
    assert {path.name for path in target.iterdir()} == {path.name for path in source.iterdir()}


def test_one_file_is_an_archive_of_one_entry(wire: AgentWire, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("content")

    with archive(wire, tmp_path / "f") as tar:
        (member,) = tar.getmembers()
        extracted = tar.extractfile(member)
        assert extracted is not None
        assert (member.name, extracted.read()) == ("f", b"content")


def test_what_is_too_deep_to_name_is_an_error_and_not_left_out(wire: AgentWire, tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_PATH)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=directory)
        deeper = os.open("d" * 250, os.O_PATH, dir_fd=directory)
        os.close(directory)
        directory = deeper
    os.close(directory)
    stream = wire.open("archive", path=raw(tmp_path))
    wire.result(stream)

    with pytest.raises(Refused) as refused:
        wire.collect(stream)

    assert (refused.value.code, refused.value.errno) == ("file", "ENAMETOOLONG")


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_other_programs_are_read(wire: AgentWire, tmp_path: Path, format: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        name = "/".join(["p" * 60] * 3)
        info = tarfile.TarInfo(name)
        info.size = 700
        info.mtime = 1_000_000
        tar.addfile(info, io.BytesIO(b"z" * 700))

    extract(wire, tmp_path / "t", buffer.getvalue())

    made = tmp_path / "t" / name
    assert (made.read_bytes(), made.stat().st_mtime) == (b"z" * 700, 1_000_000)


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content)
    return info, content


@pytest.mark.parametrize(
    ("members", "errno"),
    [
        ([member("../out", content=b"x")], "EINVAL"),
        ([member("a/../../out", content=b"x")], "EINVAL"),
        ([member("l", tarfile.SYMTYPE, ".."), member("l/out", content=b"x")], None),
        ([member("l", tarfile.SYMTYPE, "{outside}"), member("l/out", content=b"x")], "ENOENT"),
        ([member("out", tarfile.SYMTYPE, "{outside}/victim"), member("out", content=b"x")], None),
        ([member("h", tarfile.LNKTYPE, "{outside}/victim"), member("h", content=b"x")], "ENOENT"),
        ([member("/out", content=b"x")], None),
        ([member("dev", tarfile.CHRTYPE)], None),
    ],
)
def test_no_entry_of_a_hostile_archive_gets_out(
    wire: AgentWire, tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], errno: str | None
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("safe")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in members:
            info = info.replace(linkname=info.linkname.replace("{outside}", str(outside)), deep=True)
            tar.addfile(info, io.BytesIO(content))

    try:
        extract(wire, tmp_path / "in", buffer.getvalue())
        result = None
    except Refused as refused:
        result = refused.errno

    assert result == errno
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "outside"]
    assert [path.name for path in outside.iterdir()] == ["victim"]
    assert (outside / "victim").read_text() == "safe"


@pytest.mark.parametrize("cut", [100, 511, 600, 1_500])
def test_a_broken_archive_is_a_typed_error(wire: AgentWire, tmp_path: Path, cut: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info, content = member("f", content=bytes(2_000))
        tar.addfile(info, io.BytesIO(content))

    with pytest.raises(Refused) as refused:
        extract(wire, tmp_path / "t", buffer.getvalue()[:cut])

    assert refused.value.code == "file"
    with pytest.raises(Refused):
        extract(wire, tmp_path / "t", b"this is no archive" * 100)
    assert wire.call("execs") == {"execs": []}


def test_a_helper_dies_with_its_stream(agent: Agent, wire: AgentWire, tmp_path: Path) -> None:
    before = agent.descriptors()
    stream = wire.open("extract", path=raw(tmp_path / "t"))
    wire.result(stream)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    assert children.read_text().split()

    wire.send(FrameType.ERR, stream, {"code": "cancelled", "message": ""})

    eventually(lambda: not children.read_text().split())
    eventually(lambda: agent.descriptors() == before)


@pytest.mark.root
def test_files_are_used_with_the_rights_of_the_user(agent_binary: Path, agent_directory: Path) -> None:
    secret, shared = agent_directory / "secret", agent_directory / "shared"
    secret.write_text("root only")
    secret.chmod(0o600)
    shared.mkdir()
    shared.chmod(0o777)

    with handed_agent(usable_copy(agent_binary, agent_directory), agent_directory, unprivileged=True) as agent:
        wire = agent.connect()
        assert refused_errno(wire, "read", path=raw(secret), user="1234") == ("file", "EACCES")
        assert refused_errno(wire, "mkdir", path=raw(agent_directory / "x"), user="1234:5") == ("file", "EACCES")
        assert read(wire, secret) == b"root only"
        write(wire, shared / "theirs", b"x", user="1234:77")
        extract(wire, shared / "t", archive_of("f"), user="1234:77")
        assert refused_errno(wire, "remove", path=raw(secret), user="1234")[1] == "EACCES"
        wire.call("chown", path=raw(secret), owner="42", group="43")

    owners = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in [secret, *shared.rglob("*")]}
    assert owners == {"secret": (42, 43), "theirs": (1234, 77), "t": (1234, 77), "f": (1234, 77)}


def archive_of(name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info, content = member(name, content=b"x")
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
