"""The graphs and contexts of a guest, with all that is needed to open them again."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ...backends.errors import ErrorFields, TooLarge
from ...backends.tensors import OTHER_TYPES, DeclaredTensors, Tensor
from ...ipc import messages as w

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient
    from ...ipc.client.large_tensors import LargeTensors
    from ...ipc.handles import Graph

HISTORY_BYTES_MAX = 1 << 20
"""The latest bytes of prompts and answers that a context of the prompt interface keeps."""
INPUTS_BYTES_MAX = 64 << 20
"""The most bytes of a context's inputs if one is larger than a frame takes."""
SETTINGS_MAX = 64
"""The number of parameter texts that a context keeps: the latest ones, without repeats."""


@dataclass(eq=False)
class GuestGraph:
    """A graph: the function that loads it, its parameters, and the daemon's handle, which is valid
    in one `generation` of the link. `image` is the path of the image of its contexts' prompts.
    `tensors`: whether its model computes tensors. `model` is the name of its model, and `large` has
    the buffers for its large tensors, both in this generation. `has_large_outputs`: whether no
    reply has taken outputs of its model.
    """

    load: Callable[[AsyncClient, float], Awaitable[Graph]]
    config: bytes = b""
    image: str | None = None
    handle: int = -1
    tensors: bool = False
    model: str = ""
    declared: DeclaredTensors | None = None
    large: LargeTensors | None = None
    has_large_outputs: bool = False
    generation: int = -1
    unloaded: bool = False


@dataclass(eq=False)
class GuestContext:
    """A context: its inputs, its output, and the daemon's handle, valid in one `generation`.

    `has_inputs`: whether the daemon's context has the inputs, which are a `prompt` or `tensors` by
    index. `image` is the path of the prompts' image, or None for the graph's; `images` are those
    that were set as tensors, by index.
    `text` is the output of the last turn, or None while only the daemon has it. `metadata` is the
    metadata of a turn that has ended, else None. `outputs` are those of tensors, once the graph was
    unloaded or if they were too large for a reply (`has_outputs`).
    `in_turn`: whether tokens of a turn are being streamed or pulled. `prefix` is the part of this
    turn's text from before the context was opened again. `failure` is the error of the last turn in
    the form of the protocol, or empty.
    """

    graph: GuestGraph
    handle: int = -1
    generation: int = -1
    has_inputs: bool = False
    settings: dict[bytes, None] = field(default_factory=dict)
    prompt: bytes | None = None
    tensors: dict[int, Tensor] = field(default_factory=dict)
    image: str | None = None
    images: dict[int, bytes] = field(default_factory=dict)
    outputs: list[bytes] = field(default_factory=list)
    has_outputs: bool = False
    text: bytes | None = b""
    piece: bytes = b""
    metadata: bytes | None = None
    in_turn: bool = False
    prefix: bytes = b""
    failure: ErrorFields | None = None

    def clear_output(self, text: bytes | None = b"") -> None:
        """Forget the last turn."""
        self.text, self.piece, self.metadata = text, b"", None
        self.in_turn, self.prefix, self.failure = False, b"", None
        self.outputs, self.has_outputs = [], False

    def keep_outputs(self, outputs: list[bytes]) -> None:
        """Keep the outputs of tensors."""
        self.outputs, self.has_outputs = outputs, True

    @property
    def is_large(self) -> bool:
        """Whether the daemon takes its tensors in buffers only."""
        return self.graph.has_large_outputs or any(map(is_large, self.tensors.values()))

    def check_growth(self, index: int, tensor: Tensor) -> None:
        """Check that the context may hold *tensor*, which is large, as its input *index*.

        :raises TooLarge: its inputs would have too many bytes.
        """
        others = (len(other.data) for at, other in self.tensors.items() if at != index)
        size = sum(others) + len(tensor.data)
        if size > INPUTS_BYTES_MAX:
            raise TooLarge(
                f"the inputs of the context have {size} bytes, more than {INPUTS_BYTES_MAX}",
                hint="send smaller tensors",
                data={"bytes": size, "bytes_max": INPUTS_BYTES_MAX},
            )

    def end_turn(self, text: bytes, metadata: bytes) -> None:
        """Keep the output of a turn that has ended; *text* is the part after `prefix`."""
        self.text, self.piece, self.metadata = self.prefix + text, b"", metadata
        self.in_turn, self.prefix = False, b""

    def note_answer(self, prompt: str, answer: str) -> None:
        """Keep a turn of the prompt interface, whose prompt follows all earlier turns."""
        history = (self.prompt or b"") + prompt.encode() + answer.encode()
        self.prompt = history[-HISTORY_BYTES_MAX:]

    def note_settings(self, data: bytes) -> None:
        """Keep parameters that the daemon has accepted."""
        self.settings.pop(data, None)
        self.settings[data] = None
        if len(self.settings) > SETTINGS_MAX:
            del self.settings[next(iter(self.settings))]

    def described(self, metadata: bytes, followed: Iterable[str] = ()) -> bytes:
        """Return the daemon's *metadata*, with the error of the last turn if that is not in it,
        because the daemon has opened the context again or did not get the call. Keys that are
        *followed* here are not ignored, although the daemon has no use for them.
        """
        here = [key for key in followed if isinstance(self._last_value(key), bool)]
        if not self.failure and not here:
            return metadata
        found = json.loads(metadata)
        found["ignored"] = [k for k in found["ignored"] if k.replace("_", "-") not in here]
        if not self.failure:
            return msgspec.json.encode(found)
        if found["stop_reason"] is None:
            found["stop_reason"] = self.failure["name"]
            found["stop_detail"] = self.failure["message"]
        return msgspec.json.encode({"error": self.failure} | found)

    def wants(self, key: str) -> bool:
        """Return whether *key* was last set to true."""
        return self._last_value(key) is True

    def _last_value(self, key: str) -> Any:
        values = [read_key(text, key) for text in (self.graph.config, *self.settings)]
        return next((value for value in reversed(values) if value is not None), None)


def read_key(data: bytes, key: str) -> Any:
    """Return the value of a key in JSON; None if it is missing, or the text is not an object."""
    try:
        found = json.loads(data)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    return found.get(key, found.get(key.replace("-", "_")))


def is_large(tensor: Tensor) -> bool:
    """Return whether no frame takes a tensor."""
    return len(tensor.data) > w.TENSOR_BYTES_MAX


def as_message(tensor: Tensor) -> w.Tensor:
    """Return a tensor for the daemon."""
    return w.Tensor(data=tensor.data, dimensions=list(tensor.dimensions), type=tensor.type)


def as_tensor(message: w.Tensor) -> Tensor:
    """Return a tensor of the daemon, which spells types as the input's: by numbers here, except
    those that have none for clients.
    """
    number = OTHER_TYPES[message.type] if isinstance(message.type, str) else message.type
    return Tensor(message.data, tuple(message.dimensions), number)
