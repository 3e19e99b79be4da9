"""The memory that bodies of requests under way take, all together."""

from __future__ import annotations

from dsec.core.errors import CapacityError
from dsec.core.limits import BODIES_BYTES_MAX


class Bodies:
    def __init__(self) -> None:
        self.held_bytes = 0

    def take(self, count: int) -> None:
        """Raises CapacityError when there is no room. `give_back` follows once the request is over."""
        if self.held_bytes + count > BODIES_BYTES_MAX:
            raise CapacityError(
                "the requests under way hold as much as may be held of their bodies",
                hint="try again in a moment, or send large data with PUT /v1/sandboxes/{id}/files",
                retry_after_s=1.0,
            )
        self.held_bytes += count

    def give_back(self, count: int) -> None:
        self.held_bytes -= count
