"""What runs a model: the `Model` protocol and the values that go in and out of it.

A model is driven by one thread, the engine's. Sequences live in numbered slots, 0 … slots - 1;
`Model` keeps for each the KV state and, after a step, the row of logits that the last decode left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from .adapter_keys import AdapterInfo, AdapterSpec
from .embedder import Embedder, EmbedInfo
from .errors import BackendError, InvalidArgument
from .params import SamplingParams

__all__ = (
    "PLAIN",
    "Chunk",
    "Device",
    "LoadProgress",
    "Memory",
    "MemoryNeed",
    "Message",
    "Model",
    "ModelInfo",
    "ModelSpec",
    "Move",
    "Reckoning",
    "Rendering",
    "Sampler",
    "Shape",
    "TokenProbs",
    "check_devices",
    "length_moved",
    "shift_moves",
)

LoadProgress = Callable[[float], bool]
"""Called with 0.0 … 1.0 while a model loads; answers False to give up the load."""

Message = Mapping[str, Any]
"""One chat message: `role` and `content`, both text; an assistant's may have `tool_calls`."""


class Rendering(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a chat template is told beside the messages."""

    tools: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    """The template's own, by their names."""
    add_generation_prompt: bool = True
    """Whether the prompt ends where an answer begins."""


PLAIN = Rendering()


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to load, and with which model-level parameters.

    `path` names a file, unless `fd` is an open descriptor of one. `slots` sequences can be
    decoded side by side, each with a context of `ctx_size` tokens (0: the model's own, at most
    `CTX_SIZE_DEFAULT_MAX`).
    """

    name: str
    backend: str = "llama"
    path: str = ""
    fd: int = -1
    slots: int = 4
    ctx_size: int = 0
    batch_size: int = 512
    n_gpu_layers: int = 0
    """Layers that run on devices beside the CPU; -1: all."""
    main_gpu: int = -1
    """The one device that has them; -1: all have some."""
    tensor_split: tuple[float, ...] = ()
    """What each device has of them, in proportion; empty: by its free memory."""
    threads: int = 0
    chat_template: str = ""
    """Instead of the one in the file."""
    chat_template_file: str = ""
    """Where that is read from."""
    options: dict[str, Any] = {}
    adapters: tuple[AdapterSpec, ...] = ()
    """Added once the model is loaded."""


class Shape(msgspec.Struct, frozen=True):
    """What of a model's size can be chosen: sequences side by side, tokens of each one's context,
    rows of a step, layers that run on devices.
    """

    slots: int
    ctx_size: int
    batch_size: int
    n_gpu_layers: int = 0

    def of(self, spec: ModelSpec) -> ModelSpec:
        """Return *spec* in this shape."""
        return msgspec.structs.replace(
            spec,
            slots=self.slots,
            ctx_size=self.ctx_size,
            batch_size=self.batch_size,
            n_gpu_layers=self.n_gpu_layers,
        )


class Device(msgspec.Struct, frozen=True):
    """A device beside the CPU that layers can run on, with its memory in bytes."""

    name: str
    free: int
    total: int


def check_devices(spec: ModelSpec, found: list[Device]) -> None:
    """Refuse a choice of devices that there are not. Without any the CPU runs all layers, whatever
    was chosen.

    :raises InvalidArgument: it names a device that is not there.
    """
    names = ", ".join(device.name for device in found)
    if found and spec.main_gpu >= len(found):
        raise InvalidArgument(
            f"main-gpu {spec.main_gpu}: there are {len(found)} devices, {names}",
            hint=f"use 0 to {len(found) - 1}, or -1 for all",
        )
    if found and len(spec.tensor_split) > len(found):
        raise InvalidArgument(
            f"tensor-split has {len(spec.tensor_split)} parts for {len(found)} devices, {names}",
            hint=f"give {len(found)} numbers at most",
        )


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of a loaded model takes of the host's memory, in bytes, and of devices'."""

    weights: int = 0
    context: int = 0
    """KV states of all slots."""
    compute: int = 0
    """What a step works in, and its rows of logits."""
    process: int = 0
    """The vocabulary, libraries, the interpreter."""
    devices: dict[str, int] = {}
    """What is on each device, by its name; not in the figures above."""
    embedding: int = 0
    """What the second context takes that makes embeddings; it is made at its first use, and counts
    in `total` from then on."""
    embedding_devices: dict[str, int] = {}
    """What it takes on devices."""

    @property
    def total(self) -> int:
        """All of the host's."""
        return self.weights + self.context + self.compute + self.process

    def with_embedding(self) -> MemoryNeed:
        """Return what it comes to once embeddings are made."""
        names = {*self.devices, *self.embedding_devices}
        return msgspec.structs.replace(
            self,
            context=self.context + self.embedding,
            devices={
                n: self.devices.get(n, 0) + self.embedding_devices.get(n, 0) for n in sorted(names)
            },
            embedding=0,
            embedding_devices={},
        )


class Reckoning(Protocol):
    """A model that was looked at and not loaded: it tells what loading it would take."""

    @property
    def shape(self) -> Shape:
        """The shape that the spec asks for, with the defaults that the model has for it."""

    @property
    def devices(self) -> list[Device]:
        """The devices that layers could run on, as of now."""

    def need(self, shape: Shape) -> MemoryNeed:
        """Return what the model needs in *shape*.

        :raises LoadFailed: there is no context of this shape.
        """

    def close(self) -> None:
        """Free what looking took."""


Memory = Literal["plain", "window", "recurrent"]
"""What a model remembers. *plain*: of a saved state, any first part can be used. *window* (sliding
attention): only the last tokens are there, so a part only where none that it looks back on is
missing. *recurrent* (and hybrids): the state after the last token alone, nothing in part.
"""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a loaded model is: facts for the scheduler, the sessions and the answers' metadata."""

    description: str
    fingerprint: str
    vocab_size: int
    vocab_hash: str
    ctx_size: int
    ctx_size_trained: int
    batch_size: int
    slots: int
    size_bytes: int
    parameters: int
    token_bytes_max: int
    has_chat_template: bool
    memory: Memory = "plain"
    can_shift: bool = False
    """Tell whether `Model.shift` works."""
    n_gpu_layers: int = 0
    """Layers that run on devices."""
    sampling: dict[str, Any] = {}
    """Parameters of the request level that the file itself recommends."""
    generates: bool = True
    """It answers; an encoder makes embeddings alone."""
    embedding: EmbedInfo | None = None
    """How it makes embeddings; None: it makes none."""
    llama_build_number: int = 0
    llama_commit: str = ""


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive rows of one sequence in a batch.

    `tokens` take the positions `position`, `position + 1`, …; `logits` asks for the logits after
    the last of them.
    """

    slot: int
    tokens: Sequence[int]
    position: int
    logits: bool


Move = tuple[int, int, int]
"""A run of a slot's tokens that moves down: from, to, count."""


def shift_moves(length: int, keep: int, discard: int) -> list[Move]:
    """Return what `Model.shift` moves in a slot of *length* tokens.

    :raises BackendError: the numbers leave nothing to move.
    """
    rest = length - keep - discard
    if keep < 0 or discard < 1 or rest < 1:
        raise BackendError(f"no shift by {discard} after {keep} of {length} tokens")
    tail = (keep + discard, keep, rest)
    return [(0, 0, keep), tail] if keep else [tail]


def length_moved(length: int, moves: Sequence[Move]) -> int:
    """Return how many tokens of *length* are left by *moves*.

    :raises BackendError: a run is empty, not there, behind an earlier one, or leaves a gap.
    """
    end = total = 0
    for begin, to, count in moves:
        if count < 1 or begin < end or begin + count > length or to != total:
            raise BackendError(f"no move of {count} tokens from {begin} to {to}, of {length}")
        end, total = begin + count, total + count
    return total


class TokenProbs(msgspec.Struct, frozen=True):
    """How likely a drawn *token* was, and the likeliest tokens, in order. *value* is the logarithm
    of what the model gave it, or, with `post_sampling_probs`, its probability among what was left.
    """

    token: int
    value: float
    top: list[tuple[int, float]]


class Sampler(Protocol):
    """Picks tokens of one turn. Token *t* is drawn by a generator seeded from (seed, t)."""

    @property
    def complete(self) -> bool:
        """Tell whether the answer may end here by its grammar; false without one."""

    @property
    def probs(self) -> TokenProbs | None:
        """What is told of the token that was drawn last, where `n_probs` asks for it."""

    def close(self) -> None:
        """Free what the sampler holds."""


class Model(Protocol):
    """A loaded model with its context. One thread only; every bad input is refused before it."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        """Return the token ids of *text*.

        *special* reads special tokens' names in the text as these tokens; *bos* adds what the
        model wants at the start (and end) of a prompt.

        :raises InvalidArgument: *text* is no UTF-8.
        """

    def piece(self, token: int) -> bytes:
        """Return the bytes that *token* stands for; a special token's are its name."""

    def is_control(self, token: int) -> bool:
        """Tell whether *token* is a special one that is no text."""

    def is_eog(self, token: int) -> bool:
        """Tell whether *token* ends a generation."""

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN) -> str:
        """Return the prompt that the chat template makes of *messages*, told of *rendering*.

        :raises UnsupportedOperation: the model has no chat template.
        :raises InvalidArgument: the template refuses the messages.
        """

    def sampler(
        self, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int] = ()
    ) -> Sampler:
        """Return a sampler that has seen the tokens of *prompt* and *answer*: of both for its
        penalties, of the answer alone for its grammar.

        :raises InvalidArgument: a bias is for a token that the model does not have, or the grammar
            is none.
        """

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Decode one batch: chunks in ascending slots, in all at most `batch_size` rows.

        :raises KvFull: no cells are left for the batch; nothing of it was computed, its slots
            hold what they held, and rows of logits that were not held are gone.
        :raises BackendError: nothing of the batch counts; the slots in it are to be cleared.
        """

    def sample(self, slot: int, sampler: Sampler, index: int) -> int:
        """Draw token number *index* of a turn from the slot's row of logits."""

    def surprise(self, slot: int) -> Callable[[int], float]:
        """Return what tells of a token how the slot's row, as it is now, takes it: −ln of its
        probability, in nats, before biases and samplers.
        """

    def hold(self, slot: int) -> None:
        """Keep the slot's row of logits over the next steps: it is sampled later."""

    def take_row(self, slot: int) -> object:
        """Move the slot's row of logits out of the model, to keep it while a task is parked."""

    def put_row(self, slot: int, row: object) -> None:
        """Put back a row that `take_row` gave, into any slot."""

    def trim(self, slot: int, keep: int) -> int:
        """Forget all but the first *keep* tokens of a slot.

        Returns how many are really there now: *keep*, or 0 where the memory cannot keep a part.
        """

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""

    def trim_min(self, slot: int) -> int:
        """Return the least number of tokens, other than none, that `trim` can leave in a slot.

        0 or 1 where any part can be kept; all that it holds where nothing can be taken away.
        """

    def shift(self, slot: int, keep: int, discard: int) -> None:
        """Drop *discard* tokens after the first *keep*; what follows moves down (approximate).

        The slot's row of logits is lost. It must be decoded into before it is saved or swapped.

        :raises UnsupportedOperation: the model's memory cannot; see `ModelInfo.can_shift`.
        :raises BackendError: nothing would be left to move, and nothing has changed; or cells
            are missing that the moved tokens look back on, and the slot is then empty.
        """

    def reuse(self, slot: int, moves: Sequence[Move]) -> None:
        """Move runs of tokens down and drop all others: (from, to, count), ascending, no overlap.

        The first run goes to 0, each other one to the end of the run before it; one that stays
        where it is has equal *from* and *to*. As approximate as `shift`, and errors as there.
        """

    def swap(self, a: int, b: int) -> None:
        """Exchange the contents of two slots, rows of logits included.

        :raises BackendError: one was shifted and not decoded into since; nothing has changed.
        """

    def save(self, slot: int) -> bytes:
        """Return the state of a slot, for `restore` into any slot of an equal model.

        :raises BackendError: the slot was shifted and not decoded into since.
        """

    def restore(self, slot: int, state: bytes) -> bool:
        """Put a saved state into a slot; False if it does not fit, the slot is then empty."""

    def add_adapter(self, spec: AdapterSpec) -> AdapterInfo:
        """Load an adapter, unless it is there; it has no effect until it is chosen.

        :raises LoadFailed: the file is missing, damaged, or made for another model.
        :raises UnsupportedOperation: it is of a kind that is not run here.
        """

    def remove_adapter(self, adapter_id: str) -> None:
        """Take an adapter back, which is not chosen now."""

    def set_adapters(self, keys: tuple[str, ...]) -> None:
        """Choose the adapters of the next steps, by their keys (`adapter_key`); a state computed
        with others is another.

        A slot's tokens are all decoded with the same ones.

        :raises InvalidArgument: the model has no such adapter; nothing has changed.
        """

    def embedder(self) -> Embedder:
        """Return the second context, made at the first call; the model closes it.

        :raises OutOfMemory: there is no memory for it.
        :raises UnsupportedOperation: the model makes no embeddings; see `ModelInfo.embedding`.
        """

    def set_threads(self, threads: int) -> None:
        """Use this many threads from the next step on."""

    def close(self) -> None:
        """Free everything."""
