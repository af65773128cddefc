"""Graphs in a daemon and in a process of their own: `python -m bench.graphs`.

Three graphs are computed for 1, 16 and 64 callers: magika (a convolution over a long input), a
perceptron with four layers of 1024 (matrix work), and one that adds up 8 KiB and returns 1 KiB. The
daemon, the daemon with `batch-max = 1`, and ONNX Runtime in this process take turns. In this
process, as many threads as there are cores compute one input at a time, each on one thread; callers
wait for them. The daemon's callers are contexts of asynchronous clients in this process.

Then a single caller computes the small graph by the synchronous client, in turn with the call
`queue`, which passes the same processes and computes nothing. The times are those of calls, and the
CPU time that a call takes in each process.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from inferd import AsyncClient, Client, Tensor
from inferd.testing import RunningDaemon, running_daemon
from tests.onnx_graphs import graph

from .machine import THREADS

CALLERS = (1, 16, 64)
CALLERS_OF_A_CLIENT = 16
WIDTH, LAYERS = 1024, 4
SINGLE = "-single"
SMALL_IN, SMALL_OUT = 2048, 256
"""The numbers of float32 in the inputs and outputs of the small graph."""


class Work(NamedTuple):
    """A graph's file, and the name and value of its input."""

    file: Path
    name: str
    value: Any


def perceptron() -> bytes:
    """Return a network of `LAYERS` layers of `WIDTH`."""
    rng = np.random.default_rng(1)
    nodes, weights = [], []
    for layer in range(LAYERS):
        matrix = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / np.sqrt(WIDTH)
        weights.append(onnx.numpy_helper.from_array(matrix.astype(np.float32), f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [f"x{layer}", f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"x{layer + 1}"]))
    shape: Sequence[int | str] = ["n", WIDTH]
    return graph(nodes, [("x0", "fp32", shape)], [(f"x{LAYERS}", "fp32", shape)], weights)


def small() -> bytes:
    """Return a graph that adds up groups of numbers, which takes some microseconds."""
    groups = SMALL_IN // SMALL_OUT
    size = helper.make_tensor("shape", TensorProto.INT64, [3], [-1, SMALL_OUT, groups])
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [2])
    return graph(
        [
            helper.make_node("Reshape", ["x", "shape"], ["grouped"]),
            helper.make_node("ReduceSum", ["grouped", "axis"], ["y"], keepdims=0),
        ],
        [("x", "fp32", ["n", SMALL_IN])],
        [("y", "fp32", ["n", SMALL_OUT])],
        [size, axis],
    )


def works(folder: Path) -> dict[str, Work]:
    """Write the graphs and return them by name."""
    spec = importlib.util.find_spec("magika")
    assert spec is not None and spec.origin is not None, "install magika"
    [magika] = Path(spec.origin).parent.glob("models/standard_v3_*/model.onnx")
    (folder / "mlp.onnx").write_bytes(perceptron())
    (folder / "small.onnx").write_bytes(small())
    rng = np.random.default_rng(2)
    row = rng.standard_normal((1, WIDTH)).astype(np.float32)
    numbers = rng.standard_normal((1, SMALL_IN)).astype(np.float32)
    data = rng.integers(0, 257, (1, 2048), dtype=np.int32)
    return {
        "magika": Work(magika, "bytes", data),
        "mlp": Work(folder / "mlp.onnx", "x0", row),
        "small": Work(folder / "small.onnx", "x", numbers),
    }


def configuration(works: Mapping[str, Work]) -> str:
    """Return the text of a configuration with each graph, and a second time without batches."""
    lines = ["[daemon]", f"cores = {THREADS}", "sessions-max = 256"]
    for name, work in works.items():
        for suffix, more in (("", []), (SINGLE, ["batch-max = 1"])):
            lines += [f"[models.{name}{suffix}]", f"file = {json.dumps(str(work.file))}", *more]
    return "\n".join(lines)


async def rate_of(call: Callable[[int], Any], callers: int, seconds: float) -> float:
    """Return the calls per second that *callers* make one after the other."""
    end, done = time.perf_counter() + seconds, 0

    async def repeat(caller: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await call(caller)
            done += 1

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for caller in range(callers):
            group.create_task(repeat(caller))
    return done / (time.perf_counter() - began)


class InProcess:
    """ONNX Runtime in this process."""

    def __init__(self, work: Work, pool: ThreadPoolExecutor):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(work.file), options, providers=["CPUExecutionProvider"]
        )
        self._inputs, self._pool = {work.name: work.value}, pool

    async def call(self, caller: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, self._session.run, None, self._inputs)


