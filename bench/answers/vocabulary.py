"""The vocabulary in which texts of all templates are counted: that of a small model."""

from __future__ import annotations

from functools import cache

import llama_cpp

from tests.models import smollm2


@cache
def _vocabulary() -> llama_cpp.Llama:
    return llama_cpp.Llama(str(smollm2()), vocab_only=True, verbose=False)


def count_tokens(text: str) -> int:
    """Return the number of tokens of *text*."""
    return len(_vocabulary().tokenize(text.encode(), add_bos=False)) if text else 0
