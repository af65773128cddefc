"""A model without weights: what goes in comes out, token by token, then it ends.

It ships: as the conformance model of the wasi-nn phase 3 plan, and as the double that users' own
tests and ours run against. A token is a byte; three more mark the start of a prompt, its end, and
the end of an answer. What it says depends on a slot's tokens alone, as with a real model, so a
state that was lost, mixed up or cut shows in the text.

Options (`ModelSpec.options`) slow it down or break it on purpose: `step_ms`, `load_ms`,
`crash_at_step` (the process dies), `fail_at_step` (the step fails), `abort_on` (the process dies
in the step that decodes this text). Others give it another memory: `memory` with `window` (tokens
that the next one looks back on), and `kv_cells`, which all slots share. It says that it needs
`weight_bytes` of memory, `token_bytes` for each token of a slot's context, and `layer_bytes` for
each of `layers`, which run on devices that have `device_bytes` free, and `embedding_bytes` once it
makes embeddings; it takes nothing. It is surprised by the characters of `surprising` (a text) and
by no others.
`variant` (a text) makes it another model, with another fingerprint; `vocabulary` (a number) makes
it one of another vocabulary: its tokens are the bytes, counted from there.

It knows two adapters, `upper` and `lower`: letters are drawn as capitals, or as small ones. A file
that holds one of these words is one.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

import msgspec

from ..adapter_keys import AdapterInfo, AdapterSpec, split_key
from ..base import (
    PLAIN_RENDERING,
    Memory,
    Message,
    ModelInfo,
    Rendering,
    Sampler,
    TokenProbs,
)
from ..batch import Chunk, Move, length_moved, shift_moves
from ..embedder import EMBED_ROWS, EMBED_SLOTS, EmbedInfo
from ..errors import (
    BackendError,
    InvalidArgument,
    KvFull,
    LoadFailed,
    UnsupportedOperation,
    load_cancelled,
)
from ..memory_need import Device, MemoryNeed, check_devices
from ..model_spec import LoadProgress, ModelSpec, Shape
from ..params import SamplingParams
from .embedding import EMBEDDING_SIZE, EchoEmbedder

__all__ = (
    "ADAPTERS",
    "EOG",
    "PROMPT_BEGIN",
    "PROMPT_END",
    "EchoModel",
    "EchoOptions",
    "load_echo",
    "reckon_echo",
)

ADAPTERS: dict[str, Callable[[bytes], bytes]] = {"upper": bytes.upper, "lower": bytes.lower}
"""What each makes of a letter."""
_KNOWN = " or ".join(ADAPTERS)

EOG, PROMPT_END, PROMPT_BEGIN = 256, 257, 258
VOCAB_SIZE = 259
CTX_SIZE_DEFAULT = 4096
_NAMES = {EOG: b"", PROMPT_END: b"<|echo|>", PROMPT_BEGIN: b"<|prompt|>"}
_MARKS = {name: token for token, name in _NAMES.items() if name}
_MARK = re.compile(b"(%s)" % b"|".join(map(re.escape, _MARKS)))


class EchoOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What can be slowed down or broken; -1 and the empty text are off."""

    step_ms: float = 0.0
    load_ms: float = 0.0
    crash_at_step: int = -1
    fail_at_step: int = -1
    abort_on: str = ""
    surprising: str = ""
    variant: str = ""
    vocabulary: Annotated[int, msgspec.Meta(ge=0, lt=256)] = 0
    memory: Memory = "plain"
    window: Annotated[int, msgspec.Meta(ge=1)] = 8
    kv_cells: int = -1
    weight_bytes: int = 0
    token_bytes: int = 0
    embedding_bytes: int = 0
    layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    layer_bytes: int = 0
    device_bytes: tuple[int, ...] = ()


@dataclass(slots=True)
class EchoSlot:
    """One sequence: its tokens, and the first of them whose cell a window still has."""

    tokens: list[int] = field(default_factory=list)
    begin: int = 0
    adapters: tuple[str, ...] = ()
    shifted: bool = False


class _State(msgspec.Struct, array_like=True):
    tokens: list[int]
    begin: int
    adapters: tuple[str, ...]


class EchoSampler:
    """Nothing to draw from: the echo model always knows what to say, and is sure of it."""

    def __init__(self, params: SamplingParams):
        self._params = params
        self.probs: TokenProbs | None = None

    def note(self, token: int) -> int:
        """Tell how likely *token* was, where that is asked for; return it."""
        if self._params.n_probs:
            sure = 1.0 if self._params.post_sampling_probs else 0.0
            self.probs = TokenProbs(token, sure, [(token, sure)])
        return token

    complete = False

    def close(self) -> None:
        """Hold nothing, free nothing."""


