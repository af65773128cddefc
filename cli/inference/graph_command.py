"""`inferd run` of a graph: inputs from files or numbers, and its outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from ...backends.errors import InvalidArgument
from ...backends.tensors import STRING, shape_text
from ...ipc.client import Tensor
from ...ipc.client.arrays import converted_tensor, numbers_of, type_name_of
from ...ipc.names import Priority
from ..client import client_of, repeat_refused
from ..output import fraction_bar, table, write_json
from ..starting import start_on_demand
from .array_files import read_array, write_arrays

if TYPE_CHECKING:
    from ...ipc.client import TensorGraph

VALUES_MAX = 8
"""An output with more values is summarized."""
_FIRST = 4
_CHARACTERS_MAX = 100
"""The most characters that are printed of a string."""
ARRAY_SUFFIX = ".npy"


def split_inputs(pairs: Sequence[str]) -> dict[str, str]:
    """Return the NAME=VALUE pairs of `--input`.

    :raises typer.BadParameter: one is not such a pair, or a name is given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals or not text:
            raise typer.BadParameter(
                f"--input {pair!r} is not of the form NAME=FILE.npy or NAME=[1, 2]"
            )
        if name in found:
            raise typer.BadParameter(f"--input {name} is given twice")
        found[name] = text
    return found


def run_graph(
    model: str,
    inputs: Mapping[str, str],
    output: Path | None,
    *,
    priority: Priority,
    label: str,
    timeout: float,
    socket: Path | None,
    as_json: bool,
) -> None:
    """Compute a graph's outputs, and print them or write them to *output*."""
    from ..model_arguments import known_model

    # Files are read first, because a load takes longer.
    values = {name: _value_of(name, text) for name, text in inputs.items()}
    start_on_demand(socket, model)
    with client_of(socket, label=label) as client:
        with fraction_bar(f"loading {model}", show=not as_json) as report:
            name = known_model(client, model, None, report)
            graph = repeat_refused(client.graph(name).open)
        with graph:
            found = _compute(graph, values, priority, timeout)
    places = [] if output is None else write_arrays(output, list(found.items()))
    _print_outputs(model, found, places, as_json=as_json)


def _compute(
    graph: TensorGraph, values: Mapping[str, Any], priority: Priority, timeout: float
) -> dict[str, Tensor]:
    declared = {info.name: info for info in graph.inputs}
    fitting = {
        name: converted_tensor(value, declared[name])
        if isinstance(value, Tensor) and name in declared
        else value
        for name, value in values.items()
    }
    return repeat_refused(lambda: graph.run_tensors(fitting, priority=priority, timeout=timeout))


def _value_of(name: str, text: str) -> Any:
    """Return the value of `--input`: an array in a file, or numbers or strings in JSON.

    :raises InvalidArgument: it is neither.
    """
    path = Path(text).expanduser()
    if text.endswith(ARRAY_SUFFIX) or path.is_file():
        return read_array(path)
    try:
        return msgspec.json.decode(text, type=list[Any] | float | int | bool | str)
    except msgspec.DecodeError:
        raise InvalidArgument(
            f"--input {name}: {text[:100]!r} is neither a file nor numbers or strings in JSON",
            hint=f"{name}=FILE.npy, {name}=[[1, 2], [3, 4]], or '{name}=[\"text\"]'",
        ) from None


def _print_outputs(
    model: str, outputs: Mapping[str, Tensor], places: Sequence[str], *, as_json: bool
) -> None:
    rows = [(name, type_name_of(t), tuple(t.dimensions)) for name, t in outputs.items()]
    if as_json:
        keys = ("name", "type", "shape", "file" if places else "data")
        last = places or [_nested(tensor) for tensor in outputs.values()]
        documents = [
            dict(zip(keys, (*row, value), strict=True))
            for row, value in zip(rows, last, strict=True)
        ]
        write_json({"model": model, "outputs": documents})
        return
    texts = places or [values_text(tensor) for tensor in outputs.values()]
    table(
        ("OUTPUT", "TYPE", "SHAPE", "FILE" if places else "VALUES"),
        [
            (name, kind, shape_text(shape), text)
            for (name, kind, shape), text in zip(rows, texts, strict=True)
        ],
    )


def _nested(tensor: Tensor) -> Any:
    """Return the values in lists of lists, by the shape."""
    values: list[Any] = list(numbers_of(tensor))
    if not tensor.dimensions:
        return values[0]
    if not values:
        return []
    for size in reversed(tensor.dimensions[1:]):
        values = [values[at : at + size] for at in range(0, len(values), size)]
    return values


def values_text(tensor: Tensor) -> str:
    """Return the values for people: all if they are few, else the first, and of numbers the least
    and the largest with its place.
    """
    values = numbers_of(tensor)
    if not len(values):
        return "none"
    if len(values) <= VALUES_MAX:
        return " ".join(map(_number_text, values))
    first = " ".join(map(_number_text, values[:_FIRST]))
    if type_name_of(tensor) == STRING:
        return f"{first} …; {len(values)} strings"
    numbers = [value for value in values if value == value]
    if not numbers:
        return f"{first} …, all NaN"
    largest = max(numbers)
    place = shape_text(_place(list(values).index(largest), tensor.dimensions))
    mean = math.fsum(numbers) / len(numbers) if all(map(math.isfinite, numbers)) else math.nan
    return (
        f"{first} …; min {_number_text(min(numbers))}, max {_number_text(largest)} at {place},"
        f" mean {_number_text(mean)}"
    )


def _place(index: int, dimensions: Sequence[int]) -> list[int]:
    found: list[int] = []
    for size in reversed(dimensions):
        index, at = divmod(index, size)
        found.append(at)
    return found[::-1]


def _number_text(value: float | str) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _CHARACTERS_MAX else f"{value[:_CHARACTERS_MAX]}…")
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
