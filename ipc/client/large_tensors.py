"""Tensors of a graph's runs that no frame takes, which pass through buffers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from ...backends.errors import TooLarge
from .. import messages as w
from .buffers import Buffer, BufferView, SpareBuffers, places_in, room_of

Inputs: TypeAlias = list[tuple[str, w.Tensor]]
Place: TypeAlias = tuple[str, int, int, int]
"""An output's name, and the handle of a buffer, the offset and the bytes for it there."""
Compute: TypeAlias = Callable[[Inputs, Sequence[Place]], Awaitable[dict[str, w.Tensor]]]
"""Compute the outputs of inputs, those with places into these."""
Read: TypeAlias = Callable[[BufferView, int], bytes]
"""Return a copy of a number of bytes at the begin of a place."""


class LargeTensors:
    """The buffers of a graph's large inputs and outputs, which later runs use again.

    *new_buffer* is that of a client, and *run_in_thread* that of its driver.
    """

    def __init__(
        self,
        new_buffer: Callable[[int], Awaitable[Buffer]],
        run_in_thread: Callable[..., Awaitable[Any]],
    ):
        self._spare = SpareBuffers(new_buffer)
        self._run_in_thread = run_in_thread
        self._reply_bytes = 0
        """The bytes of outputs that were too many for a reply."""

    @property
    def in_buffers(self) -> bool:
        """Whether outputs come in a buffer, because a reply has not taken them."""
        return self._reply_bytes > 0

    def note_outputs(self, error: TooLarge) -> bool:
        """Note the bytes of outputs that a reply has not taken; return whether *error* has them."""
        if "reply_bytes_max" not in error.data or error.data.get("bytes", 0) <= 0:
            return False
        self._reply_bytes = max(self._reply_bytes, error.data["bytes"])
        return True

    def clear(self) -> None:
        """Free the buffers."""
        self._spare.clear()

    async def compute(
        self,
        inputs: Inputs,
        compute: Compute,
        outputs: Callable[[], Awaitable[Sequence[str]]],
        take_memory: Callable[[int], Awaitable[None]] | None = None,
        read: Read = BufferView.read,
    ) -> dict[str, w.Tensor]:
        """Return the outputs of *inputs*. Once a reply has not taken the *outputs*, which have no
        places of their own, they come in a buffer; *take_memory* is called with their bytes before
        they are *read* from it.
        """
        inputs, used = await self._share_inputs(inputs)
        room = self._reply_bytes
        while True:
            try:
                if room:
                    names = await outputs()
                    found = await self._compute_into(
                        room, inputs, compute, names, take_memory, read
                    )
                else:
                    found = await compute(inputs, ())
                break
            except TooLarge as exc:
                is_own = (
                    exc.data.get("bytes_max") == room if room else "reply_bytes_max" in exc.data
                )
                if not is_own or exc.data.get("bytes", 0) <= room:
                    raise
                room = exc.data["bytes"]
                self._reply_bytes = max(self._reply_bytes, room)
        if used is not None:
            self._spare.put_back(used)
        return found

    async def _share_inputs(self, inputs: Inputs) -> tuple[Inputs, Buffer | None]:
        """Return *inputs* with those that no frame takes in a buffer, and this buffer."""
        large = [one.data for _, one in inputs if len(one.data) > w.TENSOR_BYTES_MAX]
        if not large:
            return inputs, None
        sizes = list(map(len, large))
        buffer = await self._spare.take(room_of(sizes))
        shared, views = list(inputs), iter(places_in(buffer, sizes))
        for number, (name, tensor) in enumerate(inputs):
            if len(tensor.data) > w.TENSOR_BYTES_MAX:
                view = next(views)
                await self._run_in_thread(partial(view.write, tensor.data))
                fields = {"dimensions": tensor.dimensions, "type": tensor.type}
                shared[number] = name, msgspec.structs.replace(view.as_input(), **fields)
        return shared, buffer

    async def _compute_into(
        self,
        room: int,
        inputs: Inputs,
        compute: Compute,
        names: Sequence[str],
        take_memory: Callable[[int], Awaitable[None]] | None,
        read: Read,
    ) -> dict[str, w.Tensor]:
        """Return the outputs of *inputs*, those with *names* from a buffer with *room* bytes for
        each.
        """
        sizes = [room] * len(names)
        buffer = await self._spare.take(max(1, room_of(sizes)))
        views = dict(zip(names, places_in(buffer, sizes), strict=True))
        found = await compute(inputs, [view.as_place(name) for name, view in views.items()])
        if take_memory is not None:
            await take_memory(sum(found[name].length for name in names))
        for name, view in views.items():
            tensor = found[name]
            data = await self._run_in_thread(partial(read, view, tensor.length))
            found[name] = w.Tensor(data=data, dimensions=tensor.dimensions, type=tensor.type)
        self._spare.put_back(buffer)
        return found
