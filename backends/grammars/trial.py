"""The worker's end of the trial of grammars, which runs in a process of its own.

The process starts with the first grammar, in 0.15 s, and has 13 MB of its own. A trial and the
compilation together take 3 ms, or 17 ms at the 99th percentile of the schemas in the tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..errors import (
    BackendError,
    ErrorFields,
    InferdError,
    Timeout,
    TooLarge,
    error_from_wire,
    failure_of,
)
from ..params.json_texts import SCHEMA_BYTES_MAX
from ..sandbox import SandboxEnded, SandboxProcess
from .limits import (
    COMPILE_S_MAX,
    CPU_S_MAX,
    GRAMMAR_BYTES_MAX,
    REGEX_BYTES_MAX,
    SMALLER_HINT,
    STACK_BYTES,
    too_much_memory,
)

Mark = tuple[str | int, ...]
"""A text in parts: texts, and numbers of special tokens."""


class PartRequest(msgspec.Struct, omit_defaults=True):
    """A part of the content of a tag; see `TagPart`. *schema* is JSON text."""

    text: Mark = ()
    schema: str = ""
    regex: str = ""
    until: Mark = ()
    any_of: tuple[tuple[PartRequest, ...], ...] = ()
    repeated: bool = False


class TagRequest(msgspec.Struct, omit_defaults=True):
    """A part of an answer: *trigger*, the *rest* of its begin, a content, and *end*.

    The content is the JSON text of a *schema*, or a *gbnf* grammar, a *regex* or *parts*. *again*
    is the begin after another tag.
    """

    trigger: Mark
    rest: Mark
    end: Mark
    schema: str = ""
    gbnf: str = ""
    regex: str = ""
    parts: tuple[PartRequest, ...] = ()
    again: Mark = ()


class CheckRequest(msgspec.Struct, omit_defaults=True):
    """A grammar to compile: *gbnf*, *lark*, *regex*, the JSON text of a *schema*, or *tags*.

    *whitespace* is that of the answers to a schema (`json-whitespace`); *lenient* leaves out the
    constraints that cannot be kept; *infer* is the value of `schema-infer`. *at_least_one*,
    *stop_after_first*, *opened*, *closing* and *before* are those of `StructuralTags`. The fields
    from *vocab_size* on describe the vocabulary; see `Vocabulary`.
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
    closing: Mark = ()
    before: tuple[PartRequest, ...] = ()
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


__all__ = ("GrammarChecker",)

_PROGRAM = "inferd.backends.grammars.trial_program"
_ATTEMPTS = 2


class GrammarChecker:
    """Tries one grammar at a time; callers must not call it concurrently."""

    def __init__(self) -> None:
        self._sandbox: SandboxProcess | None = None

    def check(self, request: CheckRequest) -> CheckReply:
        """Return a grammar in llguidance's form, after a trial.

        :raises InvalidArgument: the grammar is invalid, or a schema is not supported.
        :raises TooLarge: the grammar is past a limit on its text, or on its compilation.
        :raises Timeout: the machine is too busy.
        :raises BackendError: no process can run.
        """
        _check_sizes(request)
        reply = self._reply_to(msgspec.msgpack.encode(request))
        if reply.refusal is not None:
            raise error_from_wire(reply.refusal)
        if reply.failure:
            self.close()  # the process may be in any state
            raise failure_of("compiling the grammar", reply.failure)
        return reply

    def close(self) -> None:
        """End the process; the next request starts another one."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.end()

    def _reply_to(self, request: bytes) -> CheckReply:
        """Return the reply to *request*; retry once if something else than it ended the process."""
        cause: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                return self._exchange(request)
            except TimeoutError:
                self.close()
                raise Timeout(
                    f"the grammar was not compiled within {COMPILE_S_MAX:g} s",
                    hint="the machine is busy: try again later",
                    data={"wait_s_max": COMPILE_S_MAX},
                ) from None
            except SandboxEnded as exc:
                self.close()
                if (error := _limit_error(exc)) is not None:
                    raise error from None
                cause = exc
            except (OSError, msgspec.DecodeError) as exc:
                self.close()
                cause = exc
        raise BackendError(
            f"no process can compile grammars: {cause}",
            hint="try again later; if inferd was upgraded meanwhile, restart the daemon",
        )

    def _exchange(self, request: bytes) -> CheckReply:
        if self._sandbox is None:
            self._sandbox = SandboxProcess(_PROGRAM, COMPILE_S_MAX)
        sandbox = self._sandbox
        sandbox.send(request)
        return msgspec.msgpack.decode(sandbox.receive_reply(), type=CheckReply)


def _check_sizes(request: CheckRequest) -> None:
    _check_size("grammar", request.gbnf, GRAMMAR_BYTES_MAX)
    _check_size("json-schema", request.schema, SCHEMA_BYTES_MAX)
    _check_size("lark", request.lark, GRAMMAR_BYTES_MAX)
    _check_size("regex", request.regex, REGEX_BYTES_MAX)
    for tag in request.tags:
        _check_size("structural-tag: regex", tag.regex, REGEX_BYTES_MAX)
        _check_size("structural-tag: schema", tag.schema, SCHEMA_BYTES_MAX)
        _check_size("structural-tag: grammar", tag.gbnf, GRAMMAR_BYTES_MAX)
    for part in all_parts(request):
        _check_size("structural-tag: regex", part.regex, REGEX_BYTES_MAX)
        _check_size("structural-tag: schema", part.schema, SCHEMA_BYTES_MAX)


def all_parts(request: CheckRequest) -> Iterator[PartRequest]:
    """Yield all parts of the tags of *request*, with those within others."""
    waiting = [request.before, *(tag.parts for tag in request.tags)]
    while waiting:
        for part in waiting.pop():
            yield part
            waiting += part.any_of


def _check_size(name: str, text: str, most: int) -> None:
    size = len(text.encode())
    if size > most:
        raise TooLarge(
            f"{name}: it has {size} bytes; at most {most} are compiled",
            hint="shorten it",
            data={"bytes": size, "bytes_max": most},
        )


def _limit_error(ended: SandboxEnded) -> InferdError | None:
    """Return the error for a grammar that ended the process; None if something else did."""
    if ended.used_up_cpu:
        return TooLarge(
            f"the grammar takes more than {CPU_S_MAX} s of CPU time to compile",
            hint=SMALLER_HINT,
            data={"cpu_s_max": CPU_S_MAX},
        )
    if ended.overflowed:
        return TooLarge(
            "the grammar's rules or schemas refer to each other in too long a chain",
            hint="let the rules refer to fewer others within each other",
            data={"stack_bytes_max": STACK_BYTES},
        )
    return too_much_memory() if ended.crashed else None
