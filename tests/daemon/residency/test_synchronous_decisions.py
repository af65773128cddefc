"""Decisions on memory and admission happen in one step of the event loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from inferd.daemon.models.worker_events import WorkerEvents
from inferd.daemon.models.worker_launcher import WorkerLauncher
from inferd.daemon.residency.budget import MemoryBudget
from inferd.daemon.residency.gate import ResidencyGate
from inferd.daemon.residency.reservations import PendingLoads, Reservations
from inferd.daemon.residency.residency import Residency

DECIDERS = (MemoryBudget, PendingLoads, Reservations, Residency)
FUNCTIONS: list[Callable[..., Any]] = [
    *(f for owner in DECIDERS for _, f in inspect.getmembers(owner, inspect.isfunction)),
    ResidencyGate.advance,
    ResidencyGate.note_worker_exited,
    ResidencyGate._end,
    WorkerEvents.decide_load,
    WorkerLauncher.start_worker,
    WorkerLauncher.exchange_models,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_no_decision_is_separated_from_its_record_by_an_await(
    function: Callable[..., Any],
) -> None:
    assert not inspect.iscoroutinefunction(function)
    assert not inspect.isasyncgenfunction(function)
