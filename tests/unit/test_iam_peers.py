"""Who asks at the local socket, and what they may."""

from __future__ import annotations

import os
import socket

import pytest

from dsec.core.errors import ForbiddenError
from dsec.iam.peers import Peer, local_principal, peer_of
from dsec.iam.principals import ALL_RIGHTS


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        peer = peer_of(one)
    with socket.socket(socket.AF_INET) as tcp:
        assert peer_of(tcp) is None

    assert peer == Peer(os.getpid(), os.geteuid(), os.getegid())


def test_root_and_the_nodes_own_uid_are_admin_and_nobody_else_is() -> None:
    for uid in (0, 1000):
        who = local_principal(Peer(1, uid, uid), own_uid=1000)
        assert (who.project, who.rights) == ("/", ALL_RIGHTS)
    with pytest.raises(ForbiddenError, match="uid 1001"):
        local_principal(Peer(1, 1001, 0), own_uid=1000)
