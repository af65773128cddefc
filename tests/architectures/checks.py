"""The checks of a tiny model of one of llama.cpp's architectures, without a daemon.

They compare the logits of the backend with those of bare llama.cpp, and those of moved KV states
with a computation from scratch. `UnsupportedOperation` from a check is a refusal; every other error
is a failure.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from inferd.backends import AdapterSpec, Chunk, InferdError
from inferd.backends.errors import UnsupportedOperation
from inferd.backends.llama.loading.gguf_check import GgufFile, read_gguf
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.lora import is_adapted
from inferd.backends.model_spec import adapter_key
from tests.backends.driving import generate, prefill
from tests.backends.moves import make_moves
from tests.backends.test_embedding_contract import embed, far
from tests.backends.tiny import SLOTS, Bare, difference, from_scratch, tiny_spec
from tests.tiny_lora import matrices, write_lora

__all__ = ("CHECKS", "Subject", "adapted_shapes")

CTX_SIZE = 512
"""Twice as many tokens as the files say that the models were trained for."""
TOKENS_MAX = 240
"""Tokens of the longest text, except of the one that fills a context: every model has places for
256.
"""
VOCAB_USED = 128
EFFECT_PARTS, NOISE_PARTS = 4, 8
"""Logits may differ by a quarter of the effect of a wrong token, and the noise is half of that, or
less: otherwise no check would show anything.
"""
VECTOR_NOISE_MAX = 1e-3
"""Difference in a number of a unit vector between shapes of batches."""
_WEIGHT = re.compile(r"blk\.\d+\..*\.weight")
_SELECTION = re.compile("indexer|compressor|norm")
_UNUSED = (("qwen3next", "ssm_in"), ("refact", "ffn_gate_inp"), ("smallthinker", "ffn_gate_inp"))
"""Weights of llama.cpp's test models that their graphs do not use, or that saturate."""
ADAPTER_SCALE = 0.5
_PLAIN_TYPES = (0, 1)
"""F32 and F16."""

Logits = NDArray[np.float32]
Shapes = Mapping[str, tuple[int, int]]


class Subject:
    """A loaded model, and bare llama.cpp on the same file."""

    def __init__(self, path: Path):
        self.path, self.spec = path, tiny_spec(path, ctx_size=CTX_SIZE)
        self.model = load_llama(self.spec, lambda _: True)

    @cached_property
    def bare(self) -> Bare:
        """The same file in bare llama.cpp, in a context of the same shape."""
        return Bare(self.path, ctx_size=CTX_SIZE)

    @cached_property
    def file(self) -> GgufFile:
        """The file's header."""
        with self.path.open("rb") as file:
            return read_gguf(file.fileno(), self.path.name)

    def tokens(self, seed: int, count: int) -> list[int]:
        """Return random tokens."""
        size = min(VOCAB_USED, self.model.info.vocab_size)
        return random.Random(seed).choices(range(3, size), k=count)

    def clear(self) -> None:
        """Empty all slots."""
        if self.model.info.generates:
            assert self.bound  # it is measured in the slots
        self.model.set_adapters(())
        for slot in range(SLOTS):
            self.model.trim(slot, 0)

    def close(self) -> None:
        """Free both."""
        self.model.close()
        if "bare" in vars(self):
            self.bare.close()

    @cached_property
    def bound(self) -> float:
        """The largest difference that the shape of batches may make: a part of the effect of one
        wrong token, and more than the measured noise.
        """
        tokens, model = self.tokens(1, 200), self.model
        expected = from_scratch(model, tokens)
        noise = 1e-7 * float(np.abs(expected).max())
        for size in (1, 7, 33):
            model.trim(0, 0)
            for begin in range(0, len(tokens), size):
                part = tokens[begin : begin + size]
                model.step([Chunk(0, part, begin, logits=begin + size >= len(tokens))])
            noise = max(noise, difference(model.logits(0), expected))
        for step in (1, 2, 3):  # a token may happen to have almost no effect at its place
            effects = []
            for ago in (2, 10, 25):
                wrong = list(tokens)
                wrong[-ago] = 3 + (wrong[-ago] + step - 3) % (VOCAB_USED - 3)
                effects.append(difference(from_scratch(model, wrong), expected))
            effect = min(effects)
            if noise < effect / NOISE_PARTS:
                return effect / EFFECT_PARTS
        raise AssertionError(f"noise {noise:.2g}, a wrong token {effect:.2g}")

    def assert_as_from_scratch(self, slot: int, tokens: Sequence[int]) -> None:
        """Compare the slot's logits with those after *tokens* in a separate slot."""
        self.model.hold_logits(slot)
        self.assert_equal(self.model.logits(slot), from_scratch(self.model, tokens))

    def assert_equal(self, found: Logits, expected: Logits) -> None:
        """Compare logits."""
        assert np.isfinite(expected).all(), "not all logits are numbers"
        off = difference(found, expected)
        assert off < self.bound, f"the logits differ by {off:.2g}, and may by {self.bound:.2g}"


