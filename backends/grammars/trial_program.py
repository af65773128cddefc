"""The program that compiles grammars on trial, `inferd.backends.grammars.trial_program`.

A grammar of a few bytes can take minutes and gigabytes, or overflow the stack of the thread that
compiles it. Here only this process ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ..errors import InferdError, InvalidArgument, TooLarge, place_of
from ..memory import resident_bytes
from ..sandbox import serve_requests
from .forced_text import ForcedText, forced_by_lark, forced_by_schema, together, with_bounded_texts
from .formats import Vocabulary
from .json_schema.document import Schema, read_schema
from .json_schema.inference import infer_keywords
from .json_schema.refusals import check_keywords, leave_out_constraints, refusal_of
from .json_schema.schema_grammar import grammars_of_schema
from .languages.gbnf import lark_of, parse_gbnf, refusal
from .languages.lark import FORMATS_HINT, grammar_of_tags, lark_refusal, regex_literal, rewrite_lark
from .languages.token_conflicts import without_conflicts
from .limits import (
    CPU_S_MAX,
    MATCHING_LIMITS,
    MEMORY_BYTES_MAX,
    SMALLER_HINT,
    STACK_BYTES,
    too_much_memory,
)
from .trial import CheckReply, CheckRequest, PartRequest, TagRequest, all_parts

TRIAL_NICE = 5
"""On a core shared with a busy thread of llama.cpp, the process gets a quarter of the time."""
_CAUSE_CHARACTERS = 200
_M_ARENA_MAX = -8
"""glibc's number for `mallopt`."""
_EMPTY = "no answer can satisfy it"
_LIMIT = re.compile(r"too (big|large|many|complex)|max is|exceed|fuel|limits?\b", re.IGNORECASE)
"""Words of llguidance's messages about limits that were met."""
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|/.*/')
_POSITION = re.compile(r"^at (\d+)\(\d+\): ")
"""The line and column of a message; only the line is that of the user's text."""


class _Bytes:
    """Stands in for a tokenizer, as the compilation does not depend on the vocabulary's texts."""

    bos_token_id = None
    special_token_ids = ()

    def __init__(self, size: int, end: int):
        self.eos_token_id = end
        self.tokens = [bytes([i]) if i < 256 else b"\xff<%d>" % i for i in range(size)]
        self.tokens[end] = b"\xff<end>"

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _tokenizer(size: int, end: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(size, end)), eos_token=end, slices=[])


def check_grammar(request: CheckRequest) -> CheckReply:
    """Compile a grammar on trial, and return its form for llguidance."""
    before = resident_bytes()
    try:
        reply, matcher = _compile(request)
    except InferdError as exc:
        return CheckReply(refusal=exc.to_wire())
    reply.memory_bytes = max(0, resident_bytes() - before)
    del matcher
    return reply


def _compile(request: CheckRequest) -> tuple[CheckReply, LLMatcher]:
    if request.gbnf:
        grammar = LLMatcher.grammar_from_lark(_lark_of_gbnf(request.gbnf, request))
        grammar = with_bounded_texts(grammar, ForcedText(len(request.gbnf.encode()), 1))
        return _compiled(grammar, request, refusal)
    inner: list[ForcedText] = []
    if request.lark:
        lark = rewrite_lark(
            request.lark,
            _vocabulary(request),
            lambda schema: _inner_schema(request, json.dumps(schema), inner),
        )
        grammar = LLMatcher.grammar_from_lark(lark)
        grammar = with_bounded_texts(grammar, forced_by_lark(request.lark, inner))
        return _compiled(grammar, request, lark_refusal)
    if request.regex:
        grammar = LLMatcher.grammar_from_lark(f"start: {regex_literal(request.regex)}")
        return _compiled(grammar, request, _regex_refusal)
    if request.tags:
        grammar = grammar_of_tags(request, partial(_content, request, inner))
        grammar = with_bounded_texts(grammar, together((*inner, _forced_by_parts(request))))
        return _compiled(grammar, request, _tags_refusal)
    reply, matcher, _ = _compile_schema(request)
    return reply, matcher


def _vocabulary(request: CheckRequest) -> Vocabulary:
    return Vocabulary(
        request.vocab_size, request.ends, request.names, request.special, request.texts
    )


def _lark_of_gbnf(gbnf: str, request: CheckRequest) -> str:
    vocabulary = _vocabulary(request)
    return lark_of(without_conflicts(parse_gbnf(gbnf), vocabulary), vocabulary)


def _compiled(
    grammar: str, request: CheckRequest, refuse: Callable[[str], InvalidArgument]
) -> tuple[CheckReply, LLMatcher]:
    """Return the reply with a grammar, and the matcher.

    :raises TooLarge: a limit of llguidance was met.
    :raises InvalidArgument: the grammar is refused; *refuse* makes the error from the cause.
    """
    matcher = _matcher(grammar, request.vocab_size, request.ends)
    if (cause := _cause(matcher)) is not None:
        raise _limit_error(cause) or refuse(cause)
    return CheckReply(grammar=grammar), matcher


def _limit_error(cause: str) -> TooLarge | None:
    if _LIMIT.search(_QUOTED.sub("", cause)):
        return TooLarge(f"the grammar is too large: {cause}", hint=SMALLER_HINT)
    return None


