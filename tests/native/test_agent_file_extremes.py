"""Files of the real agent at their extremes: huge directories, holes, files without a size, trees too deep to name."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from tests.native.agent_wire import AgentWire, Refused, request
from tests.native.test_agent_file_operations import archive, extract, raw, read

# One page whatever is in it; stat says that it has 4,096 bytes.
MADE_WHEN_READ = Path("/sys/kernel/uevent_seqnum")


def test_a_large_directory_is_listed_whole_and_holds_up_nobody(wire: AgentWire, tmp_path: Path) -> None:
    for number in range(20_000):
        os.close(os.open(tmp_path / f"f{number:05}", os.O_CREAT | os.O_WRONLY))

    # In one piece: both are there when the agent begins with the first. Asked for later, answered sooner.
    first = request(1_001, "list", path=raw(tmp_path), limit=1_000)
    wire.socket.sendall(first + request(1_003, "stat", path=b"/"))
    assert wire.next_streams(2) == [1_003, 1_001]

    names, after = [], None
    while True:
        page = wire.call("list", path=raw(tmp_path), limit=1_000, after=after)
        names += [entry["name"] for entry in page["entries"]]
        after = names[-1]
        if not page["more"]:
            break
    assert names == [b"f%05d" % number for number in range(20_000)]


def test_a_list_that_fails_in_the_child_has_its_errno(wire: AgentWire, tmp_path: Path) -> None:
    """Names are too long to be looked at where the path of the directory is nearly as long as one may be."""
    at = str(tmp_path)
    here = os.open(tmp_path, os.O_RDONLY)
    while len(at) < 3_900:
        os.mkdir("d" * 200, dir_fd=here)
        here, before = os.open("d" * 200, os.O_RDONLY, dir_fd=here), here
        os.close(before)
        at += "/" + "d" * 200
    for number in range(300):
        os.close(os.open(f"{number:0200}", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)

    with pytest.raises(Refused) as refused:
        wire.call("list", path=at.encode(), limit=10)

    assert (refused.value.code, refused.value.errno) == ("file", "ENAMETOOLONG")


def test_a_file_without_a_size_is_read_to_its_end(wire: AgentWire) -> None:
    assert MADE_WHEN_READ.stat().st_size > len(MADE_WHEN_READ.read_bytes())

    stream = wire.open("read", path=raw(MADE_WHEN_READ))
    promised = wire.result(stream)["size"]
    content = wire.collect(stream).out

    assert (promised, content[-1:]) == (0, b"\n")
    assert len(content) < 30
    assert read(wire, Path("/proc/self/comm")) == b"dsec-agent\n"


def test_an_archive_has_what_is_in_a_file_without_a_size(wire: AgentWire) -> None:
    (member,) = archive(wire, MADE_WHEN_READ).getmembers()

    assert 0 < member.size < 30


def test_zeroes_of_an_archive_become_holes(wire: AgentWire, tmp_path: Path) -> None:
    content = bytearray(20 << 20)
    content[5 << 20 : (5 << 20) + 3] = b"abc"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, size in (("middle", len(content)), ("odd", (1 << 20) + 7), ("empty", 0), ("small", 10)):
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(content[:size]))

    extract(wire, tmp_path / "new", packed.getvalue())

    assert (tmp_path / "new" / "middle").read_bytes() == content
    assert [(tmp_path / "new" / name).stat().st_size for name in ("odd", "empty", "small")] == [(1 << 20) + 7, 0, 10]
    assert (tmp_path / "new" / "middle").stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("depth", [200, 3_000])
def test_a_deep_tree_is_removed(wire: AgentWire, tmp_path: Path, depth: int) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        here, before = os.open("d", os.O_RDONLY, dir_fd=here), here
        os.close(before)
    os.close(here)

    wire.call("remove", path=raw(tmp_path / "d"), recursive=True)

    assert list(tmp_path.iterdir()) == []