def compute_as_bare_llama_cpp(subject: Subject) -> None:
    """The logits after texts of several lengths are those of bare llama.cpp."""
    for slot, length in enumerate((1, 64, TOKENS_MAX)):
        tokens = subject.tokens(2 + slot, length)
        prefill(subject.model, slot, tokens)
        subject.assert_equal(subject.model.logits(slot), subject.bare.decode(slot, tokens))


def generate_text(subject: Subject) -> None:
    """The greedy text is that of bare llama.cpp."""
    prompt, expected = subject.tokens(5, 150), list[int]()
    found = generate(subject.model, 0, prompt, count=8)
    logits = subject.bare.decode(0, prompt)
    for position in range(150, 158):
        expected.append(int(logits.argmax()))
        logits = subject.bare.decode(0, expected[-1:], position)
    assert found == expected


def share_a_batch(subject: Subject) -> None:
    """Slots that compute together have the logits that each has alone."""
    model = subject.model
    texts = [subject.tokens(6 + slot, 40 + slot) for slot in range(3)]
    for begin in range(0, 40, 10):
        model.step([Chunk(s, t[begin : begin + 10], begin, False) for s, t in enumerate(texts)])
    model.step([Chunk(s, [*t[40:], 9], 40, True) for s, t in enumerate(texts)])
    for slot in range(3):
        model.hold_logits(slot)
    for slot, text in enumerate(texts):
        subject.assert_as_from_scratch(slot, [*text, 9])


def reuse_a_prefix(subject: Subject) -> None:
    """A slot is trimmed to the part that two prompts share, or is emptied."""
    model, first, more = subject.model, subject.tokens(10, 160), subject.tokens(11, 20)
    for shared in (1, 40, 100, 140, 159, 160):
        model.trim(0, 0)
        prefill(model, 0, first)
        least = model.trim_min(0) - model.info.rollback
        kept = model.trim(0, shared)
        assert kept == model.length(0) == (shared if shared >= least else 0)
        prompt = first[:shared] + more
        prefill(model, 0, prompt[kept:], kept)
        subject.assert_as_from_scratch(0, prompt)


def rewind_to_a_turn(subject: Subject) -> None:
    """The state after a turn replaces that of later turns; a hybrid is also cut back to it."""
    model, turn, second = subject.model, subject.tokens(12, 90), subject.tokens(13, 40)
    hybrid = model.info.kv_kind == "hybrid"
    prefill(model, 0, turn)
    state, checkpoint = model.save(0), model.save_checkpoint(0) if hybrid else b""
    prefill(model, 0, second, 90)
    assert model.restore(0, state) and model.length(0) == 90
    other = subject.tokens(14, 30)
    prefill(model, 0, other, 90)
    subject.assert_as_from_scratch(0, turn + other)
    if hybrid:
        model.trim(0, 0)
        prefill(model, 0, turn + other)
        assert model.restore_checkpoint(0, checkpoint) and model.length(0) == 90
        prefill(model, 0, second, 90)
        subject.assert_as_from_scratch(0, turn + second)


def fork_into_slots(subject: Subject) -> None:
    """Copies of a state continue together in several slots."""
    model, tokens = subject.model, subject.tokens(15, 150)
    prefill(model, 0, tokens)
    state = model.save(0)
    branches = [subject.tokens(16 + slot, 8) for slot in range(SLOTS - 1)]
    assert all(model.restore(slot, state) for slot in range(SLOTS - 1))
    for i in range(8):
        model.step([Chunk(s, b[i : i + 1], 150 + i, logits=True) for s, b in enumerate(branches)])
    for slot in range(SLOTS - 1):
        model.hold_logits(slot)
    for slot, branch in enumerate(branches):
        subject.assert_as_from_scratch(slot, tokens + branch)


