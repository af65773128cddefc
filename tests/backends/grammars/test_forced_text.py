"""No call of a matcher takes long, whatever text a grammar forces, by CPU time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd.backends import SamplingParams
from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.backends.grammars.compiler import GrammarCompiler, GrammarState
from inferd.backends.grammars.forced_text import (
    FORCED_BYTES_MAX,
    forced_by_lark,
    forced_by_schema,
)
from inferd.backends.llama.text.vocab import Vocab
from tests.backends.llama.schemas import SCHEMAS
from tests.backends.walking import compiler_of, vocabulary
from tests.machine_speed import slowness
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process
CALL_S_MAX = 0.05
"""The bound, on the reference machine of `slowness`."""
ATTEMPTS = 3
STEPS = 300
LONG = "x" * 65_000


def after_a_choice(item: Any, count: int) -> dict[str, Any]:
    """Return the schema of a list of a truth value and *count* times *item*."""
    first = {"prefixItems": [{"type": "boolean"}], "items": item}
    return {"type": "array", **first, "minItems": count + 1, "maxItems": count + 1}


ENDLESS = {"n" * 4000: {"$ref": "#"}}
SCHEMA_BOMBS: dict[str, Any] = {
    "a constant of the largest size": {"const": LONG},
    "one after a choice": after_a_choice({"const": LONG[:60_000]}, 1),
    "a repeated constant": after_a_choice({"const": "x" * 4000}, 100_000),
    "a repeated short constant": after_a_choice({"const": "x" * 10}, 100_000),
    "repeated references": after_a_choice({"$ref": "#/prefixItems/0"}, 100_000),
    "long names": after_a_choice(
        {"type": "object", "properties": ENDLESS, "required": list(ENDLESS)}, 1000
    ),
    "a repeated pattern": after_a_choice({"type": "string", "pattern": "^x{3000}$"}, 100_000),
    "a schema within itself": {
        "anyOf": [
            {"type": "boolean"},
            {"type": "object", "properties": ENDLESS, "required": list(ENDLESS)},
        ]
    },
}
BOMBS: dict[str, dict[str, str]] = {
    **{name: {"json_schema": json.dumps(schema)} for name, schema in SCHEMA_BOMBS.items()},
    "a repeated literal": {"lark": f'start: /[ab]/ A{{100000}}\nA: "{"x" * 4000}"\n'},
    "a repeated literal in a rule": {"lark": f'start: /[ab]/ ("{"x" * 4000}" ~ 10000) ~ 1000\n'},
    "a repetition in a terminal": {"lark": 'start: /[ab]/ A{9999}\nA: "abc"{3000}\n'},
    "a repetition in an expression": {"lark": "start: /[ab]/ A{9999}\nA: /(abc){3000}/\n"},
    "rules of rules": {
        "lark": "start: /[ab]/ r0\n"
        + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(30))
        + f'r30: "{"x" * 500}"\n'
    },
    "a rule within itself": {"lark": f'start: /[ab]/ a\na: "{"x" * 4000}" a | "b"\n'},
    "a schema in Lark": {
        "lark": f"start: /[ab]/ a{{9999}}\na: %json {json.dumps({'const': LONG[:4000]})}\n"
    },
    "short repeated literals": {"lark": 'start: /[ab]/ ("abcdefgh" ~ 1000) ~ 1000\n'},
    "GBNF": {"grammar": 'root ::= [ab] b{1000}\nb ::= "abcdefghi"{1000}\n'},
    "a long text of GBNF": {"grammar": f'root ::= [ab] "{"x" * 34_000}"'},
    "an expression": {"regex": "[ab](x{1000}){40}"},
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vocab, GrammarCompiler]]:
    path: Path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with vocabulary(path) as vocab, compiler_of(vocab) as compiler:
        yield vocab, compiler


class Calls:
    """The longest CPU time of a call."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def __call__(self, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        try:
            return call()
        finally:
            self.longest_s = max(self.longest_s, time.thread_time() - began)


