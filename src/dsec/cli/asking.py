"""One quick question to the service, without the client and its event loop. Every failure is silence."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import http.client

_TIMEOUT_S: Final = 1.0
_ANSWER_BYTES_MAX: Final = 4 << 20


def ask(path: str, url: str | None = None, token: str | None = None) -> dict[str, Any]:
    """What the service that answers says to GET `path`; empty when none does. None is started."""
    try:
        from dsec.wire.codec import from_json

        connection, headers = _connection(url, token)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return from_json(answer.read(_ANSWER_BYTES_MAX), dict) if answer.status == 200 else {}
        finally:
            connection.close()
    except Exception:
        return {}  # who asks here has something to say without an answer, too


def _connection(url: str | None, token: str | None) -> tuple[http.client.HTTPConnection, dict[str, str]]:
    import http.client
    import socket
    from urllib.parse import urlsplit

    from dsec.sdk.endpoint import find_endpoint

    endpoint = find_endpoint(url, token)
    headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
    if endpoint.socket is not None:
        connection = http.client.HTTPConnection("dsec", timeout=_TIMEOUT_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(_TIMEOUT_S)
        try:
            connection.sock.connect(os.fspath(endpoint.socket))
        except BaseException:
            connection.close()
            raise
        return connection, headers
    parts = urlsplit(endpoint.base)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S), headers
