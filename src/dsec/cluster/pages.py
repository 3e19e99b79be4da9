"""Pages of several nodes become one, in the order of all (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from dsec.core.errors import InvalidArgumentError, ProtocolError
from dsec.core.ids import NodeId, node_of, parse_sandbox_id
from dsec.wire.cursors import Place, decode_cursor, encode_cursor
from dsec.wire.records import ListQuery, Sandbox, SandboxPage


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


def check_page(page: SandboxPage, node: NodeId, query: ListQuery) -> None:
    """A node tells of its own sandboxes only, and its pages go forward. Raises ProtocolError."""
    try:
        strange = [one.id for one in page.sandboxes if node_of(parse_sandbox_id(one.id)) != node]
        back = page.next is not None and query.cursor is not None
        if strange or (back and decode_cursor(str(page.next)) <= decode_cursor(str(query.cursor))):
            raise ProtocolError(f"node {node} has answered with a page that is not its own, or goes back")
        if page.next is not None:
            decode_cursor(page.next)
    except InvalidArgumentError as error:
        raise ProtocolError(f"node {node} has answered with a page that cannot be read: {error.message}") from error


def own(made: Sandbox, node: NodeId) -> Sandbox:
    if node_of(parse_sandbox_id(made.id)) != node:
        raise ProtocolError(f"node {node} has answered with a sandbox of another node")
    return made
