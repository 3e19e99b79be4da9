"""dsec-egress with a sandbox's network, a host's and an internet of the test's own: what passes, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.core.errors import CapacityError, InvalidArgumentError, NotFoundError
from dsec.testing.waiting import eventually
from dsec.wire.egress import NAMESERVER, OWN_ADDRESS, OWN_ADDRESS_6, AttachAnswer, EgressCounts, EgressRule
from tests.native.egress_site import (
    HOST,
    INSIDE,
    METADATA,
    OTHER,
    RESOLVER,
    WEB,
    WEB_6,
    Site,
    able,
    everything_of,
    is_reset,
    question_of,
    read_answer,
    rule,
    site,
    space,
)

pytestmark = [pytest.mark.root, pytest.mark.skipif(not able(), reason="needs root, ip, unshare and nsenter")]

NO_SUCH_NAME = 3


@pytest.fixture
def run_dir(native_binaries: dict[str, Path]) -> Iterator[Path]:
    """A short path: it holds a socket."""
    with tempfile.TemporaryDirectory(prefix="egr-") as name:
        yield Path(name)


@pytest.fixture
async def place(run_dir: Path) -> AsyncIterator[Site]:
    async with site(run_dir) as found:
        for address in (WEB, OTHER, WEB_6, INSIDE, METADATA):
            for port in (80, 443, 22):
                found.internet.serve(address, port)
        found.internet.name("index.example", WEB, WEB_6)
        found.internet.name("deb.mirror.example", OTHER)
        yield found


async def test_what_a_rule_names_is_reached_and_nothing_else(place: Site) -> None:
    assert await place.attach(rule("index.example"), rule("*.mirror.example", 80))

    assert place.ask("index.example") == (0, [WEB])
    assert place.ask("index.example", 28) == (0, [WEB_6])
    assert place.ask("deb.mirror.example", server="9.9.9.9") == (0, [OTHER])  # whoever is asked
    assert place.ask("evil.example") == (NO_SUCH_NAME, [])
    assert place.ask("mirror.example") == (NO_SUCH_NAME, [])
    assert place.says(WEB, 443) == f"{WEB} \1hello".encode()
    assert place.says(WEB_6, 443) == f"{WEB_6} \1hello".encode()
    assert place.says(OTHER, 80) == f"{OTHER} \1hello".encode()
    for address, port in ((WEB, 22), (OTHER, 443), (RESOLVER, 80), (INSIDE, 80), (METADATA, 80), (HOST, 22)):
        assert place.is_refused(address, port), (address, port)
    assert "evil.example" not in place.internet.asked
    assert set(place.internet.called) == {(WEB, 443), (WEB_6, 443), (OTHER, 80)}
    counts = (await place.egress.counts())[place.name]
    assert (counts.connections, counts.questions, counts.up_bytes) == (3, 3, 18)
    await eventually(lambda: sum(d.count for d in place.denied) == counts.denied)
    told = place.denied
    assert {(d.target, d.port, d.protocol, d.reason) for d in told} >= {
        ("evil.example", 0, "dns", "rules"),
        (WEB, 22, "tcp", "rules"),
        (METADATA, 80, "tcp", "private"),
        (HOST, 22, "tcp", "private"),
    }


async def test_without_rules_everything_public_is_reached(place: Site) -> None:
    await place.attach(everything=True)
    place.internet.name("rebinding.example", INSIDE, METADATA, HOST, "127.0.0.1", WEB, "::1", "::ffff:10.0.0.1")

    assert place.says(WEB, 22) == f"{WEB} \1hello".encode()
    assert place.ask("nothing.example") == (NO_SUCH_NAME, [])
    assert place.ask("rebinding.example") == (0, [WEB])  # private addresses are left out
    assert place.ask("rebinding.example", 28) == (0, [])
    for address in (INSIDE, METADATA, HOST, "2a02:db8::1", "fd00:ec2::254", "64:ff9b::a9fe:a9fe"):
        assert place.is_refused(address, 80), address
    # As IPv6 that stands for IPv4 it is no other address.
    assert place.is_refused(f"::ffff:{INSIDE}", 80)
    assert place.internet.called == [(WEB, 22)]


async def test_nothing_is_reached_by_no_rules(place: Site) -> None:
    await place.attach()

    assert place.ask("index.example") == (NO_SUCH_NAME, [])
    assert place.is_refused(WEB, 443)
    assert place.internet.asked == place.internet.called == []


async def test_what_is_private_needs_the_operator_and_an_address_rule(run_dir: Path) -> None:
    async with site(run_dir, private=(f"{INSIDE}/32", f"{HOST}/32")) as place:
        place.internet.serve(INSIDE, 5432)
        place.internet.serve(METADATA, 80)
        place.internet.name("db.example", INSIDE)
        await place.attach(rule("db.example", 5432))
        assert place.ask("db.example") == (0, [])
        assert place.is_refused(INSIDE, 5432)

        await place.egress.rules(place.name, (rule("0.0.0.0/0", 5432, 80), rule("db.example", 5432)))

        assert place.ask("db.example") == (0, [INSIDE])
        assert place.says(INSIDE, 5432) == f"{INSIDE} \1hello".encode()
        assert place.is_refused(METADATA, 80)
        await place.egress.rules(place.name, None)
        assert place.is_refused(INSIDE, 5432)


async def test_the_sandboxs_own_sockets_are_its_own(place: Site) -> None:
    await place.attach(everything=True)
    families = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::"))
    for port, (family, address) in enumerate(families, 8001):
        with place.sandbox.socket(family) as listener:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address, port))
            listener.listen()
            own = ["127.0.0.1", "127.9.9.9", OWN_ADDRESS] if address == "0.0.0.0" else [address]
            for called in own if family == socket.AF_INET else ["::1", OWN_ADDRESS_6]:
                with place.sandbox.connect(called, port) as link:
                    accepted, _ = listener.accept()
                    with accepted:
                        accepted.sendall(b"own")
                    assert link.recv(3) == b"own"
            assert place.is_refused(WEB, port)  # not its own
    # Also by UDP, and port 53 of all addresses is there to be taken.
    for port in (53, 5353):
        with (
            place.sandbox.socket(kind=socket.SOCK_DGRAM) as server,
            place.sandbox.socket(kind=socket.SOCK_DGRAM) as client,
        ):
            server.bind(("0.0.0.0", port))
            client.sendto(b"own", ("127.0.0.1", port))
            data, source = server.recvfrom(10)
            server.sendto(data, source)
            assert client.recvfrom(10) == (b"own", ("127.0.0.1", port))


async def test_other_datagrams_and_pings_get_no_answer(place: Site) -> None:
    await place.attach(everything=True)
    with place.sandbox.socket(kind=socket.SOCK_DGRAM) as asker:
        asker.connect((WEB, 443))
        asker.send(b"quic")
        with pytest.raises(ConnectionRefusedError):
            asker.recv(10)
    settings = ("/proc/sys/net/ipv4/icmp_echo_ignore_all", "/proc/sys/net/ipv6/icmp/echo_ignore_all")
    assert place.sandbox.do(lambda: [Path(path).read_text() for path in settings]) == ["1\n", "1\n"]


async def test_a_binding_ends_with_its_time(run_dir: Path) -> None:
    async with site(run_dir, binding_s=0.3) as place:
        place.internet.serve(WEB, 443)
        place.internet.ttl = 0
        place.internet.name("index.example", WEB)
        await place.attach(rule("index.example"))
        assert place.is_refused(WEB, 443)  # nobody has asked yet
        place.internet.ttl = 3600
        place.ask("index.example")
        with place.sandbox.connect(WEB, 443) as link:
            link.sendall(b"\1first")
            assert link.recv(100)
            place.internet.ttl = 0
            place.internet.serve(OTHER, 443)
            place.internet.name("short.org", OTHER)
            await place.egress.rules(place.name, (rule("short.org"), rule("index.example")))
            place.ask("short.org")

            await eventually(lambda: place.is_refused(OTHER, 443))

            link.sendall(b"on")  # what is there goes on, and the other one's time is long
            assert link.recv(100)
        assert place.says(WEB, 443)


async def test_other_rules_cut_only_what_they_do_not_allow(place: Site) -> None:
    await place.attach(rule("index.example"), rule("deb.mirror.example"))
    assert place.ask("index.example")[1] + place.ask("deb.mirror.example")[1] == [WEB, OTHER]
    stays, ends = place.sandbox.connect(WEB, 443), place.sandbox.connect(OTHER, 443)
    with stays, ends:
        for link in (stays, ends):
            link.sendall(b"\1")
            assert link.recv(100)

        await place.egress.rules(place.name, (rule("index.example"),))

        assert is_reset(ends)
        stays.sendall(b"still")
        assert stays.recv(100)
        assert not (await place.attach(rule("index.example")))  # again: nothing is cut
        stays.sendall(b"and again")
        assert stays.recv(100)
        assert place.is_refused(OTHER, 443)


async def test_a_shared_address_is_open_for_the_names_of_rules_only(place: Site) -> None:
    await place.attach(rule("index.example"))
    place.ask("index.example")
    request = "GET / HTTP/1.1\r\nHost: {}\r\n\r\n"

    assert place.says(WEB, 80, request.format("index.example").encode()).startswith(f"{WEB} GET".encode())
    assert place.is_refused(WEB, 80, request.format("evil.example").encode())
    assert place.is_refused(WEB, 80, b"GET / HTTP/1.1\r\nHost: index.example\r\nHost: evil.example\r\n\r\n")
    assert place.is_refused(WEB, 80, b"GET / HTTP/1.1\r\nHost: index.example\r\n")  # and no more
    assert place.is_refused(WEB, 443, b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00")
    assert place.internet.called == [(WEB, 80)]
    told = await eventually(lambda: [d for d in place.denied if d.reason == "other_name"])
    assert (told[0].target, told[0].port) == ("evil.example", 80)


async def test_who_does_not_say_whom_it_wants_is_cut(run_dir: Path) -> None:
    async with site(run_dir, peek_s=0.2) as place:
        place.internet.serve(WEB, 443)
        place.internet.name("index.example", WEB)
        await place.attach(rule("index.example"))
        place.ask("index.example")
        with place.sandbox.connect(WEB, 443) as link, pytest.raises(ConnectionResetError):
            link.recv(1)
        assert place.internet.called == []


async def test_questions_come_by_connection_as_well(place: Site) -> None:
    await place.attach(rule("index.example"), rule("many.example"))
    many = [f"23.0.0.{number}" for number in range(1, 61)]
    place.internet.name("many.example", *many)
    with place.sandbox.connect(NAMESERVER, 53) as link:
        for name, expected in (("index.example", (0, [WEB])), ("evil.example", (NO_SUCH_NAME, []))):
            question = question_of(name)
            link.sendall(len(question).to_bytes(2, "big") + question)
            length = int.from_bytes(link.recv(2, socket.MSG_WAITALL), "big")
            assert read_answer(link.recv(length, socket.MSG_WAITALL), name) == expected
    # What does not fit a datagram of the resolver's is asked for by a connection.
    code, found = place.ask("many.example")
    assert code == 0
    assert 10 <= len(found) <= 16
    assert set(found) <= set(many)


async def test_resolvers_are_those_of_the_host_unless_the_operator_names_some(run_dir: Path, tmp_path: Path) -> None:
    resolv_conf = tmp_path / "resolv.conf"
    resolv_conf.write_text(f"# of the host\nnameserver {RESOLVER}\n")
    async with site(run_dir, resolv_conf=resolv_conf) as place:
        place.internet.name("index.example", WEB)
        await place.attach(rule("index.example"))
        await eventually(lambda: place.ask("index.example") == (0, [WEB]))


async def test_what_is_sent_arrives_whole_both_ways_and_halves_close(place: Site) -> None:
    await place.attach(everything=True)
    data = os.urandom(1 << 20) * 20
    with place.sandbox.connect(WEB, 22) as link:
        sender = threading.Thread(target=lambda: (link.sendall(data), link.shutdown(socket.SHUT_WR)))
        sender.start()
        came = everything_of(link)
        sender.join()
    assert came == f"{WEB} ".encode() + data
    counts = (await place.egress.counts())[place.name]
    assert (counts.up_bytes, counts.down_bytes) == (len(data), len(came))


async def test_who_takes_nothing_of_what_comes_is_cut_before_it_holds_too_much(run_dir: Path) -> None:
    async with site(run_dir, held=4 << 20) as place:
        place.internet.serve(WEB, 80, _talk_for_ever)
        place.internet.serve(OTHER, 80)
        await place.attach(everything=True)
        with contextlib.ExitStack() as stack:
            for _ in range(16):
                with contextlib.suppress(ConnectionError):
                    stack.enter_context(place.sandbox.connect(WEB, 80))
            told = await eventually(lambda: [d for d in place.denied if d.reason == "memory"])
            assert {(d.target, d.port, d.protocol) for d in told} == {(WEB, 80, "tcp")}
        # Once that has gone it is as before.
        await eventually(lambda: not place.is_refused(OTHER, 80))


def _talk_for_ever(link: socket.socket) -> None:
    while True:
        link.sendall(bytes(1 << 16))


@pytest.mark.parametrize("victim", ["server", "keeper"])
async def test_its_death_lets_nothing_through_and_the_next_one_serves_all_again(place: Site, victim: str) -> None:
    await place.attach(rule("index.example"))
    place.ask("index.example")
    before = place.egress.pid
    with place.sandbox.connect(WEB, 443) as link:
        link.sendall(b"\1")
        assert link.recv(100)
        os.kill(before if victim == "server" else _parent_of(before), signal.SIGKILL)
        assert is_reset(link)
    await eventually(lambda: place.egress.pid != before)
    await eventually(lambda: place.ask("index.example") == (0, [WEB]))
    assert place.says(WEB, 443)
    assert place.ask("evil.example")[0] == NO_SUCH_NAME


async def test_what_reads_a_sandboxs_bytes_has_no_rights(place: Site) -> None:
    await place.attach()
    server, keeper = (_status_of(pid) for pid in (place.egress.pid, _parent_of(place.egress.pid)))

    assert server["Uid"].split() == server["Gid"].split() == ["65534"] * 4
    assert {server[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (server["NoNewPrivs"], server["Groups"].strip()) == ("1", "")
    rights = {10, 12, 13, 19, 21}  # bind_service, net_admin, net_raw, sys_ptrace, sys_admin
    for name in ("CapPrm", "CapEff", "CapBnd"):
        held = int(keeper[name], 16)
        assert {number for number in range(64) if held >> number & 1} <= rights
    assert keeper["NoNewPrivs"] == "1"
    for pid, status in ((place.egress.pid, server), (_parent_of(place.egress.pid), keeper)):
        assert (status["Seccomp"], status["Seccomp_filters"]) == ("2", "1")
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        assert [line.split()[4:6] for line in limits if line.startswith("Max core")] == [["0", "0"]]


def _parent_of(pid: int) -> int:
    return int(_status_of(pid)["PPid"])


def _status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_after_detaching_nothing_is_reached_and_nothing_is_left(place: Site) -> None:
    await place.attach(everything=True)
    await place.egress.detach(place.name)
    before = place.open_files()
    await place.attach(everything=True)
    with place.sandbox.connect(WEB, 22) as link:
        assert link.recv(100)
        counts = await place.egress.detach(place.name)
        assert (counts.connections, counts.alive) == (1, False)
        with pytest.raises(ConnectionResetError):
            link.recv(100)
    assert place.is_refused(WEB, 22)
    assert await place.egress.detach(place.name) == EgressCounts(sandbox=place.name)
    assert place.open_files() == before
    await place.attach(everything=True)
    assert place.says(WEB, 22)


async def test_many_are_attached_at_once_and_one_that_is_detached_meanwhile_is_not(place: Site) -> None:
    await place.attach()
    before = place.open_files()
    with contextlib.ExitStack() as stack:
        spaces = [stack.enter_context(space()) for _ in range(6)]
        wanted = [place.egress.attach(f"s{n}", found.pid, found.start, None) for n, found in enumerate(spaces)]
        given_up = place.egress.detach("s5")

        *attached, last, _ = await asyncio.gather(*wanted, given_up, return_exceptions=True)

        assert [getattr(answer, "fresh", answer) for answer in attached] == [True] * 5
        assert isinstance(last, NotFoundError | AttachAnswer)  # as the two met
        assert set(await place.egress.counts()) == {place.name, *(f"s{n}" for n in range(5))}
        for number in range(5):
            await place.egress.detach(f"s{number}")
    assert place.open_files() == before


async def test_a_sandbox_that_ends_is_let_go_of(place: Site) -> None:
    await place.attach(everything=True)
    assert place.says(WEB, 22)
    place.sandbox.end()

    counts = await eventually(lambda: _ended(place))

    assert counts.connections == 1
    assert (await place.egress.detach(place.name)).connections == 1
    assert await place.egress.counts() == {}


async def _ended(place: Site) -> EgressCounts | None:
    counts = (await place.egress.counts())[place.name]
    return None if counts.alive else counts


async def test_only_a_network_of_its_own_is_taken(place: Site) -> None:
    await place.attach()
    start = place.sandbox.start
    with pytest.raises(NotFoundError):
        await place.egress.attach("other", place.sandbox.pid, start + 1, ())
    with pytest.raises(NotFoundError):
        await place.egress.attach("other", 2**31 - 1, start, ())
    with pytest.raises(InvalidArgumentError):
        await place.egress.attach("other", place.host.pid, place.host.start, ())
    with pytest.raises(CapacityError):
        await place.egress.attach("other", place.sandbox.pid, start, ())
    with pytest.raises(InvalidArgumentError):
        await place.egress.rules(place.name, (EgressRule("a b", ((1, 2),)),))
    with pytest.raises(NotFoundError):
        await place.egress.rules("other", ())
    with space() as another:
        place.sandbox = another
        assert await place.attach(everything=True)  # the sandbox has begun again: another network
        assert place.says(WEB, 22)
