"""All conditions of one turn."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ....backends.incremental_regex import byte_size
from ....backends.params import StoppingParams
from .complete import COMPLETE
from .condition import Stop, TextCondition
from .ending import Ending
from .indent import IndentCondition
from .patterns import PatternCondition
from .repetition import Repetition
from .sentences import Sentences
from .surprisal import MeanSurprisal

_NOTHING = StoppingParams()


class TextConditions:
    """The conditions on a turn's text: which is met first, and what is undecided."""

    def __init__(self, conditions: Sequence[TextCondition]):
        self.size = 0
        """Bytes of the answer so far."""
        self._conditions = conditions
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._decoded = 0

    def feed(self, piece: bytes) -> Stop | None:
        """Take the bytes of one token; return the condition that is met first, if one is."""
        self.size += len(piece)
        text = self._decoder.decode(piece)
        at = self._decoded
        self._decoded += byte_size(text)
        stops = [condition.feed(text, at) for condition in self._conditions]
        return min((stop for stop in stops if stop is not None), default=None)

    @property
    def undecided(self) -> int:
        """The byte of the answer from which text might be cut off later."""
        places = [condition.undecided for condition in self._conditions]
        return min((place for place in places if place is not None), default=self.size)


class TurnConditions:
    """What ends a turn by its tokens; `text` is what does so by its text, or None, and `sentences`
    are those that others judge.
    """

    def __init__(self, params: StoppingParams):
        conditions: list[TextCondition] = [PatternCondition(p) for p in params.stop_patterns]
        conditions += [COMPLETE[name]() for name in params.stop_complete]
        if params.n_indent:
            conditions.append(IndentCondition(params.n_indent))
        self.text = TextConditions(conditions) if conditions else None
        self.sentences = Sentences() if params.stop_similarity else None
        self.tokens = frozenset(params.stop_tokens)
        self.grammar = params.stop_grammar
        self.line_ms = params.t_max_predict_ms
        """Time after which the turn ends with a line; 0 and less: none."""
        self.surprisal: MeanSurprisal | None = None
        if params.stop_surprise:
            self.surprisal = MeanSurprisal(params.stop_surprise, params.stop_surprise_window)
        self._repetition: Repetition | None = None
        if params.stop_repetition:
            self._repetition = Repetition(params.stop_repetition, params.stop_repetition_window)

    @classmethod
    def of(cls, params: StoppingParams) -> TurnConditions | None:
        """Return what watches a turn with these parameters; None where nothing is to be watched."""
        return None if params == _NOTHING else cls(params)

    def feed(self, token: int, nats: float | None) -> Ending | None:
        """Take a token, and its surprisal where that is known; return the end, if it is one."""
        if self._repetition is not None:
            share = self._repetition.feed(token)
            if share is not None:
                return Ending(Repetition.reason, share)
        if self.surprisal is not None and nats is not None:
            mean = self.surprisal.feed(nats)
            if mean is not None:
                return Ending(MeanSurprisal.reason, mean)
        return None
