"""The protocols of models, with the facts, messages and samplers that they exchange with callers.

The engine's thread calls a language model. Meanwhile `tokenize`, `render` and `compile_grammar` may
run in other threads, the first two in one thread each. Sequences are in numbered slots, 0 … slots -
1; the model keeps the KV state of each slot and, after a step, the logits of its last decode. A
tensor model computes in one thread, beside all these; a model may be of both kinds. A graph is a
tensor model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from .answer_form import PLAIN_ANSWERS, AnswerForm
from .batch import Chunk, MediaFormat, Move
from .embedder import Embedder, EmbedInfo
from .model_spec import AdapterInfo, AdapterSpec
from .params import SamplingParams
from .tensors import NamedTensor, Tensor, TensorInfo
from .tuning_choice import ModelTuning, ProbeRunner

Message = Mapping[str, Any]
"""One chat message: `role` and `content`, both text; an assistant's may have `tool_calls`."""


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a chat template gets in addition to the messages."""

    tools: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    """The template's own arguments by name."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the beginning of an answer."""
    template: str = ""
    """The name of a model whose own template renders; if it has none, the model's does."""


PLAIN_RENDERING = Rendering()


class TemplateInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the chat template and the form of answers of another name of a model; see
    `ModelInfo`.
    """

    answer_form: AnswerForm
    tool_format: str
    unused: dict[str, str]
    chat_notes: dict[str, str]
    has_chat_template: bool


KvKind = Literal["plain", "window", "recurrent", "hybrid"]
"""The part of a KV state that can be reused. *plain*: any prefix. *window* (sliding attention): the
state has only the last tokens, so a prefix can be reused only while all tokens of its window are
there; an encoder-decoder's state likewise begins with its whole prompt. *recurrent*: only the whole
state after its last token. *hybrid* (recurrent layers beside attention): also a prefix at whose end
the recurrent part was saved as a checkpoint.
"""


NO_DRAFT_MODEL = "the model has no draft model (`draft-model`): it drafts as with auto"
NO_NEXTN = (
    'the model was loaded without NextN layers (its own `speculation` = "mtp" loads them):'
    " it drafts as with auto"
)


WHOLE_KINDS: tuple[KvKind, ...] = ("recurrent", "hybrid")
"""The kinds of KV states of which `trim` cannot drop any number of tokens."""


def no_drafts(kind: KvKind, *, encodes: bool, goes_back: bool = False) -> str:
    """Return the reason for which a model with such KV states has no drafts, or empty. *encodes* is
    whether it has an encoder, *goes_back* is `ModelInfo.goes_back`.
    """
    if encodes:
        return "an encoder-decoder computes one token at a time"
    if kind in WHOLE_KINDS and not goes_back:
        return "its recurrent states are too large, or of unknown size, to go back to earlier ones"
    return ""


class SpecialToken(msgspec.Struct, frozen=True):
    """A token that a vocabulary names: its id and its text."""

    id: int
    text: str


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a loaded model for the scheduler, the sessions and the answers' metadata."""

    description: str
    fingerprint: str
    vocab_size: int
    vocab_hash: str
    ctx_size: int
    ctx_size_trained: int
    batch_size: int
    slots: int
    logits_max: int
    """The most tokens of one step that may have logits, at least the number of slots. A step with
    more is refused.
    """
    size_bytes: int
    parameters: int
    token_bytes_max: int
    special_tokens: dict[str, SpecialToken] = {}
    """The special tokens that the vocabulary has: bos, eos, eot, sep, nl, pad, mask, fim-pre, …."""
    has_chat_template: bool
    """Whether its file or the configuration has a chat template."""
    tool_format: str = "none"
    """The name of `answer_form` for clients."""
    answer_form: AnswerForm = PLAIN_ANSWERS
    """The marks of reasoning, content and tool calls in its answers."""
    unused: dict[str, str] = {}
    """Parameters that have no effect on its answers, with the reasons. NAME=VALUE stands for one
    value of a parameter.
    """
    chat_notes: dict[str, str] = {}
    """Notes on turns with messages, which answers report in `adjusted` under `chat-template`. That
    name has the note on all chats; others are roles or keys of the messages that a note concerns.
    """
    templates: dict[str, TemplateInfo] = {}
    """The other names of the model that have a chat template or a form of answers of their own."""
    kv_kind: KvKind = "plain"
    rollback: int = 0
    """Of a memory that is *recurrent* or *hybrid*, the tokens that `trim` can drop nevertheless:
    once, from the end of a chunk of the last step that has more than these. It has their states.
    """
    keeps_states: bool = False
    """Of such a memory without `rollback`, whether `LanguageModel.keep_states` works, so that a
    slot can go back to before a step.
    """
    can_shift: bool = False
    """Whether `LanguageModel.shift` works."""
    rows_block: int = 1
    """The number of tokens of a pass with which the engine multiplies its weights at once. Those
    that are left over take longer; 1 if their number does not matter.
    """
    drafter: str = "ngram"
    """The drafter of turns with the parameter `speculation` auto, or "off"."""
    draft_model: str = ""
    """The name of its draft model's file; "" if it has none."""
    nextn: bool = False
    """Whether its NextN layers are loaded, and can draft."""
    n_gpu_layers: int = 0
    """Layers that run on devices."""
    sampling: dict[str, Any] = {}
    """Request parameters that the file recommends."""
    generates: bool = True
    """Whether it generates text. An encoder only makes embeddings."""
    decoder_start_token: int | None = None
    """The token with which the decoder of an encoder-decoder begins; None for other models. The
    first chunk of a slot is then a whole prompt: the encoder's tokens, and this one.
    """
    embedding: EmbedInfo | None = None
    """The embeddings that the model makes; None if it makes none."""
    computes_tensors: bool = False
    """Whether it is a `TensorModel`."""
    inputs: tuple[TensorInfo, ...] = ()
    """The inputs that a graph declares; empty for other models."""
    outputs: tuple[TensorInfo, ...] = ()
    """The outputs that a graph declares; empty for other models."""
    batch_max: int = 1
    """The most rows of several inputs of a graph that are computed together."""
    no_batches: str = ""
    """The reason for which they are not, or empty."""
    media_width: int = 0
    """The numbers of an embedding of an image or a sound; 0 if the model reads none."""
    media_mrope: bool = False
    """Whether each embedding has a place (M-RoPE); see `MediaInput`."""
    media_size_max: int = 0
    """The most entries of an item whose entries see each other, and are computed in one step."""

    def by_name(self, name: str) -> ModelInfo:
        """Return the facts about the model by one of its names, which may have its own template."""
        found = self.templates.get(name)
        if found is None:
            return msgspec.structs.replace(self, templates={}) if self.templates else self
        return msgspec.structs.replace(self, templates={}, **msgspec.structs.asdict(found))

    @property
    def no_drafts(self) -> str:
        """The reason for which answers have no drafts, or empty. Rejected drafts must be trimmed
        from a slot.
        """
        encodes = self.decoder_start_token is not None
        return no_drafts(self.kv_kind, encodes=encodes, goes_back=self.goes_back)

    @property
    def goes_back(self) -> bool:
        """Whether a memory that is *recurrent* or *hybrid* can drop the drafts of a step."""
        return self.rollback > 0 or self.keeps_states

    @property
    def drafts_max(self) -> int | None:
        """The most drafts of a chunk of which all can be rejected; None sets no bound."""
        whole = self.kv_kind in WHOLE_KINDS
        return self.rollback if whole and not self.keeps_states else None

    @property
    def media_format(self) -> MediaFormat:
        """The embeddings that the model reads."""
        return MediaFormat(self.media_width, self.media_mrope, self.media_size_max)


