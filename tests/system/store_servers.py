"""Servers of a store for tests, each behind one that can be told to misbehave for data objects."""

from __future__ import annotations

import http.client
import http.server
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from dsec.testing.ports import free_ports
from tests.system.loader_site import until

BUCKET_KEY: Final = "key"
BUCKET_SECRET: Final = "secret/of+the=tests"
_HOP: Final = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive"})
_SLOW_S: Final = 0.03
_NGINX: Final = """
daemon off; worker_processes 1; pid {root}/nginx.pid; error_log {root}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
  server {{ listen 127.0.0.1:{port}; root {store}; }}
}}
"""


class FaultyFront:
    """Passes requests on to `upstream`; what it does to those for data depends on `mode`."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.mode = "good"  # slow, flaky, corrupt, gone, hang
        self.turns = itertools.count()
        self.released = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Passing, self))
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def set(self, mode: str) -> None:
        """Requests that hang are let go of."""
        self.released.set()
        self.released = threading.Event()
        self.mode = mode

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Passing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, front: FaultyFront, *rest: Any) -> None:
        self.front = front
        super().__init__(*rest)

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        front = self.front
        mode = front.mode if "/data/" in self.path and self.command == "GET" else "good"
        if mode == "hang":
            front.released.wait()
            self.close_connection = True
            return
        if mode == "gone":
            self._answer(404, {}, b"")
            return
        turn = next(front.turns)
        if mode == "flaky" and turn % 3 == 0:
            self._answer(503, {}, b"")
            return
        with closing(http.client.HTTPConnection(*front.upstream, timeout=30)) as link:
            link.request(self.command, self.path, body or None, {**self.headers, "Connection": "close"})
            answer = link.getresponse()
            content = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
        if mode == "slow":
            time.sleep(_SLOW_S)
        if mode == "corrupt":
            content = bytes([content[0] ^ 0xFF]) + content[1:]
        cut = len(content) // 2 if mode == "flaky" and turn % 3 == 1 else None
        length = int(answer.getheader("Content-Length") or 0) if self.command == "HEAD" else len(content)
        self._answer(answer.status, headers, content[:cut], length)

    def _answer(self, status: int, headers: dict[str, str], content: bytes, length: int = 0) -> None:
        with suppress(ConnectionError):
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(length or len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
            self.close_connection = self.close_connection or len(content) < length

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on


class _Ranges(http.server.BaseHTTPRequestHandler):
    """Files of a directory, whole or a range of one."""

    def __init__(self, root: Path, *rest: Any) -> None:
        self.root = root
        super().__init__(*rest)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        try:
            content = (self.root / self.path.lstrip("/")).read_bytes()
        except OSError:
            self.send_error(404)
            return
        wanted = self.headers.get("Range", "")
        if wanted:
            first, last = (int(text) for text in wanted.removeprefix("bytes=").split("-"))
            self.send_response_only(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            content = content[first : last + 1]
        else:
            self.send_response_only(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def python_server(store: Path) -> Iterator[tuple[str, int]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, store))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield "127.0.0.1", server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def nginx_server(store: Path, root: Path) -> Iterator[tuple[str, int]]:
    """A real nginx, where there is one."""
    program = shutil.which("nginx", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not there; tools/setup --dev unpacks it")
    (port,) = free_ports(1)
    root.mkdir(exist_ok=True)
    (root / "nginx.conf").write_text(_NGINX.format(root=root, port=port, store=store))
    words = [program, "-c", root / "nginx.conf", "-p", root, "-e", root / "error.log", "-g", "user root;"]
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    try:
        until(lambda: _listens(port))
        yield "127.0.0.1", port
    finally:
        server.terminate()
        server.wait(60)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def signed_bucket_server(root: Path) -> Iterator[tuple[str, int]]:
    """A real S3 server, where there is one: it refuses what `BUCKET_KEY` and `BUCKET_SECRET` have not signed."""
    program = shutil.which("versitygw", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("versitygw is not there; tools/setup --dev builds it where there is a Go")
    (port,) = free_ports(1)
    for name in ("buckets", "attributes"):
        (root / name).mkdir(parents=True)
    words = [program, "--quiet", "--port", f"127.0.0.1:{port}"]
    words += ["posix", "--sidecar", os.fspath(root / "attributes"), os.fspath(root / "buckets")]
    env = {"PATH": os.environ["PATH"], "ROOT_ACCESS_KEY": BUCKET_KEY, "ROOT_SECRET_KEY": BUCKET_SECRET}
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
    try:
        until(lambda: _listens(port))
        yield "127.0.0.1", port
    finally:
        server.terminate()
        server.wait(60)


@contextmanager
def bucket_server() -> Iterator[tuple[str, int]]:
    """moto: it speaks S3 over HTTP, in this process; it checks no signatures."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield host, port
    finally:
        server.stop()
