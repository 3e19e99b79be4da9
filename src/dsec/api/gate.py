"""Who asks: a token, or the uid at the other end of the local socket."""

from __future__ import annotations

from typing import Final

from dsec.core.errors import AuthError, DsecError, ForbiddenError
from dsec.iam.peers import Peer, local_principal
from dsec.iam.principals import Principal
from dsec.iam.tokens import TokenStore
from dsec.wire.node import Caller, Right

_SCHEME: Final = b"bearer "


class Gate:
    def __init__(self, tokens: TokenStore) -> None:
        self._tokens = tokens

    def principal(self, authorization: bytes | None, peer: Peer | None) -> Principal:
        """A token that is given decides, also on the local socket: so root can act with less.

        Raises AuthError without credentials or with bad ones, ForbiddenError for a local user who may not.
        """
        if authorization is not None:
            if authorization[: len(_SCHEME)].lower() != _SCHEME:
                raise AuthError("the Authorization header must be 'Bearer <token>'")
            return self._tokens.authenticate(authorization[len(_SCHEME) :].strip().decode("latin-1"))
        if peer is None:
            raise AuthError("this needs a token", hint="send 'Authorization: Bearer <token>', or set DSEC_TOKEN")
        return local_principal(peer)

    def is_known(self, authorization: bytes | None, peer: Peer | None) -> bool:
        try:
            self.principal(authorization, peer)
        except DsecError:
            return False
        return True


def check_right(principal: Principal, right: Right) -> None:
    if right not in principal.rights:
        raise ForbiddenError(f"this needs the right {right!s}, which {principal.name!r} does not have")


def caller_of(principal: Principal) -> Caller:
    return Caller(
        principal=principal.name,
        project=principal.project,
        rights=principal.rights,
        expires_at=principal.expires_at,
        local=principal.local,
    )
