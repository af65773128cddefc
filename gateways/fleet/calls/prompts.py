"""The text with which the prompt of a request begins, as far as an entry can read it.

It is only compared with the texts of other requests. It is not the model's input, but two of these
texts begin alike if the inputs do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from ....backends.errors import InferdError
from ....ipc.messages import Tensor
from ....ipc.messages.contexts import METADATA_INDEX
from .frames import UNREADABLE, Fields, integer_in, is_given, text_in

_items = msgspec.msgpack.Decoder(list[msgspec.Raw])
_options = msgspec.msgpack.Decoder(Fields)
_tensor = msgspec.msgpack.Decoder(Tensor)
_inputs = msgspec.msgpack.Decoder(list[tuple[str, Tensor]])


def is_setup(call: str, params: Fields) -> bool:
    """Return whether a call prepares a new context, before the one that has its prompt."""
    if call == "set_input":
        return integer_in(params, "index") == METADATA_INDEX
    return call in ("reset", "set_options")


def setup_text(call: str, params: Fields) -> bytes:
    """Return the text that a setup call adds before the prompt: a system prompt, or tools."""
    try:
        if call == "reset":
            return text_in(params, "system").encode()
        return _tools_in(params)
    except (InferdError, *UNREADABLE):
        return b""  # the node refuses the call


def prompt_text(call: str, params: Fields) -> bytes:
    """Return the text of the prompt in a request; empty if it has none."""
    read = _READERS.get(call)
    if read is None:
        return b""
    try:
        return read(params)
    except (InferdError, *UNREADABLE):
        return b""  # the node refuses the call


def _chat_text(params: Fields) -> bytes:
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


def _tensor_text(params: Fields) -> bytes:
    return _tensor.decode(params["tensor"]).data if "tensor" in params else b""


def _inputs_text(params: Fields) -> bytes:
    if not is_given(params, "inputs"):
        return b""
    return b"".join(tensor.data for _, tensor in _inputs.decode(params["inputs"]))


def _prompt_of(params: Fields) -> bytes:
    return text_in(params, "prompt").encode()


_READERS: Mapping[str, Callable[[Fields], bytes]] = {
    "set_input": _tensor_text,
    "compute": _inputs_text,
    "run_inference": _tensor_text,
    "prompt_compute": _prompt_of,
    "stream": _chat_text,
    "chat": _chat_text,
    "answers": _chat_text,
}
