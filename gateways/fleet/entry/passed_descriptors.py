"""The descriptors that a client has passed: their contents are sent to nodes in parts."""

from __future__ import annotations

from collections.abc import Sequence

from ....backends.errors import Busy, TooLarge
from ....ipc.server.descriptors import (
    UnclaimedDescriptors,
    UserDescriptors,
    file_size,
    read_tensor,
)
from ....ipc.server.fairness import SharedLimit
from ....wire.frames import pack_frame
from ..link import CONTENTS_BYTES_MAX, PART_BYTES, ContentKind
from ..nodes.upstream import Upstream

SENT_BYTES_MAX = 256 << 20
"""Bytes of contents that are on their way to nodes, shared by all users."""
_END = pack_frame([ContentKind.END])
_DROP = pack_frame([ContentKind.DROP])


class PassedDescriptors(UnclaimedDescriptors):
    """The descriptors of a connection that no request has taken. Lives on the entry's event loop.

    *uid* is the client's user, and *limit* bounds the bytes of all users on their way to nodes.
    """

    def __init__(self, user: UserDescriptors, uid: int, limit: SharedLimit):
        super().__init__(user)
        self._uid, self._limit = uid, limit

    def close_claimed(self, descriptors: Sequence[int]) -> None:
        self._user.close(tuple(descriptors))

    async def send_contents(self, descriptors: Sequence[int], upstream: Upstream) -> None:
        """Send the contents of claimed descriptors to a node, for the next request with contents.

        :raises InvalidArgument: a descriptor is not a file, or cannot be read.
        :raises TooLarge: the contents exceed a limit.
        :raises Busy: the contents on their way, of this user or of all users, exceed a limit.
        :raises Timeout: a descriptor takes too long.
        """
        self._user.check_call()
        sizes = [await self._user.run(file_size, descriptor) for descriptor in descriptors]
        total = sum(sizes)
        if total > CONTENTS_BYTES_MAX:
            raise TooLarge(
                f"tensors, images or sounds of {total} bytes; the limit of a request to a fleet is"
                f" {CONTENTS_BYTES_MAX}",
                data={"bytes": total, "bytes_max": CONTENTS_BYTES_MAX},
            )
        if not self._limit.fits(self._uid, total):
            raise Busy(
                "too many tensors are on their way to nodes",
                data={"bytes": total, "retry_after_s": 0.1},
            )
        self._limit.take_amount(self._uid, total)
        try:
            for descriptor, size in zip(descriptors, sizes, strict=True):
                await self._send_content(descriptor, size, upstream)
        except BaseException:
            upstream.send_frame(_DROP)
            raise
        finally:
            self._limit.take_amount(self._uid, -total)

    async def _send_content(self, descriptor: int, size: int, upstream: Upstream) -> None:
        offset = 0
        while offset < size:
            part = await self._user.run(
                read_tensor, descriptor, min(PART_BYTES, size - offset), offset
            )
            if not part:
                break
            await upstream.send_and_wait(pack_frame([ContentKind.PART, part]))
            offset += len(part)
        upstream.send_frame(_END)
