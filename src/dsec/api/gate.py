"""Who asks: a token, or the uid at the other end of the local socket; and in which project they act."""

from __future__ import annotations

import base64
import contextlib
from typing import Final

from dsec.core.errors import AuthError, DsecError, InvalidArgumentError
from dsec.iam.directory import Directory
from dsec.iam.peers import Peer, local_principal
from dsec.iam.principals import Principal, missing_right
from dsec.wire.node import Caller, Right

_SCHEME: Final = b"bearer "
_BASIC: Final = b"basic "  # of clients that can be told no more than a URL: http://anybody:TOKEN@host


class Gate:
    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def principal(self, authorization: bytes | None, peer: Peer | None, project: bytes | None = None) -> Principal:
        """A token that is given decides, also on the local socket: so root can act with less.

        Raises AuthError without credentials or with bad ones, ForbiddenError for a local user who may not,
        NotFoundError for a project that is not there for them.
        """
        who = self._who(authorization, peer)
        if project is None:
            return who
        try:
            text = project.decode("ascii")
        except UnicodeDecodeError as error:
            raise InvalidArgumentError("the Dsec-Project header holds what no project path does") from error
        return self._directory.acting_in(who, text)

    def _who(self, authorization: bytes | None, peer: Peer | None) -> Principal:
        if authorization is not None:
            return self._directory.authenticate(_token_of(authorization))
        if peer is None:
            raise AuthError("this needs a token", hint="send 'Authorization: Bearer <token>', or set DSEC_TOKEN")
        self._directory.refresh_if_due()
        return local_principal(peer)

    def is_known(self, authorization: bytes | None, peer: Peer | None) -> bool:
        try:
            self.principal(authorization, peer)
        except DsecError:
            return False
        return True


def _token_of(authorization: bytes) -> str:
    """Raises AuthError."""
    if authorization[: len(_SCHEME)].lower() == _SCHEME:
        return authorization[len(_SCHEME) :].strip().decode("latin-1")
    if authorization[: len(_BASIC)].lower() == _BASIC:
        with contextlib.suppress(ValueError):
            _, colon, password = base64.b64decode(authorization[len(_BASIC) :].strip(), validate=True).partition(b":")
            if colon:
                return password.decode("latin-1")
    raise AuthError("the Authorization header must be 'Bearer <token>'")


def check_right(principal: Principal, right: Right) -> None:
    if right not in principal.rights:
        raise missing_right(principal, principal.project, right)


def caller_of(principal: Principal) -> Caller:
    return Caller(
        principal=principal.name,
        project=principal.project,
        rights=principal.rights,
        expires_at=principal.expires_at,
        local=principal.local,
    )
