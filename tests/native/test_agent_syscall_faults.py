"""Each system call of the real agent fails once, then the next: it says so or it does what was asked, and lives on."""

from __future__ import annotations

import io
import random
import re
import socket
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dsec.testing.strace import Fault, Traced, strace, traced
from dsec.wire.frames import FrameType
from tests.native.agent_process import Agent, eventually, is_alive, listening_agent
from tests.native.agent_wire import DEADLINE_S, AgentWire, Refused
from tests.native.test_agent_file_operations import archive, extract, read, write

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(strace() is None, reason="needs strace (tools/setup --dev installs it)"),
]

SAMPLES = 12
# Without these there is no agent: it ends, and its sandbox has failed with a cause.
FATAL = {"epoll_wait", "brk", "mmap", "mremap"}
# Who could not become itself again must not go on as somebody else.
FATAL |= {"capset", "setfsuid", "setfsgid", "setgroups"}
# They fail by a mistake of the caller alone, which is none of these: the kernel does them, and a pipe can be read.
SURE = {"close", "rt_sigprocmask", "rt_sigaction", "munmap", "madvise", "wait4"}
# The same, of a thread's start: libc ends the process.
SURE |= {"rseq", "set_robust_list"}
SURE_OF_OURS = {"read", "write"}
# A connection that fails is replaced by the host, which finds its execs again.
LINK = {"read", "write", "readv", "writev"}


def command(wire: AgentWire, place: Path, name: str) -> None:
    output = wire.run(name, shell="echo out; echo err >&2; exit 3")
    assert (output.out, output.err, output.end["end"]["code"]) == (b"out\n", b"err\n", 3), output.end


def terminal(wire: AgentWire, place: Path, name: str) -> None:
    output = wire.run(name, shell="echo out; exit 4", tty={"cols": 80, "rows": 24})
    assert (output.out, output.end["end"]["code"]) == (b"out\r\n", 4), output.end


def files(wire: AgentWire, place: Path, name: str) -> None:
    path = place / name
    assert write(wire, path, b"content" * 1_000)["bytes"] == 7_000
    assert read(wire, path) == b"content" * 1_000
    assert path.read_bytes() == b"content" * 1_000
    wire.result(wire.open("remove", path=bytes(path)))
    assert not path.exists()


def trees(wire: AgentWire, place: Path, name: str) -> None:
    source, target = place / f"{name}-source", place / f"{name}-target"
    (source / "below").mkdir(parents=True)
    (source / "below" / "file").write_bytes(b"content")
    try:
        with archive(wire, source) as tree:
            names = tree.getnames()
    except tarfile.TarError as error:
        raise AssertionError("the archive is cut") from error
    assert [part.rpartition("/")[2] for part in names if part.endswith("file")] == ["file"]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tree:
        tree.add(source, ".")
    assert extract(wire, target, packed.getvalue())["entries"] >= 2
    assert (target / "below" / "file").read_bytes() == b"content"


def watching(wire: AgentWire, place: Path, name: str) -> None:
    place = place / name
    place.mkdir()
    stream = wire.open("watch", path=bytes(place), recursive=True)
    wire.result(stream)
    (place / "file").write_bytes(b"content")
    event = wire.body(wire.frame(stream), FrameType.EVENT)
    assert event["kind"] == "overflow" or event["path"] == b"file", event
    wire.send(FrameType.ERR, stream, {"code": "cancelled", "message": ""})


def sessions(wire: AgentWire, place: Path, name: str) -> None:
    # A shell that cannot say that a command has ended is one that does not answer: its time is over then.
    limits = {"session": name, "timeout_s": 10.0, "grace_s": 0.1}
    wire.call("session_open", name=name)
    try:
        for number in range(2):
            output = wire.run(f"{name}-{number}", shell="echo out; echo err >&2; (exit 5)", **limits)
            assert (output.out, output.err, output.end["end"]["code"]) == (b"out\n", b"err\n", 5), output.end
    finally:
        # Not closed: for that the agent would look at all processes of the machine, call by call.
        with suppress(Refused, ConnectionError):
            wire.run(f"{name}-last", shell="exit 6", **limits)
        with suppress(Refused, ConnectionError):
            wire.call("session_close", name=name)  # one that does not answer


