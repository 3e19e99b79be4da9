"""Attempts at other networks, and at the host by sockets."""

# ruff: noqa: PTH116
# Functions of os say best which system call is tried.
from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from typing import Final

from .kit import (
    FACTS,
    call,
    group,
    nothing_of,
    probe,
)

_FAMILIES: Final = {
    "packet": (17, socket.SOCK_RAW, 0),
    "vsock": (40, socket.SOCK_STREAM, 0),
    "alg": (38, socket.SOCK_SEQPACKET, 0),
    "xdp": (44, socket.SOCK_RAW, 0),
    "can": (29, socket.SOCK_RAW, 1),
    "bluetooth": (31, socket.SOCK_RAW, 1),
    "tipc": (30, socket.SOCK_SEQPACKET, 0),
    "rds": (21, socket.SOCK_SEQPACKET, 0),
    "key": (15, socket.SOCK_RAW, 2),
    "netlink_netfilter": (16, socket.SOCK_RAW, 12),
    "netlink_uevent": (16, socket.SOCK_RAW, 15),
    "netlink_generic": (16, socket.SOCK_RAW, 16),
    "netlink_audit": (16, socket.SOCK_RAW, 9),
    "netlink_xfrm": (16, socket.SOCK_RAW, 6),
    "netlink_diagnosis": (16, socket.SOCK_RAW, 4),
    "raw_icmp": (2, socket.SOCK_RAW, 1),
    "raw_ipv6": (10, socket.SOCK_RAW, 58),
}


@group("socket", _FAMILIES.items(), errno.EPERM, errno.EACCES)
def _(arguments: tuple[int, int, int]) -> str:
    return f"descriptor {call(41, *arguments)}"


@probe(errno.EPERM, errno.EACCES)
def socket_pair_of_another_family() -> str:
    return f"{call(53, 30, socket.SOCK_SEQPACKET, 0, ctypes.create_string_buffer(8))}"


@probe(errno.EPERM, errno.EACCES)
def make_a_network_interface() -> str:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    name = b"\x0a\x00\x03\x00probe0\x00\x00"
    kind = b"\x0a\x00\x01\x00dummy\x00\x00\x00"
    info = struct.pack("HH", 4 + len(kind), 18) + kind
    body = struct.pack("BxHiII", 0, 0, 0, 1, 0xFFFFFFFF) + name + info
    link.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
    answer = link.recv(4096)
    code = -struct.unpack_from("i", answer, 16)[0]
    if code:
        raise OSError(code, os.strerror(code))
    return "an interface"


@probe()
def network_interfaces_besides_loopback() -> str:
    return nothing_of([name for _, name in socket.if_nameindex() if name != "lo"])


_ADDRESSES: Final = {
    "metadata": "169.254.169.254",
    "public": "1.1.1.1",
    "private": "10.0.0.1",
    "docker": "172.17.0.1",
    "home": "192.168.0.1",
    "ipv6_public": "2606:4700:4700::1111",
    "ipv6_link_local": "fe80::1",
    "ipv6_metadata": "fd00:ec2::254",
}


_UNREACHED: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL)


# With network `proxied` a connection is taken before it is known where it goes, and reset when it may not.
@group("connect", _ADDRESSES.items(), *_UNREACHED, errno.ECONNRESET, errno.EPIPE, errno.ECONNREFUSED)
def _(address: str) -> str:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as link:
        link.settimeout(20)
        link.connect((address, 80))
        link.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return f"connected to {address}, which says {link.recv(64)!r}"


@probe(errno.ENETUNREACH, errno.EHOSTUNREACH)
def datagram_to_a_name_server() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.sendto(b"x", ("8.8.8.8", 53))
    return "sent"


@probe(errno.ECONNREFUSED)
def abstract_socket_of_the_host() -> str:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect("\0" + FACTS["abstract"])
    return "connected"


@probe(errno.ECONNREFUSED)
def loopback_port_of_the_host() -> str:
    with socket.socket() as link:
        link.connect(("127.0.0.1", FACTS["port"]))
    return "connected"


@probe(errno.ENOENT, errno.EACCES)
def shared_memory_of_the_host() -> str:
    return f"segment {call(29, FACTS['shm_key'], 0, 0)}"


@probe(errno.ENOENT)
def files_of_the_host() -> str:
    return f"{os.stat(FACTS['file'])}"
