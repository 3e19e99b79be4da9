"""A socket of the node that lives on the loopback of a container, which has no other network."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from typing import Final

from dsec.core.limits import LINK_BACKLOG
from dsec.storage.syscalls import enter_network

_WAIT_S: Final = 10.0


def listen_inside(pid: int, pidfd: int, address: str, port: int) -> socket.socket:
    """Blocks for a moment. Raises OSError; ESRCH when the process of `pidfd`, which `pid` was, has ended."""
    made: list[socket.socket | OSError] = []

    def work() -> None:
        # Of this thread alone, which ends with it: no other part of the node is ever in a network of a sandbox.
        try:
            made.append(_listen(pid, pidfd, address, port))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=work, name="into a network", daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    if not made:
        raise OSError(errno.ETIMEDOUT, "the network of the instance was not entered in time")
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _listen(pid: int, pidfd: int, address: str, port: int) -> socket.socket:
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        if ended.poll(0):
            # It has ended, and the number may be another's by now: that one's network was opened, perhaps.
            raise OSError(errno.ESRCH, "the instance has ended")
        enter_network(network)
    finally:
        os.close(network)
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # those of before may wait for their end
        found.bind((address, port))
        found.listen(LINK_BACKLOG)
        found.setblocking(False)
    except BaseException:
        found.close()
        raise
    return found
