"""Adapters act as in bare llama.cpp, and are refused where they would abort it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from inferd.backends import AdapterSpec
from inferd.backends.errors import InferdError, InvalidArgument, LoadFailed, UnsupportedOperation
from inferd.backends.llama.loading.gguf_check import GgufFile, read_gguf
from inferd.backends.llama.lora import check_adapter
from inferd.backends.llama.model import LlamaModel
from inferd.backends.model_spec import adapter_key
from tests.backends import tiny as tiny_models
from tests.backends.driving import prefill
from tests.backends.tiny import NOISE_MAX, Bare, assert_as_from_scratch, difference, tokens_of
from tests.tiny_gguf import VOCAB_SIZE, write_tiny
from tests.tiny_lora import SHAPES, Matrices, lora, matrices, write_lora

TOKENS = tokens_of(1, 100)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    model = tiny_models.load_tiny("llama", tmp_path_factory.mktemp("tiny"))
    yield model
    model.close()


@pytest.fixture
def model(loaded: LlamaModel) -> LlamaModel:
    """Return the tiny llama, with empty slots and no adapter chosen."""
    loaded.set_adapters(())
    for slot in range(tiny_models.SLOTS):
        loaded.trim(slot, 0)
    return loaded


def add(model: LlamaModel, path: Path) -> str:
    return model.add_adapter(AdapterSpec(name=path.stem, path=str(path))).id


def header(path: Path) -> GgufFile:
    with path.open("rb") as file:
        return read_gguf(file.fileno(), path.name)


def logits(model: LlamaModel, *keys: str, tokens: Sequence[int] = TOKENS) -> NDArray[np.float32]:
    """Return the logits after *tokens*, computed with these adapters in an empty slot."""
    model.set_adapters(tuple(sorted(keys)))
    model.trim(0, 0)
    prefill(model, 0, tokens)
    return model.logits(0)


def bare_logits(directory: Path, scales: dict[Path, float]) -> NDArray[np.float32]:
    """Return the logits that llama.cpp alone computes."""
    bare = Bare(write_tiny("llama", directory))
    pointers = [lib.llama_adapter_lora_init(bare.model, os.fsencode(path)) for path in scales]
    count = len(scales)
    lib.llama_set_adapters_lora(
        bare.context,
        (lib.llama_adapter_lora_p_ctypes * count)(*pointers),
        count,
        (lib.ctypes.c_float * count)(*scales.values()),
    )
    found = bare.decode(0, TOKENS)
    bare.close()
    return found


def test_scales_act_as_in_bare_llama_cpp(model: LlamaModel, tmp_path: Path) -> None:
    style, tone = lora(tmp_path / "style.gguf", 1), lora(tmp_path / "tone.gguf", 2)
    plain = logits(model)
    ids = {path: add(model, path) for path in (style, tone)}
    assert difference(logits(model), plain) == 0, "an adapter that is not chosen has no effect"

    for scales in ({style: 1.0}, {style: 0.5}, {style: -1.0}, {style: 0.7, tone: 0.4}):
        found = logits(model, *(adapter_key(ids[path], scale) for path, scale in scales.items()))

        assert difference(found, plain) > 100 * NOISE_MAX, scales
        assert difference(found, bare_logits(tmp_path, scales)) < NOISE_MAX, scales
    assert difference(logits(model), plain) == 0


def test_slots_with_different_adapters_do_not_affect_each_other(
    model: LlamaModel, tmp_path: Path
) -> None:
    style, tone = add(model, lora(tmp_path / "a.gguf", 1)), add(model, lora(tmp_path / "b.gguf", 2))
    sets = [(), (adapter_key(style, 1.0),), (adapter_key(style, 0.5), adapter_key(tone, 1.0))]
    for begin in range(0, 90, 30):
        for slot, keys in enumerate(sets):
            model.set_adapters(keys)
            prefill(model, slot, TOKENS[begin : begin + 30], begin)
            model.hold_logits(slot)
    found = [model.logits(slot) for slot in range(len(sets))]

    for slot, keys in enumerate(sets):
        model.set_adapters(keys)
        assert_as_from_scratch(model, slot, TOKENS[:90])
        assert all(
            difference(found[slot], other) > NOISE_MAX
            for other in found
            if other is not found[slot]
        )


def test_a_saved_state_continues_with_its_adapters(model: LlamaModel, tmp_path: Path) -> None:
    key = adapter_key(add(model, lora(tmp_path / "a.gguf")), 1.0)
    model.set_adapters((key,))
    prefill(model, 0, TOKENS[:60])
    state = model.save(0)
    model.set_adapters(())
    prefill(model, 1, TOKENS[:40])

    assert model.restore(2, state)
    model.set_adapters((key,))
    prefill(model, 2, TOKENS[60:], 60)

    assert_as_from_scratch(model, 2, TOKENS)


def test_many_adapters_at_once_fit_into_the_graph(model: LlamaModel, tmp_path: Path) -> None:
    """llama.cpp reserves graph nodes for the adapters that existed at its last planning."""
    shapes = SHAPES | {
        f"blk.{layer}.{name}.weight": shape
        for layer in range(3)
        for name, shape in (("attn_k", (32, 64)), ("ffn_up", (128, 64)), ("ffn_gate", (128, 64)))
    }
    paths = [
        write_lora(tmp_path / f"{i}.gguf", matrices(shapes, seed=i, strength=0.01))
        for i in range(64)
    ]
    keys = [adapter_key(add(model, path), 1.0) for path in paths]

    assert difference(logits(model, *keys), logits(model)) > NOISE_MAX
    for key in keys:
        model.remove_adapter(key.partition("*")[0])


def test_a_removed_adapter_is_unknown_until_it_is_added_again(
    model: LlamaModel, tmp_path: Path
) -> None:
    path = lora(tmp_path / "a.gguf", 5)
    key = adapter_key(add(model, path), 1.0)
    before, plain = logits(model, key), logits(model)

    model.remove_adapter(key.partition("*")[0])

    with pytest.raises(InvalidArgument, match="no adapter"):
        model.set_adapters((key,))
    assert difference(logits(model), plain) == 0
    add(model, path)
    assert difference(logits(model, key), before) == 0
    logits(model, key)
    model.set_adapters(())  # the context has it still
    model.remove_adapter(key.partition("*")[0])
    assert difference(logits(model), plain) == 0


def test_the_same_contents_are_one_adapter_whatever_the_name(
    model: LlamaModel, tmp_path: Path
) -> None:
    one, other = lora(tmp_path / "one.gguf", 6), lora(tmp_path / "other.gguf", 6)
    changed = lora(tmp_path / "changed.gguf", 7)

    assert add(model, one) == add(model, other) != add(model, changed)


@pytest.mark.parametrize("dtype", [np.float16, "bf16"])
def test_matrices_in_half_precision_are_accepted(
    model: LlamaModel, tmp_path: Path, dtype: Any
) -> None:
    exact = add(model, lora(tmp_path / "f32.gguf", 8))
    tensors: Matrices = matrices(seed=8)
    types = {}
    if dtype == "bf16":
        kind = gguf.GGMLQuantizationType.BF16
        types = dict.fromkeys(tensors, kind)
        tensors = {n: gguf.quants.quantize(t, kind) for n, t in tensors.items()}
    else:
        tensors = {n: t.astype(dtype) for n, t in tensors.items()}
    half = add(model, write_lora(tmp_path / "half.gguf", tensors, types=types))

    off = difference(logits(model, adapter_key(half, 1.0)), logits(model, adapter_key(exact, 1.0)))
    assert 0 < off < 0.1


# Adapters that would abort the process, or act wrongly without an error.


def changed(name: str, shape: tuple[int, ...]) -> Matrices:
    """Return an adapter's tensors, one of another shape."""
    return matrices() | {name: np.ones(shape, np.float32)}


