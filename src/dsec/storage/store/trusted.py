"""Which stores a node takes layers from: those that its operator names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from dsec.core.errors import ForbiddenError, InvalidArgumentError
from dsec.storage.store.places import check_store_url


@dataclass(frozen=True, slots=True)
class TrustedStores:
    """`urls` are stores, or what stores lie below; none at all: any that an administrator of the API names."""

    urls: tuple[str, ...] = ()

    def check(self, url: str) -> None:
        """Raises ForbiddenError for another store."""
        if not self.urls:
            return
        asked = _parts(url)
        if ".." in asked or not any(asked[: len(known)] == known for known in map(_parts, self.urls)):
            raise ForbiddenError(
                f"this node takes layers of the stores that its operator names, and not of {url[:200]!r}",
                hint="add it to storage.stores in the node's configuration",
            )


ANY_STORE: Final = TrustedStores()


def trusted_stores(urls: Sequence[str]) -> TrustedStores:
    """Raises InvalidArgumentError for what is no store."""
    for url in urls:
        try:
            check_store_url(url)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"storage.stores: {error.message}", hint=error.hint) from error
    return TrustedStores(tuple(urls))


def _parts(url: str) -> tuple[str, ...]:
    """Scheme, host and the directories of the path, however it is written."""
    parts = urlsplit(url)
    host = "" if parts.scheme == "file" else parts.netloc.lower()
    return (parts.scheme, host, *(name for name in unquote(parts.path).split("/") if name not in ("", ".")))
