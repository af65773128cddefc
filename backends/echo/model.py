"""A model without weights that repeats its prompt token by token, then ends. It is a tensor model,
too, whose outputs are its inputs.

It ships as the conformance model of the wasi-nn phase 3 plan, and as the double for users' tests
and inferd's own. As with a real model, an answer depends only on the slot's tokens, so a state that
was lost, mixed up or cut shows in the text. `EchoOptions` slow it down or break it.

Its adapters, `upper` and `lower`, change the case of its output. A file is an adapter if its text
is one of these words; NULs, spaces and newlines around it do not count. In an embedding, a token's
vector depends on the token and those before it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence

import msgspec

from ..base import (
    NO_DRAFT_MODEL,
    NO_NEXTN,
    PLAIN_RENDERING,
    CompiledGrammar,
    Message,
    ModelInfo,
    Rendering,
    Sampler,
    SpecialToken,
    TokenProbs,
    no_drafts,
)
from ..batch import Chunk
from ..embedder import (
    DOCUMENT,
    EMBED_BATCH_TOKENS,
    EMBED_SLOTS,
    PREFIXES,
    QUERY,
    EmbeddingSlots,
    EmbedInfo,
    RankPart,
)
from ..errors import InvalidArgument, LoadFailed, UnsupportedOperation, load_cancelled
from ..grammars.checking import GrammarCheck
from ..library import LLAMA_COMMIT
from ..memory import layers_on_devices
from ..model_spec import AdapterInfo, AdapterSpec, LoadProgress, ModelSpec, split_key
from ..params import FORMATS, SamplingParams
from ..tensors import NamedTensor
from ..tool_formats import named_form
from ..tuning_choice import (
    PROBES,
    ModelShape,
    ModelTuning,
    Probe,
    ProbeRunner,
    Setting,
    choose_setting,
)
from .context import EchoContext
from .draft import EchoDraftModel
from .media import ECHO_MEDIA_WIDTH
from .options import (
    ECHO_CTX_SIZE,
    EOG,
    PROMPT_BEGIN,
    PROMPT_END,
    VOCAB_SIZE,
    EchoFaults,
    EchoOptions,
    EchoVocabulary,
    next_token,
)

_ADAPTERS: dict[str, Callable[[bytes], bytes]] = {"upper": bytes.upper, "lower": bytes.lower}
"""By name, the function that an adapter applies to a letter."""
_KNOWN = " or ".join(_ADAPTERS)


class EchoAdapters:
    """The built-in adapters, and the keys of those `chosen` for the next steps."""

    def __init__(self) -> None:
        self.chosen: tuple[str, ...] = ()

    def add(self, spec: AdapterSpec) -> AdapterInfo:
        """Return the adapter that a file's text names; NULs may follow the text."""
        try:
            with open(spec.path, "rb") as file:
                name = file.read(64).strip(b"\0\n ").decode("ascii", "replace")
                size = os.fstat(file.fileno()).st_size
        except OSError as exc:
            raise LoadFailed(f"cannot open {spec.path!r}: {exc.strerror}") from None
        if name not in _ADAPTERS:
            raise LoadFailed(
                f"{spec.path!r} names no adapter of the echo model", hint=f"write {_KNOWN} into it"
            )
        return AdapterInfo(id=name, size_bytes=size)

    def remove(self, adapter_id: str) -> None:
        """Assert that the adapter is not in use; it is built in and stays available."""
        assert adapter_id not in {split_key(key)[0] for key in self.chosen}, "it is in use"

    def choose(self, keys: tuple[str, ...]) -> None:
        """Use these adapters from the next step on."""
        missing = next((key for key in keys if split_key(key)[0] not in _ADAPTERS), None)
        if missing is not None:
            raise InvalidArgument(f"no adapter {missing!r}", hint=f"the echo model has {_KNOWN}")
        self.chosen = keys


def adapt(letter: bytes, keys: tuple[str, ...]) -> bytes:
    """Apply the adapters of *keys* to *letter*."""
    for key in keys:
        letter = _ADAPTERS[split_key(key)[0]](letter)
    return letter


EMBEDDING_SIZE = 16


def echo_vectors(tokens: Sequence[int], before: Sequence[float] = ()) -> list[list[float]]:
    """Return the vectors of *tokens*; *before* is the vector of the token before the first."""
    vectors, last = [], list(before) or [0.0] * EMBEDDING_SIZE
    for token in tokens:
        last = [0.5 * x + math.sin((token + 1) * (k + 1)) for k, x in enumerate(last)]
        vectors.append(last)
    return vectors


