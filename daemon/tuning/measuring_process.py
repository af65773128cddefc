"""The command's end of the process that measures a model."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from ...backends.errors import BackendError, Timeout, error_from_wire
from ...backends.llama.measuring import requests as m
from ...backends.model_spec import ModelSpec
from ...backends.sandbox import SandboxEnded, SandboxProcess
from ...backends.tuning_choice import Probe

REPLY_S_MAX = 600.0
"""The longest wait for a reply, which is that of a large model's load."""
ReplyT = TypeVar("ReplyT", m.Opened, m.Timed, m.Losses, m.Closed)
_decode = msgspec.msgpack.Decoder(m.Reply).decode


class MeasuringProcess:
    """A process with the weights of one model. It ends with the context. A reply may take
    *reply_s_max*.
    """

    def __init__(self, reply_s_max: float = REPLY_S_MAX) -> None:
        self._process = SandboxProcess(m.PROGRAM, reply_s_max)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.end()

    def open_model(self, spec: ModelSpec, free_bytes: int) -> m.Opened:
        """Load the model of *spec*, if its weights and contexts fit into *free_bytes*.

        :raises InferdError: it cannot be loaded, does not fit, or has no settings to measure.
        """
        return self._request(m.OpenModel(spec, free_bytes), m.Opened)

    def run_probe(self, probe: Probe, variant: m.Variant, until: float) -> float | None:
        """Return the seconds of one step, or None if *until* passes first."""
        return self._request(m.RunProbe(probe, variant, until), m.Timed).seconds

    def measure_losses(self, variants: list[m.Variant], until: float) -> list[m.KvLoss]:
        """Return the losses of the variants' KV states; empty if *until* passes first."""
        types = [(v.cache_type_k, v.cache_type_v) for v in variants]
        return self._request(m.MeasureLoss(types, until), m.Losses).losses

    def close_contexts(self) -> None:
        """Free the contexts of the probes so far."""
        self._request(m.CloseContexts(), m.Closed)

    def _request(self, request: m.Request, kind: type[ReplyT]) -> ReplyT:
        begin = time.monotonic()
        try:
            self._process.send(msgspec.msgpack.encode(request))
            reply = _decode(self._process.receive_reply())
        except (SandboxEnded, ConnectionError) as exc:
            status = exc.status if isinstance(exc, SandboxEnded) else self._process.end()
            raise BackendError(
                f"the process that measures the model has ended with status {status}",
                hint="the file may be damaged: `inferd show NAME` describes it",
            ) from None
        except TimeoutError:
            raise Timeout(
                f"the process that measures the model has not answered for"
                f" {time.monotonic() - begin:.0f} s",
                hint="measure a smaller model, or when the machine is idle",
            ) from None
        if isinstance(reply, m.Failed):
            raise error_from_wire(reply.error)
        assert isinstance(reply, kind), "the process replies to each request by its kind"
        return reply
