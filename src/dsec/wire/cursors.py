"""Places in listings of sandboxes: the same on every node, so that pages of several can be merged."""

from __future__ import annotations

from typing import NamedTuple

from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import parse_sandbox_id


class Place(NamedTuple):
    """A sandbox's place in listings: it never changes, so a cursor stays good whatever comes and goes."""

    created_at: float
    id: str


def encode_cursor(place: Place) -> str:
    return f"{place.created_at!r}:{place.id}"


def decode_cursor(text: str) -> Place:
    """Raises InvalidArgumentError."""
    moment, _, id = text[:128].partition(":")
    try:
        created_at = float(moment)
    except ValueError as error:
        raise InvalidArgumentError(f"{text[:80]!r} is not a cursor of a listing") from error
    return Place(created_at, parse_sandbox_id(id))
