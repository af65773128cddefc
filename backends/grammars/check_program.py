"""The program that tries to compile grammars: `python -m inferd.backends.grammars.check_program`.

A grammar of a few bytes can take minutes and gigabytes, or overflow the stack of the thread that
compiles it. Here only this process ends.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ..errors import InferdError, InvalidArgument
from ..sandbox.program import serve_requests
from .gbnf import parse_gbnf, refusal
from .lark import Vocabulary, lark_of
from .lenient import leave_out_constraints
from .limits import CPU_S_MAX, MATCHING_LIMITS, MEMORY_BYTES_MAX, STACK_BYTES
from .refused_keyword import refusal_of
from .requests import CheckReply, CheckRequest
from .schema import Schema, read_schema
from .schema_grammar import grammar_of_schema

NICE = 5
"""Beside a busy thread of llama.cpp on its core, the process gets a quarter of it."""
_CAUSE_CHARACTERS = 200
_M_ARENA_MAX = -8
"""glibc's number for `mallopt`."""
_EMPTY = "no value fits it"


class _Bytes:
    """Stands in for a tokenizer: the compilation does not depend on the vocabulary's texts."""

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
    before = _resident_bytes()
    try:
        if request.gbnf:
            reply, matcher = _compile_gbnf(request)
        else:
            reply, matcher = _compile_schema(request)
    except InferdError as exc:
        return CheckReply(refusal=exc.to_wire())
    reply.memory_bytes = max(0, _resident_bytes() - before)
    del matcher
    return reply


def _compile_gbnf(request: CheckRequest) -> tuple[CheckReply, LLMatcher]:
    vocabulary = Vocabulary(request.vocab_size, request.ends, request.names)
    grammar = LLMatcher.grammar_from_lark(lark_of(parse_gbnf(request.gbnf), vocabulary))
    matcher = _matcher(grammar, request.vocab_size, request.ends)
    if _cause(matcher):
        raise refusal(_EMPTY if _cause(matcher) == _EMPTY else "it cannot be compiled")
    return CheckReply(grammar=grammar), matcher


def _compile_schema(request: CheckRequest) -> tuple[CheckReply, LLMatcher]:
    document = read_schema(request.schema)

    def compiles(document: Schema) -> bool:
        return not isinstance(_try_schema(document, request.whitespace), str)

    trial, dropped = _try_schema(document, request.whitespace), list[str]()
    if isinstance(trial, str) and request.lenient:
        dropped = leave_out_constraints(document, compiles)
        trial = _try_schema(document, request.whitespace)
    if isinstance(trial, str):
        raise refusal_of(document, trial, compiles)
    matcher, grammar = trial
    return CheckReply(grammar=grammar, dropped=dropped), matcher


def _try_schema(document: Schema, whitespace: str) -> tuple[LLMatcher, str] | str:
    """Return the matcher and the grammar of a schema, or the cause of its refusal."""
    try:
        grammar = grammar_of_schema(document, whitespace)
    except ValueError as exc:
        return str(exc)[:_CAUSE_CHARACTERS]
    matcher = _matcher(grammar)
    cause = _cause(matcher)
    return (matcher, grammar) if cause is None else cause


def _matcher(grammar: str, vocab_size: int = 0, ends: tuple[int, ...] = ()) -> LLMatcher:
    size = max(vocab_size, 257) if "<[" in grammar else 257
    tokenizer = _tokenizer(size, ends[0] if size > 257 and ends else 256)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=MATCHING_LIMITS)


def _cause(matcher: LLMatcher) -> str | None:
    """Return why the grammar is refused; None if it is not."""
    if matcher.is_error():
        found = matcher.get_error()
        return (
            _EMPTY if found.startswith("NoExtension") else found.splitlines()[0][:_CAUSE_CHARACTERS]
        )
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not (any(mask) or matcher.is_accepting()):
        return _EMPTY
    return None


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _reply(request: bytes) -> bytes:
    """Return the packed reply to a request, which a thread with a small stack handles."""
    found: list[Any] = []

    def handle() -> None:
        try:
            found.append(check_grammar(msgspec.msgpack.decode(request, type=CheckRequest)))
        except RecursionError:
            error = InvalidArgument("the grammar or schema is nested too deeply", hint="flatten it")
            found.append(CheckReply(refusal=error.to_wire()))

    thread = threading.Thread(target=handle)
    thread.start()
    thread.join()
    return msgspec.msgpack.encode(found[0])


def _use_one_arena() -> None:
    """Let all threads allocate from one arena: others would not fit into the limit on memory, and
    each attempt takes time.
    """
    configure = getattr(ctypes.CDLL(None), "mallopt", None)
    if configure is not None:
        configure(_M_ARENA_MAX, 1)


if __name__ == "__main__":
    with suppress(PermissionError):  # systemd's unit forbids it
        os.nice(NICE)
    threading.stack_size(STACK_BYTES)
    _use_one_arena()
    check_grammar(CheckRequest(schema="{}"))  # reads the library's code, which no user must pay
    serve_requests(_reply, CPU_S_MAX, MEMORY_BYTES_MAX)
