"""The descriptors of a connection that no request has taken, and reading of the files in them."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Sequence

from ....backends.errors import InvalidArgument, ProtocolError, TooLarge
from ...messages import TENSOR_BYTES_MAX
from .client_descriptors import UserDescriptors

DESCRIPTORS_MAX = 16
"""Descriptors of a connection that no call has claimed."""


class UnclaimedDescriptors:
    """Descriptors in the order in which a client has passed them. Lives on the event loop."""

    def __init__(self, user: UserDescriptors):
        self._user = user
        self._descriptors: deque[int] = deque()

    def add(self, descriptors: Sequence[int]) -> None:
        """Add descriptors that have arrived.

        :raises ProtocolError: too many descriptors are unclaimed.
        """
        self._user.note_received(len(descriptors))
        self._descriptors.extend(descriptors)
        if len(self._descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError(f"more than {DESCRIPTORS_MAX} descriptors that no call claims")

    def claim(self, count: int) -> list[int]:
        """Return the first *count* descriptors; the caller closes them.

        :raises InvalidArgument: fewer descriptors have arrived.
        """
        if len(self._descriptors) < count:
            raise InvalidArgument(
                f"the call refers to {count} descriptors, but {len(self._descriptors)} were passed",
                hint="send them with the frame, by SCM_RIGHTS",
            )
        return [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close the descriptors, off the event loop."""
        self._user.close(tuple(self._descriptors))
        self._descriptors.clear()


# These run in the thread of the user who passed the descriptor.


def tensor_size(descriptor: int) -> int:
    """Return the size of the tensor in a descriptor.

    :raises InvalidArgument: the descriptor is not that of a file, or cannot be read.
    :raises TooLarge: the tensor exceeds the limit.
    """
    try:
        status = os.fstat(descriptor)
    except OSError as exc:
        raise _unreadable(exc) from None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument("the tensor's descriptor is not a file", hint="pass a memfd")
    if status.st_size > TENSOR_BYTES_MAX:
        raise TooLarge(
            f"a tensor of {status.st_size} bytes; the limit is {TENSOR_BYTES_MAX}",
            data={"bytes": status.st_size, "tensor_bytes_max": TENSOR_BYTES_MAX},
        )
    return status.st_size


def read_tensor(descriptor: int, size: int, offset: int = 0) -> bytes:
    """Return up to *size* bytes of the tensor in a descriptor.

    :raises InvalidArgument: the descriptor cannot be read.
    """
    try:
        return os.pread(descriptor, size, offset)
    except OSError as exc:
        raise _unreadable(exc) from None


def _unreadable(exc: OSError) -> InvalidArgument:
    return InvalidArgument(f"the tensor's descriptor cannot be read: {exc.strerror}")
