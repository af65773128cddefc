"""Check of grammars, which the echo model does not follow."""

from __future__ import annotations

import msgspec

from ..grammars.checker import GrammarChecker
from ..grammars.gbnf import parse_gbnf
from ..grammars.requests import CheckRequest
from ..params import SamplingParams


class CheckedGrammar(msgspec.Struct, frozen=True):
    """A grammar that was checked; see `CompiledGrammar`."""

    dropped: tuple[str, ...] = ()


class EchoGrammars:
    """Checks the grammar or JSON schema of a turn. The tokens that a grammar names may be any."""

    def __init__(self) -> None:
        self._checker = GrammarChecker()

    def check(self, params: SamplingParams) -> CheckedGrammar | None:
        """Check *params*; see `Model.compile_grammar`."""
        if params.grammar:
            parse_gbnf(params.grammar)
            return CheckedGrammar()
        if not params.json_schema:
            return None
        request = CheckRequest(
            schema=params.json_schema,
            whitespace=params.json_whitespace,
            lenient=params.schema_lenient,
        )
        return CheckedGrammar(tuple(self._checker.check(request).dropped))

    def close(self) -> None:
        """End the process that compiles schemas on trial."""
        self._checker.close()
