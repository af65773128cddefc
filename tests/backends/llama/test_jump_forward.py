"""Answers are the same with and without jump-forward, on tiny F32 models of each kind of memory.

Their tokens are bytes, so that a forced text has one spelling, and noise changes no token. (A space
would have none: these models have no token for it.)
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from inferd.backends import SamplingParams
from inferd.backends.llama.model import LlamaModel
from inferd.backends.params import StoppingParams
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.owner import Owner
from tests.backends.driving import prefill
from tests.backends.tiny import KINDS, SLOTS, assert_as_from_scratch, tokens_of
from tests.repetitions import FACTOR
from tests.scheduler.doubles import iterate_engine

pytestmark = pytest.mark.process  # the trial of grammars

OBJECT = r"""
root ::= "{\"name_of_the_customer\":\"" [a-z]{1,4} "\",\"is_a_company\":" ("true" | "false") rest
rest ::= ",\"preferred_payment\":" payment ",\"positions\":[" item ("," item){1,2} "]}"
payment ::= "\"invoice\"" | "\"in_advance\"" | "\"credit_card\""
item ::= "{\"number\":" [0-9]{1,2} "}"
"""
GRAMMARS: dict[str, dict[str, Any]] = {
    "object": {"grammar": OBJECT},
    "words": {"grammar": 'root ::= ("and_so_on,_" | "and_then,_") [a-c] "._The_end."'},
    "fixed": {"grammar": f'root ::= "{"never_to_be_chosen_" * 12}"'},
}
SHORTER = {"grammar": f'root ::= "{"never_to_be_chosen_" * 4}"'}
"""The fixed text with a third of its tokens, still more than a batch."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temp": 0.0},
    "sampled": {"temp": 2.0, "seed": 5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "penalties": {"temp": 2.0, "seed": 6, "repeat_penalty": 3.0, "last_n_penalty": 30},
}
SHORT_PAIRS = [
    *(GRAMMARS[name] | sampling for name in ("object", "words") for sampling in SAMPLINGS.values()),
    SHORTER | SAMPLINGS["penalties"],
]
"""Grammars with samplings; the fixed text once, since no sampling chooses any of it."""
PAIRS = [*SHORT_PAIRS, GRAMMARS["fixed"] | SAMPLINGS["greedy"]]
PROMPT = [1, *tokens_of(11, 100)]


class Answer(NamedTuple):
    tokens: list[int]
    text: bytes
    reason: str
    detail: str
    output_tokens: int


class Runner:
    """An engine on an empty model, with the answers of its tasks."""

    def __init__(self, model: LlamaModel, settings: EngineSettings | None = None):
        for slot in range(SLOTS):
            model.trim(slot, 0)
        self.model, self.engine = model, Engine(model, settings)
        self.tokens: dict[int, list[m.Tokens]] = {}
        self.ends: dict[int, m.Finished] = {}
        self.iterations = 0

    def iterate(self, *commands: m.Command) -> None:
        self.iterations += 1
        for report in iterate_engine(self.engine, commands):
            assert not isinstance(report, m.Failed), report.error
            if isinstance(report, m.Tokens):
                self.tokens.setdefault(report.task_id, []).append(report)
            elif isinstance(report, m.Finished):
                self.ends[report.task_id] = report
        self.engine.tasks.check_integrity()

    def run(
        self,
        specs: Iterable[m.TaskSpec],
        commands: Callable[[Runner], Iterable[m.Command]] = lambda _: (),
    ) -> dict[int, Answer]:
        specs = list(specs)
        self.iterate(*map(m.Submit, specs))
        while any(spec.id not in self.ends for spec in specs):
            self._wait_for_disk()
            self.iterate(*commands(self))
            assert self.iterations < 10_000, "a task starves"
        return {spec.id: self.answer(spec.id) for spec in specs}

    def _wait_for_disk(self) -> None:
        """Wait for a KV file as a worker does, if there is nothing else to do."""
        disk, wait_s = self.engine.kv.disk, self.engine.wait_s_max()
        if disk is not None and wait_s != 0:
            select.select([disk], [], [], wait_s)

    def answer(self, number: int) -> Answer:
        events, end = self.tokens.get(number, []), self.ends[number]
        return Answer(
            [token for event in events for token in event.tokens],
            b"".join(event.text for event in events) + end.text,
            end.stats.stop_reason,
            end.stats.stop_detail,
            end.stats.output_tokens,
        )

    @property
    def forced(self) -> int:
        return sum(end.stats.forced_tokens for end in self.ends.values())


