"""TLS contexts of nodes and entries, and the reasons why a connection with them fails."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from ....backends.errors import InvalidArgument
from .authority import is_owner_only, read_certificate
from .folder import AUTHORITY, KeyFiles

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
