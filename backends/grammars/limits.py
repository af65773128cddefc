"""The limits of grammars: of their text, their compilation, and the matching of a token."""

from __future__ import annotations

from llguidance import LLParserLimits

SCHEMA_BYTES_MAX = 64 << 10
GRAMMAR_BYTES_MAX = 256 << 10
CPU_S_MAX = 2.0
"""CPU time of one compilation. The schemas in the tests take 17 ms at the 99th percentile."""
MEMORY_BYTES_MAX = 128 << 20
"""Memory of one compilation. The schemas in the tests take a few MB."""
STACK_BYTES = 1 << 20
"""Stack of the thread that tries a compilation. A worker's threads have several times as much, so
a grammar that passes cannot overflow theirs, which would end the worker.
"""
CACHED_MAX = 32
CACHED_BYTES_MAX = 64 << 20

MATCHING_LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # 1 to 2 kB each
    step_max_items=500_000,  # 25 ms by llguidance's figures; a mask for letters takes many
    verbose_errors=False,  # the texts of users
)
