"""The size of the CPU backend's work buffer, which llama.cpp's reports leave out.

The CPU backend allocates it at a step, with the size for the operation of the graph that needs the
most. With flash attention it takes a few MB. Without it, all attention weights of a layer are
converted to the type of the values, with which they are multiplied. This adds half of the memory
that the weights themselves take, which are most of the compute buffers.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from llama_cpp import llama_cpp as lib

from ..threads import cpu_function
from .devices import c_function

_pointer, _number = ctypes.c_void_p, ctypes.c_uint32


class _Plan(ctypes.Structure):
    """`ggml_cplan`."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", _pointer),
        ("n_threads", ctypes.c_int),
        ("threadpool", _pointer),
        ("abort_callback", _pointer),
        ("abort_callback_data", _pointer),
        ("use_ref", ctypes.c_bool),
    )


class _Symbol(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", _pointer),
        ("name", ctypes.c_char_p),
        ("address", _pointer),
    )


_reserve = c_function(
    "_Z19llama_graph_reserveP13llama_contextjjj", _pointer, _pointer, *[_number] * 3
)


@cache
def _plan_function() -> Any:
    """Return `ggml_graph_plan`. The backend's registry does not name it, so it is looked up in the
    library that has one of the named functions.
    """
    named = cpu_function(b"ggml_threadpool_new", _pointer, _pointer)
    found = _Symbol()
    ctypes.CDLL(None).dladdr(ctypes.cast(named, _pointer), ctypes.byref(found))
    function = ctypes.CDLL(found.file.decode()).ggml_graph_plan
    function.restype, function.argtypes = _Plan, [_pointer, ctypes.c_int, _pointer]
    return function


def work_bytes(context: Any, logits_max: int = 0) -> int:
    """Return the size of the work buffer for a full batch of *context* at its full depth, with the
    logits of *logits_max* tokens, or at least one of each slot.

    The context must have no layers on devices, because the compute buffers of its graph are
    allocated until the context is freed; on the host they are not touched. If they are larger than
    the machine's memory, which no estimate lets pass, this returns 0.
    """
    slots = lib.llama_n_seq_max(context)
    tokens = min(lib.llama_n_ctx(context), lib.llama_n_ubatch(context))
    graph = _reserve(context, tokens, slots, min(tokens, max(slots, logits_max)))
    if not graph:
        return 0
    threads = max(lib.llama_n_threads(context), lib.llama_n_threads_batch(context))
    return int(_plan_function()(graph, threads, None).work_size)
