"""How environments and images are referred to: NAME, NAME:TAG, or NAME@DIGEST."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dsec.core.errors import InvalidArgumentError
from dsec.core.ids import parse_name

TAG_DEFAULT: Final = "latest"
DIGEST_PREFIX_MIN: Final = 12

_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_DIGEST: Final = re.compile(r"[0-9a-f]{12,64}\Z")
_SHAPE: Final = "NAME, NAME:TAG or NAME@DIGEST (12 digits of it or more)"


@dataclass(frozen=True, slots=True)
class Reference:
    """A name with the tag that moves, or with the digest of one exact record."""

    name: str
    tag: str = TAG_DEFAULT
    digest: str | None = None  # or the beginning of one; then the tag says nothing

    def __str__(self) -> str:
        """The shortest text that means the same."""
        if self.digest is not None:
            return f"{self.name}@{self.digest}"
        return self.name if self.tag == TAG_DEFAULT else f"{self.name}:{self.tag}"


def parse_reference(text: str, what: str = "environment name") -> Reference:
    """Raises InvalidArgumentError for what is no reference."""
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{text!r} is not an {what}", hint=f"it is {_SHAPE}")
    name, at, digest = text.partition("@")
    if at:
        if not _DIGEST.match(digest):
            raise InvalidArgumentError(f"{text[:120]!r} is not an {what}", hint=f"it is {_SHAPE}")
        return Reference(parse_name(name, what), digest=digest)
    name, colon, tag = text.partition(":")
    if colon and not _TAG.match(tag):
        raise InvalidArgumentError(f"{text[:120]!r} is not an {what}", hint=f"it is {_SHAPE}")
    return Reference(parse_name(name, what), tag if colon else TAG_DEFAULT)


def parse_digest(text: str) -> str:
    """The digest of one exact record, or the beginning of one. Raises InvalidArgumentError."""
    if not isinstance(text, str) or not _DIGEST.match(text):
        raise InvalidArgumentError(f"{text!r} is no digest", hint="12 to 64 of 0-9 and a-f")
    return text


def parse_tagged(text: str, what: str = "environment name") -> Reference:
    """A reference that can be given to something: one with a digest says what it is already."""
    reference = parse_reference(text, what)
    if reference.digest is not None:
        raise InvalidArgumentError(f"{text[:120]!r} names one exact record", hint="use NAME or NAME:TAG")
    return reference
