"""The reasons for which a head refuses a program, by a server of gRPC in place of Ray's head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from inferd.gateways.fleet.ray_cluster.keys import issue_for_members, ray_environment
from inferd.gateways.fleet.ray_cluster.refusals import (
    METHOD,
    HeadNotReached,
    HeadRefuses,
    check_head,
    check_own_address,
)

Environment = dict[str, str]
NONE = {"RAY_AUTH_MODE": "disabled"}
LOOPBACK = "127.0.0.1"


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[misc]  # gRPC is not typed here
    """Refuses calls without the token, as Ray does."""

    def __init__(self, token: str):
        self._token = token

    def intercept_service(self, go_on: Callable[[Any], Any], details: Any) -> Any:
        metadata = dict(details.invocation_metadata)
        if self._token and metadata.get("authorization") != f"Bearer {self._token}":
            return grpc.unary_unary_rpc_method_handler(_refuse)
        return go_on(details)


def _refuse(request: bytes, context: Any) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")


@contextmanager
def head(environment: Environment) -> Iterator[str]:
    """Serve the call of `check_head` with these variables until the end of the block."""
    names = ("RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT", "RAY_TLS_CA_CERT", "RAY_AUTH_TOKEN_PATH")
    files = [Path(environment[name]).read_bytes() if name in environment else b"" for name in names]
    key, certificate, authority, token = files
    service, _, method = METHOD.strip("/").partition("/")
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, interceptors=[TokenCheck(token.decode())])
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        if key:
            credentials = grpc.ssl_server_credentials(
                [(key, certificate)], authority, require_client_auth=True
            )
            port = server.add_secure_port(f"{LOOPBACK}:0", credentials)
        else:
            port = server.add_insecure_port(f"{LOOPBACK}:0")
        server.start()
        try:
            yield f"{LOOPBACK}:{port}"
        finally:
            server.stop(None).wait()


def keys(folder: Path, address: str = LOOPBACK) -> Environment:
    issue_for_members(folder, {"entry": [address]}, 30, renew=False)
    return ray_environment(folder, "entry")


def without(environment: Environment, *names: str) -> Environment:
    return {n: value for n, value in environment.items() if n not in names} | {
        "RAY_AUTH_TOKEN_PATH": environment["RAY_AUTH_TOKEN_PATH"] + ".missing"
    }


def test_a_head_takes_its_own_members_and_names_what_is_wrong_with_others(tmp_path: Path) -> None:
    own, other = keys(tmp_path / "own"), keys(tmp_path / "other")
    with head(own) as address:
        check_head(address, own)
        for environment, cause in (
            (NONE, "wants TLS: copy the folder `ray`"),
            (other, "certificate of another authority"),
            (other | {"RAY_TLS_CA_CERT": own["RAY_TLS_CA_CERT"]}, "refuses this member's cert"),
            (without(own), "refuses a member without its token: copy the folder `ray`"),
            (own | {"RAY_AUTH_TOKEN": "wrong"}, "refuses this member's token"),
        ):
            with pytest.raises(HeadRefuses, match=cause):
                check_head(address, environment)
    with pytest.raises(HeadNotReached, match="no head of Ray answers"):
        check_head(address, own)


def test_a_head_without_tls_or_at_another_address_is_named(tmp_path: Path) -> None:
    own = keys(tmp_path / "own")
    with head(NONE) as address:
        check_head(address, NONE)
        with pytest.raises(HeadRefuses, match="does not use TLS"):
            check_head(address, own)
    with pytest.raises(HeadRefuses, match=r"for 127\.0\.0\.1, but .* as 10\.0\.0\.9"):
        check_own_address("10.0.0.9", Path(own["RAY_TLS_SERVER_CERT"]))
    elsewhere = keys(tmp_path / "elsewhere", "10.0.0.1")
    with head(elsewhere) as address, pytest.raises(HeadRefuses, match="not for this address"):
        check_head(address, elsewhere)
