"""Files that an entry on this machine passes to the relay as descriptors, to load models from.

The entry connects to a socket of the relay's own, passes the descriptor with a random token, and
names the token on its data connection. The relay passes the descriptor to the daemon with the
request. No operation on it runs on the event loop, because it can take as long as its sender wants.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import anyio
import anyio.abc

from ....backends.errors import InvalidArgument
from ....ipc.server.descriptors import BlockingThread
from ....ipc.server.listener import UnixListener
from ....wire.descriptors import read_with_descriptors
from ..link import HANDSHAKE_S_MAX, RECEIVED, REFUSED, TOKEN_BYTES

FILES_MAX = 64
"""Files of all entries that are passed and not yet closed."""
ACCEPT_RETRY_S = 0.1
TAKE_S_MAX = 10.0
"""Time in which the request for a passed file has to follow."""


class PassedFiles:
    """The files by their token, until their requests take them. Lives on the relay's event loop."""

    def __init__(self) -> None:
        self._files: dict[bytes, int] = {}
        self._open: set[int] = set()
        self._closer = BlockingThread("passed-files")

    async def serve(
        self, path: str, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Receive files at *path* from processes of this user and of root, until cancelled.

        :raises InvalidArgument: the socket cannot be used.
        """
        listener = UnixListener(path, 0o600, gateway=True)
        listener.bind()
        try:
            listener.socket.setblocking(False)
            task_status.started()
            async with anyio.create_task_group() as group:
                while True:
                    try:
                        sock, _ = await asyncio.get_running_loop().sock_accept(listener.socket)
                    except OSError:  # no descriptors are left, for example
                        await anyio.sleep(ACCEPT_RETRY_S)
                    else:
                        group.start_soon(self._receive, sock)
        finally:
            listener.close()

    async def _receive(self, sock: socket.socket) -> None:
        with sock, suppress(OSError), anyio.move_on_after(HANDSHAKE_S_MAX):
            sock.setblocking(False)
            await anyio.wait_readable(sock)
            token, descriptors, _ = read_with_descriptors(sock, TOKEN_BYTES, 1)
            self._open.update(descriptors)
            is_file = len(token) == TOKEN_BYTES and len(descriptors) == 1
            if not is_file or token in self._files or len(self._open) > FILES_MAX:
                self.close_files(descriptors)
                sock.send(REFUSED)
                return
            self._files[token] = descriptors[0]
            asyncio.get_running_loop().call_later(TAKE_S_MAX, self._drop, token)
            sock.send(RECEIVED)

    def _drop(self, token: bytes) -> None:
        descriptor = self._files.pop(token, None)
        if descriptor is not None:
            self.close_files((descriptor,))

    def take_file(self, token: bytes) -> int:
        """Return the descriptor of a file that was passed with *token*; it belongs to the caller,
        which closes it by `close_files`.

        :raises InvalidArgument: there is no such file.
        """
        descriptor = self._files.pop(token, None)
        if descriptor is None:
            raise InvalidArgument("the file of a load was not passed to the relay in time")
        return descriptor

    def close_files(self, descriptors: Iterable[int]) -> None:
        """Close descriptors; those of passed files in a thread."""
        for descriptor in descriptors:
            if descriptor in self._open:
                self._closer.submit(partial(self._close, descriptor))
            else:
                os.close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._open.discard(descriptor)  # first, as another file may get the number at once
        os.close(descriptor)
