"""A gateway's process for the tests, and clients of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from inferd.gateways.http.callers import new_key
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd_process

CALL_S_MAX = 60.0
SERVING = "serving HTTP on "


class Server(Protocol):
    """A daemon, or the entry of a fleet."""

    @property
    def socket(self) -> str: ...


class RunningGateway:
    """A gateway's process; `url` is its address for HTTP clients."""

    def __init__(self, process: subprocess.Popen[bytes], address: str):
        self.process, self.address = process, address
        self.url = f"http://{address}"
        host, _, port = address.rpartition(":")
        self.host, self.port = host, int(port) if port.isdigit() else 0


@contextmanager
def gateway(daemon: Server, *options: str, listen: str = "127.0.0.1:0") -> Iterator[RunningGateway]:
    """Run `inferd gateway`."""
    arguments = ("gateway", "--listen", listen, *options)
    with inferd_process(*arguments, socket=daemon.socket) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline().decode()
            assert line.startswith(SERVING), line
            yield RunningGateway(process, line.removeprefix(SERVING).strip())
        finally:
            process.kill()
            process.communicate()


@contextmanager
def keyed_gateway(
    daemon: RunningDaemon, folder: Path, names: Iterable[str], *options: str
) -> Iterator[tuple[RunningGateway, dict[str, str]]]:
    """Run `inferd gateway` with a key for each name, and yield it with the keys."""
    made = {name: new_key(name) for name in names}
    file = folder / "keys.toml"
    file.write_text("".join(entry for _, entry in made.values()))
    with gateway(daemon, "--keys", str(file), *options) as running:
        yield running, {name: key for name, (key, _) in made.items()}


def new_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1, and return its file and that of its key."""
    certificate, key = folder / "c.pem", folder / "k.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def tls_options(certificate: Path, key: Path) -> tuple[str, ...]:
    """Return the options for a gateway with TLS."""
    return ("--tls-certificate", str(certificate), "--tls-key", str(key))
