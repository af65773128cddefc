"""The fleet's certificate authority, its certificates of nodes and the entry, and TLS with them.

A node's certificate is for servers only and an entry's for clients only, so that TLS itself refuses
one node that connects to another.
"""

from __future__ import annotations

import os
import re
import ssl
import tempfile
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...backends.errors import InvalidArgument

AUTHORITY = "authority"
"""The name of the authority's own files."""
ENTRY = "entry"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DOMAIN = "fleet.inferd.internal"


class KeyFiles(NamedTuple):
    """The files of a certificate and of its private key."""

    certificate: Path
    key: Path

    @classmethod
    def of(cls, folder: Path, name: str) -> KeyFiles:
        return cls(folder / f"{name}.pem", folder / f"{name}.key")


def is_node_name(text: str) -> bool:
    """Return whether *text* can be a name in a certificate."""
    return _NAME.fullmatch(text) is not None


def server_name(node: str) -> str:
    """Return the name that TLS checks in the certificate of *node*. It is not in any DNS."""
    return f"{node}.{_DOMAIN}"


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically; only its owner may read it."""
    _write_whole(path, data, 0o600)


def write_public(path: Path, data: bytes) -> None:
    """Write a file atomically; all users may read it."""
    _write_whole(path, data, 0o644)


def _write_whole(path: Path, data: bytes, mode: int) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


AUTHORITY_DAYS = 3650
DAYS_MAX = 3650
CLOCK_SKEW = timedelta(minutes=5)
"""A new certificate is valid this much earlier, for machines whose clocks are slow."""
Validity: TypeAlias = tuple[datetime, datetime]


class Role(Enum):
    """The use of a certificate."""

    NODE = (ExtendedKeyUsageOID.SERVER_AUTH,)
    ENTRY = (ExtendedKeyUsageOID.CLIENT_AUTH,)
    RAY = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
    """Members of a Ray cluster, the entry's machine among them, connect to each other."""


