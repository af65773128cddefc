"""The calls of the protocol, one function each, by groups.

`visits` keeps calls back until their model is in memory, `graphs` loads and unloads, `contexts` has
the wasi-nn calls on execution contexts, `turns` streams and chats, `embedding` makes embeddings,
`branches` makes branches, goes back and forgets, `texts` tokenizes and renders, `control` looks in
and steers, `adapters` adds and removes adapters. Each function takes the daemon and a request and
returns a result struct of `ipc.messages`, or raises an error of the tree.
"""

from ..core import CallTable
from . import adapter_calls as adapters
from . import answers, branches, contexts, control, graphs, texts, turns
from . import embed_texts as embedding
from .residency_requests import passing

__all__ = ("ALL_CALLS",)

_CALLS: CallTable = {}
for _group in (graphs, contexts, turns, embedding, branches, texts, control, adapters, answers):
    _CALLS |= _group.CALLS
ALL_CALLS: CallTable = {name: passing(name, call) for name, call in _CALLS.items()}
