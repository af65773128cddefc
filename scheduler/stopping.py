"""Conditions that end a turn, other than end mark and bounds (docs/stopping.md), and the text of a
turn, of which they and the stop texts withhold parts until these are decided.

They depend on the turn's tokens alone, except for `t-max-predict-ms`, whose time
`TurnConditions.line_ms` holds and `engine.answers` checks. A turn that continues in another worker
replays its tokens. `backends.params` declares the parameters and checks them.

Each stop reason is declared once, beside its condition. Histories store reasons by name.
`cuts_text` looks a reason up, so a new condition that cuts text is known to all readers of a
history.
"""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..backends.incremental_regex import Pattern, RegexMatcher, byte_size
from ..backends.params import StoppingParams


@dataclass(frozen=True, slots=True, order=True)
class StopReason:
    """A reason by the *name* that clients and histories use. Creating one declares it."""

    name: str
    cuts_text: bool = False
    """Whether text is cut off. Its tokens stay in the history."""

    def __post_init__(self) -> None:
        assert self.name not in REASONS, f"the stop reason {self.name} is declared twice"
        REASONS[self.name] = self


REASONS: dict[str, StopReason] = {}
"""All declared reasons, by name."""

# Reasons without a condition class in this package. Importing the package declares all reasons.
STOP_TEXT = StopReason("stop", cuts_text=True)
END_MARK = StopReason("eos")
TOKEN = StopReason("token")
GRAMMAR = StopReason("grammar")
TIME = StopReason("time")
LENGTH = StopReason("length")
CONTEXT_FULL = StopReason("context_full")
EMBEDDED = StopReason("embedded")


class Ending(NamedTuple):
    """The ending of a turn; *piece* is the text of the end mark."""

    reason: StopReason
    detail: str
    piece: bytes = b""


class Stop(NamedTuple):
    """A condition that is met at the byte *met* of the answer, whose text then ends at byte *end*.

    Stops sort by these fields. The first met counts, and among those the one that leaves least
    text.
    """

    met: int
    end: int
    reason: StopReason
    detail: str


class TextCondition(Protocol):
    """A condition on an answer's text, independent of its split into pieces."""

    @property
    def undecided(self) -> int | None:
        """The byte from which text may be cut off later, or None if no text will be."""

    def check_text(self, text: str, at: int) -> Stop | None:
        """Check the next *text*, whole characters that start at the byte *at*."""


def cuts_text(reason: str | None) -> bool:
    """Return whether a turn that ended by *reason* has tokens whose text was cut off."""
    return reason in REASONS and REASONS[reason].cuts_text


GRAM = 4
"""Tokens of an n-gram. With 4 it is the measure rep-4 of Welleck et al., "Neural Text Generation
with Unlikelihood Training" (2019).
"""


class Repetition:
    """The share of repeated n-grams in a window of the last tokens: 1 minus the ratio of distinct
    n-grams to all. It is checked once the window is full.
    """

    reason = StopReason("repetition")

    def __init__(self, threshold: float, window: int):
        self._threshold = threshold
        self._size = window - GRAM + 1
        self._last: deque[int] = deque(maxlen=GRAM)
        self._grams: deque[tuple[int, ...]] = deque()
        self._counts: Counter[tuple[int, ...]] = Counter()

    def add_token(self, token: int) -> str | None:
        """Add the next token; return the share, as text, if it reaches the threshold."""
        self._last.append(token)
        if len(self._last) < GRAM:
            return None
        gram = tuple(self._last)
        self._grams.append(gram)
        self._counts[gram] += 1
        if len(self._grams) > self._size:
            oldest = self._grams.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        if len(self._grams) < self._size:
            return None
        share = 1 - len(self._counts) / self._size
        return f"{share:.3f}" if share >= self._threshold else None


class MeanSurprisal:
    """The mean surprisal of the last tokens, in nats. A token's surprisal is −ln of the probability
    that the model gave it, so the mean is the logarithm of the perplexity. It counts once the
    window is full. A high mean shows that the model has lost the thread.
    """

    reason = StopReason("surprisal")

    def __init__(self, threshold: float, window: int):
        self._threshold = threshold
        self._last: deque[float] = deque(maxlen=window)

    def add_surprisal(self, nats: float) -> str | None:
        """Add a token's surprisal; return the mean, as text, if it exceeds the threshold."""
        self._last.append(nats)
        if len(self._last) < (self._last.maxlen or 0):
            return None
        mean = math.fsum(self._last) / len(self._last)
        return f"{mean:.3f}" if mean > self._threshold else None