class Authority:
    """The authority in a folder: its certificate, and its key, which only `inferd fleet init`
    reads. *title* is the name in its certificate.
    """

    def __init__(self, folder: Path, title: str = "inferd fleet authority"):
        self._title = title
        self._files = KeyFiles.of(folder, AUTHORITY)
        self._folder = folder

    def open_or_create(self) -> bool:
        """Read the authority, or make it if the folder has none; return whether it is new.

        :raises InvalidArgument: it cannot be read or written, or only one of its files is there.
        """
        certificate, key = self._files.certificate.exists(), self._files.key.exists()
        try:
            if not certificate and not key:
                self._create()
                return True
            self._key = _read_key(self._files.key)
            self._certificate = read_certificate(self._files.certificate)
        except OSError as exc:
            raise InvalidArgument(
                f"the authority in {self._folder} cannot be used: {exc.strerror or exc}",
                hint="use the folder in which `inferd fleet init` has made it, as its owner",
            ) from None
        return False

    def _create(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._title)])
        usage = x509.KeyUsage(
            key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        self._certificate = (
            _builder(name, name, self._key.public_key(), _validity(AUTHORITY_DAYS, None))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        _write(self._files, self._certificate, self._key)

    def issue(
        self,
        name: str,
        role: Role,
        days: int,
        *,
        since: datetime | None = None,
        addresses: Collection[str] = (),
    ) -> KeyFiles:
        """Write a new key and certificate of *name*, valid for *days* from *since* or from now, and
        return their files. It is for the name of the node, or for *addresses*.

        :raises InvalidArgument: the name or the number of days is not allowed, or a file cannot be
            written.
        """
        is_taken = name == AUTHORITY
        if role is not Role.RAY:
            is_taken |= (name == ENTRY) != (role is Role.ENTRY)
        if not is_node_name(name) or is_taken:
            raise InvalidArgument(
                f"{name!r} cannot be the name of a node",
                hint="use up to 63 letters a-z, digits and -, such as gpu-1",
            )
        if not 0 < days <= DAYS_MAX:
            raise InvalidArgument(
                f"a certificate cannot be valid for {days} days", hint=f"give 1 to {DAYS_MAX}"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        files = KeyFiles.of(self._folder, name)
        try:
            validity = _validity(days, since)
            names = [_general_name(address) for address in addresses or (server_name(name),)]
            certificate = self._sign(name, names, role, validity, key.public_key())
            _write(files, certificate, key)
        except OSError as exc:
            raise InvalidArgument(
                f"cannot write {files.certificate}: {exc.strerror or exc}",
                hint="choose a folder that you can write",
            ) from None
        return files

    def _sign(
        self,
        name: str,
        alternative_names: list[x509.GeneralName],
        role: Role,
        validity: Validity,
        key: ec.EllipticCurvePublicKey,
    ) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName(alternative_names)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            _builder(subject, self._certificate.subject, key, validity)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(role.value), critical=True)
            .add_extension(names, critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _validity(days: int, since: datetime | None) -> Validity:
    begin = since or datetime.now(UTC)
    return begin - CLOCK_SKEW, begin + timedelta(days=days)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, validity: Validity
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity[0])
        .not_valid_after(validity[1])
    )


def _write(files: KeyFiles, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = serialization.Encoding.PEM
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_private(files.key, key.private_bytes(pem, form, plain))
    write_public(files.certificate, certificate.public_bytes(pem))


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    except ValueError:
        pass
    raise InvalidArgument(
        f"{path} is not the key of a fleet's authority", hint="restore it, or make a new authority"
    )


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a PEM file.

    :raises InvalidArgument: the file has none.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise InvalidArgument(
            f"{path} has no certificate in PEM form", hint="make one with `inferd fleet init`"
        ) from None


def is_owner_only(path: Path) -> bool:
    """Return whether only the owner of a file may read it."""
    return not os.stat(path).st_mode & 0o077


DATA, REPORTS = "inferd-data/1", "inferd-reports/1"
"""The protocols on a relay's connections, as ALPN names them."""
EXPIRES_SOON_DAYS = 30
RENEW = "renew it: `inferd fleet init --renew`, copy the files, and restart"
_EXPIRED, _NOT_YET_VALID, _WRONG_NAME = 10, 9, 62
"""OpenSSL's codes of failed verifications (X509_V_ERR)."""


def node_context(folder: Path, name: str) -> ssl.SSLContext:
    """Return the context of a node's listener, which serves entries only.

    :raises InvalidArgument: its files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _load(context, folder, name, (DATA, REPORTS))


def entry_context(folder: Path, name: str, protocol: str) -> ssl.SSLContext:
    """Return the context of an entry's connections for *protocol*; they check the node's name.

    :raises InvalidArgument: its files cannot be used.
    """
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), folder, name, (protocol,))


def _load(
    context: ssl.SSLContext, folder: Path, name: str, protocols: tuple[str, ...]
) -> ssl.SSLContext:
    files, authority = KeyFiles.of(folder, name), KeyFiles.of(folder, AUTHORITY).certificate
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(list(protocols))
    try:
        check_files(files)
        context.load_verify_locations(authority)
        context.load_cert_chain(files.certificate, files.key)
    except OSError as exc:  # ssl's errors are OSErrors, too
        missing = isinstance(exc, FileNotFoundError)
        cause = "a file is missing" if missing else exc.strerror or exc
        raise InvalidArgument(
            f"the certificate of {name} in {folder} cannot be used: {cause}",
            hint=f"copy {name}.pem, {name}.key and {authority.name} there, from the folder in which"
            " `inferd fleet init` has made them",
        ) from None
    return context


def check_files(files: KeyFiles) -> None:
    """Check that a certificate is valid now, and that only its owner can read its key.

    :raises InvalidArgument: it has expired, or others can read its key.
    :raises OSError: a file cannot be read.
    """
    certificate = read_certificate(files.certificate)
    if certificate.not_valid_after_utc < datetime.now(UTC):
        raise InvalidArgument(
            f"the certificate {files.certificate} expired on"
            f" {certificate.not_valid_after_utc:%Y-%m-%d}",
            hint=RENEW,
        )
    if not is_owner_only(files.key):
        raise InvalidArgument(
            f"other users can read the private key {files.key}",
            hint=f"chmod 600 {files.key}; if others may have read it, {RENEW}",
        )


def days_left(folder: Path, name: str) -> float:
    """Return the days until the certificate of *name* expires."""
    certificate = read_certificate(KeyFiles.of(folder, name).certificate)
    return (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400


def failure_reason(exc: OSError, node: str) -> str:
    """Return why an entry's connection to *node* failed, as a sentence with a remedy."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return _verification_reason(exc, node)
    if isinstance(exc, ssl.SSLError):
        return f"TLS failed ({exc.reason or exc}): is a relay of inferd at this address?"
    return exc.strerror or str(exc) or type(exc).__name__


def refusal_reason(folder: Path, name: str) -> str:
    """Return why a node may have closed a connection without a word. With TLS 1.3, this is how it
    refuses a certificate, after the entry's part of the handshake.
    """
    if days_left(folder, name) <= 0:
        return f"the node refuses the entry's certificate, which has expired: {RENEW}"
    return (
        "the node closed the connection after the handshake: it refuses the entry's certificate."
        " Both need certificates of one authority, and the entry's must be an entry's"
    )


def _verification_reason(exc: ssl.SSLCertVerificationError, node: str) -> str:
    if exc.verify_code == _EXPIRED:
        return f"the node's certificate has expired: {RENEW}"
    if exc.verify_code == _NOT_YET_VALID:
        return "the node's certificate is not valid yet: compare the clocks of both machines"
    if exc.verify_code == _WRONG_NAME:
        return f"the certificate at this address is not that of {node}: correct the address"
    return (
        f"the node's certificate does not come from the entry's authority ({exc.verify_message}):"
        " both need certificates of one `inferd fleet init`"
    )
