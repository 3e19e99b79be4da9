"""Where the service is: an address given, one from the environment, or the local socket."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import parse_node_id
from dsec.wire import api

_RUN_DIR: Final = "DSEC_RUN_DIR"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Exactly one of `socket` and `base` decides: a UNIX socket, or an http(s) address without a trailing slash."""

    socket: str | None = None
    base: str = "http://dsec"
    token: str | None = None
    project: str | None = None  # to act in, instead of the token's own
    node: str | None = None  # that is meant, where there are several
    autostart: bool = False  # nothing was asked for: the local service may be started

    def __str__(self) -> str:
        return f"unix://{self.socket}" if self.socket else self.base

    def __repr__(self) -> str:
        return f"Endpoint({self})"  # without the token: this ends up in logs


def find_endpoint(
    url: str | None = None, token: str | None = None, project: str | None = None, node: str | None = None
) -> Endpoint:
    """Arguments win over DSEC_URL, DSEC_TOKEN, DSEC_PROJECT, DSEC_NODE; without an address it is the local socket."""
    project = project if project is not None else os.environ.get(api.ENV_PROJECT) or None
    if project is not None and (not project.startswith("/") or any(ord(c) <= 32 or ord(c) > 126 for c in project)):
        raise InvalidArgumentError(f"{project[:80]!r} is not a project path", hint="such as /team/run-7")
    node = node if node is not None else os.environ.get(api.ENV_NODE) or None
    if node is not None:
        parse_node_id(node)
    token = token if token is not None else os.environ.get(api.ENV_TOKEN) or None
    url = url if url is not None else os.environ.get(api.ENV_URL) or None
    if token is not None and any(ord(c) <= 32 or ord(c) > 126 for c in token):
        raise InvalidArgumentError("the token holds characters that no token has", hint="look for a line break in it")
    if url is None:
        socket = str(local_run_dir() / api.DEFAULT_SOCKET_NAME)
        return Endpoint(socket=socket, token=token, project=project, node=node, autostart=True)
    return replace(parse_endpoint(url, token, project), node=node)


def parse_endpoint(url: str, token: str | None = None, project: str | None = None) -> Endpoint:
    """`unix:///path`, `http://host:port` or `https://…`. Raises InvalidArgumentError."""
    hint = "write http://host:port, https://host or unix:///path/to/api.sock"
    parts = urlsplit(url)
    if parts.scheme == "unix":
        path = unquote(parts.path)
        if parts.netloc or not path.startswith("/") or "\0" in path:
            raise InvalidArgumentError(f"{url[:200]!r} does not name a socket by an absolute path", hint=hint)
        return Endpoint(socket=path, token=token, project=project)
    try:
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        port_is_fine = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise InvalidArgumentError(f"{url[:200]!r} is not an address of the service", hint=hint)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidArgumentError("the address must hold no user, query or fragment", hint="pass token= instead")
    return Endpoint(base=url.rstrip("/"), token=token, project=project)


def local_run_dir() -> Path:
    """Where the local service of this user keeps its socket, as `dsec up` has it."""
    if named := os.environ.get(_RUN_DIR):
        return Path(named).absolute()
    if os.geteuid() == 0:
        return Path(api.RUN_DIR_ROOT)
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    return Path(runtime) / "dsec"
