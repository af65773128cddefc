"""The models that are offered to people, and the one with which a chat begins.

A test model repeats its prompt, so that the first answer to a new user would be their own question.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # completion in shells would wait for the client library
    from .client.results import ModelInfo

M = TypeVar("M", bound=Mapping[str, object])
TEST_BACKEND = "echo"


def is_test_model(model: Mapping[str, object]) -> bool:
    """Return whether a model has no weights and is for tests."""
    return model.get("backend") == TEST_BACKEND


def offered_models(
    models: Sequence[M], *, named: Collection[str] = (), test_models: bool = False
) -> list[M]:
    """Return those of *models* that are offered to people: all but the test models, except those
    that a setting has *named*. If there are no other models, or with *test_models*, these are all.
    """
    offered = [m for m in models if not is_test_model(m) or m["name"] in named]
    return list(models) if test_models or not offered else offered


def preferred_model(models: Sequence[ModelInfo], memory: Mapping[str, Any]) -> str | None:
    """Return the model with which a chat begins unless its user has chosen one: a loaded one, else
    the largest that fits into the *memory* of the daemon's statistics, else the smallest. Return
    None if there are only test models, or models that generate no text.
    """
    usable = [m for m in models if not is_test_model(m) and _generates(m)]
    loaded = [m for m in usable if m["state"] == "ready"]
    fitting = loaded or [m for m in usable if _fits(m, memory)]
    if fitting:
        return max(fitting, key=_need_bytes)["name"]
    return min(usable, key=_need_bytes)["name"] if usable else None


def _generates(model: ModelInfo) -> bool:
    """Return whether a model generates text, which is known once it has been loaded."""
    return bool((model.get("info") or {}).get("generates", True))


def _fits(model: ModelInfo, memory: Mapping[str, Any]) -> bool:
    """Return whether a model can be loaded; its last load may have failed for another reason."""
    free = memory.get("load_free_bytes")
    if model["state"] == "failed":
        return False
    return free is None or _need_bytes(model) <= free + memory.get("load_evictable_bytes", 0)


def _need_bytes(model: ModelInfo) -> int:
    """Return the memory of the next load, or at least the size of the file."""
    return int(model.get("need_bytes") or model.get("size_bytes") or 0)
