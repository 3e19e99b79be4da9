"""What an operator may set about a node."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsec.backends.fncall.config import CallsConfig
from dsec.core import limits
from dsec.core.errors import InvalidArgumentError
from dsec.core.rungs import Rung
from dsec.core.spec import Substrate
from dsec.wire.egress import PRIVATE_MAX, RESOLVERS_MAX

ENDED_DIR: Final = "ended"


def _not_negative(config: object, *names: str) -> None:
    for name in names:
        if (number := getattr(config, name)) < 0:
            raise InvalidArgumentError(f"{name} must not be negative, and is {number:g}")


@dataclass(frozen=True, slots=True)
class WarmConfig:
    """Spares: instances made ahead for shapes that have been asked for twice. A shape is an environment's revision with
    what cannot be changed afterwards: memory, disk, network and privilege_gain."""

    spares_max: int = 0  # of all shapes together; 0: none are made
    low: int = 2  # of a shape that is in use
    high: int = 16  # of one for which creates have found none left; it falls back by halves
    memory_bytes_max: int = 256 * limits.MIB  # that all of them take; left free besides, or they go
    age_s_max: float = 3_600.0  # then one is made anew
    idle_s: float = 600.0  # without a create of a shape, its spares go

    def __post_init__(self) -> None:
        if not 0 <= self.spares_max <= limits.WARM_SPARES_MAX:
            raise InvalidArgumentError(f"spares_max must be between 0 and {limits.WARM_SPARES_MAX}")
        if not 1 <= self.low <= self.high:
            raise InvalidArgumentError("low must be at least 1, and high at least low")
        if self.memory_bytes_max < 0 or self.age_s_max <= 0 or self.idle_s <= 0:
            raise InvalidArgumentError("memory_bytes_max must not be negative, age_s_max and idle_s must be above 0")


@dataclass(frozen=True, slots=True)
class IdleConfig:
    """What becomes of sandboxes that nobody uses, each after so long without use; 0: never. Use brings them back."""

    pause_s: float = 0.0  # it is paused; 0: nor does the rest happen
    page_out_s: float = 0.0  # its memory goes to swap, where the host has any
    sleep_s: float = 0.0  # its memory goes to the disk, as in a deep pause: of machines
    resume_wait_s: float = 10.0  # for memory, of what has given its own back; then a resume fails

    def __post_init__(self) -> None:
        later = [after for after in (self.page_out_s, self.sleep_s) if after]
        _not_negative(self, "pause_s", "page_out_s", "sleep_s", "resume_wait_s")
        if later and (not self.pause_s or [self.pause_s, *later] != sorted([self.pause_s, *later])):
            raise InvalidArgumentError(
                "an idle sandbox is paused before its memory goes to swap, and that before it goes to the disk",
                hint="pause_s <= page_out_s <= sleep_s",
            )

    @property
    def ladder(self) -> tuple[tuple[float, Rung], ...]:
        after = ((self.pause_s, Rung.PAUSE), (self.page_out_s, Rung.PAGE_OUT), (self.sleep_s, Rung.SLEEP))
        return tuple((after_s, rung) for after_s, rung in after if after_s)


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """What nothing needs any more is removed by `dsec gc`, and by the node when its disk is short of room."""

    free_bytes_min: int = 4 * limits.GIB  # with less free the node collects by itself, caches too; 0: never
    record_keep_s: float = 7 * 86_400.0  # what the name of an environment stood for before it was replaced
    blob_keep_s: float = 7 * 86_400.0  # of images from registries, since their last use
    blob_bytes_max: int = limits.IMAGE_CACHE_BYTES_DEFAULT

    def __post_init__(self) -> None:
        _not_negative(self, "free_bytes_min", "record_keep_s", "blob_keep_s", "blob_bytes_max")


@dataclass(frozen=True, slots=True)
class EgressConfig:
    """Of sandboxes with network `proxied`."""

    offered: bool = True  # False: none are made
    private: tuple[str, ...] = ()  # networks that are not public, and that rules of sandboxes may name all the same
    resolvers: tuple[str, ...] = ()  # who is asked for names, as ADDRESS or ADDRESS:PORT; none: as the host does

    def __post_init__(self) -> None:
        if len(self.private) > PRIVATE_MAX or len(self.resolvers) > RESOLVERS_MAX:
            raise InvalidArgumentError(
                f"egress has at most {PRIVATE_MAX} networks in private, and {RESOLVERS_MAX} resolvers"
            )
        for network in self.private:
            _check_network(network)
        for resolver in self.resolvers:
            _check_resolver(resolver)


def _check_network(text: str) -> None:
    """The forwarder takes these, and no other spelling of them."""
    try:
        network = ipaddress.ip_network(text)
        slash, bits = text.partition("/")[1:]
        mapped = isinstance(network, ipaddress.IPv6Network) and network.network_address.ipv4_mapped is not None
        if "%" in text or mapped or (slash and bits != str(network.prefixlen)):
            raise ValueError
    except ValueError as error:
        raise InvalidArgumentError(
            f"{text[:60]!r} in egress.private is no network", hint="such as 10.1.0.0/16"
        ) from error


def _check_resolver(text: str) -> None:
    host, port = text, "53"
    if text.startswith("["):
        host, _, port = text[1:].partition("]:")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        ipaddress.ip_address(host)
        if "%" in host or not (port.isascii() and port.isdecimal()) or not 1 <= int(port) <= 65_535:
            raise ValueError
    except ValueError as error:
        raise InvalidArgumentError(
            f"{text[:60]!r} in egress.resolvers is no address", hint="such as 9.9.9.9, 10.0.0.2:5353 or [fd00::2]:53"
        ) from error


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """`state_dir` outlives a restart of the host, `run_dir` does not. Both belong to one node."""

    state_dir: Path
    run_dir: Path
    substrates: frozenset[Substrate] = field(default_factory=lambda: frozenset({Substrate.CONTAINER}))
    sandboxes_max: int = limits.SANDBOXES_PER_NODE_MAX
    # Promised memory over the machine's. Most sandboxes wait for a model and use little of their limit: what decides is
    # what is really left. All together are held to the machine's memory; this only keeps promises from being absurd.
    memory_overcommit: float = 200.0
    memory_available_bytes_min: int = limits.MEMORY_AVAILABLE_BYTES_MIN
    disk_free_bytes_min: int = limits.DISK_FREE_BYTES_MIN
    records_bytes_max: int = limits.RECORDS_BYTES_MAX  # output kept of one sandbox, over all its execs
    ended_records_bytes_max: int = limits.ENDED_RECORDS_BYTES_MAX  # kept for a day of all that ended; 0: nothing
    pause_deadline_s: float = 10.0
    creates_at_once_max: int = 64  # beyond, they wait their turn: a burst must not starve what runs
    adopts_at_once_max: int = 32
    residue: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # rules of publishing, beside and instead of ours
    snapshot_freeze_s: float = 30.0  # a sandbox that stands still for longer goes on, and its snapshot has failed
    warm: WarmConfig = WarmConfig()
    collect: CollectConfig = CollectConfig()
    idle: IdleConfig = IdleConfig()
    egress: EgressConfig = EgressConfig()
    datasets: Mapping[str, Path] = field(default_factory=dict)  # directories of the host that sandboxes may read
    calls: CallsConfig = field(default_factory=CallsConfig)
    labels: Mapping[str, str] = field(default_factory=dict)  # what `place.labels` of a sandbox must agree with

    def __post_init__(self) -> None:
        if not 1 <= self.sandboxes_max <= limits.SANDBOXES_PER_NODE_MAX:
            raise InvalidArgumentError(f"sandboxes_max must be between 1 and {limits.SANDBOXES_PER_NODE_MAX}")
        if not 0.1 <= self.memory_overcommit <= 1_000:
            raise InvalidArgumentError("memory_overcommit must be between 0.1 and 1000")
        _not_negative(
            self,
            "memory_available_bytes_min",
            "disk_free_bytes_min",
            "records_bytes_max",
            "ended_records_bytes_max",
        )
        if self.creates_at_once_max < 1 or self.adopts_at_once_max < 1 or self.pause_deadline_s <= 0:
            raise InvalidArgumentError("creates_at_once_max, adopts_at_once_max and pause_deadline_s must be above 0")

        if not 0 < self.snapshot_freeze_s <= limits.SNAPSHOT_FREEZE_S_MAX:
            raise InvalidArgumentError(
                f"snapshot_freeze_s must be above 0 and at most {limits.SNAPSHOT_FREEZE_S_MAX:g}"
            )

    @property
    def journal_path(self) -> Path:
        return self.state_dir / "journal.db"

    @property
    def snapshots_dir(self) -> Path:
        return self.state_dir / "snapshots"

    @property
    def records_dir(self) -> Path:
        """Of execs and their output. Apart from what backends keep below the same state directory."""
        return self.state_dir / "records"

    @property
    def records_ahead_dir(self) -> Path:
        """Empty directories that will be renamed into `records_dir`."""
        return self.state_dir / "records.ahead"

    @property
    def ended_dir(self) -> Path:
        """What there was in `records_dir` of sandboxes that have ended."""
        return self.state_dir / ENDED_DIR
