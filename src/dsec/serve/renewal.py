"""Certificates and credentials that are replaced on the disk are used from the next connection on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dsec.core.errors import DsecError, InvalidArgumentError
from dsec.observe.logs import get_logger
from dsec.serve.identity import AUTHORITY, CERTIFICATE, CREDENTIALS, KEY, Identity

log = get_logger(__name__)

LOOK_S: Final = 30.0  # a look is a stat of each file

_Mark = tuple[tuple[int, int, int] | None, ...]


class Renewal:
    """Looks whether files have changed, and has them taken. What cannot be used is said, and the old goes on."""

    def __init__(self, files: Sequence[Path], take: Callable[[], None]) -> None:
        """`take` either takes them all, or raises DsecError and has changed nothing."""
        self._files = tuple(files)
        self._take = take
        self._seen = _mark(self._files)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.look)

    def look(self) -> bool:
        """Whether something new is in use now."""
        mark = _mark(self._files)
        if mark == self._seen:
            return False
        names = ", ".join(path.name for path in self._files)
        try:
            self._take()
        except DsecError as error:
            # Tried again with each look: files are replaced one after the other.
            log.error("renewed certificates cannot be used", directory=str(self._files[0].parent), error=error.message)
            return False
        self._seen = mark
        log.info("renewed certificates are in use", directory=str(self._files[0].parent), files=names)
        return True


class LiveIdentity:
    """An identity whose contexts and credentials are those of its files now (`engine.credentials.Shown`)."""

    def __init__(self, directory: Path) -> None:
        """Raises as `Identity.load`."""
        self.now = Identity.load(directory)
        self._contexts: list[ssl.SSLContext] = []

    def renewal(self) -> Renewal:
        directory = self.now.directory
        return Renewal([directory / name for name in (AUTHORITY, CERTIFICATE, KEY, CREDENTIALS)], self._renew)

    def token(self) -> bytes:
        return self.now.credentials.token()

    def sign(self, nonce: str) -> bytes:
        return self.now.credentials.sign(nonce)

    def to_nodes(self) -> ssl.SSLContext:
        return self._live(self.now.to_nodes())

    def to_engine(self) -> ssl.SSLContext:
        return self._live(self.now.to_engine())

    def of_node(self) -> ssl.SSLContext:
        return self._live(self.now.of_node())

    def _live(self, context: ssl.SSLContext) -> ssl.SSLContext:
        self._contexts.append(context)
        return context

    def _renew(self) -> None:
        found = Identity.load(self.now.directory)
        if (found.unit, found.node) != (self.now.unit, self.now.node):
            raise InvalidArgumentError(
                f"the identity in {found.directory} is another one now", hint="start anew with it"
            )
        found.check_role(node=found.node is not None)
        found.to_engine()  # raises for a key that is of another certificate
        directory = found.directory
        for context in self._contexts:
            context.load_verify_locations(directory / AUTHORITY)  # beside the one before, until a restart
            context.load_cert_chain(directory / CERTIFICATE, directory / KEY)
        self.now = found


def _mark(files: Sequence[Path]) -> _Mark:
    return tuple(_stat(path) for path in files)


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