def spec_of(number: int = 1, prompt: list[int] = PROMPT, **fields: Any) -> m.TaskSpec:
    """Return a task; fields of `SamplingParams` are its sampling."""
    own = {k: v for k, v in fields.items() if k in SamplingParams.__struct_fields__}
    rest = {"n_predict": 300} | {k: v for k, v in fields.items() if k not in own}
    sampling = SamplingParams(**own)
    return m.TaskSpec(
        id=number,
        owner=Owner(1),
        tokens=m.pack_tokens(prompt),
        sampling=sampling,
        **rest,
    )


def specs_of(
    pairs: list[dict[str, Any]] = PAIRS, *, jump_forward: bool, **fields: Any
) -> list[m.TaskSpec]:
    """Return tasks with one prompt, one for each of *pairs*."""
    return [
        spec_of(number, **pair, jump_forward=jump_forward, **fields)
        for number, pair in enumerate(pairs, 1)
    ]


@pytest.fixture(scope="module")
def expected(loaded: tuple[str, LlamaModel]) -> dict[int, Answer]:
    """Return the answers of `specs_of` without jump-forward and limits."""
    return Runner(loaded[1]).run(specs_of(jump_forward=False))


def assert_state_as_from_scratch(runner: Runner, slots_used: int = 2) -> None:
    """Compare the state in the last slots: tokens behind an end are not in it."""
    model, slots = runner.model, runner.engine.slots.slots[:slots_used]
    for slot in slots:
        tokens = slot.tokens.tolist()
        assert model.length(slot.index) == len(tokens) > 0
        prefill(model, slot.index, [9], len(tokens))
        assert_as_from_scratch(model, slot.index, [*tokens, 9])


@pytest.mark.parametrize("loaded", KINDS[:1] if FACTOR == 1 else KINDS, indirect=True)
def test_each_answer_of_each_sampler_is_the_same_and_its_state_too(tiny: LlamaModel) -> None:
    assert_alike_with_states(tiny, SHORT_PAIRS)


@pytest.mark.parametrize("loaded", KINDS[1:], indirect=True)
def test_an_answer_is_the_same_and_its_state_too(tiny: LlamaModel) -> None:
    """Samplers do not depend on the kind of memory."""
    assert_alike_with_states(tiny, [SHORT_PAIRS[1], SHORT_PAIRS[-1]])


def assert_alike_with_states(tiny: LlamaModel, pairs: Iterable[dict[str, Any]]) -> None:
    for fields in pairs:
        expected, steps = list[dict[int, Answer]](), list[int]()
        for jump_forward in (False, True):
            runner, own = Runner(tiny), dict(fields, jump_forward=jump_forward)
            expected.append(runner.run([spec_of(1, **own), spec_of(2, [*PROMPT, 9], **own)]))
            steps.append(runner.engine.metrics.steps)
            assert bool(runner.forced) == jump_forward
            assert_state_as_from_scratch(runner)
        assert expected[0] == expected[1]
        assert steps[1] < 0.8 * steps[0]


PREEMPTED = {
    "preempted": EngineSettings(quantum_tokens=2),
    "preempted-slow": EngineSettings(quantum_tokens=2, kv_ram_bytes=1 << 30, step_s_target=1e-9),
}
LIMITED = {
    "one-by-one": EngineSettings(step_s_target=1e-9, step_s_max=1e-9),
    "short-steps": EngineSettings(step_s_target=0.002, step_s_max=0.002),
}


@pytest.mark.parametrize("settings", PREEMPTED.values(), ids=PREEMPTED)
def test_preemption_changes_no_answer(
    tiny: LlamaModel, expected: dict[int, Answer], settings: EngineSettings
) -> None:
    assert_answers_as_expected(tiny, expected, settings)


@pytest.mark.parametrize("loaded", KINDS[:2], indirect=True)
@pytest.mark.parametrize("settings", LIMITED.values(), ids=LIMITED)
def test_the_limits_of_steps_change_no_answer(
    tiny: LlamaModel, expected: dict[int, Answer], settings: EngineSettings
) -> None:
    """They do not depend on the kind of memory."""
    assert_answers_as_expected(tiny, expected, settings)


def assert_answers_as_expected(
    tiny: LlamaModel, expected: dict[int, Answer], settings: EngineSettings
) -> None:
    runner = Runner(tiny, settings)
    assert runner.run(specs_of(jump_forward=True)) == expected
    parks = sum(end.stats.parks for end in runner.ends.values())
    assert (parks > 20) == (settings.quantum_tokens == 2)


def test_tokens_on_demand_are_the_same(tiny: LlamaModel, expected: dict[int, Answer]) -> None:
    assert_pulled_alike(tiny, expected, 3)


@pytest.mark.parametrize("loaded", KINDS[:2], indirect=True)
@pytest.mark.parametrize("requested", [1, 100])
def test_one_token_or_many_on_demand_are_the_same(
    tiny: LlamaModel, expected: dict[int, Answer], requested: int
) -> None:
    """How many are requested at once does not depend on the kind of memory."""
    assert_pulled_alike(tiny, expected, requested)


