"""The llama.cpp `LanguageModel`: vocabulary, context, chat template, and the logits of slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ..base import (
    PLAIN_RENDERING,
    CompiledGrammar,
    Message,
    ModelInfo,
    Rendering,
    Sampler,
    TokenProbs,
)
from ..batch import Chunk, Move, shift_moves
from ..encoder_prompts import encoded_size
from ..errors import BackendError, InvalidArgument, LoadFailed, UnsupportedOperation
from ..grammars.compiler import GrammarCompiler, GrammarState
from ..params import SamplingParams
from ..tuning_choice import ModelTuning
from .kv.context import LlamaContext
from .kv.draft_models import HiddenStates, LlamaDraftModel, NextnDraftModel
from .kv.embedding_context import LlamaEmbedder
from .lora import LlamaAdapters
from .probe_runner import LlamaProbeRunner
from .sampling.chain import Candidates, LlamaSampler, Prototypes, probs_before_sampling
from .text.matching import MatchingVocab
from .text.template import ChatTemplate
from .text.vocab import Vocab

NO_OWNER = -1
"""The owner of grammars that a sampler compiles itself."""


class LlamaModel:
    """A loaded GGUF model with its context; see `LanguageModel`, also for its threads."""

    def __init__(
        self,
        pointer: Any,
        context: LlamaContext,
        vocab: Vocab,
        template: ChatTemplate | None,
        info: ModelInfo,
        make_embedder: Callable[[], LlamaEmbedder],
        make_probe_runner: Callable[[], LlamaProbeRunner],
        adapters: LlamaAdapters,
        matching: MatchingVocab,
        tuning: ModelTuning | None = None,
        named_templates: Mapping[str, ChatTemplate | LoadFailed] | None = None,
        draft: LlamaDraftModel | NextnDraftModel | None = None,
    ):
        self._pointer = pointer
        self._context = context
        self._vocab = vocab
        self._template = template
        self._named_templates = named_templates or {}
        self.info, self.tuning, self.draft = info, tuning, draft
        self._states: HiddenStates | None = None
        """Those that its NextN layers compute with, if they draft."""
        if isinstance(draft, NextnDraftModel):
            self._states = draft.states
        self._adapters = adapters
        self._make_embedder = make_embedder
        self._make_probe_runner = make_probe_runner
        self._embedder: LlamaEmbedder | None = None
        self._threads = 0
        self._keeping: Sequence[int] = ()
        """The slots whose states are kept for the next step."""
        self._prototypes = Prototypes()
        self._matching = matching
        self._grammars = GrammarCompiler(matching.attach(vocab))
        self._candidates: Candidates | None = None
        self._logits: dict[int, range | NDArray[np.float32]] = {}
        """By slot, the indices of its logits in the last batch, valid until the next step; or a
        copy of the last ones.
        """
        self.tokenize = vocab.tokenize
        self.spell = vocab.spelled
        self.piece = vocab.piece
        self.is_control = vocab.is_control
        self.is_eog = vocab.is_eog
        self.save = context.save
        self.save_checkpoint = context.save_checkpoint
        self.length = context.length
        self.trim_min = context.trim_min
        self.add_adapter = adapters.add
        self.remove_adapter = adapters.remove
        self.set_adapters = adapters.choose

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN_RENDERING) -> str:
        """Return the prompt that the chat template makes of *messages*."""
        template = self._named_templates.get(rendering.template, self._template)
        if isinstance(template, LoadFailed):
            raise InvalidArgument(template.message, hint=template.hint)
        if template is None:
            raise UnsupportedOperation(
                f"the model {self.info.description!r} has no chat template",
                hint="send the prompt as raw text, or set chat-template in the configuration",
            )
        return template.render(messages, rendering)

    def compile_grammar(self, params: SamplingParams, owner: int) -> GrammarState | None:
        """Return the compiled grammar of *params*, if any."""
        return self._grammars.compile(params, owner) if params.has_grammar else None

    def sampler(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int] = (),
        grammar: CompiledGrammar | None = None,
    ) -> Sampler:
        """Return a sampler that has seen *prompt* and *answer*."""
        start, ctx_size = self.info.decoder_start_token, self.info.ctx_size
        if start is not None:  # penalties count what the decoder has written
            prompt = prompt[encoded_size(prompt, start) :]
        seen = [*prompt, *answer]
        if grammar is None:
            grammar = self.compile_grammar(params, NO_OWNER)
        assert isinstance(grammar, GrammarState | None)
        return LlamaSampler(self._vocab, self._prototypes, params, seen, answer, ctx_size, grammar)

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Decode one batch. A batch that the check refuses changes nothing."""
        self._context.check(chunks)
        self._adapters.apply()
        self._logits = {s: x for s, x in self._logits.items() if not isinstance(x, range)}
        self._context.forget_states(except_of=self._keeping)
        self._keeping = ()
        decoded = self._context.decode(chunks)
        if self._states is not None:
            self._states.keep(chunks)
        for chunk in chunks:
            self._logits.pop(chunk.slot, None)
        self._logits |= decoded

    def sample(self, slot: int, sampler: Sampler, index: int, position: int | None = None) -> int:
        """Sample token number *index* of a turn; see `LanguageModel.sample`."""
        assert isinstance(sampler, LlamaSampler)
        awaits_trigger = sampler.awaits_trigger
        found = self._find_logits(slot, position)
        self._use_up(slot, found)
        token = self._sample(found, sampler, index)
        if awaits_trigger:
            sampler.try_trigger(token)
        return token

    def _sample(self, found: int | NDArray[np.float32], sampler: LlamaSampler, index: int) -> int:
        if isinstance(found, int) and sampler.needs_only_chain:
            return self._context.sample(sampler.chain(index), found)
        if self._candidates is None:
            self._candidates = Candidates(self._vocab.size)
        token = self._candidates.sample(sampler, self._values(found), index)
        if token is None:  # the grammar allows no token: the answer ends
            return next(iter(self._vocab.eog()), 0)
        return token

    def _find_logits(self, slot: int, position: int | None) -> int | NDArray[np.float32]:
        """Return the logits after the token at *position*, or else after the slot's last token: as
        their index in the last batch, or as a copy.
        """
        logits = self._logits.get(slot)
        if position is None and isinstance(logits, np.ndarray):
            return logits
        before_last = 0 if position is None else self.length(slot) - 1 - position
        if not isinstance(logits, range) or not 0 <= before_last < len(logits):
            where = "" if position is None else f" after token {position}"
            raise BackendError(f"slot {slot} has no logits{where}")
        return logits[-1 - before_last]

    def _use_up(self, slot: int, found: int | NDArray[np.float32]) -> None:
        """Drop the slot's logits up to the *found* ones, which sampling changes."""
        logits = self._logits.pop(slot)
        if isinstance(logits, range) and isinstance(found, int) and found < logits[-1]:
            self._logits[slot] = range(found + 1, logits.stop)

    def _values(self, found: int | NDArray[np.float32]) -> NDArray[np.float32]:
        return self._context.logits_at(found) if isinstance(found, int) else found

    def logits(self, slot: int, position: int | None = None) -> NDArray[np.float32]:
        """Return a copy of the logits that `sample` would use."""
        return self._values(self._find_logits(slot, position)).copy()

    def surprisal(self, slot: int, position: int | None = None) -> Callable[[int], float]:
        """Return a function from a token to its surprisal."""
        logits = self.logits(slot, position)
        top = float(logits.max())
        log_total = top + math.log(float(np.exp(logits - top).sum(dtype=np.float64)))
        return lambda token: log_total - float(logits[token])

    def probs_after(self, slot: int, position: int, token: int, top: int) -> TokenProbs:
        """Return the logprobs of tokens after the one at *position*."""
        logits = self._values(self._find_logits(slot, position))
        return probs_before_sampling(logits, token, top, ranked=True)

    def hold_logits(self, slot: int) -> None:
        """Keep the slot's logits over the next steps, to sample from them later."""
        if not isinstance(self._logits.get(slot), np.ndarray):
            self._logits[slot] = self.logits(slot)

    def take_logits(self, slot: int) -> object:
        """Move a copy of the slot's logits out of the model."""
        self.hold_logits(slot)
        return self._logits.pop(slot)

    def put_logits(self, slot: int, logits: object) -> None:
        """Put back logits that `take_logits` returned, into any slot."""
        assert isinstance(logits, np.ndarray) and logits.shape == (self._vocab.size,)
        self._logits[slot] = logits

    def trim(self, slot: int, keep: int) -> int:
        """Drop all but the first *keep* tokens of a slot, and its logits."""
        self._logits.pop(slot, None)
        kept = self._context.trim(slot, keep)
        self._drop_states(slot, kept)
        return kept

    def keep_states(self, slots: Sequence[int]) -> None:
        """Keep the states of *slots*; see `LanguageModel.keep_states`."""
        for slot in slots:
            self._context.keep_state(slot)
        self._keeping = (*self._keeping, *slots)

    def _drop_states(self, slot: int, keep: int = 0) -> None:
        """Drop the hidden states of all but the first *keep* tokens of a slot."""
        if self._states is not None:
            self._states.cut(slot, keep)

    def shift(self, slot: int, keep: int, discard: int) -> None:
        """Drop *discard* tokens after the first *keep*, and the logits."""
        self.reuse(slot, shift_moves(self.length(slot), keep, discard))

    def reuse(self, slot: int, moves: Sequence[Move]) -> None:
        """Move runs of tokens down, drop all others and the slot's logits."""
        self._drop_states(slot)
        self._context.move(slot, moves)
        self._logits.pop(slot, None)

    def swap(self, a: int, b: int) -> None:
        """Exchange the contents of two slots, logits included."""
        if a == b:
            return
        self._context.swap(a, b)
        if self._states is not None:
            self._states.swap(a, b)
        for slot, logits in ((b, self._logits.pop(a, None)), (a, self._logits.pop(b, None))):
            if logits is not None:
                self._logits[slot] = logits

    def restore(self, slot: int, state: bytes) -> bool:
        """Load a saved state into a slot; return False, with the slot empty, if it does not fit."""
        self._logits.pop(slot, None)
        self._drop_states(slot)
        return self._context.restore(slot, state)

    def restore_checkpoint(self, slot: int, checkpoint: bytes) -> bool:
        """Cut a slot back to a checkpoint, and drop its logits."""
        self._logits.pop(slot, None)
        restored = self._context.restore_checkpoint(slot, checkpoint)
        self._drop_states(slot, self.length(slot))
        return restored

    def embedder(self) -> LlamaEmbedder:
        """Return the embedding context, created at the first call."""
        if self._embedder is None:
            self._embedder = self._make_embedder()
            if self._threads:
                self._embedder.set_threads(self._threads)
        return self._embedder

    def probe_runner(self) -> LlamaProbeRunner:
        """Return a runner of probes on contexts of its own; the caller closes it before the model.

        :raises UnsupportedOperation: the model generates no text, or has an encoder.
        """
        if not self.info.generates or self.info.decoder_start_token is not None:
            kind = "has an encoder" if self.info.generates else "only makes embeddings"
            raise UnsupportedOperation(
                f"the model {self.info.description!r} {kind}: its settings are not measured",
                hint="measure the settings of a decoder-only language model",
            )
        return self._make_probe_runner()

    def set_threads(self, threads: int) -> None:
        """Use this many threads from the next step on."""
        self._threads = threads
        self._context.set_threads(threads)
        if self.draft is not None:
            self.draft.set_threads(threads)
        if self._embedder is not None:
            self._embedder.set_threads(threads)

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self._logits.clear()
        self._prototypes.close()
        self._grammars.close()
        self._matching.close()
        for template in (self._template, *self._named_templates.values()):
            if isinstance(template, ChatTemplate):
                template.close()
        if self._embedder is not None:
            self._embedder.close()
        if self.draft is not None:
            self.draft.close()
        self._adapters.close()
        self._context.close()
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            lib.llama_model_free(pointer)
