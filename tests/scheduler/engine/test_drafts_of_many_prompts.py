"""The answers to 200 prompts with drafts equal those without, whatever happens between a draft and
its verification. The number of prompts is printed.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from inferd.backends import SamplingParams
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.model_spec import AdapterSpec, adapter_key
from inferd.backends.params import StoppingParams
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Priority
from tests.backends.tiny import tiny_spec, tokens_of
from tests.scheduler.doubles import iterate_engine
from tests.scheduler.engine.test_real_drafts import (
    GREEDY,
    PREDICT,
    SAMPLINGS,
    VOCAB_USED,
    Line,
    spec_of,
)
from tests.tiny_gguf import write_tiny
from tests.tiny_lora import matrices, write_lora
from tools.architectures.models import MISSING, find_models

pytestmark = pytest.mark.process  # grammars are compiled on trial in a process
PROMPTS, SLOTS = 50, 1
KINDS = {"llama": True, "gemma3": True, "lfm2": True, "qwen35-dense": False}
"""The models, and whether they have the vocabulary of `tests.tiny_gguf`, with an end token and with
texts that grammars can match.
"""
RATES = (0.0, 0.8, 1.0)
END_TOKEN = 2
TASK, NEXT = 1, 2
REMEMBERING = ("mirostat", "mirostat-1")
"""Samplers that learn from each token; another worker does not know what they have learned."""


@dataclass
class Case:
    """A prompt with its sampler, and the event that the run of its answer has."""

    number: int
    event: str
    sampling: SamplingParams
    sampler: str
    fields: dict[str, Any] = field(default_factory=dict)
    answer: list[int] = field(default_factory=list)
    """The tokens of the answer without drafts."""

    @property
    def prompt(self) -> list[int]:
        return [token % VOCAB_USED for token in tokens_of(self.number, 20 + 3 * self.number)]

    def submit(self, speculation: str, **more: Any) -> m.Submit:
        fields = {"speculation": speculation, **self.fields, **more}
        return spec_of(TASK, self.prompt, self.sampling, **fields)


class Runs:
    """The runs of a case on a model, without drafts and with those of a drafter that errs."""

    def __init__(self, model: LlamaModel, case: Case):
        self.model, self.case = model, case

    @contextlib.contextmanager
    def line(self, speculation: str, answer: Sequence[int]) -> Any:
        with contextlib.closing(Line(self.model)) as line:
            line.know({TASK: [*answer]}, RATES[self.case.number % len(RATES)])
            yield line
            assert not line.engine.slots.drafts_cut_states

    def outcome(self, speculation: str, answer: Sequence[int]) -> tuple[object, int]:
        """Return all that the client sees, and the drafts that were computed."""
        with self.line(speculation, answer) as line:
            run: Callable[[Line, str], object] = getattr(self, self.case.event, self.plain)
            return run(line, speculation), drafts_of(line)

    def begin(self, line: Line, speculation: str, **more: Any) -> None:
        """Compute the prompt and a few steps of the answer, of which the last one had drafts."""
        advance(line, self.case.submit(speculation, **more))
        for _ in range(100):
            advance(line)
            task = line.engine.tasks.find_task(TASK)
            if task is None or task.generated > 6:
                return

    def plain(self, line: Line, speculation: str) -> object:
        line.run(self.case.submit(speculation))
        return line.outcome(TASK)

    def parked(self, line: Line, speculation: str) -> object:
        self.begin(line, speculation)
        line.run(m.Park(77, TASK))
        return line.outcome(TASK)

    def preempted(self, line: Line, speculation: str) -> object:
        """It has the only slot when an urgent task arrives."""
        self.begin(line, speculation, priority=Priority.LOW)
        urgent = spec_of(
            NEXT, self.case.prompt[:9], GREEDY, speculation="off", priority=Priority.URGENT
        )
        has_ended = line.engine.tasks.find_task(TASK) is None
        line.run(urgent)
        assert has_ended or line.stats(TASK).parks == 1
        return line.outcome(TASK)

    def cancelled(self, line: Line, speculation: str) -> object:
        """The next turn continues from the state that the cancelled one leaves."""
        self.begin(line, speculation)
        advance(line, m.Cancel(TASK))
        done = line.tokens(TASK)
        assert done == self.case.answer[: len(done)] or not self.case.answer
        history = [*self.case.prompt, *self.case.answer[:5], 7, 8]
        line.run(
            spec_of(NEXT, history, GREEDY, speculation="off", owner=Owner(TASK), no_cache=False)
        )
        return line.outcome(NEXT) if self.case.answer else None

    def killed(self, line: Line, speculation: str) -> object:
        """Another worker continues from what was reported."""
        self.begin(line, speculation)
        events = [r for r in line.reports.get(TASK, ()) if isinstance(r, m.Tokens)]
        known = line.tokens(TASK)
        if isinstance(line.reports[TASK][-1], m.Finished) or not events:
            return line.outcome(TASK)[:2]
        text = b"".join(event.text for event in events)
        submitted = self.case.submit(speculation)
        point = m.ResumePoint(
            output_tokens=len(known),
            text_bytes=len(text),
            started_s=0.0,
            first_token_s=0.0,
            drafted_tokens=events[-1].drafted,
            accepted_tokens=events[-1].accepted,
        )
        tokens = m.pack_tokens([*self.case.prompt, *known])
        spec = structs.replace(submitted.task, tokens=tokens, resume_point=point)
        with self.line(speculation, self.case.answer) as other:
            other.run(m.Submit(spec))
            rest = other.outcome(TASK)
        assert isinstance(rest[0], list) and isinstance(rest[1], bytes)
        return [*known, *rest[0]], text + rest[1]


def advance(line: Line, *commands: m.Command) -> None:
    """Iterate once."""
    for report in iterate_engine(line.engine, commands):
        line.reports.setdefault(getattr(report, "task_id", -1), []).append(report)
    line.engine.tasks.check_integrity()


def drafts_of(line: Line) -> int:
    return int(line.engine.metrics.counts.get("drafted_knowing", 0))


EVENTS = ("none", "parked", "preempted", "cancelled", "killed", "full", "stopped", "ended", "lora")


def cases_of(kind: str, adapter: str) -> list[Case]:
    """Return the prompts of a model: each has another sampler, event and length."""
    found = []
    for number in range(PROMPTS):
        samplers = [n for n, s in SAMPLINGS.items() if KINDS[kind] or not s.has_grammar]
        sampler = samplers[number % len(samplers)]
        event, sampling = EVENTS[number % len(EVENTS)], SAMPLINGS[sampler]
        if event == "killed" and sampler in REMEMBERING:
            event = "parked"
        case = Case(number, event, sampling, sampler)
        if event == "full":
            case.fields["ctx_size"] = len(case.prompt) + PREDICT // 2
        elif event == "lora" and adapter:
            case.fields["adapters"] = (adapter,)
        elif event == "ended" and KINDS[kind] and not sampling.has_grammar:
            bias = (*sampling.logit_bias, (END_TOKEN, 4.0))
            case.sampling = structs.replace(sampling, ignore_eos=False, temp=1.3, logit_bias=bias)
        found.append(case)
    return found


def load(kind: str, folder: Path) -> LlamaModel:
    if KINDS[kind]:
        path = write_tiny(kind, folder)
    else:
        files = find_models([kind])
        assert files is not None, MISSING
        [path] = files
    return load_llama(tiny_spec(path, slots=SLOTS, ctx_size=256), lambda _: True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_to_many_prompts_are_the_same(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafted, ends = Counter[str](), Counter[str]()
    with contextlib.closing(load(kind, tmp_path)) as model:
        adapter = ""
        if kind == "llama":
            file = write_lora(tmp_path / "adapter.gguf", matrices(strength=3.0))
            added = model.add_adapter(AdapterSpec(name="a", path=str(file)))
            adapter = adapter_key(added.id, 1.0)
        cases = cases_of(kind, adapter)
        for case in cases:
            runs = Runs(model, case)
            with runs.line("off", ()) as line:
                line.run(case.submit("off"))
                answer, stats = line.tokens(TASK), line.stats(TASK)
                expected = line.outcome(TASK)
            if case.event == "stopped" and len(answer) > 8:
                case.fields["stopping"] = StoppingParams(stop_tokens=(answer[8],))
                answer = answer[: answer.index(answer[8])]
            ends[stats.stop_reason] += 1
            case.answer = answer
            known = [*answer, END_TOKEN]
            if case.event == "stopped" or hasattr(runs, case.event):
                expected, none = runs.outcome("off", known)
                assert not none
            found, drafts = runs.outcome("knowing", known)
            assert found == expected, (case.number, case.event, case.sampler)
            drafted[case.event] += drafts
    with capsys.disabled():
        counts = f"{len(cases)} prompts, {drafted.total()} drafts"
        sys.stdout.write(f"\n{kind}: {counts}, ends: {dict(ends)}\n")
    assert len(cases) * len(KINDS) == 200
    assert all(drafted[event] > 10 for event in {case.event for case in cases}), drafted
    assert ends["context_full"] > 3, ends
    assert not KINDS[kind] or ends["eos"] > 1, ends
