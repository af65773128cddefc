"""The text of one answer, as the generators that parse it read it.

The generators wait, by a yield, only where they cannot continue without the next piece. So the
results at any place do not depend on how the text before it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import NamedTuple

from .calls import ToolCallPart

CALL_CHARACTERS_MAX = 256 << 10
"""A longer call stays text."""
SPACE = re.compile(r"\s*")
_MARKS_CACHED_MAX = 256
HELD_CHARACTERS_MAX = 4096
"""More white space is text, whether or not a call follows."""
SPACE_CHARACTERS_MAX = 64
"""The most white space that may stand before a block of reasoning, or before the mark by which a
text in a call is known to have ended.
"""
SHORT_SPACE = re.compile(rf"\s{{0,{SPACE_CHARACTERS_MAX}}}")
"""White space that is read again with each piece, while a mark may follow it."""
_CUT_MARK_CHARACTERS = 3
"""So many characters at the end of an answer that a limit has cut may be dropped as a mark's."""

Reading = Generator[None, None, None]


class NotACall(Exception):
    """The text does not continue as a call."""


class AnswerEnded(Exception):
    """The answer has ended where a call could continue."""


class _Search(NamedTuple):
    """The search for one of several marks. *firsts* matches a character that begins one."""

    pattern: re.Pattern[str]
    firsts: re.Pattern[str]
    marks: tuple[str, ...]
    characters_max: int


@lru_cache(_MARKS_CACHED_MAX)
def _search_for(marks: tuple[str, ...]) -> _Search:
    """Return the search for *marks*. A mark that ends with a word and white space ends a word."""
    bare = {mark.strip(): mark for mark in marks}
    ordered = sorted(bare, key=len, reverse=True)
    patterns = [re.escape(m) + (r"(?=\s)" if _ends_word(m, bare[m]) else "") for m in ordered]
    firsts = "".join(re.escape(character) for character in {mark[0] for mark in ordered})
    # A mark that has to end a word is known to be one with the next character only.
    sought = tuple(mark + " " if _ends_word(mark, bare[mark]) else mark for mark in ordered)
    return _Search(
        re.compile("|".join(patterns)), re.compile(f"[{firsts}]"), sought, max(map(len, sought))
    )


def _ends_word(bare: str, mark: str) -> bool:
    return mark[-1].isspace() and bare[-1].isalnum()


