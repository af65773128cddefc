"""The page docs/json-schema.md, made from the table of keywords and the limits of grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator

from inferd.backends.grammars.json_schema.document import LEVELS_MAX
from inferd.backends.grammars.json_schema.keyword_table import KEYWORDS, SchemaKeyword
from inferd.backends.grammars.json_schema.refusals import DROPPED_MAX
from inferd.backends.grammars.json_schema.rewriting import FORMATS
from inferd.backends.grammars.json_schema.schema_grammar import WHITESPACE_MAX
from inferd.backends.grammars.limits import CPU_S_MAX, MEMORY_BYTES_MAX
from inferd.backends.params.json_texts import SCHEMA_BYTES_MAX

__all__ = ("page",)

_EXAMPLE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

_RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": {"type": "object"}},
}


def page() -> str:
    """Return the text of docs/json-schema.md."""
    return "\n".join([_HEAD, *map(_line, KEYWORDS), _TAIL])


def _line(keyword: SchemaKeyword) -> str:
    cells = (f"`{keyword.name}`", keyword.treatment, keyword.remark, _code(keyword.example))
    return f"| {' | '.join(cells)} |"


def _code(schema: object) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    return f"`{text}`".replace("|", "\\|")


def _formats() -> Iterator[str]:
    return (f"`{name}`" for name, kept in FORMATS.items() if kept)


_HEAD = f"""\
# Answers that fit a JSON schema

`make docs` writes this page from the table in `backends/grammars/json_schema/keyword_table.py`.

The parameter `json-schema` takes a schema, or its JSON text, and makes a grammar of it. Every
answer that the grammar allows is valid for the schema (draft 2020-12, or the draft in `$schema`).
The answer ends where its value is complete, or at `n-predict`, in which case it is incomplete.

```json
{json.dumps({"json-schema": _EXAMPLE})}
```

The same schema in OpenAI's and llama-server's form, of which `type` may also be `text` (no schema)
or `json_object` (any object):

```json
{json.dumps({"response_format": _RESPONSE_FORMAT})}
```

A request has `json-schema` or `response_format`, not both. `strict` has no effect here:
`schema-lenient` decides. The HTTP gateway reads it, see below.

The grammars are those of [llguidance](https://github.com/guidance-ai/llguidance).

## Options

- `json-whitespace` is the white space between the symbols of an answer. `spaced`, the default:
  `", "` between items and `": "` after a name. `compact`: none. `any`: up to {WHITESPACE_MAX}
  characters wherever JSON allows white space, except before and after the whole value.
- `schema-lenient`: false, the default: a schema with a constraint that no grammar can keep is
  refused, with the constraint's JSON path and a hint. true: such constraints are left out, and a
  `oneOf` becomes `anyOf`, so the answer may violate them. `adjusted` in the metadata has their
  paths; answers of the gateway have it as a field, and as the header `inferd-adjusted`. At most
  {DROPPED_MAX} are left out. Errors in the schema are refused all the same.
- `schema-infer`: the keywords that are added where a schema lacks them, so that a model spends no
  tokens on values that the schema's author did not intend. `closed` (the default) adds types and
  closes objects; `types` adds only types; `none` adds nothing.

The HTTP gateway sets `schema-lenient` to false for schemas with `strict` and for all schemas in
Anthropic's form, else to true.

## Keywords that a schema leaves out

llama.cpp infers them too, and OpenAI's strict mode demands them. Each value that fits the schema
with them fits the schema as it is, except that the alternatives of a `oneOf` are compared as closed
objects.

- **Types** (`closed` and `types`): a schema without `type` is an object if it has `properties`,
  `patternProperties` or `additionalProperties`, an array if it has `items` or `prefixItems`, and a
  string if it has `pattern`. It stays as it is beside `enum`, `const`, `$ref`, or alternatives that
  say a type. The operands of `anyOf`, and everything in `oneOf`, `not`, `if`, `then`, `else`,
  `contains`, `propertyNames` and `dependentSchemas`, stay as they are, and so does a definition to
  which one of these refers.
- **Closed objects** (`closed`): an object with `properties` or `patternProperties` and without
  `additionalProperties` has only the properties that the schema names, in `required` too, as with
  `additionalProperties: false`.
  - `additionalProperties: true`, or a schema there, keeps it open, and so do
    `unevaluatedProperties` except false, `propertyNames`, `enum` and `const`. An object that lists
    no properties, such as `{{"type": "object"}}`, is open. Properties whose names match
    `patternProperties` are allowed.
  - In a combination (`allOf`, or `$ref`, `anyOf` and `oneOf` beside `properties`), the properties
    of all its schemas are allowed, also those of other alternatives and of `then` and `else`. The
    combination stays open if one of its schemas is open, has `patternProperties`, or is in another
    document. Alone, the alternatives of an `anyOf` or `oneOf` are closed one by one.
  - Where two schemas of a combination describe the same property, the objects in it stay open.
  - Nothing in `not`, `if`, `contains` and `propertyNames` is closed.

Nothing is inferred in a document whose parts have ids or anchors of their own (`$id`, `$anchor`).

## Errors in schemas

These are refused with their path, with and without `schema-lenient`: a keyword whose value has
another form than the standard's, such as `"required": true` in a property, a negative `minLength`
or a list in `properties`; an unknown `type`, such as `int`; a `$ref` to nothing in the document;
and a `pattern` that is not a regular expression of ECMA-262. Annotations may have any value, and so
may definitions that nothing refers to. A `$ref` to another document is a constraint that no grammar
keeps.

## Keywords

The table holds for a schema with `schema-infer` `none`, or one that leaves no keyword out.
*Kept*: the grammar allows the valid answers. *Narrowed*: it does not allow all of them. *Refused*:
it cannot keep the constraint. Other keywords, such as `title`, `default` or unknown ones, are
annotations without effect, as the standard says.

| keyword | treatment | remarks | example |
|---|---|---|---|"""

_TAIL = f"""
Formats: {", ".join(_formats())}. Formats that the standard does not define, such as `int32`, have
no effect.

## Narrowed everywhere

- Properties come in the order of the schema; others come last.
- Strings have the escapes `\\"`, `\\\\`, `\\b`, `\\f`, `\\n`, `\\r` and `\\t`,
  and other characters as they are, except further control characters.
- `{{}}` alone means an object, `true` any value. Special tokens of the vocabulary are not text.
- Integers have neither a fraction nor an exponent, and numbers with bounds no exponent.

## Refused besides

- Schemas that no value fits.
- More than {SCHEMA_BYTES_MAX} bytes, or {LEVELS_MAX} levels of objects and lists. A schema that
  takes more than {CPU_S_MAX:.0f} s of CPU time or {MEMORY_BYTES_MAX >> 20} MiB of memory to compile
  is refused as `TooLarge`. `schema-lenient` does not change these limits.
"""
