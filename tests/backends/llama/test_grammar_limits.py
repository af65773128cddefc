"""A limit of a grammar that an answer meets in its middle ends its turn alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llguidance import LLParserLimits

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.grammars.compiler import GrammarCompiler
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.owner import Owner
from tests.scheduler.doubles import iterate_engine
from tests.tiny_gguf import write_tiny

ITEMS_MAX = 50
GRAMMAR = 'root ::= x "b"\nx ::= x x | "a"'
"""After each letter, llguidance counts the places where an x can have begun."""
A, B = 3 + ord("a"), 3 + ord("b")
PROMPT = [1, *range(10, 40)]


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(name="tiny", path=str(path), slots=2, ctx_size=512, threads=1)
    model = load_llama(spec, lambda _: True)
    yield model
    model.close()


def run(engine: Engine, *specs: m.TaskSpec) -> dict[int, list[m.Report]]:
    """Return the reports of turns, by task, once all have ended."""
    found: dict[int, list[m.Report]] = {spec.id: [] for spec in specs}
    reports = iterate_engine(engine, [m.Submit(spec) for spec in specs])
    while True:
        for report in reports:
            if (number := getattr(report, "task_id", None)) is not None:
                found[number].append(report)
        engine.tasks.check_integrity()
        if all(isinstance(r[-1], m.Finished | m.Failed) for r in found.values() if r):
            return found
        reports = iterate_engine(engine)


def turn(number: int, count: int = 100, **sampling: str) -> m.TaskSpec:
    return m.TaskSpec(
        id=number,
        owner=Owner(number),
        tokens=m.pack_tokens(PROMPT),
        sampling=SamplingParams(temp=0, logit_bias=((B, -50.0),), **sampling),  # type: ignore[arg-type]
        n_predict=count,
    )


def text_of(reports: list[m.Report]) -> bytes:
    return b"".join(r.text for r in reports if isinstance(r, m.Tokens | m.Finished))


@pytest.mark.process
def test_a_limit_in_the_middle_of_an_answer_ends_only_its_turn(model: LlamaModel) -> None:
    engine = Engine(model)
    alone = run(engine, turn(1))[1]
    model._grammars.close()
    limits = LLParserLimits(max_items_in_row=ITEMS_MAX, verbose_errors=False)
    model._grammars = GrammarCompiler(model._matching.attach(model._vocab), limits)

    before = engine.statistics()["generated"]
    found = run(engine, turn(2, grammar=GRAMMAR), turn(3))
    failed = found[2][-1]
    assert isinstance(failed, m.Failed) and failed.error["name"] == "TooLarge"
    assert failed.error["hint"] and "aaa" not in str(failed.error), "no text of the answer"
    text = text_of(found[2])
    assert text == b"a" * len(text) and 5 < len(text) < ITEMS_MAX, "what was sent before"
    assert text_of(found[3]) == text_of(alone), "the neighbour went on"
    generated = engine.statistics()["generated"] - before
    assert generated == len(text) + 100, "tokens of the failed turn count as far as they were sent"
    assert all(task is None for task in [engine.tasks.find_task(2), engine.tasks.find_task(3)])

    again = run(engine, turn(4, grammar='root ::= "ok"'))[4]
    assert text_of(again) == b"ok" and isinstance(again[-1], m.Finished)
