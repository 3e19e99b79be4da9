"""Names of sandboxes on a node that was declared lost: others may have them by now."""

from __future__ import annotations

import msgspec

from dsec.node.journal import Journal
from dsec.node.registry import Registry
from dsec.observe.logs import get_logger

log = get_logger(__name__)


async def drop_names(registry: Registry, journal: Journal) -> int:
    """All sandboxes go on without theirs; how many had one. Their ids stay good."""
    dropped = 0
    for sandbox in list(registry):
        if sandbox.row.spec.name is None:
            continue
        log.warning("a sandbox has lost its name with its node", sandbox=sandbox.id, name=sandbox.row.spec.name)
        registry.forget_name(sandbox.id)
        sandbox.row = msgspec.structs.replace(sandbox.row, spec=msgspec.structs.replace(sandbox.row.spec, name=None))
        await journal.put(sandbox.row)
        dropped += 1
    return dropped
