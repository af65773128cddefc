"""A model without weights: what goes in comes out, token by token, then it ends.

It ships: as the conformance model of the wasi-nn phase 3 plan, and as the double that users' own
tests and ours run against. A token is a byte; three more mark the start of a prompt, its end, and
the end of an answer. What it says depends on a slot's tokens alone, as with a real model, so a
state that was lost, mixed up or cut shows in the text.

Options (`ModelSpec.options`) slow it down or break it on purpose: `step_ms`, `load_ms`,
`crash_at_step` (the process dies), `fail_at_step` (the step fails), `abort_on` (the process dies
in the step that decodes this text).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from .base import Chunk, LoadProgress, Message, ModelInfo, ModelSpec, Sampler
from .errors import BackendError, Cancelled
from .params import SamplingParams

__all__ = ("EOG", "PROMPT_BEGIN", "PROMPT_END", "EchoModel", "EchoOptions", "load_echo")

EOG, PROMPT_END, PROMPT_BEGIN = 256, 257, 258
VOCAB_SIZE = 259
CTX_SIZE_DEFAULT = 4096
_NAMES = {EOG: b"", PROMPT_END: b"<|echo|>", PROMPT_BEGIN: b"<|prompt|>"}


class EchoOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What can be slowed down or broken; -1 and the empty text are off."""

    step_ms: float = 0.0
    load_ms: float = 0.0
    crash_at_step: int = -1
    fail_at_step: int = -1
    abort_on: str = ""


class EchoSampler:
    """Nothing to draw from: the echo model always knows what to say."""

    def close(self) -> None:
        """Hold nothing, free nothing."""


class EchoModel:
    """The echo model; see the module's docstring. Owned by one thread."""

    def __init__(self, spec: ModelSpec, options: EchoOptions | None = None):
        self.options = options or msgspec.convert(spec.options, EchoOptions)
        self.steps = 0
        self.threads = 0
        self.slots: list[list[int]] = [[] for _ in range(spec.slots)]
        self._rows: set[int] = set()
        self._info = ModelInfo(
            description="echo: what goes in comes out",
            fingerprint="echo-1",
            vocab_size=VOCAB_SIZE,
            vocab_hash="echo-1",
            ctx_size=spec.ctx_size or CTX_SIZE_DEFAULT,
            ctx_size_trained=1 << 20,
            batch_size=spec.batch_size,
            slots=spec.slots,
            size_bytes=0,
            parameters=0,
            token_bytes_max=1,
            has_chat_template=True,
        )

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        return self._info

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        """Return the bytes of *text*; a prompt's, added or first, get marks around them."""
        return [PROMPT_BEGIN, *text, PROMPT_END] if bos or special else list(text)

    def piece(self, token: int) -> bytes:
        """Return the byte, or a mark's name; the end mark has none: what goes in comes out."""
        return bytes((token,)) if token < EOG else _NAMES[token]

    def is_control(self, token: int) -> bool:
        """Tell whether *token* is a mark."""
        return token >= EOG

    def is_eog(self, token: int) -> bool:
        """Tell whether *token* is the end mark."""
        return token == EOG

    def render(self, messages: Sequence[Message]) -> str:
        """Return the last message's content: that is what is echoed."""
        return str(messages[-1]["content"]) if messages else ""

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> Sampler:
        """Return a sampler; it has nothing to do."""
        return EchoSampler()

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks to their slots, after the pauses and faults of the options."""
        self._check(chunks)
        self.steps += 1
        if self.options.step_ms:
            time.sleep(self.options.step_ms / 1000)
        if self.steps == self.options.crash_at_step:
            os.abort()
        if self.steps == self.options.fail_at_step:
            raise BackendError(f"step {self.steps} failed, as the option fail_at_step asked for")
        self._rows.difference_update(c.slot for c in chunks)
        for chunk in chunks:
            self._decode(chunk)

    def _check(self, chunks: Sequence[Chunk]) -> None:
        slots = [c.slot for c in chunks]
        assert slots == sorted(set(slots)), f"chunks not in ascending slots: {slots}"
        assert 0 < sum(len(c.tokens) for c in chunks) <= self._info.batch_size
        for chunk in chunks:
            assert chunk.position == len(self.slots[chunk.slot]), "a gap in the positions"
            assert chunk.position + len(chunk.tokens) <= self._info.ctx_size

    def _decode(self, chunk: Chunk) -> None:
        tokens = self.slots[chunk.slot]
        tokens.extend(chunk.tokens)
        if self.options.abort_on and self.options.abort_on.encode() in _text(tokens):
            os.abort()
        if chunk.logits:
            self._rows.add(chunk.slot)

    def sample(self, slot: int, sampler: Sampler, index: int) -> int:
        """Return the next byte of the slot's last prompt, then the end mark."""
        assert slot in self._rows, f"slot {slot} has no row of logits"
        self._rows.discard(slot)
        return next_token(self.slots[slot])

    def hold(self, slot: int) -> None:
        """Keep the row; the echo model never loses one."""
        assert slot in self._rows

    def take_row(self, slot: int) -> object:
        """Move the row out: there is nothing in it."""
        self._rows.remove(slot)
        return None

    def put_row(self, slot: int, row: object) -> None:
        """Put a row back."""
        self._rows.add(slot)

    def trim(self, slot: int, keep: int) -> int:
        """Forget all but the first *keep* tokens."""
        del self.slots[slot][keep:]
        self._rows.discard(slot)
        return len(self.slots[slot])

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]
        exchange = {a: b, b: a}
        self._rows = {exchange.get(slot, slot) for slot in self._rows}

    def save(self, slot: int) -> bytes:
        """Return the slot's tokens."""
        return msgspec.msgpack.encode(self.slots[slot])

    def restore(self, slot: int, state: bytes) -> bool:
        """Put saved tokens into a slot."""
        self.slots[slot] = msgspec.msgpack.decode(state, type=list[int])
        self._rows.discard(slot)
        return True

    def set_threads(self, threads: int) -> None:
        """Remember the number, for tests."""
        self.threads = threads

    def close(self) -> None:
        """Free nothing."""


def _text(tokens: Sequence[int]) -> bytes:
    return bytes(t for t in tokens if t < EOG)


def next_token(tokens: Sequence[int]) -> int:
    """Return what the echo model says after *tokens*: a function of these alone."""
    if PROMPT_END not in tokens:
        return EOG
    end = len(tokens) - 1 - tokens[::-1].index(PROMPT_END)
    before = tokens[:end]
    begin = len(before) - before[::-1].index(PROMPT_BEGIN) if PROMPT_BEGIN in before else 0
    said = len(tokens) - end - 1
    return tokens[begin + said] if begin + said < end else EOG


def load_echo(spec: ModelSpec, progress: LoadProgress) -> EchoModel:
    """Load the echo model, as slowly as its options say.

    :raises Cancelled: *progress* answered False.
    """
    model = EchoModel(spec)
    parts = 10 if model.options.load_ms else 1
    for part in range(parts):
        time.sleep(model.options.load_ms / parts / 1000)
        if not progress((part + 1) / parts):
            raise Cancelled("the load was cancelled")
    return model
