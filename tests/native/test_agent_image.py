"""What the agent needs of an image, and what it believes of it: nothing, and little."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tests.native.agent_process import AGENT_UID, copy_program, handed_agent, listening_agent, usable_copy
from tests.native.agent_wire import AgentWire, Refused

PT_INTERP, PT_DYNAMIC = 3, 2


def test_the_agent_needs_no_loader_and_no_library(agent_binary: Path) -> None:
    image = agent_binary.read_bytes()
    (offset,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)

    kinds = [struct.unpack_from("<I", image, offset + size * number)[0] for number in range(count)]

    assert PT_INTERP not in kinds
    assert len(image) < 2_500_000


def test_its_own_memory_is_small(agent_binary: Path, agent_directory: Path) -> None:
    with listening_agent(agent_binary, agent_directory) as agent:
        agent.connect().run("e1", "true")

        assert int(agent.status("RssAnon").split()[0]) <= 400


@pytest.mark.root
def test_it_runs_in_a_root_that_holds_nothing_else(agent_binary: Path, agent_directory: Path) -> None:
    usable_copy(agent_binary, agent_directory)

    with listening_agent(agent_binary, agent_directory, root=agent_directory) as agent:
        wire = agent.connect()
        output = wire.run("e1", "/dsec-agent")
        assert output.err.startswith(b"dsec-agent: usage")
        assert output.end["end"]["code"] == 2
        with pytest.raises(Refused) as refused:
            wire.call("exec", id="e2", shell=b"true")
        assert (refused.value.code, refused.value.errno) == ("command_not_found", "ENOENT")
        with pytest.raises(Refused) as refused:
            wire.call("exec", id="e3", argv=[b"/dsec-agent"], user="nobody")
        assert refused.value.code == "user_not_found"
        wire.call("mkdir", path=b"/made")
        names = [entry["name"] for entry in wire.call("list", path=b"/")["entries"]]
        assert names == [b"agent.sock", b"dsec-agent", b"made"]
        assert wire.call("usage")["execs"] == 0


@pytest.fixture
def image(agent_binary: Path, agent_directory: Path) -> Path:
    """A root with a shell and `id`."""
    usable_copy(agent_binary, agent_directory)
    for program in ("/bin/sh", "/usr/bin/id"):
        copy_program(agent_directory, program)
    (agent_directory / "etc").mkdir()
    return agent_directory


def ids(wire: AgentWire, user: str) -> tuple[str, str, list[str]]:
    """uid, gid and groups, as the kernel has them."""
    number = f"e{ids_count.setdefault('n', 0)}"
    ids_count["n"] += 1
    out = wire.run(number, shell="id -u; id -g; id -G", user=user, cwd=b"/").out.decode().splitlines()
    return out[0], out[1], sorted(out[2].split())


ids_count: dict[str, int] = {}


@pytest.mark.root
def test_users_are_looked_up_in_the_image(image: Path) -> None:
    (image / "home").mkdir()
    (image / "etc/passwd").write_text("ann:x:1000:1000::/home:/bin/sh\nbad:x:-1:0::/:\nbad:x:0x0:0::/:\n")
    (image / "etc/group").write_text("staff:x:50:ann\nother:x:51:bob\nwheel:x:52:bob,ann\n")

    with listening_agent(image / "dsec-agent", image, root=image) as agent:
        wire = agent.connect()
        assert ids(wire, "ann") == ("1000", "1000", ["1000", "50", "52"])
        assert ids(wire, "1000") == ("1000", "1000", ["1000", "50", "52"])
        assert ids(wire, "ann:other") == ("1000", "51", ["51"])
        assert ids(wire, "7:8") == ("7", "8", ["8"])
        out = wire.run("env", shell="echo $HOME $USER; pwd", user="ann").out
        assert out == b"/home ann\n/home\n"
        for user in ("bad", "bob", "ann:none", "4294967295", ""):
            with pytest.raises(Refused) as refused:
                wire.call("exec", id="x", shell=b"true", user=user)
            assert refused.value.code == "user_not_found"


@pytest.mark.root
@pytest.mark.parametrize("trick", ["fifo", "directory", "large", "escape", "loop"])
def test_a_hostile_passwd_is_as_good_as_none(image: Path, trick: str) -> None:
    passwd = image / "etc/passwd"
    if trick == "fifo":
        os.mkfifo(passwd)
    elif trick == "directory":
        passwd.mkdir()
    elif trick == "large":
        passwd.write_bytes(b"ann:x:0:0::/:\n" * 100_000)
    elif trick == "escape":
        # Outside it would be a file with users.
        passwd.symlink_to("../" * 20 + "etc/passwd-of-the-host")
    else:
        passwd.symlink_to("passwd")

    with listening_agent(image / "dsec-agent", image, root=image) as agent:
        wire = agent.connect()
        with pytest.raises(Refused) as refused:
            wire.call("exec", id="x", shell=b"true", user="ann")
        assert refused.value.code == "user_not_found"
        assert ids(wire, "1000:1000") == ("1000", "1000", ["1000"])


@pytest.mark.root
def test_commands_get_their_capabilities_and_no_others(agent_binary: Path, agent_directory: Path) -> None:
    binary = usable_copy(agent_binary, agent_directory)
    chown_and_setuid = (1 << 0) | (1 << 7)

    with handed_agent(
        binary, agent_directory, unprivileged=True, caps_exec=chown_and_setuid, no_new_privs=True, nofile=123
    ) as agent:
        wire = agent.connect()
        assert agent.status("Uid").split() == [str(AGENT_UID)] * 4
        root = status_of(wire, "e1", "root")
        other = status_of(wire, "e2", "1000:1000")
        with pytest.raises(Refused) as refused:
            wire.call("exec", id="e3", shell=b"true", user=str(AGENT_UID))
        assert wire.run("e4", shell="ulimit -n").out == b"123\n"

    assert refused.value.code == "user_not_found"
    assert {key: int(root[key], 16) for key in ("CapPrm", "CapEff", "CapBnd")} == {
        "CapPrm": chown_and_setuid,
        "CapEff": chown_and_setuid,
        "CapBnd": chown_and_setuid,
    }
    assert (int(root["CapInh"], 16), int(root["CapAmb"], 16), root["NoNewPrivs"]) == (0, 0, "1")
    assert [int(other[key], 16) for key in ("CapPrm", "CapEff", "CapInh", "CapAmb")] == [0] * 4
    assert int(other["CapBnd"], 16) == chown_and_setuid
    assert (root["Uid"].split(), other["Uid"].split()) == (["0"] * 4, ["1000"] * 4)


def status_of(wire: AgentWire, id: str, user: str) -> dict[str, str]:
    lines = wire.run(id, "cat", "/proc/self/status", user=user, cwd=b"/").out.decode().splitlines()
    return {line.split(":")[0]: line.split(":", 1)[1].strip() for line in lines}


@pytest.mark.root
def test_the_filter_is_on_commands_and_not_on_the_agent(agent_binary: Path, agent_directory: Path) -> None:
    binary = usable_copy(agent_binary, agent_directory)
    # Load the number; uname(2), 63, gets EPERM, everything else is allowed.
    program = [(0x20, 0, 0, 0), (0x15, 0, 1, 63), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    filter_exec = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)

    with handed_agent(binary, agent_directory, unprivileged=True, no_new_privs=True, filter_exec=filter_exec) as agent:
        output = agent.connect().run("e1", "uname", cwd=b"/")
        seccomp = agent.status("Seccomp")

    assert output.end["end"]["code"] == 1
    assert seccomp == "0"


@pytest.mark.root
def test_the_configuration_gives_user_directory_and_environment(agent_binary: Path, agent_directory: Path) -> None:
    binary = usable_copy(agent_binary, agent_directory)

    with handed_agent(
        binary, agent_directory, env={b"A": b"1", b"HOME": b"/h"}, user="1000:1000", workdir=b"/usr"
    ) as agent:
        output = agent.connect().run("e1", shell="id -u; pwd; echo $A $HOME")
        with pytest.raises(Refused) as refused:
            agent.connect(sandbox="another")

    assert output.out == b"1000\n/usr\n1 /h\n"
    assert refused.value.code == "wrong_sandbox"