class DraftModel(Protocol):
    """A second, smaller model with the same vocabulary, or the NextN layers of the model itself,
    which predict the tokens of the model's slots. It has as many slots, with KV states of its own.
    The engine's thread owns it.
    """

    name: str
    """The drafter that it is: a value of the parameter `speculation`."""
    computes_again: bool
    """Whether it computes tokens that it has drafted once more when they were accepted."""
    vocab_size: int
    """It does not know greater tokens of the model."""
    ctx_size: int
    batch_size: int

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds; of drafts, only those not computed again."""

    def skip(self, slot: int, size: int) -> int:
        """Skip the next tokens of a slot that can no longer be computed, at most until it holds
        *size*, as many as the model has computed; return how many it holds, those included.
        """

    def trim(self, slot: int, keep: int) -> int:
        """Drop all but the first *keep* tokens of a slot; return how many remain, as in
        `LanguageModel.trim`.
        """

    def keep_states(self, slots: Sequence[int]) -> None:
        """Keep the states of *slots* if their memory cannot be cut, so that `trim` can go back to
        them, however many steps follow. Each replaces the previous one.
        """

    def compute(self, chunks: Sequence[Chunk]) -> list[int]:
        """Compute a batch, as `LanguageModel.step` does; return the most probable next token of
        each chunk with logits, in order.

        :raises BackendError: the batch failed.
        """


class TokenProbs(msgspec.Struct, frozen=True):
    """The probability of a *token*, and the top tokens in order.

    *value* is the model's logprob or, for a sampled token with `post_sampling_probs`, the
    probability among the candidates that the samplers left. *rank* is 1 for the most probable
    token, if it is known.
    """

    token: int
    value: float
    top: list[tuple[int, float]]
    rank: int = 0


class CompiledGrammar(Protocol):
    """The grammar of one turn."""

    @property
    def dropped(self) -> tuple[str, ...]:
        """The paths of those constraints of its JSON schema that it does not enforce."""


class Sampler(Protocol):
    """Samples the tokens of one turn, token *t* with a generator seeded from (seed, t)."""

    @property
    def complete(self) -> bool:
        """Whether the answer may end here by its grammar; false without a grammar."""

    @property
    def probs(self) -> TokenProbs | None:
        """The probabilities of the last sampled token, if `n_probs` requests them."""

    def take_forced(self) -> int | None:
        """Return the next token, and continue after it, if the grammar leaves no choice.

        Return None if the token must be sampled. No random number is drawn. A turn with `n_probs`,
        or with a sampler that learns from each token that it picks (mirostat, adaptive-p), samples
        all its tokens.

        :raises TooLarge: the grammar has met a limit.
        """

    def allows(self, tokens: Sequence[int]) -> bool:
        """Return whether the grammar, if it has begun, allows *tokens* to come next.

        :raises TooLarge: the grammar has met a limit.
        """

    def force(self, token: int) -> None:
        """Continue after *token*, which the caller has chosen and the grammar allows.

        :raises TooLarge: the grammar has met a limit.
        """

    def start_grammar(self, grammar: CompiledGrammar) -> None:
        """Follow *grammar* from the next token on; the sampler has none so far, and owns it."""

    def close(self) -> None:
        """Free the sampler's memory."""


