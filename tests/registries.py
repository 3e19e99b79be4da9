"""Registries on loopback for tests: Debian's docker-registry, and what stands in front of one."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import http.client
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, cast

import pytest

from dsec.core.image_names import parse_image_name
from dsec.image.registry.accounts import Accounts
from dsec.image.registry.blobs import BlobCache
from dsec.image.registry.client import Registry
from dsec.image.registry.pull import Found, fetch_layout, resolve
from dsec.testing.ports import free_ports

LAYER = gzip.compress(bytes(range(256)) * 4_000, mtime=0)
LARGE = b"".join(number.to_bytes(4, "big") for number in range(300_000))
PROGRAM: Final = "docker-registry"
USER, PASSWORD = "tester", "not-a-secret"
# `htpasswd -nbB -C 5 tester not-a-secret`
HTPASSWD: Final = "tester:$2y$05$BxolZbaCXfvY2ZOlpyGfnOiNgRJpUFuVMLgK22WlNpTMmOi1mSqHO"


def need(program: str) -> str:
    """Where it is. Skips without programs that tools/setup --dev installs on Debian."""
    found = shutil.which(program, path=f"{os.environ['PATH']}:{Path(sys.executable).parent}")
    if found is None:
        pytest.skip(f"{program} is not installed (tools/setup --dev)")
    return found


@contextlib.contextmanager
def registry(root: Path, *, accounts: bool = False) -> Iterator[str]:
    """A running docker-registry; HOST:PORT."""
    program = need(PROGRAM)
    root.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        (port,) = free_ports(1)
        (root / "config.yml").write_text(_config(root, port, accounts))
        with (root / "log").open("ab") as log:
            process = subprocess.Popen(
                [program, "serve", os.fspath(root / "config.yml")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=root,
            )  # fmt: skip
        try:
            if _answers(process, port):
                yield f"127.0.0.1:{port}"
                return
        finally:
            process.kill()
            process.wait()
    raise AssertionError(f"docker-registry does not start: {(root / 'log').read_text()[-2000:]}")


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.02)
    return False


def _config(root: Path, port: int, accounts: bool) -> str:
    lines = [
        "version: 0.1",
        "log: {level: warn, accesslog: {disabled: true}}",
        "storage:",
        f"  filesystem: {{rootdirectory: {root / 'data'}}}",
        "  delete: {enabled: true}",
        f"http: {{addr: '127.0.0.1:{port}', secret: x}}",
    ]
    if accounts:
        (root / "htpasswd").write_text(HTPASSWD + "\n")
        lines.append(f"auth: {{htpasswd: {{realm: tests, path: {root / 'htpasswd'}}}}}")
    return "\n".join(lines) + "\n"


def write_login(home: Path, host: str) -> Path:
    """A credential file as docker writes it; its directory, for DOCKER_CONFIG."""
    home.mkdir(parents=True, exist_ok=True)
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (home / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return home


def skopeo(*arguments: str) -> str:
    """Copy or look with skopeo, in clear."""
    done = subprocess.run([need("skopeo"), *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` requests whose path holds `path`."""

    path: str
    status: int | None = None  # answered instead
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    cut: int | None = None  # the connection ends after so many bytes of the body
    hang: bool = False  # it does so only when the front is left
    content: bytes | None = None  # the body instead
    endless: bool = False  # no length is told, and it goes on with zeros for long
    times: int = 1
    method: str = "GET"


