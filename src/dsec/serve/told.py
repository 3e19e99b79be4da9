"""How an error of the service gets to who started it: as words for a person, or as an ErrorBody for a program."""

from __future__ import annotations

from dsec.core.errors import DsecError
from dsec.wire.codec import from_json, to_json
from dsec.wire.errors import ErrorBody, body_of, error_of


def in_words(error: DsecError) -> str:
    return f"error: {error.message}\n" + (f"  try: {error.hint}\n" if error.hint else "")


def to_line(error: DsecError) -> bytes:
    """One line: `{"error": ErrorBody}`, as `--json` has it everywhere."""
    return to_json({"error": body_of(error)}) + b"\n"


def from_line(line: bytes) -> DsecError | None:
    """The error that `to_line` wrote; None for anything else."""
    try:
        return error_of(from_json(line, dict[str, ErrorBody])["error"])
    except (DsecError, KeyError):
        return None
