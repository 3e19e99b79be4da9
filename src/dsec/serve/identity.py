"""Who a machine is in its cluster: a directory with its certificate, its credentials for NATS, and a node's id."""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.cluster.certificates import API_NAME, client_context, days_left, names_of, node_name, server_context
from dsec.cluster.engine.credentials import Credentials
from dsec.core.errors import DsecError, HostError, InvalidArgumentError
from dsec.core.ids import NodeId, parse_node_id
from dsec.wire.records import Finding

AUTHORITY: Final = "ca.pem"
CERTIFICATE: Final = "cert.pem"
KEY: Final = "cert.key"
CREDENTIALS: Final = "nats.creds"
UNIT: Final = "unit"
NODE: Final = "node"

WARN_DAYS: Final = 30
_AGAIN: Final = "issue it again: dsec cluster issue"


@dataclass(frozen=True, slots=True)
class Identity:
    directory: Path
    unit: str
    credentials: Credentials
    node: NodeId | None  # of a node

    @classmethod
    def load(cls, directory: Path) -> Identity:
        """Raises HostError for files that cannot be read, or that others can, InvalidArgumentError for wrong ones."""
        for secret in (KEY, CREDENTIALS):
            _check_secret(directory / secret)
        node = directory / NODE
        return cls(
            directory,
            _read(directory / UNIT).strip(),
            Credentials.parse(_read(directory / CREDENTIALS)),
            parse_node_id(_read(node).strip()) if node.exists() else None,
        )

    def check_role(self, *, node: bool) -> None:
        """Raises InvalidArgumentError when it is of something else than a node, or than an API replica."""
        names = names_of((self.directory / CERTIFICATE).read_bytes())
        wanted = node_name(self.node) if node and self.node is not None else API_NAME
        if (node and self.node is None) or wanted not in names:
            raise InvalidArgumentError(
                f"the identity in {self.directory} is of {', '.join(names)}",
                hint=f"make one with `dsec cluster issue {'node' if node else 'api'}`",
            )

    def to_nodes(self) -> ssl.SSLContext:
        """For connections of an API replica to nodes."""
        return client_context(*self._files())

    def to_engine(self) -> ssl.SSLContext:
        return client_context(*self._files())

    def of_node(self) -> ssl.SSLContext:
        """For a node that listens."""
        return server_context(*self._files())

    def _files(self) -> tuple[Path, Path, Path]:
        return self.directory / AUTHORITY, self.directory / CERTIFICATE, self.directory / KEY


def remove_identity(directory: Path) -> None:
    """Raises HostError. Other files that lie there stay."""
    try:
        for name in (CREDENTIALS, KEY, CERTIFICATE, AUTHORITY, UNIT, NODE):  # the last says that there is one
            (directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            directory.rmdir()
    except OSError as error:
        raise HostError(f"the identity in {directory} cannot be removed: {error.strerror}") from error


def examine_identity(directory: Path, *, now: datetime.datetime) -> list[Finding]:
    """For doctor: whether it can be used, and for how long."""
    what = "identity in the cluster"
    try:
        identity = Identity.load(directory)
        left = {name: days_left((directory / name).read_bytes(), now=now) for name in (CERTIFICATE, AUTHORITY)}
        until = identity.credentials.expires_at
    except (DsecError, OSError) as error:
        text = error.message if isinstance(error, DsecError) else str(error)
        return [Finding(what=what, status="missing", detail=text, hint="make it with `dsec cluster issue`")]
    if until is not None:
        left[CREDENTIALS] = (until - now.timestamp()) / 86_400
    name, days = min(left.items(), key=lambda item: item[1])
    who = f"node {identity.node}" if identity.node else "no node"
    if days < 0:
        return [
            Finding(
                what=what,
                status="missing",
                detail=f"{who}; {name} has expired",
                hint="issue it again: dsec cluster issue",
            )
        ]
    detail = f"{who}; {name} is good for {days:.0f} days"
    if days < WARN_DAYS:
        return [Finding(what=what, status="degraded", detail=detail, hint=_AGAIN)]
    return [Finding(what=what, status="ok", detail=detail)]


def _check_secret(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise HostError(
            f"there is no identity: {path}: {error.strerror}",
            hint="make it with `dsec cluster issue`, and copy it here",
        ) from error
    if mode & 0o077:
        raise HostError(f"{path} can be read by others", hint=f"chmod 600 {path}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(f"cannot read {path}: {error}", hint="make the identity again: dsec cluster issue") from error


def write_private(path: Path, content: bytes) -> None:
    """A file that only its owner reads, replaced whole."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
