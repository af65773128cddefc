"""The models that are offered to people, and the one with which a chat begins."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.ipc.client import ModelInfo
from inferd.ipc.model_names import offered_models, preferred_model


def model(name: str, need: int | None = None, state: str = "cold", **more: Any) -> ModelInfo:
    found: Any = {"name": name, "backend": "llama", "state": state, "need_bytes": need, **more}
    return found  # type: ignore[no-any-return]


ECHO = model("echo", backend="echo")
SLOW = model("slow", backend="echo", state="ready")
SMALL, LARGE = model("small", 100), model("large", 900)
MEMORY = {"load_free_bytes": 400, "load_evictable_bytes": 200}


@pytest.mark.parametrize(
    ("models", "options", "names"),
    [
        ([], {}, []),
        ([ECHO, SMALL, SLOW, LARGE], {}, ["small", "large"]),
        ([ECHO, SMALL], {"test_models": True}, ["echo", "small"]),
        ([ECHO, SLOW, SMALL], {"named": {"echo", "other"}}, ["echo", "small"]),
        ([ECHO, SLOW], {}, ["echo", "slow"]),
        ([ECHO, SLOW], {"named": {"echo"}}, ["echo"]),
    ],
)
def test_test_models_are_offered_only_on_request_or_without_others(
    models: list[ModelInfo], options: dict[str, Any], names: list[str]
) -> None:
    assert [found["name"] for found in offered_models(models, **options)] == names


@pytest.mark.parametrize(
    ("models", "memory", "name"),
    [
        ([], MEMORY, None),
        ([ECHO, SLOW], MEMORY, None),
        ([ECHO, SMALL, LARGE], MEMORY, "small"),
        ([SMALL, LARGE], {"load_free_bytes": 700, "load_evictable_bytes": 200}, "large"),
        ([SMALL, LARGE], {}, "large"),
        ([LARGE, model("medium", 700)], MEMORY, "medium"),
        ([LARGE, SMALL, model("used", None, "ready", size_bytes=50)], MEMORY, "used"),
        ([SMALL, model("failed", 200, "failed")], MEMORY, "small"),
        ([model("failed", 200, "failed")], MEMORY, "failed"),
        ([SMALL, model("file", None, size_bytes=500)], MEMORY, "file"),
        ([SMALL, model("encoder", 90, "ready", info={"generates": False})], MEMORY, "small"),
        ([model("encoder", 90, "ready", info={"generates": False})], MEMORY, None),
    ],
)
def test_a_loaded_model_is_preferred_or_else_the_largest_that_fits(
    models: list[ModelInfo], memory: dict[str, int], name: str | None
) -> None:
    assert preferred_model(models, memory) == name
