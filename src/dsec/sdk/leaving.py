"""The end of a `with` block whose body has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dsec.core.errors import DsecError


@contextmanager
def body_first(left: tuple[object, ...]) -> Iterator[None]:
    """With what `__aexit__` is told. What the body raised goes on: what fails afterwards is a note to it, and an error
    only where there is none."""
    try:
        yield
    except DsecError as failed:
        raised = left[1] if len(left) > 1 else None
        if not isinstance(raised, BaseException):
            raise
        raised.add_note(f"and then, on leaving the block: {type(failed).__name__}: {failed}")
