"""The descriptors that a client has passed: their contents are sent to nodes in parts."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Sequence

from ....backends.errors import Busy, InvalidArgument, ProtocolError, TooLarge
from ....ipc.messages import TENSOR_BYTES_MAX
from ....ipc.server.client_descriptors import UserDescriptors
from ....ipc.server.shares import SharedLimit
from ....wire.frames import pack_frame
from ..link import CONTENTS_BYTES_MAX, CONTENTS_MAX, PART_BYTES, ContentKind
from .upstream import Upstream

SENT_BYTES_MAX = 256 << 20
"""Bytes of contents that are on their way to nodes, shared by all users."""
_END = pack_frame([ContentKind.END])
_DROP = pack_frame([ContentKind.DROP])


class PassedDescriptors:
    """The descriptors of a connection that no request has taken. Lives on the entry's event loop.

    *uid* is the client's user, and *limit* the bytes on their way of all users.
    """

    def __init__(self, user: UserDescriptors, uid: int, limit: SharedLimit):
        self._user, self._uid, self._limit = user, uid, limit
        self._unclaimed: deque[int] = deque()

    def add(self, descriptors: Sequence[int]) -> None:
        """Add descriptors that have arrived.

        :raises ProtocolError: there are too many that no request has taken.
        """
        self._user.note_received(len(descriptors))
        self._unclaimed.extend(descriptors)
        if len(self._unclaimed) > CONTENTS_MAX:
            raise ProtocolError(f"more than {CONTENTS_MAX} descriptors that no call claims")

    def claim(self, count: int) -> list[int]:
        """Return the first *count* of them; the caller closes them.

        :raises InvalidArgument: there are fewer.
        """
        if len(self._unclaimed) < count:
            raise InvalidArgument(
                f"the call refers to {count} descriptors, but {len(self._unclaimed)} were passed",
                hint="send them with the frame, by SCM_RIGHTS",
            )
        return [self._unclaimed.popleft() for _ in range(count)]

    def close(self, descriptors: Sequence[int]) -> None:
        """Close descriptors that were claimed."""
        self._user.close(tuple(descriptors))

    def close_unclaimed(self) -> None:
        """Close the others."""
        self.close(self._unclaimed)
        self._unclaimed.clear()

    async def send_contents(self, descriptors: Sequence[int], upstream: Upstream) -> None:
        """Send the contents of claimed descriptors to a node, for the next request with contents.

        :raises InvalidArgument: a descriptor is not a file, or cannot be read.
        :raises TooLarge: the contents exceed a limit.
        :raises Busy: the contents of this user, or of all, that are on their way exceed one.
        :raises Timeout: a descriptor takes too long.
        """
        self._user.check_call()
        sizes = [await self._user.run(_size_of, descriptor) for descriptor in descriptors]
        total = sum(sizes)
        if total > CONTENTS_BYTES_MAX:
            raise TooLarge(
                f"tensors of {total} bytes; the limit of a request to a fleet is"
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
                _read_part, descriptor, min(PART_BYTES, size - offset), offset
            )
            if not part:
                break
            await upstream.send_and_wait(pack_frame([ContentKind.PART, part]))
            offset += len(part)
        upstream.send_frame(_END)


def _size_of(descriptor: int) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument("the tensor's descriptor is not a file", hint="pass a memfd")
    if status.st_size > TENSOR_BYTES_MAX:
        raise TooLarge(
            f"a tensor of {status.st_size} bytes; the limit is {TENSOR_BYTES_MAX}",
            data={"bytes": status.st_size, "tensor_bytes_max": TENSOR_BYTES_MAX},
        )
    return status.st_size


def _read_part(descriptor: int, size: int, offset: int) -> bytes:
    try:
        return os.pread(descriptor, size, offset)
    except OSError as exc:
        raise InvalidArgument(f"the tensor's descriptor cannot be read: {exc.strerror}") from None
