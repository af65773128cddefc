"""Cases of tensors: their types, shapes and numbers, and descriptors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..page import LIMITS, TENSOR_TYPES
from ..peer import Connection, check
from ..suite import Server, case, expect, metadata, output, set_input

PROMPT = b"abcdefgh"


@contextmanager
def descriptor(data: bytes) -> Iterator[int]:
    """Yield a descriptor of a file with *data*."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def compute_tensors(connection: Connection, context: int, inputs: list[Any]) -> list[Any]:
    """Compute a turn on named tensors, and return the outputs."""
    return list(connection.call("compute", context=context, inputs=inputs)["outputs"])


def check_echo(outputs: list[Any], inputs: list[Any]) -> None:
    """Check that the outputs are the inputs: names, types as spelled, dimensions and bytes."""
    check(len(outputs) == len(inputs), f"{len(outputs)} outputs for {len(inputs)} inputs")
    defaults = {"data": b"", "dimensions": [], "type": "u8"}
    for (name, tensor), (expected_name, expected) in zip(outputs, inputs, strict=True):
        check(name == expected_name, f"the output {name!r} is where {expected_name!r} should be")
        for key, value in (defaults | expected).items():
            got = tensor.get(key, defaults[key])
            same = got == value or (key == "type" and _is_u8(got) and _is_u8(value))
            check(same, f"the {key} of {name!r} is {got!r:.100}, not {value!r:.100}")


def _is_u8(kind: object) -> bool:
    """Return whether a type is u8, the default of an omitted field."""
    return kind in ("u8", TENSOR_TYPES["u8"])


@case("wasi-nn numbers")
def every_tensor_type_comes_back(server: Server) -> None:
    """A tensor comes back with its type, by its name or number, its shape and its bytes."""
    connection, context = server.connected()
    for name, number in TENSOR_TYPES.items():
        for kind in (name, number):
            inputs = [["prompt", {"data": PROMPT, "dimensions": [2, 4], "type": kind}]]
            check_echo(compute_tensors(connection, context, inputs), inputs)


@case("wasi-nn numbers")
def names_of_types_are_matched_loosely(server: Server) -> None:
    """Names are matched ignoring case, `-` and `_`, and come back as they were spelled."""
    connection, context = server.connected()
    for spelling in ("FP_32", "bf-16", "I64"):
        inputs = [["prompt", {"data": PROMPT, "dimensions": [8], "type": spelling}]]
        check_echo(compute_tensors(connection, context, inputs), inputs)


@case("wasi-nn numbers")
def no_number_of_a_type_is_refused(server: Server) -> None:
    """No number is refused, because hosts have disagreed on them."""
    connection, context = server.connected()
    for number in (7, 100, 255):
        inputs = [["prompt", {"data": b"ab", "dimensions": [2], "type": number}]]
        check_echo(compute_tensors(connection, context, inputs), inputs)


@case("wasi-nn numbers")
def an_unknown_name_of_a_type_is_refused(server: Server) -> None:
    """A type is a name or number of the table; another name is InvalidArgument."""
    connection, context = server.connected()
    inputs = [["prompt", {"data": b"ab", "type": "decimal"}]]
    expect(connection.refusal("compute", context=context, inputs=inputs), "InvalidArgument")


@case("Calls")
def dimensions_are_not_checked(server: Server) -> None:
    """`dimensions` are not checked: only the bytes count."""
    connection, context = server.connected()
    shapes: list[list[int]] = [[], [1], [3, 5, 7], [1 << 32], [2] * 8]
    for shape in shapes:
        inputs = [["prompt", {"data": PROMPT, "dimensions": shape, "type": 1}]]
        check_echo(compute_tensors(connection, context, inputs), inputs)


@case("`compute`")
def no_tensors_give_no_outputs(server: Server) -> None:
    """Without any tensor in `inputs`, the echo model returns none, and computes no turn."""
    connection, context = server.connected()
    result = connection.call("compute", context=context, inputs=[])
    check(result.get("outputs", []) == [], f"the reply is {result!r:.200}")
    check(output(connection, context) == b"", "a turn was computed")


@case("`compute`")
def a_hundred_tensors_come_back(server: Server) -> None:
    """The echo model takes any number of tensors, and returns them in order."""
    connection, context = server.connected()
    kinds = list(TENSOR_TYPES)
    inputs: list[Any] = [
        [f"tensor {i}", {"data": bytes([i]) * (i % 4), "dimensions": [i], "type": kinds[i % 7]}]
        for i in range(1, 101)
    ]
    check_echo(compute_tensors(connection, context, inputs), inputs)


