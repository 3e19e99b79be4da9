"""An outside of a test's own: a network for a forwarder, and one beyond it with servers that look public."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec.testing.networks import Networks, networks

ALLOWED, OTHER = "93.184.215.14", "151.101.64.223"  # nobody's here: no packet of this leaves the machine
METADATA, PRIVATE = "169.254.169.254", "10.50.0.1"
NAMES = {"allowed.example.org": ALLOWED, "other.example.org": OTHER, "inside.example.org": PRIVATE}

_NEAR, _FAR = "near", "far"
_UP_S, _POLL_S = 60.0, 0.01

_SERVER = """
import http.server, socketserver, struct, sys, threading
names = dict(pair.split("=") for pair in sys.argv[2:])
log = open(sys.argv[1], "a", buffering=1)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        log.write("http " + self.connection.getsockname()[0] + chr(10))
        body = ("you reached " + self.connection.getsockname()[0]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

class Names(socketserver.BaseRequestHandler):
    def handle(self):
        data, sock = self.request
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += data[at] + 1
        question, (kind,) = data[12 : at + 5], struct.unpack_from(">H", data, at + 1)
        name = ".".join(labels).lower()
        log.write("dns " + name + chr(10))
        address = names.get(name) if kind == 1 else None
        code = 0 if name in names else 3
        head = data[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, 1 if address else 0, 0, 0)
        answer = b""
        if address:
            answer = struct.pack(">HHHIH", 0xC00C, 1, 1, 60, 4) + bytes(map(int, address.split(".")))
        sock.sendto(head + question + answer, self.client_address)

web = http.server.ThreadingHTTPServer(("0.0.0.0", 80), Handler)
threading.Thread(target=web.serve_forever, daemon=True).start()
log.write("up" + chr(10))
socketserver.ThreadingUDPServer(("0.0.0.0", 53), Names).serve_forever()
"""


@dataclass(frozen=True)
class Outside:
    between: Networks
    log: Path

    @property
    def wrap(self) -> tuple[str, ...]:
        """Words before a forwarder that is to be there."""
        return self.between.wrap(_NEAR)

    @property
    def resolver(self) -> str:
        return self.between.address(_FAR)

    @property
    def host(self) -> str:
        """An address of the forwarder's own host."""
        return self.between.address(_NEAR)

    @property
    def seen(self) -> list[str]:
        """What servers were asked: `http ADDRESS` and `dns NAME`."""
        return self.log.read_text().split("\n")[1:-1]


@contextmanager
def outside(directory: Path) -> Iterator[Outside]:
    with networks(_NEAR, _FAR) as between:
        made = Outside(between, directory / "outside.log")
        far = between.wrap(_FAR)
        for address in (ALLOWED, OTHER, METADATA, PRIVATE):
            _run(*far, "ip", "addr", "add", f"{address}/32", "dev", "lo")
        _run(*made.wrap, "ip", "route", "add", "default", "via", made.resolver)
        made.log.touch()
        names = [f"{name}={address}" for name, address in NAMES.items()]
        command = [*far, sys.executable, "-c", _SERVER, str(made.log), *names]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            until_s = time.monotonic() + _UP_S
            while not made.log.read_text().startswith("up"):
                assert server.poll() is None, "the servers have ended"
                assert time.monotonic() < until_s, "the servers did not come up"
                time.sleep(_POLL_S)
            yield made
        finally:
            server.kill()
            server.wait()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