def assert_pulled_alike(tiny: LlamaModel, expected: dict[int, Answer], requested: int) -> None:

    def pull(runner: Runner) -> list[m.Command]:
        alive = [n for n in expected if n not in runner.ends]
        return [m.PullToken(n) for n in alive for _ in range(requested)]

    runner = Runner(tiny)
    assert runner.run(specs_of(jump_forward=True, pull=True), pull) == expected
    assert all(len(event.tokens) == 1 for events in runner.tokens.values() for event in events)


def test_a_stream_with_little_credit_is_the_same(
    tiny: LlamaModel, expected: dict[int, Answer]
) -> None:

    def read(runner: Runner) -> list[m.Command]:
        alive = [n for n in expected if n not in runner.ends]
        return [m.Credit(n, 1) for n in alive if (n + runner.iterations) % 3 == 0]

    runner = Runner(tiny)
    assert runner.run(specs_of(jump_forward=True, credit=1), read) == expected


CUTS: list[dict[str, Any]] = [
    {"n_predict": 5},
    {"n_predict": 37},
    {"stop": ("_a_",)},
    {"stop": ("chosen_n", "so_on")},
    {"stopping": StoppingParams(stop_patterns=("(t|n)[eh]+",))},
    {"stopping": StoppingParams(stop_tokens=(3 + ord("y"), 3 + ord("o")))},
    {"stopping": StoppingParams(stop_complete=("json", "sentence"))},
    {"stopping": StoppingParams(stop_repetition=0.25, stop_repetition_window=30)},
    {"stopping": StoppingParams(stop_grammar=True)},
    {"ctx_size": 131},
]
OF_EVERY_KIND = (CUTS[1], CUTS[3], CUTS[-1])


@pytest.mark.parametrize("fields", OF_EVERY_KIND, ids=lambda fields: next(iter(fields)))
def test_an_answer_is_cut_at_the_same_token(tiny: LlamaModel, fields: dict[str, Any]) -> None:
    assert_cut_alike(tiny, fields)


@pytest.mark.parametrize("loaded", KINDS[:2], indirect=True)
@pytest.mark.parametrize(
    "fields",
    [fields for fields in CUTS if fields not in OF_EVERY_KIND],
    ids=lambda fields: next(iter(fields)),
)
def test_conditions_cut_an_answer_at_the_same_token(
    tiny: LlamaModel, fields: dict[str, Any]
) -> None:
    """They do not depend on the kind of memory."""
    assert_cut_alike(tiny, fields)


def assert_cut_alike(tiny: LlamaModel, fields: dict[str, Any]) -> None:
    specs = [specs_of(SHORT_PAIRS, jump_forward=j, **fields) for j in (True, False)]
    runs = [Runner(tiny).run(own) for own in specs]
    assert runs[0] == runs[1]
    assert any(answer.reason != "eos" for answer in runs[0].values())


def test_a_turn_continues_the_same_after_any_token(tiny: LlamaModel) -> None:
    """A new worker gets the tokens so far, and computes or forces the rest."""
    for fields in (GRAMMARS["object"] | SAMPLINGS["sampled"], GRAMMARS["words"]):
        (whole,) = Runner(tiny).run([spec_of(1, **fields)]).values()
        for done in range(1, len(whole.tokens), 7):
            before = whole.tokens[:done]
            point = m.ResumePoint(output_tokens=done, text_bytes=done)
            spec = spec_of(1, [*PROMPT, *before], **fields, resume_point=point)
            (rest,) = Runner(tiny).run([spec]).values()
            assert [*before, *rest.tokens] == whole.tokens
            assert rest.output_tokens == whole.output_tokens


def test_a_prompt_beside_forced_chunks_and_one_with_cached_tokens(tiny: LlamaModel) -> None:
    """Prompts, chunks and single tokens share batches; a later turn extends the state."""
    fields = GRAMMARS["object"] | SAMPLINGS["sampled"]
    long, more = [1, *tokens_of(12, 250)], tokens_of(13, 20)
    runs = []
    for jump_forward in (True, False):
        runner, own = Runner(tiny), dict(fields, jump_forward=jump_forward)
        answers = runner.run([spec_of(1, **own), spec_of(2, long, **own)])
        history = [*PROMPT, *answers[1].tokens, *more]
        answers |= runner.run([spec_of(3, history, **own), spec_of(4, long[:60], **own)])
        runs.append(answers)
        assert tiny.info.kv_kind != "plain" or runner.ends[3].stats.cached_tokens > len(PROMPT)
    assert runs[0] == runs[1]
