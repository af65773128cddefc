"""Reading of the values that a chat template gets besides messages: tools and its own arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from ..answer_form import read_answer_form
from ..texts import choice_of, shorten
from ..tool_formats import FUNCTION_NAME_CHARACTERS_MAX, KNOWN_FORMS
from .fitting import Fitting, as_whole
from .json_texts import check_containers, decode_json, nests_deeper
from .parameter_table import BY_NAME, EFFORTS, Parameter

TOOLS_MAX = 128
TOOL_CHOICES = ("auto", "none", "required")
TOOLS_BYTES_MAX = 256 << 10
ARGUMENTS_MAX = 64
ARGUMENTS_BYTES_MAX = 64 << 10
DEPTH_MAX = 56
"""Levels that one value may nest. In replies the value is at depth 4 (`parameters`) or 5 (`show`)
of a frame, which may nest 64 deep.
"""

_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
_ALLOWED_TOOLS = "allowed_tools"
_ALLOWED_SHAPE = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{…}]}}'
_NAMED_SHAPE = '{"type": "function", "function": {"name": "…"}}'
_SHAPE = '{"type": "function", "function": {"name": "…", "description": "…", "parameters": {…}}}'


class _Function(msgspec.Struct):
    name: Annotated[
        str, msgspec.Meta(pattern=rf"^[A-Za-z0-9_.-]{{1,{FUNCTION_NAME_CHARACTERS_MAX}}}\Z")
    ]
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class _NamedTool(msgspec.Struct, tag="function"):
    function: _Function


class _AllowedSet(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], msgspec.Meta(min_length=1, max_length=TOOLS_MAX)]


class _AllowedTools(msgspec.Struct, tag=_ALLOWED_TOOLS):
    allowed_tools: _AllowedSet


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"  # which Ollama's clients may leave out


def read_choice(parameter: Parameter, value: Any) -> str:
    """Return one of the parameter's choices, or raise ValueError. False stands for `off`, True for
    `on`, or for the first other choice if there is no `on`.
    """
    choices = parameter.choices
    if isinstance(value, bool) and "off" in choices:
        on = "on" if "on" in choices else next(c for c in choices if c != "off")
        value = on if value else "off"
    choice = choice_of(value, choices)
    if choice is None:
        names = ", ".join(filter(None, choices))
        raise ValueError(f"{shorten(value)} is not one of {names}")
    return choice


def read_tools(_: Parameter, value: Any) -> list[dict[str, Any]]:
    """Return function definitions, given as a list or its JSON text, or raise ValueError."""
    tools = read_json(value, TOOLS_BYTES_MAX)
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX:
        raise ValueError(f"{shorten(value)} is not a list of up to {TOOLS_MAX} tools")
    tools = Fitting(nulls_absent=True).fit(tools, list[_Tool])
    try:
        msgspec.convert(tools, list[_Tool])
    except msgspec.ValidationError as exc:
        raise ValueError(f"{exc}; a tool is {_SHAPE}") from None
    return [{"type": "function", **tool} for tool in tools]


def read_tool_choice(_: Parameter, value: Any) -> str | dict[str, Any]:
    """Return one of `TOOL_CHOICES`, or a map that names one function or the allowed ones; or raise
    ValueError.
    """
    if isinstance(value, str) and value.lower() in TOOL_CHOICES:
        return value.lower()
    allows = isinstance(value, dict) and value.get("type") == _ALLOWED_TOOLS
    kind: type[_AllowedTools | _NamedTool] = _AllowedTools if allows else _NamedTool
    try:
        choice = msgspec.convert(Fitting(nulls_absent=True).fit(value, kind), kind)
    except msgspec.ValidationError as exc:
        if allows:
            raise ValueError(f"{exc}; it is {_ALLOWED_SHAPE}") from None
        choices = ", ".join((*TOOL_CHOICES, _NAMED_SHAPE))
        raise ValueError(f"{shorten(value)} is neither {choices} nor {_ALLOWED_SHAPE}") from None
    if isinstance(choice, _NamedTool):
        return _named_tool(choice.function.name)
    allowed = choice.allowed_tools
    names = dict.fromkeys(tool.function.name for tool in allowed.tools)
    tools = [_named_tool(name) for name in names]
    return {"type": _ALLOWED_TOOLS, _ALLOWED_TOOLS: {"mode": allowed.mode, "tools": tools}}


def _named_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


class ToolChoice(NamedTuple):
    """The calls that an answer may have (`auto`), must have (`required`) or does not have (`none`).
    If *names* has any, only these functions may be called.
    """

    mode: str
    names: tuple[str, ...] = ()


def tool_choice_of(value: str | Mapping[str, Any]) -> ToolChoice:
    """Return the meaning of a value that `read_tool_choice` has returned."""
    if isinstance(value, str):
        return ToolChoice(value)
    if value["type"] == "function":
        return ToolChoice("required", (value["function"]["name"],))
    allowed = value[_ALLOWED_TOOLS]
    return ToolChoice(allowed["mode"], tuple(tool["function"]["name"] for tool in allowed["tools"]))


def read_arguments(_: Parameter, value: Any) -> dict[str, Any]:
    """Return a template's own arguments by name, given as a map or its JSON text, or raise
    ValueError.
    """
    arguments = read_json(value, ARGUMENTS_BYTES_MAX)
    if not isinstance(arguments, dict) or len(arguments) > ARGUMENTS_MAX:
        raise ValueError(f"{shorten(value)} is not a map of up to {ARGUMENTS_MAX} arguments")
    for name in arguments:
        if not _ARGUMENT.fullmatch(name):
            raise ValueError(f"{shorten(name)} is not an argument's name: use letters, digits, _")
        if name in _RESERVED:
            raise ValueError(f"{name!r} is always set: use another name")
    return arguments


def read_efforts(_: Parameter, value: Any) -> dict[str, int]:
    """Return the numbers of all levels of reasoning, of which *value* gives some; or raise
    ValueError.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{shorten(value)} is not a map of levels to numbers")
    numbers = {name: as_whole(number) for name, number in value.items()}
    for name, number in numbers.items():
        if name not in EFFORTS:
            raise ValueError(f"{shorten(name)} is not one of {', '.join(EFFORTS)}")
        if type(number) is not int or not -1 <= number <= BY_NAME["reasoning-budget"].high:
            raise ValueError(f"{name}: {shorten(number)} is not a number of tokens, or -1")
    return EFFORTS | numbers


