"""Python functions as tools: their definitions for the model, and its calls of them; and Python
types of answers: the type's JSON schema before the turn, the instance after it.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from ...backends.errors import InvalidAnswer, InvalidArgument
from .connection.driver import Driver
from .texts import Reply, ToolCall

Tool: TypeAlias = "Callable[..., object] | Mapping[str, Any]"
"""A function, or a definition as OpenAI has it, whose calls the program answers."""
ERROR_CHARACTERS_MAX = 1000
"""Characters of an error that the model gets as the result of its call."""
_OMITTED = object()
_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):?\s*$|:\w+"
)
_GOOGLE = re.compile(r"(\s+)(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(\w+):\s*(.*)$")
log = logging.getLogger("inferd.client")


class Function(NamedTuple):
    """A function with its definition; *arguments* is the struct of its parameters."""

    call: Callable[..., object]
    definition: dict[str, Any]
    arguments: type[msgspec.Struct]


class Functions:
    """The *tools* of a call: functions, and definitions without one.

    :raises InvalidArgument: a function cannot be a tool, or two tools have the same name.
    """

    def __init__(self, tools: Sequence[Tool]):
        self.definitions: list[Mapping[str, Any]] = []
        self._functions: dict[str, Function] = {}
        self._others: set[str] = set()
        for tool in tools:
            if callable(tool):
                function = function_of(tool)
                name = function.definition["function"]["name"]
                if name in self._functions:
                    raise InvalidArgument(f"two tools are called {name!r}", hint="rename one")
                self._functions[name] = function
                self.definitions.append(function.definition)
            else:
                self._others.add(str((tool.get("function") or {}).get("name")))
                self.definitions.append(tool)

    def __bool__(self) -> bool:
        return bool(self._functions)

    def check_driver(self, driver: Driver) -> None:
        """Check that *driver* can run the functions.

        :raises InvalidArgument: one is a coroutine function, and the driver blocks.
        """
        for name, function in self._functions.items():
            if inspect.iscoroutinefunction(function.call) and not driver.runs_coroutines:
                raise InvalidArgument(
                    f"{name} is a coroutine function, which a synchronous client cannot run",
                    hint="use AsyncClient, or a function without async",
                )

    def answer_all(self, calls: Sequence[ToolCall]) -> bool:
        """Return whether all *calls* are answered here; the program answers definitions."""
        return not any(call.name in self._others for call in calls)

    async def answer(self, call: ToolCall, driver: Driver) -> str:
        """Return the result of a call as the model gets it: a text, JSON, or an error's text."""
        function = self._functions.get(call.name)
        if function is None:
            names = ", ".join(self._functions)
            return _error_text(f"there is no function {call.name!r}; the functions are {names}")
        try:
            given = msgspec.json.decode(call.arguments or "{}", type=function.arguments)
        except msgspec.DecodeError as exc:
            return _error_text(f"invalid arguments: {exc}")
        values = {name: getattr(given, name) for name in given.__struct_fields__}
        values = {name: value for name, value in values.items() if value is not _OMITTED}
        try:
            if inspect.iscoroutinefunction(function.call):
                return _result_text(await function.call(**values))
            return _result_text(await driver.run_in_thread(lambda: function.call(**values)))
        except Exception as exc:  # the model gets it, and can correct its arguments
            log.warning("tool.failed name=%s", call.name, exc_info=exc)
            return _error_text(f"{type(exc).__name__}: {exc}")


def _error_text(text: str) -> str:
    return f"error: {text}"[:ERROR_CHARACTERS_MAX]


def _result_text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError):
        return str(value)


def definitions_of(tools: Sequence[Tool] | str) -> Sequence[Mapping[str, Any]] | str:
    """Return *tools* with the definitions of functions in their places."""
    return tools if isinstance(tools, str) else Functions(tools).definitions


