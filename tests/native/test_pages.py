"""The program that serves a machine's memory, against the kernel: what asks for it here is this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec.binaries import find_binary

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

PAGE = 4096

# A process of its own: what waits for a page here would wait for itself there.
CLIENT = r"""
import ctypes, fcntl, json, os, socket, struct, sys
path, length, lies = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
faults = libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK)
if faults < 0:
    print("unsupported"); sys.exit()
fcntl.ioctl(faults, 0xC018AA3F, struct.pack("QQQ", 0xAA, 1 << 3, 0))
at = libc.mmap(None, length, 3, 0x22, -1, 0)
fcntl.ioctl(faults, 0xC020AA00, struct.pack("QQQQ", at, length, 1, 0))
region = {"base_host_virt_addr": at, "size": length, "offset": 0, "page_size": 4096, "page_size_kib": 4096, **lies}
with socket.socket(socket.AF_UNIX) as server:
    server.connect(path)
    socket.send_fds(server, [json.dumps([region]).encode()], [faults])
print("ready", flush=True)
for line in sys.stdin:
    word, page = line.split()
    address = at + int(page) * 4096
    if word == "read":
        print(ctypes.string_at(address, 4096).hex(), flush=True)
    elif word == "write":
        ctypes.memset(address, 0x77, 4096); print("written", flush=True)
    elif word == "drop":
        libc.madvise(address, 4096, 4); print("dropped", flush=True)
"""


class Client:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def page(self, number: int) -> bytes:
        return bytes.fromhex(self.ask(f"read {number}"))


@contextmanager
def serving(directory: Path, pages: int, **lies: int) -> Iterator[tuple[Client, subprocess.Popen[str], bytes]]:
    """Page n of the file is full of n, but the last, which is a hole."""
    content = b"".join(bytes([number % 256]) * PAGE for number in range(pages - 1))
    memory, path = directory / "memory", directory / "pages"
    memory.write_bytes(content)
    os.truncate(memory, pages * PAGE)
    server = subprocess.Popen([find_binary("dsec-pages"), path, memory], stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 30
        while not path.exists() and server.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        command = [sys.executable, "-c", CLIENT, str(path), str(pages * PAGE), json.dumps(lies)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                client = Client(process)
                assert process.stdout is not None
                if process.stdout.readline().strip() == "unsupported":
                    pytest.skip("this kernel has no userfaultfd")
                yield client, server, content
            finally:
                process.kill()
    finally:
        server.kill()
        server.communicate()


def test_each_page_is_that_of_the_file(short_tmp: Path) -> None:
    with serving(short_tmp, 64) as (client, _, content):
        for number in (0, 1, 62, 33, 5, 34, 7):
            assert client.page(number) == content[number * PAGE : (number + 1) * PAGE]
        assert client.page(63) == bytes(PAGE)


def test_what_was_written_stays_and_the_file_does_not_change(short_tmp: Path) -> None:
    with serving(short_tmp, 16) as (client, _, content):
        assert client.ask("write 3") == "written"
        assert client.page(3) == b"\x77" * PAGE
        assert client.page(2) == content[2 * PAGE : 3 * PAGE]

    assert (short_tmp / "memory").read_bytes()[: len(content)] == content


def test_what_was_given_up_is_empty_from_then_on(short_tmp: Path) -> None:
    """Else a guest would be shown memory that it has given back, of a time before."""
    with serving(short_tmp, 16) as (client, _, content):
        assert client.page(4) == content[4 * PAGE : 5 * PAGE]
        assert client.ask("drop 4") == "dropped"
        assert client.ask("drop 9") == "dropped"
        assert client.page(4) == client.page(9) == bytes(PAGE)
        assert client.page(8) == content[8 * PAGE : 9 * PAGE]
        assert client.page(10) == content[10 * PAGE : 11 * PAGE]
        client.ask("write 4")
        client.ask("drop 4")
        assert client.page(4) == bytes(PAGE)


def test_it_ends_with_whom_it_serves(short_tmp: Path) -> None:
    with serving(short_tmp, 4) as (client, server, _):
        client.page(0)
        assert server.poll() is None
        client.process.kill()
        assert server.wait(timeout=30) == 0


@pytest.mark.parametrize("lies", [{"size": 1 << 40}, {"offset": PAGE}, {"page_size": 2 << 20}, {"size": 17}])
def test_a_region_that_cannot_be_is_refused(short_tmp: Path, lies: dict[str, int]) -> None:
    with serving(short_tmp, 4, **lies) as (_, server, _):
        assert server.wait(timeout=30) == 1
        assert server.stderr is not None
        assert server.stderr.read().startswith("dsec-pages: ")
