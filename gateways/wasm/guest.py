"""A guest in this process: the calls of wasi-nn, which block its thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, TypeVar

from .. import guests
from .blocking import run

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(
    method: Callable[Concatenate[guests.Guest, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Guest, P], R]:
    def call(self: Guest, /, *arguments: P.args, **keywords: P.kwargs) -> R:
        return run(method(self.calls, *arguments, **keywords))

    update_wrapper(call, method)
    return call


class Guest:
    """The graphs and contexts of one guest. Owned by the guest's thread.

    Each method raises the error whose number the guest gets. `in_call`: whether a call is under
    way; only then may a signal's handler raise an exception. `ended_by` is an exception that has
    ended a component, of which wasmtime passes on only the text.
    """

    def __init__(self, calls: guests.Guest):
        self.calls, self.in_call = calls, False
        self.ended_by: BaseException | None = None

    load = _blocking(guests.Guest.load)
    load_by_name = _blocking(guests.Guest.load_by_name)
    unload = _blocking(guests.Guest.unload)
    init_execution_context = _blocking(guests.Guest.init_execution_context)
    finalize_execution_context = _blocking(guests.Guest.finalize_execution_context)
    set_input = _blocking(guests.Guest.set_input)
    compute = _blocking(guests.Guest.compute)
    compute_tensors = _blocking(guests.Guest.compute_tensors)
    prompt_compute = _blocking(guests.Guest.prompt_compute)
    compute_single = _blocking(guests.Guest.compute_single)
    fini_single = _blocking(guests.Guest.fini_single)
    get_output = _blocking(guests.Guest.get_output)
    get_output_single = _blocking(guests.Guest.get_output_single)
    close = _blocking(guests.Guest.close)

    def computes_tensors(self, context: int) -> bool:
        """Return whether the model of a context computes tensors."""
        return self.calls.computes_tensors(context)

    def check_deadline(self) -> None:
        """Check that the guest may still run.

        :raises Timeout: the guest's deadline has passed.
        """
        self.calls.remote.link.check_deadline()

    def disconnect(self) -> None:
        """Close the client if it has replaced the caller's; the daemon then frees its handles."""
        run(self.calls.remote.link.close())
