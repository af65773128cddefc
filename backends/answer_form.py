"""The form of a model's answers: the marks of reasoning, content and tool calls, as data.

A chat template defines it: `llama/text/answer_probes.py` derives it by rendering probe
conversations. Forms that no template shows are listed by name in `tool_formats.py`, and an operator
can set a form. The parser of answers, the grammar of calls, and the special tokens that must stay
visible come from it.

Marks are kept as the template writes them, with their white space. The parser matches a mark
without the white space at its ends, and white space between marks is optional; a grammar writes the
whole mark. A mark that is only white space is white space that must be there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from .texts import shorten

MARK_CHARACTERS_MAX = 256
"""The most characters of one mark."""
FORMS_MAX = 8
"""The most blocks, forms of calls, or single marks of one kind."""
_STRONG = re.compile(r"[<>|｜]|\[/?[A-Z][A-Z_ ]+\]|([^\w\s])\1\1")
"""Found in marks that are hardly ever ordinary text."""
_STRONG_CHARACTERS = 3


class Block(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an answer between two marks. It also ends where another block or a call begins."""

    begin: str = ""
    """Before it. Empty for reasoning with which every answer begins, whatever the end of the
    prompt."""
    end: str = ""
    """After it. At the beginning of an answer, the end of reasoning without its begin is
    dropped."""
    anywhere: bool = False
    """It may begin at any place of the content, and several times. Otherwise reasoning counts only
    at the beginning of the answer, after white space at most."""


class ArgumentsForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The encoding of the arguments of a call."""

    encoding: Literal["json", "tagged", "python"] = "json"
    """*json*: one object; a string that has the JSON of an object is read too.

    *tagged*: for each argument `key_begin KEY key_end [KIND] value_begin VALUE value_end`. A value
    is raw text if the function's schema lets the argument be a string, or if its kind is one of
    `text_kinds`. Otherwise it is JSON, or as Python prints it (`True`, `None`, `{'a': 1}`), or else
    raw text.

    *python*: `KEY=VALUE`, separated by commas; values are JSON or Python literals.
    """
    begin: str = ""
    """Before the arguments: `<|message|>`, `(`, `[ARGS]`. `{name}` in it is the call's name."""
    end: str = ""
    """After the arguments, before the end of the call."""
    quote: str = ""
    """In JSON: stands around strings in place of `"`, and nothing between is escaped."""
    bare_keys: bool = False
    """In JSON: keys have no quotes."""
    key_begin: str = ""
    """Tagged: before a key, such as `<parameter=`."""
    key_end: str = ""
    """After a key, such as `>`."""
    value_begin: str = ""
    """Before a value. At most the white space at its end, and at the beginning of *value_end*, is
    removed from a raw value."""
    value_end: str = ""
    """After a value, such as `</parameter>`. `{key}` in it is the key again."""
    text_kinds: tuple[str, ...] = ()
    """If there are any, the kind of the value stands between *key_end* and *value_begin*. With one
    of these, the value is raw text."""
    json_kinds: tuple[str, ...] = ()
    """The kinds of values that are JSON."""
    cdata: bool = False
    """A raw value may stand in `<![CDATA[…]]>`."""
    nested: bool = False
    """Values that are objects and lists are written in the same way again, the items of a list with
    the key `item`."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (
            *(self.begin, self.key_begin, self.key_end, self.value_begin, self.value_end),
            *(self.quote, self.end),
        )


JSON_ARGUMENTS = ArgumentsForm()


class CallForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A form of tool calls: `section_begin CALL separator CALL … section_end`.

    Several sections may follow each other. A CALL is, by its *layout*:

    - *json*: `begin {"name": NAME, "arguments": ARGUMENTS} end`
    - *keyed*: `begin {NAME: ARGUMENTS} end`
    - *named*: `begin [ID] name_begin NAME [ID] name_end ARGUMENTS [ID] end`. An id
      ends where the next mark begins.

    The parser looks for `triggers`. Outer marks may be missing before an inner trigger, and end
    marks may be missing.
    """

    section_begin: str = ""
    """Before all calls of an answer."""
    section_end: str = ""
    """After all calls."""
    array: bool = False
    """The calls stand in brackets, with commas between them; one call without them is read too."""
    begin: str = ""
    """Before each call."""
    end: str = ""
    """After each call."""
    separator: str = ""
    """Between two calls. The parser also takes white space, commas and semicolons."""
    layout: Literal["json", "keyed", "named"] = "json"
    """`json`: an object with the name and the arguments; `keyed`: an object whose key is the name;
    `named`: the name, and then the arguments."""
    name_key: str = "name"
    """The key of the name, or a path with dots: with `function.name`, the call is
    `{"function": {"name": …}}`, and `arguments_key` has the same path."""
    arguments_key: str = "arguments"
    """The key of the arguments."""
    id_key: str = ""
    """The key of the call's id, if the template writes one."""
    key_order: tuple[str, ...] = ()
    """The keys in the template's order, if it is not name, arguments."""
    constants: dict[str, str] = {}
    """The keys that have the same text in each call."""
    name_begin: str = ""
    """Before the name, after *begin* and an id."""
    name_end: str = ""
    """Between the name, or the id after it, and the arguments."""
    skips_to_arguments: bool = False
    """Up to 64 characters between the name and the begin of the arguments are skipped (gpt-oss)."""
    id_place: Literal["none", "before_name", "after_name", "after_arguments"] = "none"
    """The place of the id in a `named` call."""
    id_begin: str = ""
    """Before the id, which ends where the next mark begins."""
    id_index: Literal["", "from-0", "from-1"] = ""
    """The id is the number of the call; otherwise it is a text, the call's id."""
    arguments: ArgumentsForm = JSON_ARGUMENTS
    """The encoding of the arguments."""
    whole: bool = False
    """A call counts only if the answer, after reasoning, begins with it."""
    declared: bool = False
    """Only names of the request's functions are calls, because the marks are weak."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """The marks at which a call may begin, outermost first, without white space around them."""
        found = [m.strip() for m in (self.section_begin, self.begin, self.name_begin)]
        outer = next(filter(None, found), "")
        if self.whole or not outer:
            return ()
        return (outer, *(m for m in found if m != outer and is_strong(m)))

    @property
    def marks(self) -> tuple[str, ...]:
        return (
            *(self.section_begin, self.begin, self.name_begin, self.name_end, self.id_begin),
            *(*self.arguments.marks, self.end, self.section_end),
        )


class AnswerForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of all answers of a model. The default is plain text."""

    name: str = ""
    """The name of a known form. A form that was derived or is set as data has none."""
    reasoning: tuple[Block, ...] = ()
    """The marks of reasoning; the first ones are the usual ones."""
    content: tuple[Block, ...] = ()
    """Marks around content, which are removed. Content without them is content too."""
    calls: tuple[CallForm, ...] = ()
    """The forms of tool calls. Grammars write the first one; the others are read too."""
    opens: tuple[str, ...] = ()
    """Texts at the end of the prompt that belong to the answer: `<think>`, `>>>`. If the prompt
    ends with one, without regard to white space at its end, the parser gets it first."""
    dropped: tuple[str, ...] = ()
    """Marks that are removed outside of reasoning and arguments."""
    stops: tuple[str, ...] = ()
    """Texts at the end of an answer. For a loaded model: those that are not tokens which end it."""
    warnings: tuple[str, ...] = ()
    """The reasons why a part of the form could not be derived."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, without white space around them."""
        every = (
            *(m for block in (*self.reasoning, *self.content) for m in (block.begin, block.end)),
            *(mark for form in self.calls for mark in form.marks),
            *(*self.opens, *self.dropped, *self.stops),
        )
        return tuple(dict.fromkeys(m.strip() for m in every if m.strip()))

    @property
    def shown_name(self) -> str:
        """The name for clients: `none` without calls, and `derived` if the form has no name."""
        return self.name or ("derived" if self.calls else "none")


