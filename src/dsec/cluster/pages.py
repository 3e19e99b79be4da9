"""Pages of several nodes become one, in the order of all (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from dsec.wire.cursors import Place, decode_cursor, encode_cursor
from dsec.wire.records import Sandbox, SandboxPage


def merge_pages(pages: Sequence[SandboxPage], limit: int, missing: Sequence[str] = ()) -> SandboxPage:
    """The first `limit` of all. Each page begins after the same cursor; a node that has more says up to where it told.

    Nothing is left out and nothing comes twice: what lies beyond the end of a page that goes on waits for the next.
    """
    told_to = min((decode_cursor(page.next) for page in pages if page.next is not None), default=None)
    all = sorted((sandbox for page in pages for sandbox in page.sandboxes), key=_place)
    taken = [sandbox for sandbox in all if told_to is None or _place(sandbox) <= told_to][:limit]
    if len(taken) == len(all) and told_to is None:
        return SandboxPage(taken, None, list(missing))
    # With a page that is full the next one begins after its last; else after what all nodes have told.
    last = _place(taken[-1]) if len(taken) == limit or told_to is None else told_to
    return SandboxPage(taken, encode_cursor(last), list(missing))


def _place(sandbox: Sandbox) -> Place:
    return Place(sandbox.created_at, sandbox.id)
