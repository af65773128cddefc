"""Paths of the real models for tests."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from inferd.backends.llama.llama_log import capture

__all__ = (
    "ONE_THREAD",
    "fast_smollm2",
    "first_blocks_of_smollm2",
    "gemma3",
    "magika",
    "short_smollm2",
    "smollm2",
    "write_first_blocks",
    "written_once",
)

ONE_THREAD = "[defaults]\nthreads = 1\n"
"""Configuration of a daemon for real models. With two threads, one other busy process makes each
step take ten times as long, and the waiting thread takes CPU time meanwhile."""
_CACHE = Path(__file__).resolve().parent.parent / ".cache"
_BLOCKS, _BLOCKS_KEPT = 30, 4


def smollm2() -> Path:
    """Return SmolLM2 135M Instruct: plain attention, with a chat template."""
    return _model("smollm2-135m-instruct.gguf")


def magika() -> Path:
    """Return magika, a graph in ONNX that finds the types of files, from its PyPI package."""
    spec = importlib.util.find_spec("magika")
    assert spec is not None and spec.origin is not None
    [file] = Path(spec.origin).parent.glob("models/standard_v3_*/model.onnx")
    return file


def fast_smollm2() -> Path:
    """Return SmolLM2 with weights of 8 bits instead of 4: its answers make sense, too, and prompts
    take half of the time.
    """
    return _made("smollm2-q8_0.gguf", _to_eight_bits)


def short_smollm2() -> Path:
    """Return SmolLM2 with 4 of its 30 blocks, for tests in which no text has to make sense: prompts
    take an eighth of the time, and answers a quarter. Its best two tokens are often close.
    """
    return first_blocks_of_smollm2(_BLOCKS_KEPT)


def first_blocks_of_smollm2(count: int) -> Path:
    """Return SmolLM2 with the first *count* of its 30 blocks."""

    def write(file: Path) -> None:
        write_first_blocks(smollm2(), file, count, _BLOCKS)

    return written_once(f"smollm2-{count}-blocks.gguf", write)


def write_first_blocks(source: Path, file: Path, count: int, of: int) -> None:
    """Write the first *count* of the *of* blocks of a model, with all else that it has."""
    capture()
    params = lib.llama_model_quantize_default_params()
    params.only_copy = True
    dropped = (*range(count, of), -1)
    params.prune_layers = (ctypes.c_int32 * len(dropped))(*dropped)
    assert (
        lib.llama_model_quantize(os.fsencode(source), os.fsencode(file), ctypes.byref(params)) == 0
    )


def _made(name: str, make: Callable[[Any], None]) -> Path:
    """Return a variant of SmolLM2, with the parameters that *make* sets."""

    def quantize(file: Path) -> None:
        capture()
        params = lib.llama_model_quantize_default_params()
        make(params)
        names = os.fsencode(smollm2()), os.fsencode(file)
        assert lib.llama_model_quantize(*names, ctypes.byref(params)) == 0

    return written_once(name, quantize)


def written_once(name: str, write: Callable[[Path], None]) -> Path:
    """Return a variant of a model, which *write* writes unless an earlier run of the tests has."""
    target = _CACHE / "tests" / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, name)
            write(made)
            made.rename(target)
    return target


def _to_eight_bits(params: Any) -> None:
    params.ftype, params.allow_requantize = lib.LLAMA_FTYPE_MOSTLY_Q8_0, True


def gemma3() -> Path:
    """Return Gemma 3 270M: a sliding window of 512 tokens, a vocabulary of 262 k."""
    return _model("gemma-3-270m.gguf")


def _model(file: str) -> Path:
    path = Path(os.environ.get("INFERD_TEST_MODELS") or _CACHE / "models") / file
    # The test is not skipped: a run without the models would look as if it had passed.
    assert path.is_file(), f"the test model {path} is missing: run `make models`"
    return path