def _content(
    request: CheckRequest, inner: list[ForcedText], tag: TagRequest | PartRequest
) -> dict[str, Any]:
    """Return the grammar of a tag's content, as a field of llguidance's lists."""
    if isinstance(tag, TagRequest) and tag.gbnf:
        return {"lark_grammar": _lark_of_gbnf(tag.gbnf, request)}
    return {"json_schema": _inner_schema(request, tag.schema, inner)}


def _forced_by_parts(request: CheckRequest) -> ForcedText:
    """Return an upper bound of the text that the marks in parts of tags force."""
    marks = (mark for part in all_parts(request) for mark in (*part.text, *part.until))
    sizes = [len(str(mark).encode()) for mark in marks]
    return ForcedText(sum(sizes), max(sizes, default=0))


def _inner_schema(request: CheckRequest, schema: str, inner: list[ForcedText]) -> Any:
    """Return llguidance's form of a schema within a grammar, after compiling the schema alone. The
    text that the schema forces is added to *inner*.
    """
    reply, _, document = _compile_schema(msgspec.structs.replace(request, schema=schema))
    inner.append(forced_by_schema(document))
    return json.loads(reply.grammar)["grammars"][-1]["json_schema"]


def _regex_refusal(cause: str) -> InvalidArgument:
    return InvalidArgument(f"regex: {cause}", hint=FORMATS_HINT)


def _tags_refusal(cause: str) -> InvalidArgument:
    return InvalidArgument(f"structural-tag: {cause}", hint=FORMATS_HINT)


def _compile_schema(request: CheckRequest) -> tuple[CheckReply, LLMatcher, Schema]:
    """Return the reply with a schema's grammar, the matcher, and the schema that it follows."""
    document = read_schema(request.schema)
    check_keywords(document)
    infer_keywords(document, request.infer)

    def compiles(document: Schema) -> bool:
        return not isinstance(_try_schema(document, request.whitespace), str)

    trial, dropped = _try_schema(document, request.whitespace), list[str]()
    if isinstance(trial, str) and request.lenient:
        dropped = leave_out_constraints(document, compiles)
        trial = _try_schema(document, request.whitespace)
    if isinstance(trial, str):
        raise refusal_of(document, trial, compiles)
    matcher, grammar = trial
    return CheckReply(grammar=grammar, dropped=dropped), matcher, document


def _try_schema(document: Schema, whitespace: str) -> tuple[LLMatcher, str] | str:
    """Return the matcher and the grammar of a schema, or the cause of its refusal."""
    cause: str | None = None
    try:
        forced = forced_by_schema(document)
        for form in grammars_of_schema(document, whitespace):
            grammar = with_bounded_texts(form, forced)
            matcher = _matcher(grammar)
            cause = _cause(matcher)
            if cause is None:
                return matcher, grammar
    except ValueError as exc:
        cause = str(exc)[:_CAUSE_CHARACTERS]
    assert cause is not None, "there is a form"
    return cause


def _matcher(grammar: str, vocab_size: int = 0, ends: tuple[int, ...] = ()) -> LLMatcher:
    size = max(vocab_size, 257) if "<[" in grammar else 257
    tokenizer = _tokenizer(size, ends[0] if size > 257 and ends else 256)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=MATCHING_LIMITS)


def _cause(matcher: LLMatcher) -> str | None:
    """Return why the grammar is refused; None if it is not."""
    if matcher.is_error():
        return _error_of(matcher)
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return _error_of(matcher)
    first = next((8 * at + byte.bit_length() - 1 for at, byte in enumerate(mask) if byte), None)
    if first is None:
        return None if matcher.is_accepting() else _EMPTY
    after = matcher.deep_copy()  # some limits are checked after a token only
    return None if after.consume_token(first) else _error_of(after)


def _error_of(matcher: LLMatcher) -> str:
    found = matcher.get_error()
    if found.startswith("NoExtension"):
        return _EMPTY
    return _POSITION.sub(r"line \1: ", found.splitlines()[0])[:_CAUSE_CHARACTERS]


def _reply(request: bytes) -> bytes:
    """Return the packed reply to a request, which a thread with a small stack handles."""
    found: list[CheckReply] = []

    def handle() -> None:
        try:
            found.append(check_grammar(msgspec.msgpack.decode(request, type=CheckRequest)))
        except RecursionError:
            found.append(CheckReply(refusal=_too_deep().to_wire()))
        except MemoryError:
            found.append(CheckReply(refusal=too_much_memory().to_wire()))
        except BaseException as exc:  # a panic of llguidance is not an Exception
            found.append(CheckReply(failure=place_of(exc)))

    thread = threading.Thread(target=handle)
    thread.start()
    thread.join()
    return msgspec.msgpack.encode(found[0])


def _too_deep() -> InvalidArgument:
    return InvalidArgument("the grammar or schema is nested too deeply", hint="flatten it")


def _use_one_arena() -> None:
    """Let all threads allocate from one arena, because further ones would exceed the memory limit,
    and each attempt to create one takes time.
    """
    configure = getattr(ctypes.CDLL(None), "mallopt", None)
    if configure is not None:
        configure(_M_ARENA_MAX, 1)


if __name__ == "__main__":
    with suppress(PermissionError):  # systemd's unit forbids it
        os.nice(TRIAL_NICE)
    threading.stack_size(STACK_BYTES)
    _use_one_arena()
    check_grammar(CheckRequest(schema="{}"))  # loads the library before a user's CPU time counts
    serve_requests(_reply, CPU_S_MAX, MEMORY_BYTES_MAX)