SENTENCE_CHARACTERS_MAX = 4096
"""Of a longer sentence only this many characters count, the first ones."""
_TERMINATORS = ".!?…"
_WIDE_TERMINATORS = "。！？｡"
_CLOSERS = "\"'”’»)]}」』）*_`"


class SentenceEnds:
    """A sentence ends at `.`, `!`, `?` or `…` behind a letter or digit, perhaps followed by closing
    quotes and brackets, and then white space; behind `。`, `！` and `？` at any other character.
    (These are the boundaries of Unicode's UAX #29, rules SB6 to SB11, as far as they need neither a
    dictionary nor later text. So there is one after `e.g. `.)
    """

    def __init__(self) -> None:
        self._worded = self._ended = self._wide = False

    def add_character(self, character: str) -> bool:
        """Add the next character; return whether a sentence has ended before it."""
        if character in _TERMINATORS or character in _WIDE_TERMINATORS:
            self._ended = self._worded
            self._wide = self._ended and character in _WIDE_TERMINATORS
        elif self._ended and character not in _CLOSERS:
            ends = self._wide or character.isspace()
            self._ended = self._wide = False
            if ends:
                self._worded = character.isalnum()
                return True
        self._worded |= character.isalnum()
        return False


class Sentence(NamedTuple):
    """A sentence that has ended, before the byte *end* of the answer."""

    end: int
    text: str


class Sentences:
    """Passes an answer's text up to the end of a sentence. However the tokens split it, later text
    waits until the sentence is compared: it is not released, and no other condition checks it.
    """

    reason = StopReason("similarity", cuts_text=True)

    def __init__(self) -> None:
        self.pending: Sentence | None = None
        """The sentence to be compared."""
        self._ends = SentenceEnds()
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._found: deque[Sentence] = deque()
        self._sentence = ""
        self._waiting = b""
        self._decoded = self._passed = 0
        """Bytes of the answer that were decoded, and that have passed."""

    def add_piece(self, piece: bytes) -> bytes:
        """Add the bytes of one token; return those that pass."""
        assert self.pending is None, "the pending sentence must be compared first"
        self._waiting += piece
        self._find_sentences(self._decoder.decode(piece))
        return self._pass()

    def pass_sentence(self) -> bytes:
        """Continue after the pending sentence; return the bytes that pass behind it."""
        self.pending = None
        return self._pass()

    def resume(self, sent: bytes, shown: int) -> bytes:
        """Restore an answer whose sentences before byte *shown* were compared. Return the bytes
        that pass.
        """
        self._waiting = sent
        self._find_sentences(self._decoder.decode(sent))
        while self._found and self._found[0].end < shown:
            self._found.popleft()
        return self._pass()

    def rest(self) -> bytes:
        """Return the incomplete character that ends the answer, unless a sentence is pending."""
        if self.pending is not None:
            return b""
        rest, self._waiting = self._waiting, b""
        return rest

    def _find_sentences(self, text: str) -> None:
        for character in text:
            if self._ends.add_character(character):
                self._found.append(Sentence(self._decoded, _readable(self._sentence)))
                self._sentence = ""
            begins = self._sentence or not character.isspace()
            if begins and len(self._sentence) < SENTENCE_CHARACTERS_MAX:
                self._sentence += character
            self._decoded += byte_size(character)

    def _pass(self) -> bytes:
        if self._found:
            self.pending = self._found.popleft()
        end = self._decoded if self.pending is None else self.pending.end
        size = end - self._passed
        passing, self._waiting = self._waiting[:size], self._waiting[size:]
        self._passed = end
        return passing


def _readable(text: str) -> str:
    """Return *text* with a mark for each invalid byte."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


COMPLETE_ANSWER = StopReason("complete", cuts_text=True)
WITHHELD_BYTES_MAX = 4096
"""At most this much text is withheld because a pattern may still match it."""
_CLOSING = {"{": "}", "[": "]"}
_BLANK = " \t\r\n"
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.DOTALL)


class CharacterCondition:
    """A condition that is decided at each character, which is then cut off unless *keeps_last*."""

    reason = COMPLETE_ANSWER
    undecided = None
    detail: str
    keeps_last = False

    def check_text(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.check_text`."""
        for character in text:
            end = at + byte_size(character)
            if self.add_character(character):
                return Stop(end, end if self.keeps_last else at, self.reason, self.detail)
            at = end
        return None

    def add_character(self, character: str) -> bool:
        """Add the next character; return whether the condition is met."""
        raise NotImplementedError


