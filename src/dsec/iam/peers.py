"""Who is at the other end of a local socket: the kernel says."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

from dsec.core.errors import ForbiddenError
from dsec.iam.principals import ALL_RIGHTS, Held, Principal, Right
from dsec.iam.projects import ROOT

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the other end of a UNIX socket, as it was when it connected."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer | None:
    """None when the socket is not a UNIX socket."""
    if connection.family != socket.AF_UNIX:
        return None
    return Peer(*_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def local_principal(peer: Peer, *, own_uid: int | None = None) -> Principal:
    """Root and the uid that runs the node are admin of "/". Raises ForbiddenError for everyone else."""
    if peer.uid not in (0, os.geteuid() if own_uid is None else own_uid):
        raise ForbiddenError(
            f"uid {peer.uid} may not use this socket", hint="ask the administrator for a token and set DSEC_TOKEN"
        )
    name = f"uid:{peer.uid}"
    held = (Held(ROOT, str(Right.ADMIN)),)
    return Principal(name, project=ROOT, rights=ALL_RIGHTS, local=True, id=f"{name}@{ROOT}", held=held)