class EchoModel:
    """The echo model; see the module's docstring. Owned by one thread."""

    def __init__(self, spec: ModelSpec, options: EchoOptions | None = None):
        self.options = options or msgspec.convert(spec.options, EchoOptions)
        self.steps = 0
        self.threads = 0
        self.adapters: tuple[str, ...] = ()
        self.slots = [EchoSlot() for _ in range(spec.slots)]
        self._rows: set[int] = set()
        self._embedder: EchoEmbedder | None = None
        vocabulary = f"echo-{1 + self.options.vocabulary}"
        self._info = ModelInfo(
            description="echo: what goes in comes out",
            fingerprint=f"{vocabulary}{self.options.variant}",
            vocab_size=VOCAB_SIZE,
            vocab_hash=vocabulary,
            ctx_size=spec.ctx_size or CTX_SIZE_DEFAULT,
            ctx_size_trained=1 << 20,
            batch_size=spec.batch_size,
            slots=spec.slots,
            size_bytes=0,
            parameters=0,
            token_bytes_max=1,
            has_chat_template=True,
            memory=self.options.memory,
            can_shift=self.options.memory == "plain",
            n_gpu_layers=layers_on_devices(spec, self.options),
            embedding=EmbedInfo(
                size=EMBEDDING_SIZE,
                slots=EMBED_SLOTS,
                rows_max=min(EMBED_ROWS, spec.batch_size),
                tokens_max=spec.ctx_size or CTX_SIZE_DEFAULT,
            ),
        )

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        return self._info

    def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        """Return the bytes of *text*; a prompt's, added or first, get marks around them. A special
        text that begins with a mark has them already.
        """
        if special and text.startswith(_NAMES[PROMPT_BEGIN]):
            return [token for part in _MARK.split(text) for token in self._part(part)]
        tokens = [self._token(byte) for byte in text]
        return [PROMPT_BEGIN, *tokens, PROMPT_END] if bos or special else tokens

    def _part(self, part: bytes) -> list[int]:
        return [_MARKS[part]] if part in _MARKS else [self._token(byte) for byte in part]

    def _token(self, byte: int) -> int:
        return (byte + self.options.vocabulary) % EOG

    def _byte(self, token: int) -> int:
        return (token - self.options.vocabulary) % EOG

    def piece(self, token: int) -> bytes:
        """Return the byte, or a mark's name; the end mark has none: what goes in comes out."""
        return bytes((self._byte(token),)) if token < EOG else _NAMES[token]

    def is_control(self, token: int) -> bool:
        """Tell whether *token* is a mark."""
        return token >= EOG

    def is_eog(self, token: int) -> bool:
        """Tell whether *token* is the end mark."""
        return token == EOG

    def render(self, messages: Sequence[Message], rendering: Rendering = PLAIN_RENDERING) -> str:
        """Return the last message's content: that is what is echoed."""
        return str(messages[-1]["content"]) if messages else ""

    def sampler(
        self, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int] = ()
    ) -> Sampler:
        """Return a sampler; it has nothing to do."""
        return EchoSampler(params)

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks to their slots, after the pauses and faults of the options."""
        self._check(chunks)
        self._check_cells(sum(len(c.tokens) for c in chunks))
        self._pause()
        self._rows.difference_update(c.slot for c in chunks)
        for chunk in chunks:
            self._decode(chunk)

    def _pause(self) -> None:
        """Begin a step: with the pause and the faults of the options."""
        self.steps += 1
        if self.options.step_ms:
            time.sleep(self.options.step_ms / 1000)
        if self.steps == self.options.crash_at_step:
            os.abort()
        if self.steps == self.options.fail_at_step:
            raise BackendError(f"step {self.steps} failed, as the option fail_at_step asked for")

    def pass_step(self, texts: Sequence[Sequence[int]]) -> None:
        """Do what a step of the second context has in common with those of the first, where its
        slots hold *texts*.
        """
        self._pause()
        for text in texts:
            self._abort_on(text)

    def _abort_on(self, tokens: Sequence[int]) -> None:
        if self.options.abort_on and self.options.abort_on.encode() in self._text(tokens):
            os.abort()

    def _check(self, chunks: Sequence[Chunk]) -> None:
        slots = [c.slot for c in chunks]
        assert slots == sorted(set(slots)), f"chunks not in ascending slots: {slots}"
        assert 0 < sum(len(c.tokens) for c in chunks) <= self._info.batch_size
        for chunk in chunks:
            slot = self.slots[chunk.slot]
            assert chunk.position == len(slot.tokens), "a gap in the positions"
            assert chunk.position + len(chunk.tokens) <= self._info.ctx_size
            assert self._serves(slot, chunk.position), "cells of the window are missing"
            assert slot.adapters == self.adapters or not slot.tokens, "mixed adapters in one slot"

    def _check_cells(self, rows: int) -> None:
        used, cells = sum(len(s.tokens) for s in self.slots), self.options.kv_cells
        if 0 <= cells < used + rows:
            raise KvFull(f"{used} of {cells} KV cells are used: {rows} more do not fit")

    def _decode(self, chunk: Chunk) -> None:
        slot = self.slots[chunk.slot]
        slot.tokens.extend(chunk.tokens)
        slot.adapters, slot.shifted = self.adapters, False
        if self.options.memory == "window":
            reach = self.options.window + self._info.batch_size
            slot.begin = max(slot.begin, len(slot.tokens) - reach)
        self._abort_on(slot.tokens)
        if chunk.logits:
            self._rows.add(chunk.slot)

    def _serves(self, slot: EchoSlot, keep: int) -> bool:
        """Tell whether the first *keep* tokens can be gone on from, as llama.cpp's memory can."""
        if self.options.memory == "recurrent":
            return keep == len(slot.tokens)
        return slot.begin <= max(0, keep - self.options.window)

    def sample(self, slot: int, sampler: Sampler, index: int) -> int:
        """Return the next byte of the slot's last prompt, then the end mark."""
        assert slot in self._rows, f"slot {slot} has no row of logits"
        self._rows.discard(slot)
        assert isinstance(sampler, EchoSampler)
        return sampler.note(self._next(self.slots[slot]))

    def _next(self, held: EchoSlot) -> int:
        token = next_token(held.tokens)
        if token >= EOG:
            return token
        letter = bytes((self._byte(token),))
        for key in held.adapters:
            letter = ADAPTERS[split_key(key)[0]](letter)
        return self._token(letter[0])

    def surprise(self, slot: int) -> Callable[[int], float]:
        """Return what tells of a token how surprising it is: ten nats or not at all."""
        assert slot in self._rows
        surprising = self.options.surprising.encode()
        return lambda token: 10.0 if token < EOG and self._byte(token) in surprising else 0.0

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
        """Forget all but the first *keep* tokens; all, where the memory cannot keep a part."""
        self._rows.discard(slot)
        held = self.slots[slot]
        keep = min(keep, len(held.tokens))
        if keep <= 0 or not self._serves(held, keep):
            self.slots[slot] = EchoSlot()
            return 0
        del held.tokens[keep:]
        return keep

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        return len(self.slots[slot].tokens)

    def trim_min(self, slot: int) -> int:
        """Return the least that `trim` can leave; see `Model.trim_min`."""
        held = self.slots[slot]
        if self.options.memory == "recurrent":
            return len(held.tokens)
        return min(len(held.tokens), held.begin + self.options.window if held.begin else 1)

    def shift(self, slot: int, keep: int, discard: int) -> None:
        """Drop *discard* tokens after the first *keep*; see `Model.shift`."""
        self.reuse(slot, shift_moves(self.length(slot), keep, discard))

    def reuse(self, slot: int, moves: Sequence[Move]) -> None:
        """Keep the runs of tokens that *moves* names; see `Model.reuse`."""
        if not self._info.can_shift:
            raise UnsupportedOperation(f"a {self._info.memory} memory cannot be shifted")
        held = self.slots[slot]
        if not length_moved(len(held.tokens), moves):
            self.trim(slot, 0)
            return
        held.tokens = [t for begin, _, count in moves for t in held.tokens[begin : begin + count]]
        held.shifted |= any(begin != to for begin, to, _ in moves)
        self._rows.discard(slot)

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        self._check_saved(a, b)
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]
        exchange = {a: b, b: a}
        self._rows = {exchange.get(slot, slot) for slot in self._rows}

    def save(self, slot: int) -> bytes:
        """Return the slot's tokens; of a window, those cells that the next token looks back on."""
        self._check_saved(slot)
        held, begin = self.slots[slot], 0
        if self.options.memory == "window":
            begin = max(held.begin, len(held.tokens) - self.options.window)
        return msgspec.msgpack.encode(_State(held.tokens, begin, held.adapters))

    def _check_saved(self, *slots: int) -> None:
        for slot in slots:
            if self.slots[slot].shifted:
                raise BackendError(f"slot {slot} was shifted and not decoded into since")

    def restore(self, slot: int, state: bytes) -> bool:
        """Put saved tokens into a slot; False if it is none, or there are no cells for it."""
        self.trim(slot, 0)
        try:
            saved = msgspec.msgpack.decode(state, type=_State)
            self._check_cells(len(saved.tokens))
        except (msgspec.DecodeError, KvFull):
            return False
        if len(saved.tokens) > self._info.ctx_size:
            return False
        self.slots[slot] = EchoSlot(saved.tokens, saved.begin, saved.adapters)
        return True

    def add_adapter(self, spec: AdapterSpec) -> AdapterInfo:
        """Return the adapter that the text in a file names; any number of NULs may follow."""
        try:
            with open(spec.path, "rb") as file:
                name = file.read(64).strip(b"\0\n ").decode("ascii", "replace")
                size = os.fstat(file.fileno()).st_size
        except OSError as exc:
            raise LoadFailed(f"cannot open {spec.path!r}: {exc.strerror}") from None
        if name not in ADAPTERS:
            raise LoadFailed(
                f"{spec.path!r} names no adapter of the echo model", hint=f"write {_KNOWN} into it"
            )
        return AdapterInfo(id=name, size_bytes=size)

    def remove_adapter(self, adapter_id: str) -> None:
        """Forget nothing: the adapters are built in."""
        assert adapter_id not in {split_key(key)[0] for key in self.adapters}, "it is in use"

    def set_adapters(self, keys: tuple[str, ...]) -> None:
        """Use these adapters from the next step on."""
        missing = next((key for key in keys if split_key(key)[0] not in ADAPTERS), None)
        if missing is not None:
            raise InvalidArgument(f"no adapter {missing!r}", hint=f"the echo model has {_KNOWN}")
        self.adapters = keys

    def embedder(self) -> EchoEmbedder:
        """Return the second context."""
        if self._embedder is None:
            assert self._info.embedding is not None
            self._embedder = EchoEmbedder(self, self._info.embedding)
        return self._embedder

    def set_threads(self, threads: int) -> None:
        """Remember the number, for tests."""
        self.threads = threads

    def close(self) -> None:
        """Free nothing."""

    def _text(self, tokens: Sequence[int]) -> bytes:
        return bytes(self._byte(t) for t in tokens if t < EOG)


