"""Queries: bytes in, declared values out, everything else refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.api.query import Kind, Param, parse_query, split_query
from dsec.core.errors import InvalidArgumentError, LimitError
from dsec.core.limits import PATH_BYTES_MAX

PARAMS = (
    Param("path", Kind.PATH, required=True),
    Param("target", Kind.TARGET),
    Param("name", Kind.TEXT),
    Param("n", Kind.INT, default=7, maximum=100),
    Param("wait", Kind.SECONDS, maximum=60),
    Param("flag", Kind.BOOL, default=False),
    Param("mode", Kind.MODE),
    Param("after", Kind.BASE64),
    Param("label", Kind.TEXT, repeated=True),
)


def parsed(raw: bytes) -> dict[str, object]:
    return parse_query(b"path=/&" + raw, PARAMS)


def test_what_is_not_given_has_its_default() -> None:
    values = parse_query(b"path=/x", PARAMS)

    assert values == {
        "path": b"/x",
        "target": None,
        "name": None,
        "n": 7,
        "wait": None,
        "flag": False,
        "mode": None,
        "after": None,
        "label": [],
    }


@pytest.mark.parametrize(
    ("raw", "name", "value"),
    [
        (b"target=..%2Fa%ff", "target", b"../a\xff"),
        (b"name=a+b%2Bc", "name", "a b+c"),
        (b"name=%C3%BC", "name", "ü"),
        (b"name=", "name", ""),
        (b"name=a=b", "name", "a=b"),
        (b"%6eame=x", "name", "x"),
        (b"n=0", "n", 0),
        (b"n=100", "n", 100),
        (b"wait=2.5", "wait", 2.5),
        (b"wait=0", "wait", 0.0),
        (b"flag", "flag", True),
        (b"flag=true", "flag", True),
        (b"flag=0", "flag", False),
        (b"mode=0644", "mode", 0o644),
        (b"mode=7777", "mode", 0o7777),
        (b"after=_-8", "after", b"\xff\xef"),
        (b"after=", "after", b""),
        (b"label=a&label=b&&", "label", ["a", "b"]),
    ],
)
def test_values_are_read(raw: bytes, name: str, value: object) -> None:
    assert parsed(raw)[name] == value


@pytest.mark.parametrize(
    "raw",
    [
        b"path=/x",  # there already
        b"other=1",
        b"name=%",
        b"name=%a",
        b"name=%zz",
        b"name=%ff",
        b"name=%00",
        b"%ff=1",
        b"n=",
        b"n=-1",
        b"n=+1",
        b"n= 1",
        b"n=1_0",
        b"n=0x1",
        b"n=%D9%A1",  # a digit of another script
        b"n=101",
        b"n=99999999999999999999",
        b"wait=nan",
        b"wait=inf",
        b"wait=1e3",
        b"wait=-1",
        b"wait=61",
        b"flag=yes",
        b"mode=8",
        b"mode=10000",
        b"after=a",
        b"after=%20",
        b"n=1&n=1",
        b"target=a%00b",
        b"target=",
    ],
)
def test_what_is_malformed_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        parsed(raw)


@pytest.mark.parametrize("raw", [b"", b"path=", b"path=x", b"path=/a%00"])
def test_a_path_is_needed_and_absolute(raw: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_query(raw, PARAMS)


def test_the_longest_path_fits_and_one_more_byte_does_not() -> None:
    longest = b"path=/" + b"%ff" * (PATH_BYTES_MAX - 1)

    assert len(parse_query(longest, PARAMS)["path"]) == PATH_BYTES_MAX
    with pytest.raises(LimitError):
        parse_query(longest + b"x", PARAMS)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with suppress(InvalidArgumentError):
        parse_query(raw, PARAMS)


@given(st.binary(min_size=1, max_size=100).filter(lambda value: b"\0" not in value))
def test_every_path_survives_its_encoding(path: bytes) -> None:
    encoded = b"path=/" + b"".join(b"%%%02x" % byte for byte in path)

    assert parse_query(encoded, PARAMS)["path"] == b"/" + path


def test_names_and_values_keep_their_order() -> None:
    assert split_query(b"b=1&a=2&b=3") == [("b", b"1"), ("a", b"2"), ("b", b"3")]
