"""Answers of real models with drafts equal those without, for every sampler.

The models are tiny ones of F32, whose logits hardly depend on the number of tokens of a step. The
drafter is given the answer, and errs at a rate.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from inferd.backends import SamplingParams
from inferd.backends.llama.loading import opening
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.model_spec import AdapterSpec, adapter_key
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.owner import Owner, Priority
from inferd.scheduler.policy.cost import StepLoad
from inferd.scheduler.task import Task
from tests.backends.tiny import load_tiny, tiny_spec, tokens_of
from tests.scheduler.doubles import iterate_engine
from tests.tiny_gguf import write_tiny
from tests.tiny_lora import matrices, write_lora

pytestmark = pytest.mark.process  # grammars are compiled on trial in a process
PREDICT = 40
VOCAB_USED = 128
"""Of the tokens of each tiny model."""
GREEDY = SamplingParams(temp=0, ignore_eos=True)
SCHEMA = '{"type":"object","properties":{"first name":{"type":"string","maxLength":12},'
SCHEMA += '"kind":{"enum":["alpha","beta"]}},"required":["first name","kind"]}'


class Knowing:
    """A drafter with the *answers* of tasks by their owner."""

    def __init__(self, answers: dict[int, list[int]], rate: float):
        self._answers, self._rate, self._random = answers, rate, random.Random(5)

    def propose(self, task: Task, limit: int) -> Sequence[int]:
        right = self._answers[task.spec.owner.user][task.generated :][:limit]
        wrong = self._random
        return [t if wrong.random() < self._rate else wrong.randrange(VOCAB_USED) for t in right]

    def forget(self, task_id: int) -> None:
        pass

    def forget_session(self, user: int, session: str) -> None:
        pass


class Line:
    """An engine on a model, with the reports of each task."""

    def __init__(self, model: LlamaModel, settings: EngineSettings | None = None):
        for slot in range(model.info.slots):
            model.trim(slot, 0)
        model.set_adapters(())
        self.engine = Engine(model, settings)
        self.reports: dict[int, list[m.Report]] = {}

    def close(self) -> None:
        self.engine.kv.close()
        self.engine.tokenizing.close()

    def run(self, *commands: m.Command, steps: int = 3000) -> None:
        """Iterate until all tasks have ended, or *steps* times."""
        pending: Sequence[m.Command] = commands
        for _ in range(steps):
            for report in iterate_engine(self.engine, pending):
                self.reports.setdefault(getattr(report, "task_id", -1), []).append(report)
            self.engine.tasks.check_integrity()
            pending = ()
            if not any(True for _ in self.engine.tasks):
                return

    def tokens(self, number: int) -> list[int]:
        found = self.reports[number]
        return [t for r in found if isinstance(r, m.Tokens) for t in r.tokens]

    def outcome(self, number: int) -> tuple[object, ...]:
        """Return the tokens, text, logprobs and ending of an answer."""
        reports = self.reports[number]
        end = reports[-1]
        assert isinstance(end, m.Finished), end
        logprobs = [
            (p.token, round(p.value, 2), [t.token for t in p.top[:1]])
            for r in reports
            if isinstance(r, m.Tokens)
            for p in r.logprobs
        ]
        text = b"".join(r.text for r in reports if isinstance(r, m.Tokens)) + end.text
        stats = end.stats
        return self.tokens(number), text, logprobs, stats.stop_reason, stats.output_tokens

    def stats(self, number: int) -> m.TurnStats:
        end = self.reports[number][-1]
        assert isinstance(end, m.Finished), end
        return end.stats

    def know(self, answers: dict[int, list[int]], rate: float) -> None:
        """Have a drafter that knows the *answers*, on a machine on which all steps take as long."""
        self.engine.clock.cpu = lambda: 0.0  # nor does keeping states take time
        learn = self.engine._cost.learn_step
        for size in (1, 64):
            learn(StepLoad.of_chunks([(0, 1)] * size), 1e-3)
        self.engine._cost.learn_step = lambda load, seconds: learn(load, 1e-3)  # type: ignore[method-assign]
        self.engine.speculation.drafters["knowing"] = Knowing(answers, rate)


def spec_of(number: int, prompt: list[int], sampling: SamplingParams, **fields: object) -> m.Submit:
    values = {"owner": Owner(number), "n_predict": PREDICT, "no_cache": True} | fields
    return m.Submit(
        m.TaskSpec(id=number, tokens=m.pack_tokens(prompt), sampling=sampling, **values)  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module", params=["llama", "gemma3", "gemma3-full", "lfm2", "mamba", "jamba"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaModel]:
    with contextlib.closing(load_tiny(request.param, tmp_path_factory.mktemp("drafts"))) as found:
        yield found


SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=11, temp=1.2, ignore_eos=True),
    "penalties": SamplingParams(
        seed=2, temp=0.9, repeat_penalty=1.4, presence_penalty=0.5, last_n_penalty=32
    ),
    "dry": SamplingParams(temp=0, dry_multiplier=1.0, ignore_eos=True),
    "xtc": SamplingParams(seed=3, xtc_probability=0.5, xtc_threshold=0.05, temp=1.5),
    "mirostat": SamplingParams(seed=3, mirostat=2, ignore_eos=True),
    "mirostat-1": SamplingParams(seed=3, mirostat=1, ignore_eos=True),
    "bias": SamplingParams(seed=5, logit_bias=((70, 3.0), (71, False)), temp=1.0),
    "logprobs": SamplingParams(seed=5, n_probs=3),
    "probs": SamplingParams(seed=5, n_probs=3, post_sampling_probs=True),
    "schema": SamplingParams(seed=6, json_schema=SCHEMA),
    "schema-sampled": SamplingParams(temp=0, json_schema=SCHEMA, jump_forward=False),
    "regex": SamplingParams(temp=0, regex="(ab|cd)+ the end"),
    "lazy": SamplingParams(
        seed=8, temp=1.5, grammar='root ::= "abc"', grammar_triggers=(("word", "e"),)
    ),
}


@pytest.mark.parametrize("model", ["gemma3-full", "mamba", "jamba"], indirect=True)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_answer_is_the_same_for_every_sampler(model: LlamaModel, name: str) -> None:
    """`test_drafts_of_many_prompts` has them at each rate on the other models."""
    prompt, sampling = tokens_of(4, 90), SAMPLINGS[name]
    with contextlib.closing(Line(model)) as plain:
        plain.run(spec_of(1, prompt, sampling, speculation="off"))
        expected, answer = plain.outcome(1), plain.tokens(1)
    for rate in (0.0, 0.8, 1.0):
        with contextlib.closing(Line(model)) as line:
            line.know({1: answer}, rate)
            line.run(spec_of(1, prompt, sampling, speculation="knowing"))
            assert line.outcome(1) == expected
            assert not line.engine.slots.drafts_cut_states
            # Without a step of one token, the cost of a draft is not known.
            assert line.stats(1).drafted_tokens > 3 or name == "regex"
            if rate == 1.0 and name != "regex":
                assert line.stats(1).accepted_tokens >= len(answer) // 3


def test_parked_tasks_and_other_adapters(tmp_path: Path) -> None:
    """Three streams on one slot take turns of a few tokens; the third has an adapter."""
    path = write_tiny("llama", tmp_path)
    adapter = write_lora(tmp_path / "adapter.gguf", matrices(strength=3.0))
    with contextlib.closing(load_llama(tiny_spec(path, slots=1), lambda _: True)) as model:
        added = model.add_adapter(AdapterSpec(name="a", path=str(adapter)))
        adapters: dict[int, tuple[str, ...]] = {3: (adapter_key(added.id, 1.0),)}
        found: dict[str, list[list[int]]] = {}
        answers: dict[int, list[int]] = {}
        for speculation in ("off", "knowing"):
            with contextlib.closing(Line(model, EngineSettings(quantum_tokens=16))) as line:
                line.know(answers, 0.8)
                line.run(
                    *(
                        spec_of(
                            n,
                            tokens_of(n, 50),
                            SAMPLINGS["penalties"],
                            speculation=speculation,
                            adapters=adapters.get(n, ()),
                            priority=Priority.NORMAL,
                            no_cache=False,
                        )
                        for n in (1, 2, 3)
                    )
                )
                found[speculation] = [line.tokens(n) for n in (1, 2, 3)]
                answers.update({n: line.tokens(n) for n in (1, 2, 3)})
                if speculation == "knowing":
                    assert all(line.stats(n).parks for n in (1, 2, 3))
                    assert sum(line.stats(n).accepted_tokens for n in (1, 2, 3)) > PREDICT
        assert found["off"] == found["knowing"]
        plain = spec_of(3, tokens_of(3, 50), SAMPLINGS["penalties"], speculation="off")
        with contextlib.closing(Line(model)) as line:
            line.run(plain)
            assert line.tokens(3) != found["off"][2], "the adapter has no effect"


def test_streams_of_different_lengths_share_steps(model: LlamaModel) -> None:
    """Chunks are filled up to one length; the fill is in nobody's state."""
    samplings = {1: GREEDY, 2: SAMPLINGS["seeded"], 3: SAMPLINGS["penalties"]}
    answers: dict[int, list[int]] = {}
    outcomes = []
    for speculation in ("off", "knowing"):
        with contextlib.closing(Line(model)) as line:
            line.know({**answers, 3: []}, 1.0)
            line.run(
                *(
                    spec_of(n, tokens_of(n, 30 * n), sampling, speculation=speculation)
                    for n, sampling in samplings.items()
                )
            )
            answers = {n: line.tokens(n) for n in samplings}
            outcomes.append([line.outcome(n) for n in samplings])
            if speculation == "knowing":
                assert line.stats(1).accepted_tokens > 10 and not line.stats(3).drafted_tokens
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_models_whose_state_is_not_kept_have_no_drafts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "KEPT_BYTES_MAX", 1)
    with (
        contextlib.closing(load_tiny(kind, tmp_path)) as model,
        contextlib.closing(Line(model)) as line,
    ):
        line.know({1: [5] * PREDICT}, 1.0)
        line.run(spec_of(1, tokens_of(1, 30), GREEDY, speculation="knowing"))
        assert len(line.tokens(1)) == PREDICT and not line.stats(1).drafted_tokens


def test_the_history_of_a_turn_with_drafts_serves_the_next_one(model: LlamaModel) -> None:
    """Nothing of a rejected draft is in the state that is reused."""
    prompt = tokens_of(9, 40)
    found = list[tuple[list[int], list[int]]]()
    for speculation in ("off", "knowing"):
        with contextlib.closing(Line(model)) as line:
            line.know({1: found[0][0] if found else [], 2: []}, 0.5)
            first = spec_of(1, prompt, GREEDY, speculation=speculation, owner=Owner(1))
            line.run(first)
            history = [*prompt, *line.tokens(1), *tokens_of(8, 5)]
            line.run(spec_of(2, history, GREEDY, speculation="off", owner=Owner(1), no_cache=False))
            # A state that was kept before the last step may be all that is left of the last drafts.
            less = 1 + 17 * (model.info.keeps_states and speculation != "off")
            assert line.stats(2).cached_tokens >= len(prompt) + PREDICT - less
            found.append((line.tokens(1), line.tokens(2)))
    assert found[0] == found[1]