@case("`compute`")
def a_named_tensor_may_hold_parameters(server: Server) -> None:
    """A tensor of type u8 named `metadata` holds parameters, and one of another type a prompt."""
    connection, context = server.connected()
    inputs = [["metadata", {"data": b'{"n-predict": 2}'}], ["question", {"data": PROMPT}]]
    result = connection.call("compute", context=context, inputs=inputs)
    check(result["metadata"]["stop_reason"] == "length", "the parameters were not used")
    check(output(connection, context) == PROMPT[:2], "the parameters were not used")
    connection, context = server.connected()
    inputs = [["config", {"data": b"{", "type": "fp32"}]]
    check_echo(compute_tensors(connection, context, inputs), inputs)


@case("`compute`")
def tensors_may_be_as_many_as_the_limit(server: Server) -> None:
    """One `compute` has at most `INPUTS_MAX` named inputs."""
    connection, context = server.connected()
    tensor = {"data": b"a"}
    inputs: list[Any] = [[f"{i}-th", tensor] for i in range(LIMITS["INPUTS_MAX"])]
    check_echo(compute_tensors(connection, context, inputs), inputs)
    inputs.append(["one more", tensor])
    expect(connection.refusal("compute", context=context, inputs=inputs), "InvalidArgument")


@case("`set_input`")
def any_bytes_of_text_come_back(server: Server) -> None:
    """A prompt is UTF-8 text, used unchanged; bytes that are not UTF-8 become a token each."""
    connection, context = server.connected()
    for data in ("é€😀 <x> \\ \n\t".encode(), bytes(range(1, 256)), b"\x00", b"\xff\xfe"):
        set_input(connection, context, data)
        connection.call("compute", context=context)
        check(output(connection, context) == data, f"{data!r} came back as another text")


@case("`set_input`")
def every_index_but_one_is_the_prompt(server: Server) -> None:
    """Index 1 takes parameters as JSON; any other index takes a prompt."""
    connection, context = server.connected()
    for index in (0, 2, 77):
        set_input(connection, context, b"{}x", index)
        connection.call("compute", context=context)
        check(output(connection, context) == b"{}x", f"index {index} is not the prompt")
    set_input(connection, context, b'{"seed": 77}', 1)
    connection.call("compute", context=context)
    check(metadata(connection, context)["seed"] == 77, "index 1 does not hold parameters")


@case("Descriptors")
def a_tensor_may_be_in_a_descriptor(server: Server) -> None:
    """Each field `fd` of 0 or more takes the next descriptor; the value has no meaning."""
    connection, context = server.connected()
    for value in (0, 99):
        with descriptor(b"from a file") as fd:
            tensor = {"fd": value}
            connection.call("set_input", [fd], context=context, index=0, tensor=tensor)
        connection.call("compute", context=context)
        check(output(connection, context) == b"from a file", "the bytes differ")


@case("Descriptors")
def descriptors_are_taken_in_their_order(server: Server) -> None:
    """Within a request, the tensors of `inputs` take the descriptors in their order."""
    connection, context = server.connected()
    with descriptor(b'{"n-predict": 1}') as first, descriptor(b"xy") as second:
        inputs = [["metadata", {"fd": 0}], ["prompt", {"fd": 0}]]
        result = connection.call("compute", [first, second], context=context, inputs=inputs)
    check(result["outputs"][1][1]["data"] == b"x", "the tensors were exchanged")


@case("Descriptors")
def a_descriptor_that_was_not_sent_is_missed(server: Server) -> None:
    """A request that needs more descriptors than were sent fails with InvalidArgument."""
    connection, context = server.connected()
    params = {"context": context, "index": 0, "tensor": {"fd": 0}}
    expect(connection.refusal("set_input", **params), "InvalidArgument")


@case("Descriptors")
def a_descriptor_of_another_kind_is_refused(server: Server) -> None:
    """For a tensor, the descriptor must be a regular file or memfd."""
    connection, context = server.connected()
    read, write = os.pipe()
    try:
        params = {"context": context, "index": 0, "tensor": {"fd": 0}}
        expect(connection.refusal("set_input", [read], **params), "InvalidArgument")
    finally:
        os.close(read)
        os.close(write)


@case("Descriptors")
def a_tensor_above_the_limit_is_refused(server: Server) -> None:
    """A tensor in a descriptor has at most `tensor_bytes_max` bytes, else TooLarge."""
    connection, context = server.connected()
    with tempfile.TemporaryFile() as file:
        file.truncate(connection.server_hello["limits"]["tensor_bytes_max"] + 1)
        params = {"context": context, "index": 0, "tensor": {"fd": 0}}
        expect(connection.refusal("set_input", [file.fileno()], **params), "TooLarge")
