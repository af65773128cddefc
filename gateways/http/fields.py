"""The fields of requests, in one table for each path with the effect of each field. Bodies are read
and docs/gateway.md is written by it.

Each path that generates text for OpenAI's or Anthropic's clients also knows the fields of other
servers: of llama-server, vLLM and SGLang, LM Studio and OpenAI's older APIs. A field that would
change the answer is refused, except with the value that means its absence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar, get_origin
from urllib.parse import parse_qsl

import msgspec

from ...backends.errors import InferdError, InvalidArgument, UnsupportedOperation
from ...backends.params import (
    BY_SPELLING,
    FORMS,
    MMPROJ_AUTO,
    PARAMETERS,
    REFUSED_KEYS,
    SECTION_NAMES,
    SEEDS,
    Fitting,
    as_whole,
    nearest,
)
from .limits import UnknownFields
from .long_strings import LongBody

S = TypeVar("S", bound=msgspec.Struct)
_INT_END = 1 << 63
_SHOWN_CHARACTERS, _SHOWN_NAME = 200, 100
_OF_A_TURN = ("ctx-size",)
"""The parameters of a model that a turn may set, too."""
QUERY_FIELDS_MAX = 16
IN_QUERY = frozenset(("GET", "DELETE"))
"""The methods whose fields are in the query."""
_PATH = re.compile(r" - at `\$\.?([^`]*)`")


class Use(StrEnum):
    """The effect of a field."""

    HONOURED = "honoured"
    REFUSED = "refused"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request. With *option*, its value sets this parameter of docs/parameters.md, or
    is passed on under this name, which the daemon reads as another form of a parameter.

    A *neutral* value requests nothing, and counts as absent.
    """

    name: str
    use: Use
    note: str = ""
    option: str = ""
    neutral: tuple[Any, ...] = ()
    sets: str = ""
    """The parameter that the API's own code makes of it, which the daemon's errors name."""

    def is_neutral(self, value: Any) -> bool:
        """Return whether *value* counts as absent. True is not the number 1."""
        return any(
            value == each and isinstance(value, bool) is isinstance(each, bool)
            for each in self.neutral
        )


def honoured(name: str, note: str = "", *neutral: Any, sets: str = "") -> Field:
    """Return a field that the API's own code reads, and of which it may make a parameter."""
    return Field(name, Use.HONOURED, note, neutral=neutral, sets=sets)


def parameter(name: str, option: str = "", note: str = "") -> Field:
    """Return a field whose value is a parameter, by default of the same name."""
    return Field(name, Use.HONOURED, note, option or name)


def ignored(name: str, note: str, *neutral: Any) -> Field:
    """Return a field without effect on the answer."""
    return Field(name, Use.IGNORED, note, neutral=neutral)


def refused(name: str, note: str, *neutral: Any) -> Field:
    """Return a field that would change the answer, and is refused by name."""
    return Field(name, Use.REFUSED, note, neutral=neutral)


PRIORITY_FIELD = honoured("priority", "extension: `low`, `normal`, `high` or `urgent`", 0)
"""The class of a request's turn, which is the same field on all paths that start turns. It is a
number in vLLM, whose default is 0.
"""


class ReadFields(NamedTuple, Generic[S]):
    """The fields of a request: those of the API's own code, parameters, and the ignored ones, which
    are named by their places, such as `stream_options.x`.
    """

    own: S
    options: dict[str, Any]
    ignored: list[str]


