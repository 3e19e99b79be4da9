"""Rights and paths of projects, as texts and as orders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.core.errors import InvalidArgumentError
from dsec.iam.principals import ALL_RIGHTS, Right, closed_rights
from dsec.iam.projects import lineage, parent_of, parse_project, reaches
from dsec.wire.node import Right as WireRight


def test_rights_include_lesser_ones_and_are_the_words_of_the_wire() -> None:
    assert closed_rights({"use"}) == {"read", "use"}
    assert closed_rights({"manage"}) == {"read", "use", "manage"}
    assert closed_rights({"admin"}) == ALL_RIGHTS == {str(right) for right in WireRight}
    assert closed_rights(set()) == frozenset()
    assert [str(right) for right in Right] == [str(right) for right in WireRight]
    with pytest.raises(ValueError, match="root"):
        closed_rights({"root"})


@pytest.mark.parametrize("path", ["/", "/team", "/team/run-7", "/a/b.c/d_e"])
def test_project_paths_are_read(path: str) -> None:
    assert parse_project(path) == path


@pytest.mark.parametrize(
    "path", ["", "team", "/team/", "//", "/a//b", "/..", "/a b", "/ü", "/" + "a" * 64, "/a" * 17, "/a\n"]
)
def test_other_texts_are_no_project_path(path: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_project(path)


def test_a_project_knows_those_above_it() -> None:
    assert lineage("/a/b") == ("/", "/a", "/a/b")
    assert lineage("/") == ("/",)
    assert [parent_of(path) for path in ("/", "/a", "/a/b")] == [None, "/", "/a"]


NAMES = st.lists(st.sampled_from(["a", "ab", "b"]), max_size=4).map(lambda parts: "/" + "/".join(parts))


@given(NAMES, NAMES, NAMES)
def test_reaching_is_an_order(one: str, two: str, three: str) -> None:
    assert reaches(one, one)
    assert reaches("/", one)
    if reaches(one, two) and reaches(two, three):
        assert reaches(one, three)
    if reaches(one, two) and reaches(two, one):
        assert one == two
    assert reaches(one, two) == (two.split("/")[: len(one.split("/"))] == one.split("/") or one == "/")
