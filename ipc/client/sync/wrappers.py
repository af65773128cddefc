"""Synchronous wrappers of asynchronous methods, with the same keywords and types."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from .loop_thread import LoopThread

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
S = TypeVar("S")


class SyncObject(Protocol[A_co]):
    """A synchronous object that runs the methods of an asynchronous one on a loop."""

    @property
    def asynchronous(self) -> A_co:
        """The asynchronous object."""

    @property
    def thread(self) -> LoopThread:
        """The thread of the loop."""


def synchronous(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncObject[A], P], R]:
    """Return a method that runs the coroutine function *method* on the client's loop."""

    @functools.wraps(method)
    def call(self: SyncObject[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.thread.run_call(method, self.asynchronous, *args, **kwargs)

    return call


def returning_sync_object(
    method: Callable[Concatenate[A, P], R], make: Callable[[LoopThread, R], S]
) -> Callable[Concatenate[SyncObject[A], P], S]:
    """Return a method that calls *method* and passes the asynchronous result to *make*."""

    @functools.wraps(method)
    def call(self: SyncObject[A], /, *args: P.args, **kwargs: P.kwargs) -> S:
        return make(self.thread, method(self.asynchronous, *args, **kwargs))

    signature = inspect.signature(method).replace(return_annotation=make.__name__)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
