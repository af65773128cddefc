"""The size of a GGUF file by its header."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.backends.gguf.facts import header_of
from inferd.backends.gguf.header import BLOCKS, GgufHeader, TensorEntry, bytes_promised
from tests.models import smollm2
from tests.tiny_gguf import KINDS, write_tiny


def test_the_sizes_of_blocks_are_those_of_the_installed_ggml() -> None:
    from llama_cpp import llama_cpp as lib

    from inferd.backends.llama.loading.gguf_check import _block_size, _type_size

    sizes = {kind: (_block_size(kind), _type_size(kind)) for kind in range(lib.GGML_TYPE_COUNT)}
    assert {kind: size for kind, size in sizes.items() if all(size)} == BLOCKS


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_has_the_bytes_that_its_header_promises(kind: str, tmp_path: Path) -> None:
    path = write_tiny(kind, tmp_path)
    assert 0 <= path.stat().st_size - bytes_promised(header_of(path)) < 64, "the rest is padding"


@pytest.mark.model
def test_a_quantized_file_has_the_bytes_that_its_header_promises() -> None:
    path = Path(smollm2())
    assert bytes_promised(header_of(path)) == path.stat().st_size


def test_of_a_tensor_of_an_unknown_type_the_position_counts() -> None:
    tensors = {"a": TensorEntry(0, (4, 2), 0), "b": TensorEntry(999, (10**9,), 64)}
    assert bytes_promised(GgufHeader(tensors=tensors, data_begin=96)) == 96 + 64
    assert bytes_promised(GgufHeader(data_begin=96)) == 96
