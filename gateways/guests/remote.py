"""A guest's connection to the daemon: new clients after a restart, the guest's deadline, and its
graphs and contexts, opened again when the daemon has lost them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec

from ...backends.errors import ConnectionLost, InferdError, SessionExpired, ShuttingDown, Timeout
from ...backends.tensors import DeclaredTensors, NamedTensor, TensorInfo
from ...ipc import messages as w
from ...ipc.client.large_tensors import Inputs, LargeTensors, Place
from ...ipc.messages import METADATA_INDEX
from .graphs import GuestContext, GuestGraph, as_message, as_tensor, is_large

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient
    from ...ipc.names import Priority

R = TypeVar("R")
CALL_S_MAX = 3600.0
"""The longest time of a call, also for a guest without a deadline."""
RECONNECT_S_MAX = 30.0
"""The time in which a daemon that restarts has to answer again."""
_PAUSE_S = 0.05


def guest_timeout(seconds: float) -> Timeout:
    """Return the error for a guest that has reached its deadline."""
    return Timeout(f"the guest ran longer than {seconds:g} s", hint="raise the guest's timeout")


class DaemonLink:
    """The client of one guest; a new one replaces it when its connection was lost.

    `generation` counts the clients, because a handle is valid for one client only. `exclusive` is
    held for steps that concurrent calls must not repeat: connecting, and opening graphs again.
    """

    exclusive: AbstractAsyncContextManager[object]

    def __init__(
        self,
        client: AsyncClient,
        connect: Callable[[], AsyncClient],
        timeout_s: float | None = None,
    ):
        self.client, self.generation, self.exclusive = client, 0, anyio.Lock()
        self._given, self._connect = client, connect
        self._guest_s_max = math.inf if timeout_s is None else timeout_s
        self._deadline = time.monotonic() + self._guest_s_max

    @property
    def timeout_s(self) -> float:
        """The time that a call may take now.

        :raises Timeout: the guest's deadline has passed.
        """
        self.check_deadline()
        return min(CALL_S_MAX, max(0.001, self._deadline - time.monotonic()))

    def check_deadline(self) -> None:
        """Check that the guest may still run.

        :raises Timeout: the guest's deadline has passed.
        """
        if time.monotonic() >= self._deadline:
            raise guest_timeout(self._guest_s_max)

    async def call(self, action: Callable[[AsyncClient], Awaitable[R]]) -> R:
        """Return the result of *action*; repeat it with a new client when the connection was lost.

        :raises ConnectionLost: no daemon answered within `RECONNECT_S_MAX`.
        """
        until = 0.0
        while True:
            generation, began = self.generation, time.monotonic()
            try:
                return await action(self.client)
            except (ConnectionLost, ShuttingDown) as exc:
                lost = time.monotonic()
                if not until or lost - began > RECONNECT_S_MAX:
                    until = lost + RECONNECT_S_MAX
                async with self.exclusive:
                    if generation == self.generation:  # no other call has connected again
                        await self._reconnect(until, exc)

    async def _reconnect(self, until: float, cause: InferdError) -> None:
        """Wait until a daemon accepts a connection, as one that is shutting down still does.

        :raises InferdError: none did by the time *until*; the error is *cause*.
        """
        while True:
            self.check_deadline()
            if time.monotonic() >= until:
                raise cause
            await self.pause(_PAUSE_S)
            await self.close()
            self.client, self.generation = self._connect(), self.generation + 1
            with suppress(ConnectionLost, ShuttingDown):
                await self.client.open()
                return

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt to connect."""
        await anyio.sleep(seconds)

    async def close(self) -> None:
        """Close the client, unless it is the one that the caller passed."""
        if self.client is not self._given:
            with suppress(InferdError):
                await self.client.aclose()


_LOST = (ConnectionLost, ShuttingDown, SessionExpired)


