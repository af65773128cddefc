"""The named tensors of `compute`: parameters and prompts in, outputs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from ...backends.errors import InvalidArgument
from ...ipc import messages as w
from ...ipc.server.connection import Request
from .arguments import tensor_bytes, tensor_type

CONFIGURATION_NAMES = ("1", "metadata", "options", "config")
"""Names of the inputs of type u8 that are parameters as JSON; any other input is a prompt."""
NamedTensor: TypeAlias = tuple[str, w.Tensor]


async def read_tensors(request: Request, inputs: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Return *inputs* with their bytes, also those in descriptors."""
    return [
        (name, msgspec.structs.replace(t, data=await tensor_bytes(request, t), fd=-1))
        for name, t in inputs
    ]


def is_configuration(name: str, tensor: w.Tensor) -> bool:
    """Return whether an input holds parameters."""
    return name in CONFIGURATION_NAMES and tensor_type(tensor) == w.TENSOR_TYPES["u8"]


def prompts_of(inputs: Sequence[NamedTensor], *, echoes: bool) -> list[w.Tensor]:
    """Return the prompts among *inputs*; only a model that *echoes* tensors has several.

    :raises InvalidArgument: there are several, and the model does not echo tensors.
    """
    prompts = [(name, tensor) for name, tensor in inputs if not is_configuration(name, tensor)]
    if len(prompts) > 1 and not echoes:
        names = [name for name, _ in prompts]
        raise InvalidArgument(
            f"{len(prompts)} tensors are prompts: {', '.join(repr(n[:50]) for n in names[:8])}",
            hint="send one prompt; parameters are JSON of type u8 in a tensor named"
            f" {' or '.join(CONFIGURATION_NAMES)}",
            data={"prompts": names},
        )
    return [tensor for _, tensor in prompts]


def echoed_outputs(data: bytes, inputs: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Return *inputs* with the bytes of *data*, which echoes all prompts one after another."""
    outputs, begin = [], 0
    for name, tensor in inputs:
        if is_configuration(name, tensor):
            outputs.append((name, tensor))
            continue
        end = begin + len(tensor.data)
        outputs.append((name, _like(data[begin:end], tensor)))
        begin = end
    return outputs


def text_output(data: bytes, prompt: w.Tensor) -> NamedTensor:
    """Return the output *data*, with the prompt's type and shape if it is as long."""
    return "output", _like(data, prompt)


def _like(data: bytes, prompt: w.Tensor) -> w.Tensor:
    if len(data) == len(prompt.data):
        return msgspec.structs.replace(prompt, data=data)
    return w.Tensor(data=data, dimensions=[len(data)], type=w.TENSOR_TYPES["u8"])
