"""The channel of an open graph, by which small computations reach its process past the daemon."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec

from ...backends.errors import (
    ConnectionLost,
    InferdError,
    InvalidArgument,
    TooLarge,
    UnsupportedOperation,
)
from ...wire.frames import FRAME_BYTES_MAX
from .. import messages as w
from ..payloads import traceparent_of
from .caller import retry_delay_s
from .connection.core import ConnectionCore, InFlight
from .large_tensors import Inputs
from .operations import AsyncOperations
from .turn_settings import SchedulingKeywords

CHANNEL_PAUSE_S = 1.0
"""The pause before another channel is opened, after one was refused or closed."""
OPEN_S_MAX = 5.0
"""The longest wait for a channel, after which the daemon computes."""
INPUT_BYTES_MAX = FRAME_BYTES_MAX - (64 << 10)
"""Bytes of the inputs of a computation, beside which a frame has room for their names."""
_KEYWORDS = SchedulingKeywords.__annotations__


class GraphChannel:
    """The channel of an open *graph* of the client's *connection*, which all tasks and threads that
    run the graph share.

    It is opened at the first computation. A computation that it does not answer, because it was
    refused or closed, is the daemon's; after a pause the next one opens another channel.
    """

    def __init__(self, client: AsyncOperations, connection: ConnectionCore, graph: int):
        self._client, self._connection, self._graph = client, connection, graph
        self._channel: ConnectionCore | None = None
        self._opening = client._driver.lock()
        self._open_at = 0.0
        """The time from which a channel may be opened."""

    @property
    def is_open(self) -> bool:
        """Whether there is a channel."""
        return self._channel is not None

    def takes(self, inputs: Inputs, keywords: SchedulingKeywords) -> bool:
        """Return whether a channel may compute *inputs* now: plain tensors that a frame has room
        for, of a call that is not traced.
        """
        if self._channel is None and time.monotonic() < self._open_at:
            return False
        if keywords and not keywords.keys() <= _KEYWORDS.keys():
            return False
        if traceparent_of(keywords.get("traceparent")):
            return False
        size = 0
        for _, tensor in inputs:
            if tensor.kept or tensor.buffer or tensor.fd >= 0:
                return False
            size += len(tensor.data)
        return size <= INPUT_BYTES_MAX

    async def compute(
        self, inputs: Inputs, deadline: float, keywords: SchedulingKeywords
    ) -> dict[str, w.Tensor] | None:
        """Return the outputs of *inputs*, which the channel takes, or None if the daemon has to
        compute them.

        :raises Timeout: they were not computed before the *deadline* (monotonic).
        """
        if self._connection.forked:  # another thread may have had the lock
            return None
        channel = self._channel or await self._open(deadline)
        if channel is None:
            return None
        params: dict[str, Any] = {"inputs": inputs}
        if priority := keywords.get("priority"):
            params["priority"] = priority
        if queue_timeout := keywords.get("queue_timeout"):
            params["queue_timeout_s"] = queue_timeout
        retries = self._client._retries
        while True:
            request = InFlight("compute", deadline)
            try:
                await channel.exchange(request, params)
            except ConnectionLost:
                self._drop(channel)
                return None
            except TooLarge:  # the names of the inputs have no room in a frame
                return None
            finally:
                if not request.done:
                    channel.abandon_request(request)
            error = request.error
            if error is None:
                return self._outputs_of(channel, request)
            if error is channel.loss:
                self._drop(channel)
                return None
            delay_s = retry_delay_s(error, request.remaining_s) if retries > 0 else None
            if delay_s is None:
                request.outcome()
                raise AssertionError("it has failed")
            retries -= 1
            await self._client._driver.sleep(delay_s)

    def _outputs_of(self, channel: ConnectionCore, request: InFlight) -> dict[str, w.Tensor] | None:
        try:
            return dict(msgspec.convert(request.result, w.ComputeResult).outputs)
        except msgspec.ValidationError:  # the process is of another build, or broken
            self._drop(channel)
            return None

    async def _open(self, deadline: float) -> ConnectionCore | None:
        """Open the channel, unless another task or thread has done so or it has to wait."""
        async with self._opening:
            now = time.monotonic()
            if self._channel is not None or now < self._open_at:
                return self._channel
            try:
                timeout = max(0.0, min(OPEN_S_MAX, deadline - now))
                self._channel = await self._connect(timeout)
            except (UnsupportedOperation, InvalidArgument):
                self._open_at = math.inf
            except (InferdError, OSError):  # the process may have too many open files
                self._open_at = time.monotonic() + CHANNEL_PAUSE_S
            if self._open_at == math.inf:  # it was closed meanwhile
                self.close()
            return self._channel

    async def _connect(self, timeout: float) -> ConnectionCore:
        sock = await self._client.open_channel(self._graph, timeout=timeout)
        try:
            return await self._client._driver.open_channel(sock, self._connection)
        except BaseException:
            sock.close()
            raise

    def _drop(self, channel: ConnectionCore) -> None:
        """Close a channel that has failed."""
        if self._channel is channel:
            self._channel = None
            self._open_at = max(self._open_at, time.monotonic() + CHANNEL_PAUSE_S)
        channel.close()

    def close(self) -> None:
        """Close the channel for good; this is safe in `__del__`."""
        self._open_at = math.inf
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
