"""Conditions that end a turn with a complete answer: a JSON value, a fenced block, a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable

from ....backends.incremental_regex import byte_size
from .condition import Stop, TextCondition
from .ending import StopReason
from .sentences import SentenceEnds

COMPLETE_ANSWER = StopReason("complete", cuts_text=True)
_CLOSING = {"{": "}", "[": "]"}
_BLANK = " \t\r\n"
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.DOTALL)


class JsonCondition:
    """The answer begins, behind white space, with a JSON object, array or string (RFC 8259) that is
    closed. Brackets within strings do not count. An answer that begins otherwise, or closes a
    bracket that is not open, never meets the condition.
    """

    reason = COMPLETE_ANSWER
    undecided = None

    def __init__(self) -> None:
        self._open: list[str] | None = []
        """The expected closing brackets, the innermost last; None: the answer is not JSON."""
        self._begun = self._quoted = self._escaped = False

    def check_text(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.check_text`."""
        for character in text:
            if self._open is None:
                return None
            at += byte_size(character)
            self._track(character)
            if self._begun and not self._quoted and self._open == []:
                return Stop(at, at, COMPLETE_ANSWER, "json")
        return None

    def _track(self, character: str) -> None:
        assert self._open is not None
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._begun = self._quoted = True
        elif character in _CLOSING:
            self._begun = True
            self._open.append(_CLOSING[character])
        elif character in "]}" or (not self._begun and character not in _BLANK):
            closes = bool(self._open) and self._open.pop() == character
            self._open = self._open if closes else None


class FenceCondition:
    """A fenced block (CommonMark 0.31.2, section 4.5) is closed; its last line's end is cut off."""

    reason = COMPLETE_ANSWER
    undecided = None

    def __init__(self) -> None:
        self._line = ""
        self._fence = ""
        """The fence that opened the block; empty outside of one."""

    def check_text(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.check_text`."""
        for part in _LINES.findall(text):
            at += byte_size(part)
            self._line += part
            if part.endswith("\n"):
                line, self._line = self._line[:-1], ""
                if self._closes(line):
                    return Stop(at, at - 1, COMPLETE_ANSWER, "fence")
        return None

    def _closes(self, line: str) -> bool:
        found = _FENCE.fullmatch(line)
        if found is None:
            return False
        fence, rest = found.groups()
        if not self._fence:
            self._fence = "" if fence[0] == "`" and "`" in rest else fence
            return False
        return not rest.strip() and fence[0] == self._fence[0] and len(fence) >= len(self._fence)


class SentenceCondition:
    """A sentence has ended (`SentenceEnds`); the text behind it is cut off."""

    reason = COMPLETE_ANSWER
    undecided = None

    def __init__(self) -> None:
        self._ends = SentenceEnds()

    def check_text(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.check_text`."""
        for character in text:
            end = at + byte_size(character)
            if self._ends.add_character(character):
                return Stop(end, at, COMPLETE_ANSWER, "sentence")
            at = end
        return None


COMPLETE: dict[str, Callable[[], TextCondition]] = {
    "json": JsonCondition,
    "fence": FenceCondition,
    "sentence": SentenceCondition,
}
"""The conditions that `stop-complete` can name."""