def follow(vocab: Vocab, state: GrammarState) -> float:
    """Take some tokens, forced or else the last allowed one that is none of white space; return the
    longest CPU time of a call.
    """
    calls = Calls()
    for _ in range(STEPS):
        token = calls(lambda: state.forced)
        if token is None:
            allowed = [t for t in map(int, calls(state.allowed)) if vocab.piece(t).strip()]
            token = allowed[-1]
        if vocab.is_eog(token):
            break
        assert calls(lambda token=token: state.allows(token))  # type: ignore[misc]
        calls(lambda token=token: state.accept(token))  # type: ignore[misc]
    return calls.longest_s


@pytest.mark.alone
@pytest.mark.parametrize("name", BOMBS)
def test_no_call_of_a_matcher_takes_long(
    compiled: tuple[Vocab, GrammarCompiler], name: str
) -> None:
    vocab, compiler = compiled
    found: list[float] = []
    while not found or (min(found) > CALL_S_MAX and len(found) < ATTEMPTS):
        params = SamplingParams(json_whitespace="compact", **BOMBS[name])  # type: ignore[arg-type]
        began = time.thread_time()
        try:
            found.append(follow(vocab, compiler.compile(params, owner=len(found))))
        except TooLarge as exc:
            assert exc.hint
            found.append(time.thread_time() - began)
    assert min(found) <= CALL_S_MAX * slowness()


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_estimate_of_a_schema_is_not_less_than_the_text_that_is_forced(
    compiled: tuple[Vocab, GrammarCompiler], name: str
) -> None:
    vocab, compiler = compiled
    schema = SCHEMAS[name]
    state = compiler.compile(SamplingParams(json_schema=json.dumps(schema)), owner=1)
    text = b""
    while (token := state.forced) is not None and not vocab.is_eog(token):
        state.accept(token)
        text += vocab.piece(token)
    estimate = forced_by_schema(schema)
    assert len(text) <= estimate.total
    assert estimate.bounded, "its names and constants are forced"


LARKS = {
    "no rule": "a" * 65_000,
    "braces": "start: " + "{" * 60_000,
    "quotes": "start: " + '"' * 60_001,
    "slashes": "start: " + "/" * 60_001,
    "escapes": 'start: "' + "\\" * 60_000,
    "spaces": " " * 65_000,
    "marks": "!" * 65_000,
    "lines": "a\n" * 30_000,
    "rules": "".join(f"a{i}: a{i + 1}\n" for i in range(5000)),
    "colons": "a:" * 30_000,
    "repetitions": f"start: /{'a{1}' * 15_000}/",
    "": "",
}


@pytest.mark.alone
@pytest.mark.parametrize("name", LARKS)
def test_any_text_is_estimated_in_a_short_time(name: str) -> None:
    found: list[float] = []
    while not found or (min(found) > 0.1 and len(found) < ATTEMPTS):
        began = time.thread_time()
        assert forced_by_lark(LARKS[name], []).total >= 0
        found.append(time.thread_time() - began)
    assert min(found) <= 0.1


def test_a_lark_grammar_without_rules_is_refused(
    compiled: tuple[Vocab, GrammarCompiler],
) -> None:
    with pytest.raises(InvalidArgument, match="lark"):
        compiled[1].compile(SamplingParams(lark="start"), owner=1)


@pytest.mark.parametrize("count", [1000, 100_000])
def test_a_long_repetition_is_matched_as_a_short_one_is(
    compiled: tuple[Vocab, GrammarCompiler], count: int
) -> None:
    _, compiler = compiled
    lark = f'start: /[ab]/ A{{{count}}}\nA: "{"xyz" * 20}"\n'
    assert forced_by_lark(lark, []).bounded == (count * 62 < FORCED_BYTES_MAX)
    state = compiler.compile(SamplingParams(lark=lark), owner=1)
    state.replay(3 + byte for byte in b"a" + b"xyz" * 100)
    assert not state.allows(3 + ord("y")) and state.allows(3 + ord("x"))
    state = compiler.compile(SamplingParams(lark=lark), owner=1)
    assert not state.complete
