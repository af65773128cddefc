"""All stop conditions of one turn, made from its `StoppingParams`.

`backends.params` declares the parameters and checks them; `ending` has the reasons.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ....backends.params import StoppingParams
from ....backends.texts.incremental_regex import byte_size
from .ending import Ending, Stop, TextCondition
from .sentences import Sentences
from .text_conditions import COMPLETE_CONDITIONS, IndentCondition, PatternCondition
from .token_conditions import MeanSurprisal, Repetition

_NOTHING = StoppingParams()


class TextConditions:
    """The conditions on a turn's text. Finds the one that is met first, and the undecided text."""

    def __init__(self, conditions: Sequence[TextCondition]):
        self.size = 0
        """Bytes of the answer so far."""
        self._conditions = conditions
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._decoded = 0

    def check_piece(self, piece: bytes) -> Stop | None:
        """Check the bytes of one token; return the condition that is met first, if any."""
        self.size += len(piece)
        text = self._decoder.decode(piece)
        at = self._decoded
        self._decoded += byte_size(text)
        stops = [condition.check_text(text, at) for condition in self._conditions]
        return min((stop for stop in stops if stop is not None), default=None)

    @property
    def undecided(self) -> int:
        """The byte of the answer from which text may be cut off later."""
        places = [condition.undecided for condition in self._conditions]
        return min((place for place in places if place is not None), default=self.size)


class TurnConditions:
    """The conditions on a turn's tokens; `text` and `sentences` are those on its text, or None."""

    def __init__(self, params: StoppingParams):
        conditions: list[TextCondition] = [PatternCondition(p) for p in params.stop_patterns]
        conditions += [COMPLETE_CONDITIONS[name]() for name in params.stop_complete]
        if params.n_indent:
            conditions.append(IndentCondition(params.n_indent))
        self.text = TextConditions(conditions) if conditions else None
        self.sentences = Sentences() if params.stop_similarity else None
        self.tokens = frozenset(params.stop_tokens)
        self.grammar = params.stop_grammar
        self.line_ms = params.t_max_predict_ms
        """Time after which the turn ends at the next line end, or never if it is 0 or less."""
        self.surprisal: MeanSurprisal | None = None
        if params.stop_surprisal:
            self.surprisal = MeanSurprisal(params.stop_surprisal, params.stop_surprisal_window)
        self._repetition: Repetition | None = None
        if params.stop_repetition:
            self._repetition = Repetition(params.stop_repetition, params.stop_repetition_window)

    @classmethod
    def from_params(cls, params: StoppingParams) -> TurnConditions | None:
        """Return the conditions of a turn with these parameters, or None if there are none."""
        return None if params == _NOTHING else cls(params)

    def check_token(self, token: int, nats: float | None) -> Ending | None:
        """Check a token, with its surprisal if known; return the ending that it causes, if any."""
        if self._repetition is not None and (share := self._repetition.add_token(token)):
            return Ending(Repetition.reason, share)
        if self.surprisal is None or nats is None:
            return None
        mean = self.surprisal.add_surprisal(nats)
        return None if mean is None else Ending(MeanSurprisal.reason, mean)
