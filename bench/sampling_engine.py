"""The worker's engine on Gemma 3 270M, with a stopwatch on the sampling part of a step.

It is a process of its own, so that its memory is new. `python -m bench.sampling_engine` reads JSON:
[fields of `SamplingParams`, whether every token is a candidate, sequences, tokens of each]. It
writes [requested_s, arrivals_s, sampling_s] for each sequence. *sampling_s* is its sampling time
without that of its first token.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from typing import Any, cast

from inferd.backends import LanguageModel, ModelSpec, Sampler, SamplingParams, load_model
from inferd.backends.llama.sampling import chain
from inferd.scheduler import Owner
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from tools.get_models import MODELS_DIR, SOURCES

from .machine import THREADS

CTX_SIZE = 256
PROMPT_TOKENS = 8
WARM_UP_TOKENS = 4


class TimedModel:
    """A model that measures the seconds of sampling, by slot."""

    def __init__(self, model: LanguageModel):
        self._model = model
        self.sampling_s: defaultdict[int, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def sample(self, slot: int, sampler: Sampler, index: int) -> int:
        """Sample a token."""
        started = time.perf_counter()
        token = self._model.sample(slot, sampler, index)
        if index:
            self.sampling_s[slot] += time.perf_counter() - started
        return token


def run(
    model: LanguageModel, fields: dict[str, Any], sequences: int, tokens: int
) -> list[tuple[float, list[float], float]]:
    """Run *sequences* prompts side by side; return each one's times."""
    timed = TimedModel(model)
    engine = Engine(cast(LanguageModel, timed))
    params = SamplingParams(ignore_eos=True, seed=1, **fields)
    commands = [m.Submit(_task(n, params, tokens)) for n in range(sequences)]
    requested_s = time.perf_counter()
    arrivals: list[list[float]] = [[] for _ in commands]
    reports = _iterate(engine, commands)
    while True:
        now_s = time.perf_counter()
        for report in reports:
            assert not isinstance(report, m.Failed), report
            if isinstance(report, m.Tokens):
                arrivals[report.task_id] += [now_s] * len(report.tokens)
        if min(map(len, arrivals)) == tokens:
            break
        reports = _iterate(engine, [])
    # A slot may serve several prompts within a run; only the sum counts.
    each_s = sum(timed.sampling_s.values()) / sequences
    return [(requested_s, times, each_s) for times in arrivals]


def _iterate(engine: Engine, commands: list[m.Submit]) -> list[m.Report]:
    reports = [*engine.begin_iteration(commands), *engine.compute_step()]
    engine.end_iteration()
    return reports


def _task(number: int, params: SamplingParams, tokens: int) -> m.TaskSpec:
    prompt = [2, *range(1000 + 100 * number, 1000 + 100 * number + PROMPT_TOKENS - 1)]
    return m.TaskSpec(
        id=number, owner=Owner(1), tokens=m.pack_tokens(prompt), sampling=params, n_predict=tokens
    )


def main() -> None:
    """Run the job on standard input and print its result."""
    fields, all_candidates, sequences, tokens = json.load(sys.stdin)
    if all_candidates:
        assert "CANDIDATES_MAX" in vars(chain), "the chain's bound on its candidates was renamed"
        vars(chain)["CANDIDATES_MAX"] = -1  # no list of candidates is that short
    path = str(MODELS_DIR / SOURCES["gemma3"].file)
    spec = ModelSpec(name="gemma3", path=path, slots=sequences, ctx_size=CTX_SIZE, threads=THREADS)
    model = load_model(spec, lambda _: True)
    assert isinstance(model, LanguageModel)
    run(model, fields, sequences, WARM_UP_TOKENS)
    print(json.dumps(run(model, fields, sequences, tokens)))


if __name__ == "__main__":
    main()
