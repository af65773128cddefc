"""Python functions as tools: definitions from signatures and docstrings, and results of calls."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import anyio.to_thread
import msgspec
import pytest

from inferd import InvalidArgument, Reply, Timeout, ToolCall
from inferd.ipc.client.connection.driver import run_blocking
from inferd.ipc.client.functions import (
    ERROR_CHARACTERS_MAX,
    Functions,
    function_of,
    read_docstring,
)
from inferd.ipc.client.tool_rounds import ToolRounds, run_rounds, with_next_choice


class Sky(enum.Enum):
    CLEAR = "clear"
    RAIN = "rain"


class Place(TypedDict):
    city: str


@dataclass
class Range:
    low: float
    high: float = 40.0


class Unit(msgspec.Struct):
    name: Literal["celsius", "kelvin"]


def forecast(
    place: Place,
    days: int,
    unit: Unit,
    span: Range | None = None,
    skies: list[Sky] = [],  # noqa: B006 - as programs have it
    weights: dict[str, float] = {},  # noqa: B006
    note: Annotated[str, "For people."] = "",
    *,
    exact: bool = False,
) -> str:
    """Return the weather of the next days.

    It is only a guess.

    Args:
        place: Where.
        days (int): How many days,
            at most seven.
        note: Not used, since the annotation has one.

    Returns:
        A text.
    """
    return f"{place['city']} {days} {unit.name} {span} {skies} {weights} {note!r} {exact}"


def parameters_of(call: Callable[..., object]) -> dict[str, Any]:
    found: dict[str, Any] = function_of(call).definition["function"]["parameters"]
    return found


class BlockingThread:
    """A driver that blocks."""

    runs_coroutines = False

    async def run_in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def result_of(tools: Functions, name: str, arguments: str) -> str:
    return run_blocking(tools.answer(ToolCall("i", name, arguments), BlockingThread()))  # type: ignore[arg-type]


def test_a_function_is_described_by_its_signature_and_docstring() -> None:
    definition = function_of(forecast).definition
    assert definition["type"] == "function"
    function = definition["function"]
    assert function["name"] == "forecast"
    assert function["description"] == "Return the weather of the next days.\n\nIt is only a guess."
    parameters = function["parameters"]
    assert parameters["type"] == "object" and not parameters["additionalProperties"]
    assert parameters["required"] == ["place", "days", "unit"]
    fields = parameters["properties"]
    assert fields["days"] == {
        "type": "integer", "description": "How many days, at most seven."
    }  # fmt: skip
    assert fields["place"]["description"] == "Where."
    assert fields["note"] == {"type": "string", "description": "For people."}
    assert fields["exact"] == {"type": "boolean"}
    assert fields["skies"] == {"type": "array", "items": {"$ref": "#/$defs/Sky"}}
    assert fields["weights"] == {"type": "object", "additionalProperties": {"type": "number"}}
    types = parameters["$defs"]
    assert types["Sky"]["enum"] == ["clear", "rain"]
    assert types["Place"]["required"] == ["city"]
    assert types["Range"]["required"] == ["low"]
    assert types["Unit"]["properties"]["name"] == {"enum": ["celsius", "kelvin"]}


def test_arguments_become_the_types_of_the_parameters_and_defaults_stay() -> None:
    tools = Functions([forecast])
    arguments = (
        '{"place": {"city": "Oslo"}, "days": 2, "unit": {"name": "kelvin"},'
        ' "span": {"low": -4}, "skies": ["rain"], "exact": true}'
    )
    assert result_of(tools, "forecast", arguments) == (
        "Oslo 2 kelvin Range(low=-4.0, high=40.0) [<Sky.RAIN: 'rain'>] {} '' True"
    )


def bare(a, b=1):  # type: ignore[no-untyped-def]
    return {"a": a, "b": b}


def test_a_function_without_annotations_takes_any_values() -> None:
    assert parameters_of(bare)["properties"] == {"a": {}, "b": {}}
    assert parameters_of(bare)["required"] == ["a"]
    assert result_of(Functions([bare]), "bare", '{"a": [1]}') == '{"a":[1],"b":1}'


def nothing() -> None:
    """Do nothing."""


def test_a_function_without_parameters_and_result_has_an_empty_object() -> None:
    assert parameters_of(nothing)["properties"] == {}
    assert result_of(Functions([nothing]), "nothing", "") == "null"


class Shop:
    def price(self, item: str) -> float:
        return float(len(item))


def test_a_method_is_described_without_self() -> None:
    shop = Shop()
    assert list(parameters_of(shop.price)["properties"]) == ["item"]
    assert result_of(Functions([shop.price]), "price", '{"item": "tea"}') == "3.0"


def test_a_decorated_function_is_described_by_the_inner_one() -> None:
    @functools.wraps(forecast)
    def counted(*args: Any, **kwargs: Any) -> str:
        return "counted " + forecast(*args, **kwargs)

    assert parameters_of(counted) == parameters_of(forecast)


def positional(a: int, /) -> int:
    return a


def several(*numbers: int) -> int:
    return sum(numbers)


def unknown_type(a: Callable[[], int]) -> int:
    return a()


def of_a_missing_type(a: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (positional, "its parameter a: 'int'"),
        (several, "numbers"),
        (unknown_type, "not supported"),
        (of_a_missing_type, "'Missing' is not defined"),
        (lambda a: a, "has no name"),
        (Shop, "has no name"),
        (functools.partial(forecast, days=1), "has no name"),
    ],
)
def test_a_function_that_cannot_be_called_by_name_is_refused(
    call: Callable[..., object], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        Functions([call])
    assert caught.value.hint


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="two tools are called 'nothing'"):
        Functions([nothing, nothing])


def failing(text: str) -> None:
    raise ValueError(text)


def exiting() -> None:
    raise KeyboardInterrupt


def test_errors_are_results_of_bounded_size() -> None:
    tools = Functions([failing, forecast, exiting])
    assert (
        result_of(tools, "failing", '{"text": "no such city"}') == "error: ValueError: no such city"
    )
    long = result_of(tools, "failing", f'{{"text": "{"x" * 5000}"}}')
    assert len(long) == ERROR_CHARACTERS_MAX
    unknown = result_of(tools, "guess", "{}")
    assert (
        unknown
        == "error: there is no function 'guess'; the functions are failing, forecast, exiting"
    )
    for arguments, problem in (
        ('{"text": 1}', "Expected `str`, got `int` - at `$.text`"),
        ("{}", "missing required field `text`"),
        ('{"text": "a", "more": 1}', "unknown field `more`"),
        ('{"text": ', "invalid arguments"),
    ):
        found = result_of(tools, "failing", arguments)
        assert found.startswith("error: invalid arguments: ") and problem in found
    with pytest.raises(KeyboardInterrupt):
        result_of(tools, "exiting", "{}")


def test_results_that_are_not_json_are_texts() -> None:
    def strange() -> object:
        return range(3)

    assert result_of(Functions([strange]), "strange", "{}") == "range(0, 3)"


async def delayed() -> str:
    return await anyio.to_thread.run_sync(str, "x")


def test_a_driver_that_blocks_runs_no_coroutine_functions() -> None:
    with pytest.raises(InvalidArgument, match="delayed is a coroutine function"):
        Functions([delayed]).check_driver(BlockingThread())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", {})),
        ("One line.", ("One line.", {})),
        ("A.\n\nArgs:\n    a: first\n      and more\n    b (str): second: yes\nRaises:\n    E: c",
         ("A.", {"a": "first and more", "b": "second: yes"})),
        ("A.\n\n:param int a: first\n    and more\n:param b: second\n:returns: c",
         ("A.", {"a": "first and more", "b": "second"})),
    ],
)  # fmt: skip
def test_docstrings_of_google_and_sphinx_are_read(
    text: str, expected: tuple[str, dict[str, str]]
) -> None:
    assert read_docstring(text) == expected


class Turns:
    """A chat whose answers are calls of `nothing`; it records the prompts and the keywords."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.keywords: list[dict[str, Any]] = []

    async def __call__(self, prompt: Any, keywords: Any) -> Reply:
        self.prompts.append(prompt)
        self.keywords.append(keywords)
        return Reply("", tool_calls=[ToolCall(f"id{len(self.prompts)}", "nothing", "{}")])


