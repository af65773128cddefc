"""The calls of the protocol, one function each, by subject.

Each function has the name of its call, takes the daemon and a request, and returns a result struct
of `ipc.messages`, or raises an error of the tree. A function that is not a coroutine never waits:
the daemon runs it without a task.
"""

from inspect import getmodule, iscoroutinefunction, isfunction, signature
from types import ModuleType
from typing import Any

from ...ipc.messages import CALLS
from ..core import BeginTable, CallTable, ImmediateCallTable
from . import (
    between_daemons,
    buffers,
    channels,
    contexts,
    jobs,
    media,
    models,
    monitoring,
    session_operations,
    texts,
    turns,
)
from .computations import begin_compute
from .running import with_waits

__all__ = ("ALL_CALLS", "CALLS_WITHOUT_TASK", "IMMEDIATE_CALLS")

_MODULES = (
    models,
    contexts,
    buffers,
    channels,
    turns,
    texts,
    session_operations,
    media,
    jobs,
    monitoring,
    between_daemons,
)


def _is_call(function: Any, module: ModuleType) -> bool:
    """Return whether a value in a module is a public function of the daemon and a request alone."""
    if not isfunction(function) or getmodule(function) is not module:
        return False
    return tuple(signature(function).parameters) == ("daemon", "request")


_functions = {
    name: value
    for module in _MODULES
    for name, value in vars(module).items()
    if not name.startswith("_") and _is_call(value, module)
}
if _functions.keys() != CALLS.keys():
    raise TypeError(f"without a row or a function: {sorted(_functions.keys() ^ CALLS.keys())}")

ALL_CALLS: CallTable = {
    name: with_waits(CALLS[name], function)
    for name, function in _functions.items()
    if iscoroutinefunction(function)
}
IMMEDIATE_CALLS: ImmediateCallTable = {
    name: function for name, function in _functions.items() if name not in ALL_CALLS
}
CALLS_WITHOUT_TASK: BeginTable = {"compute": begin_compute}
"""The beginnings of calls that need no task, if all that they wait for is a worker's answer."""