def park_and_restore(subject: Subject) -> None:
    """A turn yields its slot in the middle of its prompt, with its logits, and continues."""
    model, tokens, other = subject.model, subject.tokens(20, 200), subject.tokens(21, 110)
    prefill(model, 1, tokens[:100])
    logits, state, held = model.logits(1), model.save(1), model.take_logits(1)
    model.trim(1, 0)
    prefill(model, 1, other)
    prefill(model, 0, other[:90])
    assert model.restore(2, state)
    model.put_logits(2, held)
    assert np.array_equal(model.logits(2), logits)
    for i in range(5):
        part = tokens[100 + 20 * i : 120 + 20 * i]
        chunks = [Chunk(0, [9], 90 + i, True), Chunk(1, [9], 110 + i, True)]
        model.step([*chunks, Chunk(2, part, 100 + 20 * i, logits=i == 4)])
    subject.assert_as_from_scratch(2, tokens)


def make_random_moves(subject: Subject) -> None:
    """Appends, trims, swaps of slots, saves and restores in random order."""
    for seed in range(2):
        subject.clear()
        make_moves(
            subject.model,
            seed,
            tokens_max=TOKENS_MAX,
            vocab_size=min(VOCAB_USED, subject.model.info.vocab_size),
            check=subject.assert_as_from_scratch,
            count=30,
        )


def restore_after_a_restart(subject: Subject) -> None:
    """A saved state continues in a new context of the same file."""
    tokens, more = subject.tokens(22, 150), subject.tokens(23, 20)
    prefill(subject.model, 0, tokens)
    state = subject.model.save(0)
    prefill(subject.model, 0, more, 150)
    with closing(load_llama(subject.spec, lambda _: True)) as again:
        assert again.info.fingerprint == subject.model.info.fingerprint
        assert again.restore(1, state) and again.length(1) == 150
        prefill(again, 1, more, 150)
        subject.assert_equal(again.logits(1), subject.model.logits(0))


def shift_the_context(subject: Subject) -> None:
    """A shift gives what it gives in bare llama.cpp, or is refused."""
    model, bare = subject.model, subject.bare
    tokens, more = subject.tokens(24, 120), subject.tokens(25, 5)
    prefill(model, 0, tokens)
    if not model.info.can_shift:
        with pytest.raises(UnsupportedOperation) as refused:
            model.shift(0, 4, 40)
        subject.assert_as_from_scratch(0, tokens)
        raise refused.value
    model.shift(0, 4, 40)
    prefill(model, 0, more, 80)
    bare.clear(0)
    bare.decode(0, tokens)
    bare.move(0, 44, 120, 4)
    subject.assert_equal(model.logits(0), bare.decode(0, more, 80))
    assert model.restore(1, model.save(0))
    for slot in (0, 1):
        prefill(model, slot, more, 85)
        model.hold_logits(slot)
    subject.assert_equal(model.logits(1), model.logits(0))


def load_with_other_sizes(subject: Subject) -> None:
    """The model runs with numbers of slots that do not divide a step, and embeds in small steps."""
    tokens = subject.tokens(30, 60)
    expected = from_scratch(subject.model, tokens)
    for slots, batch_size in ((3, 64), (5, 33)):
        spec = tiny_spec(subject.path, slots=slots, ctx_size=CTX_SIZE)
        spec = msgspec.structs.replace(spec, batch_size=batch_size)
        with closing(load_llama(spec, lambda _: True)) as other:
            prefill(other, slots - 1, tokens)
            subject.assert_equal(other.logits(slots - 1), expected)
            if other.info.embedding is not None:
                embed(other.embedder(), tokens)


def fill_the_context(subject: Subject) -> None:
    """A context takes as many tokens as it says, and one more is refused."""
    model = subject.model
    size = model.info.ctx_size
    tokens = subject.tokens(26, size)
    assert prefill(model, 0, tokens) == size
    subject.assert_equal(model.logits(0), subject.bare.decode(0, tokens))
    with pytest.raises((AssertionError, InferdError)):
        model.step([Chunk(0, [9], size, logits=True)])
    assert model.length(0) == size


