"""Placement: what is chosen can take it, what cannot is told why, and load evens out."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean

from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.cluster.placement import (
    Ask,
    Burst,
    Candidate,
    Overlay,
    ask_of,
    choose,
    choose_all,
    cost,
    pool_of,
    refusals,
    spilling,
    why_not,
)
from dsec.core.ids import NodeId
from dsec.core.limits import CREATES_TOGETHER_MAX
from dsec.core.spec import Environment, Place, SandboxSpec, Substrate

ROOM = {"sandboxes": 100, "memory_bytes": 100 << 30, "cpu": 100_000}
SMALL = Ask("container", {"sandboxes": 1, "memory_bytes": 1 << 30}, image="base")


def node(name: str, **more: object) -> Candidate:
    given = {"substrates": {"container"}, "room": ROOM, "images": {"base"}} | more
    return Candidate(NodeId(name), **given)  # type: ignore[arg-type]


nodes_of = st.lists(
    st.builds(
        lambda n, used, substrate, label, closed, pool: node(
            f"n{n}",
            used={"sandboxes": used, "memory_bytes": used << 30},
            substrates={substrate},
            labels={"zone": label},
            closed=closed,
            pool=pool,
        ),
        st.integers(0, 10_000),
        st.integers(0, 110),
        st.sampled_from(["container", "fake"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from([None, None, None, "cordoned"]),
        st.sampled_from(["", "", "cloud"]),
    ),
    max_size=40,
    unique_by=lambda found: found.id,
)
asks = st.builds(
    Ask,
    st.sampled_from(["container", "fake"]),
    st.fixed_dictionaries({"sandboxes": st.just(1), "memory_bytes": st.integers(1, 60 << 30)}),
    labels=st.sampled_from([{}, {}, {"zone": "a"}]),
    image=st.sampled_from(["base", "other"]),
    group=st.sampled_from([None, "g"]),
    apart=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(nodes_of, asks, st.integers(0, 1 << 30))
def test_what_is_chosen_can_take_it_and_none_is_chosen_only_when_none_can(
    nodes: list[Candidate], ask: Ask, seed: int
) -> None:
    overlay = Overlay()
    for _ in range(20):
        chosen = choose(nodes, ask, overlay=overlay, rng=random.Random(seed))
        told = refusals(nodes, ask, overlay)
        if chosen is None:
            assert set(told) == {each.id for each in nodes}
            return
        assert why_not(chosen, ask, overlay) is None
        assert chosen.id not in told
        again = choose(nodes, ask, overlay=overlay, rng=random.Random(seed))
        assert again is chosen, "the same seed chooses the same"
        overlay.add(chosen.id, ask, now=1.0)


@settings(max_examples=200, deadline=None)
@given(nodes_of, asks, st.integers(1, 300), st.integers(0, 1 << 30))
def test_many_together_are_no_more_than_fit_and_stop_only_when_no_node_takes_one(
    nodes: list[Candidate], ask: Ask, count: int, seed: int
) -> None:
    overlay = Overlay()
    placed = choose_all(nodes, ask, count, overlay=overlay, now=1.0, rng=random.Random(seed))

    by_id = {each.id: each for each in nodes}
    most = 1 if ask.group is not None else CREATES_TOGETHER_MAX
    total = Counter[NodeId]()
    for id, few in placed:
        assert 1 <= few <= most
        total[id] += few
    for id, few in total.items():
        found = by_id[id]
        assert ask.substrate in found.substrates
        assert found.closed is None
        for dimension, amount in ask.amounts.items():
            assert overlay.of(id, dimension) == few * amount
            assert found.used[dimension] + few * amount <= found.room[dimension]
        assert not ask.apart or ask.group is None or few == 1
    assert sum(total.values()) <= count
    if sum(total.values()) < count:
        assert set(refusals(nodes, ask, overlay)) == set(by_id)


def test_many_together_are_spread_as_evenly_as_one_by_one() -> None:
    nodes = [node(f"n{number}", room={"sandboxes": 1_000}, used={"sandboxes": 0}) for number in range(50)]
    ask = Ask("container", {"sandboxes": 1})

    placed = Counter[NodeId]()
    for id, few in choose_all(nodes, ask, 10_000, overlay=Overlay(), now=1.0, rng=random.Random(1)):
        placed[id] += few

    assert sum(placed.values()) == 10_000
    assert max(placed.values()) - min(placed.values()) <= 4 * CREATES_TOGETHER_MAX


@given(nodes_of, asks, st.integers(0, 1 << 30))
def test_one_that_refused_is_not_chosen_again(nodes: list[Candidate], ask: Ask, seed: int) -> None:
    tried: set[NodeId] = set()
    rng = random.Random(seed)
    while (chosen := choose(nodes, ask, overlay=Overlay(), rng=rng, tried=tried)) is not None:
        assert chosen.id not in tried
        tried.add(chosen.id)

    assert tried == {each.id for each in nodes} - set(refusals(nodes, ask, Overlay()))


def test_load_evens_out_although_no_node_tells_of_it_meanwhile(rng: random.Random) -> None:
    nodes = [node(f"n{n}", used={"sandboxes": rng.randrange(40)}) for n in range(50)]
    overlay = Overlay()
    for _ in range(2_000):
        chosen = choose(nodes, SMALL, overlay=overlay, rng=rng)
        assert chosen is not None
        overlay.add(chosen.id, SMALL, now=0.0)

    loads = [each.used["sandboxes"] + overlay.of(each.id, "sandboxes") for each in nodes]
    assert max(loads) - mean(loads) <= 6
    assert mean(loads) - min(loads) <= 8


def test_the_dimension_that_is_asked_for_decides() -> None:
    busy = node("cpu", used={"cpu": 90_000, "memory_bytes": 1 << 30})
    full = node("mem", used={"cpu": 1_000, "memory_bytes": 90 << 30})
    hungry = Ask("container", {"cpu": 8_000, "memory_bytes": 1 << 20}, image="base")
    large = Ask("container", {"cpu": 100, "memory_bytes": 8 << 30}, image="base")

    for ask, best in ((hungry, full), (large, busy)):
        assert choose([busy, full], ask, overlay=Overlay(), rng=random.Random(1)) is best


def test_what_a_node_has_told_of_is_counted_once() -> None:
    overlay = Overlay()
    one = NodeId("n1")
    overlay.add(one, SMALL, now=1.0)
    overlay.add(one, SMALL, now=2.0)

    overlay.seen(one, asked_at=1.5)

    assert overlay.of(one, "sandboxes") == 1
    overlay.seen(one, asked_at=2.0)
    assert len(overlay) == 0


def test_a_node_that_has_the_environment_is_preferred_until_it_is_clearly_fuller(rng: random.Random) -> None:
    warm = node("warm", used={"sandboxes": 10})
    cold = node("cold", used={"sandboxes": 5}, images=())

    assert choose([warm, cold], SMALL, overlay=Overlay(), rng=rng) is warm
    warm.used = {"sandboxes": 40}
    assert choose([warm, cold], SMALL, overlay=Overlay(), rng=rng) is cold


def test_a_group_spreads_and_one_that_is_apart_never_shares_a_node(rng: random.Random) -> None:
    nodes = [node(f"n{n}") for n in range(4)]
    spread = Ask("container", {"sandboxes": 1}, image="base", group="g")
    apart = Ask("container", {"sandboxes": 1}, image="base", group="h", apart=True)

    for ask, count in ((spread, 8), (apart, 4)):
        overlay, where = Overlay(), Counter[str]()
        for _ in range(count):
            chosen = choose(nodes, ask, overlay=overlay, rng=rng)
            assert chosen is not None
            where[chosen.id] += 1
            overlay.add(chosen.id, ask, now=0.0)
        assert set(where.values()) == {count // 4}
    assert choose(nodes, apart, overlay=overlay, rng=rng) is None
    assert {found.code for found in refusals(nodes, apart, overlay).values()} == {"apart"}


def test_what_overflows_goes_to_the_other_pool_if_its_environment_is_there(rng: random.Random) -> None:
    here = [node(f"n{n}", used={"sandboxes": 50}) for n in range(3)]
    there = [node("c1", pool="cloud"), node("c2", pool="cloud", images=())]
    rule = [Burst("cloud", above=0.8)]

    def place(ask: Ask = SMALL) -> Candidate | None:
        return choose([*here, *there], ask, overlay=Overlay(), rng=rng, bursts=rule)

    assert place() in here
    for each in here:
        each.used = {"sandboxes": 85}
    assert place() is there[0]
    assert place(Ask("container", {"sandboxes": 1}, image="other")) in here
    for each in here:
        each.used = {"sandboxes": 100}
    assert place(Ask("container", {"sandboxes": 1}, image="other")) is None


def test_rules_of_overflow_choose_by_substrate_label_and_project(rng: random.Random) -> None:
    here, there = node("n", used={"sandboxes": 95}), node("c", pool="cloud", substrates={"container", "fake"})
    rule = Burst("cloud", 0.8, frozenset({"container"}), {"tier": "batch"}, ("/team",))

    def asked(substrate: str = "container", project: str = "/team/a", **marks: str) -> Ask:
        return Ask(substrate, {"sandboxes": 1}, image="base", project=project, marks=marks)

    def place(ask: Ask) -> Candidate | None:
        return choose([here, there], ask, overlay=Overlay(), rng=rng, bursts=[rule])

    assert place(asked(tier="batch")) is there
    for other in (asked(), asked(tier="batch", project="/teams"), asked(tier="batch", substrate="fake")):
        assert place(other) is not there
        assert "no rule" in spilling([here, there], other, Overlay(), [rule])[there.id].text
    assert place(Ask("container", {"sandboxes": 1}, node="c")) is there  # who names a node gets it
    here.used = {"sandboxes": 10}
    assert place(asked(tier="batch")) is here
    assert "80% full" in spilling([here, there], asked(tier="batch"), Overlay(), [rule])[there.id].text
    there.images, here.used = (), {"sandboxes": 95}
    assert "environment" in spilling([here, there], asked(tier="batch"), Overlay(), [rule])[there.id].text


def test_a_label_makes_a_pool_only_where_a_rule_sends_something_there() -> None:
    assert pool_of({"pool": "cloud"}, ()) == ""
    assert pool_of({"pool": "cloud"}, [Burst("other", 0.5)]) == ""
    assert pool_of({"pool": "cloud"}, [Burst("cloud", 0.5)]) == "cloud"


def test_kinds_of_devices_and_a_named_node_filter(rng: random.Random) -> None:
    plain, gpu = node("plain"), node("gpu", devices=("nvidia.com/gpu",))
    ask = Ask("container", {"sandboxes": 1}, devices=frozenset({"nvidia.com/gpu"}))

    assert choose([plain, gpu], ask, overlay=Overlay(), rng=rng) is gpu
    assert {id: found.code for id, found in refusals([plain, gpu], ask, Overlay()).items()} == {"plain": "device"}
    named = Ask("container", {"sandboxes": 1}, node="plain")
    assert choose([plain, gpu], named, overlay=Overlay(), rng=rng) is plain
    assert refusals([gpu], named, Overlay())[gpu.id].code == "node"


def test_each_refusal_names_its_reason() -> None:
    ask = Ask("container", {"sandboxes": 1}, features=frozenset({"kvm"}), labels={"zone": "a"})
    good = {"features": {"kvm"}, "labels": {"zone": "a"}}
    nodes = [
        node("substrate", substrates={"fake"}, **good),
        node("network", networks=("proxied",), **good),
        node("feature", labels={"zone": "a"}),
        node("label", features={"kvm"}, labels={"zone": "b"}),
        node("closed", closed="it is cordoned", **good),
        node("sandboxes", used={"sandboxes": 100}, **good),
        node("good", **good),
    ]

    told = refusals(nodes, ask, Overlay())

    assert {str(name): found.code for name, found in told.items()} == {each: each for each in map(str, told)}
    assert "good" not in told
    assert all(found.text for found in told.values())


def test_a_specification_becomes_what_it_needs() -> None:
    spec = SandboxSpec(
        environment=Environment("python"),
        substrate=Substrate.FAKE,
        cpu=0.5,
        disk_bytes=1 << 30,
        place=Place(labels={"zone": "a"}, features=("pause",), group="g", apart=True),
    )

    ask = ask_of(spec)

    assert (ask.substrate, ask.image, ask.group, ask.apart) == ("fake", "python", "g", True)
    assert ask.amounts == {"sandboxes": 1, "cpu": 500, "memory_bytes": 1 << 30, "disk_bytes": 1 << 30}
    assert ask.features == {"disk", "pause"}
    assert cost(node("n", images=()), ask, Overlay()) > cost(node("m", images={"python"}), ask, Overlay())
