"""The calls of the protocol, one function each, by subject.

Each function takes the daemon and a request and returns a result struct of `ipc.messages`, or
raises an error of the tree.
"""

from ..core import CallTable
from . import (
    answers,
    contexts,
    embed_texts,
    graphs,
    model_operations,
    monitoring,
    session_operations,
    texts,
    turns,
)
from .residency_requests import admitted

__all__ = ("ALL_CALLS",)

_CALLS: CallTable = {
    **graphs.CALLS,
    **contexts.CALLS,
    **turns.CALLS,
    **answers.CALLS,
    **embed_texts.CALLS,
    **texts.CALLS,
    **session_operations.CALLS,
    **model_operations.CALLS,
    **monitoring.CALLS,
}
ALL_CALLS: CallTable = {name: admitted(name, call) for name, call in _CALLS.items()}
