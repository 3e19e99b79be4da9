"""The certificate authority of a cluster: nodes, API replicas and the engine show each other what it has signed."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dsec.core.errors import HostError, InvalidArgumentError
from dsec.core.ids import NodeId, parse_node_id

API_NAME: Final = "api.dsec.internal"
AUTHORITY_DAYS: Final = 3_650
ISSUED_DAYS: Final = 365

_NODES: Final = ".node.dsec.internal"
_SKEW: Final = datetime.timedelta(minutes=10)  # clocks of other machines
_SERVER: Final = ExtendedKeyUsageOID.SERVER_AUTH
_CLIENT: Final = ExtendedKeyUsageOID.CLIENT_AUTH


def node_name(node: NodeId) -> str:
    """By which a node is known to whoever connects to it, wherever it is."""
    return node + _NODES


def node_named(name: str) -> NodeId | None:
    """The other way round; None: it is no node's name."""
    try:
        node = parse_node_id(name.removesuffix(_NODES))
    except InvalidArgumentError:
        return None
    return node if name == node_name(node) else None


@dataclass(frozen=True, slots=True)
class Issued:
    certificate: bytes  # PEM
    key: bytes  # PEM


class Authority:
    """Signs certificates. Its key belongs on an operator's machine, not on a node."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, unit: str, *, now: datetime.datetime, days: int = AUTHORITY_DAYS) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _subject(f"dsec {unit} authority")
        builder = (
            _builder(name, name, key, now=now, days=days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> Authority:
        """From PEM. Raises InvalidArgumentError."""
        try:
            private = load_pem_private_key(key, None)
            found = x509.load_pem_x509_certificate(certificate)
        except ValueError as error:
            raise InvalidArgumentError(f"this is not a certificate authority: {error}") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != found.public_key():
            raise InvalidArgumentError("the key is not that of the certificate")
        return cls(found, private)

    @property
    def certificate(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    @property
    def key(self) -> bytes:
        return _key_pem(self._key)

    def issue(
        self, names: Sequence[str], *, now: datetime.datetime, serves: bool, asks: bool, days: int = ISSUED_DAYS
    ) -> Issued:
        """For who `serves` under these names (DNS names or addresses), or `asks` others, or both."""
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [*((_SERVER,) if serves else ()), *((_CLIENT,) if asks else ())]
        days = min(days, (self._certificate.not_valid_after_utc - now).days)
        builder = (
            _builder(_subject(names[0]), self._certificate.subject, key, now=now, days=days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(certificate.public_bytes(Encoding.PEM), _key_pem(key))


def names_of(certificate: bytes) -> tuple[str, ...]:
    """The DNS names of a certificate in PEM. Raises InvalidArgumentError."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise InvalidArgumentError(f"this is not a certificate of the cluster: {error}") from error
    return tuple(names.get_values_for_type(x509.DNSName))


def days_left(certificate: bytes, *, now: datetime.datetime) -> float:
    """Until a certificate in PEM ends; below 0: it has. Raises InvalidArgumentError."""
    try:
        ends = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except ValueError as error:
        raise InvalidArgumentError(f"this is not a certificate: {error}") from error
    return (ends - now) / datetime.timedelta(days=1)


def server_context(authority: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """For who listens: clients must show a certificate of the authority, too. Raises HostError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _load(context, authority, certificate, key)


def client_context(authority: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """For who connects: only the authority's certificates are good, and only under the name that is asked for."""
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), authority, certificate, key)


def _load(context: ssl.SSLContext, authority: Path, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        names = ", ".join(str(path) for path in (authority, certificate, key) if path is not None)
        raise HostError(f"cannot use the certificates {names}: {error}") from error
    return context


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, now: datetime.datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
