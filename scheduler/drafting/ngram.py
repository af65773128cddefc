"""The n-gram drafter: it looks up the last tokens of a task in the history of its session.

The index of a session is kept over its turns. It belongs to one user and one session, so no other
user's text, nor another session's, can show in its proposals. (llama-server has one table for all
slots.)
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from ..prefix import common_prefix
from ..task import Task

SIZE = 3
"""The tokens that are looked up. Shorter ones occur by chance too often."""
TOKENS_MAX = 1 << 15
"""The most tokens of a text in an index, which then has 640 KiB. Of a longer text it has the last
ones, at least half as many.
"""
STEP_TOKENS_MAX = 4096
"""Tokens that are indexed before one step: about 1 ms. A longer prompt takes several steps."""
BYTES_MAX = 32 << 20
"""The most bytes of all indexes of a worker."""
_ITEM_BYTES = array("i").itemsize
_PLACES_PER_TOKEN = 4
"""Places of an index for each token of its text: more than 1, so that few n-grams share a place."""
_GAP = -1
"""Stands between two texts. Neither it nor the entries of images, which are negative as well, are
proposed.
"""
_TOKEN_MAX = (1 << 31) - 1


class NgramIndex:
    """A text of at most *size* tokens, and the place behind the last occurrence of each n-gram in
    it. Places are found by a hash, and n-grams with the same one replace each other; so a place is
    compared with the text when it is looked up.
    """

    def __init__(self, size: int) -> None:
        self.text = array("i")
        self._key = (_GAP,) * SIZE
        """The last tokens of `text`."""
        self._mask = (1 << (size * _PLACES_PER_TOKEN - 1).bit_length()) - 1
        self._places = array("i", bytes((self._mask + 1) * _ITEM_BYTES))
        """0 stands for no place, because no n-gram ends there."""
        self._cursor = -1
        """The place of the token that is expected next; -1 if none is."""

    @staticmethod
    def bytes_of(size: int) -> int:
        """Return the most bytes of an index for *size* tokens."""
        return (size + (1 << (size * _PLACES_PER_TOKEN - 1).bit_length())) * _ITEM_BYTES

    def add(self, tokens: Sequence[int]) -> None:
        """Add *tokens* to the text. The place behind an n-gram is indexed once its token is known,
        so that the last n-gram does not find itself.
        """
        text, key, cursor, places, mask = (
            self.text,
            self._key,
            self._cursor,
            self._places,
            self._mask,
        )
        for token in tokens:
            if token > _TOKEN_MAX:
                token = _GAP
            place = len(text)
            if place >= SIZE:
                places[hash(key) & mask] = place
            if cursor >= 0:
                cursor = cursor + 1 if text[cursor] == token else -1
            text.append(token)
            key = (key[1], key[2], token)
        self._key, self._cursor = key, cursor

    def cut(self, size: int) -> None:
        """Drop all but the first *size* tokens. Places behind them are refused when looked up."""
        del self.text[size:]
        before = (_GAP,) * SIZE
        self._key = (*before, *self.text[-SIZE:])[-SIZE:]
        self._cursor = -1

    def expect_beginning(self) -> None:
        """Expect the beginning of the text next."""
        self._cursor = 0

    def propose(self, limit: int) -> list[int]:
        """Return up to *limit* tokens that followed the last tokens where they occurred before. A
        proposal that was right so far is continued. In a loop it goes on around the loop.
        """
        text, size = self.text, len(self.text)
        if self._cursor < 0 and size > SIZE:
            place = self._places[hash(self._key) & self._mask]
            if SIZE <= place < size and tuple(text[place - SIZE : place]) == self._key:
                self._cursor = place
        begin = self._cursor
        if not 0 <= begin < size:
            return []
        found = text[begin : begin + limit].tolist()
        if len(found) < limit:
            found = (found * (limit // len(found) + 1))[:limit]
        return found if min(found) >= 0 else [*takewhile(lambda token: token >= 0, found)]


@dataclass(slots=True)
class _History:
    """The text of a session, which *index* has from token number *begin* on, counted from the
    beginning of the session's present text, with tokens that a shift of this turn has dropped.
    """

    index: NgramIndex
    begin: int
    bytes: int
    task_id: int
    """The turn that used it last."""

    @property
    def end(self) -> int:
        """The number of tokens that were added or skipped."""
        return self.begin + len(self.index.text)


@dataclass(slots=True)
class _Predicted:
    """The prediction of a turn, of which *done* tokens are indexed, and the turn's answer behind
    it, which is indexed up to token number *seen*.
    """

    text: Sequence[int]
    index: NgramIndex
    done: int = 0
    seen: int = 0


_Key = tuple[int, str]


class NgramDrafter:
    """The texts of the sessions of all users, and the predictions of running turns. See `Drafter`.

    All indexes together have at most *bytes_max* bytes. The user with the most loses the one that
    was not used for longest, so that one user's many sessions do not cost others their indexes.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max, self.bytes = bytes_max, 0
        self._histories: dict[_Key, _History] = {}
        """By user and session; the one that was used last is last."""
        self._predicted: dict[int, _Predicted] = {}
        self._unnamed: dict[int, _Key] = {}
        """The keys of tasks without a session, whose histories end with them."""

    def __len__(self) -> int:
        return len(self._histories)

    def propose(self, task: Task, limit: int) -> Sequence[int]:
        """Index the new tokens of *task*, and return the tokens that are expected next."""
        history, total = self._history_of(task), len(task.tokens) + task.dropped
        if history is None:
            return ()
        seen, size = max(history.end, task.dropped), _size_of(task)
        if len(history.index.text) + total - seen > size:
            history.index.cut(0)
            history.begin = seen = max(task.dropped, total - size // 2)
        history.begin += seen - history.end  # a shift has dropped tokens before they were added
        end = min(total, seen + STEP_TOKENS_MAX)
        history.index.add(task.tokens[seen - task.dropped : end - task.dropped])
        predicted = self._propose_predicted(task, limit) if task.prediction else ()
        if end < total:
            return ()
        return predicted or history.index.propose(limit)

    def _history_of(self, task: Task) -> _History | None:
        """Return the history of the session of *task*; None if it does not fit."""
        key = task.spec.owner.user, task.spec.session or f"task {task.spec.id}"
        if not task.spec.session:
            self._unnamed[task.spec.id] = key
        history = self._histories.pop(key, None)
        size = NgramIndex.bytes_of(_size_of(task))
        if history is not None and history.bytes < size:
            self.bytes -= history.bytes
            history = None  # the context has become larger
        if history is None:
            if size > self.bytes_max:
                return None
            self._free(size)
            history = _History(NgramIndex(_size_of(task)), 0, size, task.spec.id)
            self.bytes += size
        elif history.task_id != task.spec.id:
            _keep_common(history, task)
        self._histories[key] = history
        return history

    def _free(self, size: int) -> None:
        """Evict indexes until there are *size* bytes for another one."""
        while self._histories and self.bytes + size > self.bytes_max:
            used = Counter[int]()
            for (user, _), history in self._histories.items():
                used[user] += history.bytes
            most = max(used, key=lambda user: used[user])
            self._drop(next(key for key in self._histories if key[0] == most))

    def _drop(self, key: _Key | None) -> None:
        history = None if key is None else self._histories.pop(key, None)
        if history is not None:
            self.bytes -= history.bytes

    def _propose_predicted(self, task: Task, limit: int) -> Sequence[int]:
        """Index the new tokens of the prediction and the answer; return the tokens that the
        prediction has next. A prediction that comes late is expected from its beginning, too.
        """
        found = self._predicted.get(task.spec.id)
        if found is None or found.text is not task.prediction:
            size = min(len(task.prediction), TOKENS_MAX) + 1 + _size_of(task)
            found = _Predicted(task.prediction, NgramIndex(size), seen=task.prompt_size)
            self._predicted[task.spec.id] = found
        index, most = found.index, min(len(found.text), TOKENS_MAX)
        if found.done < most:
            end = min(found.done + STEP_TOKENS_MAX, most)
            index.add(found.text[found.done : end])
            found.done = end
            if end == most:
                index.add((_GAP,))
                index.expect_beginning()
            return ()
        begin, end = max(found.seen, task.dropped), len(task.tokens) + task.dropped
        if end <= task.prompt_size + _size_of(task):  # with shifts, an answer has no bound
            index.add(task.tokens[begin - task.dropped :])
        found.seen = end
        return index.propose(limit)

    def forget(self, task_id: int) -> None:
        """Drop the prediction of a task; its session keeps its index."""
        self._predicted.pop(task_id, None)
        self._drop(self._unnamed.pop(task_id, None))

    def forget_session(self, user: int, session: str) -> None:
        """Drop the text of a session."""
        self._drop((user, session))


def _size_of(task: Task) -> int:
    """Return the most tokens of the index for *task*."""
    return min(max(task.ctx_size, SIZE), TOKENS_MAX)


def _keep_common(history: _History, task: Task) -> None:
    """Cut *history* back to the tokens with which *task*, the next turn, begins as well. If none of
    the indexed ones is left, it begins anew.
    """
    have = history.index.text
    tokens = array("i", task.tokens[history.begin : history.begin + len(have)])
    keep = common_prefix(have, tokens)
    history.index.cut(keep)
    history.task_id, history.begin = task.spec.id, history.begin if keep else 0
