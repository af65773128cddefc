"""A socket before another one, which can lose what a server sends, and cut the connections."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self


class LossyPath:
    """Passes the bytes of connections between clients and the server at *server_path*.

    After `lose_replies` the bytes of the server go to `lost` instead, at once or from the request
    on that has certain bytes, until `cut` closes the connections. Later ones pass all bytes.
    """

    def __init__(self, folder: Path, server_path: str | Path):
        self.path = str(folder / "lossy.sock")
        self.lost = bytearray()
        self._server_path = str(server_path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._loses = False
        self._loses_at: bytes | None = None
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._listener.bind(self.path)
        self._listener.listen()
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._open):
            end.close()

    def lose_replies(self, at: bytes | None = None) -> None:
        """Pass nothing more of the server, from the first request on that has the bytes *at*."""
        self._loses, self._loses_at = at is None, at

    def cut(self) -> None:
        """Close the present connections."""
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._loses, self._loses_at = False, None

    def _start(self, work: object, *arguments: object) -> None:
        assert callable(work)
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                self._open += (client, server)
                try:
                    server.connect(self._server_path)
                except OSError:
                    client.shutdown(socket.SHUT_RDWR)
                    continue
                self._start(self._pass, client, server, False)
                self._start(self._pass, server, client, True)

    def _pass(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if replies and self._loses:
                    self.lost += data
                    continue
                if not replies and self._loses_at is not None and self._loses_at in data:
                    self._loses = True
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
