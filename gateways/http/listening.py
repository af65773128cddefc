"""The gateway's listening sockets, and the refusal of open addresses without keys."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...backends.errors import InferdError, InvalidArgument
from ...ipc.server.listener import BACKLOG, UnixListener
from .heads import LOCAL_NAMES, is_loopback

UNIX_MODE = 0o600
UNREAD_BYTES_MAX = 256 << 10
"""The most that the kernel keeps of a response that the client does not read. The server keeps 64
KiB more.
"""
_Address = tuple[int, tuple[Any, ...]]
"""A family, and an address as `socket.bind` takes it."""
LOOPBACKS = ("127.0.0.1", "::1")
_NO_SUCH_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_PORT_ATTEMPTS = 8
"""Attempts to find a port that is free on all addresses of a name."""


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
            hint="listen on 127.0.0.1, or give --keys FILE; --new-key NAME prints an entry for it",
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


def read_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Read the files for TLS, before anything listens. Return None without a certificate.

    :raises InvalidArgument: the files cannot be used, or the key has no certificate.
    """
    if certificate is None and key is None:
        return None
    problem, context = "--tls-key has no --tls-certificate", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
            return context
        except OSError as exc:  # ssl's errors are OSErrors, too
            problem = f"{certificate} cannot be used for TLS: {exc.strerror or exc}"
    raise InvalidArgument(problem, hint="give a certificate and its key in PEM form")


class Listener:
    """The bound sockets, and the text that names them: several for a name with several addresses,
    because some clients try only the first one.
    """

    def __init__(self, address: Address, mode: int = UNIX_MODE):
        self._unix: UnixListener | None = None
        if address.path:
            self._unix = UnixListener(address.path, mode, gateway=True)
            try:
                self._unix.bind()
            except InferdError:
                self._unix.close()
                raise
            self.sockets, self.name = [self._unix.socket], f"unix:{address.path}"
        else:
            self.sockets = _bind_all(address)
            host, port = self.sockets[0].getsockname()[:2]
            if len(self.sockets) > 1:
                host = address.host
            self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        """Close the sockets, and remove their path."""
        if self._unix is not None:
            self._unix.close()
        for sock in self.sockets:
            sock.close()


def _bind_all(address: Address) -> list[socket.socket]:
    """Return a listening socket for each address of a name, all with the same port.

    :raises InvalidArgument: an address cannot be used. Those that the machine does not have are
        left out if it has another one.
    """
    try:
        found = _addresses_of(address.host)
        for _ in range(_PORT_ATTEMPTS if len(found) > 1 and not address.port else 1):
            try:
                return _bind(found, address.port)
            except OSError as exc:
                error = exc
                if exc.errno != errno.EADDRINUSE:
                    break
    except OSError as exc:
        error = exc
    raise InvalidArgument(
        f"cannot listen on {address.host}:{address.port}: {error.strerror or error}",
        hint="choose another address with --listen",
    )


def _addresses_of(host: str) -> list[_Address]:
    """Return the addresses of a host. A machine's file of hosts may lack one of the
    two that `localhost` has.
    """
    hosts = LOOPBACKS if host.lower().rstrip(".") in LOCAL_NAMES else (host,)
    found = [
        each
        for name in hosts
        for each in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    ]
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def _bind(addresses: Sequence[_Address], port: int) -> list[socket.socket]:
    """Bind a socket to each address; port 0 stands for one that is free on all of them."""
    sockets: list[socket.socket] = []
    error: OSError | None = None
    try:
        for family, (host, _, *rest) in addresses:
            try:
                sockets.append(_listen(family, (host, port, *rest), alone=len(addresses) == 1))
            except OSError as exc:
                if exc.errno not in _NO_SUCH_ADDRESS:
                    raise
                error = exc
                continue
            port = sockets[0].getsockname()[1]
        if not sockets:
            assert error is not None, "a name has an address"
            raise error
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen(family: int, where: tuple[Any, ...], *, alone: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. By default the kernel keeps up to 4 MB for each slow reader.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES_MAX)
        if family == socket.AF_INET6 and not alone:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