class Remote:
    """Calls to the daemon for one guest's graphs and contexts.

    A restart of the daemon voids all handles, and an idle context expires. The next call opens the
    context again, with its parameters and its prompt.
    """

    def __init__(self, link: DaemonLink, priority: Priority):
        self.link, self.priority = link, priority

    async def load_graph(self, graph: GuestGraph) -> None:
        """Load the model of a graph."""
        await self.link.call(lambda client: self._graph(client, graph))

    async def open_context(self, context: GuestContext) -> None:
        await self.link.call(lambda client: self._context(client, context))

    async def call(
        self, context: GuestContext, action: Callable[[AsyncClient, int, float], Awaitable[R]]
    ) -> R:
        """Return the result of *action*, which gets a client, the context's handle and a timeout.
        *action* is repeated if the daemon has lost the context.
        """

        async def act(client: AsyncClient) -> R:
            handle = await self._context(client, context)
            return await action(client, handle, self.link.timeout_s)

        try:
            return await self.link.call(act)
        except SessionExpired:
            context.generation = -1
            return await self.link.call(act)

    async def declared_tensors(self, context: GuestContext) -> DeclaredTensors:
        """Return the inputs and outputs of a context's graph; none of a model that takes any."""
        graph = context.graph

        async def act(client: AsyncClient, handle: int, timeout_s: float) -> DeclaredTensors:
            shown = await client.show(graph.model, timeout=timeout_s)
            info: Mapping[str, Any] = shown["info"] or {}
            found = (
                msgspec.convert(info.get(key) or (), tuple[TensorInfo, ...])
                for key in ("inputs", "outputs")
            )
            return DeclaredTensors(*found)

        if graph.declared is None:
            graph.declared = await self.call(context, act)
        return graph.declared

    async def compute_tensors(
        self, context: GuestContext, inputs: Sequence[NamedTensor]
    ) -> list[NamedTensor]:
        """Return the outputs of *inputs*, of which the large ones pass through buffers."""
        messages = [(name, as_message(tensor)) for name, tensor in inputs]

        async def names() -> list[str]:
            return [info.name for info in (await self.declared_tensors(context)).outputs]

        async def act(client: AsyncClient, handle: int, timeout_s: float) -> dict[str, w.Tensor]:
            async def compute(inputs: Inputs, places: Sequence[Place]) -> dict[str, w.Tensor]:
                result = await client.compute(
                    handle, inputs, places=places, priority=self.priority, timeout=timeout_s
                )
                return dict(result.outputs)

            graph = context.graph
            if graph.large is None:
                graph.large = LargeTensors(client.buffer, client._driver.run_in_thread)
            return await graph.large.compute(messages, compute, names)

        found = await self.call(context, act)
        return [(name, as_tensor(message)) for name, message in found.items()]

    async def read_output(self, context: GuestContext, index: int) -> bytes:
        """Return an output of the last turn."""
        return await self.call(context, lambda c, handle, s: c.get_output(handle, index, timeout=s))

    async def set_input(self, context: GuestContext, index: int, value: bytes | w.Tensor) -> None:
        await self.call(context, lambda c, handle, s: c.set_input(handle, index, value, timeout=s))

    async def clear_output(self, context: GuestContext) -> None:
        """End the turn of a context and discard its output."""
        await self.call(context, lambda c, handle, s: c.fini_single(handle, timeout=s))

    async def close_context(self, context: GuestContext) -> None:
        """Close a context, if the daemon still has it."""
        if context.generation == self.link.generation:
            with suppress(*_LOST):
                await self.link.client.finalize_execution_context(
                    context.handle, timeout=self.link.timeout_s
                )
            context.generation = -1

    async def unload_graph(self, graph: GuestGraph, *, keep: bool = False) -> None:
        """End the lease on a graph's model, if the daemon still has it."""
        if graph.generation == self.link.generation:
            with suppress(*_LOST):
                await self.link.client.unload(graph.handle, keep=keep, timeout=self.link.timeout_s)
            graph.generation = -1

    async def _graph(self, client: AsyncClient, graph: GuestGraph) -> int:
        generation = self.link.generation
        if graph.generation != generation:
            async with self.link.exclusive:  # two contexts of one graph load it once
                if graph.generation != generation:
                    loaded = await graph.load(client, self.link.timeout_s)
                    graph.handle, graph.tensors = int(loaded), loaded.tensors
                    graph.model, graph.declared, graph.large = loaded.model, None, None
                    graph.generation = generation
        return graph.handle

    async def _context(self, client: AsyncClient, context: GuestContext) -> int:
        """Return the daemon's handle of a context, which is opened first if the daemon lacks it.

        The text so far of an unfinished turn becomes part of the prompt. A context that has to wait
        for a place does so in the guest's priority class. If a call fails or is cancelled here, the
        next call completes the opening.
        """
        generation = self.link.generation
        if context.generation != generation:
            graph = await self._graph(client, context.graph)
            timeout_s = self.link.timeout_s
            context.handle = await client.init_execution_context(
                graph, priority=self.priority, queue_timeout=timeout_s, timeout=timeout_s
            )
            context.generation, context.has_inputs = generation, False
        if not context.has_inputs:
            await self._restore_inputs(client, context)
            context.has_inputs = True
        return context.handle

    async def _restore_inputs(self, client: AsyncClient, context: GuestContext) -> None:
        handle = context.handle
        for data in list(context.settings):
            await client.set_input(handle, METADATA_INDEX, data, timeout=self.link.timeout_s)
        context.prefix = (context.text or b"") if context.in_turn else b""
        if context.prompt is not None:
            prompt = context.prompt + context.prefix
            await client.set_input(handle, 0, prompt, timeout=self.link.timeout_s)
        small = {index: one for index, one in context.tensors.items() if not is_large(one)}
        for index, tensor in small.items():
            await client.set_input(handle, index, as_message(tensor), timeout=self.link.timeout_s)
