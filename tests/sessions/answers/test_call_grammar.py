"""Grammars of required calls in every form: what they allow is read as calls that fit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from inferd.backends import SamplingParams
from inferd.backends.answer_form import AnswerForm, ArgumentsForm, CallForm
from inferd.backends.params import StructuralTag, StructuralTags, TagPart, tool_choice_of
from inferd.backends.tool_formats import KNOWN_FORMS
from inferd.sessions.answers.calls import ToolCall, join_parts
from inferd.sessions.answers.constraint import constraint_of
from inferd.sessions.answers.parser import AnswerParser
from tests.backends.grammars.test_formats import Texts
from tests.backends.llama.test_template_forms import templates
from tests.backends.walking import compiler_of, vocabulary
from tests.models import smollm2
from tests.sessions.answers.test_forms import CASES
from tests.sessions.answers.written_answers import WrittenAnswers
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process  # the trial of grammars

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "kind": {"enum": ["x", "y"]},
        "flag": {"type": "boolean"},
        "list": {"$ref": "#/$defs/numbers"},
        "object": {"type": "object", "properties": {"deep": {"type": "boolean"}}},
    },
    "required": ["text", "number"],
    "additionalProperties": False,
    "$defs": {"numbers": {"type": "array", "items": {"type": "integer"}}},
}
OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": ["string", "null"]}},
    "additionalProperties": False,
}
PARAMETERS = {"add": SCHEMA, "maybe": OPTIONAL}
VALIDATORS = {
    name: jsonschema.Draft202012Validator(schema)
    for name, schema in (PARAMETERS | {"now": {"maxProperties": 0}}).items()
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "maybe", "parameters": OPTIONAL}},
    {"type": "function", "function": {"name": "now"}},
]
FORMS = {name: case.form for name, case in CASES.items()} | {
    name: form for name, form in KNOWN_FORMS.items() if form.calls
}
OBJECTS = ("json", "llama")
"""Forms whose required calls are a JSON schema."""
VALUES: dict[Any, list[Any]] = {
    "integer": [0, -7, 12],
    "boolean": [True, False],
    "array": [[], [1, 2]],
    "object": [{}],
    "null": [None],
    "string": ["", 'a "b"'],
}


class Writer:
    """Writes answers that structural tags allow, at random."""

    def __init__(self, tags: StructuralTags, seed: int):
        self._tags, self._random = tags, random.Random(seed)

    def answer(self) -> str:
        tags = self._tags
        first = self._random.randrange(len(tags.tags))
        written = self._sequence(tags.before) + tags.tags[first].begin + self._rest(first)
        while tags.more and self._random.random() < 0.5:
            at = self._random.randrange(len(tags.tags))
            written += tags.more[at] + self._rest(at)
        return written + tags.closing

    def _rest(self, at: int) -> str:
        tag: StructuralTag = self._tags.tags[at]
        schema = tag.schema
        content = self._sequence(tag.parts) if schema is None else self._value(schema)
        return content + tag.end

    def _sequence(self, parts: Sequence[TagPart]) -> str:
        return "".join(map(self._part, parts))

    def _part(self, part: TagPart) -> str:
        if part.schema is not None:
            return self._value(part.schema)
        if part.regex:
            return "abc123xyz" if "9" in part.regex and "{9}" in part.regex else "7"
        if part.until:
            return self._random.choice(("", "x", "two\nlines", " é ")) + part.until
        if not part.any_of:
            return part.text
        times = self._random.randrange(3) if part.repeated else 1
        return "".join(self._sequence(self._random.choice(part.any_of)) for _ in range(times))

    def _value(self, schema: Any) -> str:
        return json.dumps(self._instance(schema, schema), ensure_ascii=False)

    def _instance(self, schema: Any, root: Any) -> Any:
        schema = root["$defs"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        kind = schema.get("type", "null")
        kind = self._random.choice(kind) if isinstance(kind, list) else kind
        if kind != "object":
            return self._random.choice(VALUES[kind])
        return {
            key: self._instance(value, root)
            for key, value in schema.get("properties", {}).items()
            if key in schema.get("required", ()) or self._random.random() < 0.5
        }


def required(form: AnswerForm, opened: str = "", **options: Any) -> StructuralTags:
    settings: dict[str, Any] = {"parallel": True, "opened": opened} | options
    found = constraint_of(form, TOOLS, tool_choice_of("required"), **settings)
    return msgspec.json.decode(found["structural_tag"], type=StructuralTags)


def calls_of(form: AnswerForm, answer: str, prompt: str) -> tuple[str, list[ToolCall]]:
    parser = AnswerParser(form, {**PARAMETERS, "now": {}}, prompt=prompt, reasoning=True)
    found = [parser.parse(answer), parser.finish()]
    text = "".join(each.text for each in found)
    return text, join_parts(part for each in found for part in each.parts)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Texts]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with vocabulary(path) as vocab, compiler_of(vocab) as compiler:
        yield Texts(vocab, compiler, spelled=True)


@pytest.mark.parametrize("name", [name for name in FORMS if name not in OBJECTS])
def test_what_the_grammar_of_required_calls_allows_is_read_as_calls(
    texts: Texts, name: str
) -> None:
    form = FORMS[name]
    prompt = next((mark for mark in form.opens if mark.strip()), "")
    opened = prompt if name in CASES and CASES[name].prompt else ""
    opened = ">>>" if name == "functionary" else opened
    tags = required(form, opened)
    params = SamplingParams(structural_tag=msgspec.json.encode(tags).decode())
    counts = set()
    for seed in range(30):
        answer = Writer(tags, seed).answer()
        text, calls = calls_of(form, answer, opened)
        assert (text.strip(), bool(calls)) == ("", True), answer
        counts.add(len(calls))
        for call in calls:
            VALIDATORS[call.name].validate(json.loads(call.arguments))
        if seed < 8:
            assert texts.fits(params, answer), texts.follow(params, answer)[0] + "|" + answer
            assert not texts.fits(params, answer + " and"), "nothing but calls may follow"
    assert len(counts) > 1, "several calls"
    one = required(form, opened, parallel=False)
    assert not one.more


@pytest.mark.parametrize("template", templates(), ids=[path.stem for path in templates()])
def test_required_calls_in_derived_forms_are_read(template: Path) -> None:
    """As above, for the form of each template, whether or not the prompt opens reasoning."""
    form = WrittenAnswers(template).answers
    if not form.calls or form.calls[0].whole:
        return
    for opened in ("", *form.opens):
        tags = required(form, opened)
        for seed in range(12):
            answer = Writer(tags, seed).answer()
            text, calls = calls_of(form, answer, opened)
            assert (text.strip(), bool(calls)) == ("", True), answer
            for call in calls:
                VALIDATORS[call.name].validate(json.loads(call.arguments))


def test_free_text_in_a_tag_ends_with_a_special_token() -> None:
    """SmolLM2 has control tokens of these names."""
    form = AnswerForm(
        calls=(
            CallForm(
                begin="<filename>",
                layout="named",
                name_end="\n",
                end="<jupyter_code>",
                arguments=ArgumentsForm(
                    encoding="tagged",
                    key_begin="<gh_stars>",
                    key_end="=",
                    value_end="\n<file_sep>\n",
                ),
            ),
        )
    )
    tags = required(form)
    params = SamplingParams(structural_tag=msgspec.json.encode(tags).decode())
    with vocabulary(smollm2()) as vocab, compiler_of(vocab) as compiler:
        texts = Texts(vocab, compiler, spelled=False)
        assert all(vocab.is_control(texts.tokens(f"<{n}>")[0]) for n in ("filename", "file_sep"))
        answers = [Writer(tags, seed).answer() for seed in range(12)]
        for answer in answers:
            assert texts.fits(params, answer), answer
        other = next(answer for answer in answers if "<file_sep>" in answer)
        assert not texts.fits(params, other.replace("<file_sep>", "<filename>", 1))


@pytest.mark.parametrize("name", ["tags", "keys and values", "own quotes", "literals of Python"])
def test_arguments_that_do_not_fit_are_not_allowed(texts: Texts, name: str) -> None:
    tags = required(FORMS[name])
    params = SamplingParams(structural_tag=msgspec.json.encode(tags).decode())
    tag = next(tag for tag in tags.tags if "maybe" in tag.begin)
    alone = msgspec.structs.replace(tags, tags=(tag,), more=())
    found = {Writer(alone, seed).answer() for seed in range(40)}
    assert any(texts.fits(params, answer) for answer in found)
    for answer in found:
        for value in ("-7", "12", "0"):
            if value in answer:
                assert not texts.fits(params, answer.replace(value, "yes", 1))
                assert not texts.fits(params, answer.replace("maybe", "other", 1))
