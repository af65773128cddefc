"""The compiled grammars of one vocabulary."""

from __future__ import annotations

import threading
from collections import OrderedDict

from llguidance import LLParserLimits

from ..errors import TooLarge
from ..params import GRAMMAR_FIELDS, SamplingParams
from .formats import VocabularyFacts, check_request
from .limits import CACHED_BYTES_MAX, CACHED_MAX, MATCHING_LIMITS, SMALLER_HINT
from .native import Matcher
from .state import GrammarState
from .trial.checker import GrammarChecker

__all__ = ("GrammarCompiler",)

_Key = tuple[object, ...]
_KEY = tuple(name for name in GRAMMAR_FIELDS if name != "grammar_triggers")
"""The parameters that a compiled grammar depends on; the triggers only start it."""


class GrammarCompiler:
    """Compiles grammars, and keeps those used last. Its methods may be called in any thread.

    A grammar is kept for its owner alone, because the time that a turn takes must not reveal which
    grammars others used.
    """

    def __init__(self, vocabulary: VocabularyFacts, limits: LLParserLimits = MATCHING_LIMITS):
        self._vocabulary, self._limits = vocabulary, limits
        self._checker = GrammarChecker()
        self._kept: OrderedDict[_Key, tuple[GrammarState, int]] = OrderedDict()
        """States at the beginning, with the memory that they take."""
        self._lock = threading.Lock()

    def compile(self, params: SamplingParams, owner: int) -> GrammarState:
        """Return the grammar of *params* at its beginning. The caller owns it.

        :raises InvalidArgument: *params* have no valid grammar, or a schema that is not supported.
        :raises TooLarge: the grammar is past a limit on its text, or on its compilation.
        :raises Timeout: the machine is too busy.
        """
        key = (owner, *(getattr(params, name) for name in _KEY))
        with self._lock:
            if key not in self._kept:
                self._keep(key, *self._compile(params))
            self._kept.move_to_end(key)
            return self._kept[key][0].copy()

    def _compile(self, params: SamplingParams) -> tuple[GrammarState, int]:
        vocabulary = self._vocabulary
        checked = self._checker.check(check_request(params, vocabulary))
        matcher = Matcher.compile(vocabulary.tokenizer(), checked.grammar, self._limits)
        if matcher.is_error():  # the trial compiled it with another vocabulary
            raise TooLarge(
                f"the grammar cannot be compiled for this vocabulary ({matcher.get_error()})",
                hint=SMALLER_HINT,
            )
        dropped = tuple(checked.dropped)
        state = GrammarState(matcher, vocabulary.size, vocabulary.ends(), dropped)
        return state, checked.memory_bytes

    def _keep(self, key: _Key, state: GrammarState, size: int) -> None:
        self._kept[key] = state, size
        while len(self._kept) > 1 and (
            len(self._kept) > CACHED_MAX
            or sum(size for _, size in self._kept.values()) > CACHED_BYTES_MAX
        ):
            self._kept.popitem(last=False)

    def close(self) -> None:
        """Free all grammars, and end the process that checks them."""
        with self._lock:
            self._kept.clear()
            self._checker.close()
