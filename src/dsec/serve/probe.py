"""Whether a service answers at a socket."""

from __future__ import annotations

import http.client
import socket
import time
from pathlib import Path


def answers_health(path: Path, deadline: float) -> bool:
    """`deadline` by time.monotonic."""
    connection = http.client.HTTPConnection("dsec")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(max(0.1, deadline - time.monotonic()))
        connection.sock.connect(str(path))
        connection.request("GET", "/v1/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