def rounds_of(turn: Turns, rounds_max: int, timeout_s: float) -> Reply:
    rounds = ToolRounds(BlockingThread(), rounds_max, timeout_s)  # type: ignore[arg-type]
    return run_blocking(run_rounds(turn, "x", {"tools": [nothing], "temp": 0}, rounds))


def test_rounds_send_results_until_the_last_one_which_permits_no_call() -> None:
    turn = Turns()
    assert [call.id for call in rounds_of(turn, 2, math.inf).tool_calls] == ["id3"]
    result = {"role": "tool", "name": "nothing", "content": "null"}
    assert turn.prompts == [
        "x",
        [result | {"tool_call_id": "id1"}],
        [result | {"tool_call_id": "id2"}],
    ]
    assert [each.get("tool_choice") for each in turn.keywords] == [None, None, "none"]
    assert {each["temp"] for each in turn.keywords} == {0}


def test_the_timeout_is_for_all_rounds() -> None:
    turn = Turns()
    with pytest.raises(Timeout, match="with 1 rounds") as caught:
        rounds_of(turn, 8, 0.0)
    assert caught.value.data == {"timeout": "total"} and len(turn.prompts) == 1


ONLY = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("keywords", "last", "choice"),
    [
        ({}, False, None),
        ({}, True, "none"),
        ({"tool_choice": "required"}, False, "auto"),
        ({"tool_choice": NAMED}, False, "auto"),
        ({"tool_choice": "auto"}, False, "auto"),
        ({"tool_choice": ONLY}, False, ONLY),
        ({"tool_choice": ONLY}, True, "none"),
        ({"options": {"tool-choice": "required", "temp": 0}}, False, "auto"),
        ({"options": {"tool_choice": "required"}, "tool_choice": "auto"}, False, "auto"),
    ],
)
def test_a_required_call_is_required_once_and_the_last_turn_has_none(
    keywords: dict[str, Any], last: bool, choice: object
) -> None:
    found = with_next_choice(keywords, last=last)
    assert found.get("tool_choice") == choice
    assert "temp" not in keywords.get("options", {}) or found["options"] == {"temp": 0}
