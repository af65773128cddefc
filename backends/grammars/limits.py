"""The limits of grammars: of their text, their compilation, and the matching of a token."""

from __future__ import annotations

from llguidance import LLParserLimits

from ..errors import TooLarge

GRAMMAR_BYTES_MAX = 256 << 10
CPU_S_MAX = 2.0
"""CPU time of one compilation. The schemas in the tests take 17 ms at the 99th percentile."""
COMPILE_S_MAX = 30.0
"""Time of one compilation: enough for `CPU_S_MAX` at the trial's low priority beside six busy
programs on two cores.
"""
MEMORY_BYTES_MAX = 128 << 20
"""Memory of one compilation. The schemas in the tests take a few MB."""
STACK_BYTES = 1 << 20
"""Stack of the thread that tries a compilation. A worker's threads have several times as much, so
a grammar that passes cannot overflow theirs, which would end the worker.
"""
RULES_MAX = 10_000
"""Rules and terminals of one Lark grammar."""
LITERAL_BYTES_MAX = 16 << 10
"""Bytes of one literal. Matching takes a state of the lexer for each byte."""
REGEX_BYTES_MAX = 8 << 10
"""Bytes of one regular expression."""
SMALLER_HINT = "use fewer or smaller alternatives, patterns and repetitions"
CACHED_MAX = 32
CACHED_BYTES_MAX = 64 << 20

MATCHING_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    max_items_in_row=2000,
    step_max_items=40_000,
    precompute_large_lexemes=True,
    verbose_errors=False,  # the texts of users
)
"""llguidance's own limits. At their beginnings, the 262 grammars and schemas of the tests need at
most an initial fuel of 10 000, then a fuel of 1000 for a step, 100 states of the lexer, a size of
10 000, 50 items in a row, and 20 000 items for a mask with Gemma's 262k tokens.

- The initial fuel and the size are llguidance's defaults: `CPU_S_MAX` bounds a compilation anyway.
- A state of the lexer takes 1 to 2 kB, so 50 000 take 100 MB at most. The default is 250 000.
- The fuel of a step, the default, lasts 14 ms. The expressions in `tests/attacks` never used it up.
- The items in a row bound the alternatives in one place, and the depth of right recursion.
- Ambiguous rules take 0.05 s for a mask of 40 000 items, and 0.6 s for 500 000 (SmolLM2, 49k
  tokens). A token that takes longer than a second ends its turn with `Timeout`.
- Without the precomputation, compiling a long string takes 37 ms instead of 10 ms.
"""


def too_much_memory() -> TooLarge:
    """Return the error for a grammar that takes more memory than it may."""
    return TooLarge(
        f"the grammar takes more than {MEMORY_BYTES_MAX} bytes of memory to compile",
        hint=SMALLER_HINT,
        data={"memory_bytes_max": MEMORY_BYTES_MAX},
    )
