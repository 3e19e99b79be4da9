"""What `dsec-jail` is given by standard input: one msgpack map. native/jail/src/plan.rs is its twin."""

from __future__ import annotations

import msgspec


class JailBind(msgspec.Struct, frozen=True, omit_defaults=True):
    source: str
    target: str  # absolute, in the jail
    writable: bool = False
    device: bool = False  # a device node, which works there
    owned: bool = False  # of a device that the host keeps for itself: a node of its own, which is the program's


class JailFile(msgspec.Struct, frozen=True):
    """A small one that is made there, for reading."""

    path: str  # absolute, in the jail
    content: bytes


class JailTap(msgspec.Struct, frozen=True):
    """A network device of the jail's own namespace that the program may open by its name, and who is behind it."""

    name: str
    address: str  # of the namespace's end, IPv4
    prefix: int
    peer: str  # the one address that is sent to it


class JailPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who the program is, what it sees, and what it may use."""

    uid: int
    gid: int
    cgroups: list[str]  # files that a process enters a cgroup by, one of each hierarchy
    root: str  # a directory that exists; the root is mounted there, and seen by nobody else
    binds: list[JailBind]
    links: dict[str, str] = {}  # symbolic links to make: path → target
    files: list[JailFile] = []
    tap: JailTap | None = None
    limits: dict[str, int] = {}  # resource limits by their lower-case names
    argv: list[bytes]
    env: list[bytes] = []
