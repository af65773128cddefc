"""The CPU time of a language model and of a graph that are never idle, on cores that they share.

The shares are those of the processes' CPU time, not of the clock: other programs on the machine
slow both models.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from inferd import Client
from inferd.testing import running_daemon
from tests.daemon.graph_calls import floats, longs
from tests.models import smollm2
from tests.onnx_graphs import loop, write_graphs
from tests.raw import RawClient
from tests.repetitions import FACTOR
from tests.waiting import wait_until

pytestmark = [pytest.mark.model, pytest.mark.alone, pytest.mark.timeout(300)]

CORES, LANES = 2, 4
"""More lanes than cores: without a policy, the graph would have two thirds of these."""
KEPT_MIN = 0.9
"""The least part of the promised share that a model keeps."""
CPU_S = 8.0
"""The CPU time of both models together in which the shares are measured."""
STREAMS, CALLERS, TIMES = 3, 6, 400_000
CONFIGS = {"lanes": f"threads = {LANES}\n", "latency": f"threads = {CORES}\nlatency = true\n"}
USUAL = [("streams", "latency"), ("graph", "lanes")]
OTHERS = [("streams", "lanes"), ("graph", "latency")]
"""The order of their work does not depend on how the graph uses its cores."""


@contextmanager
def streaming(socket: str) -> Iterator[None]:
    """Compute answers during the body, which nobody reads, so that no reader delays them."""
    with RawClient(socket) as raw:
        for _ in range(STREAMS):
            context = raw.context("smollm2")
            raw.call("set_input", context=context, index=1, tensor={"data": b'{"ignore-eos":true}'})
            raw.start_request(
                "stream", context=context, prompt="Once upon a time", raw=True, credit=1024
            )
        yield


@contextmanager
def computing(socket: str) -> Iterator[None]:
    """Compute on the graph during the body, more at once than there are lanes."""
    over = threading.Event()

    def compute() -> None:
        with Client(socket) as client, client.graph("busy") as graph:
            given = {"x": floats(1, dimensions=[1]), "times": longs(TIMES, dimensions=[])}
            while not over.is_set():
                graph.run_tensors(given)

    threads = [threading.Thread(target=compute) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(("first", "config"), USUAL + OTHERS * (FACTOR > 1))
def test_a_language_model_and_a_graph_that_are_never_idle_keep_their_shares(
    tmp_path: Path, first: str, config: str
) -> None:
    write_graphs(tmp_path, {"busy": loop()})
    text = f"""[daemon]\ncores = {CORES}\n[models.busy]\n{CONFIGS[config]}
[models.smollm2]\nfile = "{smollm2()}"\nslots = {STREAMS}\nctx-size = 4096\n"""
    begin, follow = (streaming, computing) if first == "streams" else (computing, streaming)
    with running_daemon(text, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        for name in ("smollm2", "busy"):
            client.load(name)
        with begin(daemon.socket):
            wait_until(lambda: tasks(client) > 0)
            with follow(daemon.socket):
                wait_until(lambda: tasks(client) > STREAMS and busy_threads(client) == 1)
                shares = measured_shares(client)
                assert tasks(client) > STREAMS, "both still have work"
    assert min(shares.values()) >= KEPT_MIN / 2, shares


def tasks(client: Client) -> int:
    return sum(model["tasks"] for model in client.models())


def busy_threads(client: Client) -> int:
    """Return the threads of the graph, or 0 if its worker has not answered in time."""
    return int(client.stats()["models"].get("busy", {}).get("threads", 0))


def measured_shares(client: Client) -> dict[str, float]:
    pids = {name: client.show(name)["pid"] for name in ("smollm2", "busy")}
    before = {name: cpu_s(pid) for name, pid in pids.items()}

    def used() -> dict[str, float]:
        return {name: cpu_s(pid) - before[name] for name, pid in pids.items()}

    wait_until(lambda: sum(used().values()) >= CPU_S, seconds=120)
    found = used()
    return {name: seconds / sum(found.values()) for name, seconds in found.items()}


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
