"""The contract between a node and `dsec-egress`; twin of native/egress/src/wire.rs.

SOCK_SEQPACKET, one msgpack map a message. `docs/internals/egress.md` says what each operation does.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

EGRESS_VERSION: Final = 1
MESSAGE_BYTES_MAX: Final = 128 * 1024
RULES_MAX: Final = 256  # of one sandbox: with names of 253 bytes they fit a message
PORT_RANGES_MAX: Final = 16  # of one rule
RESOLVERS_MAX: Final = 4  # each is asked in turn
PRIVATE_MAX: Final = 64  # ranges that an operator opens

# What a sandbox's own network namespace looks like once it is attached. All are of ranges that are never routed.
OWN_ADDRESS: Final = "198.18.0.1"  # the sandbox's own, beside loopback: what it calls from
OWN_ADDRESS_6: Final = "fd64:7365:6300::1"
NAMESERVER: Final = "198.18.0.53"  # for resolv.conf; any other address answers port 53 as well


class EgressOp(enum.StrEnum):
    HELLO = "hello"  # HelloArgs → HelloAnswer
    ATTACH = "attach"  # AttachArgs → AttachAnswer; again: rules are replaced, connections that they allow go on
    RULES = "rules"  # RulesArgs → {}
    DETACH = "detach"  # DetachArgs → EgressCounts, the last ones; zeros for one that it does not know
    COUNTS = "counts"  # CountsArgs → CountsAnswer
    SHUTDOWN = "shutdown"  # {} → {}


class EgressRequest(msgspec.Struct, frozen=True):
    id: int
    op: str
    args: Any


class EgressFailure(msgspec.Struct, frozen=True):
    code: str  # host | invalid | not_found | busy
    message: str


class EgressDenied(msgspec.Struct, frozen=True, kw_only=True):
    """Refused, `count` times since it was told last."""

    sandbox: str
    target: str  # the name that was asked for, or the address; what a sandbox says, bounded, printable ASCII
    port: int  # 0 for a question after a name
    protocol: str  # tcp | dns
    reason: str  # DeniedReason
    count: int


class EgressReply(msgspec.Struct, frozen=True):
    """Either `ok` or `error` for a request; or, with id 0, something that was `denied`."""

    id: int
    ok: Any = None
    error: EgressFailure | None = None
    denied: EgressDenied | None = None


class DeniedReason(enum.StrEnum):
    RULES = "rules"  # no rule allows it
    PRIVATE = "private"  # an address that is not public, and not opened by operator and rules
    OTHER_NAME = "other_name"  # it went to an allowed address, and named somebody else there (TLS, HTTP)
    UNREADABLE = "unreadable"  # what should name the host there is malformed, or did not come in time
    CONNECTIONS = "connections"  # too many at once
    MEMORY = "memory"  # its connections hold too much in the host's kernel; also one that was cut for it
    RATE = "rate"  # too many connections or questions a second
    MORE = "more"  # others, of which there were too many to be told one by one


class HelloArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The newest node's words hold for all sandboxes. Seconds are a fraction where tests want it."""

    version: int = EGRESS_VERSION
    resolvers: tuple[str, ...] = ()  # "ADDRESS" or "ADDRESS:PORT" ("[ADDRESS]:PORT"); none: the host's resolv.conf
    private: tuple[str, ...] = ()  # ranges that rules may open although they are not public
    binding_s: float = 30.0  # an answer's addresses stay open for its TTL, at least this long, and this long more
    peek_s: float = 10.0  # until a connection must have said whom it wants
    dial_s: float = 15.0
    idle_s: float = 3600.0  # a connection on which nothing moves


class HelloAnswer(msgspec.Struct, frozen=True):
    version: int
    pid: int


class EgressRule(msgspec.Struct, frozen=True):
    """Connections by TCP to these ports of a host. Also what may be asked after, when it is a name."""

    host: str  # exact name | *.suffix (not the suffix itself) | * (any name) | ADDRESS | ADDRESS/BITS
    ports: tuple[tuple[int, int], ...]  # first and last, both included


class AttachArgs(msgspec.Struct, frozen=True, kw_only=True):
    sandbox: str
    pid: int  # a process in the network namespace
    start: int  # its start in ticks (field 22 of /proc/PID/stat)
    rules: tuple[EgressRule, ...] | None = None  # None: everything that is public
    connections: int = 0  # at once; 0: as many as the program finds right


class AttachAnswer(msgspec.Struct, frozen=True):
    fresh: bool  # False: it was there already, in that namespace
    ipv6: bool


class RulesArgs(msgspec.Struct, frozen=True, kw_only=True):
    sandbox: str
    rules: tuple[EgressRule, ...] | None = None


class DetachArgs(msgspec.Struct, frozen=True):
    sandbox: str


class CountsArgs(msgspec.Struct, frozen=True):
    after: str = ""  # the last one of the page before


class EgressCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Since this program has the sandbox: one that follows a dead one begins at zero."""

    sandbox: str
    alive: bool = False  # its process runs; one that has ended is kept for its counts until it is detached
    up_bytes: int = 0
    down_bytes: int = 0
    connections: int = 0  # that were let through
    open: int = 0  # now
    questions: int = 0  # after names, that were asked on
    denied: int = 0


class CountsAnswer(msgspec.Struct, frozen=True):
    sandboxes: list[EgressCounts]  # in the order of their names
    more: bool = False
