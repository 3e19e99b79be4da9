"""Rules of what a sandbox reaches: they mean what they say, in one spelling, and what is not plainly a rule is none."""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.core import limits
from dsec.core.egress import EgressRule, parse_egress, parse_egress_rule, plain_egress
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.spec import Environment, NetworkMode, SandboxSpec
from dsec.wire.codec import pack, unpack
from dsec.wire.egress import PORT_RANGES_MAX, RULES_MAX
from dsec.wire.records import EgressRequest

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
labels = st.builds(
    lambda first, middle, last: first + middle + last,
    st.sampled_from(_LETTERS[:52]),
    st.text(_LETTERS + "-_", max_size=20),
    st.sampled_from(_LETTERS[:52]),
)
names = st.builds(
    lambda star, parts, dot: star + ".".join(parts) + dot,
    st.sampled_from(("", "*.")),
    st.lists(labels, min_size=2, max_size=5).filter(lambda parts: parts[-1].lower() != "localhost"),
    st.sampled_from(("", ".")),
)
ports = st.lists(
    st.tuples(st.integers(1, 65_535), st.integers(1, 65_535)).map(lambda pair: (min(pair), max(pair))),
    min_size=1,
    max_size=limits.EGRESS_PORT_RANGES_MAX,
)
networks = st.one_of(
    st.tuples(st.integers(1 << 24, 0xDFFFFFFF), st.integers(1, 32)).map(
        lambda pair: ipaddress.ip_network(pair, strict=False)
    ),
    st.tuples(st.integers(0x2000 << 112, (0x4000 << 112) - 1), st.integers(3, 128)).map(
        lambda pair: ipaddress.ip_network(pair, strict=False)
    ),
).filter(lambda network: not network.overlaps(ipaddress.ip_network("127.0.0.0/8" if network.version == 4 else "::1")))


def _ports_text(found: list[tuple[int, int]]) -> str:
    return ",".join(f"{low}-{high}" for low, high in found)


def _allowed(rule: EgressRule) -> set[int]:
    return {port for low, high in rule.ports for port in range(low, high + 1)}


@settings(max_examples=25)  # sets of ports are large
@given(names, ports)
def test_a_name_with_ports_is_that_name_in_small_letters_and_these_ports(name: str, given_ports: Any) -> None:
    rule = parse_egress_rule(f"{name}:{_ports_text(given_ports)}")

    assert rule.host == name.lower().removesuffix(".")
    assert _allowed(rule) == {port for low, high in given_ports for port in range(low, high + 1)}
    assert all(low <= high for low, high in rule.ports)
    assert all(one[1] + 1 < other[0] for one, other in zip(rule.ports, rule.ports[1:], strict=False))
    assert not rule.by_address


@given(networks, st.none() | ports)
def test_a_network_is_exactly_that_network(network: Any, given_ports: Any) -> None:
    text = str(network) if network.version == 4 else f"[{network}]"
    rule = parse_egress_rule(text if given_ports is None else f"{text}:{_ports_text(given_ports)}")

    assert ipaddress.ip_network(rule.host) == network
    assert rule.by_address
    if given_ports is None:
        assert _allowed(rule) == {80, 443}


@given(networks, st.integers(1, 7))
def test_bits_beyond_the_prefix_are_refused(network: Any, more: int) -> None:
    if network.prefixlen == network.max_prefixlen:
        return
    host = network.network_address + min(more, network.num_addresses - 1)
    with pytest.raises(InvalidArgumentError, match="beyond its prefix"):
        parse_egress_rule(f"{host}/{network.prefixlen}")


@given(st.one_of(names, networks.map(str)), st.none() | ports)
def test_what_is_shown_of_a_rule_is_the_rule(host: str, given_ports: Any) -> None:
    shown = f"[{host}]" if ":" in host else host
    rule = parse_egress_rule(shown if given_ports is None else f"{shown}:{_ports_text(given_ports)}")

    assert parse_egress_rule(str(rule)) == rule
    assert plain_egress([str(rule)]) == (str(rule),)


