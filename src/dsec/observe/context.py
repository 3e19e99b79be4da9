"""The ids of what is being done now, in every log line written meanwhile, also in tasks started meanwhile.

with ids(request=request_id, sandbox=sandbox.id):
    log.info("created")          # carries both
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_current: ContextVar[Mapping[str, str]] = ContextVar("dsec_ids", default=_NONE)


def current_ids() -> Mapping[str, str]:
    """The ids in force, outermost first."""
    return _current.get()


@contextmanager
def ids(**more: str | None) -> Iterator[None]:
    """Adds ids for the time of the block; None is left out. An inner id hides an outer one of the same name."""
    known = {name: value for name, value in more.items() if value is not None}
    token = _current.set(MappingProxyType({**_current.get(), **known}))
    try:
        yield
    finally:
        _current.reset(token)


def new_request_id() -> str:
    """For a request that brought none. 64 random bits: unique enough to find its lines, no secret."""
    return f"req_{secrets.token_hex(8)}"