class FieldTable(Generic[S]):
    """The fields of the requests of one path.

    With *parameters*, a field that is not in the table is a parameter of docs/parameters.md, if
    that has its name. *others* are fields of other servers' requests that are known, too. Any
    other field is ignored or refused, as the operator chooses; with *own_path* it is always
    refused, because such a path has no programs of other servers. *kind* has the types of the
    honoured fields. The fields of a table for a *method* in `IN_QUERY` are those of the query.
    *media* are the places of base64 in a request, such as ``images.*``. Its API reads long strings
    there as views of their bytes.
    """

    def __init__(
        self,
        path: str,
        fields: Sequence[Field],
        *,
        kind: type[S],
        parameters: bool = False,
        others: Sequence[Field] = (),
        own_path: bool = False,
        method: str = "POST",
        media: Sequence[str] = (),
    ):
        self.path, self.fields, self.parameters = path, tuple(fields), parameters
        self.kind, self.method, self.media = kind, method, tuple(media)
        self.others, self.own_path = tuple(others), own_path
        self._by_name = {field.name: field for field in (*others, *fields)}
        listed = {field.name for field in fields}
        self._ignored_others = {f.name for f in others if f.use is Use.IGNORED} - listed
        self._by_option = {field.option or field.sets: field.name for field in fields}

    def read(
        self,
        body: bytes | LongBody | dict[str, Any],
        unknown: UnknownFields = UnknownFields.IGNORE,
        place: str = "",
    ) -> ReadFields[S]:
        """Return the fields of a request, or those of an object in it at *place*. Nulls and neutral
        values count as absent.

        :raises InvalidArgument: *body* is not a JSON object, or a field has another type or is
            unknown and refused.
        :raises UnsupportedOperation: the request has a field that is refused.
        """
        fields = body if isinstance(body, dict) else self._decode(body)
        own, options, ignored = self._split(fields, unknown)
        fitting = Fitting(nulls_absent=True)
        read = _convert(fitting.fit(own, self.kind), self.kind)
        return ReadFields(read, options, [place + name for name in (*ignored, *fitting.unknown)])

    def _decode(self, body: bytes | LongBody) -> dict[str, Any]:
        if isinstance(body, bytes):
            return _decode_object(body)
        with suppress(InvalidArgument):
            fields = _decode_object(body.text)
            if body.put_strings(fields, self.media):
                return fields
        return _decode_object(body.body)

    def null_parameters(self, body: bytes | LongBody) -> list[str]:
        """Return the parameters that a request sets to null, which another request has set."""
        nulls = [name for name, value in self._decode(body).items() if value is None]
        return [name for name in nulls if self._unlisted_parameter(name)]

    def _unlisted_parameter(self, name: str) -> bool:
        return name not in self._by_name and self._is_parameter(name.lower().replace("_", "-"))

    def read_query(self, query: str) -> S:
        """Return the fields of a request in its query, such as ``limit=10&after=a``. The items of a
        list are ``name=x&name=y`` or ``name[]=x&name[]=y``.

        :raises InvalidArgument: a field has another type or is unknown.
        """
        lists = {f.encode_name for f in msgspec.structs.fields(self.kind) if _is_list(f.type)}
        own, _, _ = self._split(_decode_query(query, lists), UnknownFields.REFUSE)
        return _convert(own, self.kind, strict=False)

    def _split(
        self, fields: dict[str, Any], unknown: UnknownFields
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Return a request's own fields, its parameters and the names of the ignored ones."""
        own: dict[str, Any] = {}
        options: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in fields.items():
            if value is None:
                continue
            field = self._by_name.get(name) or self._unlisted(name, unknown)
            if field.is_neutral(value):
                continue
            if field.use is Use.REFUSED:
                raise UnsupportedOperation(
                    f"{name}: {field.note}", hint="leave it out", data={"param": name}
                )
            if name in self._ignored_others and unknown is UnknownFields.REFUSE:
                raise self._unknown(name)
            if field.use is Use.IGNORED:
                ignored.append(name)
            elif field.option:
                options[field.option] = _sendable(name, value)
            else:
                own[name] = _sendable(name, value)
        return own, options, ignored

    def _unlisted(self, name: str, unknown: UnknownFields) -> Field:
        """Return a field that is not in the table.

        :raises InvalidArgument: it is unknown and refused.
        """
        if self.parameters and self._is_parameter(name.lower().replace("_", "-")):
            return parameter(name)
        if self.own_path or unknown is UnknownFields.REFUSE:
            raise self._unknown(name)
        return ignored(name, "unknown")

    def _unknown(self, name: str) -> InvalidArgument:
        shown = name[:_SHOWN_NAME]
        message = f"unknown field {shown!r}; {nearest(name, self._suggested())}".rstrip("; ")
        return field_error(shown, message)

    def _is_parameter(self, spelling: str) -> bool:
        """Return whether a parameter with this spelling applies to a request of this path."""
        found = BY_SPELLING.get(spelling)
        if found is None:
            return spelling in FORMS or spelling in SECTION_NAMES
        return self.own_path or found.level != "model" or found.name in _OF_A_TURN

    def _suggested(self) -> Iterator[str]:
        """Yield the names that a message may suggest: those of the path's fields, and of parameters
        that no field sets. Other spellings are those of other servers.
        """
        yield from (field.name for field in self.fields if field.use is Use.HONOURED)
        for each in PARAMETERS if self.parameters else ():
            if each.name not in self._by_option and each.level != "model":
                yield each.name.replace("-", "_")

    def name_field(self, error: InferdError) -> InferdError:
        """Return *error*, whose `data.param` then names the field that it is about, if known."""
        lines = error.data.get("errors") or [error.message]
        option = str(lines[0]).partition(":")[0].strip()
        unknown = re.match(r"unknown key '([^']*)'", str(lines[0]))
        name = unknown[1] if unknown else self._by_option.get(option, option)
        if unknown or name in self._by_name or re.fullmatch(r"[a-z0-9_-]{1,40}", name):
            error.data.setdefault("param", name)
        return error


def _sendable(name: str, value: Any) -> Any:
    """Return a field's value as a frame to the daemon can carry it.

    :raises InvalidArgument: a number has more than 64 bits.
    """
    value = as_whole(value)
    if isinstance(value, int) and not -_INT_END <= value < _INT_END:
        if name != "seed":
            raise field_error(
                name[:_SHOWN_NAME], f"{name[:_SHOWN_NAME]}: the number is out of range"
            )
        value %= SEEDS  # as the daemon takes seeds of more than 32 bits
    return value


def field_error(name: str, message: str, hint: str = "") -> InvalidArgument:
    """Return the error for a field's value."""
    return InvalidArgument(
        message, hint=hint or "correct the field, or leave it out", data={"param": name}
    )


def _decode_object(body: bytes | bytearray) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as exc:
        problem = "has a number that is out of range" if "range" in str(exc) else "is not an object"
        raise InvalidArgument(f"the request {problem}", hint="send a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidArgument(
            f"the request is not JSON: {exc}", hint="send a JSON object"
        ) from None


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is list


def _decode_query(query: str, lists: Collection[str]) -> dict[str, Any]:
    try:
        items = parse_qsl(query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        raise InvalidArgument(
            f"the query has more than {QUERY_FIELDS_MAX} fields", hint="send fewer"
        ) from None
    fields: dict[str, Any] = {}
    for name, value in items:
        if name.removesuffix("[]") in lists:
            fields.setdefault(name.removesuffix("[]"), []).append(value)
        else:
            fields[name] = value
    return fields


def _convert(fields: dict[str, Any], kind: type[S], *, strict: bool = True) -> S:
    try:
        return msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as exc:
        raise _conversion_error(exc) from None


def _conversion_error(exc: msgspec.ValidationError) -> InvalidArgument:
    text = str(exc)
    place = _PATH.search(text)
    name = place[1] if place else ""
    if missing := re.search(r"missing required field `([^`]*)`", text):
        name = f"{name}.{missing[1]}" if name else missing[1]
    message = _shortened(_PATH.sub("", text))
    return field_error(name, f"{name}: {message}" if name else message)


def _shortened(message: str) -> str:
    """Return a message with the middle of a long value left out."""
    if len(message) <= _SHOWN_CHARACTERS:
        return message
    half = _SHOWN_CHARACTERS // 2
    return f"{message[:half]} … {message[-half:]}"


_NAME = "use the field of this API"
_TEMPLATE = "the model has its own; its operator can replace it"
_BEAMS = "beam search is not supported"
_FORM = "replies have the form of this API"
_OPERATOR = "the operator sets it for the model, in the daemon's configuration"
_PLACEMENT = frozenset(
    {
        *("batch-size", "threads", "threads-batch", "n-gpu-layers", "main-gpu", "tensor-split"),
        *("flash-attn", "mmap", "mlock", "numa", "slots", "keep-alive", "swa-full"),
        *("cpu-moe", "n-cpu-moe"),
        *("similarity-model", "similarity-wait-ms", "ctx-size"),
    }
)
"""Parameters of a model that do not change its answers, or that a turn may set."""

OTHER_SERVERS: tuple[Field, ...] = (
    ignored("ttl", "the daemon's `keep-alive` decides"),
    ignored("keep_alive", "the daemon's `keep-alive` decides"),
    ignored("id_slot", "the daemon chooses slots itself", -1),
    refused("extra_body", "the clients of OpenAI send its fields at the top level", {}),
    refused("add_generation_prompt", "prompts always end where an answer begins", True),
    refused("continue_final_message", "prompts always end where an answer begins", False),
    refused("generation_prompt", _TEMPLATE, ""),
    refused("chat_template", _TEMPLATE, ""),
    refused("documents", "send them in the messages", []),
    refused("chat_format", "the model's template decides", ""),
    refused("chat_parser", "the model's template decides", ""),
    refused("reasoning_in_content", "reasoning is a field of its own", False),
    refused("include_reasoning", "reasoning is a field of its own", True),
    refused("separate_reasoning", "reasoning is a field of its own", True),
    ignored("reasoning_control", "every answer can be controlled"),
    parameter("thinking_budget", "reasoning-budget", "as `reasoning_budget`"),
    parameter("thinking_token_budget", "reasoning-budget", "vLLM's `reasoning_budget`"),
    refused("echo", "only `/v1/completions` has it", False),
    refused("best_of", "use n, and choose", 1),
    refused("n_cmpl", "use n", 1),
    refused("functions", "is OpenAI's old form of tools: use tools", []),
    refused("function_call", "is OpenAI's old form of tool_choice", "none", "auto"),
    refused("verbosity", "no model here has it", "medium"),
    refused("min_tokens", "an answer may end at once", 0),
    refused("min_new_tokens", "an answer may end at once", 0),
    refused("max_new_tokens", _NAME),
    refused("max_output_tokens", _NAME),
    refused("num_predict", _NAME),
    refused("n", "a request has one answer", 1),
    refused("reasoning", _NAME, {}),
    refused("reasoning_effort", _NAME),
    refused("thinking", _NAME),
    refused("text", _NAME, {}),
    refused("output_config", _NAME, {}),
    refused("output_format", _NAME),
    refused("suffix", "`/v1/completions` and `/infill` fill in text between two others", ""),
    refused("raw", _NAME, False),
    refused("context", "send the messages, or session_id", []),
    refused("template", _TEMPLATE, ""),
    refused("previous_response_id", "send the messages, or session_id"),
    refused("conversation", "send the messages, or session_id"),
    refused("mcp_servers", "the gateway calls no servers", []),
    refused("web_search_options", "the gateway does not search the web"),
    refused("modalities", "answers are text", ["text"]),
    refused("audio", "answers are text; a sound is a part of a message"),
    refused("images", "images are parts of messages", []),
    refused("prompt", _NAME, "", []),
    refused("input", _NAME, "", []),
    refused("messages", _NAME, []),
    refused("instructions", _NAME, ""),
    refused("system", _NAME, ""),
    refused("options", "send its fields at the top level", {}),
    refused("format", _NAME, ""),
    refused("use_beam_search", _BEAMS, False),
    refused("num_beams", _BEAMS, 1),
    refused("length_penalty", _BEAMS, 1),
    refused("early_stopping", _BEAMS, False),
    refused("do_sample", "use temperature 0 for greedy answers", True),
    refused("allowed_token_ids", "use grammar or logit_bias", []),
    refused("bad_words", "use logit_bias", []),
    refused("logits_processors", "use logit_bias", []),
    refused("ebnf", "use grammar, which is GBNF", ""),
    refused("include_stop_str_in_output", "use reverse_prompt", False),
    refused("no_stop_trim", "use reverse_prompt", False),
    refused("skip_special_tokens", "special tokens are not part of the text", True),
    refused("add_special_tokens", "the daemon adds them as the model needs", False),
    refused("truncate_prompt_tokens", "a prompt that is too long is refused"),
    refused("prompt_embeds", "a prompt is text"),
    refused("input_embeds", "a prompt is text"),
    refused("input_prefix", "`/infill` fills in text between two others", ""),
    refused("input_suffix", "`/infill` fills in text between two others", ""),
    refused("input_extra", "`/infill` fills in text between two others", []),
    refused("prompt_logprobs", "only `/v1/completions` and `/v1/chat/completions` have them"),
    refused("return_tokens", _FORM, False),
    refused("return_token_ids", _FORM, False),
    refused("return_tokens_as_token_ids", _FORM, False),
    refused("response_fields", _FORM, [], [""]),
    refused("verbose", _FORM, False),
    refused("timings_per_token", _FORM, False),
    refused("return_progress", _FORM, False),
    refused("lora_path", "the parameter `lora` names adapters", ""),
    refused("mmproj", _OPERATOR, "", MMPROJ_AUTO),
    *(refused(name.replace("-", "_"), reason, False, "") for name, reason in REFUSED_KEYS.items()),
    *(
        refused(each.name.replace("-", "_"), _OPERATOR)
        for each in PARAMETERS
        if each.level == "model" and each.name not in {*_PLACEMENT, "chat-template", "mmproj"}
    ),
)
"""The path's own table replaces these where it has a field of the same name."""
