"""The n-gram drafter: it looks up the last tokens of a task in the task's own history.

The index belongs to one task, so no other user's text, nor another session's, can show in its
proposals. (llama-server has one table for all slots.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..task import Task

SIZE = 3
"""The tokens that are looked up. Shorter ones occur by chance too often."""
TOKENS_MAX = 1 << 15
"""The most places in the index, which take 4 MB. It drops the older half when it is full."""
STEP_TOKENS_MAX = 4096
"""Tokens that are indexed before one step: about 1 ms. A longer prompt takes several steps."""
_BITS = 21
_MASK = (1 << SIZE * _BITS) - 1
_GAP = (1 << _BITS) - 1
"""Stands between two texts, for images, and for ids of more than 21 bits. It is never proposed."""


class NgramIndex:
    """The text of one task, and the place behind the last occurrence of each n-gram in it."""

    def __init__(self) -> None:
        self.text = array("i")
        self._key = 0
        """The last tokens of `text`, packed."""
        self._places: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._cursor = -1
        """The place of the token that is expected next; -1 if none is."""

    def add(self, tokens: Sequence[int]) -> None:
        """Add *tokens* to the text. The place behind an n-gram is indexed once its token is known,
        so that the last n-gram does not find itself.
        """
        text, key, cursor = self.text, self._key, self._cursor
        for token in tokens:
            if not 0 <= token < _GAP:
                token = _GAP
            place = len(text)
            if place >= SIZE:
                if len(self._places) >= TOKENS_MAX // 2:
                    self._places, self._older = {}, self._places
                self._places[key] = place
            if cursor >= 0:
                cursor = cursor + 1 if text[cursor] == token else -1
            text.append(token)
            key = (key << _BITS | token) & _MASK
        self._key, self._cursor = key, cursor

    def end_text(self) -> None:
        """Separate the text so far from the one that follows."""
        self.add((_GAP,))

    def expect_beginning(self) -> None:
        """Expect the beginning of the text next."""
        self._cursor = 0

    def propose(self, limit: int) -> list[int]:
        """Return up to *limit* tokens that followed the last tokens where they occurred before. A
        proposal that was right so far is continued. In a loop it goes on around the loop.
        """
        text, size = self.text, len(self.text)
        if self._cursor < 0 and size > SIZE:
            place = self._places.get(self._key)
            self._cursor = self._older.get(self._key, -1) if place is None else place
        begin = self._cursor
        if begin < 0:
            return []
        found = text[begin : begin + limit].tolist()
        if len(found) < limit:
            found = (found * (limit // len(found) + 1))[:limit]
        return found[: found.index(_GAP)] if _GAP in found else found


@dataclass(slots=True)
class _History:
    """The text of a task: its *prediction*, of which the first *predicted* tokens are indexed, and
    its own tokens, of which *seen* are, with those that a shift has dropped.
    """

    prediction: Sequence[int]
    seen: int
    index: NgramIndex = field(default_factory=NgramIndex)
    predicted: int = 0


class NgramDrafter:
    """The texts of the tasks with slots. See `Drafter`."""

    def __init__(self) -> None:
        self._histories: dict[int, _History] = {}

    def __len__(self) -> int:
        return len(self._histories)

    def propose(self, task: Task, limit: int) -> Sequence[int]:
        """Index the new tokens of *task*, and return the tokens that are expected next."""
        number, total = task.spec.id, len(task.tokens) + task.dropped
        history = self._histories.get(number)
        if history is None or history.prediction is not task.prediction:  # which came later
            seen = max(task.dropped, total - TOKENS_MAX)
            history = self._histories[number] = _History(task.prediction, seen)
        index = history.index
        if history.predicted < len(history.prediction):
            begin, most = history.predicted, TOKENS_MAX
            end = min(begin + STEP_TOKENS_MAX, most, len(history.prediction))
            index.add(history.prediction[begin:end])
            history.predicted = end if end < most else len(history.prediction)
            if history.predicted == len(history.prediction):
                index.end_text()
            return ()
        seen = max(history.seen, task.dropped)
        end, first = min(total, seen + STEP_TOKENS_MAX), task.prompt_size
        if seen < first <= end:
            index.add(task.tokens[seen - task.dropped : first - task.dropped])
            if history.predicted:
                index.expect_beginning()
            seen = first
        index.add(task.tokens[seen - task.dropped : end - task.dropped])
        history.seen = end
        return index.propose(limit) if end == total else ()

    def forget(self, task_id: int) -> None:
        """Drop the text of a task."""
        self._histories.pop(task_id, None)
