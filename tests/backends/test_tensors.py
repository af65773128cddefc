"""Tensors that are arrays of numbers, and those that hold a text."""

from __future__ import annotations

import pytest

from inferd.backends import LanguageModel, ModelSpec, TensorModel, load_model
from inferd.backends.errors import BackendError, InvalidArgument, TooLarge
from inferd.backends.tensors import (
    OTHER_TYPES,
    STRINGS_MAX,
    TENSOR_TYPES,
    Tensor,
    TensorInfo,
    check_index,
    match_inputs,
    pack_strings,
    unpack_strings,
)


@pytest.mark.parametrize(
    ("kind", "dimensions", "size", "expected"),
    [
        ("fp32", (1, 3, 224, 224), 602_112, True),
        ("fp16", (4,), 8, True),
        ("i64", (2, 1), 16, True),
        ("u8", (4,), 4, False),
        ("fp64", (1,), 8, False),
        ("fp64", (), 8, False),
        ("fp64", (8,), 8, False),
        ("i32", (0,), 0, False),
        ("bf16", (3,), 2, False),
    ],
)
def test_numbers_have_a_shape_that_fits(
    kind: str, dimensions: tuple[int, ...], size: int, expected: bool
) -> None:
    assert Tensor(bytes(size), dimensions, TENSOR_TYPES[kind]).holds_numbers == expected


def test_an_unknown_type_holds_no_numbers() -> None:
    assert not Tensor(bytes(8), (8,), 100).holds_numbers


def test_the_echo_model_is_of_both_kinds_and_returns_its_inputs() -> None:
    spec = ModelSpec(name="echo", backend="echo", options={"fail_at_step": 2})
    model = load_model(spec, lambda _: True)
    assert isinstance(model, LanguageModel) and isinstance(model, TensorModel)
    assert model.info.computes_tensors and model.info.generates
    inputs = [("before", Tensor(bytes(16), (2, 2), 1)), ("text", Tensor(b"hi", (), 3))]
    assert model.compute(inputs) == inputs
    with pytest.raises(BackendError):
        model.compute(inputs)
    model.close()


IMAGE = TensorInfo("image", "u8", ("n", 2, 2))
RATE = TensorInfo("rate", "i64", ())
ANY = TensorInfo("any", "fp32", None)
DECLARED = (IMAGE, RATE, ANY)
PIXELS = Tensor(bytes(4), (1, 2, 2), TENSOR_TYPES["u8"])
NUMBER = Tensor(bytes(8), (), TENSOR_TYPES["i64"])
VECTOR = Tensor(bytes(8), (2,), TENSOR_TYPES["fp32"])


def test_inputs_are_matched_by_name_or_by_index() -> None:
    given = [("2", VECTOR), ("image", PIXELS), ("1", NUMBER)]
    assert match_inputs(DECLARED, given) == list(
        zip(DECLARED, (PIXELS, NUMBER, VECTOR), strict=True)
    )


def test_the_name_of_an_input_precedes_the_index_of_another_one() -> None:
    declared = TensorInfo("1", "u8", None), TensorInfo("0", "u8", None)
    first, second = Tensor(b"a", (1,)), Tensor(b"b", (1,))
    assert [t for _, t in match_inputs(declared, [("1", first), ("0", second)])] == [first, second]
    check_index(declared, 1, second)


@pytest.mark.parametrize("number", [TENSOR_TYPES["u8"], 2, 4])
def test_the_bytes_show_which_type_a_number_means(number: int) -> None:
    [(_, tensor)] = match_inputs([IMAGE], [("image", Tensor(bytes(8), (2, 2, 2), number))])
    assert tensor.type == TENSOR_TYPES["u8"]


@pytest.mark.parametrize(
    ("kind", "number", "size"),
    [("i32", 3, 4), ("i32", 5, 4), ("bf16", 3, 2), ("i64", 6, 8), ("fp64", 2, 8), ("bool", 200, 1)],
)
def test_numbers_of_other_hosts_are_read_by_the_declared_type(
    kind: str, number: int, size: int
) -> None:
    info = TensorInfo("x", kind, ("n",))
    [(_, tensor)] = match_inputs([info], [("x", Tensor(bytes(2 * size), (2,), number))])
    assert tensor.type == (TENSOR_TYPES | OTHER_TYPES)[kind]
    with pytest.raises(InvalidArgument, match="bytes"):
        match_inputs([info], [("x", Tensor(bytes(2 * size + 1), (2,), number))])


