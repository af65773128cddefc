"""Scenario of a graph that embeds texts, which OpenVINO computes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openvino

from bench.graphs import CALLERS_MAX, CALLERS_OF_A_CLIENT, Call, InDaemon, call_for
from bench.machine import THREADS
from bench.runs import Figure, Target
from bench.streams import Stream
from inferd.testing import running_daemon
from tools.get_graphs import MINILM, MISSING

from .base import INFERD, Scenario, Side, Started, Work

OPENVINO, ONNX_RUNTIME = "OpenVINO in process", "ONNX Runtime in process"
ONE_BY_ONE = "inferd, batch-max = 1"
VARIANTS = {INFERD: ("joined", ""), ONE_BY_ONE: ("single", "batch-max = 1\n")}
"""The names of models and their settings, by side."""
TOKENS = 32
CALLERS = (1, 16, CALLERS_MAX)
SECONDS, SECONDS_SMALL = 2.0, 0.05
"""The time in which calls are counted."""
WARM_UP = 0.25
"""The part of that time for which callers call before."""
Arrays = Mapping[str, Any]


def text() -> Arrays:
    """Return the inputs for one text."""
    rng = np.random.default_rng(3)
    return {
        "input_ids": rng.integers(1000, 30_000, (1, TOKENS)),
        "attention_mask": np.ones((1, TOKENS), np.int64),
        "token_type_ids": np.zeros((1, TOKENS), np.int64),
    }


def file() -> Path:
    """Return the graph's file."""
    assert MINILM.found is not None, MISSING
    return MINILM.found / "model.onnx"


class OpenVinoInProcess:
    """OpenVINO in this process, with a stream and a request for each thread of *pool*."""

    def __init__(self, pool: ThreadPoolExecutor):
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": THREADS,
            "NUM_STREAMS": THREADS,
            "ENABLE_CPU_PINNING": False,
        }
        self._compiled = openvino.Core().compile_model(str(file()), "CPU", settings)
        self._pool, self._own = pool, threading.local()
        self._inputs = {name: openvino.Tensor(array) for name, array in text().items()}

    def compute(self) -> Any:
        """Return the output of the text, in a thread of the pool."""
        request = getattr(self._own, "request", None)
        if request is None:
            request = self._own.request = self._compiled.create_infer_request()
            for name, tensor in self._inputs.items():
                request.set_tensor(name, tensor)
        request.infer()
        return request.get_output_tensor(0).data.copy()

    async def call(self, caller: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, self.compute)


class OnnxInProcess:
    """ONNX Runtime in this process, with a thread of *pool* for each run."""

    def __init__(self, pool: ThreadPoolExecutor):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(str(file()), options, providers=providers)
        self._pool, self._inputs = pool, text()

    async def call(self, caller: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, self._session.run, None, self._inputs)


async def drive(call: Call, work: Work) -> list[Stream]:
    """Embed texts for some time; return a stream with a token for each text."""
    seconds = SECONDS_SMALL if work.small else SECONDS
    await call_for(call, work.case, WARM_UP * seconds, "text")
    return [await call_for(call, work.case, seconds, "text")]


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the texts per second."""
    [stream] = streams
    return {"texts_per_s": stream.tokens / (stream.ended_s - stream.requested_s)}


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon with the graph, and load it in this process."""
    lines = [f"[daemon]\ncores = {THREADS}\nsessions-max = 1024\n"]
    for name, settings in VARIANTS.values():
        lines.append(f'[models.{name}]\nfile = {json.dumps(str(file()))}\nbackend = "openvino"\n')
        lines.append(settings)
    daemon = await stack.enter_async_context(running_daemon("".join(lines)))
    pool = stack.enter_context(ThreadPoolExecutor(THREADS))
    sides: dict[str, Side] = {
        ONNX_RUNTIME: partial(drive, OnnxInProcess(pool).call),
        OPENVINO: partial(drive, OpenVinoInProcess(pool).call),
    }
    for side, (model, _) in VARIANTS.items():
        callers = await InDaemon.open(stack, daemon.socket, model, text())
        sides[side] = partial(drive, callers.call)
    versions = {"onnxruntime": onnxruntime.__version__, "openvino": openvino.__version__}
    return Started(sides, versions)


SCENARIO = Scenario(
    name="graph-text",
    title="Embedding texts with OpenVINO",
    about=f"""\
Programs embed one text of {TOKENS} tokens after the other with all-MiniLM-L6-v2 in ONNX, whose
weights have 8 bits. **{INFERD}** computes it with OpenVINO, waiting texts together if the graph
allows that, **{ONE_BY_ONE}** each alone. **{OPENVINO}** and **{ONNX_RUNTIME}**: {THREADS} threads
in the process of the programs, which compute one text each at a time. The programs are tasks of one
process of Python, with a connection for each {CALLERS_OF_A_CLIENT}. Calls are counted for
{SECONDS:g} s.""",
    case_heading="callers",
    cases=CALLERS,
    figures=(Figure("texts_per_s", "texts/s", 0),),
    targets=tuple(
        Target("texts_per_s", INFERD, other, least=least, case=case)
        for case in CALLERS[1:]
        for other, least in ((OPENVINO, 1.0), (ONE_BY_ONE, None), (ONNX_RUNTIME, 2.0))
    ),
    start=start,
    measure=measure,
    pictures=(),
)
