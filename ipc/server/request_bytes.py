"""The memory of requests in flight by user, and its bounds.

A request counts from its decoding to its answer: its parameters, the copies that its call makes of
them, and the results that it collects. Commands to a worker count until they are written to its
socket. Incomplete frames and unread replies have bounds of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from sys import getsizeof
from typing import Any

import msgspec

from ...backends.errors import Busy
from ...wire.frames import ITEMS_MAX
from ..messages import ComputeParams

USER_BYTES_DEFAULT = 64 << 20
TOTAL_BYTES_DEFAULT = 256 << 20
REQUEST_BYTES = 8 << 10
"""Memory of a request without its parameters: the task, its scopes and its coroutines."""
COPIES = 2
"""Copies of a text that a call holds beside its parameters: the encoded text, and the command to
the worker.
"""
SMALL_FRAME_BYTES = 4 << 10
"""Requests in smaller frames may use a reserve, so that users at the bound can make cheap calls."""
TINY_FRAME_BYTES = 256
"""The parameters of a smaller frame are not measured; they need less than `REQUEST_BYTES`."""
WALKED_ITEMS = 2000
"""Items that are measured one by one, which takes 0.2 to 1 us each."""
ITEM_BYTES, NUMBER_FACTOR = 72, 6
"""The memory of the largest item without its content, an empty map, whose frame has one byte; and
the largest ratio of the memory of other contents to their bytes in the frame.
"""
RESERVE_PARTS = 8
RETRY_AFTER_S = 0.5
_CONTAINERS = (dict, list, tuple, msgspec.Struct)


class Reserve(IntEnum):
    """The number of reserves above the bounds that a request may use. Each is an eighth of them."""

    NONE = 0
    RESULT = 1
    """A result of a request that was admitted."""
    SMALL = 2
    """A request in a small frame, also while results have used up their reserve."""
    CANCEL = 3
    """A request that cancels others."""


def params_bytes(params: Any, frame_bytes: int) -> int:
    """Return the memory of a call's decoded *params*; their frame has *frame_bytes*.

    Of parameters with many items, the most that such a frame can need is returned.
    """
    if isinstance(params, ComputeParams) and (found := _compute_bytes(params)):
        return found
    total, items, waiting = 0, 0, [params]
    while waiting:
        container = waiting.pop()
        if isinstance(container, dict):
            parts = [*container, *container.values()]
        elif isinstance(container, msgspec.Struct):
            parts = [getattr(container, name) for name in container.__struct_fields__]
        else:
            parts = container
        items += len(parts)
        if items > WALKED_ITEMS:
            return NUMBER_FACTOR * frame_bytes + ITEM_BYTES * min(frame_bytes, ITEMS_MAX)
        total += sum(map(getsizeof, parts))
        waiting += [part for part in parts if isinstance(part, _CONTAINERS)]
    return total


_TENSOR_BYTES = 512
"""The most memory of the objects of a tensor without its bytes, name and dimensions."""
_HANDLE_BYTES = 48
"""The most memory of a handle in a list, or of a dimension."""


def _compute_bytes(params: ComputeParams) -> int:
    """Return the memory of a computation's named inputs and lists, or 0 if it has no inputs. They
    are not walked, because that takes longer than many computations.
    """
    if not params.inputs:
        return 0
    total = _TENSOR_BYTES + getsizeof(params.traceparent) + getsizeof(params.priority)
    total += _HANDLE_BYTES * (len(params.free) + len(params.keep))
    total += sum(map(getsizeof, params.keep))
    for name, *numbers in params.outputs:
        total += _TENSOR_BYTES + getsizeof(name) + _HANDLE_BYTES * len(numbers)
    for name, tensor in params.inputs:
        total += _TENSOR_BYTES + getsizeof(name) + len(tensor.data)
        total += _HANDLE_BYTES * len(tensor.dimensions)
        if isinstance(tensor.type, str):
            total += getsizeof(tensor.type)
    return total


def request_bytes(params: Any, frame_bytes: int) -> int:
    """Return the memory that a request needs from its decoding on."""
    if frame_bytes <= TINY_FRAME_BYTES:
        return REQUEST_BYTES
    return REQUEST_BYTES + COPIES * frame_bytes + params_bytes(params, frame_bytes)


class RequestBytes:
    """The counts of all users. Owned by the daemon's event loop.

    A user may hold as much as is free, so that users together stay below *total_max*, and at most
    *user_max*. `on_freed` is called at the end of a request with the bytes that it no longer uses.
    """

    def __init__(self, user_max: int = USER_BYTES_DEFAULT, total_max: int = TOTAL_BYTES_DEFAULT):
        self.user_max, self.total_max, self.total = user_max, total_max, 0
        self.on_freed: Callable[[int], None] = lambda _: None
        self._held: dict[int, int] = {}

    def held_by(self, user: int) -> int:
        """Return the bytes that a user holds."""
        return self._held.get(user, 0)

    def check_growth(self, user: int, more: int, reserve: Reserve) -> None:
        """Check that a user may hold *more* bytes. A user who holds none may hold any number, if
        that much is free.

        :raises Busy: a bound is reached.
        """
        parts, held = RESERVE_PARTS + reserve, self._held.get(user, 0)
        user_max = self.user_max * parts // RESERVE_PARTS
        free = self.total_max * parts // RESERVE_PARTS - self.total
        if held and held + more > user_max:
            raise _busy("request-bytes-user-max", "your requests", held, more, self.user_max)
        if held + more > free:
            raise _busy("request-bytes-max", "all requests", self.total, more, self.total_max)

    def add(self, user: int, more: int) -> None:
        """Count *more* bytes of a user, or fewer if that is negative."""
        self.total += more
        held = self._held.get(user, 0) + more
        if held:
            self._held[user] = held
        else:
            self._held.pop(user, None)


def _busy(bound: str, whose: str, held: int, more: int, bytes_max: int) -> Busy:
    return Busy(
        f"{whose} in flight hold {held} bytes; this one needs {more} more, and {bound} is"
        f" {bytes_max}",
        hint=f"wait for answers and try again, send smaller requests, or raise {bound}",
        data={
            "bound": bound,
            "bytes": held,
            "more": more,
            "bytes_max": bytes_max,
            "retry_after_s": RETRY_AFTER_S,
        },
    )


class Charge:
    """The bytes of one request of *user*, until `end`."""

    __slots__ = ("_counts", "_freed", "_user", "size")

    def __init__(self, counts: RequestBytes, user: int):
        self.size = 0
        self._counts, self._user, self._freed = counts, user, 0

    def grow(self, more: int, reserve: Reserve = Reserve.RESULT) -> None:
        """Count *more* bytes.

        :raises Busy: the user, or all users together, would hold too many.
        """
        self._counts.check_growth(self._user, more, reserve)
        self._counts.add(self._user, more)
        self.size += more

    def shrink(self, less: int) -> None:
        """Count *less* bytes fewer."""
        self._counts.add(self._user, -less)
        self.size -= less
        self._freed += less

    def end(self) -> None:
        """End the count; the request has been answered."""
        if self.size:
            self.shrink(self.size)
            self._counts.on_freed(self._freed)
