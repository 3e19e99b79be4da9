"""Three networks for dsec-egress: a sandbox's, the host's in which it runs, and the internet. None is the machine's.

Programs of the sandbox and servers are threads that have entered their network; sockets stay where they were made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from dsec.backends.egress import Egress
from dsec.testing.egress import egress_of
from dsec.wire.egress import EgressDenied, EgressRule, HelloArgs

T = TypeVar("T")

_NEW_NET: Final = 0x40000000
HOST: Final = "81.2.69.1"
HOST_6: Final = "2a02:db8::1"
RESOLVER: Final = "81.2.69.53"
WEB: Final = "93.184.216.34"
OTHER: Final = "93.184.216.35"
WEB_6: Final = "2606:2800:220:1::34"
INSIDE: Final = "10.20.0.5"  # somebody's private address beyond the host
METADATA: Final = "169.254.169.254"
_OUTSIDE: Final = (RESOLVER, WEB, OTHER, INSIDE, METADATA)


def able() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare", "nsenter", "sleep")))


def rule(host: str, *ports: int) -> EgressRule:
    return EgressRule(host, tuple((port, port) for port in ports or (80, 443)))


@dataclass
class Space:
    """A network namespace, held by a process that does nothing."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def start(self) -> int:
        return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[19])

    def ip(self, *words: str) -> None:
        self.run("ip", *words)

    def run(self, *words: str) -> None:
        done = subprocess.run([*self.wrap, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"

    @property
    def wrap(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", "--")

    def do(self, work: Callable[[], T]) -> T:
        """In a thread of this network: sockets made there are of it."""
        made: list[T] = []
        failed: list[BaseException] = []

        def enter() -> None:
            try:
                fd = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(fd, _NEW_NET):
                        raise OSError(ctypes.get_errno(), "setns")
                finally:
                    os.close(fd)
                made.append(work())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join(60)
        if failed:
            raise failed[0]
        assert made, "it did not end"
        return made[0]

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        found = self.do(lambda: socket.socket(family, kind, protocol))
        found.settimeout(30)
        return found

    def connect(self, address: str, port: int) -> socket.socket:
        found = self.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            found.connect((address, port))
        except BaseException:
            found.close()
            raise
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def space() -> Iterator[Space]:
    process = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
    found = Space(process)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        yield found
    finally:
        found.end()


class Internet:
    """Servers with the addresses above. What they answer is the address that was called, and then what they got."""

    def __init__(self, where: Space) -> None:
        self._where = where
        self._sockets: list[socket.socket] = []
        self._ends = threading.Event()
        self.names: dict[tuple[str, int], list[bytes]] = {}  # name and type → data of its records
        self.ttl = 60
        self.asked: list[str] = []
        self.called: list[tuple[str, int]] = []
        self._resolver()

    def serve(self, address: str, port: int, work: Callable[[socket.socket], None] | None = None) -> None:
        listener = self._where.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.settimeout(None)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(256)
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener, address, port, work or _echo), daemon=True).start()

    def close(self) -> None:
        self._ends.set()
        for found in self._sockets:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
            found.close()

    def name(self, name: str, *addresses: str) -> None:
        for address in addresses:
            kind = 28 if ":" in address else 1
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self.names.setdefault((name, kind), []).append(socket.inet_pton(family, address))

    def _accept(self, listener: socket.socket, address: str, port: int, work: Callable[[socket.socket], None]) -> None:
        while not self._ends.is_set():
            try:
                link, _ = listener.accept()
            except OSError:
                return
            self.called.append((address, port))
            threading.Thread(target=_within, args=(link, work), daemon=True).start()

    def _resolver(self) -> None:
        door = self._where.socket(kind=socket.SOCK_DGRAM)
        door.settimeout(None)
        door.bind((RESOLVER, 53))
        self._sockets.append(door)
        threading.Thread(target=self._answer_all, args=(door,), daemon=True).start()
        self.serve(RESOLVER, 53, self._answer_stream)

    def _answer_all(self, door: socket.socket) -> None:
        while not self._ends.is_set():
            try:
                question, client = door.recvfrom(4096)
                if client and (answer := self.answer(question, 512)):
                    door.sendto(answer, client)
            except OSError:
                return

    def _answer_stream(self, link: socket.socket) -> None:
        length = int.from_bytes(link.recv(2, socket.MSG_WAITALL), "big")
        answer = self.answer(link.recv(length, socket.MSG_WAITALL), 65_535)
        link.sendall(len(answer).to_bytes(2, "big") + answer)

    def answer(self, question: bytes, room: int) -> bytes:
        name, kind, end = read_question(question)
        self.asked.append(name)
        data = self.names.get((name, kind), [])
        code = 0 if any(known == name for known, _ in self.names) else 3
        head = question[:2] + bytes([0x81, 0x80 | code]) + b"\0\1" + len(data).to_bytes(2, "big") + b"\0\0\0\0"
        records = b"".join(
            b"\xc0\x0c" + kind.to_bytes(2, "big") + b"\0\1" + self.ttl.to_bytes(4, "big") + len(part).to_bytes(2, "big")
            + part for part in data
        )  # fmt: skip
        answer = head + question[12:end] + records
        if len(answer) > room:
            answer = question[:2] + bytes([0x83, 0x80]) + b"\0\1\0\0\0\0\0\0" + question[12:end]
        return answer


def _within(link: socket.socket, work: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError), link:
        work(link)


def _echo(link: socket.socket) -> None:
    """Says whom it is, and then what it hears, until it hears no more."""
    link.sendall(f"{link.getsockname()[0]} ".encode())
    while data := link.recv(65_536):
        link.sendall(data)


def read_question(message: bytes) -> tuple[str, int, int]:
    labels, at = [], 12
    while length := message[at]:
        labels.append(message[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels).lower(), int.from_bytes(message[at + 1 : at + 3], "big"), at + 5


def question_of(name: str, kind: int = 1, number: int = 7) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return number.to_bytes(2, "big") + b"\1\0\0\1\0\0\0\0\0\0" + labels + b"\0" + kind.to_bytes(2, "big") + b"\0\1"


@dataclass
class Site:
    host: Space
    sandbox: Space
    internet: Internet
    egress: Egress
    run_dir: Path
    denied: list[EgressDenied] = field(default_factory=list)
    name: str = field(default_factory=lambda: f"sb-{secrets.token_hex(4)}")

    async def attach(self, *rules: EgressRule, everything: bool = False, connections: int = 0) -> bool:
        given = None if everything else rules
        pid, start = self.sandbox.pid, self.sandbox.start
        return (await self.egress.attach(self.name, pid, start, given, connections=connections)).fresh

    def open_files(self) -> int:
        """Of the forwarder, but for pipes: it keeps empty ones for the next."""
        found = (os.readlink(fd) for fd in Path(f"/proc/{self.egress.pid}/fd").iterdir())  # noqa: PTH115
        return len([name for name in found if not name.startswith("pipe:")])

    def ask(self, name: str, kind: int = 1, *, server: str = "198.18.0.53") -> tuple[int, list[str]]:
        """The answer's code and addresses. By a socket that is not connected, as some libraries do it."""
        with self.sandbox.socket(kind=socket.SOCK_DGRAM) as asker:
            for _ in range(5):
                asker.settimeout(12)
                asker.sendto(question_of(name, kind), (server, 53))
                with contextlib.suppress(TimeoutError):
                    answer, source = asker.recvfrom(4096)
                    assert source == (server, 53)
                    return read_answer(answer, name)
        raise AssertionError("nobody answers")

    def says(self, address: str, port: int, data: bytes = b"\1hello") -> bytes:
        """What the server there says until it ends, after `data`."""
        with self.sandbox.connect(address, port) as link:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            return everything_of(link)

    def is_refused(self, address: str, port: int, data: bytes = b"\1hello") -> bool:
        """By a reset."""
        try:
            said = self.says(address, port, data)
        except (ConnectionResetError, ConnectionRefusedError, BrokenPipeError):
            return True
        except OSError as error:
            return error.errno == 107  # reset before it was shut down
        assert said, "it ended without a reset"
        return False


def read_answer(answer: bytes, name: str) -> tuple[int, list[str]]:
    assert answer[:2] == b"\0\7"
    asked, _, at = read_question(answer)
    assert asked == name
    found = []
    for _ in range(int.from_bytes(answer[6:8], "big")):
        assert answer[at : at + 2] == b"\xc0\x0c"
        length = int.from_bytes(answer[at + 10 : at + 12], "big")
        data = answer[at + 12 : at + 12 + length]
        found.append(socket.inet_ntop(socket.AF_INET if length == 4 else socket.AF_INET6, data))
        at += 12 + length
    return answer[3] & 15, found


def is_reset(link: socket.socket) -> bool:
    """Whether it breaks off, after what has come."""
    try:
        everything_of(link)
    except ConnectionResetError:
        return True
    return False


def everything_of(link: socket.socket) -> bytes:
    parts = []
    while part := link.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


@contextlib.asynccontextmanager
async def site(
    run_dir: Path,
    *,
    private: tuple[str, ...] = (),
    binding_s: float = 30.0,
    resolv_conf: Path | None = None,
    held: int | None = None,
    **times: float,
) -> AsyncIterator[Site]:
    """With `resolv_conf` that is the host's, whose resolvers are asked then. `held`: what all connections may hold."""
    with contextlib.ExitStack() as stack:
        host, outside, sandbox = (stack.enter_context(space()) for _ in range(3))
        _wire_up(host, outside)
        internet = Internet(outside)
        stack.callback(internet.close)
        wrap, resolvers = host.wrap, (RESOLVER,)
        if resolv_conf is not None:
            mounted = f'mount --bind {resolv_conf} /etc/resolv.conf && exec "$@"'
            wrap, resolvers = (*wrap, "unshare", "--mount", "sh", "-c", mounted, "sh"), ()
        if held is not None:
            wrap = (*wrap, "sh", "-c", f'exec "$@" --held {held}', "sh")
        settings = HelloArgs(resolvers=resolvers, private=private, binding_s=binding_s, **times)
        denied: list[EgressDenied] = []
        async with egress_of(run_dir, wrap=wrap, settings=settings, denied=denied.append) as egress:
            yield Site(host, sandbox, internet, egress, run_dir, denied)


def _wire_up(host: Space, outside: Space) -> None:
    host.ip("link", "set", "lo", "up")
    outside.ip("link", "set", "lo", "up")
    host.ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(outside.pid))
    for where, device, address, address_6 in (
        (host, "near", HOST, HOST_6),
        (outside, "far", "81.2.69.2", "2a02:db8::2"),
    ):
        where.ip("addr", "add", f"{address}/30", "dev", device)
        where.ip("addr", "add", f"{address_6}/64", "dev", device, "nodad")
        where.ip("link", "set", device, "up")
    host.ip("route", "add", "default", "via", "81.2.69.2")
    host.ip("-6", "route", "add", "default", "via", "2a02:db8::2")
    for address in _OUTSIDE:
        outside.ip("addr", "add", f"{address}/32", "dev", "lo")
    outside.ip("addr", "add", f"{WEB_6}/128", "dev", "lo", "nodad")