def connecting(wire: AgentWire, place: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stream = wire.open("connect", port=server.getsockname()[1])
        wire.result(stream)
        peer, _ = server.accept()
        with peer:
            peer.settimeout(DEADLINE_S)
            wire.data(stream, 0, b"there")
            if (arrived := peer.recv(100)) == b"":
                wire.frame(stream)  # of an agent that has gone with the connection
            assert arrived == b"there"
            peer.sendall(b"and back")
            wire.end(stream, 5)
            assert peer.recv(100) == b"", "its end was not passed on"
        assert wire.collect(stream).out == b"and back"


def pausing(wire: AgentWire, place: Path, name: str) -> None:
    assert wire.call("freeze_prepare") == {}
    held = wire.run(name, "true", timeout_s=0.001)
    assert wire.call("clock", paused_s=0.0) == {}
    assert held.end["end"]["cause"] is None, held.end
    assert wire.run(f"{name}-after", "true", timeout_s=60.0).end["end"]["cause"] is None


WORK: dict[str, Callable[[AgentWire, Path, str], None]] = {
    "command": command,
    "terminal": terminal,
    "files": files,
    "trees": trees,
    "watching": watching,
    "sessions": sessions,
    "connecting": connecting,
    "pausing": pausing,
}


def seen(agent: Agent, work: str, place: Path) -> list[Fault]:
    """The calls that the agent makes for it, and those of the child before it is the program."""
    wire = agent.connect()
    with traced(agent.pid) as found:
        WORK[work](wire, place, "seen")
    wire.close()
    return [fault for fault in found.faults() if fault.call not in SURE]


def check(agent: Agent, work: str, place: Path, fault: Fault) -> str | None:
    """What is wrong about it."""
    wire = agent.connect()
    before = agent.descriptors()
    place = place / f"{fault.call}-{fault.nth}"
    place.mkdir(exist_ok=True)
    told: BaseException | None = None
    with traced(agent.pid, fault) as found:
        try:
            WORK[work](wire, place, "during")
        except (Refused, ConnectionError, AssertionError) as error:
            told = error
        except TimeoutError:
            told = AssertionError("it hangs")
    wire.close()
    if isinstance(told, AssertionError) and ours(agent, found) and fault.call not in SURE_OF_OURS:
        return f"{fault}: {str(told)[:300]}; {found.hits}"
    if isinstance(told, ConnectionError) and fault.call not in LINK | FATAL:
        return f"{fault}: the connection is lost; {found.hits}"
    try:
        after = agent.connect()
        for left in after.call("sessions")["sessions"]:  # they outlive a connection
            after.call("session_close", name=left["name"])
        eventually(lambda: agent.descriptors() <= before)
        WORK[work](after, place, "after")
        after.close()
    except (ConnectionError, FileNotFoundError):
        eventually(lambda: not is_alive(agent.pid))
        return None if fault.call in FATAL else f"{fault}: the agent has died; {found.hits}"
    return None


def ours(agent: Agent, found: Traced) -> bool:
    """Whether a call of the agent itself failed: what a program does about its own is its affair."""
    return any(re.match(rf"{agent.pid}\b", hit) for hit in found.hits)


Choose = Callable[[list[Fault]], list[Fault]]


def wrong_of(binary: Path, directory: Path, work: str, place: Path, choose: Choose) -> str:
    """What is wrong about each of the chosen faults; an agent that may have died is followed by another."""
    wrong: list[str] = []
    faults: list[Fault] | None = None
    while faults is None or faults:
        with listening_agent(binary, directory) as agent:
            if faults is None:
                everything = seen(agent, work, place)
                assert len(everything) > SAMPLES
                faults = choose(everything)
            fault = None
            while faults and is_alive(agent.pid) and (fault is None or fault.call not in FATAL):
                fault = faults.pop(0)
                if words := check(agent, work, place, fault):
                    wrong.append(words)
        (directory / "agent.sock").unlink(missing_ok=True)
    return "\n".join(wrong)


@pytest.mark.parametrize("work", WORK)
def test_a_system_call_that_fails_is_told_or_made_good(
    work: str, agent_binary: Path, agent_directory: Path, tmp_path: Path, rng: random.Random
) -> None:
    assert wrong_of(agent_binary, agent_directory, work, tmp_path, lambda all: rng.sample(all, SAMPLES)) == ""


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("work", WORK)
def test_every_system_call_that_fails_is_told_or_made_good(
    work: str, agent_binary: Path, agent_directory: Path, tmp_path: Path
) -> None:
    assert wrong_of(agent_binary, agent_directory, work, tmp_path, lambda all: all) == ""