Q = "blk.0.attn_q.weight"
NO_NUMBER = matrices()[f"{Q}.lora_b"].copy()
NO_NUMBER[3, 1] = np.nan
REFUSED: dict[str, tuple[dict[str, Any], Matrices, type[InferdError], str]] = {
    "a model": ({"general": "model"}, matrices(), LoadFailed, "is not an adapter"),
    "another kind": ({"kind": "dora"}, matrices(), UnsupportedOperation, "'dora'"),
    "another architecture": ({"architecture": "gemma3"}, matrices(), LoadFailed, "'gemma3'"),
    "an alpha that is a text": (
        {"alpha": lambda f: f.add_string("adapter.lora.alpha", "8")},
        matrices(),
        LoadFailed,
        "lora.alpha",
    ),
    "an alpha of double width": (
        {"alpha": lambda f: f.add_float64("adapter.lora.alpha", 8.0)},
        matrices(),
        LoadFailed,
        "lora.alpha",
    ),
    "an alpha that is a list": (
        {"alpha": lambda f: f.add_array("adapter.lora.alpha", [8.0])},
        matrices(),
        LoadFailed,
        "lora.alpha",
    ),
    "an alpha that is not a number": (
        {"alpha": lambda f: f.add_float32("adapter.lora.alpha", float("nan"))},
        matrices(),
        LoadFailed,
        "lora.alpha",
    ),
    "an aLoRA": (
        {"more": [lambda f: f.add_array("adapter.alora.invocation_tokens", [1, 2])]},
        matrices(),
        UnsupportedOperation,
        "aLoRA",
    ),
    "nothing": ({}, {}, LoadFailed, "no matrices"),
    "one of two": (
        {},
        {n: t for n, t in matrices().items() if n != f"{Q}.lora_b"},
        LoadFailed,
        "one matrix of two",
    ),
    "an unknown weight": (
        {},
        matrices({"blk.9.attn_q.weight": (64, 64)}),
        LoadFailed,
        "'blk.9.attn_q.weight'",
    ),
    "an unknown tensor": ({}, changed("something.else", (4,)), LoadFailed, "'something.else'"),
    "a doubled ending": ({}, changed(f"{Q}.lora_a.lora_b", (64, 4)), LoadFailed, "lora_a.lora_b"),
    "too many columns": ({}, changed(f"{Q}.lora_a", (4, 65)), LoadFailed, "does not fit"),
    "too many numbers": ({}, changed(f"{Q}.lora_b", (65, 4)), LoadFailed, "does not fit"),
    "two ranks": ({}, changed(f"{Q}.lora_a", (5, 64)), LoadFailed, "does not fit"),
    "a third dimension": ({}, changed(f"{Q}.lora_a", (2, 4, 64)), LoadFailed, "does not fit"),
    "a fourth dimension": ({}, changed(f"{Q}.lora_b", (2, 1, 64, 4)), LoadFailed, "does not fit"),
    "whole numbers": (
        {},
        matrices() | {f"{Q}.lora_a": np.ones((4, 64), np.int32)},
        UnsupportedOperation,
        "of a type",
    ),
    "doubles": (
        {},
        matrices() | {f"{Q}.lora_b": np.ones((64, 4), np.float64)},
        UnsupportedOperation,
        "of a type",
    ),
    "a value not a number": (
        {},
        matrices() | {f"{Q}.lora_b": NO_NUMBER},
        LoadFailed,
        "are numbers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_would_abort_llama_cpp_or_act_wrongly_are_refused(
    model: LlamaModel, tmp_path: Path, case: str
) -> None:
    options, tensors, error, message = REFUSED[case]
    plain = logits(model)

    with pytest.raises(error, match=message) as caught:
        add(model, write_lora(tmp_path / "bad.gguf", tensors, **options))

    assert "bad.gguf" in caught.value.message and caught.value.hint
    assert difference(logits(model), plain) == 0


@pytest.mark.parametrize("damage", ["missing", "folder", "empty", "no gguf", "cut", "header"])
def test_a_damaged_file_is_refused(model: LlamaModel, tmp_path: Path, damage: str) -> None:
    path = lora(tmp_path / "bad.gguf")
    data = path.read_bytes()
    damaged: dict[str, Callable[[], object]] = {
        "missing": path.unlink,
        "folder": lambda: path.rename(path.with_suffix("")).parent.joinpath(path.name).mkdir(),
        "empty": lambda: path.write_bytes(b""),
        "no gguf": lambda: path.write_bytes(b"x" * 1000),
        "cut": lambda: path.write_bytes(data[:-1000]),
        "header": lambda: path.write_bytes(data[:100]),
    }
    damaged[damage]()

    with pytest.raises(LoadFailed, match=r"bad\.gguf") as caught:
        add(model, path)
    assert caught.value.hint


def test_adapters_change_embeddings_only_if_the_output_layer_has_its_own_weights(
    model: LlamaModel, tmp_path: Path
) -> None:
    draw = np.random.default_rng(9)
    tensors = {
        "token_embd.weight.lora_a": draw.standard_normal((VOCAB_SIZE, 4)).astype(np.float32),
        "token_embd.weight.lora_b": draw.standard_normal((64, 4)).astype(np.float32),
    }
    path = write_lora(tmp_path / "embeddings.gguf", tensors)
    key = adapter_key(add(model, path), 1.0)
    assert difference(logits(model, key), bare_logits(tmp_path, {path: 1.0})) < NOISE_MAX
    wrong = {**tensors, "token_embd.weight.lora_b": np.ones((64, 5), np.float32)}
    with pytest.raises(LoadFailed, match="does not fit"):
        add(model, write_lora(tmp_path / "wrong.gguf", wrong))

    tied = header(write_tiny("llama", tmp_path))
    del tied.tensors["output.weight"]
    with pytest.raises(UnsupportedOperation, match="output"):
        check_adapter(header(path), tied, path.name)
