"""The CPU time that a worker's Python takes for each generated token.

`python -m tools.worker_cpu [--model FILE] [--streams N] [--tokens N]` drives an engine with a
socket as a worker does, on the echo model or on a GGUF file. It prints the microseconds of the
engine's thread for each token: those of the engine itself, and those inside the model's steps and
samples.
Compare two commits on one machine, alternating, because CPU time also depends on other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from inferd.backends import LanguageModel, ModelSpec, SamplingParams, load_model
from inferd.scheduler import Owner
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.worker import SocketLink

CTX_SIZE = 4096
PROMPT = "The capital of France is"


class _Stopwatch:
    """Adds up the CPU seconds inside methods of a model."""

    def __init__(self, model: Any, names: Sequence[str]):
        self.spent = dict.fromkeys(names, 0.0)
        for name in names:
            setattr(model, name, self._timed(name, getattr(model, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            started = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.spent[name] += time.thread_time() - started

        return timed


def measure(spec: ModelSpec, streams: int, tokens: int) -> dict[str, float]:
    """Generate *tokens* in each of *streams* at once; return the microseconds for each token."""
    model = cast(LanguageModel, load_model(spec, lambda _: True))
    watch = _Stopwatch(model, ("step", "sample"))
    near, far = socket.socketpair()
    far.setblocking(False)
    link, engine = SocketLink(near), Engine(model)
    prompt = model.tokenize(PROMPT.encode().ljust(tokens + 1), special=False, bos=True)
    if spec.backend != "echo":
        prompt = model.tokenize(PROMPT.encode(), special=False, bos=True)
    greedy = SamplingParams(ignore_eos=True, temp=0)
    fields: dict[str, Any] = {"owner": Owner(1), "sampling": greedy, "n_predict": tokens}
    packed = m.pack_tokens(prompt)
    tasks = [m.TaskSpec(id=n, tokens=packed, no_cache=True, **fields) for n in range(streams)]

    def iterate(commands: Sequence[m.Command]) -> None:
        link.send_reports(engine.begin_iteration(commands))
        link.send_reports(engine.compute_step())
        engine.end_iteration()
        with contextlib.suppress(BlockingIOError):
            while far.recv(1 << 20):
                pass

    gc.collect()
    gc.freeze()
    iterate([m.Submit(task) for task in tasks])
    while len(engine.slots.tasks) < streams or any(t.prefilling for t in engine.slots.tasks):
        iterate([])
    watch.spent |= dict.fromkeys(watch.spent, 0.0)
    before, started = engine.metrics.counts["generated"], time.thread_time()
    while engine.slots.tasks:
        engine.wait_s_max()
        engine.metrics.publish()
        iterate(link.receive_commands(0))
    whole, count = time.thread_time() - started, engine.metrics.counts["generated"] - before
    seconds = {"engine": whole - sum(watch.spent.values()), **watch.spent}
    return {name: round(1e6 * spent / count, 1) for name, spent in seconds.items()}


def main() -> None:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file in place of the echo model")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    spec = ModelSpec(
        name="measured",
        backend="llama" if options.model else "echo",
        path=str(options.model or ""),
        slots=options.streams,
        ctx_size=CTX_SIZE,
        threads=1,
    )
    for name, microseconds in measure(spec, options.streams, options.tokens).items():
        print(f"{name:8}{microseconds:10.1f} us a token")


if __name__ == "__main__":
    main()
