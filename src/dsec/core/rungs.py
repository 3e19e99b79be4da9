"""What becomes, by and by, of a sandbox that nobody uses: each rung takes less of its node, and longer to come back."""

from __future__ import annotations

import enum


class Rung(enum.StrEnum):
    PAUSE = "pause"  # all of it stands still
    PAGE_OUT = "page_out"  # and its memory goes to swap
    SLEEP = "sleep"  # and to the disk: nothing of it is left to run