def common_prefix(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def common_suffix(one: str, other: str) -> int:
    """Return the number of characters with which both texts end."""
    return common_prefix(one[::-1], other[::-1])


class AnswerSource:
    """The text of one answer. Owned by its parser. `buffer` from `at` on was not read yet.

    To *pass* text is to add it to the text of the answer, or to its reasoning. White space beside
    calls is not part of that.
    """

    def __init__(self) -> None:
        self.parts: list[ToolCallPart] = []
        """Parts of calls that were not taken yet."""
        self.calls = 0
        """Complete calls so far."""
        self.buffer, self.at = "", 0
        self.in_reasoning = False
        """Whether text that is passed is reasoning."""
        self.holds_space = False
        """Whether white space is held back until other text follows."""
        self.ended = False
        self.cut = False
        """Whether the answer has ended because a limit was reached."""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._held = ""
        """White space, and marks without a call, that are text unless a call follows."""
        self._overlong = False
        """Whether more white space than is held back has come, and no other text since."""
        self._skips = ""
        """White space of the last mark, which is left out as far as it comes next."""
        self._after_call = False
        self._unshown = 0
        """Characters of the prompt that were not read yet."""
        self._pending: list[str] = []
        """The text of a possible call so far."""
        self.pending_size = 0
        self._announced = False
        """Whether parts of the pending call were added to `parts`."""

    @property
    def unread(self) -> str:
        """The text that was added, and neither passed nor recognised."""
        return "".join(self._pending) + self.buffer[self.at :]

    def add_prompt(self, text: str) -> None:
        """Add the prompt's end, which is read like the answer and never passed."""
        self.buffer, self._unshown = text, len(text)

    def add_text(self, text: str) -> None:
        self.buffer, self.at = self.buffer[self.at :] + text, 0

    def end(self, *, cut: bool = False) -> None:
        """Note that no more text comes, perhaps because a limit *cut* the answer."""
        self.ended, self.cut = True, cut

    def take_text(self) -> str:
        """Return the text that was passed and not taken yet."""
        text, self._text = "".join(self._text), []
        return text

    def take_reasoning(self) -> str:
        """Return the reasoning that was passed and not taken yet."""
        text, self._reasoning = "".join(self._reasoning), []
        return text

    def take_parts(self) -> list[ToolCallPart]:
        """Return the parts of calls that were read and not taken yet."""
        parts, self.parts = self.parts, []
        return parts

    # Text.

    def text_until(self, marks: tuple[str, ...]) -> Generator[None, None, str]:
        """Pass text up to the next of *marks*, which becomes pending; return it without the white
        space at its ends.

        :raises AnswerEnded: the answer has ended without one.
        """
        search = _search_for(marks)
        while True:
            found = search.pattern.search(self.buffer, self.at)
            end = len(self.buffer) if found is None else found.start()
            if not self.ended or self.cut:
                partial = self._partial_mark(search)
                if partial <= end and self._waits_at(partial):
                    found, end = None, partial
            self._pass(self.buffer[self.at : end])
            self.at = end
            if found is not None:
                return self.take(len(found.group()))
            if self.ended:
                raise AnswerEnded
            yield

    def _waits_at(self, place: int) -> bool:
        """Return whether a mark may begin at *place*, or a longer one than is there. Of an answer
        that was cut, only a few characters show it.
        """
        rest = len(self.buffer) - place
        return not self.ended or self._after_call or rest >= _CUT_MARK_CHARACTERS

    def _partial_mark(self, search: _Search) -> int:
        """Return the place of the first mark that may begin at the end, or the end's place."""
        size = len(self.buffer)
        first = search.firsts.search(self.buffer, max(self.at, size - search.characters_max + 1))
        while first is not None:
            rest = self.buffer[first.start() :]
            if any(mark.startswith(rest) and mark != rest for mark in search.marks):
                return first.start()
            first = search.firsts.search(self.buffer, first.end())
        return size + 1

    def rest(self) -> Reading:
        """Pass text until all that may follow is passed unchanged."""
        self.holds_space = False
        while True:
            self._pass(self.buffer[self.at :])
            self.at = len(self.buffer)
            if self.ended:
                raise AnswerEnded
            if not (self._skips or self._unshown or self._after_call):
                self.pass_held()
                return
            yield

    def _pass(self, text: str) -> None:
        """Pass *text*, but hold back white space at its end, and drop white space after a call."""
        if self._unshown and text:
            size = min(self._unshown, len(text))
            self._unshown -= size
            self._skips, text = self._skips[size:], text[size:]
        if self._skips and text:
            size = common_prefix(self._skips, text)
            self._skips = self._skips[size:] if size == len(text) else ""
            text = text[size:]
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        if not text:
            return
        if not self.holds_space:
            text, self._held = self._held + text, ""
        elif shown := text.rstrip():
            text, self._held, self._overlong = self._held + shown, text[len(shown) :], False
        else:
            text, self._held = "", self._held + text
        if self._overlong or len(self._held) > HELD_CHARACTERS_MAX:
            text, self._held, self._overlong = text + self._held, "", True
        (self._reasoning if self.in_reasoning else self._text).append(text)

    def pass_held(self) -> None:
        """Pass the text that is held back."""
        held, self._held = self._held, ""
        (self._reasoning if self.in_reasoning else self._text).append(held)

    def settle(self, marks: tuple[str, ...]) -> None:
        """Pass what was read at the end of the answer. A call that a limit has cut ends. One of
        *marks* right after a call is dropped, and so is the beginning of one that was cut.
        """
        if self.cut and self._announced:
            self.end_call()
            self.at = len(self.buffer)
        elif self._after_call and (self.cut or "".join(self._pending).strip() in marks):
            self._forget_pending()
        else:
            self.pass_pending()
        if not self.cut:
            self._pass(self.buffer[self.at :])
        self.pass_held()

    def pass_pending(self) -> None:
        """Pass the pending text, because it is not a call."""
        if self._announced:
            self.parts.append(ToolCallPart(self.calls, dropped=True))
        pending = "".join(self._pending)
        self._forget_pending()
        self._pass(pending)

    def pass_failed(self, mark: str) -> None:
        """Pass the pending text, which begins with *mark* and is not a call. If it is only the
        mark, hold it back, because it does not count beside a call.
        """
        pending = "".join(self._pending)
        if pending.strip() != mark or self._unshown:
            self.pass_pending()
            return
        self._forget_pending()
        self._skips = ""
        if not self._after_call:
            self._held += pending

    def clear_pending(self) -> None:
        """Clear the pending text: it has become a call, or is skipped as a mark."""
        self._unshown = max(0, self._unshown - self.pending_size)
        self._forget_pending()

    def _forget_pending(self) -> None:
        self._pending.clear()
        self.pending_size, self._announced = 0, False

    def skip_mark(self, mark: str, before: str = "") -> None:
        """Leave out the pending *mark* with its white space, as far as the text has it. *before* is
        white space that is pending too.
        """
        self.clear_pending()
        self._held += before
        lead = mark[: len(mark) - len(mark.lstrip())]
        if lead and self._held:
            self._held = self._held[: len(self._held) - common_suffix(self._held, lead)]
        self.pass_held()
        self._skips = mark[len(mark.rstrip()) :]

    # Calls.

    def add_part(self, part: ToolCallPart) -> None:
        self.parts.append(part)
        self._announced = True

    def end_call(self) -> None:
        self.calls += 1
        self.clear_pending()
        self._held, self._skips, self._after_call = "", "", True

    @property
    def has_announced(self) -> bool:
        """Whether parts of the pending call were sent."""
        return self._announced

    def rewind(self, size: int) -> None:
        """Read the pending text again, except its first *size* characters."""
        if self._announced:
            self.parts.append(ToolCallPart(self.calls, dropped=True))
        pending = "".join(self._pending)
        self._forget_pending()
        self.buffer, self.at = pending + self.buffer[self.at :], 0
        self.take(size)

    def take(self, size: int) -> str:
        """Read the next *size* characters as a part of the pending call.

        :raises NotACall: the call is too long.
        """
        taken = self.buffer[self.at : self.at + size]
        self.at += size
        self._pending.append(taken)
        self.pending_size += size
        if self.pending_size > CALL_CHARACTERS_MAX:
            raise NotACall
        return taken

    def extend_pending(self, size: int) -> None:
        """Make *size* characters pending, if there are fewer; the text after them was added."""
        more = max(0, size - self.pending_size)
        self._pending.append(self.buffer[self.at : self.at + more])
        self.at += more

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it.

        :raises AnswerEnded: there is none.
        """
        while self.at == len(self.buffer):
            if self.ended:
                raise AnswerEnded
            yield
        return self.buffer[self.at]

    def comes(self, text: str) -> Generator[None, None, bool]:
        """Return whether *text* comes next.

        :raises AnswerEnded: the answer ends with its beginning, or before it.
        """
        while True:
            found = self.buffer[self.at : self.at + len(text)]
            if found == text:
                return True
            if not text.startswith(found):
                return False
            if self.ended:
                raise AnswerEnded
            yield

    def starts_with(self, text: str) -> Generator[None, None, bool]:
        """Read *text* if it comes next; return whether it does."""
        found = yield from self.comes(text)
        if found:
            self.take(len(text))
        return found

    def one_of(self, texts: tuple[str, ...]) -> Generator[None, None, str]:
        """Read the longest of *texts* that comes next, and return it; empty if none does.

        :raises AnswerEnded: the answer ends with the beginning of one.
        """
        longest = max(map(len, texts), default=0)
        while True:
            rest = self.buffer[self.at : self.at + longest]
            may_grow = any(t.startswith(rest) and t != rest for t in texts)
            if self.ended or not may_grow:
                found = max((t for t in texts if rest.startswith(t)), key=len, default="")
                if not found and may_grow and rest:
                    raise AnswerEnded
                return self.take(len(found)) if found else ""
            yield

    def expect(self, text: str) -> Reading:
        """Read *text*.

        :raises NotACall: another text comes next.
        """
        if not (yield from self.starts_with(text)):
            raise NotACall

    def space(self) -> Reading:
        """Read white space.

        :raises AnswerEnded: the answer ends with it.
        """
        yield from self.run(SPACE)

    def run(
        self, pattern: re.Pattern[str], pass_on: Callable[[str], None] | None = None
    ) -> Generator[None, None, str]:
        """Read and return the characters that *pattern*, a repeated class of characters, matches;
        *pass_on* gets them as they arrive.

        :raises AnswerEnded: the answer ends with them.
        """
        read = []
        while True:
            found = pattern.match(self.buffer, self.at)
            size = 0 if found is None else found.end() - self.at
            if size:
                read.append(self.take(size))
                if pass_on is not None:
                    pass_on(read[-1])
            if self.at < len(self.buffer):
                return "".join(read)
            yield from self.peek()

    def text_before(
        self, end: str, followers: tuple[str, ...], pass_on: Callable[[str], None]
    ) -> Reading:
        """Read text up to *end*, which is read too; *pass_on* gets the text as it arrives. If there
        are *followers*, the text ends only where one of them, or the answer's end, follows *end*
        and white space.

        :raises AnswerEnded: the end does not come.
        """
        search, longest = _search_for((end,)), max(map(len, followers), default=0)
        while True:
            place = self.buffer.find(end, self.at)
            if place < 0:
                is_whole = self.ended and not self.cut
                most = len(self.buffer) if is_whole else self._partial_mark(search)
                self._pass_on(min(most, len(self.buffer)), pass_on)
                if self.ended:
                    raise AnswerEnded
                yield
                continue
            self._pass_on(place, pass_on)
            after = SHORT_SPACE.match(self.buffer, place + len(end))
            assert after is not None, "it matches everywhere"
            rest = self.buffer[after.end() : after.end() + longest]
            ends = not followers or any(rest.startswith(f) for f in followers)
            if not ends and any(f.startswith(rest) for f in followers):
                if not self.ended:
                    yield
                    continue
                if self.cut:
                    raise AnswerEnded
                ends = True
            if ends:
                self.take(len(end))
                return
            self._pass_on(place + len(end), pass_on)

    def _pass_on(self, place: int, pass_on: Callable[[str], None]) -> None:
        if place > self.at:
            pass_on(self.take(place - self.at))

    def skip_marks(self, marks: tuple[str, ...]) -> Reading:
        """Skip white space and *marks* after a call, however many come next. At the answer's end,
        the beginning of one is skipped too.

        :raises AnswerEnded: nothing else follows.
        """
        longest = max(map(len, marks), default=0)
        while True:
            yield from self.space()
            rest = self.buffer[self.at : self.at + longest]
            if any(mark.startswith(rest) and mark != rest for mark in marks):
                if not self.ended:
                    yield
                    continue
                self.take(len(rest))
            elif not (yield from self.one_of(marks)):
                break
            self.clear_pending()
        self.clear_pending()