class JsonCondition(CharacterCondition):
    """The answer begins, behind white space, with a JSON object, array or string (RFC 8259) that is
    closed. Brackets within strings do not count. An answer that begins otherwise, or closes a
    bracket that is not open, never meets the condition.
    """

    detail = "json"
    keeps_last = True

    def __init__(self) -> None:
        self._open: list[str] | None = []
        """The expected closing brackets, the innermost last, or None if the answer is not JSON."""
        self._started = self._quoted = self._escaped = False

    def add_character(self, character: str) -> bool:
        """See `CharacterCondition.add_character`."""
        if self._open is None:
            return False
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._started = self._quoted = True
        elif character in _CLOSING:
            self._started = True
            self._open.append(_CLOSING[character])
        elif character in "]}" or (not self._started and character not in _BLANK):
            closes = bool(self._open) and self._open.pop() == character
            self._open = self._open if closes else None
        return self._started and not self._quoted and self._open == []


class FenceCondition(CharacterCondition):
    """A fenced block (CommonMark 0.31.2, section 4.5) is closed; its last line's end is cut off."""

    detail = "fence"

    def __init__(self) -> None:
        self._line: list[str] = []
        self._fence = ""
        """The fence that opened the block; empty outside of one."""

    def add_character(self, character: str) -> bool:
        """See `CharacterCondition.add_character`."""
        if character != "\n":
            self._line.append(character)
            return False
        found = _FENCE.fullmatch("".join(self._line))
        self._line.clear()
        if found is None:
            return False
        fence, rest = found.groups()
        if not self._fence:
            self._fence = "" if fence[0] == "`" and "`" in rest else fence
            return False
        return not rest.strip() and fence[0] == self._fence[0] and len(fence) >= len(self._fence)


class SentenceCondition(SentenceEnds, CharacterCondition):
    """A sentence has ended; the text behind it is cut off."""

    detail = "sentence"


class IndentCondition(CharacterCondition):
    """Each line except the first must begin with *n_indent* spaces and tabs, as in llama-server
    (`server-context.cpp`); so an empty line ends the answer, too. A line with fewer is cut off
    behind them.
    """

    reason = StopReason("indent", cuts_text=True)

    def __init__(self, n_indent: int):
        self.detail = f"n-indent {n_indent}"
        self._n_indent = n_indent
        self._spaces: int | None = None
        """Spaces of the present line so far, or None if it has other characters or is the first."""

    def add_character(self, character: str) -> bool:
        """See `CharacterCondition.add_character`."""
        if self._spaces is not None and character in " \t":
            self._spaces += 1
        elif self._spaces is not None and self._spaces < self._n_indent:
            return True
        else:
            self._spaces = 0 if character == "\n" else None
        return False