def function_of(call: Callable[..., object]) -> Function:
    """Return a function as a tool: its name, its docstring, and its parameters' types.

    :raises InvalidArgument: it has no name, or parameters that a model cannot give by name.
    """
    name = getattr(call, "__name__", "")
    if not inspect.isroutine(call) or not name.isidentifier():
        raise InvalidArgument(
            f"{call!r} has no name by which a model can call it",
            hint="pass a function that is defined with def",
        )
    about, descriptions = read_docstring(inspect.getdoc(call) or "")
    try:
        arguments = _arguments_of(call, name, descriptions)
        (found,), types = msgspec.json.schema_components(
            (arguments,), ref_template="#/$defs/{name}"
        )
    except (TypeError, ValueError, NameError) as exc:
        raise InvalidArgument(
            f"the function {name} cannot be a tool: {exc}",
            hint="annotate its parameters with types that JSON has, as dataclasses of them",
        ) from None
    parameters = types.pop(found["$ref"].removeprefix("#/$defs/"))
    del parameters["title"]
    if types:
        parameters["$defs"] = types
    described = {"name": name, "description": about, "parameters": parameters}
    return Function(call, {"type": "function", "function": described}, arguments)


def _arguments_of(
    call: Callable[..., object], name: str, descriptions: Mapping[str, str]
) -> type[msgspec.Struct]:
    """Return the struct of a function's parameters; those with a default may be missing."""
    hints = get_type_hints(call, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"its parameter {parameter} has no name, or is not one")
        hint = hints.get(parameter.name, Any)
        kind = _described(hint, descriptions.get(parameter.name, ""))
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            omitted = msgspec.field(default_factory=lambda: _OMITTED)
            fields.append((parameter.name, kind, omitted))
    return msgspec.defstruct(f"_{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)


def _described(hint: Any, description: str) -> Any:
    """Return a type with the text of its `Annotated`, or else with *description*."""
    texts = [text for text in get_args(hint)[1:] if isinstance(text, str)]
    if get_origin(hint) is Annotated and texts:
        description = " ".join(texts)
    return Annotated[hint, msgspec.Meta(description=description)] if description else hint


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's description, and those of parameters in Google's or Sphinx's form."""
    about: list[str] = []
    found: dict[str, str] = {}
    section, name, indent = "", "", 0
    for line in text.splitlines():
        sphinx, google = _SPHINX.match(line), _GOOGLE.match(line)
        if heading := _SECTION.match(line):
            section, name = heading[1] or "field", ""
            if sphinx:
                name, found[sphinx[1]] = sphinx[1], sphinx[2]
        elif not section:
            about.append(line)
        elif (
            section in ("Args", "Arguments", "Parameters")
            and google
            and (not name or len(google[1]) <= indent)
        ):
            indent, name = len(google[1]), google[2]
            found[name] = google[3]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return "\n".join(about).strip(), found


T = TypeVar("T")
_CUT = ("length", "context_full", "time")
"""Stop reasons of answers that are cut off."""


def schema_of(kind: type) -> dict[str, Any]:
    """Return the JSON schema of *kind*: a pydantic model, a dataclass, a struct of msgspec, or any
    other type that msgspec knows.

    :raises InvalidArgument: it has none.
    """
    pydantic = getattr(kind, "model_json_schema", None)
    try:
        found: dict[str, Any] = msgspec.json.schema(kind) if pydantic is None else pydantic()
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(
            f"{kind!r} has no JSON schema: {exc}",
            hint="pass a struct of msgspec, a dataclass or a pydantic model, or `json_schema`",
        ) from None
    return found


def read_answer(reply: Reply, kind: type[T]) -> T:
    """Return the JSON of *reply* as an instance of *kind*.

    :raises InvalidAnswer: it is not complete JSON, or does not fit.
    """
    text = str(reply)  # msgspec takes no subclass
    pydantic = getattr(kind, "model_validate_json", None)
    try:
        found: T = msgspec.json.decode(text, type=kind) if pydantic is None else pydantic(text)
    except ValueError as exc:  # the base of the errors of msgspec and pydantic
        reason = reply.metadata.get("stop_reason") or ""
        cut = f"was cut off ({reason}) and " if reason in _CUT else ""
        raise InvalidAnswer(
            f"the answer {cut}is not a {kind.__name__}: {' '.join(str(exc).split())}",
            hint="raise n_predict, or shorten the schema" if cut else "",
            data={"text": text, "stop_reason": reason},
        ) from None
    return found
