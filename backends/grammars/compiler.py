"""The compiled grammars of one vocabulary."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import TooLarge
from ..params import SamplingParams
from .checker import GrammarChecker
from .limits import CACHED_BYTES_MAX, CACHED_MAX
from .native import Matcher, MatchingTokenizer
from .requests import CheckRequest
from .state import GrammarState

__all__ = ("GrammarCompiler", "VocabularyFacts")

_KEY = ("grammar", "json_schema", "json_whitespace", "schema_lenient")
"""The parameters that a compiled grammar depends on; the triggers only start it."""
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class VocabularyFacts:
    """The facts of a vocabulary that compilation needs; its functions may be called in any thread.

    `tokenizer` returns llguidance's form of the vocabulary, and may wait for it. `names_in` returns
    the tokens that a text names.
    """

    size: int
    ends: Callable[[], tuple[int, ...]]
    tokenizer: Callable[[], MatchingTokenizer]
    names_in: Callable[[str], Mapping[str, int]]


class GrammarCompiler:
    """Compiles grammars, and keeps those used last. Its methods may be called in any thread.

    A grammar is kept for its owner alone: the time that a turn takes must not tell which grammars
    others used.
    """

    def __init__(self, vocabulary: VocabularyFacts):
        self._vocabulary = vocabulary
        self._checker = GrammarChecker()
        self._kept: OrderedDict[_Key, tuple[GrammarState, int]] = OrderedDict()
        """States at the beginning, with the memory that they take."""
        self._lock = threading.Lock()

    def compile(self, params: SamplingParams, owner: int) -> GrammarState:
        """Return the grammar of *params* at its beginning. The caller owns it.

        :raises InvalidArgument: it is not a grammar, or not a schema that is supported.
        :raises TooLarge: it is past a limit on its text, or on its compilation.
        :raises Timeout: the machine is too busy.
        """
        key = (owner, *(getattr(params, name) for name in _KEY))
        with self._lock:
            if key not in self._kept:
                self._keep(key, *self._compile(params))
            self._kept.move_to_end(key)
            return self._kept[key][0].copy()

    def _compile(self, params: SamplingParams) -> tuple[GrammarState, int]:
        vocabulary, ends = self._vocabulary, self._vocabulary.ends()
        request = CheckRequest(
            gbnf=params.grammar,
            schema=params.json_schema,
            whitespace=params.json_whitespace,
            lenient=params.schema_lenient,
            vocab_size=vocabulary.size,
            ends=ends,
            names=dict(vocabulary.names_in(params.grammar)),
        )
        checked = self._checker.check(request)
        matcher = Matcher.compile(vocabulary.tokenizer(), checked.grammar)
        if matcher.is_error():  # with another vocabulary it has compiled
            raise TooLarge(
                f"the grammar cannot be compiled for this vocabulary ({matcher.get_error()})",
                hint="use fewer or smaller alternatives, patterns and repetitions",
            )
        state = GrammarState(matcher, vocabulary.size, ends, tuple(checked.dropped))
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
