"""The threads that a context's steps are computed on: they spin within a step and sleep between
steps.

llama.cpp's own (`ggml_threadpool`), made by the CPU backend's registry as its programs make them.
OpenMP's, which it is built with by default, spin on after a step, for as long as they would wait
within one: then the daemon and its clients find no core but the worker's, and the worker waits
until the step's tokens are told. Where llama.cpp was built with OpenMP all the same, it computes on
OpenMP's threads, and the ones here are never started.
"""

from __future__ import annotations

import ctypes
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
def _cpu_function(name: bytes, result: Any, *arguments: Any) -> Any:
    """Return a function of the CPU backend, which may have been loaded at run time. Not to be asked
    for while modules are imported: the first to ask makes llama.cpp look for GPUs, and talk.
    """
    device = c_function("ggml_backend_dev_by_type", _pointer, ctypes.c_int)(_CPU)
    backend = c_function("ggml_backend_dev_backend_reg", _pointer, _pointer)(device)
    find = c_function("ggml_backend_reg_get_proc_address", _pointer, _pointer, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(backend, name))


_defaults = c_function("ggml_threadpool_params_init", None, ctypes.POINTER(_Params), ctypes.c_int)
_attach = c_function("llama_attach_threadpool", None, _pointer, _pointer, _pointer)


def _new(params: _Params) -> int:
    new = _cpu_function(b"ggml_threadpool_new", _pointer, ctypes.POINTER(_Params))
    return int(new(ctypes.byref(params)))


def _free(pool: int) -> None:
    _cpu_function(b"ggml_threadpool_free", None, _pointer)(pool)


class ComputeThreads:
    """The threads of one context, as many as it was made for. Owned by the context's thread.

    They begin with a step. While `changing`, `begin` is due before the next one, and `settle` once
    it went well: as llama.cpp turns to other threads, it pauses the ones before, which must still
    be there.
    """

    def __init__(self, context: Any):
        self._context = ctypes.cast(context, _pointer)
        self._count = int(lib.llama_n_threads(context))
        self._pools: list[tuple[int, int]] = []
        """How many, and llama.cpp's pool of them, the present one last."""
        self.changing = True

    def use(self, count: int) -> None:
        """Compute on *count* threads from the next step on, the caller's among them."""
        self._count = max(1, count)
        self.changing = True

    def begin(self) -> None:
        """Begin the threads that the next step is to use."""
        if self._pools and self._pools[-1][0] == self._count:
            return
        params = _Params()
        _defaults(ctypes.byref(params), self._count)
        params.poll = 0
        pool = _new(params)
        self._pools.append((self._count, pool))
        _attach(self._context, pool, pool)
        lib.llama_set_n_threads(self._context, self._count, self._count)

    def settle(self) -> None:
        """End the threads that the last step has no longer used."""
        self.changing = False
        while len(self._pools) > 1:
            _free(self._pools.pop(0)[1])

    def close(self) -> None:
        """End the threads, once the context is freed; twice is once."""
        while self._pools:
            _free(self._pools.pop()[1])