class PatternCondition:
    """A regular expression matches, and the match is cut off. Of a match that is longer than
    `WITHHELD_BYTES_MAX`, only the last part is cut off.
    """

    reason = StopReason("pattern", cuts_text=True)

    def __init__(self, pattern: str):
        self._name = pattern
        self._matcher = RegexMatcher(Pattern.cached(pattern))
        self._end = 0

    @property
    def undecided(self) -> int | None:
        """The beginning of the text that may become a match."""
        pending = self._matcher.pending
        return None if pending is None else max(pending, self._end - WITHHELD_BYTES_MAX)

    def check_text(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.check_text`."""
        found = self._matcher.match_text(text, at)
        if found is None:
            self._end = at + byte_size(text)
            return None
        begin, end = found
        return Stop(end, max(begin, end - WITHHELD_BYTES_MAX), self.reason, self._name)


COMPLETE_CONDITIONS: dict[str, Callable[[], TextCondition]] = {
    "json": JsonCondition,
    "fence": FenceCondition,
    "sentence": SentenceCondition,
}
"""The conditions that `stop-complete` can name."""


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
        """Check a token, with its surprisal if known; return the ending that it causes, if any.
        The surprisal of a forced token does not count; it may be NaN.
        """
        if self._repetition is not None and (share := self._repetition.add_token(token)):
            return Ending(Repetition.reason, share)
        if self.surprisal is None or nats is None or math.isnan(nats):
            return None
        mean = self.surprisal.add_surprisal(nats)
        return None if mean is None else Ending(MeanSurprisal.reason, mean)


class Released(NamedTuple):
    """The text that a piece releases, and the ending that it meets, if any."""

    text: bytes
    ending: Ending | None = None


def incomplete_utf8(data: bytes) -> int:
    """Return how many bytes at the end of *data* begin an incomplete character.

    Bytes that can never become a character count as text.
    """
    end = data[-3:]
    return len(end) - codecs.utf_8_decode(end, "replace")[1]


class TextAssembler:
    """Withholds undecided text, which is a part of a character or the beginning of a possible stop.

    *stop* texts are cut from the output, *keep* texts (reverse prompts) stay in it. *conditions*
    are the other conditions on the text. With *sentences*, each sentence that has ended is in
    `pending_sentence` until `stop_at_sentence` or `continue_text`. Text after a stop is never
    released, however the tokens split it.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        keep: Sequence[str] = (),
        conditions: TextConditions | None = None,
        sentences: Sentences | None = None,
    ):
        self._stops = [(s.encode(), s, False) for s in stop] + [(s.encode(), s, True) for s in keep]
        self._conditions = conditions
        self._sentences = sentences
        self._plain = not self._stops and conditions is None
        self._held = b""
        self._stopped = False

    def with_stops(self, stop: Sequence[str], keep: Sequence[str]) -> TextAssembler:
        """Return an assembler with other stop texts and the same withheld text."""
        other = TextAssembler(stop, keep, self._conditions, self._sentences)
        other._held, other._stopped = self._held, self._stopped
        return other

    @property
    def pending_sentence(self) -> Sentence | None:
        """The sentence to be compared. Text behind it is checked only after that."""
        return None if self._sentences is None or self._stopped else self._sentences.pending

    def stop_at_sentence(self) -> None:
        """End the text with the pending sentence."""
        self._stopped = True

    def continue_text(self) -> Released:
        """Check the text behind the pending sentence. The next piece releases what can be shown."""
        assert self._sentences is not None
        released = self._add_text(self._sentences.pass_sentence())
        self._held = released.text + self._held
        return released._replace(text=b"")

    def resume(self, sent: bytes, shown: int) -> Released:
        """Continue a turn after *sent*, the text of its tokens so far, of which *shown* bytes were
        released. Return the ending, if the turn has met one that was not reported.
        """
        self._held = b""
        if self._sentences is not None:
            sent = self._sentences.resume(sent, shown)
        stop = None if self._conditions is None else self._conditions.check_piece(sent)
        held = sent[shown:]
        found = _earliest(self._find(held), stop, shown)
        self._held = held if found is None else held[: max(0, found.end)]
        self._stopped = found is not None
        return Released(b"") if found is None else Released(b"", Ending(found.reason, found.detail))

    def add_piece(self, piece: bytes) -> Released:
        """Add the bytes of one token; return the text that can be shown now."""
        if self._stopped:
            return Released(b"")
        return self._add_text(
            piece if self._sentences is None else self._sentences.add_piece(piece)
        )

    def _add_text(self, piece: bytes) -> Released:
        if self._plain and not self._held and piece.isascii():
            return Released(piece)
        data, conditions = self._held + piece, self._conditions
        begin = 0 if conditions is None else conditions.size - len(self._held)
        stop = None if conditions is None else conditions.check_piece(piece)
        found = _earliest(self._find(data), stop, begin)
        if found is not None:
            self._stopped, self._held = True, b""
            return Released(data[: _boundary(data, found.end)], Ending(found.reason, found.detail))
        partial = max((_overlap(data, text) for text, _, _ in self._stops), default=0)
        size = len(data) - max(partial, incomplete_utf8(data))
        if conditions is not None:
            size = min(size, _boundary(data, conditions.undecided - begin))
        self._held = data[size:]
        return Released(data[:size])

    def flush(self) -> bytes:
        """Return the withheld text, at the end of the turn."""
        held, self._held = self._held, b""
        if self._sentences is not None and not self._stopped:
            held += self._sentences.rest()
        return held

    def _find(self, data: bytes) -> Stop | None:
        """Return the stop text in *data* that ends the output, if there is one.

        Of several it is the one that is complete first, and of those complete at the same byte the
        longest. So the result does not depend on the split into tokens.
        """
        hits = [
            (at + len(stop), at, at + len(stop) if keep else at, name)
            for stop, name, keep in self._stops
            if (at := data.find(stop)) >= 0
        ]
        if not hits:
            return None
        met, _, end, name = min(hits)
        return Stop(met, end, STOP_TEXT, name)


def _earliest(text: Stop | None, other: Stop | None, begin: int) -> Stop | None:
    """Return the stop that was met first, with its places in the data that begins at the byte
    *begin* of the answer; those of *other* are places in the answer.
    """
    if other is None:
        return text
    other = other._replace(met=other.met - begin, end=other.end - begin)
    return other if text is None else min(text, other)


def _boundary(data: bytes, place: int) -> int:
    """Return *place*, or the end of the character that it splits."""
    while 0 < place < len(data) and data[place] & 0xC0 == 0x80:
        place += 1
    return place


def _overlap(data: bytes, stop: bytes) -> int:
    """Return the length of the longest end of *data* with which *stop* begins."""
    for size in range(min(len(data), len(stop) - 1), 0, -1):
        if data.endswith(stop[:size]):
            return size
    return 0