class EchoEmbedder(EmbeddingSlots):
    """The echo model's `Embedder`. Its steps have the same *faults* as the model's."""

    def __init__(self, faults: EchoFaults, info: EmbedInfo):
        super().__init__(info, VOCAB_SIZE)
        self._faults = faults
        self._tokens: dict[int, list[int]] = {}
        self._last: dict[int, list[float]] = {}
        """The vector of each slot's last token."""
        self._kept: dict[int, list[int]] = {}
        """The tokens of each kept prefix."""

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Compute one batch, after the pauses and faults of the options."""
        self.check_batch(chunks)
        self._faults.count_step()
        for chunk in chunks:
            tokens = self._tokens.setdefault(chunk.slot, [])
            tokens += chunk.tokens
            self._faults.abort_on_tokens(tokens)
            vectors = echo_vectors(chunk.tokens, self._last.get(chunk.slot, ()))
            self._last[chunk.slot] = vectors[-1]
            ranks = self.info.pooling == "rank"
            self.add_vectors(chunk, [v[:1] for v in vectors] if ranks else vectors)

    def keep_prefix(self, place: int, slot: int, tokens: int) -> None:
        super().keep_prefix(place, slot, tokens)
        self._kept[place] = self._tokens[slot][:tokens]

    def copy_prefix(self, place: int, slot: int, tokens: int) -> None:
        super().copy_prefix(place, slot, tokens)
        self._tokens[slot] = self._kept[place][:tokens]
        self._last[slot] = echo_vectors(self._tokens[slot])[-1]

    def clear_prefix(self, place: int) -> None:
        self._kept.pop(place, None)
        super().clear_prefix(place)

    def clear_slot(self, slot: int) -> None:
        self._tokens.pop(slot, None)
        self._last.pop(slot, None)
        super().clear_slot(slot)


class EchoProbeRunner:
    """The echo model's `ProbeRunner`. Its samples are exactly the times of the options."""

    def __init__(self, options: EchoOptions, slots: int):
        self.probes = tuple(p for p in PROBES if p.sequences <= slots)
        self._options = options
        self._aborted = threading.Event()
        self._prepared: set[tuple[Probe, Setting]] = set()

    def advance(self, probe: Probe, setting: Setting) -> float | None:
        """Prepare a probe at its first call, and wait for its time at the others."""
        self._aborted.clear()
        if (probe, setting) not in self._prepared:
            self._prepared.add((probe, setting))
            return None
        share = self._options.probe_share if setting.flash_attn else 1.0
        seconds = self._options.probe_ms * share / 1000
        if self._aborted.wait(seconds):
            return None
        return seconds

    def abort(self) -> None:
        """End the present wait."""
        self._aborted.set()

    def close(self) -> None:
        """Free nothing."""


LOGITS_MAX = 32
"""Tokens of a step that have logits, if there are no more slots."""
DISTANCE = 16
"""The distance of two tokens that makes a nat of surprisal."""
_LOAD_PART_S_MAX = 0.1
"""A load that is cancelled ends within this time."""


class EchoSampler:
    """A sampler that reports each token as certain."""

    complete = False

    def __init__(self, params: SamplingParams, tokens: Sequence[int], forced: Collection[int]):
        self._params, self.grammar = params, params.grammar.encode()
        jumps = params.jump_forward and not params.n_probs
        self._forced_later = forced if jumps else ()
        self._forced = self._forced_later if params.has_grammar else ()
        self._tokens = list(tokens)
        self.probs: TokenProbs | None = None

    def accept(self, token: int) -> int:
        """Continue after *token* and return it; set `probs` if `n_probs` requests it."""
        self._tokens.append(token)
        if self._params.n_probs:
            value = 1.0 if self._params.post_sampling_probs else 0.0
            self.probs = TokenProbs(token, value, [(token, value)])
        return token

    def take_forced(self) -> int | None:
        """Return the next token if it is forced, as the option `forced` requests."""
        if not self._forced:
            return None
        token = next_token(self._tokens)
        if token not in self._forced:
            return None
        self._tokens.append(token)
        return token

    def allows(self, tokens: Sequence[int]) -> bool:
        """Return True: no grammar is followed."""
        return True

    def force(self, token: int) -> None:
        """Continue after *token*."""
        self._tokens.append(token)

    def start_grammar(self, grammar: CompiledGrammar) -> None:
        """Force the tokens of the option `forced` from now on."""
        self._forced = self._forced_later

    def close(self) -> None:
        """Do nothing."""


