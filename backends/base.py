"""The `Model` protocol, and the facts, messages and samplers that go in and out of it.

A model is driven by one thread, the engine's. Sequences live in numbered slots, 0 … slots - 1;
`Model` keeps for each the KV state and, after a step, the logits that the last decode left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from .adapter_keys import AdapterInfo, AdapterSpec
from .batch import Chunk, Move
from .embedder import Embedder, EmbedInfo
from .params import SamplingParams

Message = Mapping[str, Any]
"""One chat message: `role` and `content`, both text; an assistant's may have `tool_calls`."""


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat template is told beside the messages."""

    tools: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    """The template's own, by their names."""
    add_generation_prompt: bool = True
    """Whether the prompt ends where an answer begins."""


PLAIN_RENDERING = Rendering()


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


class TokenProbs(msgspec.Struct, frozen=True):
    """The probability of a sampled *token*, and the top tokens, in order. *value* is its logprob
    by the model, or, with `post_sampling_probs`, its probability among the candidates left.
    """

    token: int
    value: float
    top: list[tuple[int, float]]


class Sampler(Protocol):
    """Picks tokens of one turn. Token *t* is sampled by a generator seeded from (seed, t)."""

    @property
    def complete(self) -> bool:
        """Tell whether the answer may end here by its grammar; false without one."""

    @property
    def probs(self) -> TokenProbs | None:
        """The probabilities of the token that was sampled last, where `n_probs` asks for them."""

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

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN_RENDERING) -> str:
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
            hold what they held, and logits that were not held are lost.
        :raises BackendError: nothing of the batch counts; the slots in it are to be cleared.
        """

    def sample(self, slot: int, sampler: Sampler, index: int) -> int:
        """Sample token number *index* of a turn from the slot's logits."""

    def surprisal(self, slot: int) -> Callable[[int], float]:
        """Return a function of a token's surprisal by the slot's present logits: −ln of its
        probability, in nats, before biases and samplers.
        """

    def hold_logits(self, slot: int) -> None:
        """Keep the slot's logits over the next steps: they are sampled later."""

    def take_logits(self, slot: int) -> object:
        """Move the slot's logits out of the model, to keep them while a task is parked."""

    def put_logits(self, slot: int, logits: object) -> None:
        """Put back logits that `take_logits` returned, into any slot."""

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

        The slot's logits are lost. It must be decoded into before it is saved or swapped.

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
        """Exchange the contents of two slots, logits included.

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
