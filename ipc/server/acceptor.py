"""Accepting of connections, within their share of the event loop's time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from .descriptors import ClientDescriptors
from .fairness import LoopTime

ACCEPT_PAUSE_S = 0.1
ACCEPTS_AT_ONCE = 16
"""Connections served before other events are handled."""
ACCEPTING = -1
"""The user to whom the loop time of accepting is charged, because the user of a new connection is
not known yet.
"""
ACCEPTING_PAUSE_S = 0.03
"""Maximum time for which no connection is accepted because accepting has used up its share."""
CLOSED_AT_ONCE = 16
"""Maximum number of connections, closed by their clients, accepted for each one that is served."""
CLOSING_BACKLOG = 128
"""Closed connections that may still hold a descriptor each while more are accepted."""
CLOSING_PAUSE_S = 0.01


class Acceptor:
    """Accepts connections until it is stopped. Owned by the server, on the daemon's event loop.
    *note_failure* gets the errors of the system.
    """

    def __init__(
        self,
        descriptors: ClientDescriptors,
        loop_time: LoopTime,
        note_failure: Callable[[OSError], None],
    ):
        self._descriptors, self._loop_time = descriptors, loop_time
        self._note_failure = note_failure
        self._scope = anyio.CancelScope()

    def stop(self) -> None:
        """Leave new connections in the listening socket, for the next daemon to accept."""
        self._scope.cancel()

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the time of the body to the share for new connections."""
        begin_s = time.thread_time()
        try:
            yield
        finally:
            self._loop_time.charge(ACCEPTING, time.thread_time() - begin_s)

    async def accept_connections(
        self, listener: socket.socket, serve: Callable[[socket.socket], object]
    ) -> None:
        """Call *serve* with each open connection, until `stop`."""
        with self._scope:
            while True:
                await anyio.wait_readable(listener)
                if self._descriptors.sockets_closing > CLOSING_BACKLOG:
                    await anyio.sleep(CLOSING_PAUSE_S)
                    continue
                if pause_s := self._loop_time.pause_s(ACCEPTING):
                    await anyio.sleep(min(pause_s, ACCEPTING_PAUSE_S))
                try:
                    with self.charged():
                        self._accept_some(listener, serve)
                except OSError as exc:  # no descriptors are left: wait until some are closed
                    self._note_failure(exc)
                    await anyio.sleep(ACCEPT_PAUSE_S)

    def _accept_some(
        self, listener: socket.socket, serve: Callable[[socket.socket], object]
    ) -> None:
        try:
            for _ in range(ACCEPTS_AT_ONCE):
                sock = accept_open(listener)
                if sock is not None:
                    serve(sock)
        except BlockingIOError:
            return  # all are accepted


def accept_open(listener: socket.socket) -> socket.socket | None:
    """Accept a connection that is still open; close those that their clients have closed. A client
    that connects and closes in a loop would otherwise fill the backlog faster than it is emptied.
    """
    for _ in range(CLOSED_AT_ONCE):
        sock, _ = listener.accept()
        sock.setblocking(False)
        try:
            is_open = bool(sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            is_open = True
        except OSError:
            is_open = False
        if is_open:
            return sock
        sock.close()  # nothing is unread, so no descriptor that could block is closed with it
    return None