class EchoModel(EchoContext):
    """The echo model; see the module's docstring, and `LanguageModel` for its threads."""

    def __init__(self, spec: ModelSpec, options: EchoOptions | None = None):
        self.options = options or msgspec.convert(spec.options, EchoOptions)
        self.tuning = _tuning(spec, self.options)
        super().__init__(_echo_info(spec, self.options, self.tuning), self.options)
        self.threads = 0
        self.draft: EchoDraftModel | None = None
        if self.options.draft_errs >= 0:
            info = self.info
            self.draft = EchoDraftModel(self.options, info.slots, info.ctx_size, info.batch_size)
        self.adapters = EchoAdapters()
        self._grammars = GrammarCheck()
        self._vocabulary = vocabulary = EchoVocabulary(self.options.vocabulary)
        self.faults = EchoFaults(self.options, vocabulary)
        self._embedder: EchoEmbedder | None = None
        forced = [vocabulary.token(byte) for byte in self.options.forced.encode()]
        self._forced = frozenset([*forced, EOG] if forced else ())
        self.piece = vocabulary.piece
        self.is_control = vocabulary.is_control
        self.is_eog = vocabulary.is_eog
        self.add_adapter = self.adapters.add
        self.remove_adapter = self.adapters.remove
        self.set_adapters = self.adapters.choose

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        """Return the tokens of *text*; see `EchoVocabulary.tokenize`."""
        self.faults.abort_on_text("tokenize", text)
        if self.options.tokenize_ms > 0:
            time.sleep(self.options.tokenize_ms * len(text) / 1e6)
        return self._vocabulary.tokenize(text, special=special, bos=bos)

    def spell(self, text: bytes, special: bool) -> list[int]:
        """Return a token for each byte of *text*, without marks around them."""
        return [self._vocabulary.token(byte) for byte in text]

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN_RENDERING) -> str:
        """Return the last message's content, which the model echoes."""
        return str(messages[-1]["content"]) if messages else ""

    def compile_grammar(self, params: SamplingParams, owner: int) -> CompiledGrammar | None:
        """Check the grammar of *params*, if any; return a mark that it was checked."""
        return self._grammars.check(params)

    def sampler(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        grammar: CompiledGrammar | None = None,
    ) -> Sampler:
        """Return a sampler that has seen *prompt* and *answer*."""
        if grammar is None:
            self.compile_grammar(params, 0)
        return EchoSampler(params, [*prompt, *answer], self._forced)

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks to their slots, after the pauses and faults of the options."""
        adapters = self.adapters.chosen
        self.check_batch(chunks, adapters)
        self.faults.count_step(passes=len({len(chunk.tokens) for chunk in chunks}))
        for chunk in chunks:
            self.faults.abort_on_tokens(self.append(chunk, adapters).tokens)

    def compute(self, inputs: Sequence[NamedTensor]) -> list[NamedTensor]:
        """Return the inputs, after the pauses and faults of a step."""
        self.faults.count_step()
        for _, tensor in inputs:
            self.faults.abort_on_text("step", tensor.data)
        return list(inputs)

    def sample(self, slot: int, sampler: Sampler, index: int, position: int | None = None) -> int:
        """Return the next byte of the slot's last prompt, then the end mark."""
        tokens = self.use_logits(slot, position)
        assert isinstance(sampler, EchoSampler)
        self.faults.abort_on_text("grammar", sampler.grammar)
        sequence, vocabulary = self.slots[slot], self._vocabulary
        self.faults.sample_slowly(tokens)
        token = next_token(tokens)
        if token < EOG:
            token = vocabulary.token(adapt(vocabulary.piece(token), sequence.adapters)[0])
        return sampler.accept(token)

    def surprisal(self, slot: int, position: int | None = None) -> Callable[[int], float]:
        """Return a function that is ten nats for the bytes of `surprising`, else zero."""
        self.check_logits(slot, position)
        surprising, byte = self.options.surprising.encode(), self._vocabulary.byte
        return lambda token: 10.0 if token < EOG and byte(token) in surprising else 0.0

    def probs_after(self, slot: int, position: int, token: int, top: int) -> TokenProbs:
        """Return logprobs that fall with the distance between a token and its predecessor."""
        self.check_logits(slot, position)
        before = self.slots[slot].tokens[position]

        def value(other: int) -> float:
            return -abs(other - before) / DISTANCE

        order = sorted(range(VOCAB_SIZE), key=value, reverse=True)
        found = [(other, value(other)) for other in order[:top]]
        rank = 1 + sum(value(other) > value(token) for other in order)
        return TokenProbs(token, value(token), found, rank)

    def embedder(self) -> EchoEmbedder:
        """Return the embedding context."""
        if self._embedder is None:
            assert self.info.embedding is not None
            self._embedder = EchoEmbedder(self.faults, self.info.embedding)
        return self._embedder

    def probe_runner(self) -> ProbeRunner:
        """Return a runner of probes, whose times the options state."""
        if self.tuning is None:
            raise UnsupportedOperation("the echo model has no other setting")
        return EchoProbeRunner(self.options, self.info.slots)

    def set_threads(self, threads: int) -> None:
        """Store the number for tests."""
        self.threads = threads

    def close(self) -> None:
        """End the process that checks grammars."""
        self._grammars.close()


