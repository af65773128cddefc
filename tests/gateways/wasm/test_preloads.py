"""The form of --nn-preload."""

from __future__ import annotations

import pytest

from inferd import InferdError
from inferd.gateways.wasm import Preload, parse_preload


@pytest.mark.parametrize(
    ("text", "name", "preload"),
    [
        ("default:GGML:AUTO:smollm2", "default", Preload("smollm2")),
        ("a:ggml:cpu:m", "a", Preload("m", "cpu")),
        ("a:AutoDetect:Gpu:m", "a", Preload("m", "gpu")),
        ("a:GGML:AUTO:x.gguf", "a", Preload("x.gguf", is_file=True)),
        ("a:GGML:AUTO:X.GGUF", "a", Preload("X.GGUF", is_file=True)),
        ("a:GGML:AUTO:/models/a:b", "a", Preload("/models/a:b", is_file=True)),
        ("a:GGML:AUTO:pypi:tiny", "a", Preload("pypi:tiny")),
    ],
)
def test_a_preload_is_read(text: str, name: str, preload: Preload) -> None:
    assert parse_preload(text) == (name, preload)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 1),
        ("default", 1),
        ("default:GGML:AUTO", 1),
        ("default:GGML:AUTO:", 1),
        (":GGML:AUTO:m", 1),
        ("default:PyTorch:AUTO:m", 2),
        ("default:GGML:TPU:m", 6),
    ],
)
def test_a_wrong_preload_is_refused(text: str, number: int) -> None:
    with pytest.raises(InferdError) as caught:
        parse_preload(text)
    assert caught.value.number == number
