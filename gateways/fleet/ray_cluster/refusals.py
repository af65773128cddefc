"""The reasons why the head of a Ray cluster refuses a program, found by a call before Ray's own.

Ray itself retries for 20 to 80 s, and then names no reason.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import grpc
from cryptography import x509

from ..certificates import read_certificate

CALL_S_MAX = 5.0
METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""A call without parameters, which each program makes when it connects."""
COPY = "copy the folder `ray` of the certificates from where `inferd fleet init --ray` has made it"


class HeadNotReached(Exception):
    """Nothing answers at the address of the head."""


class HeadRefuses(Exception):
    """The head refuses this program."""


def check_head(address: str, environment: Mapping[str, str] = os.environ) -> None:
    """Check that a head answers at *address*, and accepts the certificate and token that Ray's
    programs use with the variables *environment*.

    :raises HeadNotReached: nothing answers there.
    :raises HeadRefuses: the head refuses them or has a certificate of another authority, or this
        member's certificate is not for its address.
    """
    token = _token(environment)
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with _channel(address, environment) as channel:
        try:
            channel.unary_unary(METHOD)(b"", timeout=CALL_S_MAX, metadata=metadata)
        except grpc.RpcError as exc:
            if exc.code() is grpc.StatusCode.UNAUTHENTICATED:
                cause = "this member's token" if token else f"a member without its token: {COPY}"
                raise HeadRefuses(f"the head of Ray at {address} refuses {cause}") from None
            cause = tls_failure(str(exc.details()), has_tls=_has_tls(environment))
            if cause:
                raise HeadRefuses(f"the head of Ray at {address} {cause}") from None
            raise HeadNotReached(f"no head of Ray answers at {address}") from None
    if _has_tls(environment):
        check_own_address(own_address(address), Path(environment["RAY_TLS_SERVER_CERT"]))


def own_address(head: str) -> str:
    """Return the address of this machine, by which the other members of the cluster know it."""
    host, _, port = head.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), CALL_S_MAX) as connection:
        return str(connection.getsockname()[0])


def check_own_address(address: str, certificate: Path) -> None:
    """Check that a member's certificate is for its address; otherwise other members cannot connect.

    :raises HeadRefuses: the certificate is not for *address*.
    """
    extensions = read_certificate(certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = [str(one) for one in names.get_values_for_type(x509.IPAddress)]
    if address not in found:
        raise HeadRefuses(
            f"{certificate} is for {', '.join(found) or 'no address'}, but the cluster knows this"
            f" machine as {address}: `inferd fleet init --renew --ray NAME={address}`"
        )


def tls_failure(details: str, *, has_tls: bool) -> str:
    """Return what the head does, by the details of gRPC's error; empty if TLS has not failed."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return "has a certificate of another authority than this member's"
    if "WRONG_VERSION_NUMBER" in details:
        return "does not use TLS: start it with RAY_USE_TLS=1 and the files of its certificate"
    if "Hostname Verification" in details:
        return "has a certificate that is not for this address"
    if "handshake failed" in details or "Socket closed" in details:
        return "refuses this member's certificate" if has_tls else f"wants TLS: {COPY}"
    return ""


def _channel(address: str, environment: Mapping[str, str]) -> grpc.Channel:
    options = [("grpc.enable_http_proxy", 0)]
    if not _has_tls(environment):
        return grpc.insecure_channel(address, options)
    authority, key, certificate = (
        Path(environment[name]).read_bytes()
        for name in ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT")
    )
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(address, credentials, options)


def _has_tls(environment: Mapping[str, str]) -> bool:
    return environment.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _token(environment: Mapping[str, str]) -> str:
    """Return the token as Ray finds it; empty if it uses none."""
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token":
        return ""
    if "RAY_AUTH_TOKEN" in environment:
        return environment["RAY_AUTH_TOKEN"]
    path = environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
