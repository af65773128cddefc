"""Decisions on memory and admission happen in one step of the event loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from inferd.daemon.models.loader import Loader
from inferd.daemon.residency.reservations import Reservations
from inferd.daemon.residency.residency import Residency

WAITING = {
    *("admit", "try_admit", "unload_unused", "_keep_advancing", "_load_for_tasks", "_resume"),
    *(
        "_reserve_embedding_memory",
        "_run_encoder",
        "_run_worker",
        "_wait_admitted",
        "_wait_for_remains",
    ),
    "_wait_loaded",
}
"""The methods of the loader that wait, or contain a request."""
FUNCTIONS: list[Callable[..., Any]] = [
    function
    for owner in (Loader, Reservations, Residency)
    for name, function in inspect.getmembers(owner, inspect.isfunction)
    if owner is not Loader or name not in WAITING
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_no_decision_is_separated_from_its_record_by_an_await(
    function: Callable[..., Any],
) -> None:
    assert not inspect.iscoroutinefunction(function)
    assert not inspect.isasyncgenfunction(function)