class Model(Protocol):
    """A model of any kind. Callers validate all input first."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""

    def set_threads(self, threads: int) -> None:
        """Use this many threads from the next step on."""

    def close(self) -> None:
        """Free everything."""


@runtime_checkable
class TensorModel(Model, Protocol):
    """A model that computes tensors from tensors, without a state between calls."""

    def compute(self, inputs: Sequence[NamedTensor]) -> list[NamedTensor]:
        """Return the outputs by name. One thread at a time calls it, beside all other methods
        except `close`.

        :raises InvalidArgument: an input is missing, unknown, or of another type or shape.
        :raises BackendError: the computation failed.
        """


class Computation(Protocol):
    """The computation of a graph's outputs from inputs that fit."""

    @property
    def inputs(self) -> Sequence[tuple[TensorInfo, Tensor]]:
        """The tensors in the order of the inputs that the model declares."""

    def run(self, lane: int = 0) -> list[NamedTensor]:
        """Return the outputs by name, once. Any thread may call it, beside the computations of
        other lanes. A lane has one computation at a time.

        :raises InvalidArgument: the engine refuses the inputs.
        :raises Cancelled: `cancel` was called.
        :raises TooLarge: the outputs are past the limit.
        :raises OutOfMemory: there is too little memory.
        :raises BackendError: the computation failed.
        """

    def cancel(self) -> None:
        """Let `run` end soon, as far as the engine can; any thread may call it, at any time."""


class GraphModel(TensorModel, Protocol):
    """A tensor model that is not a language model. It declares its inputs and outputs (see
    `ModelInfo`), and a tensor engine computes it.
    """

    computes_in_caller: bool
    """Whether a lane of one thread computes in the thread that calls `Computation.run`, so that the
    CPU time of that thread is the cost of a computation.
    """

    def new_computation(self, inputs: Sequence[NamedTensor]) -> Computation:
        """Return the computation of *inputs*, without beginning it.

        The data of a tensor may be a view of memory that a client can change at any time. The
        computation reads floating-point numbers there, or copies them. It copies integers once it
        runs, since an engine checks an index and then reads it again, and checks a copy of bools.

        :raises InvalidArgument: an input is missing, unknown, or of another type or shape.
        """

    def add_lane(self) -> None:
        """Prepare one more computation at a time, beside those under way. A model begins with lane
        0; the next one is lane 1. Each computes on `ModelSpec.lane_threads` threads.

        :raises OutOfMemory: there is too little memory.
        :raises BackendError: the engine has no more lanes.
        """


