"""Tensors that are arrays of numbers, and those that hold a text."""

from __future__ import annotations

import pytest

from inferd.backends import LanguageModel, ModelSpec, TensorModel, load_model
from inferd.backends.errors import BackendError
from inferd.backends.tensors import TENSOR_TYPES, Tensor


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
