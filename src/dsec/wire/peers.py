"""What a node asks another one for: connections of links between sandboxes of one group, and nothing else."""

from __future__ import annotations

from typing import Final

import msgspec

RELAYS: Final = "relays"  # the ability of a node to pass on bytes of links from and to other nodes
PEER_LINK: Final = "peer_link"  # a stream: RES once it is connected, then DATA and END both ways


class LinkDial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The asked node looks all of it up: nothing counts because it is said here."""

    project: str
    job: str
    id: str  # of the job
    source: str  # member that asks, on the node that asks
    target: str  # member that is meant, on the node that is asked
    port: int