def _tuning(spec: ModelSpec, options: EchoOptions) -> ModelTuning | None:
    """Return the setting with which the model claims to compute, if it has another one."""
    if options.probe_ms < 0 or spec.tuning is None:
        return None
    shape = ModelShape(
        architecture="echo", layers=1, embedding=1, heads=1, kv_heads=1, head_k=1, head_v=1,
        size_bytes=1 + options.vocabulary,
    )  # fmt: skip
    tuning = spec.tuning
    chosen = choose_setting(None, shape, tuning.cpu, LLAMA_COMMIT, tuning.records)
    return ModelTuning(
        shape=shape,
        cpu=tuning.cpu.key,
        chosen=chosen,
        other_fingerprint=_fingerprint(options, flash_attn=not chosen.setting.flash_attn),
        keeps_threads=tuning.keeps_threads,
    )


_FIM_TOKENS = {
    "fim-pre": SpecialToken(PROMPT_BEGIN, "<|prompt|>"),
    "fim-suf": SpecialToken(ord("|"), "|"),
    "fim-mid": SpecialToken(PROMPT_END, "<|echo|>"),
}


def _fingerprint(options: EchoOptions, *, flash_attn: bool) -> str:
    return f"echo-{1 + options.vocabulary}{options.variant}" + ("-flash" if flash_attn else "")


def _echo_info(spec: ModelSpec, options: EchoOptions, tuning: ModelTuning | None) -> ModelInfo:
    vocabulary = f"echo-{1 + options.vocabulary}"
    flash_attn = tuning is not None and tuning.chosen.setting.flash_attn
    return ModelInfo(
        description="echo: repeats its input",
        fingerprint=_fingerprint(options, flash_attn=flash_attn),
        vocab_size=VOCAB_SIZE,
        vocab_hash=vocabulary,
        ctx_size=spec.ctx_size or ECHO_CTX_SIZE,
        ctx_size_trained=1 << 20,
        batch_size=spec.batch_size,
        slots=spec.slots,
        logits_max=max(
            spec.slots, min(spec.batch_size, max(spec.slots * spec.logits_per_slot, LOGITS_MAX))
        ),
        size_bytes=0,
        parameters=0,
        token_bytes_max=1,
        has_chat_template=True,
        tool_format=options.tool_format,
        answer_form=named_form(options.tool_format),
        unused=dict.fromkeys((*FORMATS, "tool-choice"), "the model echo repeats its prompt")
        | {"tools": "the model echo has no chat template"}
        | _without_drafts(options),
        computes_tensors=True,
        media_width=ECHO_MEDIA_WIDTH if options.media else 0,
        media_size_max=spec.batch_size if options.media else 0,
        kv_kind=options.memory,
        rollback=options.rollback,
        keeps_states=options.keeps_states,
        can_shift=options.memory == "plain",
        drafter="off",
        draft_model="echo" if options.draft_errs >= 0 else "",
        n_gpu_layers=layers_on_devices(spec, options.layers, options.device_bytes),
        special_tokens=_FIM_TOKENS if options.fim else {},
        embedding=EmbedInfo(
            size=EMBEDDING_SIZE,
            slots=EMBED_SLOTS,
            batch_tokens_max=min(EMBED_BATCH_TOKENS, spec.batch_size),
            tokens_max=spec.ctx_size or ECHO_CTX_SIZE,
            pooling="rank" if options.ranks else "mean",
            prefixes=PREFIXES if options.ranks else 0,
            rank_parts=_RANK_PARTS if options.ranks else (),
        ),
    )


_RANK_PARTS = (
    RankPart(tokens=(PROMPT_BEGIN,)),
    RankPart(texts=(QUERY, b"\n")),
    RankPart(tokens=(PROMPT_END,)),
    RankPart(texts=(DOCUMENT,)),
)


def _without_drafts(options: EchoOptions) -> dict[str, str]:
    goes_back = options.rollback > 0 or options.keeps_states
    reason = no_drafts(options.memory, encodes=False, goes_back=goes_back)
    if not reason:
        found = {"speculation=mtp": NO_NEXTN}
        return found if options.draft_errs >= 0 else {"speculation=draft": NO_DRAFT_MODEL} | found
    return {"speculation": reason, "draft-max": reason}


def load_echo(spec: ModelSpec, progress: LoadProgress, *, renders: bool = False) -> EchoModel:
    """Load the echo model in `load_ms`; see `load_model`. *renders* changes nothing, because the
    model has no template.
    """
    model = EchoModel(spec)
    load_s = model.options.load_ms / 1000
    parts = max(10, int(load_s / _LOAD_PART_S_MAX)) if load_s else 1
    for part in range(parts):
        time.sleep(load_s / parts)
        if not progress((part + 1) / parts):
            raise load_cancelled(spec.name)
    return model
