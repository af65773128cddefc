"""The facts that the headers of GGUF files state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import msgspec
import pytest

from inferd.backends import ModelSpec, estimate_memory
from inferd.backends.gguf import FileFacts
from inferd.backends.gguf.facts import (
    QUANTIZATIONS,
    READ_BYTES,
    facts_of,
    read_facts,
)
from inferd.backends.gguf.header import CutOffHeader, DamagedHeader, TensorEntry
from tests.models import gemma3, smollm2
from tests.tiny_gguf import write_split, write_tiny


def test_the_facts_of_a_tiny_model(tmp_path: Path) -> None:
    facts = read_facts([write_tiny("llama", tmp_path)])
    assert (facts.architecture, facts.quantization) == ("llama", "F32")
    assert (facts.ctx_size_trained, facts.embedding_size, facts.layers) == (4096, 64, 3)
    assert facts.chat_template is not None and "m.role" in facts.chat_template
    assert (facts.license, facts.supports_tools) == (None, False)


def test_the_parts_of_a_split_model_count_together(tmp_path: Path) -> None:
    whole = read_facts([write_tiny("llama", tmp_path)])
    (tmp_path / "split").mkdir()
    parts = write_split(tmp_path / "split")
    assert len(parts) > 1
    assert read_facts(parts).parameters == whole.parameters


@pytest.mark.model
@pytest.mark.parametrize(("file", "is_bound"), [(smollm2, False), (gemma3, True)])
def test_the_kv_state_of_a_token_is_what_llama_cpp_estimates_or_a_bound(
    file: Any, is_bound: bool
) -> None:
    """A header of more than `READ_BYTES[0]` is read, too."""
    facts = read_facts([file()])
    estimator = estimate_memory(ModelSpec(name="m", path=str(file()), slots=2, ctx_size=4096))
    need = estimator.need(estimator.shape)
    estimator.close()
    assert facts.kv_token_bytes_max is not None and facts.parameters > 130_000_000
    bound = facts.kv_token_bytes_max * 2 * 4096
    assert (need.context < bound) if is_bound else (need.context == bound)


@pytest.mark.parametrize(("kind", "kv_bytes"), [("mamba", None), ("bert", 0), ("lfm2", None)])
def test_models_without_keys_and_values_in_each_layer(
    kind: str, kv_bytes: int | None, tmp_path: Path
) -> None:
    assert read_facts([write_tiny(kind, tmp_path)]).kv_token_bytes_max == kv_bytes


def test_the_names_of_quantizations_are_llama_cpps() -> None:
    prefixes = ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_")
    known = {
        value: name.removeprefix(prefix)
        for name, value in vars(lib).items()
        for prefix in prefixes
        if name.startswith(prefix)
    }
    assert {number: QUANTIZATIONS.get(number) for number in known} == known


def test_facts_are_none_where_the_header_states_something_else() -> None:
    values = {"general.architecture": 7, "general.name": "x" * 300_000, "general.file_type": 999}
    facts = facts_of(values, {})
    assert (facts.architecture, facts.title, facts.quantization) == (None, None, "type 999")


def test_numbers_that_only_garbage_has_are_no_facts() -> None:
    """No largest number stands for them, and the facts fit into a reply."""
    huge = (1 << 64) - 1
    values = {"general.architecture": "a", "a.context_length": huge, "a.block_count": 1}
    tensors = {
        f"blk.0.attn_{name}.weight": TensorEntry(0, (0, huge, huge), 0) for name in ("k", "v")
    }
    facts = facts_of(values, tensors)
    assert facts.ctx_size_trained is facts.kv_token_bytes_max is None
    assert facts.parameters == 0
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=FileFacts) == facts


def test_tensors_that_no_file_can_hold_are_damage() -> None:
    tensors = {str(number): TensorEntry(0, (1 << 31, 1 << 31), 0) for number in range(2)}
    with pytest.raises(DamagedHeader, match="9223372036854775808 values"):
        facts_of({}, tensors)


def test_a_file_that_is_no_model_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    whole = write_tiny("llama", tmp_path).read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[:3000])
    for name, error in (("pipe", DamagedHeader), ("text", DamagedHeader), ("half", CutOffHeader)):
        with pytest.raises(error):
            read_facts([tmp_path / f"{name}.gguf"])
    with pytest.raises(OSError):
        read_facts([tmp_path / "missing.gguf"])


def test_a_header_without_an_end_is_read_up_to_a_bound(tmp_path: Path) -> None:
    whole = bytearray(write_tiny("llama", tmp_path).read_bytes())
    whole[8:16] = (1 << 20).to_bytes(8, "little")  # a million tensors
    path = tmp_path / "endless.gguf"
    path.write_bytes(whole)
    os.truncate(path, READ_BYTES[-1] + 1)
    with pytest.raises(DamagedHeader):
        read_facts([path])
