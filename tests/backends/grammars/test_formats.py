"""Answers by Lark grammars, regular expressions and structural tags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as lib

from inferd.backends import SamplingParams, sandbox
from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.backends.grammars.compiler import GrammarCompiler
from inferd.backends.grammars.limits import (
    GRAMMAR_BYTES_MAX,
    LITERAL_BYTES_MAX,
    REGEX_BYTES_MAX,
    RULES_MAX,
)
from inferd.backends.llama.text.vocab import Vocab
from inferd.backends.params import StructuralTag, StructuralTags, structural_tag_text
from inferd.backends.params.structural_tags import read_structural_tag
from tests.backends.walking import compiler_of, vocabulary
from tests.models import gemma3, smollm2
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process  # the trial of grammars

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLS: dict[str, Any] = {
    "structures": [
        {"begin": "<f=weather>", "schema": WEATHER, "end": "</f>"},
        {"begin": "<f=wait>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
MARKED = {
    "structures": [{"begin": "<filename>\n", "schema": WEATHER, "end": "\n<file_sep>"}],
    "triggers": ["<filename>"],
}
"""SmolLM2 has special tokens of these names; other vocabularies have not."""


class Texts:
    """Texts by the tokens of one vocabulary. *spelled*: one token for each byte."""

    def __init__(self, vocab: Vocab, compiler: GrammarCompiler, *, spelled: bool):
        self.vocab, self.compiler, self.spelled = vocab, compiler, spelled
        self._bytes: dict[bytes, int] = {}
        for token in range(vocab.size if spelled else 0):
            if not vocab.is_control(token):
                self._bytes.setdefault(vocab.piece(token), token)

    def tokens(self, text: str) -> list[int]:
        if self.spelled:
            return [self._bytes[bytes((byte,))] for byte in text.encode()]
        return self.vocab.tokenize(text.encode(), special=True, bos=False)

    def follow(self, params: SamplingParams, text: str) -> tuple[str, bool]:
        """Return how much of *text* the grammar allows, and whether it may end there."""
        state, done = self.compiler.compile(params, owner=1), b""
        for token in self.tokens(text):
            if not state.allows(token):
                return done.decode(), False
            assert self.spelled or len(text) > 500 or token in state.allowed(), done
            state.accept(token)
            done += self.vocab.piece(token)
        return done.decode(), state.complete

    def fits(self, params: SamplingParams, text: str) -> bool:
        return self.follow(params, text) == (text, True)


@pytest.fixture(scope="module", params=["bytes", "smollm2", "spelled"])
def texts(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Texts]:
    tiny = request.param == "bytes"
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny")) if tiny else smollm2()
    with vocabulary(path) as vocab, compiler_of(vocab) as compiler:
        yield Texts(vocab, compiler, spelled=request.param != "smollm2")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    with (
        pytest.MonkeyPatch.context() as patch,
        vocabulary(smollm2()) as vocab,
        compiler_of(vocab) as compiler,
    ):
        # It compiles at a low priority, beside the other tests.
        patch.setattr(sandbox, "WAIT_S_MAX", 100)
        yield compiler


def tags(value: object) -> SamplingParams:
    return SamplingParams(structural_tag=read_structural_tag(value))


# Lark and regular expressions

SUM = """%llguidance {}
// a sum, such as "12 + 3"
start: term (_SIGN term)*   # at least one
term: INT | "(" start ")"
_SIGN: " + " | " - "
%import common.INT
"""


@pytest.mark.parametrize(
    ("text", "fits"),
    [("12 + 3", True), ("1", True), ("(1 - 20) + 3", True), ("1 +", False), ("a", False)],
)
def test_an_answer_follows_a_lark_grammar(texts: Texts, text: str, fits: bool) -> None:
    assert texts.fits(SamplingParams(lark=SUM), text) is fits


def test_a_schema_in_a_lark_grammar_is_as_strict_as_one_alone(texts: Texts) -> None:
    loose = {**WEATHER, "x-guidance": {"whitespace_flexible": True}}
    params = SamplingParams(lark=f'start: "call " %json {json.dumps(loose, indent=1)} "!"\n')
    assert texts.fits(params, 'call {"city": "Rome"}!')
    assert not texts.fits(params, 'call {"city":   "Rome"}!')
    with pytest.raises(InvalidArgument, match="#/uniqueItems"):
        texts.compiler.compile(SamplingParams(lark='start: %json {"uniqueItems": true}'), 1)


@pytest.mark.parametrize(
    ("regex", "text", "fits"),
    [
        (r"[0-9]{2,4}-[a-f]+", "123-fade", True),
        (r"[0-9]{2,4}-[a-f]+", "1-fade", False),
        (r"[0-9]{2,4}-[a-f]+", "123-fade ", False),
        (r"https?://[a-z./]+", "https://example.org/", True),
        (r"(?i)yes|no", "YES", True),
        (r'"[^"\\]*"', '"ä\u20ac\n"', True),
        (r"\d+\s\w", "1 a", True),
        (r"a/b\/c", "a/b/c", True),
    ],
)
def test_an_answer_matches_a_regular_expression_as_a_whole(
    texts: Texts, regex: str, text: str, fits: bool
) -> None:
    assert texts.fits(SamplingParams(regex=regex), text) is fits


@pytest.mark.parametrize(
    ("params", "cause"),
    [
        ({"lark": 'start[stop="x"]: /.*/'}, "stop= is not supported"),
        ({"lark": 'start: a\na[lazy, suffix="x"]: /.*/'}, "line 2: suffix= is not supported"),
        ({"lark": "start[max_tokens=3]: /.*/"}, "max_tokens= is not supported"),
        ({"lark": "start[temperature=2]: /.*/"}, "temperature= is not supported"),
        ({"lark": 'start[capture="a"]: /.*/'}, "capture= is not supported"),
        ({"lark": 'start: %lark { start: a\n a[stop=""]: /.*/ }'}, "stop= is not supported"),
        ({"lark": '%llguidance {"no_forcing": true}\nstart: "a"'}, "'no_forcing' is not one"),
        ({"lark": '%llguidance {"allow_invalid_utf8": true}\nstart: "a"'}, "allow_invalid_utf8"),
        ({"lark": "%import .secrets\nstart: SECRETS"}, "only common"),
        ({"lark": "%import python.NAME\nstart: NAME"}, "only common"),
        ({"lark": "%declare A\nstart: A"}, "%declare is not supported"),
        ({"lark": "start: @other"}, "unexpected '@other'"),
        ({"lark": "start: @lark_grammar"}, "unexpected"),
        ({"lark": 'root: "a"'}, "no start rule"),
        ({"lark": "start: a"}, "line 1: unknown name"),
        ({"lark": 'start: "a'}, "line 1: unexpected"),
        ({"lark": 'start: "b"\n\nx: %json {'}, "line 3: expecting JSON"),
        ({"lark": "start: <[300-302]>"}, "not a special token"),
        ({"lark": "start: <[*]>"}, "give numbers and ranges"),
        ({"lark": "start: <[^1]>"}, "give numbers and ranges"),
        ({"lark": "start: <nothing>"}, "is not a token of the vocabulary"),
        ({"lark": "start: /a(?=b)/"}, "regex"),
        ({"regex": "a(b"}, "regex: "),
        ({"regex": "a(?=b)"}, "regex: "),
        ({"regex": r"(a)\1"}, "regex: "),
        ({"regex": "[^\\s\\S]"}, "no answer can satisfy it"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    compiler: GrammarCompiler, params: dict[str, str], cause: str
) -> None:
    with pytest.raises(InvalidArgument, match=cause) as caught:
        compiler.compile(SamplingParams(**params), owner=1)  # type: ignore[arg-type]
    assert caught.value.hint and not caught.value.retryable


PATTERNS = [f"/.*a{i}.{{{i}}}b.*/" for i in range(24)]


def chained(count: int) -> str:
    rules = "".join(f"a{i:x}:a{i + 1:x}\n" for i in range(count))
    return f'start:a0\n{rules}a{count:x}:"x"\n'


@pytest.mark.parametrize(
    ("params", "cause"),
    [
        ({"lark": f'start: "{"x" * (LITERAL_BYTES_MAX + 1)}"'}, "bytes in one literal"),
        ({"lark": f"start: /{'x' * (REGEX_BYTES_MAX + 1)}/"}, "in one regular expression"),
        ({"regex": "x" * (REGEX_BYTES_MAX + 1)}, "regex: it has"),
        ({"lark": chained(20_000)}, "rules; 10000 at most"),
        ({"lark": 'start: "a" //' + "x" * GRAMMAR_BYTES_MAX}, "lark: it has"),
        ({"lark": chained(RULES_MAX - 10)}, "too long a chain"),
        ({"lark": f"start: {' | '.join(f'/w{i}x/' for i in range(3000))}"}, "max is 2000"),
        ({"lark": f"start: A\nA: {' & '.join(PATTERNS)}"}, "takes more"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_grammar_past_a_limit_is_too_large(
    compiler: GrammarCompiler, params: dict[str, str], cause: str
) -> None:
    with pytest.raises(TooLarge, match=cause) as caught:
        compiler.compile(SamplingParams(**params), owner=1)  # type: ignore[arg-type]
    assert caught.value.hint
    assert not compiler.compile(SamplingParams(regex="ok"), owner=1).complete


def test_literals_and_expressions_of_the_largest_size_can_be_answered(texts: Texts) -> None:
    literal = "xyz " * (LITERAL_BYTES_MAX // 4 - 1)
    assert texts.fits(SamplingParams(lark=f'start: "{literal}"'), literal)
    regex = "xyz " * (REGEX_BYTES_MAX // 4)
    assert texts.fits(SamplingParams(regex=regex), regex)


# Structural tags


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("", True),
        ("Hello", True),
        ("x < y, <f and <b>", True),
        ('Let me see. <f=weather>{"city": "Rome"}</f> Done.', True),
        ("<f=wait>12</f>", True),
        ('<f=wait>12</f><f=weather>{"city": "a"}</f><f=wait>1</f>', True),
        ("<<f=wait>12</f><", True),
        ("<f=wait>12", False),
        ("<f=wait>x</f>", False),
        ("<f=other>1</f>", False),
        ("a <f=", False),
        ('<f=weather>{"town": 1}</f>', False),
    ],
)
def test_free_text_has_parts_that_follow_schemas(texts: Texts, text: str, follows: bool) -> None:
    assert texts.fits(tags(CALLS), text) is follows
    form = {
        "type": "triggered_tags",
        "triggers": CALLS["triggers"],
        "tags": [
            {
                "begin": s["begin"],
                "content": {"type": "json_schema", "json_schema": s["schema"]},
                "end": s["end"],
            }
            for s in CALLS["structures"]
        ],
    }
    for value in ({"type": "structural_tag", **CALLS}, {"type": "structural_tag", "format": form}):
        assert texts.fits(tags(value), text) is follows
        assert texts.fits(tags(json.dumps(value)), text) is follows


@pytest.mark.parametrize(
    ("text", "one", "only_one", "exactly_one"),
    [
        ("", False, True, False),
        ("a", False, True, False),
        ("<f>1</f>", True, True, True),
        ("a<f>1</f>", False, True, False),
        ("<f>1</f>a", True, False, False),
        ("<f>1</f><f>2</f>", True, False, False),
    ],
)
def test_the_number_of_parts_can_be_bounded(
    texts: Texts, text: str, one: bool, only_one: bool, exactly_one: bool
) -> None:
    part = StructuralTag(begin="<f>", end="</f>", trigger="<f>", schema={"type": "integer"})
    for at_least, first, expected in (
        (True, False, one),
        (False, True, only_one),
        (True, True, exactly_one),
    ):
        value = StructuralTags(tags=(part,), at_least_one=at_least, stop_after_first=first)
        params = SamplingParams(structural_tag=structural_tag_text(value))
        assert texts.fits(params, text) is expected


OPENED = {
    'add\n{"a": 1}': True,
    'add\n{"a": 1}>>>sub\n{}': True,
    'add\n{"b": 1}': False,
    "add\n1": False,
    "adding": True,
    "add": True,
    "": True,
    "all\nadd\nsub": True,
    'all\nSure.>>>add\n{"a": 1}': True,
    'all\nSure.>>>add\n{"b": 1}': False,
}


@pytest.mark.parametrize("text", OPENED)
def test_an_answer_may_begin_with_the_rest_of_an_opened_mark(texts: Texts, text: str) -> None:
    only_a = {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    schemas: dict[str, Any] = {"add": {"type": "object", **only_a}, "sub": {"type": "object"}}
    value = StructuralTags(
        tags=tuple(
            StructuralTag(begin=f">>>{name}\n", end="", trigger=f">>>{name}\n", schema=schema)
            for name, schema in schemas.items()
        ),
        opened=">>>",
    )
    params = SamplingParams(structural_tag=structural_tag_text(value))
    assert texts.fits(params, text) is OPENED[text]


def test_parts_may_follow_a_regex_or_a_grammar(texts: Texts) -> None:
    value = StructuralTags(
        tags=(
            StructuralTag(begin="[r]", end="[/]", trigger="[r", regex=r"[a-z/]+\d*"),
            StructuralTag(begin="[rr]", end="", trigger="[r", regex="x{3}"),
            StructuralTag(begin="{g}", end="\n", trigger="{g}", grammar='root ::= ("a" | "ab")+'),
        )
    )
    params = SamplingParams(structural_tag=structural_tag_text(value))
    for text in ("z[r]a/b12[/]z", "[rr]xxx[", "{g}aab\n{g}a\n", "[r]a[/][rr]xxx{g}ab\n"):
        assert texts.fits(params, text), text
    for text in ("[r]12[/]", "[rr]xx", "{g}b\n", "{g}a", "[r]a[/"):
        assert not texts.fits(params, text), text


def test_marks_that_are_special_tokens_are_matched_as_tokens(compiler: GrammarCompiler) -> None:
    with vocabulary(smollm2()) as vocab:
        texts = Texts(vocab, compiler, spelled=False)
        begin, end = texts.tokens("<filename>"), texts.tokens("<file_sep>")
        assert vocab.is_control(begin[0]) and vocab.is_control(end[0])
        assert texts.fits(tags(MARKED), 'see <filename>\n{"city": "Rome"}\n<file_sep> and')
        assert not texts.fits(tags(MARKED), "see <filename>\n{}")
        spelled = Texts(vocab, compiler, spelled=True)
        assert spelled.fits(tags(MARKED), "see <filename> anything"), "the text is not a mark"
        state = compiler.compile(tags(MARKED), owner=1)
        assert begin[0] in state.allowed() and end[0] not in state.allowed()
        [other] = vocab.tokenize(b"<|im_start|>", special=True, bos=False)
        assert state.allows(other), "free text may have other special tokens"
        assert not any(t in state.allowed() for t in vocab.special() if t in (*begin[1:], *end))


def test_marks_that_are_no_special_tokens_are_matched_as_text(tmp_path: Path) -> None:
    with vocabulary(write_tiny("llama", tmp_path)) as vocab, compiler_of(vocab) as compiler:
        texts = Texts(vocab, compiler, spelled=True)
        assert texts.fits(tags(MARKED), 'see <filename>\n{"city": "Rome"}\n<file_sep> and')
        assert not texts.fits(tags(MARKED), "see <filename> anything")


def test_a_trigger_with_text_before_a_special_token_is_refused(compiler: GrammarCompiler) -> None:
    value = {
        "structures": [{"begin": "call <filename>", "schema": {}, "end": "."}],
        "triggers": ["call <filename>"],
    }
    with pytest.raises(InvalidArgument, match="text before a special token"):
        compiler.compile(tags(value), owner=1)


def test_a_refused_schema_of_a_part_is_named(compiler: GrammarCompiler) -> None:
    value = {
        "structures": [{"begin": "<f>", "schema": {"uniqueItems": True}, "end": "."}],
        "triggers": ["<f>"],
    }
    with pytest.raises(InvalidArgument, match="#/uniqueItems"):
        compiler.compile(tags(value), owner=1)


# Special tokens and user-defined tokens


def test_lark_names_special_tokens(compiler: GrammarCompiler) -> None:
    with vocabulary(smollm2()) as vocab:
        texts = Texts(vocab, compiler, spelled=False)
        [name] = vocab.tokenize(b"<filename>", special=True, bos=False)
        for token in ("<filename>", f"<[{name}]>", f"<[{name}-{name}]>"):
            params = SamplingParams(lark=f'start: "a" {token} "b"')
            assert texts.fits(params, "a<filename>b"), token
            assert not Texts(vocab, compiler, spelled=True).fits(params, "a<filename>b"), token


def test_user_defined_tokens_are_text() -> None:
    """Gemma has 72 in angle brackets, such as `<h1>`: an answer shows them, except `</s>`."""
    with vocabulary(gemma3()) as vocab, compiler_of(vocab) as compiler:
        texts = Texts(vocab, compiler, spelled=False)
        named = [t for t in range(vocab.size) if is_user_defined(vocab, t)]
        assert len(named) == 72
        [end] = [t for t in named if vocab.is_control(t)]
        assert vocab.piece(end) == b"</s>" and vocab.is_eog(end), "llama.cpp makes it an end mark"
        named.remove(end)
        for token in named:
            name = vocab.piece(token).decode()
            assert texts.tokens(name) == [token], "also without special=True"
            assert vocab.tokenize(name.encode(), special=False, bos=False) == [token]
        name = "<h1>"
        assert texts.fits(SamplingParams(json_schema='{"type": "string"}'), f'"{name}"')
        assert texts.fits(SamplingParams(regex="<h[1-6]>.*"), f"{name} Title")
        assert texts.fits(SamplingParams(lark=f'start: {name} "a"'), f"{name}a")
        assert texts.fits(SamplingParams(grammar="root ::= [^a-z]+ [a-z0-9>]+"), name)
        part = {"begin": name, "schema": {"type": "integer"}, "end": "</h1>"}
        params = tags({"structures": [part], "triggers": [name]})
        assert texts.fits(params, f"a{name}12</h1>")
        assert not texts.fits(params, f"a{name}Title</h1>")


def is_user_defined(vocab: Vocab, token: int) -> bool:
    """Return whether *token* is user-defined and has a name in angle brackets."""
    if not lib.llama_vocab_get_attr(vocab.pointer, token) & lib.LLAMA_TOKEN_ATTR_USER_DEFINED:
        return False
    piece = vocab.piece(token)
    return piece[:1] == b"<" and piece[-1:] == b">"
