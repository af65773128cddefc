"""The text with which the prompt of a request begins, as far as an entry can read it.

It is only compared with the texts of other requests. It is not the model's input, but two of these
texts begin alike if the inputs do.
"""

from __future__ import annotations

import msgspec

from ....backends.errors import InferdError
from ....ipc.messages import METADATA_INDEX, Call, SetInputParams, Tensor
from .frames import UNREADABLE, Fields, integer_in, is_given, text_in

_items = msgspec.msgpack.Decoder(list[msgspec.Raw])
_options = msgspec.msgpack.Decoder(Fields)
_tensor = msgspec.msgpack.Decoder(Tensor)
_inputs = msgspec.msgpack.Decoder(list[tuple[str, Tensor]])


def is_setup(row: Call, params: Fields) -> bool:
    """Return whether a call prepares a new context, before the one that has its prompt."""
    if row.params is SetInputParams:
        return integer_in(params, "index") == METADATA_INDEX
    return row.sets_up


def setup_text(params: Fields) -> bytes:
    """Return the text that a setup call adds before the prompt: a system prompt, or tools."""
    try:
        return text_in(params, "system").encode() + _tools_in(params)
    except (InferdError, *UNREADABLE):
        return b""  # the node refuses the call


def prompt_text(row: Call, params: Fields) -> bytes:
    """Return the text of the prompt in a request; empty if it has none."""
    fields = {name: raw for name, raw in params.items() if name in row.params.__struct_fields__}
    try:
        return _text_of(fields)
    except (InferdError, *UNREADABLE):
        return b""  # the node refuses the call


def _text_of(params: Fields) -> bytes:
    """Return the text of a tensor, or of messages, tokens or a prompt that follow tools."""
    if "tensor" in params:
        return _tensor.decode(params["tensor"]).data
    if is_given(params, "inputs"):
        return b"".join(tensor.data for _, tensor in _inputs.decode(params["inputs"]))
    head = _tools_in(params)
    for name in ("messages", "prompt_tokens"):
        if is_given(params, name):
            # Not the encoded list, which begins with its length.
            return head + b"".join(bytes(raw) for raw in _items.decode(params[name]))
    return head + text_in(params, "prompt").encode()


def _tools_in(params: Fields) -> bytes:
    if not is_given(params, "options"):
        return b""
    return bytes(_options.decode(params["options"]).get("tools", b""))
