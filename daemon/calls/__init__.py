"""The calls of the protocol, one function each, by subject.

Each function takes the daemon and a request and returns a result struct of `ipc.messages`, or
raises an error of the tree. A module's `CALLS` are its functions that have the name of a call.
`IMMEDIATE_CALLS` are those that never wait: the daemon runs them without a task.
"""

from ..core import CallTable, ImmediateCallTable
from . import (
    contexts,
    fair_share,
    monitoring,
    session_operations,
    several_answers,
    states,
    texts,
    turns,
)
from .models import graphs, model_operations
from .models.residency_requests import admitted
from .place_waits import with_place
from .transfers import copies, model_transfers, moving
from .turn_failures import with_failure

__all__ = ("ALL_CALLS", "IMMEDIATE_CALLS")

_NAMED = (
    *(*graphs.CALLS, *contexts.CALLS, *turns.CALLS, *several_answers.CALLS, *texts.CALLS),
    *(*session_operations.CALLS, *states.CALLS, *model_operations.CALLS, *monitoring.CALLS),
    *moving.CALLS,
    *(*copies.CALLS, *model_transfers.CALLS, *fair_share.CALLS),
)
_CALLS: CallTable = {call.__name__: call for call in _NAMED} | {
    "prompt_init": contexts.init_execution_context,
    "close_execution_context": contexts.finalize_execution_context,
    "load_by_name_with_config": graphs.load_by_name,
    "unpin": model_operations.pin,
}
ALL_CALLS: CallTable = {
    name: with_failure(name, with_place(name, admitted(name, call)))
    for name, call in _CALLS.items()
}
IMMEDIATE_CALLS: ImmediateCallTable = {call.__name__: call for call in contexts.IMMEDIATE_CALLS}
