"""Where the members of a group go: to one node, else to few; and why nowhere."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import pytest

from dsec.cluster.placement import Candidate, Overlay, ask_of
from dsec.cluster.spreading import RELAYS, Spread
from dsec.core.errors import LimitError
from dsec.core.ids import NodeId
from dsec.core.limits import GIB, GROUP_LINKS_ACROSS_MAX
from dsec.core.spec import Environment, Place, SandboxSpec, Substrate
from dsec.wire.groups import GroupLink, GroupMember, GroupRequest, links_across

A, B, C = (NodeId(f"aaaaaaa{letter}") for letter in "abc")
APART = Place(group="db", apart=True)


def spec(gib: int = 1, place: Place | None = None) -> SandboxSpec:
    return SandboxSpec(
        environment=Environment(base="base"), substrate=Substrate.FAKE, memory_bytes=gib * GIB, place=place
    )


def node(id: NodeId, gib: int = 4, used: int = 0, *, relays: bool = True, **labels: str) -> Candidate:
    return Candidate(
        id,
        substrates=("fake",),
        features=(RELAYS,) if relays else (),
        labels=labels,
        used={"memory_bytes": used * GIB},
        room={"memory_bytes": gib * GIB, "sandboxes": 100},
    )


def spread(
    members: Mapping[str, SandboxSpec],
    *nodes: Candidate,
    linked: bool = True,
    refused: Mapping[str, Collection[NodeId]] | None = None,
) -> Spread:
    asks = {name: ask_of(one) for name, one in members.items()}
    return Spread(asks, lambda _: nodes, Overlay(), random.Random(1), refused or {}, (), linked)


def test_what_fits_on_one_node_is_on_one() -> None:
    members = {"a": spec(1), "b": spec(2)}

    assert spread(members, node(A, 2), node(B, 3)).whole() == B
    assert spread(members, node(A, 2), node(B, 2)).whole() is None
    assert spread(members, node(A, 4), refused={"b": [A]}).whole() is None


def test_one_node_needs_what_each_of_the_members_needs() -> None:
    members = {"a": spec(place=Place(labels={"zone": "x"})), "b": spec(place=Place(labels={"disk": "fast"}))}

    assert spread(members, node(A, zone="x"), node(B, disk="fast")).whole() is None
    assert spread(members, node(A, zone="x"), node(B, zone="x", disk="fast")).whole() == B
    assert spread(members, node(A, zone="x"), node(B, disk="fast")).several() == {"a": A, "b": B}


def test_over_several_nodes_it_is_over_few_and_the_largest_finds_room() -> None:
    members = {"small": spec(1), "large": spec(3), "other": spec(1)}

    found = spread(members, node(A, 4), node(B, 1), node(C, 4, used=3)).several()

    assert isinstance(found, dict)
    assert list(found) == list(members)
    assert found["large"] == A
    assert len(set(found.values())) == 2


def test_those_that_are_to_be_apart_are_never_on_one_node() -> None:
    members = {"one": spec(place=APART), "two": spec(place=Place(group="db")), "web": spec()}

    assert spread(members, node(A), node(B)).whole() is None
    found = spread(members, node(A), node(B)).several()
    assert isinstance(found, dict)
    assert found["one"] != found["two"]
    assert len(set(found.values())) == 2
    assert spread(members, node(A)).several() in ("one", "two")


def test_a_member_goes_to_no_node_that_has_refused_it_and_others_do() -> None:
    members = {"a": spec(3), "b": spec(3)}

    assert spread(members, node(A), node(B), refused={"a": [A]}).several() == {"a": B, "b": A}
    assert spread(members, node(A), node(B), refused={"a": [A, B]}).several() == "a"


def test_links_need_nodes_that_relay() -> None:
    members = {"a": spec(3), "b": spec(3)}

    assert spread(members, node(A), node(B, relays=False)).several() in members
    assert isinstance(spread(members, node(A), node(B, relays=False), linked=False).several(), dict)
    assert spread({"a": spec()}, node(B, relays=False)).whole() == B


def group(count: int, links: tuple[GroupLink, ...]) -> GroupRequest:
    members = {f"m{number}": GroupMember(spec=spec()) for number in range(count)}
    return GroupRequest(name="g", members=members, links=links)


def test_only_links_whose_ends_are_on_two_nodes_are_across() -> None:
    asked = group(3, (GroupLink(name="m0", port=80), GroupLink(name="m1", port=81, by=("m2",))))

    assert links_across(asked, {"m0": A, "m1": A, "m2": B}) == {"m2": [("m0", 80), ("m1", 81)]}
    assert links_across(asked, {"m0": A, "m1": B, "m2": B}) == {"m1": [("m0", 80)], "m2": [("m0", 80)]}


def test_links_across_have_a_bound_whose_row_the_registry_takes() -> None:
    most: list[Any] = [GroupLink(name="m0", port=port) for port in range(1, 65)]
    asked = group(GROUP_LINKS_ACROSS_MAX // 64 + 1, tuple(most))
    nodes = {name: A if name == "m0" else B for name in asked.members}

    assert sum(map(len, links_across(asked, nodes).values())) == GROUP_LINKS_ACROSS_MAX
    asked = group(GROUP_LINKS_ACROSS_MAX // 64 + 2, tuple(most))
    with pytest.raises(LimitError, match="from node to node"):
        links_across(asked, {name: A if name == "m0" else B for name in asked.members})

    long = "m" * 60
    row = {"nodes": {f"{long}{n:02}": A for n in range(64)}, "members": {f"{long}{n:02}": "s" * 30 for n in range(64)}}
    across = {f"{long}{n:02}": [(f"{long}{m:02}", 65_535) for m in range(8)] for n in range(64)}
    assert len(msgspec.msgpack.encode({**row, "across": across})) < 60_000
