"""The form of grammars and schemas, which the echo model checks and does not follow."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.errors import InvalidArgument
from tests.backends.driving import load_language_model

JSON = r"""
# JSON without white space
root   ::= object
value  ::= object | array | string | ([0-9]+ ("." [0-9]{1,15})?) | ("true" | "false" | "null")
object ::= "{" (string ":" value ("," string ":" value)*)? "}"
array  ::= "[" (value ("," value)*)? "]" # may be empty
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "number"}, "maxItems": 3}, "b": {}},
    "required": ["a"],
}


def check(**params: Any) -> None:
    model = load_language_model(ModelSpec(name="echo", backend="echo"))
    try:
        model.sampler(SamplingParams(**params), ())
    finally:
        model.close()


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "yes" | "no"',
        "root ::= a-1\na-1 ::= .+",
        "root ::= <think> !<[7]>* [a-z]{2,} .{0,3}",
        'item ::= "x"\nroot ::= (\n  item |\n  item root\n)',
        JSON,
    ],
)
def test_grammars_of_llama_cpps_form_are_accepted(grammar: str) -> None:
    check(grammar=grammar)


@pytest.mark.process
def test_a_schema_is_accepted() -> None:
    check(json_schema=msgspec.json.encode(SCHEMA).decode())


@pytest.mark.process
@pytest.mark.parametrize(
    ("params", "cause"),
    [
        ({"grammar": "nonsense"}, "root"),
        ({"grammar": 'start ::= "a"'}, "'root' symbol"),
        ({"grammar": "root ::= item"}, "'item'"),
        ({"grammar": 'root ::= ("a"'}, r"expecting '\)'"),
        ({"grammar": 'root ::= "a")'}, "expecting newline"),
        ({"grammar": 'root ::= "a'}, "unexpected"),
        ({"grammar": "root ::= [a"}, "unexpected"),
        ({"json_schema": '{"type":"nonsense"}'}, "#/type"),
    ],
)
def test_other_grammars_and_schemas_are_refused(params: dict[str, str], cause: str) -> None:
    with pytest.raises(InvalidArgument, match=cause) as caught:
        check(**params)
    assert caught.value.hint