def test_a_scalar_has_no_dimensions_or_one_element() -> None:
    for dimensions in ((), (1,)):
        [(_, tensor)] = match_inputs([RATE], [("rate", Tensor(bytes(8), dimensions, 5))])
        assert tensor.dimensions == ()
    with pytest.raises(InvalidArgument):
        match_inputs([RATE], [("rate", Tensor(bytes(8), (1, 1), 5))])


def test_an_input_may_have_no_elements() -> None:
    [(_, tensor)] = match_inputs([IMAGE], [("image", Tensor(b"", (0, 2, 2), 3))])
    assert tensor.dimensions == (0, 2, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"'image' \(u8 \[n, 2, 2\]\) is missing"),
        ([("image", PIXELS)], r"'rate' \(i64 \[\]\) is missing"),
        ([("other", PIXELS)], "no input 'other'"),
        ([("3", PIXELS)], "no input '3'"),
        ([("-1", PIXELS)], "no input '-1'"),
        ([("٣", PIXELS)], "no input"),
        ([("image", PIXELS), ("0", PIXELS)], "'image'.* given twice"),
        ([("image", VECTOR)], r"'image' \(u8 .* got a tensor of fp32"),
        ([("image", Tensor(bytes(4), (1, 2, 2), 77))], "got a tensor of type 77"),
        ([("image", Tensor(bytes(4), (2, 2), 3))], r"\[n, 2, 2\]\) got the shape \[2, 2\]"),
        ([("image", Tensor(bytes(4), (1, 4, 1), 3))], r"got the shape \[1, 4, 1\]"),
        ([("image", Tensor(bytes(4), (-1, 2, 2), 3))], r"got the shape \[-1, 2, 2\]"),
        ([("image", Tensor(bytes(5), (1, 2, 2), 3))], "got 5 bytes of u8 .* has 4 bytes as u8"),
        ([("any", Tensor(bytes(8), (-1, -2), 1))], r"got the shape \[-1, -2\]"),
        ([("any", Tensor(bytes(8), (1 << 60,) * 100, 1))], "got 8 bytes"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_both_sides(
    given: list[tuple[str, Tensor]], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        match_inputs(DECLARED, given)
    assert len(str(caught.value)) < 5000


def test_a_byte_of_a_bool_is_0_or_1() -> None:
    info = TensorInfo("x", "bool", ("n",))
    match_inputs([info], [("x", Tensor(b"\0\1", (2,), OTHER_TYPES["bool"]))])
    with pytest.raises(InvalidArgument, match="other than 0 and 1"):
        match_inputs([info], [("x", Tensor(b"\0\2", (2,), OTHER_TYPES["bool"]))])


TEXTS = TensorInfo("texts", "string", ("n", 2))


def test_strings_are_packed_with_their_lengths() -> None:
    assert pack_strings([b"a", b"", b"bc"]) == b"\1\0\0\0a\0\0\0\0\2\0\0\0bc"
    for strings in ([], [b""], [b"a", b"\xff\0", b"x" * 1000]):
        assert unpack_strings(pack_strings(strings)) == strings
    for damaged in (b"\1", b"\1\0\0\0", b"\0\0\0\0\0", b"\xff\xff\xff\xffa"):
        with pytest.raises(ValueError, match="cut off"):
            unpack_strings(damaged)
    unpack_strings(bytes(4) * STRINGS_MAX)
    with pytest.raises(TooLarge, match=f"more than {STRINGS_MAX} strings"):
        unpack_strings(bytes(4) * (STRINGS_MAX + 1))


def test_a_tensor_of_strings_has_as_many_as_its_shape() -> None:
    number = OTHER_TYPES["string"]
    fitting = Tensor(pack_strings([b"a", b"b"]), (1, 2), number)
    assert match_inputs([TEXTS], [("texts", fitting)]) == [(TEXTS, fitting)]
    empty = Tensor(b"", (0, 2), number)
    assert match_inputs([TEXTS], [("texts", empty)]) == [(TEXTS, empty)]
    for data, dimensions, message in (
        (pack_strings([b"a"]), (1, 2), r"got 1 strings in the shape \[1, 2\]"),
        (pack_strings([b"a"] * 3), (1, 2), "got 3 strings"),
        (b"\1\0\0\0", (1, 2), "a string is cut off"),
        (pack_strings([b"a", b"b"]), (2,), r"got the shape \[2\]"),
        (b"", (1 << 62, 2), "got 0 strings"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            match_inputs([TEXTS], [("texts", Tensor(data, dimensions, number))])
    assert not fitting.holds_numbers
