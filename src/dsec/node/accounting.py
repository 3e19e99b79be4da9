"""What a sandbox has used: for its owner's account."""

from __future__ import annotations

from dsec.backends.base import InstanceUsage
from dsec.core.limits import GIB
from dsec.wire.records import Usage


class UsageMeter:
    """Sums up samples. Memory between two samples counts as their mean; while frozen it counts on."""

    __slots__ = (
        "_at", "_cpu_before_s", "_disk_full", "_memory_bytes", "_oom_kills_before", "_received", "_sent", "cpu_s",
        "memory_gib_s", "oom_kills",
    )  # fmt: skip

    def __init__(self, now: float, *, memory_gib_s: float = 0.0) -> None:
        self.cpu_s = 0.0
        self.memory_gib_s = memory_gib_s
        self.oom_kills = 0
        self._at = now
        self._memory_bytes: int | None = None
        self._cpu_before_s = 0.0  # of instances that were replaced
        self._oom_kills_before = 0
        self._disk_full = False
        self._sent = Climbing()
        self._received = Climbing()

    def note_traffic(self, sent: int, received: int) -> tuple[int, int]:
        """As its forwarder has counted them; what is new since the last time."""
        return self._sent.note(sent), self._received.note(received)

    @property
    def memory_bytes(self) -> int:
        """As it was last measured."""
        return self._memory_bytes or 0

    def sample(self, usage: InstanceUsage, now: float) -> None:
        """`now` is monotonic."""
        if usage.cpu_s is not None:
            self.cpu_s = max(self.cpu_s, self._cpu_before_s + usage.cpu_s)
        if usage.oom_kills is not None:
            self.oom_kills = max(self.oom_kills, self._oom_kills_before + usage.oom_kills)
        self._disk_full = usage.disk_full
        if usage.memory_bytes is not None:
            before = usage.memory_bytes if self._memory_bytes is None else self._memory_bytes
            elapsed = max(0.0, now - self._at)
            self.memory_gib_s += (before + usage.memory_bytes) / 2 / GIB * elapsed
            self._memory_bytes = usage.memory_bytes
        self._at = now

    def limit_hit(self, oom_kills_before: int, layer: str | None = None) -> str | None:
        """Which limit of its sandbox an exec that has failed since then ran into, as a cause of its end.

        `layer`: what its layers gave instead of content meanwhile. A full disk is a state, and may be an old one.
        """
        if self.oom_kills > oom_kills_before:
            return "oom"
        return layer or ("disk_full" if self._disk_full else None)

    def begin_anew(self) -> None:
        """Another instance counts from nothing; what the one before has used stays counted."""
        self._cpu_before_s, self._oom_kills_before = self.cpu_s, self.oom_kills
        self._memory_bytes = None

    def record(self, *, lived_s: float, frozen_s: float, output_bytes: int = 0) -> Usage:
        return Usage(
            cpu_s=self.cpu_s,
            memory_gib_s=self.memory_gib_s,
            frozen_s=max(0.0, frozen_s),
            lived_s=max(0.0, lived_s),
            output_bytes=output_bytes,
            sent_bytes=self._sent.total,
            received_bytes=self._received.total,
        )


class Climbing:
    """A count that somebody else keeps, who may begin again at nothing."""

    __slots__ = ("_last", "total")

    def __init__(self) -> None:
        self._last = 0
        self.total = 0

    def note(self, count: int) -> int:
        """What is new."""
        new = count - self._last if count >= self._last else count
        self._last = count
        self.total += new
        return new
