"""The compute threads of a context, which sleep between steps.

They are llama.cpp's own (`ggml_threadpool`), created through the CPU backend's registry as its
programs do. llama.cpp's default, OpenMP's threads, keep polling for a while after a step. Meanwhile
the daemon and its clients find no free core, and the worker waits for them. The threads here sleep
as soon as a step has ended (`poll` is 0). If llama.cpp was built with OpenMP, it computes on
OpenMP's threads, and those here are never started.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from llama_cpp import llama_cpp as lib

from .loading.devices import c_function

_CPU = 0
"""`ggml_backend_dev_type`."""
_CORES_MAX = 512
"""`GGML_MAX_N_THREADS`."""
_pointer = ctypes.c_void_p


class _Params(ctypes.Structure):
    """`ggml_threadpool_params`."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * _CORES_MAX),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


@cache
def cpu_function(name: bytes, result: Any, *arguments: Any) -> Any:
    """Return a function of the CPU backend, which may have been loaded at run time.

    Don't call this at import, as the first call makes llama.cpp search for GPUs and log about it.
    """
    device = c_function("ggml_backend_dev_by_type", _pointer, ctypes.c_int)(_CPU)
    backend = c_function("ggml_backend_dev_backend_reg", _pointer, _pointer)(device)
    find = c_function("ggml_backend_reg_get_proc_address", _pointer, _pointer, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(backend, name))


_defaults = c_function("ggml_threadpool_params_init", None, ctypes.POINTER(_Params), ctypes.c_int)
_attach = c_function("llama_attach_threadpool", None, _pointer, _pointer, _pointer)


def _free_pool(pool: int) -> None:
    cpu_function(b"ggml_threadpool_free", None, _pointer)(pool)


class ComputeThreads:
    """The compute threads of one context, initially as many as the context was created with.

    Owned by the context's thread. When llama.cpp switches pools, it pauses the previous pool, which
    must exist until a step with the new pool has succeeded.
    """

    def __init__(self, context: Any):
        self._context = ctypes.cast(context, _pointer)
        self._single_max = int(lib.llama_n_threads(context))
        self._batch_max = int(lib.llama_n_threads_batch(context))
        """The numbers of threads that the context was created with, for steps of one token and of
        several. If they differ, they are upper bounds.
        """
        self._count = max(self._single_max, self._batch_max)
        self._counts = (self._single_max, self._batch_max)
        """The numbers of threads that llama.cpp uses, for steps of one token and of several."""
        self._pools: list[tuple[int, int]] = []
        """Thread counts and llama.cpp's pools, the current one last."""

    def set_count(self, count: int) -> None:
        """Compute on *count* threads, the caller's included, from the next step on."""
        self._count = max(1, count)

    def set_counts(self, single: int, batch: int) -> None:
        """Compute steps of one token on *single* threads and others on *batch*, from the next on,
        whatever the context was created with.
        """
        self._single_max, self._batch_max = single, batch
        self.set_count(max(single, batch))

    def attach_pool(self) -> None:
        """Start the threads of the next step."""
        self._attach_pool()
        single = batch = self._count
        if self._single_max != self._batch_max:
            single, batch = min(single, self._single_max), min(batch, self._batch_max)
        if self._counts != (single, batch):
            self._counts = (single, batch)
            lib.llama_set_n_threads(self._context, single, batch)

    def _attach_pool(self) -> None:
        if self._pools and self._pools[-1][0] == self._count:
            return
        params = _Params()
        _defaults(ctypes.byref(params), self._count)
        params.poll = 0  # sleep at once when a step has ended, without polling for the next
        new = cpu_function(b"ggml_threadpool_new", _pointer, ctypes.POINTER(_Params))
        pool = int(new(ctypes.byref(params)))
        self._pools.append((self._count, pool))
        _attach(self._context, pool, pool)

    def decode(self, batch: Any) -> int:
        """Compute a batch on these threads; return the result of `llama_decode`."""
        return self._compute(lib.llama_decode, batch)

    def encode(self, batch: Any) -> int:
        """Encode a batch on these threads; return the result of `llama_encode`."""
        return self._compute(lib.llama_encode, batch)

    def _compute(self, function: Callable[[Any, Any], int], batch: Any) -> int:
        self.attach_pool()
        result = int(function(self._context, batch))
        lib.llama_synchronize(self._context)  # a device's fault belongs to the step
        while result == 0 and len(self._pools) > 1:
            _free_pool(self._pools.pop(0)[1])
        return result

    def close(self) -> None:
        """Stop the threads after the context was freed; a second call does nothing."""
        while self._pools:
            _free_pool(self._pools.pop()[1])