THINK = Block(begin="<think>", end="</think>")
PLAIN_ANSWERS = AnswerForm(reasoning=(THINK,), opens=("<think>",))
"""The form of models without another one."""


def is_strong(mark: str) -> bool:
    """Return whether a mark can hardly be ordinary text."""
    return len(mark.strip()) >= _STRONG_CHARACTERS and _STRONG.search(mark) is not None


def defects_of(form: AnswerForm) -> list[str]:
    """Return the reasons why answers cannot be read in this form."""
    return list(_defects(form))


def _defects(form: AnswerForm) -> Iterator[str]:
    lists = (form.reasoning, form.content, form.calls, form.opens, form.dropped, form.stops)
    if any(len(each) > FORMS_MAX for each in lists):
        yield f"more than {FORMS_MAX} blocks, calls or marks of one kind"
    if any(len(mark) > MARK_CHARACTERS_MAX for mark in (*form.marks, *form.stops)):
        yield f"a mark of more than {MARK_CHARACTERS_MAX} characters"
    if any("\0" in mark for mark in form.marks):
        yield "a mark with a NUL, which no grammar can write"
    for block in form.reasoning:
        yield from _weak("the end of reasoning", block.end)
        if block.begin:
            yield from _weak("the begin of reasoning", block.begin)
    for block in form.content:
        yield from _weak("the begin of content", block.begin)
        if block.end:
            yield from _weak("the end of content", block.end)
    for mark in form.dropped:
        yield from _weak("a dropped mark", mark)
    for call in form.calls:
        yield from _call_defects(call)


def _call_defects(call: CallForm) -> Iterator[str]:
    outer = next(iter(call.triggers), "")
    if call.whole:
        python = call.declared and call.arguments.encoding == "python"
        if call.layout == "named" and not (python or is_strong(call.name_begin + call.name_end)):
            yield "calls that begin the answer have no mark"
    elif not outer:
        yield "no mark stands before calls"
    elif not call.declared:
        yield from _weak("the mark before calls", outer)
    if call.layout == "named" and call.arguments.encoding == "tagged":
        yield from _weak("the mark before an argument", call.arguments.key_begin)
        yield from _weak("the mark after an argument", call.arguments.value_end)


def _weak(what: str, mark: str) -> Iterator[str]:
    if not is_strong(mark):
        yield f"{what} is {shorten(mark)}, which would hide ordinary text"


def read_answer_form(value: Any) -> AnswerForm:
    """Return the form that an operator has set as data.

    :raises ValueError: it is not one, has unknown keys, or has defects.
    """
    try:
        form = msgspec.convert(value, AnswerForm)
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc)) from None
    unknown = list(_unknown_keys(value, form))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    for defect in defects_of(form):
        raise ValueError(defect)
    return form


def _unknown_keys(value: Any, read: Any) -> Iterator[str]:
    """Yield the keys of *value* that the struct *read*, which was made of it, does not have."""
    if isinstance(value, list | tuple):
        for item, made in zip(value, read, strict=True):
            yield from _unknown_keys(item, made)
    elif isinstance(read, msgspec.Struct):
        for key, item in value.items():
            if key in read.__struct_fields__:
                yield from _unknown_keys(item, getattr(read, key))
            else:
                yield key
