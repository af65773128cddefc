"""The measurement of a model, stage by stage, within a time: the process that measures, and the
load of other programs on the machine, which distorts a measurement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec
import psutil

from ...backends.errors import BackendError, Timeout, error_from_wire
from ...backends.llama.measuring import requests as m
from ...backends.llama.measuring.requests import KvLoss, Opened, Variant
from ...backends.model_spec import ModelSpec
from ...backends.sandbox import SandboxEnded, SandboxProcess
from ...backends.tuning_choice import Probe, Sample, Setting
from ...scheduler.policy.tuning import FIRST_MIX
from ..workers.cores import busy_s, own_s
from .stages import (
    SHARES,
    Stage,
    StageResult,
    is_decided,
    kv_name,
    result_of,
    runs_of,
    stage_of,
)

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


IDLE_CORES_MAX = 0.2
"""The load of other programs, in cores, that hardly distorts times."""
WINDOW_S = 0.5


class OtherPrograms:
    """Measures the cores that other programs keep busy. Owned by one thread."""

    def __init__(
        self,
        seconds: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        busy: Callable[[], float] = busy_s,
        own: Callable[[], float] | None = None,
    ):
        self._seconds, self._sleep, self._busy = seconds, sleep, busy
        self._own = own or _own_and_children_s
        self.restart()

    def restart(self) -> None:
        """Begin a period."""
        self._begin = self._seconds(), self._busy(), self._own()

    def cores(self) -> float:
        """Return the mean number of busy cores since the period's begin."""
        at, busy, own = self._begin
        passed = self._seconds() - at
        if passed <= 0:
            return 0.0
        return max(0.0, (self._busy() - busy) - (self._own() - own)) / passed

    def wait_until_idle(self, seconds_max: float, on_busy: Callable[[float], None]) -> float:
        """Wait until other programs are idle, but no longer than *seconds_max*; return their load
        in the end. *on_busy* is called once with their load before a wait.
        """
        deadline = self._seconds() + seconds_max
        is_first = True
        while True:
            self.restart()
            self._sleep(WINDOW_S)
            load = self.cores()
            if load <= IDLE_CORES_MAX or self._seconds() >= deadline:
                return load
            if is_first:
                on_busy(load)
                is_first = False


def _own_and_children_s() -> float:
    """Return the CPU seconds of this process and of those that it has started."""
    here = psutil.Process()
    pids = [os.getpid(), *(child.pid for child in here.children(recursive=True))]
    ended = here.cpu_times()
    return sum(own_s(pids).values()) + ended.children_user + ended.children_system


LOSS_SHARE = 0.5
"""The part of the last stage's time that may be used for the losses of KV states."""
QUICK_ROUNDS = 5
QUICK_PROMPT = Probe("prompt", 1, 64, 0)
"""A quarter of a prompt: the shortest that flash attention computes in tiles."""
QUICK_COUNTS = {**FIRST_MIX, "prompt": 4 * FIRST_MIX["prompt"]}
"""The usual mix of steps, with four quarters for each prompt."""
Progress = Callable[[str, float], None]


class Runner(Protocol):
    """A loaded model that runs probes: a `MeasuringProcess`, or a model of given times in tests."""

    def run_probe(self, probe: Probe, variant: Variant, until: float) -> float | None:
        """Return the seconds of one step, or None if *until* passes first."""

    def measure_losses(self, variants: list[Variant], until: float) -> list[KvLoss]:
        """Return the losses of the variants' KV states; empty if *until* passes first."""

    def close_contexts(self) -> None:
        """Free the contexts of the probes so far."""


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all stages, and the setting that they choose."""

    present: Variant
    chosen: Setting
    stages: list[StageResult]
    seconds: float


def measure_model(
    runner: Runner,
    opened: Opened,
    spec: ModelSpec,
    present: Variant,
    cores: int,
    seconds: float,
    on_progress: Progress,
    names: Collection[str] = tuple(SHARES),
    clock: Callable[[], float] = time.monotonic,
) -> TuneResult:
    """Measure the stages *names* of the model that *runner* has opened, for *seconds* in all; begin
    with the setting that is *present*.
    """
    begin = clock()
    end = begin + seconds
    chosen, results = present, list[StageResult]()
    left = {name: share for name, share in SHARES.items() if name in names}
    while left:
        share = next(iter(left.values())) / sum(left.values())
        name = next(iter(left))
        del left[name]
        stage = stage_of(
            name,
            chosen,
            opened.probes,
            cores=cores,
            batch_size=spec.batch_size,
            ctx_size=opened.ctx_size,
            cache_types=opened.cache_types,
            seconds=max(0.0, (end - clock()) * share),
        )
        if len(stage.variants) < 2 or not stage.probes:
            continue

        def report(name: str = name) -> None:
            on_progress(name, min(1.0, (clock() - begin) / seconds))

        result = _measure_stage(runner, stage, report, clock)
        results.append(result)
        if name != "kv":
            chosen = result.chosen
    return TuneResult(
        present=present, chosen=chosen.setting, stages=results, seconds=clock() - begin
    )


def _measure_stage(
    runner: Runner, stage: Stage, report: Callable[[], None], clock: Callable[[], float]
) -> StageResult:
    begin = clock()
    until = begin + stage.seconds
    runner.close_contexts()
    losses: dict[str, KvLoss] = {}
    if stage.name == "kv":
        report()
        variants = stage.variants[1:]
        found = runner.measure_losses(variants, begin + LOSS_SHARE * stage.seconds)
        losses = dict(zip(map(kv_name, variants), found, strict=False))
    samples: list[Sample] = []
    complete = 0
    for number, probe, variant in runs_of(stage):
        if number > complete + 1:
            complete += 1
            if is_decided(result_of(stage, samples, clock() - begin)):
                break
        report()
        seconds = runner.run_probe(probe, variant, until)
        if seconds is None:
            break
        samples.append(Sample(variant, probe.name, seconds))
    return result_of(stage, samples, clock() - begin, losses=losses)


def measure_attention(
    runner: Runner,
    opened: Opened,
    present: Variant,
    until: float,
    clock: Callable[[], float] = time.monotonic,
) -> StageResult | None:
    """Compare both kinds of attention by few short steps; return None if that takes until *until*,
    because the steps that are missing could change the choice.
    """
    begin = clock()
    stage = stage_of(
        "flash-attn",
        present,
        [QUICK_PROMPT if probe.name == QUICK_PROMPT.name else probe for probe in opened.probes],
        cores=1,
        batch_size=1,
        ctx_size=0,
        cache_types=(),
        seconds=max(0.0, until - begin),
    )
    samples: list[Sample] = []
    for _, probe, variant in runs_of(stage, QUICK_ROUNDS, by_probe=True):
        seconds = runner.run_probe(probe, variant, until)
        if seconds is None:
            return None
        samples.append(Sample(variant, probe.name, seconds))
    return result_of(stage, samples, clock() - begin, QUICK_COUNTS)