class Front:
    """An HTTP server that gives what a test puts into it, or what a registry behind it gives, and breaks things.

    With `users`, a token is needed for everything below /v2/, which /token gives to them by basic authentication.
    """

    def __init__(
        self, upstream: str | None = None, *, users: dict[str, str] | None = None, tls: tuple[Path, Path] | None = None
    ) -> None:
        self.upstream = upstream
        self.users = users
        self.content: dict[str, tuple[str, bytes]] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.token_life_s: int | None = None
        self.realm: str | None = None
        self.ranges = True
        self.left = threading.Event()
        self._tokens: set[str] = set()
        self._mutex = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.front = self
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Front:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.left.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put_image(self, path: str, layers: list[bytes], *, tag: str = "1", run: dict[str, Any] | None = None) -> str:
        """The digest of its manifest. Layers as they are to be given."""
        config = {"os": "linux", "architecture": "amd64", "config": run or {}}
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.put_blob(path, json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [self.put_blob(path, layer, "application/vnd.oci.image.layer.v1.tar+gzip") for layer in layers],
        }
        return self.put_manifest(path, json.dumps(manifest).encode(), str(manifest["mediaType"]), tag)

    def put_blob(self, path: str, data: bytes, media_type: str) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.content[f"/v2/{path}/blobs/{digest}"] = ("application/octet-stream", data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}

    def put_manifest(self, path: str, data: bytes, media_type: str, tag: str) -> str:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        for name in (tag, digest):
            self.content[f"/v2/{path}/manifests/{name}"] = (media_type, data)
        return digest

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self._mutex:
            for fault in self.faults:
                if fault.times and fault.method == method and fault.path in path:
                    fault.times -= 1
                    return fault
        return None

    def make_token(self) -> str:
        token = f"token-{secrets.token_hex(8)}"
        self._tokens.add(token)
        return token

    def revoke(self) -> None:
        self._tokens.clear()

    def is_in(self, authorization: str) -> bool:
        return authorization.removeprefix("Bearer ") in self._tokens


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    front: Front

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        front = cast(_Server, self.server).front
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        front.requests.append((self.command, self.path, dict(self.headers)))
        if (fault := front.fault_for(self.command, self.path)) and fault.status is not None:
            self._answer(fault.status, fault.body, fault.headers)
            return
        path = self.path.partition("?")[0]
        if path == "/token":
            self._token(front, body)
        elif (
            front.users is not None and path.startswith("/v2/") and not front.is_in(self.headers["Authorization"] or "")
        ):
            realm = front.realm or f"http://{front.host}/token"
            self._answer(401, b"{}", {"WWW-Authenticate": f'Bearer realm="{realm}",service="tests"'})
        elif path == "/v2/":
            self._answer(200, b"{}", {})
        elif path in front.content:
            kind, data = front.content[path]
            self._content(kind, data, fault, ranges=front.ranges)
        elif front.upstream is not None:
            self._forward(front.upstream, body, fault)
        else:
            self._answer(404, b'{"errors":[{"code":"UNKNOWN","message":"not here"}]}', {})

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _token(self, front: Front, body: bytes) -> None:
        assert front.users is not None
        kind, _, value = (self.headers["Authorization"] or "").partition(" ")
        user, _, password = base64.b64decode(value).decode().partition(":") if kind == "Basic" else ("", "", "")
        refreshed = body and f"refresh_token={front.users.get('<token>')}" in body.decode()
        if not refreshed and (not user or front.users.get(user) != password):
            self._answer(401, b'{"errors":[]}', {})
            return
        answer: dict[str, Any] = {"token": front.make_token()}
        if front.token_life_s is not None:
            answer["expires_in"] = front.token_life_s
        self._answer(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _content(self, kind: str, data: bytes, fault: Fault | None, *, ranges: bool) -> None:
        headers = {"Content-Type": kind}
        status = 200
        if fault is not None and fault.content is not None:
            data = fault.content
        if ranges and (wanted := self.headers.get("Range")):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            if start >= len(data):
                self._answer(416, b"", {})
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data = data[start:]
        if fault is not None and fault.endless:
            self.send_response(status)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)
            for _ in range(1_000):
                self.wfile.write(bytes(65_536))
            self.close_connection = True
            return
        self._answer(status, data, headers, cut=None if fault is None else fault.cut)
        if fault is not None and fault.hang:
            self.wfile.flush()
            cast(_Server, self.server).front.left.wait(60)

    def _forward(self, upstream: str, body: bytes, fault: Fault | None) -> None:
        connection = http.client.HTTPConnection(upstream, timeout=60)
        try:
            passed = {name: value for name, value in self.headers.items() if name not in ("Authorization", "Host")}
            connection.request(self.command, self.path, body, {**passed, "Host": self.headers["Host"]})
            answer = connection.getresponse()
            data = answer.read()
            kept = {n: v for n, v in answer.headers.items() if n not in ("Content-Length", "Connection", "Date")}
            length = answer.headers.get("Content-Length")
            self._answer(answer.status, data, kept, cut=None if fault is None else fault.cut, length=length)
        finally:
            connection.close()

    def _answer(
        self, status: int, data: bytes, headers: dict[str, str], *, cut: int | None = None, length: str | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Not on stderr."""


class Client:
    """A registry client that does not wait, and remembers how long it would have."""

    def __init__(
        self, front: Front, tmp_path: Path, *, login: bool = False, name: str = "team/tools:1", **more: Any
    ) -> None:
        home = tmp_path / "docker"
        if login:
            write_login(home, front.host)
        self.waited: list[float] = []
        self.cache = BlobCache(tmp_path / "state")
        self.registry = Registry(
            parse_image_name(f"{front.host}/{name}"),
            Accounts({"DOCKER_CONFIG": str(home)}),
            sleep=self.waited.append,
            **more,
        )
        self._layouts = tmp_path

    def pull(self) -> Found:
        found = resolve(self.registry)
        layout = self._layouts / f"layout-{len(list(self._layouts.iterdir()))}"
        layout.mkdir()
        fetch_layout(self.registry, found, self.cache, layout)
        for blob in found.image.blobs():
            assert (layout / "blobs" / blob.digest.replace(":", "/")).stat().st_size == blob.size
        return found
