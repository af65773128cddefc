"""The engine on a tiny encoder-decoder: prompts are steps of their own, and nothing is mixed up."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from inferd.backends import SamplingParams
from inferd.backends.llama.model import LlamaModel
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.owner import Owner, Priority
from tests.backends.tiny import SLOTS, load_tiny, tokens_of
from tests.scheduler.doubles import iterate_engine

START, TOKENS = 0, 24
SAMPLING = SamplingParams(temp=1.0, seed=5, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True)
SHARED = tokens_of(50, 40)
"""The beginning of several prompts, which they cannot share."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    with closing(load_tiny("t5", tmp_path_factory.mktemp("t5"))) as model:
        yield model


class Runner:
    """An engine on emptied slots, with the reports of its tasks."""

    def __init__(self, model: LlamaModel, settings: EngineSettings | None = None):
        for slot in range(SLOTS):
            model.trim(slot, 0)
        self.engine = Engine(model, settings)
        self.tokens: dict[int, list[int]] = {}
        self.stats: dict[int, m.TurnStats] = {}
        self.errors: dict[int, str] = {}

    def iterate(self, *commands: m.Command) -> None:
        for report in iterate_engine(self.engine, commands):
            if isinstance(report, m.Tokens):
                self.tokens.setdefault(report.task_id, []).extend(report.tokens)
            elif isinstance(report, m.Finished):
                self.stats[report.task_id] = report.stats
            elif isinstance(report, m.Failed):
                self.errors[report.task_id] = str(report.error["name"])
        self.engine.tasks.check_integrity()

    def run(self) -> None:
        while [*self.engine.tasks]:
            self.iterate()


def submit(
    number: int, tokens: Sequence[int], priority: Priority = Priority.NORMAL, **fields: object
) -> m.Submit:
    values = {"owner": Owner(1), "sampling": SAMPLING, "n_predict": TOKENS, "credit": -1, **fields}
    packed = m.pack_tokens(tokens)
    return m.Submit(m.TaskSpec(id=number, tokens=packed, priority=priority, **values))  # type: ignore[arg-type]


def prompt(number: int) -> list[int]:
    return [*(SHARED if number % 2 else []), *tokens_of(number, 3 + number), START]


def alone(model: LlamaModel, tokens: Sequence[int]) -> list[int]:
    runner = Runner(model)
    runner.iterate(submit(1, tokens))
    runner.run()
    return runner.tokens[1]


def test_a_prompt_is_one_step_and_its_repetition_is_computed_again(loaded: LlamaModel) -> None:
    runner = Runner(loaded)
    runner.iterate(submit(1, prompt(1)))
    assert len(runner.tokens[1]) == 1, "the first step has computed the whole prompt"
    runner.run()
    runner.iterate(submit(2, prompt(1)))
    runner.run()
    assert runner.tokens[1] == runner.tokens[2]
    assert runner.stats[2].cached_tokens == 0
    whole = [*prompt(1), *runner.tokens[1][:10]]
    runner.iterate(submit(3, whole, n_predict=1))
    runner.run()
    assert runner.stats[3].cached_tokens == len(whole) - 1, "an answer continues from its state"


@pytest.mark.parametrize("seed", range(6))
def test_tasks_that_come_park_and_leave_in_any_order_get_their_own_answers(
    loaded: LlamaModel, seed: int
) -> None:
    """More tasks than slots: they park each other, and some are cancelled."""
    chosen = random.Random(seed)
    numbers = list(range(1, 11))
    expected = {number: alone(loaded, prompt(number)) for number in numbers}
    assert len({*map(tuple, expected.values())}) == len(numbers)
    runner = Runner(loaded, EngineSettings(quantum_tokens=8))
    cancelled = set(chosen.sample(numbers, 3))
    waiting = chosen.sample(numbers, len(numbers))
    while waiting:
        number = waiting.pop()
        runner.iterate(submit(number, prompt(number), chosen.choice([*Priority])))
        for _ in range(chosen.randrange(6)):
            running = [task.spec.id for task in runner.engine.tasks]
            leaving = [n for n in running if n in cancelled and chosen.random() < 0.2]
            runner.iterate(*map(m.Cancel, leaving))
    runner.run()
    for number in numbers:
        tokens = runner.tokens.get(number, [])
        assert tokens == expected[number][: len(tokens)]
        assert number in cancelled or len(tokens) == TOKENS
    assert any(stats.parks for stats in runner.stats.values())


def test_prompts_without_a_start_token_or_too_long_are_refused(loaded: LlamaModel) -> None:
    runner = Runner(loaded)
    runner.iterate(
        submit(1, [5, 6, 7]),
        submit(2, [START]),
        submit(3, [5] * loaded.info.batch_size + [START]),
        submit(4, prompt(4), prompt_logprobs=0),
        submit(5, prompt(5)),
    )
    runner.run()
    assert runner.errors == {
        **dict.fromkeys((1, 2), "InvalidArgument"),
        3: "PromptTooLong",
        4: "UnsupportedOperation",
    }
    assert len(runner.tokens[5]) == TOKENS


def test_a_task_from_another_worker_continues(loaded: LlamaModel, tmp_path: Path) -> None:
    """It has the tokens of its answer so far, which the decoder reads, not the encoder."""
    expected = alone(loaded, prompt(7))
    point = m.ResumePoint(output_tokens=9)
    runner = Runner(loaded)
    runner.iterate(submit(1, [*prompt(7), *expected[:9]], resume_point=point))
    runner.run()
    assert runner.tokens[1] == expected[9:]
