"""Check of grammars, which the echo model does not follow."""

from __future__ import annotations

from ..grammars.checker import GrammarChecker
from ..grammars.gbnf import parse_gbnf
from ..grammars.requests import CheckRequest
from ..params import SamplingParams


class EchoGrammars:
    """Checks the grammar or JSON schema of a turn. The tokens that a grammar names may be any."""

    def __init__(self) -> None:
        self._checker = GrammarChecker()

    def check(self, params: SamplingParams) -> None:
        """Check *params*; see `Model.compile_grammar`."""
        if params.grammar:
            parse_gbnf(params.grammar)
        elif params.json_schema:
            self._checker.check(CheckRequest(schema=params.json_schema))

    def close(self) -> None:
        """End the process that compiles schemas on trial."""
        self._checker.close()