class InDaemon:
    """Contexts of asynchronous clients of a daemon."""

    def __init__(self, clients: Sequence[AsyncClient], contexts: Sequence[int], work: Work):
        self._clients, self._contexts = clients, contexts
        kind = {"int32": "i32", "float32": "fp32"}[str(work.value.dtype)]
        data = work.value.tobytes()
        self._inputs = {work.name: Tensor(data=data, dimensions=[*work.value.shape], type=kind)}

    @classmethod
    async def open(cls, socket: str, name: str, work: Work) -> InDaemon:
        count = -(-max(CALLERS) // CALLERS_OF_A_CLIENT)
        clients = [AsyncClient(socket) for _ in range(count)]
        graphs = [await client.load(name) for client in clients]
        contexts = [
            await clients[caller // CALLERS_OF_A_CLIENT].init_execution_context(
                graphs[caller // CALLERS_OF_A_CLIENT]
            )
            for caller in range(max(CALLERS))
        ]
        return cls(clients, contexts, work)

    async def call(self, caller: int) -> None:
        client = self._clients[caller // CALLERS_OF_A_CLIENT]
        await client.compute(self._contexts[caller], self._inputs)

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


async def measure(
    socket: str, works: Mapping[str, Work], rounds: int, seconds: float
) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Return the rates of all rounds by graph and callers, and by side."""
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for name, work in works.items():
            daemon = await InDaemon.open(socket, name, work)
            single = await InDaemon.open(socket, f"{name}{SINGLE}", work)
            sides = {
                **{"in process": InProcess(work, pool).call, "one by one": single.call},
                **{"joined": daemon.call},
            }
            for callers in CALLERS:
                for call in sides.values():
                    await rate_of(call, callers, seconds / 4)
                rates: dict[str, list[float]] = {side: [] for side in sides}
                for number in range(rounds):
                    begin = number % len(sides)
                    for side in (list(sides) * 2)[begin : begin + len(sides)]:
                        rates[side].append(await rate_of(sides[side], callers, seconds))
                found[name, callers] = rates
                print_rates(name, callers, rates)
            await daemon.close()
            await single.close()
    return found


def print_rates(name: str, callers: int, rates: Mapping[str, list[float]]) -> None:
    print(
        f"{name:8} {callers:7}", *(f"{median(each):11.0f}" for each in rates.values()), flush=True
    )


class CallTimes(NamedTuple):
    """The seconds of each call, and the CPU seconds of all of them by process."""

    seconds: list[float]
    cpu_s: dict[str, float]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def measure_calls(
    daemon: RunningDaemon, work: Work, rounds: int, seconds: float
) -> dict[str, CallTimes]:
    """Return the times of a computation of *work* and of `queue`, by the synchronous client."""
    with Client(daemon.socket) as client, client.graph("small") as graph:
        calls: dict[str, Callable[[], object]] = {
            "run": partial(graph.run, {work.name: work.value}),
            "queue": client.queue,
        }
        pids = {"client": os.getpid(), "daemon": daemon.pid, "worker": client.show("small")["pid"]}
        found = {name: CallTimes([], dict.fromkeys(pids, 0.0)) for name in calls}
        for call in calls.values():
            time_calls(call, seconds / 4)
        for _ in range(rounds):
            for name, call in calls.items():
                before = {process: cpu_seconds(pid) for process, pid in pids.items()}
                found[name].seconds.extend(time_calls(call, seconds))
                for process, pid in pids.items():
                    found[name].cpu_s[process] += cpu_seconds(pid) - before[process]
        return found


def time_calls(call: Callable[[], object], seconds: float) -> list[float]:
    """Return the time of each call of some *seconds*."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def print_calls(found: Mapping[str, CallTimes]) -> None:
    print("call   median µs      p90 µs   CPU µs: client, daemon, worker")
    for name, times in found.items():
        ordered, count = sorted(times.seconds), len(times.seconds)
        cpu = "".join(f"{1e6 * used / count:8.0f}" for used in times.cpu_s.values())
        print(f"{name:6} {1e6 * median(ordered):9.0f} {1e6 * ordered[count * 9 // 10]:11.0f} {cpu}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a run")
    parser.add_argument("--graphs", nargs="+", choices=("magika", "mlp", "small"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = works(Path(folder))
        chosen = {n: w for n, w in found.items() if n in (arguments.graphs or found)}
        with running_daemon(configuration(found)) as daemon:
            print("graph    callers  in process  one by one      joined   (calls/s, medians)")
            asyncio.run(measure(daemon.socket, chosen, arguments.rounds, arguments.seconds))
            if "small" in chosen:
                print_calls(
                    measure_calls(daemon, found["small"], arguments.rounds, arguments.seconds)
                )


if __name__ == "__main__":
    main()
