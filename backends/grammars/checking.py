"""The check of grammars without a vocabulary, which may name any tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..params import SamplingParams

if TYPE_CHECKING:
    from .trial import GrammarChecker


class CheckedGrammar(msgspec.Struct, frozen=True):
    """A grammar that was checked; see `CompiledGrammar`."""

    dropped: tuple[str, ...] = ()


class GrammarCheck:
    """Checks the format of a turn's answer, for a model without a vocabulary such as echo, and for
    turns whose model is not loaded. It checks one at a time.
    """

    def __init__(self) -> None:
        self._checker: GrammarChecker | None = None

    def check(self, params: SamplingParams) -> CheckedGrammar | None:
        """Check *params*; see `LanguageModel.compile_grammar`."""
        if not params.has_grammar:
            return None
        # Imported late: otherwise llguidance and numpy take half of the time of a worker's start.
        from .formats import NO_VOCABULARY, check_request
        from .languages.gbnf import parse_gbnf
        from .trial import GrammarChecker

        if params.grammar:
            parse_gbnf(params.grammar)
            return CheckedGrammar()
        request = check_request(params, NO_VOCABULARY)
        if self._checker is None:
            self._checker = GrammarChecker()
        return CheckedGrammar(tuple(self._checker.check(request).dropped))

    def close(self) -> None:
        """End the process that compiles grammars on trial."""
        if self._checker is not None:
            self._checker.close()
