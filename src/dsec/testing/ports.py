"""Ports for servers that tests start, and start again at the same port."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path
from typing import Final

_FIRST: Final = 10_000
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Free on loopback now, and none that the kernel gives to a connection of anybody's until they are used."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    choose = random.SystemRandom()  # others choose, too: a seed would have all choose the same
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            listener = held.enter_context(socket.socket())
            try:
                listener.bind(("127.0.0.1", choose.randrange(_FIRST, max(end, _FIRST + 1_000))))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            found.append(listener.getsockname()[1])
    return found
