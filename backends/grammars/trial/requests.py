"""The requests to the process that tries to compile grammars, and its replies."""

from __future__ import annotations

import msgspec

from ...errors import ErrorFields

Mark = tuple[str | int, ...]
"""A text in parts: texts, and numbers of special tokens."""


class TagRequest(msgspec.Struct, omit_defaults=True):
    """A part of an answer: *trigger*, the *rest* of its begin, a content, and *end*.

    The content is the JSON text of a *schema*, or a *gbnf* grammar or a *regex*.
    """

    trigger: Mark
    rest: Mark
    end: Mark
    schema: str = ""
    gbnf: str = ""
    regex: str = ""


class CheckRequest(msgspec.Struct, omit_defaults=True):
    """A grammar to compile: *gbnf*, *lark*, *regex*, the JSON text of a *schema*, or *tags*.

    *whitespace* is that of the answers to a schema (`json-whitespace`); *lenient* leaves out the
    constraints that cannot be kept; *infer* is the value of `schema-infer`. *at_least_one*,
    *stop_after_first* and *opened* are those of `StructuralTags`. The fields from
    *vocab_size* on describe the vocabulary; see `Vocabulary`.
    """

    gbnf: str = ""
    schema: str = ""
    whitespace: str = "spaced"
    lenient: bool = False
    infer: str = "closed"
    lark: str = ""
    regex: str = ""
    tags: tuple[TagRequest, ...] = ()
    at_least_one: bool = False
    stop_after_first: bool = False
    opened: str = ""
    vocab_size: int = 0
    ends: tuple[int, ...] = ()
    names: dict[str, int] = {}
    special: tuple[tuple[int, int], ...] = ()
    texts: dict[int, bytes] = {}


class CheckReply(msgspec.Struct, omit_defaults=True):
    """The *grammar* in llguidance's form and the memory that it takes, with the paths of the
    *dropped* constraints; or the *refusal*.

    *failure* is the type and the place of an unexpected exception.
    """

    grammar: str = ""
    dropped: list[str] = []
    memory_bytes: int = 0
    refusal: ErrorFields | None = None
    failure: str = ""