def next_token(tokens: Sequence[int]) -> int:
    """Return what the echo model says after *tokens*: a function of these alone."""
    if PROMPT_END not in tokens:
        return EOG
    end = len(tokens) - 1 - tokens[::-1].index(PROMPT_END)
    before = tokens[:end]
    begin = len(before) - before[::-1].index(PROMPT_BEGIN) if PROMPT_BEGIN in before else 0
    said = len(tokens) - end - 1
    return tokens[begin + said] if begin + said < end else EOG


class EchoReckoning:
    """What the echo model's options say that it needs."""

    def __init__(self, spec: ModelSpec):
        self._options = msgspec.convert(spec.options, EchoOptions)
        ctx_size, layers = spec.ctx_size or CTX_SIZE_DEFAULT, layers_on_devices(spec, self._options)
        self.shape = Shape(spec.slots, ctx_size, spec.batch_size, layers)
        self._split = spec.tensor_split or self._options.device_bytes
        self._main = spec.main_gpu
        check_devices(spec, self.devices)

    @property
    def devices(self) -> list[Device]:
        """The options' devices: nothing of them is ever taken."""
        return [Device(f"echo{i}", size, size) for i, size in enumerate(self._options.device_bytes)]

    def need(self, shape: Shape) -> MemoryNeed:
        """Return the options' bytes for *shape*."""
        tokens, on_devices = shape.slots * shape.ctx_size, shape.n_gpu_layers
        layer_bytes = max(0, self._options.layer_bytes)
        on_host = (self._options.layers - on_devices) * layer_bytes
        return MemoryNeed(
            weights=max(0, self._options.weight_bytes) + on_host,
            context=max(0, self._options.token_bytes) * tokens,
            devices=self._spread(on_devices, layer_bytes) if on_devices else {},
            embedding=max(0, self._options.embedding_bytes),
        )

    def _spread(self, layers: int, layer_bytes: int) -> dict[str, int]:
        """Return what each device has of so many layers, in the split's proportions."""
        if self._main >= 0:
            return {f"echo{self._main}": layers * layer_bytes}
        ends = [
            round(layers * sum(self._split[: i + 1]) / sum(self._split))
            for i in range(len(self._split))
        ]
        return {
            f"echo{i}": (end - begin) * layer_bytes
            for i, (begin, end) in enumerate(pairwise((0, *ends)))
        }

    def close(self) -> None:
        """Free nothing."""


def layers_on_devices(spec: ModelSpec, options: EchoOptions) -> int:
    """Return how many layers run on devices; none where there are no devices."""
    if not options.device_bytes:
        return 0
    return options.layers if spec.n_gpu_layers < 0 else min(spec.n_gpu_layers, options.layers)


def reckon_echo(spec: ModelSpec) -> EchoReckoning:
    """Look at the echo model."""
    return EchoReckoning(spec)


def load_echo(spec: ModelSpec, progress: LoadProgress) -> EchoModel:
    """Load the echo model, as slowly as its options say.

    :raises Cancelled: *progress* answered False.
    """
    model = EchoModel(spec)
    parts = 10 if model.options.load_ms else 1
    for part in range(parts):
        time.sleep(model.options.load_ms / parts / 1000)
        if not progress((part + 1) / parts):
            raise load_cancelled(spec.name)
    return model
