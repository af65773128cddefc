"""Check of grammars, which the echo model does not follow."""

from __future__ import annotations

import msgspec

from ..grammars.formats import NO_VOCABULARY, check_request
from ..grammars.languages.gbnf import parse_gbnf
from ..grammars.trial.checker import GrammarChecker
from ..params import SamplingParams


class CheckedGrammar(msgspec.Struct, frozen=True):
    """A grammar that was checked; see `CompiledGrammar`."""

    dropped: tuple[str, ...] = ()


class EchoGrammars:
    """Checks the format of a turn's answer. The tokens that a grammar names may be any."""

    def __init__(self) -> None:
        self._checker = GrammarChecker()

    def check(self, params: SamplingParams) -> CheckedGrammar | None:
        """Check *params*; see `Model.compile_grammar`."""
        if params.grammar:
            parse_gbnf(params.grammar)
            return CheckedGrammar()
        if not params.has_grammar:
            return None
        request = check_request(params, NO_VOCABULARY)
        return CheckedGrammar(tuple(self._checker.check(request).dropped))

    def close(self) -> None:
        """End the process that compiles grammars on trial."""
        self._checker.close()
