"""Groups: several sandboxes with private names, started and stopped as one (ruling 33). Each is a job, too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from dsec.core import limits
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.ids import parse_name
from dsec.core.spec import Link, SandboxSpec
from dsec.wire.records import CreateRequest, Sandbox

# Such as programs look up: no dots, and never in doubt about upper and lower case.
_MEMBER: Final = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?\Z")

Across = dict[str, list[tuple[str, int]]]
"""Member → those on other nodes that it reaches: member and port."""


class GroupLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """In the other members `name:port` reaches that port of the member. `by`: only in these."""

    name: str
    port: int
    by: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        Link(self.name, self.port)


class GroupMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Its name within the group, job and links are the group's to set. `after`: started when these are, and ready."""

    spec: SandboxSpec
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.spec.job is not None or self.spec.job_id is not None or self.spec.member is not None or self.spec.links:
            raise InvalidArgumentError("job, member and links of a member are the group's to set")


class GroupRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of it is started, or nothing. `timeout_s` is for each member."""

    name: str
    members: dict[str, GroupMember]
    links: tuple[GroupLink, ...] = ()
    timeout_s: float = limits.CREATE_TIMEOUT_S_DEFAULT

    def __post_init__(self) -> None:
        parse_name(self.name, "group name")
        if not 1 <= len(self.members) <= limits.GROUP_MEMBERS_MAX:
            raise LimitError(f"a group has between 1 and {limits.GROUP_MEMBERS_MAX} members")
        for name in self.members:
            parse_member(name)
        if not 0 < self.timeout_s <= limits.CREATE_TIMEOUT_S_MAX:
            raise LimitError(f"timeout_s must be above 0 and at most {limits.CREATE_TIMEOUT_S_MAX:g}")
        for name, member in self.members.items():
            self._check_there(member.after, f"what {name} comes after")
        for link in self.links:
            self._check_there((link.name, *(link.by or ())), "a link")
        self._check_ports()
        levels(self)
        for name in self.members:
            create_request(self, name)

    def _check_there(self, names: Iterable[str], what: str) -> None:
        for name in names:
            if name not in self.members:
                raise InvalidArgumentError(
                    f"{what} names {name[:40]!r}, which is no member", hint=f"there are {', '.join(self.members)}"
                )

    def _check_ports(self) -> None:
        """Whoever is reached at a port listens on it, on all addresses most often: no link can have it there."""
        own = {(link.name, link.port) for link in self.links}
        for name in self.members:
            for link in links_of(self, name):
                if (name, link.port) in own:
                    raise InvalidArgumentError(
                        f"{name} listens on port {link.port} itself, so {link.name}:{link.port} cannot be there",
                        hint="let one of them use another port, or say who is to reach it (`by`)",
                    )


class GroupNote(msgspec.Struct, frozen=True, kw_only=True):
    """What the row of a job has of its group."""

    digest: bytes  # of the request
    nodes: dict[str, str] = {}  # member → node, of one that is on several, before its members are made
    across: Across = {}  # its links from node to node
    members: dict[str, str] = {}  # name → sandbox, once all have been started


class GroupStep(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of the story of a start: image, creating, running, waiting. `member`: also of several services, that
    want an image."""

    kind: str
    message: str
    member: str | None = None
    after_s: float = 0.0  # since its beginning


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A group as its owner sees it. `state` is starting, or a job's; `sandboxes` is not in lists."""

    name: str
    project: str
    principal: str
    created_at: float
    state: str
    settled: bool = True
    members: dict[str, str] = {}
    sandboxes: list[Sandbox] | None = None
    missing: list[str] = []  # nodes that did not answer


class GroupPage(msgspec.Struct, frozen=True):
    groups: list[GroupInfo] = []
    next: str | None = None  # cursor for the next page


class GroupDown(msgspec.Struct, frozen=True, kw_only=True):
    """`failed`: sandboxes that are not gone yet, and nodes that could not be asked, and why. They are seen to."""

    failed: dict[str, str] = {}


def parse_member(name: str) -> str:
    if not isinstance(name, str) or not _MEMBER.match(name) or name == "localhost":
        raise InvalidArgumentError(
            f"{str(name)[:40]!r} is no name of a member",
            hint="1 to 63 of a-z, 0-9, '-' and '_', beginning and ending with a letter or digit; not localhost",
        )
    return name


def links_of(request: GroupRequest, member: str) -> tuple[Link, ...]:
    """In order, each once."""
    found = {
        Link(link.name, link.port): None
        for link in request.links
        if link.name != member and (link.by is None or member in link.by)
    }
    return tuple(found)


def create_request(request: GroupRequest, member: str) -> CreateRequest:
    spec = request.members[member].spec
    full: dict[str, Any] = {name: getattr(spec, name) for name in spec.__struct_fields__}
    full |= {
        "job": request.name,
        "member": member,
        "links": links_of(request, member),
        "name": spec.name if spec.name is not None else f"{request.name}-{member}"[:63].rstrip("-_."),
    }
    return CreateRequest(spec=SandboxSpec(**full), timeout_s=request.timeout_s)


def links_across(request: GroupRequest, nodes: Mapping[str, str]) -> Across:
    """Those whose ends are on two nodes. Raises LimitError."""
    found = {}
    for member in request.members:
        links = [(one.name, one.port) for one in links_of(request, member) if nodes[one.name] != nodes[member]]
        if links:
            found[member] = links
    count = sum(map(len, found.values()))
    if count > limits.GROUP_LINKS_ACROSS_MAX:
        raise LimitError(
            f"{count} links of group {request.name} would lead from node to node, and "
            f"{limits.GROUP_LINKS_ACROSS_MAX} are the most",
            hint="say which members reach which (`by`)",
        )
    return found


def levels(request: GroupRequest) -> list[list[str]]:
    """Who is started together; each after all levels before. Raises InvalidArgumentError for a circle."""
    found: list[list[str]] = []
    done: set[str] = set()
    while len(done) < len(request.members):
        level = [name for name, one in request.members.items() if name not in done and done.issuperset(one.after)]
        if not level:
            left = sorted(set(request.members) - done)
            raise InvalidArgumentError(f"these wait for each other: {', '.join(left)}")
        found.append(level)
        done.update(level)
    return found
