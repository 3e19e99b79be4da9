"""Writable layers of sandboxes that have ended, on their way out. The launcher removes what lies there."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Final

TRASH: Final = ".trash"  # as native/launch/src/trash.rs has it


def put_away_unknown(sandboxes: Path, known: Collection[str]) -> None:
    """A loss of power may take from the journal what the disk still holds: what nobody knows goes to the trash."""
    if not sandboxes.exists():
        return
    trash = sandboxes / TRASH
    for directory in sandboxes.iterdir():
        if directory.name != TRASH and directory.name not in known:
            trash.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(OSError):  # it stays until the next start
                directory.rename(trash / f"{directory.name}.{secrets.token_hex(4)}")


def remove_unknown_sockets(sockets: Path, known: Collection[str]) -> None:
    """Those of agents that nobody knows: where launcher and workers were killed together nothing else removes them."""
    if not sockets.exists():
        return
    for socket in sockets.glob("sbx_*.sock"):
        if socket.stem not in known:
            with contextlib.suppress(OSError):
                socket.unlink()
