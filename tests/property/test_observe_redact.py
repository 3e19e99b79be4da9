"""Whatever a value is, what is logged of it is one line, bounded, and writable as JSON."""

from __future__ import annotations

import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from dsec.observe.redact import HIDDEN, ITEMS_MAX, TEXT_CHARS_MAX, safe_text, safe_value

any_text = st.text(st.characters(exclude_categories=()), max_size=3_000)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.binary(max_size=3_000)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=100) | st.dictionaries(any_text | st.binary(max_size=20), inner, max_size=100)
    ),
    max_leaves=30,
)


@given(any_text)
def test_safe_text_is_one_printable_line(text: str) -> None:
    safe = safe_text(text)

    assert len(safe.splitlines()) <= 1
    assert {unicodedata.category(char) for char in safe} & {"Cc", "Cs", "Zl", "Zp"} == set()
    safe.encode("utf-8")


@given(any_text)
def test_safe_text_is_bounded(text: str) -> None:
    # Six characters for one that is escaped, and a marker for each secret that is hidden.
    assert len(safe_text(text)) <= 6 * TEXT_CHARS_MAX + 100


@given(st.text(st.characters(categories=["L", "N", "Zs"]), max_size=200))
def test_plain_words_are_left_as_they_are(text: str) -> None:
    assert safe_text(text) == text


@given(values)
def test_any_value_becomes_something_that_json_can_hold(value: object) -> None:
    json.dumps(safe_value("field", value))


@given(st.lists(st.integers(), min_size=ITEMS_MAX + 1, max_size=500))
def test_long_lists_are_cut_and_say_so(value: list[int]) -> None:
    safe = safe_value("field", value)

    assert len(safe) == ITEMS_MAX + 1
    assert safe[-1] == f"… {len(value) - ITEMS_MAX} more"


@given(values.filter(lambda value: value is not None and not isinstance(value, bool)))
def test_a_secret_is_hidden_whatever_its_type(value: object) -> None:
    assert safe_value("api_token", value) == HIDDEN