@given(st.text(max_size=40) | st.text("abc019.*:/-[]xX, \n\0%@", max_size=24))
def test_no_text_means_more_than_it_says(text: str) -> None:
    """What is taken is ASCII without blanks, and a name in it is a name of its own text."""
    try:
        rule = parse_egress_rule(text)
    except (InvalidArgumentError, LimitError):
        return
    assert text.isascii()
    assert not set(text) & set(" \n\0%@\\")
    assert parse_egress_rule(str(rule)) == rule
    if rule.by_address:
        address, _, prefix = text.strip("[").partition("]")[0].partition("/")
        address = address if address.count(":") > 1 else address.partition(":")[0]
        assert ipaddress.ip_network(rule.host).network_address == ipaddress.ip_address(address)
        assert prefix or ipaddress.ip_network(rule.host).num_addresses == 1
    else:
        assert text.lower().startswith(rule.host)


@pytest.mark.parametrize(
    "text",
    ["", ".", "*", "*.", "*.*.org", "a..b", "a.b..", "-a.b", "a-.b", f"{'a' * 64}.b", f"{'a.' * 127}toolong", "a b",
     "http://a.b", "a.b/c", "user@a.b", "a.b:", "a.b:0", "a.b:65536", "a.b:9-8", "a.b:80-", "a.b:+80", "a.b:80,",
     "a.b:http", "[a.b]:80", "[::2", "[::2]80", "1.2.3", "0x7f.1", "a.0x1f", "2130706433", "010.1.1.1", "1.2.3.4/33",
     "1.2.3.0/255.255.255.0", "10.0.0.0/08", "*.1.2.3.4", "fe80::1%eth0", "::ffff:10.0.0.1", "127.0.0.1",
     "127.1.0.0/16", "::1", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "localhost", "db.localhost", "bücher.example",
     "a.b:\uff18", "\uff41.b", "a.3com", "*.9z", "1-2", ".".join("a" * 33), "*." + ".".join("a" * 33)],
)  # fmt: skip
def test_what_is_not_plainly_a_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_egress_rule(text)


def test_what_means_the_same_is_one_rule() -> None:
    assert plain_egress(
        ["Packages.example.", "packages.example:443,80", "packages.example", "1.2.3.4/32:*", "1.2.3.4:1-65535"]
    ) == (
        "packages.example",
        "1.2.3.4:*",
    )


def test_rules_are_bounded() -> None:
    many = [f"host{number}.example" for number in range(limits.EGRESS_RULES_MAX + 1)]
    assert len(parse_egress(many[:-1])) == limits.EGRESS_RULES_MAX
    for texts in (many, ["a.b:" + ",".join(map(str, range(1, 99, 3)))], ["a" * (limits.EGRESS_RULE_BYTES_MAX + 1)]):
        with pytest.raises(LimitError):
            parse_egress(texts)
    assert limits.EGRESS_RULES_MAX <= RULES_MAX
    assert limits.EGRESS_PORT_RANGES_MAX <= PORT_RANGES_MAX


def test_a_spec_has_rules_only_with_a_network_that_knows_them() -> None:
    environment = Environment("base")
    spec = SandboxSpec(
        environment=environment, network=NetworkMode.PROXIED, egress=("Packages.example", "packages.example")
    )

    assert spec.egress == ("packages.example",)
    assert unpack(pack(spec), SandboxSpec) == spec
    assert unpack(pack(SandboxSpec(environment=environment)), dict).keys() == {"environment"}
    with pytest.raises(InvalidArgumentError, match="network proxied"):
        SandboxSpec(environment=environment, egress=())
    assert msgspec.structs.asdict(EgressRequest(egress=["A.example:443,80"])) == {"egress": ["a.example"]}
    assert EgressRequest(egress=None).egress is None
