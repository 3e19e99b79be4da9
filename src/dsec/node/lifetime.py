"""When a sandbox's time is over: time to live since start, and since it was last in use; and when what nobody uses is
to take less of its node. Pure, on given clocks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dsec.core.clock import Clock
from dsec.core.rungs import Rung
from dsec.core.states import EndCause
from dsec.node.rows import SandboxRow


class Lifetime:
    """Monotonic inside; wall time in and out, for callers and the journal. Stands still while paused (ruling 18); of
    one that rests (nobody has asked for its pause) being idle goes on."""

    __slots__ = (
        "_activities",
        "_climbed",
        "_clock",
        "_idle_since",
        "_idle_since_wall",
        "_ladder",
        "_paused_at",
        "_running_until",
        "resting",
        "ttl_idle_s",
    )

    def __init__(
        self,
        clock: Clock,
        *,
        running_left_s: float | None,
        ttl_idle_s: float | None,
        ladder: Sequence[tuple[float, Rung]] = (),
    ) -> None:
        """`ladder`: what happens after how long without use, in order."""
        self._clock = clock
        self._ladder = ladder
        self._climbed = 0  # rungs, since it was in use
        self.resting = False
        now = clock.monotonic_s()
        self.ttl_idle_s = ttl_idle_s
        self._running_until = None if running_left_s is None else now + running_left_s
        self._activities = 0
        self._idle_since = now
        self._idle_since_wall = clock.wall_s()
        self._paused_at: float | None = None

    @classmethod
    def of_row(cls, row: SandboxRow, clock: Clock, ladder: Sequence[tuple[float, Rung]] = ()) -> Lifetime:
        """As the journal of the same boot has it. Time that the node was away counts; being idle begins anew."""
        left = row.running_left_s
        if left is None and row.running_until is not None:
            left = max(0.0, row.running_until - clock.monotonic_s())
        lifetime = cls(clock, running_left_s=left, ttl_idle_s=row.ttl_idle_s, ladder=ladder)
        if row.paused_at is not None:
            lifetime.pause(resting=row.resting)
        return lifetime

    @property
    def busy(self) -> bool:
        return self._activities > 0

    @property
    def is_idle(self) -> bool:
        """Nobody uses it, and nobody has paused it."""
        return not self.busy and (self.resting or self._paused_at is None)

    @property
    def idle_since_wall(self) -> float | None:
        return None if self.busy else self._idle_since_wall

    def begin(self) -> None:
        """An exec, session input, connection or operation of a caller begins."""
        self._activities += 1

    def finish(self) -> bool:
        """It is over. True when the sandbox is idle now."""
        self._activities -= 1
        if self._activities == 0:
            self.touch()
        return self._activities == 0

    def touch(self) -> None:
        self._idle_since = self._clock.monotonic_s()
        self._idle_since_wall = self._clock.wall_s()
        self._climbed = 0

    def climb(self) -> None:
        """That rung was tried: the next one is next, until it is used."""
        self._climbed += 1

    def set(self, *, running_left_s: float | None, ttl_idle_s: float | None) -> None:
        now = self._clock.monotonic_s() if self._paused_at is None else self._paused_at
        self._running_until = None if running_left_s is None else now + running_left_s
        self.ttl_idle_s = ttl_idle_s
        self.touch()

    def pause(self, *, resting: bool = False) -> None:
        """Also of one that rests: from then on somebody wants it paused."""
        self.resting = resting
        if self._paused_at is None:
            self._paused_at = self._clock.monotonic_s()

    def resume(self) -> float:
        """Returns how long it was paused."""
        if self._paused_at is None:
            return 0.0
        paused_s = self._clock.monotonic_s() - self._paused_at
        self._paused_at = None
        if self.resting:
            self.resting = False
            self.touch()
        else:
            self._idle_since += paused_s
        if self._running_until is not None:
            self._running_until += paused_s
        return paused_s

    @property
    def running_left_s(self) -> float | None:
        """Without a time to live: None."""
        if self._running_until is None:
            return None
        now = self._clock.monotonic_s() if self._paused_at is None else self._paused_at
        return max(0.0, self._running_until - now)

    def next_deadline(self) -> tuple[float, EndCause | Rung] | None:
        """The moment (monotonic) at which it is over, or takes a rung, unless something happens before; None: never, as
        things are."""
        paused = self._paused_at is not None
        moments: list[tuple[float, EndCause | Rung]] = []
        if self._running_until is not None and not paused:
            moments.append((self._running_until, EndCause.TTL_RUNNING))
        if self.is_idle:
            if self.ttl_idle_s is not None:
                moments.append((self._idle_since + self.ttl_idle_s, EndCause.TTL_IDLE))
            if self._climbed < len(self._ladder):
                after_s, rung = self._ladder[self._climbed]
                moments.append((self._idle_since + after_s, rung))
        return min(moments, key=lambda moment: moment[0]) if moments else None


def resumed_row(row: SandboxRow, lifetime: Lifetime, now: float) -> tuple[SandboxRow, float]:
    """Lets a paused lifetime go on. The row as it is then, and for how long it stood still."""
    lifetime.resume()
    since = row.paused_monotonic_s
    paused_s = 0.0 if since is None else max(0.0, now - since)
    left = lifetime.running_left_s
    changed = msgspec.structs.replace(
        row,
        paused_at=None,
        resting=False,
        paused_monotonic_s=None,
        frozen_s=row.frozen_s + paused_s,
        running_until=None if left is None else now + left,
        running_left_s=None,
    )
    return changed, paused_s
