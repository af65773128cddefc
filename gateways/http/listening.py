"""The gateway's listening socket, and the refusal of open addresses without keys."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from ...backends.errors import InferdError, InvalidArgument
from ...ipc.server.listener import BACKLOG, UnixListener
from .callers.origins import is_loopback

UNIX_MODE = 0o600
UNREAD_BYTES_MAX = 256 << 10
"""The most that the kernel keeps of a response that the client does not read. The server keeps 64
KiB more.
"""


@dataclass(frozen=True, slots=True)
class Address:
    """A path, or a host and a port; port 0 means any free port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine reach it."""
        return bool(self.path) or is_loopback(self.host)


def parse_address(text: str) -> Address:
    """Return the address that *text* names: HOST:PORT, or unix:PATH.

    :raises InvalidArgument: *text* has another form.
    """
    scheme, _, path = text.partition(":")
    if scheme == "unix" and path.removeprefix("//"):
        return Address(path=str(Path(path.removeprefix("//")).absolute()))
    host, colon, port = text.rpartition(":")
    if colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return Address(host=host.removeprefix("[").removesuffix("]"), port=int(port))
    raise InvalidArgument(
        f"{text!r} is not an address to listen on", hint="give HOST:PORT or unix:PATH"
    )


def check_address(address: Address, has_keys: bool) -> None:
    """Check that an address that other machines reach is opened only with keys.

    :raises InvalidArgument: other machines reach it, and the gateway has no keys.
    """
    if not address.is_local and not has_keys:
        raise InvalidArgument(
            f"without keys, the gateway does not listen on {address.host}, which other machines"
            " reach",
            hint="listen on 127.0.0.1, or give --keys FILE (docs/gateway.md)",
        )


def parse_mode(text: str) -> int:
    """Return the permission bits in octal *text*.

    :raises InvalidArgument: *text* has another form.
    """
    try:
        bits = int(text, 8)
    except ValueError:
        bits = -1
    if not 0 <= bits <= 0o777:
        raise InvalidArgument(f"the mode {text!r} is not octal", hint="give one such as 0600")
    return bits


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Check the files for TLS, before anything listens.

    :raises InvalidArgument: the files cannot be used, or the key has no certificate.
    """
    problem = ""
    if certificate is None and key is not None:
        problem = "--tls-key has no --tls-certificate"
    elif certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        except OSError as exc:  # ssl's errors are OSErrors, too
            problem = f"{certificate} cannot be used for TLS: {exc.strerror or exc}"
    if problem:
        raise InvalidArgument(problem, hint="give a certificate and its key in PEM form")


class Listener:
    """The bound socket, and the text that names it."""

    def __init__(self, address: Address, mode: int = UNIX_MODE):
        self._unix: UnixListener | None = None
        if address.path:
            self._unix = UnixListener(address.path, mode, gateway=True)
            try:
                self._unix.bind()
            except InferdError:
                self._unix.close()
                raise
            self.socket, self.name = self._unix.socket, f"unix:{address.path}"
        else:
            self.socket = _bind(address)
            host, port = self.socket.getsockname()[:2]
            self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Close the socket, and remove its path."""
        if self._unix is not None:
            self._unix.close()
        self.socket.close()


def _bind(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. By default the kernel keeps up to 4 MB for each slow reader.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES_MAX)
            sock.bind(where)
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as exc:
        raise InvalidArgument(
            f"cannot listen on {address.host}:{address.port}: {exc.strerror or exc}",
            hint="choose another address with --listen",
        ) from None
