"""The engine states with how many tokens it multiplies weights that are laid out for the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.backends.llama.loading.loader import REPACKED_ROWS, load_llama
from tests.backends.tiny import tiny_spec
from tests.tiny_gguf import write_tiny


@pytest.mark.parametrize(
    ("kind", "rows"), [("repacked", REPACKED_ROWS), ("moe", 1), ("llama", 1), ("t5", 1)]
)
def test_chunks_of_repacked_weights_have_blocks(kind: str, rows: int, tmp_path: Path) -> None:
    model = load_llama(tiny_spec(write_tiny(kind, tmp_path)), lambda _: True)
    try:
        assert model.info.rows_block == rows
    finally:
        model.close()
