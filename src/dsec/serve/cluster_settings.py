"""What an operator may set of a machine that is part of a cluster."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from dsec.cluster.placement import Burst
from dsec.core import limits
from dsec.core.errors import InvalidArgumentError
from dsec.core.spec import Substrate, check_labels
from dsec.core.units import parse_size
from dsec.iam.projects import parse_project

METRICS_DEFAULT: Final = "127.0.0.1:7374"
_SERVER: Final = re.compile(r"(?:nats|tls)://[A-Za-z0-9_.:\[\]-]+\Z")
_PLACE: Final = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[A-Za-z0-9.-]+)):(?P<port>[0-9]{1,5})\Z")


class BurstSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nodes with the label `pool` of this value take only what a rule sends there: sandboxes whose environment they
    have, while the other nodes together are fuller than `above`."""

    pool: str
    above: float = 0.8  # of their room, in what the sandbox asks for most of
    substrates: tuple[Substrate, ...] = ()  # only of these; none: all
    labels: dict[str, str] = {}  # only sandboxes that have them
    projects: tuple[str, ...] = ()  # only of these and those below; none: all

    def __post_init__(self) -> None:
        if not self.pool:
            raise InvalidArgumentError("a burst rule names the pool of nodes")
        if not 0 <= self.above <= 1:
            raise InvalidArgumentError("above is a part of the room, between 0 and 1")
        check_labels(self.labels)
        for project in self.projects:
            parse_project(project)

    def rule(self) -> Burst:
        substrates = frozenset(map(str, self.substrates)) or None
        return Burst(self.pool, self.above, substrates, self.labels, self.projects)


class ClusterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `dsec api`, `dsec node` and `dsec watcher`; `dsec up` is a machine alone, and uses nothing of it."""

    servers: tuple[str, ...] = ()  # of NATS: tls://HOST:PORT each
    identity: str = "/etc/dsec/identity"  # directory that `dsec cluster issue` has made for this machine
    replicas: int = 1  # of shared state in NATS: 3 with three servers or more
    log_bytes_max: int | str = limits.LOG_BYTES_DEFAULT  # of each stream of events and trajectories in NATS
    listen: str = "0.0.0.0:7373"  # where a node listens for API replicas
    advertise: str | None = None  # HOST:PORT at which they reach it; none: where it listens
    labels: dict[str, str] = {}  # of a node
    bursts: dict[str, BurstSettings] = {}  # of a replica, under any names: what overflows to another pool of nodes
    metrics: str | None = METRICS_DEFAULT  # HOST:PORT at which a node or a watcher has /metrics; none: nowhere

    def __post_init__(self) -> None:
        for server in self.servers:
            if not _SERVER.match(server):
                raise InvalidArgumentError(f"{server[:80]!r} is not a NATS server", hint="such as tls://nats-1:4222")
        if self.replicas not in (1, 3, 5):
            raise InvalidArgumentError("replicas must be 1, 3 or 5")
        if parse_size(self.log_bytes_max, "log_bytes_max") < 16 * limits.MIB:
            raise InvalidArgumentError("log_bytes_max must be at least 16MiB")
        check_labels(self.labels)
        host_port(self.listen)
        if self.metrics is not None:
            host_port(self.metrics)
        if self.advertise is not None:
            host_port(self.advertise)

    def check_servers(self) -> None:
        """Raises InvalidArgumentError: without a name the client of NATS looks for one for ever."""
        if not self.servers:
            raise InvalidArgumentError(
                "no NATS server is named",
                hint="--join tls://HOST:4222, DSEC_JOIN, or cluster.servers in the configuration",
            )

    def log_size(self) -> int:
        return parse_size(self.log_bytes_max, "log_bytes_max")


def host_port(text: str) -> tuple[str, int]:
    """Raises InvalidArgumentError."""
    found = _PLACE.match(text)
    if not found or int(found["port"]) > 65_535:
        raise InvalidArgumentError(f"{text[:80]!r} is not HOST:PORT", hint="such as 10.0.0.5:7373")
    return found["v6"] or found["host"], int(found["port"])
