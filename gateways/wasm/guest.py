"""A guest in this process: the calls of wasi-nn, which block its thread.

The calls of a guest are coroutines. Here their client is a blocking one, so that none of them ever
suspends; `run` steps a coroutine once to get its result, without an event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from .. import guests
from ..guests import DaemonLink

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient, Client

R = TypeVar("R")


def run(call: Coroutine[Any, Any, R]) -> R:
    """Return the result of a call that never suspends."""
    try:
        call.send(None)
    except StopIteration as end:
        return cast("R", end.value)
    call.close()
    raise AssertionError("a blocking call has suspended")


class BlockingLink(DaemonLink):
    """The connection of a guest whose calls block its thread. Owned by that thread."""

    def __init__(self, client: Client, connect: Callable[[], Client], timeout_s: float | None):
        super().__init__(_as_async(client), lambda: _as_async(connect()), timeout_s)
        self.exclusive = nullcontext()

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt to connect."""
        _sleep(seconds)


_sleep = time.sleep  # no event loop waits for it


def _as_async(client: Client) -> AsyncClient:
    """Return the calls of *client* as the coroutines that it runs itself, which block and never
    suspend. Without the client's wrappers, a guest's token takes less time.
    """
    return client._asynchronous


P = ParamSpec("P")


def _blocking(
    method: Callable[Concatenate[guests.Guest, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Guest, P], R]:
    def call(self: Guest, /, *arguments: P.args, **keywords: P.kwargs) -> R:
        coroutine = method(self.calls, *arguments, **keywords)
        try:
            return run(coroutine)
        finally:  # Ctrl-C may come before it has begun, which Python would warn of
            coroutine.close()

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

    def set_images(self, context: int, images: Sequence[bytes]) -> None:
        """Set the images for the next prompts of a context."""
        self.calls.set_images(context, images)

    def check_deadline(self) -> None:
        """Check that the guest may still run.

        :raises Timeout: the guest's deadline has passed.
        """
        self.calls.remote.link.check_deadline()

    def disconnect(self) -> None:
        """Close the client if it has replaced the caller's; the daemon then frees its handles."""
        run(self.calls.remote.link.close())
