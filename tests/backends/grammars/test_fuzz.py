"""Random grammars, schemas, expressions and tags: whatever they are, only typed errors come.

`INFERD_FUZZ_S` sets the seconds, 2 by default, and `INFERD_FUZZ_SEED` the first seed.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from inferd.backends import SamplingParams
from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.backends.grammars.compiler import GrammarCompiler
from inferd.backends.llama.text.vocab import Vocab
from inferd.backends.params.structural_tags import read_structural_tag
from tests.backends.grammars.languages.corpus import GRAMMARS
from tests.backends.llama.schemas import SCHEMAS
from tests.backends.walking import compiler_of, vocabulary
from tests.models import smollm2

SECONDS = float(os.environ.get("INFERD_FUZZ_S", 2))
SEED = int(os.environ.get("INFERD_FUZZ_SEED", 1))
STEPS = 30
WORDS = ["a", "b", "start", "root", "x1", "ABC", "é", "\U0001f600", "\\", '"', "'", "/", "\n", "\t"]
SIGNS = ["::=", ":", "|", "*", "+", "?", "{2}", "{0,3}", "{5,}", "(", ")", "[", "]", ".", "-", "~"]
GBNF_PARTS = ['"a"', '"\\n"', "[a-z]", "[^a]", "<[97]>", "!<[100]>", "<s>", "root", "x", "#c\n"]
LARK_PARTS = [
    "start:", "start: a\na:", 'a: "x"', "A:", "/a+/", "/(a|b)*c/i", '"z"i', "%ignore /[ ]+/\n",
    "%json {}", '%json {"type": "integer"}', '%regex {"substring_words": "a b c"}', "<s>", "<[1]>",
    "%lark {", "}", "[lazy]", "%llguidance {}\n", "%import common.INT\n", "INT", "& ", "::_",
    "%if bit_set(0)", "a::set_bit(1)", '"a".."f"', "~ 2..3", "-> b", "@a", "stop=", "\\x00",
]  # fmt: skip
REGEX_PARTS = [
    "a", ".", "\\d", "\\w", "\\p{L}", "[a-f]", "[^\\n]", "(?:", "(", ")", "|", "*", "+", "?", "{3}",
    "{2,900}", "{0,}", "(?i)", "(?=a)", "^", "$", "\\b", "\\1", "[", "]", "\\", "\\x{10FFFF}", "/",
]  # fmt: skip
LARKS = [
    'start: term (SIGN term)*\nterm: INT | "(" start ")"\nSIGN: /[-+]/\n%import common.INT\n',
    'start: a b?\na[lazy]: /[a-z]*;/\nb: %json {"type": "array"} | %lark { start: "x"{1,3} }\n',
    'start: p::0\np::_: "" %if is_ones([0:2]) | "a" p::set_bit(0) | "b" p::set_bit(1)\n',
    'start: A\nA: /[a-c]*/ & ~/a+/\n%ignore / +/\n%llguidance {"allow_initial_skip": true}\n',
    'start: <s> "é" <[1]> | /[^\\n]+/i\n',
]
REGEX_LEAVES = ["a", "bc", ".", "[a-f]", "[^x]", "\\d{2,4}", "\\w+", "\\s", "é", "/", "\\p{Lu}"]
KEYWORDS = [
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "minimum", "maximum", "multipleOf", "items",
    "minLength", "maxLength", "pattern", "format", "prefixItems", "minItems", "maxItems", "title",
    "required", "properties", "additionalProperties", "patternProperties", "minProperties", "$ref",
    "$defs", "not", "x-guidance", "exclusiveMinimum", "uniqueItems",
]  # fmt: skip
VALUES = [
    "string", "integer", "object", "array", "null", 0, 1, -1, 3, 1e300, 1.5, 10**18, True, False,
    None, "#", "#/$defs/a", "^a.*b$", "(", "date", "uuid", [], {}, ["a"], ["string", "null"], "é",
]  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> Iterator[tuple[Vocab, GrammarCompiler]]:
    with vocabulary(smollm2()) as vocab, compiler_of(vocab) as compiler:
        yield vocab, compiler


def joined(source: random.Random, *parts: list[str]) -> str:
    chosen = [source.choice(source.choice(parts)) for _ in range(source.randint(1, 25))]
    return source.choice(["", " ", " "]).join(chosen)


def mutated(source: random.Random, text: str) -> str:
    """Return *text* with a part removed, repeated, or replaced by something else."""
    begin = source.randrange(len(text) + 1)
    end = min(len(text), begin + source.choice([0, 1, 1, 3, 20]))
    part = source.choice(["", text[begin:end] * 3, source.choice(SIGNS), source.choice(WORDS)])
    return text[:begin] + part + text[end:]


def schema(source: random.Random, depth: int = 0) -> Any:
    if depth > 3 or source.random() < 0.25:
        return source.choice(VALUES)
    if source.random() < 0.2:
        return [schema(source, depth + 1) for _ in range(source.randint(0, 3))]
    keys = source.choices(KEYWORDS, k=source.randint(0, 4))
    return {key: schema(source, depth + 1) for key in keys}


def gbnf(source: random.Random) -> str:
    if source.random() < 0.5:
        return mutated(source, source.choice(list(GRAMMARS.values())))
    return "root ::= " + joined(source, GBNF_PARTS, GBNF_PARTS, SIGNS, WORDS)


def lark(source: random.Random) -> str:
    if source.random() < 0.5:
        return mutated(source, source.choice(LARKS))
    return "start: " + joined(source, LARK_PARTS, LARK_PARTS, SIGNS, WORDS)


def json_schema(source: random.Random) -> str:
    if source.random() < 0.5:
        return mutated(source, json.dumps(source.choice(list(SCHEMAS.values()))))
    return json.dumps(schema(source))


def regex(source: random.Random, depth: int = 0) -> str:
    if source.random() < 0.2 and depth == 0:
        return joined(source, REGEX_PARTS)
    if depth > 3 or source.random() < 0.4:
        return source.choice(REGEX_LEAVES)
    inner = [regex(source, depth + 1) for _ in range(source.randint(1, 3))]
    form = source.choice(["{}", "({})", "(?:{})*", "(?:{})+", "({})?", "({}){{0,9}}", "(?i:{})"])
    return form.format(source.choice(["", "|"]).join(inner))


def structural_tag(source: random.Random) -> str:
    mark = source.choice(["<f", "<s>", "[", "{", "é", "<f=a>"])
    structures = [
        {
            "begin": mark + source.choice(["", "a", '"', "\n", "</s>"]),
            "end": source.choice(["", ">", "</s>", "}\n"]),
            "schema": schema(source, 1),
        }
        for _ in range(source.randint(0, 3))
    ]
    value: Any = {"structures": structures, "triggers": [mark, *["<"] * source.randint(0, 1)]}
    if source.random() < 0.3:
        content = source.choice([
            {"type": "regex", "pattern": regex(source)},
            {"type": "grammar", "grammar": gbnf(source)},
        ])  # fmt: skip
        tags = [{"begin": mark, "content": content, "end": source.choice(["", "!"])}]
        value = {"format": {"type": "triggered_tags", "triggers": [mark], "tags": tags}}
    try:
        return read_structural_tag(value)
    except ValueError:  # as a parameter, this is InvalidArgument
        return ""


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "grammar": gbnf,
    "lark": lark,
    "json_schema": json_schema,
    "regex": regex,
    "structural_tag": structural_tag,
}


def follow(vocab: Vocab, compiler: GrammarCompiler, params: SamplingParams, seed: int) -> str:
    """Compile a grammar and generate some tokens; return the outcome."""
    source = random.Random(seed)
    try:
        state = compiler.compile(params, owner=seed)
        for _ in range(STEPS):
            found = np.setdiff1d(state.allowed(), vocab.eog())
            if not len(found):
                return "ended"
            token = int(source.choice(found))
            assert state.allows(token)
            state.accept(token)
    except (InvalidArgument, TooLarge) as exc:
        assert exc.hint and exc.message
        return exc.name
    return "answered"


def _all_seen(outcomes: Counter[tuple[str, str]]) -> bool:
    """Return whether answers and refusals have occurred in each format."""
    answered = {field for field, outcome in outcomes if outcome in ("answered", "ended")}
    refused = {field for field, outcome in outcomes if outcome == "InvalidArgument"}
    return answered == refused == set(MAKERS)


@pytest.mark.process
def test_random_grammars_cause_only_typed_errors(
    compiled: tuple[Vocab, GrammarCompiler],
) -> None:
    vocab, compiler = compiled
    outcomes: Counter[tuple[str, str]] = Counter()
    end, seed = time.monotonic() + SECONDS, SEED
    while time.monotonic() < end or not _all_seen(outcomes):
        for field, make in MAKERS.items():
            seed += 1
            value = make(random.Random(seed))
            params = SamplingParams(**{field: value})  # type: ignore[arg-type]
            if not params.has_grammar:
                continue
            try:
                outcomes[field, follow(vocab, compiler, params, seed)] += 1
            except Exception as exc:
                raise AssertionError(f"{field} of seed {seed}: {value!r}") from exc
