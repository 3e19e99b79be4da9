"""Whether one more sandbox fits: a pure decision from what is promised already and what the machine has."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.core import limits
from dsec.core.errors import CapacityError
from dsec.core.spec import SandboxSpec
from dsec.core.units import format_size

RETRY_SOON_S = 2.0  # something may end
RETRY_LATER_S = 30.0  # somebody has to make room


@dataclass(frozen=True, slots=True)
class Room:
    """What the node has, and what of it is promised."""

    sandboxes: int
    sandboxes_max: int
    memory_promised_bytes: int
    memory_total_bytes: int
    memory_overcommit: float
    memory_available_bytes: int
    memory_available_bytes_min: int
    disk_free_bytes: int
    disk_free_bytes_min: int
    closing: bool = False


def memory_promised_max(total_bytes: int, overcommit: float) -> int:
    """How much memory all sandboxes together may be promised."""
    return int(total_bytes * overcommit)


def memory_one_max(total_bytes: int, overcommit: float) -> int:
    """How much memory one sandbox may be promised: with more than there is in all it could do nothing. What one has by
    default is promised on the smallest machine, too."""
    return min(max(total_bytes, limits.GIB), memory_promised_max(total_bytes, overcommit))


def refusal(spec: SandboxSpec, room: Room) -> CapacityError | None:
    """Why the sandbox is not admitted; None when it is."""
    if room.closing:
        return CapacityError("the node is stopping", retry_after_s=RETRY_SOON_S)
    if room.sandboxes >= room.sandboxes_max:
        return CapacityError(
            f"the node holds {room.sandboxes} sandboxes, and {room.sandboxes_max} are the most",
            hint="destroy some, or give them a time to live",
            retry_after_s=RETRY_SOON_S,
        )
    memory_max = memory_promised_max(room.memory_total_bytes, room.memory_overcommit)
    one_max = memory_one_max(room.memory_total_bytes, room.memory_overcommit)
    if spec.memory_bytes > one_max:  # whatever ends: nobody is told to try again
        less = one_max < room.memory_total_bytes
        return CapacityError(
            f"{format_size(spec.memory_bytes)} of memory are more than {format_size(one_max)}, which is all "
            f"{'that sandboxes are promised here' if less else 'that the machine has'}",
            hint="ask for less memory, or raise memory_overcommit" if less else "ask for less memory",
            detail={"never": True},
        )
    if room.memory_promised_bytes + spec.memory_bytes > memory_max:
        return CapacityError(
            f"{format_size(room.memory_promised_bytes)} of memory are promised; with {format_size(spec.memory_bytes)} "
            f"more it would be above {format_size(memory_max)}",
            hint="ask for less memory, destroy sandboxes, or raise memory_overcommit",
            retry_after_s=RETRY_SOON_S,
        )
    if room.memory_available_bytes < room.memory_available_bytes_min:
        return CapacityError(
            f"the node has {format_size(room.memory_available_bytes)} of memory left, and "
            f"{format_size(room.memory_available_bytes_min)} are kept for what runs already",
            hint="pause or destroy sandboxes on that node",
            retry_after_s=RETRY_SOON_S,
        )
    if room.disk_free_bytes < room.disk_free_bytes_min:
        return CapacityError(
            f"the node's disk has {format_size(room.disk_free_bytes)} free, and "
            f"{format_size(room.disk_free_bytes_min)} are kept",
            hint="remove environments or destroy sandboxes on that node",
            retry_after_s=RETRY_LATER_S,
        )
    return None
