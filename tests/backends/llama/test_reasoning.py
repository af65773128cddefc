"""Bounds of reasoning on a tiny model, whose tokens are bytes, with grammars behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd.backends import LanguageModel, ModelSpec
from inferd.backends.answer_form import THINK
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.params import ToolChoice
from inferd.backends.tool_formats import named_form
from inferd.scheduler import messages as m
from inferd.sessions.answers.constraint import constraint_of
from tests.backends.llama.test_jump_forward import (
    SAMPLINGS,
    Runner,
    assert_state_as_from_scratch,
    spec_of,
)
from tests.backends.tiny import SLOTS
from tests.small_gemma import small_gemma3
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process  # the trial of grammars

END = b"</think>"
OBJECT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
SCHEMA = {"json_schema": json.dumps(OBJECT), "json_whitespace": "compact"}
HERMES = named_form("hermes")
TOOL = {"type": "function", "function": {"name": "a", "parameters": OBJECT, "strict": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(
        name="tiny", path=str(path), slots=SLOTS, ctx_size=512, batch_size=64, threads=1
    )
    loaded = load_llama(spec, lambda _: True)
    yield loaded
    loaded.close()


def thinking(budget: int = -1, **fields: Any) -> m.ReasoningSpec:
    return m.ReasoningSpec(blocks=(THINK,), opened="<think>\n", budget=budget, **fields)


def run(model: LlamaModel, reasoning: m.ReasoningSpec, **fields: Any) -> tuple[bytes, Runner]:
    runner = Runner(model)
    answers = runner.run([spec_of(reasoning=reasoning, **fields)])
    return answers[1].text, runner


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("budget", [0, 1, 30])
def test_a_thought_is_the_same_up_to_its_forced_end(
    model: LlamaModel, sampling: str, budget: int
) -> None:
    fields = {**SAMPLINGS[sampling], "n_predict": 60, "ignore_eos": True}
    whole = Runner(model).run([spec_of(**fields)])[1].tokens
    runner = Runner(model)
    found = runner.run([spec_of(reasoning=thinking(budget), **fields)])[1].tokens
    done = runner.ends[1].stats.reasoning_tokens - len(END)
    assert budget <= done <= budget + 8, "only an incomplete character makes it longer"
    assert found[:done] == whole[:done]
    assert b"".join(map(model.piece, found[done : done + len(END)])) == END
    assert len(found) == 60
    assert_state_as_from_scratch(runner, 1)


@pytest.mark.parametrize("budget", [0, 7])
@pytest.mark.parametrize("jump_forward", [True, False])
def test_a_grammar_begins_behind_the_forced_end(
    model: LlamaModel, budget: int, jump_forward: bool
) -> None:
    reasoning = thinking(budget, rests_grammar=True, message="Enough.")
    text, runner = run(
        model, reasoning, **SCHEMA, temp=1.5, seed=4, jump_forward=jump_forward, n_predict=80
    )
    thought, _, rest = text.partition(b"Enough." + END)
    assert len(thought) >= budget and json.loads(rest)["ok"] in (True, False)
    assert runner.ends[1].stats.stop_reason == "eos"
    assert_state_as_from_scratch(runner, 1)


def test_a_grammar_with_reasoning_of_its_own_accepts_the_forced_end(model: LlamaModel) -> None:
    choice = ToolChoice("required", ("a",))
    fields = constraint_of(HERMES, [TOOL], choice, parallel=False, opened="<think>")
    assert fields
    text, _ = run(model, thinking(9), **fields, temp=1.5, seed=2, n_predict=200)
    thought, _, call = text.partition(END)
    assert len(thought) >= 9
    assert json.loads(
        call.decode().strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
    )


def test_the_forced_end_starts_a_grammar_that_waits_for_it(model: LlamaModel) -> None:
    grammar = {"grammar": 'root ::= "yes" | "no"', "grammar_triggers": (("word", "</think>"),)}
    text, _ = run(model, thinking(5), **grammar, temp=1.5, seed=2)
    assert text.partition(END)[2] in (b"yes", b"no")


def test_an_end_that_the_grammar_refuses_is_not_forced(model: LlamaModel) -> None:
    text, runner = run(model, thinking(0), grammar="root ::= [a-e]{20}", temp=1.5)
    assert len(text) == 20 and END not in text
    assert runner.ends[1].stats.reasoning_tokens == 21 - 1

    runner = Runner(model)
    runner.iterate(m.Submit(spec_of(reasoning=thinking(), grammar="root ::= [a-e]{20}")))
    results = list[Any]()

    def request(runner: Runner) -> list[m.Command]:
        if not runner.tokens or results:
            return []
        task = runner.engine.tasks.find_task(1)
        assert task is not None
        results.append(runner.engine._answers.end_reasoning(task))
        return []

    while 1 not in runner.ends:
        runner.iterate(*request(runner))
    assert results == ["refused_by_grammar"]


def test_each_worker_continues_a_grammar_behind_a_forced_end(model: LlamaModel) -> None:
    """A worker may end anywhere; the next one has the tokens so far."""
    reasoning = thinking(6, rests_grammar=True)
    fields: dict[str, Any] = {**SCHEMA, "temp": 1.5, "seed": 4, "n_predict": 80}
    first = Runner(model)
    whole = first.run([spec_of(reasoning=reasoning, **fields)])[1]
    prompt = m.unpack_tokens(spec_of().tokens)
    ends = dict[int, int]()
    for event in first.tokens[1]:
        ends[max(ends, default=0) + len(event.tokens)] = event.ending_left
    for done in [*ends][:-1]:
        text = b"".join(map(model.piece, whole.tokens[:done]))
        point = m.ResumePoint(output_tokens=done, text_bytes=len(text), ending_left=ends[done])
        runner = Runner(model)
        spec = spec_of(
            1, prompt + whole.tokens[:done], reasoning=reasoning, resume_point=point, **fields
        )
        assert runner.run([spec])[1].tokens == whole.tokens[done:], done


TEXTS = ("</think>", "\n</think>\n\n", "Enough of that.", "<|im_end|>", "日本")


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_a_text_is_spelled_without_additions(
    llama: LanguageModel, text: str, special: bool
) -> None:
    tokens = llama.spell(text.encode(), special)
    assert b"".join(map(llama.piece, tokens)).decode() == text
    if text == "<|im_end|>":
        assert len(tokens) == 1 if special else len(tokens) > 1


@pytest.mark.model
def test_a_text_is_spelled_without_the_space_that_a_vocabulary_adds(tmp_path: Path) -> None:
    spec = ModelSpec(name="g", path=str(small_gemma3()), slots=1, ctx_size=64, threads=1)
    model = load_llama(spec, lambda _: True)
    for text in TEXTS:
        tokens = model.spell(text.encode(), False)
        assert b"".join(map(model.piece, tokens)).decode() == text
    assert len(model.spell(b"Enough of that.", False)) < 6, "words, not bytes"
    assert model.spell(b"<end_of_turn>", True) != model.spell(b"<end_of_turn>", False)
    model.close()
