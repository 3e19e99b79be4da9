"""The operator's directory: the keys that make a cluster, and what is issued with them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dsec.cluster.certificates import API_NAME, ISSUED_DAYS, Authority, node_name
from dsec.cluster.engine.credentials import (
    Credentials,
    SigningKey,
    account_jwt,
    operator_jwt,
    server_configuration,
    user_credentials,
)
from dsec.cluster.engine.layout import Layout, Rights
from dsec.core.errors import ConflictError, HostError, NotFoundError
from dsec.core.ids import NodeId, new_node_id, parse_name
from dsec.serve import identity
from dsec.serve.identity import write_private

_AUTHORITY_KEY: Final = "ca.key"
_ACCOUNT: Final = "account.seed"
_OPERATOR: Final = "operator.seed"
_ISSUED: Final = "issued"  # of nodes, one a line: node, public key for NATS, until when
_REVOKED: Final = "revoked"  # one a line: public key, since when, until when it would have been good
_TRUST: Final = "nats-trust.conf"  # included by the configuration of each NATS server


class AuthorityDirectory:
    """Belongs on a machine of an operator: who has it can make nodes and replicas."""

    def __init__(self, directory: Path, authority: Authority, account: SigningKey, layout: Layout) -> None:
        self.directory = directory
        self._authority = authority
        self._account = account
        self._layout = layout

    @classmethod
    def create(cls, directory: Path, unit: str) -> AuthorityDirectory:
        """Raises ConflictError when there is one, HostError."""
        layout = Layout(unit)
        _make(directory)
        if (directory / identity.AUTHORITY).exists():
            raise ConflictError(f"{directory} has an authority already", hint="choose another directory")
        operator, system, account = (SigningKey.generate(kind) for kind in ("operator", "account", "account"))
        authority = Authority.create(unit, now=_now())
        trust = server_configuration(
            operator_jwt=operator_jwt(operator, f"dsec-{unit}", system_account=system.public),
            system_account=system.public,
            accounts=[
                (system.public, account_jwt(operator, system, "system", jetstream=False)),
                (account.public, account_jwt(operator, account, f"dsec-{unit}", jetstream=True)),
            ],
        )
        for name, content in (
            (identity.UNIT, unit.encode() + b"\n"),
            (_TRUST, trust.encode()),
            (_AUTHORITY_KEY, authority.key),
            (_ACCOUNT, account.seed.encode() + b"\n"),
            (_OPERATOR, operator.seed.encode() + b"\n"),
            (identity.AUTHORITY, authority.certificate),  # last: with it the directory is whole
        ):
            write_private(directory / name, content)
        return cls(directory, authority, account, layout)

    @classmethod
    def load(cls, directory: Path) -> AuthorityDirectory:
        """Raises HostError, or InvalidArgumentError."""
        try:
            certificate, key = ((directory / name).read_bytes() for name in (identity.AUTHORITY, _AUTHORITY_KEY))
            account = (directory / _ACCOUNT).read_text().strip()
            unit = (directory / identity.UNIT).read_text().strip()
        except OSError as error:
            raise HostError(
                f"there is no authority in {directory}: {error.strerror}", hint="make one with `dsec cluster init`"
            ) from error
        return cls(directory, Authority.load(certificate, key), SigningKey.from_seed(account), Layout(unit))

    def issue_node(self, into: Path, node: NodeId | None = None, *, days: int = ISSUED_DAYS) -> NodeId:
        """A new node, or further certificates for one that there is."""
        node = node or new_node_id()
        self._issue(into, node_name(node), node, self._layout.node_rights(node), serves=True, days=days)
        write_private(into / identity.NODE, node.encode() + b"\n")
        return node

    def issue_api(self, into: Path, name: str, *, days: int = ISSUED_DAYS) -> None:
        """For API replicas and watchers."""
        parse_name(name, "name of a replica")
        self._issue(into, API_NAME, name, self._layout.control_rights(), serves=False, days=days)

    def issue_nats(self, into: Path, hosts: Sequence[str], *, days: int = ISSUED_DAYS) -> None:
        """Certificate and trust of a NATS server that is reached by these names or addresses."""
        _make(into)
        issued = self._authority.issue(list(hosts), now=_now(), serves=True, asks=True, days=days)
        write_private(into / identity.KEY, issued.key)
        write_private(into / identity.CERTIFICATE, issued.certificate)
        write_private(into / identity.AUTHORITY, self._authority.certificate)
        write_private(into / _TRUST, self.trust.read_bytes())

    def issued_to(self, node: NodeId) -> list[tuple[str, int]]:
        """Public keys of its credentials for NATS, and until when each is good. Raises NotFoundError when none is, and
        HostError for a directory that cannot take any back."""
        self._operator()
        now = int(_now().timestamp())
        lines = [line.split() for line in _lines(self.directory / _ISSUED)]
        found = [(key, int(until)) for who, key, until in lines if who == node and int(until) > now]
        if not found:
            raise NotFoundError(
                f"{self.directory} has issued nothing to node {node} that is good still",
                hint="what another directory, or an older version, has issued ends by its time",
            )
        return found

    def revoke(self, node: NodeId) -> int:
        """What was issued to the node is good for nothing once NATS servers have the trust file of now: how many
        credentials. Raises what `issued_to` does."""
        found, now = self.issued_to(node), int(_now().timestamp())
        for key, until in found:
            _add_line(self.directory / _REVOKED, f"{key} {now} {until}")
        self._write_trust(now)
        return len(found)

    @property
    def trust(self) -> Path:
        """For each NATS server."""
        return self.directory / _TRUST

    def _operator(self) -> SigningKey:
        try:
            return SigningKey.from_seed((self.directory / _OPERATOR).read_text().strip())
        except OSError as error:
            raise HostError(
                f"{self.directory} was made by a version that keeps no key to take credentials back with",
                hint="make a new authority: dsec cluster init",
            ) from error

    def _write_trust(self, now: int) -> None:
        # Later ones are void after both: the larger time holds.
        lines = [line.split() for line in _lines(self.directory / _REVOKED)]
        revoked = {key: int(at) for key, at, until in lines if int(until) > now}
        name = f"dsec-{self._layout.unit}"
        token = account_jwt(self._operator(), self._account, name, jetstream=True, revoked=revoked)
        start = f"{self._account.public}: "
        trust = [
            f"  {start}{token}" if line.strip().startswith(start) else line
            for line in self.trust.read_text().splitlines()
        ]
        write_private(self.trust, "\n".join(trust).encode() + b"\n")

    def credentials(self, who: str, rights: Rights) -> Credentials:
        """For NATS alone."""
        return user_credentials(self._account, who, rights)

    def _issue(self, into: Path, name: str, who: str, rights: Rights, *, serves: bool, days: int) -> None:
        _make(into)
        issued = self._authority.issue([name], now=_now(), serves=serves, asks=True, days=days)
        until = _now().timestamp() + days * 86_400
        credentials = user_credentials(self._account, who, rights, expires_at=until)
        if serves:  # a node: before anybody has them, as they may have to be taken back
            _add_line(self.directory / _ISSUED, f"{who} {credentials.key.public} {int(until)}")
        for file, content in (
            (identity.AUTHORITY, self._authority.certificate),
            (identity.UNIT, self._layout.unit.encode() + b"\n"),
            (identity.KEY, issued.key),
            (identity.CERTIFICATE, issued.certificate),
            (identity.CREDENTIALS, credentials.text().encode()),
        ):
            write_private(into / file, content)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _add_line(path: Path, line: str) -> None:
    """Beside others who do the same. Raises HostError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror}", hint="it keeps what was issued there") from error
    try:
        os.write(descriptor, f"{line}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise HostError(f"cannot write in {directory}: {error.strerror}") from error


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
