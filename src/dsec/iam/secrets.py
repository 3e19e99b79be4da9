"""The text of a token: made once, shown once, kept as a hash."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

PREFIX: Final = "dsec_"

_SECRET_BYTES: Final = 32
_TOKEN_LIKE: Final = re.compile(PREFIX + r"[A-Za-z0-9_-]{16,}")
_TOKEN_CHARS_MAX: Final = 128


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(8)}"


def digest_of(text: str) -> bytes:
    """Empty for what cannot be a token. 256 random bits need no salt, and no slow hash."""
    if not text.startswith(PREFIX) or len(text) > _TOKEN_CHARS_MAX:
        return b""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def without_tokens(text: str) -> str:
    """`text` with what looks like a token cut to its first letters."""
    return _TOKEN_LIKE.sub(f"{PREFIX}…", text)
