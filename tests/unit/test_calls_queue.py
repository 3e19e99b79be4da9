"""Who is next: fair by time between projects, whatever their calls cost, and nobody saves up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsec.backends.fncall.queue import FairQueue


def served(costs_s: dict[str, float], *, for_s: float) -> dict[str, float]:
    """Seconds that each project got of one place, when all of them always have something waiting."""
    queue: FairQueue[int] = FairQueue()
    got = dict.fromkeys(costs_s, 0.0)
    for project in costs_s:
        for number in range(3):
            queue.push(project, number)
    while sum(got.values()) < for_s:
        popped = queue.pop()
        assert popped is not None
        project, number = popped
        queue.push(project, number)
        got[project] += costs_s[project]
        queue.charge(project, costs_s[project])
    return got


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.001, 1.0), min_size=2, max_size=6),
)
def test_projects_at_overload_get_the_same_time_whatever_their_calls_cost(costs_s: dict[str, float]) -> None:
    slack_s = 2 * max(costs_s.values())
    got = served(costs_s, for_s=100 * max(costs_s.values()))

    assert max(got.values()) - min(got.values()) <= slack_s + 0.1 * min(got.values())


def test_calls_of_one_project_come_in_their_order() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(10):
        queue.push("a", number)

    assert [queue.pop() for _ in range(10)] == [("a", number) for number in range(10)]
    assert queue.pop() is None


def test_who_comes_back_has_saved_nothing_up() -> None:
    queue: FairQueue[int] = FairQueue()
    for _ in range(100):
        queue.push("busy", 0)
        queue.pop()
        queue.charge("busy", 1.0)

    for number in range(20):
        queue.push("busy", number)
        queue.push("idle until now", number)
    first = []
    for _ in range(20):
        popped = queue.pop()
        assert popped is not None
        first.append(popped[0])
        queue.charge(popped[0], 1.0)

    assert 9 <= first.count("busy") <= 11


def test_who_waits_no_longer_is_not_served() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", "first")
    queue.push("a", "second")

    assert queue.remove("a", "first")
    assert not queue.remove("a", "first")
    assert not queue.remove("b", "first")
    assert (len(queue), queue.pop()) == (1, ("a", "second"))