def read_json(value: Any, bytes_max: int) -> Any:
    """Return *value* as plain JSON types; a text is decoded as JSON.

    :raises ValueError: *value* is not JSON, or exceeds a bound.
    """
    try:
        text = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
        if len(text) > bytes_max:
            raise ValueError(f"{len(text)} bytes of JSON; {bytes_max} at most")
        check_containers(text)
        decoded = decode_json(text)
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError, RecursionError):
        raise ValueError(f"{shorten(value)} is not JSON") from None
    try:
        msgspec.msgpack.encode(decoded)
    except OverflowError:  # JSON allows for longer numbers than MessagePack, which sends the value
        raise ValueError(f"{shorten(value)} has a whole number of more than 64 bits") from None
    if nests_deeper(decoded, DEPTH_MAX):
        raise ValueError(f"it nests more than {DEPTH_MAX} deep")
    return decoded


def read_answer_format(_: Parameter, value: Any) -> str | dict[str, Any]:
    """Return the name of a known form of answers, or a form given as a map or its JSON text, or
    raise ValueError.
    """
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        if value and value not in KNOWN_FORMS:
            raise ValueError(f"{shorten(value)} is not one of {', '.join(KNOWN_FORMS)}, or a map")
        return value
    form = read_json(value, ARGUMENTS_BYTES_MAX)
    read_answer_form(form)
    return dict(form)