def make_embeddings(subject: Subject) -> None:
    """A vector is the same in each slot, in a batch with other texts, and in parts."""
    embedder = subject.model.embedder()
    one, other = subject.tokens(27, 50), subject.tokens(28, 12)
    alone = embed(embedder, one)
    assert sum(x * x for x in alone) == pytest.approx(1.0, rel=1e-4)
    assert far(embed(embedder, one, slot=1), alone) < VECTOR_NOISE_MAX
    assert far(embed(embedder, other), alone) > 10 * VECTOR_NOISE_MAX
    if not embedder.info.whole:
        assert far(embed(embedder, one, sizes=(1, 3, 30)), alone) < VECTOR_NOISE_MAX
    first = embed(embedder, one[:20])
    for slot in (0, 1):
        embedder.start_text(slot, "mean")
    embedder.step([Chunk(0, one[:20], 0, False), Chunk(1, other, 0, False)])
    for slot, expected in ((0, first), (1, embed(embedder, other, slot=2))):
        found = np.frombuffer(embedder.take_embedding(slot, 2), np.float32)
        assert far(found.tolist(), expected) < VECTOR_NOISE_MAX


def apply_adapters(subject: Subject) -> None:
    """An adapter acts as in bare llama.cpp, and each weight that it may change has an effect."""
    model, tokens = subject.model, subject.tokens(29, 60)
    shapes = adapted_shapes(subject.file)
    with tempfile.TemporaryDirectory() as folder:
        plain = from_scratch(model, tokens)
        for name, shape in shapes.items():
            found = _adapted_logits(subject, _write_adapter(subject, folder, {name: shape}), tokens)
            assert difference(found, plain) > 0, f"an adapter of {name} has no effect"
        path = _write_adapter(subject, folder, shapes)
        adapted = _adapted_logits(subject, path, tokens)
        assert difference(adapted, plain) > subject.bound, "the adapter has no effect"
        with subject.bare.adapter(path, ADAPTER_SCALE):
            subject.assert_equal(adapted, subject.bare.decode(0, tokens))
        subject.assert_equal(from_scratch(model, tokens), plain)


def _write_adapter(subject: Subject, folder: str, shapes: Shapes) -> Path:
    architecture = str(subject.file.values["general.architecture"])
    return write_lora(Path(folder, "a.gguf"), matrices(shapes), architecture=architecture)


def _adapted_logits(subject: Subject, path: Path, tokens: Sequence[int]) -> Logits:
    """Return the logits after *tokens* with an adapter, which is removed again."""
    adapter = subject.model.add_adapter(AdapterSpec(name="a", path=str(path))).id
    subject.model.set_adapters((adapter_key(adapter, ADAPTER_SCALE),))
    found = from_scratch(subject.model, tokens)
    subject.model.set_adapters(())
    subject.model.remove_adapter(adapter)
    return found


def adapted_shapes(file: GgufFile) -> Shapes:
    """Return the rows and columns of the weights that an adapter may change, or of all, if there is
    none. Some of llama.cpp's test models have dense weights in layers that use experts instead.
    """
    architecture = str(file.values["general.architecture"])
    weights = {
        name: (tensor.shape[1], tensor.shape[0])
        for name, tensor in file.tensors.items()
        if _WEIGHT.fullmatch(name) and len(tensor.shape) == 2 and tensor.kind in _PLAIN_TYPES
    }
    replaced = {
        name.replace("ffn_gate_inp", dense)
        for name in weights
        for dense in ("ffn_gate", "ffn_up", "ffn_down")
        if "ffn_gate_inp" in name
    }
    tried = {n: s for n, s in weights.items() if _is_tried(n, architecture)}
    return {n: s for n, s in tried.items() if n not in replaced} or weights


def _is_tried(name: str, architecture: str) -> bool:
    """Return whether an adapter of this weight must have an effect. That of norms is ignored, and
    the selection of tokens in sparse attention has none in a short text.
    """
    is_unused = (architecture, name.split(".")[-2]) in _UNUSED
    return is_adapted(name, architecture) and not _SELECTION.search(name) and not is_unused


CHECKS: dict[str, Callable[[Subject], None]] = {
    "logits": compute_as_bare_llama_cpp,
    "text": generate_text,
    "batch": share_a_batch,
    "prefix": reuse_a_prefix,
    "rewind": rewind_to_a_turn,
    "fork": fork_into_slots,
    "park": park_and_restore,
    "moves": make_random_moves,
    "restart": restore_after_a_restart,
    "shift": shift_the_context,
    "full context": fill_the_context,
    "other sizes": load_with_other_sizes,
    "embeddings": make_embeddings,
    "adapters": apply_adapters,
}
"""The checks by their names on the page."""
