"""Whatever lies on a disk: a plan to collect takes nothing that is needed, and may be cut off anywhere."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.storage.collect import Key, Kind, Plan, Rules, Thing, plan_collection

NAMES = "abcdef"
TIMES = st.integers(0, 100).map(float)
BYTES = st.integers(0, 1_000)
KEPT = st.sampled_from(["", "", "", "named", "in use"])


def _layers(draw: st.DrawFn) -> frozenset[Key]:
    return frozenset((Kind.LAYER, name) for name in draw(st.sets(st.sampled_from(NAMES), max_size=3)))


@st.composite
def things(draw: st.DrawFn) -> list[Thing]:
    found = [Thing(Kind.LAYER, name, draw(BYTES), draw(TIMES), draw(KEPT)) for name in NAMES if draw(st.booleans())]
    for kind in (Kind.RECORD, Kind.BUILD, Kind.BLOB, Kind.UPPER, Kind.DRAFT):
        for name in draw(st.sets(st.sampled_from(NAMES))):
            needs = _layers(draw) if kind in (Kind.RECORD, Kind.BUILD) else frozenset()
            if kind is Kind.RECORD and draw(st.booleans()):  # never in a circle
                needs |= {(Kind.RECORD, other) for other in draw(st.sets(st.sampled_from(NAMES))) if other < name}
            kept = "" if kind is Kind.BUILD else draw(KEPT)
            found.append(Thing(kind, name, draw(BYTES), draw(TIMES), kept, needs))
    for name in draw(st.sets(st.sampled_from(NAMES))):
        needs = frozenset({(Kind.LAYER, name)})
        found.append(Thing(Kind.CHUNKS, name, draw(BYTES), draw(TIMES), draw(st.sampled_from(["", "loading"])), needs))
    return found


RULES = st.builds(
    Rules,
    now=st.integers(0, 120).map(float),
    record_keep_s=TIMES,
    blob_keep_s=TIMES,
    blob_bytes_max=st.integers(0, 3_000),
    stray_keep_s=TIMES,
    want_bytes=st.sampled_from([0, 0, 500, 100_000]),
)


def after(found: list[Thing], plan: Plan, steps: int | None = None) -> list[Thing]:
    gone = {removal.key for removal in plan.removals[:steps]}
    return [thing for thing in found if thing.key not in gone]


def held_by(found: list[Thing]) -> dict[Key, set[Key]]:
    """What is there, and which of what was there each thing holds."""
    return {thing.key: set(thing.needs) for thing in found if thing.kind not in (Kind.BUILD, Kind.CHUNKS)}


@given(things(), RULES)
def test_what_is_kept_stays(found: list[Thing], rules: Rules) -> None:
    gone = {removal.key for removal in plan_collection(found, rules).removals}

    assert not [thing for thing in found if thing.kept and thing.key in gone]


@given(things(), RULES, st.integers(0, 40))
def test_cut_off_anywhere_nothing_lacks_what_it_needs(found: list[Thing], rules: Rules, steps: int) -> None:
    there = {thing.key for thing in found}
    left = after(found, plan_collection(found, rules), steps)

    still = {thing.key for thing in left}
    for key, needs in held_by(left).items():
        assert needs & there <= still, key


@given(things(), RULES)
def test_a_second_plan_finds_nothing_more(found: list[Thing], rules: Rules) -> None:
    calm = Rules(
        now=rules.now,
        record_keep_s=rules.record_keep_s,
        blob_keep_s=rules.blob_keep_s,
        blob_bytes_max=rules.blob_bytes_max,
        stray_keep_s=rules.stray_keep_s,
    )
    left = after(found, plan_collection(found, calm))

    assert plan_collection(left, calm).removals == ()


@given(things(), RULES, st.integers(0, 40))
def test_one_that_was_cut_off_is_taken_up(found: list[Thing], rules: Rules, steps: int) -> None:
    if rules.want_bytes:
        return  # what is wanted is less by then
    whole = plan_collection(found, rules)
    left = after(found, whole, steps)

    rest = {removal.key for removal in plan_collection(left, rules).removals}
    assert rest == {removal.key for removal in whole.removals[steps:]}


@given(things(), RULES, st.randoms(use_true_random=False))
def test_the_order_of_things_is_nothing(found: list[Thing], rules: Rules, rng: random.Random) -> None:
    mixed = list(found)
    rng.shuffle(mixed)

    assert plan_collection(mixed, rules) == plan_collection(found, rules)


@given(things(), RULES)
def test_every_layer_that_nothing_needs_goes(found: list[Thing], rules: Rules) -> None:
    left = after(found, plan_collection(found, rules))

    needed = {key for thing in left if thing.kind is Kind.RECORD for key in thing.needs}
    strays = [thing for thing in left if thing.kind is Kind.LAYER and not thing.kept and thing.key not in needed]
    assert strays == []


@given(things(), RULES)
def test_wanting_more_never_frees_less(found: list[Thing], rules: Rules) -> None:
    calm = Rules(rules.now, rules.record_keep_s, rules.blob_keep_s, rules.blob_bytes_max, rules.stray_keep_s)

    assert {r.key for r in plan_collection(found, calm).removals} <= {
        r.key for r in plan_collection(found, rules).removals
    }


def test_records_go_before_those_that_they_need() -> None:
    found = [
        Thing(Kind.RECORD, "a"),
        Thing(Kind.RECORD, "b", needs=frozenset({(Kind.RECORD, "a")})),
        Thing(Kind.RECORD, "c", needs=frozenset({(Kind.RECORD, "b"), (Kind.LAYER, "x")})),
        Thing(Kind.LAYER, "x"),
    ]

    assert [removal.name for removal in plan_collection(found, Rules(now=0.0)).removals] == ["c", "b", "a", "x"]


def test_a_replaced_record_holds_its_layers_until_it_is_old() -> None:
    found = [
        Thing(Kind.RECORD, "a", used_at=0.0, kept="named", needs=frozenset({(Kind.LAYER, "new")})),
        Thing(Kind.RECORD, "a@1", used_at=50.0, needs=frozenset({(Kind.LAYER, "old")})),
        Thing(Kind.LAYER, "new", 5),
        Thing(Kind.LAYER, "old", 7),
    ]

    assert plan_collection(found, Rules(now=60.0, record_keep_s=20.0)).removals == ()
    plan = plan_collection(found, Rules(now=70.0, record_keep_s=20.0))
    assert [(r.kind, r.name, r.reason) for r in plan.removals] == [
        (Kind.RECORD, "a@1", "replaced"),
        (Kind.LAYER, "old", "nothing needs it"),
    ]
    assert plan.bytes == 7


@pytest.mark.parametrize(("want", "gone"), [(0, []), (3, ["old"]), (8, ["new", "old"])])
def test_when_room_is_needed_what_was_used_longest_ago_goes_first(want: int, gone: list[str]) -> None:
    found = [Thing(Kind.BLOB, "old", 5, used_at=1.0), Thing(Kind.BLOB, "new", 5, used_at=2.0)]

    plan = plan_collection(found, Rules(now=3.0, blob_keep_s=100.0, want_bytes=want))
    assert [removal.name for removal in plan.removals] == gone
