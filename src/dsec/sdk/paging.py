"""Lists that come in pages, whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dsec.core import limits
from dsec.sdk.transport import Transport

T = TypeVar("T")


async def all_pages(
    transport: Transport,
    path: str,
    kind: type[Any],
    items: Callable[[Any], list[T]],
    *,
    max_items: int,
    query: Mapping[str, str] | None = None,
) -> list[T]:
    """`items` of each page, which says by `next` where the next one begins; `max_items` at most."""
    asked = {**(query or {}), "limit": str(min(limits.LIST_PAGE_MAX, max_items))}
    found: list[T] = []
    while len(found) < max_items:
        page = await transport.call("GET", path, kind, query=asked)
        found += items(page)
        if page.next is None or page.next == asked.get("cursor"):
            break
        asked["cursor"] = page.next
    return found[:max_items]
