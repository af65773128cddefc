"""Random grammars beside a neighbour: they end nothing, and delay no step of the neighbour's much.

`INFERD_FUZZ_S` and `INFERD_FUZZ_SEED` are those of `tests/backends/grammars/test_fuzz.py`. With
`INFERD_FUZZ_REPORT` set, the longest delays are printed.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from inferd.backends import Chunk, ModelSpec, SamplingParams
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.owner import Owner
from tests.backends.grammars.test_fuzz import MAKERS, SECONDS, SEED
from tests.models import smollm2

DELAY_S_MAX = 0.05
TOKENS, NEIGHBOURS_TOKENS = 40, 400
PROMPT = [1, *range(300, 330)]
REFUSED = {"InvalidArgument", "TooLarge", "Timeout"}


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaModel]:
    spec = ModelSpec(name="m", path=str(smollm2()), slots=2, ctx_size=512, threads=1)
    model = load_llama(spec, lambda _: True)
    yield model
    model.close()


class Neighbourhood:
    """An engine with an endless stream, in which turns with random grammars are run."""

    def __init__(self, model: LlamaModel):
        self.engine, self._number = Engine(model), 0
        self._neighbour = 0
        self.neighbours_tokens = 0
        self._step_s = 0.0
        compute = model.step

        def step(chunks: Sequence[Chunk]) -> None:
            began = time.thread_time()
            compute(chunks)
            self._step_s += time.thread_time() - began

        model.step = step  # type: ignore[method-assign]

    def submit(self, owner: int, sampling: SamplingParams, count: int) -> m.Submit:
        self._number += 1
        tokens = m.pack_tokens(PROMPT)
        return m.Submit(
            m.TaskSpec(
                id=self._number,
                owner=Owner(owner),
                tokens=tokens,
                sampling=sampling,
                n_predict=count,
            )
        )

    def run(self, sampling: SamplingParams) -> tuple[str, float]:
        """Return the outcome of a turn, and the longest CPU time of an iteration beside its step,
        in which the neighbour waits.
        """
        turn = self.submit(2, sampling, TOKENS)
        commands, longest_s, outcome = [turn], 0.0, ""
        while not outcome:
            if self.engine.tasks.find_task(self._neighbour) is None:
                endless = SamplingParams(temp=0.0, ignore_eos=True)
                commands.append(self.submit(1, endless, NEIGHBOURS_TOKENS))
                self._neighbour = self._number
            began, self._step_s = time.thread_time(), 0.0
            reports = [*self.engine.begin_iteration(commands), *self.engine.compute_step()]
            longest_s = max(longest_s, time.thread_time() - began - self._step_s)
            self.engine.end_iteration()
            commands = []
            for report in reports:
                match report:
                    case m.Failed(task_id=number, error=error) if number == turn.task.id:
                        assert error["name"] in REFUSED and error["hint"], error
                        outcome = str(error["name"])
                    case m.Finished(task_id=number) if number == turn.task.id:
                        outcome = "answered"
                    case m.Tokens(task_id=number, tokens=tokens) if number == self._neighbour:
                        self.neighbours_tokens += len(tokens)
                    case m.Failed(error=error):
                        raise AssertionError(error)
        return outcome, longest_s


@pytest.mark.alone
@pytest.mark.model
def test_random_grammars_do_not_delay_a_neighbour(model: LlamaModel) -> None:
    both = Neighbourhood(model)
    outcomes: Counter[str] = Counter()
    delays: list[tuple[float, str, int]] = []
    end, seed = time.monotonic() + SECONDS, SEED
    while time.monotonic() < end or not (outcomes["answered"] and outcomes["InvalidArgument"]):
        for field, make in MAKERS.items():
            seed += 1
            sampling = SamplingParams(temp=1.5, seed=seed, **{field: make(random.Random(seed))})  # type: ignore[arg-type]
            if not sampling.has_grammar:
                continue
            outcome, delay_s = both.run(sampling)
            if delay_s > DELAY_S_MAX:  # another program may have had the core's caches
                delay_s = min(delay_s, both.run(sampling)[1])
            outcomes[outcome] += 1
            delays.append((delay_s, field, seed))
    delays.sort(reverse=True)
    if os.environ.get("INFERD_FUZZ_REPORT"):
        sys.stderr.write(f"{outcomes} {both.neighbours_tokens} tokens beside; {delays[:10]}\n")
    assert both.neighbours_tokens > 10
    assert delays[0][0] <= DELAY_S_MAX, delays[:3]
