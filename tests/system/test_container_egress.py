"""Containers with network `proxied`, through node and forwarder, to servers in a network of the test's own."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.sdk.process import AsyncProcess
from dsec.sdk.sandbox import AsyncSandbox
from dsec.testing.outside import ALLOWED, ECHO_PORT, METADATA, OTHER, PRIVATE
from dsec.testing.processes import all_processes, command_line
from dsec.testing.waiting import eventually
from tests.system.egress_site import ABLE, Site, egress_site, fetch

pytestmark = [
    pytest.mark.root,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not ABLE, reason="needs root, ip, iptables and nsenter"),
]

# A connection that stays: each line of input goes to the echo and what comes back is said.
_TALK = f"""
import socket, sys
link = socket.create_connection(("allowed.example.org", {ECHO_PORT}), timeout=120)
print("connected", flush=True)
for line in sys.stdin:
    try:
        link.sendall(line.encode())
        print(link.recv(100).decode().strip() or "end", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""
RULES = ("allowed.example.org", f"allowed.example.org:{ECHO_PORT}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with egress_site(small_store, tmp_path_factory.mktemp("outside")) as site:
        yield site


class Talk:
    """The connection that stays, from the outside of its sandbox."""

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process
        self._chunks = process.output()
        self._said = ""

    @classmethod
    async def begun(cls, sandbox: AsyncSandbox) -> Talk:
        talk = cls(await sandbox.start(["python3", "-c", _TALK], stdin=True))
        assert await talk.line() == "connected"
        return talk

    async def line(self) -> str:
        while "\n" not in self._said:
            self._said += (await anext(self._chunks)).text
        line, _, self._said = self._said.partition("\n")
        return line

    async def says(self, word: str) -> str:
        await self._process.write(f"{word}\n")
        return await self.line()


def forwarder_pid(site: Site) -> int | None:
    mark = b"\0--run\0" + str(site.place.run).encode() + b"\0"
    found = [pid for pid in all_processes() if mark in command_line(pid) and b"dsec-egress" in command_line(pid)]
    return found[0] if found else None


async def test_what_is_allowed_is_reached_by_name_and_counted_and_nothing_else_is(site: Site) -> None:
    sandbox = await site.create("allowed.example.org", "inside.example.org")
    asked = len(site.outside.seen)

    said = await fetch(
        sandbox,
        *("allowed.example.org/", "allowed.example.org/bytes/3000000", "other.example.org/", "inside.example.org/"),
        *(f"{address}/" for address in (OTHER, METADATA, PRIVATE, site.outside.host, site.outside.resolver)),
        "127.0.0.1/",
    )

    assert said[:2] == [f"you reached {ALLOWED}", "3000000"]
    assert said[2:4] == ["gaierror", "gaierror"]
    assert set(said[4:9]) <= {"ConnectionResetError", "RemoteDisconnected", "BrokenPipeError"}
    assert said[9] == "ConnectionRefusedError"
    seen = site.outside.seen[asked:]
    assert set(seen) == {"dns allowed.example.org", "dns inside.example.org", f"http {ALLOWED}"}

    async def told() -> str:
        found = [event async for event in site.client.events(sandbox=sandbox.id, kinds=["egress_denied"], follow=False)]
        return "".join(event.detail or "" for event in found)

    assert "other.example.org" in await eventually(told)
    await sandbox.destroy()
    ended = await sandbox.refresh()
    assert ended.usage is not None
    assert ended.usage.received_bytes > 3_000_000
    assert ended.usage.sent_bytes > 100


async def test_rules_change_between_stages_and_what_is_still_allowed_goes_on(site: Site) -> None:
    async with await site.create(*RULES) as sandbox:
        talk = await Talk.begun(sandbox)
        assert await talk.says("one") == "one"

        await sandbox.set_egress([f"allowed.example.org:{ECHO_PORT}"])
        assert await talk.says("two") == "two"
        (said,) = await fetch(sandbox, "allowed.example.org/")
        assert said in ("ConnectionResetError", "RemoteDisconnected", "BrokenPipeError")

        await sandbox.set_egress([])
        assert await talk.says("three") in ("ConnectionResetError", "BrokenPipeError", "end")
        assert await fetch(sandbox, "allowed.example.org/") == ["gaierror"]

        await sandbox.set_egress(None)
        assert await fetch(sandbox, "other.example.org/") == [f"you reached {OTHER}"]
        assert await fetch(sandbox, "inside.example.org/") == ["gaierror"]


@pytest.mark.slow
async def test_a_kill_of_the_node_cuts_nothing_and_loses_no_rule(site: Site) -> None:
    async with await site.create(*RULES) as sandbox:
        talk = await Talk.begun(sandbox)
        assert await talk.says("before") == "before"
        await sandbox.set_egress([f"allowed.example.org:{ECHO_PORT}"])

        site.place.kill_node()
        await site.start_node()

        assert await talk.says("after") == "after"
        assert (await sandbox.refresh()).egress == [f"allowed.example.org:{ECHO_PORT}"]
        (said,) = await fetch(sandbox, "allowed.example.org/")
        assert said in ("ConnectionResetError", "RemoteDisconnected", "BrokenPipeError")
        await sandbox.set_egress(["allowed.example.org"])
        assert await fetch(sandbox, "allowed.example.org/") == [f"you reached {ALLOWED}"]


@pytest.mark.slow
async def test_a_kill_of_the_forwarder_cuts_and_another_one_carries_by_the_same_rules(site: Site) -> None:
    async with await site.create(*RULES) as sandbox, await site.create("other.example.org") as other:
        talk = await Talk.begun(sandbox)
        before = forwarder_pid(site)
        assert before is not None

        os.kill(before, signal.SIGKILL)

        assert await talk.says("cut") != "cut"

        async def is_back() -> bool:
            first, second = await fetch(sandbox, "allowed.example.org/", "other.example.org/")
            assert second in ("gaierror", "ConnectionRefusedError", "TimeoutError", "OSError")
            return first == f"you reached {ALLOWED}"

        await eventually(is_back)
        assert forwarder_pid(site) not in (None, before)

        async def other_is_back() -> bool:
            return await fetch(other, "other.example.org/") == [f"you reached {OTHER}"]

        await eventually(other_is_back)
        (said,) = await fetch(other, f"{ALLOWED}/")
        assert said in ("ConnectionResetError", "RemoteDisconnected", "BrokenPipeError")


@pytest.mark.slow
async def test_pauses_forks_and_snapshots_keep_the_network_and_its_rules(site: Site) -> None:
    async with await site.create(*RULES) as sandbox:
        talk = await Talk.begun(sandbox)
        await sandbox.pause()
        await sandbox.set_egress(["allowed.example.org:*"])
        assert await talk.says("resumed") == "resumed"

        (child,) = await sandbox.fork()
        await sandbox.snapshot("stage")
        async with child, await site.client.create(snapshot="stage", network="proxied") as made:
            for one in (child, made):
                assert await fetch(one, "allowed.example.org/", "other.example.org/") == [
                    f"you reached {ALLOWED}",
                    "gaierror",
                ]
        async with await site.client.create(snapshot="stage") as bare:
            assert bare.info.network == "none"
            assert await fetch(bare, "allowed.example.org/") == ["gaierror"]
        await sandbox.rollback("stage")

        async def is_back() -> bool:
            return await fetch(sandbox, "allowed.example.org/") == [f"you reached {ALLOWED}"]

        await eventually(is_back)
