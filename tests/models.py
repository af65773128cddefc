"""Paths of the real models for tests."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ("ONE_THREAD", "gemma3", "smollm2")

ONE_THREAD = "[defaults]\nthreads = 1\n"
"""Configuration of a daemon for real models. With two threads, one other busy process makes each
step take ten times as long, and the waiting thread takes CPU time meanwhile."""
_DEFAULT = Path(__file__).resolve().parent.parent / ".cache" / "models"


def smollm2() -> Path:
    """Return SmolLM2 135M Instruct: plain attention, with a chat template."""
    return _model("smollm2-135m-instruct.gguf")


def gemma3() -> Path:
    """Return Gemma 3 270M: a sliding window of 512 tokens, a vocabulary of 262 k."""
    return _model("gemma-3-270m.gguf")


def _model(file: str) -> Path:
    path = Path(os.environ.get("INFERD_TEST_MODELS") or _DEFAULT) / file
    # The test is not skipped: a run without the models would look as if it had passed.
    assert path.is_file(), f"the test model {path} is missing: run `make models`"
    return path
