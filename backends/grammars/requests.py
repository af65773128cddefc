"""The requests to the process that tries to compile grammars, and its replies."""

from __future__ import annotations

from typing import Any

import msgspec


class CheckRequest(msgspec.Struct, omit_defaults=True):
    """A grammar to compile: *gbnf*, or the JSON text of a *schema* with the *whitespace* of its
    answers (`json-whitespace`); *lenient*: without the constraints that cannot be kept.

    The other fields describe the vocabulary: see `Vocabulary`.
    """

    gbnf: str = ""
    schema: str = ""
    whitespace: str = "spaced"
    lenient: bool = False
    vocab_size: int = 0
    ends: tuple[int, ...] = ()
    names: dict[str, int] = {}


class CheckReply(msgspec.Struct, omit_defaults=True):
    """The *grammar* in llguidance's form and the memory that it takes, with the paths of the
    *dropped* constraints; or the *refusal*.
    """

    grammar: str = ""
    dropped: list[str] = []
    memory_bytes: int = 0
    refusal: dict[str, Any] | None = None
