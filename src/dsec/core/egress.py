"""What a sandbox with network `proxied` may reach: rules as text that people write, and as what they mean. Pure.

    packages.example                 a name, at ports 80 and 443
    *.mirror.example:80              every name below it, at whatever depth, but not mirror.example itself
    10.1.0.0/16:5432                 addresses; IPv6 with ports is in brackets: [2001:db8::/32]:443
    files.example:8000-8010,9000     ranges and lists of ports; :* is every port

All of it is TCP. A rule says what may be reached, and never more than its text: what is not plainly one of these
is refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError

_DEFAULT: Final = ((80, 80), (443, 443))
_EVERY: Final = ((1, 65_535),)
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# What resolvers and browsers take for an address, in one of its many spellings: 0x7f.1, 2130706433.
_NUMBER: Final = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)")
_PORTS: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_NAME_MAX: Final = 253  # of the domain name system
_LABELS_MAX: Final = 32  # names of hosts have fewer, and the forwarder asks after none with more
_SHOWN: Final = 80
_HINT: Final = "such as packages.example, *.mirror.example:80, 10.1.0.0/16:5432 or [2001:db8::/32]:443"

Ports = tuple[tuple[int, int], ...]


class EgressRule(msgspec.Struct, frozen=True):
    """`host`: a name, `*.` and a name, or a network in CIDR notation. `ports`: ascending, apart from each other."""

    host: str
    ports: Ports = _DEFAULT

    @property
    def by_address(self) -> bool:
        return "/" in self.host

    def __str__(self) -> str:
        host = self.host
        if self.by_address:
            network = ipaddress.ip_network(host)
            host = str(network.network_address) if network.prefixlen == network.max_prefixlen else host
        if self.ports == _DEFAULT:
            return host
        return f"[{host}]:{_ports_text(self.ports)}" if ":" in host else f"{host}:{_ports_text(self.ports)}"


def parse_egress_rule(text: str) -> EgressRule:
    """Raises InvalidArgumentError, LimitError."""
    if not isinstance(text, str):
        raise InvalidArgumentError(f"a rule of egress must be text, not {type(text).__name__}", hint=_HINT)
    if len(text) > limits.EGRESS_RULE_BYTES_MAX:
        raise LimitError(f"a rule of egress has at most {limits.EGRESS_RULE_BYTES_MAX} bytes")
    if not text.isascii():
        raise _refused(text, "is not plain ASCII", "write such a name as it is looked up: xn--…")
    if "://" in text:
        raise _refused(text, "is a URL, and a rule is a host with ports")
    host, ports = _split(text)
    return EgressRule(_host(host, text), _parse_ports(ports, text))


def parse_egress(texts: Iterable[str]) -> tuple[EgressRule, ...]:
    """Each rule once, in its order. Raises InvalidArgumentError, LimitError."""
    rules = tuple(dict.fromkeys(parse_egress_rule(text) for text in texts))
    if len(rules) > limits.EGRESS_RULES_MAX:
        raise LimitError(f"at most {limits.EGRESS_RULES_MAX} rules of egress, not {len(rules)}")
    return rules


def plain_egress(texts: Iterable[str] | None) -> tuple[str, ...] | None:
    """The same rules as they are stored and shown: two that mean one thing are one text."""
    return None if texts is None else tuple(map(str, parse_egress(texts)))


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            raise _refused(text, "is no rule of egress")
        return host, rest[1:] if rest else None
    if text.count(":") > 1:
        return text, None  # an IPv6 address, which has no ports without brackets
    host, colon, ports = text.partition(":")
    return host, ports if colon else None


def _host(host: str, text: str) -> str:
    if "/" in host or ":" in host or _is_number(host):
        return _network(host, text)
    name = host.lower().removesuffix(".")
    suffix = name.removeprefix("*.")
    labels = suffix.split(".")
    if suffix == "*":
        raise _refused(text, "names nothing", "to allow everything public, leave egress out")
    if len(suffix) > _NAME_MAX or len(labels) > _LABELS_MAX or not all(map(_LABEL.fullmatch, labels)):
        raise _refused(text, "is neither a name nor an address")
    if labels[-1][0].isdigit():  # no name of the internet ends so
        raise _refused(text, "may be taken for an address", "write an address as four numbers")
    if labels[-1] == "localhost":
        raise _refused(text, "is the sandbox itself", "its loopback needs no rule")
    return name


def _is_number(host: str) -> bool:
    """Whether its last part is one: no name of the domain name system ends so."""
    return _NUMBER.fullmatch(host.lower().removesuffix(".").rpartition(".")[2]) is not None


def _network(host: str, text: str) -> str:
    address, slash, prefix = host.partition("/")
    try:
        first = ipaddress.ip_address(address)
        network = ipaddress.ip_network(host, strict=False)
    except ValueError as error:
        raise _refused(text, "is neither a name nor an address") from error
    if "%" in host or (slash and prefix != str(network.prefixlen)):
        raise _refused(text, "is neither a name nor an address", "a prefix is a number: 10.0.0.0/8")
    if network.network_address != first:
        raise _refused(text, "has bits beyond its prefix", f"it lies in {network}, which would be more")
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        raise _refused(text, "is an IPv4 address in disguise", "write it as IPv4")
    for own, what in _NEVER:
        if network.version == own.version and network.subnet_of(own):  # type: ignore[arg-type]
            raise _refused(
                text,
                f"is {what}, and never reached through the proxy",
                "leave it out (the sandbox's own loopback needs no rule)",
            )
    return str(network)


_MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")
_NEVER: Final = (
    (ipaddress.ip_network("127.0.0.0/8"), "the sandbox's own loopback"),
    (ipaddress.ip_network("::1/128"), "the sandbox's own loopback"),
    (ipaddress.ip_network("0.0.0.0/32"), "no address of anything"),
    (ipaddress.ip_network("::/128"), "no address of anything"),
    (ipaddress.ip_network("224.0.0.0/4"), "multicast"),
    (ipaddress.ip_network("ff00::/8"), "multicast"),
)


def _parse_ports(text: str | None, rule: str) -> Ports:
    if text is None:
        return _DEFAULT
    if text == "*":
        return _EVERY
    found = []
    for part in text.split(","):
        match = _PORTS.fullmatch(part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= 65_535:
            raise _refused(rule, "has ports that are none", "such as :443, :8000-8010,9000, or :* for every port")
        found.append((low, high))
    if len(found) > limits.EGRESS_PORT_RANGES_MAX:
        raise LimitError(f"a rule of egress has at most {limits.EGRESS_PORT_RANGES_MAX} ranges of ports")
    merged: list[tuple[int, int]] = []
    for low, high in sorted(found):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _ports_text(ports: Ports) -> str:
    if ports == _EVERY:
        return "*"
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ports)


def _refused(text: str, what: str, hint: str = _HINT) -> InvalidArgumentError:
    return InvalidArgumentError(f"{text[:_SHOWN]!r} {what}", hint=hint)