@runtime_checkable
class LanguageModel(Model, Protocol):
    """A model of tokens with its context; see the module's docstring for threads."""

    @property
    def draft(self) -> DraftModel | None:
        """The draft model, if it has one."""

    @property
    def tuning(self) -> ModelTuning | None:
        """The setting with which it computes; None if it has no other."""

    def probe_runner(self) -> ProbeRunner:
        """Return a runner of probes over the model's weights, which the caller closes before the
        model. It takes memory only in its first `advance`.

        :raises UnsupportedOperation: no probe can run beside this kind of model.
        """

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        """Return the token ids of *text*.

        With *special*, names of special tokens in the text become these tokens. With *bos*, the
        tokens that the model expects at the start (and end) of a prompt are added.

        Each byte that is not UTF-8 becomes a token.

        :raises InvalidArgument: the vocabulary has no token for a byte that is not UTF-8.
        """

    def spell(self, text: bytes, special: bool) -> list[int]:
        """Return tokens whose pieces make up *text* within a longer text, where nothing is added
        before it; none if there are no such tokens. If *special*, names of special tokens in the
        text become these tokens. The engine's thread may call it.
        """

    def piece(self, token: int) -> bytes:
        """Return the bytes of *token*; those of a special token are its name."""

    def is_control(self, token: int) -> bool:
        """Return whether *token* is a special token that does not stand for text."""

    def is_eog(self, token: int) -> bool:
        """Return whether *token* ends a generation."""

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN_RENDERING) -> str:
        """Return the prompt that the chat template makes of *messages* and *rendering*.

        :raises UnsupportedOperation: an encoder has no chat template.
        :raises InvalidArgument: the template refuses the messages.
        :raises TooLarge: the rendering is past a limit on time, memory or output.
        """

    def compile_grammar(self, params: SamplingParams, owner: int) -> CompiledGrammar | None:
        """Return the grammar of *params* for one `sampler`; None if *params* have no grammar.

        It may be called in any thread, beside all other methods except `close`. Grammars are kept
        for the *owner*'s next turns.

        :raises InvalidArgument: the grammar or schema is invalid, or not supported.
        :raises TooLarge: the grammar is past a limit on its text, or on its compilation.
        :raises Timeout: the machine is too busy.
        """

    def sampler(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        grammar: CompiledGrammar | None = None,
    ) -> Sampler:
        """Return a sampler whose penalties have seen *prompt* and *answer*, and whose grammar has
        accepted *answer*.

        *grammar* is the result of `compile_grammar`; without it the sampler compiles its own.

        :raises InvalidArgument: a bias names a token that the model does not have, or *answer* does
            not follow the grammar; see also `compile_grammar`.
        """

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Decode one batch: chunks in ascending slots, at most `batch_size` tokens in all, or one
        chunk of the entries of an image or a sound (`Chunk.media`).

        :raises KvFull: the batch finds no free cells. Nothing was computed and the slots are
            unchanged; logits that were not held are lost.
        :raises BackendError: the batch failed; the caller must clear its slots.
        """

    def sample(self, slot: int, sampler: Sampler, index: int, position: int | None = None) -> int:
        """Sample token number *index* of a turn from the slot's logits: those after its last token,
        or those after the token at *position*, which was in the slot's chunk of the last step.

        The logits up to there are used up. So the tokens after one chunk can be sampled in order,
        for example while each sampled token equals the next one in the chunk; `trim` then drops
        the rest of the chunk, with its logits.

        :raises TooLarge: the grammar has met a limit.
        :raises BackendError: there are no logits, or they are used up; the sampler is unchanged.
        """

    def surprisal(self, slot: int, position: int | None = None) -> Callable[[int], float]:
        """Return a function from a token to its surprisal by the logits that `sample` would use.

        The surprisal is −ln of the token's probability, in nats, before biases and samplers.
        """

    def probs_after(self, slot: int, position: int, token: int, top: int) -> TokenProbs:
        """Return the logprobs of *token* and the *top* tokens after the token at *position*.

        That token was in the slot's chunk of the last step, and has logits (`Chunk.logits`). The
        slot's own logits, those after its last token, stay as they are.

        :raises BackendError: the token has no logits.
        """

    def hold_logits(self, slot: int) -> None:
        """Keep the slot's logits over the next steps, to sample from them later."""

    def take_logits(self, slot: int) -> object:
        """Move the slot's logits out of the model, to keep them while a task is parked."""

    def put_logits(self, slot: int, logits: object) -> None:
        """Put back logits that `take_logits` returned, into any slot."""

    def trim(self, slot: int, keep: int) -> int:
        """Drop all but the first *keep* tokens of a slot. No image or sound may be cut.

        Return how many tokens remain: *keep*, or the slot's length if that is less, or 0 if the
        memory cannot keep a part of its state. A memory with `ModelInfo.keeps_states` goes back to
        the last `keep_states`, if there were at most *keep* tokens then.
        """

    def keep_states(self, slots: Sequence[int]) -> None:
        """Keep the states of *slots* until the step after the next one, for `trim` to go back to.

        :raises BackendError: a state cannot be kept.
        """

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""

    def trim_min(self, slot: int) -> int:
        """Return the least number of tokens, apart from zero, that `trim` can leave in a slot.

        It is 0 or 1 if any prefix can be kept, and the slot's length if nothing can be removed.
        """

    def shift(self, slot: int, keep: int, discard: int) -> None:
        """Drop *discard* tokens after the first *keep* and move the others down (approximate).

        The slot's logits are lost. Decode into the slot before it is saved or swapped.

        :raises UnsupportedOperation: the memory cannot be shifted; see `ModelInfo.can_shift`.
        :raises BackendError: no tokens would be left to move, and nothing has changed; or cells
            in the window of the moved tokens are missing, and the slot is then empty.
        """

    def reuse(self, slot: int, moves: Sequence[Move]) -> None:
        """Move runs of tokens down and drop all others: (from, to, count), ascending, no overlap.

        The first run moves to 0, each other one to the end of the previous run; a run that stays
        has equal *from* and *to*. As approximate as `shift`, with the same errors.
        """

    def swap(self, a: int, b: int) -> None:
        """Exchange the contents of two slots, logits included.

        :raises BackendError: a slot was shifted and not decoded into since; nothing has changed.
        """

    def save(self, slot: int) -> bytes:
        """Return the state of a slot, for `restore` into any slot of an equal model.

        :raises BackendError: the slot was shifted and not decoded into since.
        """

    def restore(self, slot: int, state: bytes) -> bool:
        """Load a saved state into a slot; return False, with the slot empty, if it does not fit."""

    def save_checkpoint(self, slot: int) -> bytes:
        """Return the part of a slot's state that `trim` cannot cut, for `restore_checkpoint`. On
        recurrent models it is the whole state.

        :raises UnsupportedOperation: the memory is not of the kinds `recurrent` and `hybrid`.
        """

    def restore_checkpoint(self, slot: int, checkpoint: bytes) -> bool:
        """Cut a slot of a hybrid back to the tokens after which *checkpoint* was saved. The slot
        must begin with these tokens. Return False, with the slot empty, if it does not fit.
        """

    def add_adapter(self, spec: AdapterSpec) -> AdapterInfo:
        """Load an adapter, unless it is loaded; it has no effect until `set_adapters` selects it.

        :raises LoadFailed: the file is missing, damaged, or made for another model.
        :raises UnsupportedOperation: this kind of adapter cannot be run.
        """

    def remove_adapter(self, adapter_id: str) -> None:
        """Unload an adapter that is not selected."""

    def set_adapters(self, keys: tuple[str, ...]) -> None:
        """Select the adapters of the next steps by their keys (`adapter_key`).

        All tokens in a slot must be decoded with the same adapters.

        :raises InvalidArgument: the model has no such adapter; nothing has changed.
        """

    def embedder(self) -> Embedder:
        """Return the embedding context, created at the first call; the model closes it.

        :raises OutOfMemory: there is no memory for it.
        :raises UnsupportedOperation: the model makes no embeddings; see `ModelInfo.embedding`.
        """
