"""The clients' buffers as a worker maps them, and the tensors of a computation in them.

Their content can change at any time, also during a computation, which copies as much as its engine
requires (see `GraphModel.new_computation`). A request that waits has no copy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import cast

from ...backends.errors import BackendError, InferdError, NotFound, TooLarge
from ...backends.tensors import NamedTensor, Tensor
from .. import messages as m


class MappedBuffers:
    """The mappings by the buffers' handles. Owned by the engine; a computation that reads one keeps
    it mapped until its end.
    """

    def __init__(self) -> None:
        self._views: dict[int, memoryview] = {}
        self._failed: dict[int, str] = {}
        """The reasons for which buffers could not be mapped."""

    def map_buffer(self, command: m.MapBuffer) -> None:
        """Map a buffer, and close its descriptor."""
        try:
            self._views[command.buffer] = memoryview(mmap.mmap(command.fd, command.size))
        except (OSError, ValueError) as exc:
            self._failed[command.buffer] = str(exc)
        finally:
            if command.fd >= 0:
                os.close(command.fd)

    def unmap_buffer(self, buffer: int) -> None:
        """Unmap a buffer once no computation uses it."""
        self._views.pop(buffer, None)
        self._failed.pop(buffer, None)

    def part_of(self, part: m.BufferPart) -> memoryview:
        """Return the bytes of a part of a buffer.

        :raises InferdError: the buffer is not mapped.
        """
        view = self._views.get(part.buffer)
        if view is not None:
            return view[part.offset : part.offset + part.length]
        if (cause := self._failed.get(part.buffer)) is not None:
            raise BackendError(
                f"the buffer {part.buffer} could not be mapped: {cause}",
                hint="register a smaller one, unload models or end other programs",
            )
        raise NotFound(
            f"the buffer {part.buffer} was freed before the computation began",
            hint="free a buffer once the runs that use it have ended",
            data={"buffer": part.buffer},
        )

    def with_inputs(
        self, inputs: Sequence[NamedTensor], parts: Sequence[m.BufferPart]
    ) -> list[NamedTensor]:
        """Return *inputs* with the bytes of those that are *parts* of buffers.

        :raises InferdError: a buffer is not mapped.
        """
        found = {part.name: part for part in parts}
        return [
            (name, self._filled(tensor, found[name])) if name in found else (name, tensor)
            for name, tensor in inputs
        ]

    def _filled(self, tensor: Tensor, part: m.BufferPart) -> Tensor:
        # A view is read as bytes are; msgspec has no type for either of them.
        data = cast(bytes, self.part_of(part))
        return Tensor(data, tensor.dimensions, tensor.type)


def place_outputs(
    outputs: Sequence[NamedTensor], places: Mapping[str, memoryview]
) -> list[NamedTensor]:
    """Write outputs into their *places*, and return all outputs, those without their bytes.

    :raises InferdError: an output does not fit its place.
    """
    for name, tensor in outputs:
        if name in places and len(tensor.data) > len(places[name]):
            raise too_small(name, len(tensor.data), len(places[name]))
    found = []
    for name, tensor in outputs:
        if name in places:
            places[name][: len(tensor.data)] = tensor.data
            tensor = Tensor(b"", tensor.dimensions, tensor.type)
        found.append((name, tensor))
    return found


def too_small(name: str, size: int, place: int) -> InferdError:
    """Return the error of an output that is larger than its place."""
    return TooLarge(
        f"the output {name[:100]!r} has {size} bytes; its place in the buffer has {place}",
        hint="name a larger part of a buffer",
        data={"bytes": size, "bytes_max": place},
    )
