"""A worker's adapters: loaded with the model, added and removed while it runs.

The thread that owns the model calls these functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ...backends import AdapterSpec, InferdError, Model
from ...backends.adapter_keys import split_key
from ...backends.errors import Busy
from .. import messages as m
from ..task import Task

RETRY_S = 5.0


def load_adapters(model: Model, specs: Iterable[AdapterSpec]) -> list[m.AdapterReport]:
    """Load the adapters of a loaded model. One that fails is reported; the model works without."""
    return [_load_adapter(model, spec) for spec in specs]


def _load_adapter(model: Model, spec: AdapterSpec) -> m.AdapterReport:
    try:
        return m.AdapterReport(spec=spec, info=model.add_adapter(spec))
    except InferdError as exc:
        return m.AdapterReport(spec=spec, error=exc.to_wire())


def add_adapter(model: Model, command: m.AddAdapter) -> m.CommandResult | m.Refused:
    """Load another adapter."""
    loaded = _load_adapter(model, command.spec)
    if loaded.error is not None:
        return m.Refused(command.id, loaded.error)
    return m.CommandResult(command.id, msgspec.to_builtins(loaded.info))


def uses(keys: Iterable[str], adapter_id: str) -> bool:
    """Return whether *keys* name the adapter."""
    return any(split_key(key)[0] == adapter_id for key in keys)


def in_use(command: m.RemoveAdapter, users: Sequence[Task]) -> m.Refused:
    """Return the refusal to remove an adapter that *users* have."""
    error = Busy(
        f"{len(users)} turns use the adapter",
        hint="wait until they are done, or give force: then they fail",
        data={"tasks": len(users), "retry_after_s": RETRY_S},
    )
    return m.Refused(command.id, error.to_wire())
