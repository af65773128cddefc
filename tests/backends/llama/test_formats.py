"""Answers by regular expressions, Lark and structural tags, on a model with random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.llama.sampling.chain import LlamaSampler
from inferd.backends.params import StoppingParams
from inferd.backends.params.structural_tags import read_structural_tag
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.owner import Owner
from tests.scheduler.doubles import iterate_engine
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process  # the trial of grammars

PROMPT = [1, *range(10, 40)]
CALL = {"begin": "<f>", "schema": {"enum": ["left", "right", 7]}, "end": "</f>"}
TAG = {"structures": [CALL], "triggers": ["<f"]}
ONE = {
    "type": "triggered_tags",
    "triggers": ["<f>"],
    "tags": [
        {
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": CALL["schema"]},
            "end": "</f>",
        }
    ],
    "at_least_one": True,
    "stop_after_first": True,
}
FORMATS = {
    "regex": ({"regex": "[a-f]{2,4}(-[0-9]{3}){1,3}"}, r"[a-f]{2,4}(-[0-9]{3}){1,3}"),
    "lark": (
        {"lark": 'start: item{1,3}\nitem: "-" WORD "\\n"\nWORD: /[a-z]{2,5}/'},
        r"(-[a-z]{2,5}\n){1,3}",
    ),
    "structural-tag": (
        {"structural_tag": read_structural_tag({"format": ONE})},
        r'<f>("left"|"right"|7)</f>',
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(name="tiny", path=str(path), slots=2, ctx_size=512, threads=1)
    model = load_llama(spec, lambda _: True)
    yield model
    model.close()


def sampling_of(name: str, **fields: object) -> SamplingParams:
    values = {"top_k": 0, "min_p": 0.0, "top_p": 1.0, **FORMATS[name][0], **fields}
    return SamplingParams(**values)  # type: ignore[arg-type]


def answer(model: LlamaModel, sampling: SamplingParams, park_at: int = -1, **fields: object) -> str:
    """Return the text of one turn, which is parked once after its token number *park_at*."""
    engine = Engine(model)
    values: dict[str, Any] = {"id": 1, "owner": Owner(1), "n_predict": 400, **fields}
    spec = m.TaskSpec(tokens=m.pack_tokens(PROMPT), sampling=sampling, **values)
    reports, parked = iterate_engine(engine, [m.Submit(spec)]), False
    while not isinstance(reports[-1], m.Finished | m.Failed):
        count = sum(isinstance(report, m.Tokens) for report in reports)
        park = [m.Park(7, 1)] if 0 <= park_at < count and not parked else []
        parked = parked or bool(park)
        reports += iterate_engine(engine, park)
    assert isinstance(reports[-1], m.Finished), reports[-1]
    assert parked == (park_at >= 0)
    texts = [r.text for r in reports if isinstance(r, m.Tokens | m.Finished)]
    return b"".join(texts).decode("utf-8", "replace")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FORMATS)
def test_answers_have_their_format(model: LlamaModel, name: str, seed: int) -> None:
    for fields in ({"temp": 0.0}, {"temp": 2.0}, {"repeat_penalty": 9.0}, {"mirostat": 2}):
        text = answer(model, sampling_of(name, seed=seed, **fields))
        assert re.fullmatch(FORMATS[name][1], text), text


@pytest.mark.parametrize("name", FORMATS)
def test_a_parked_answer_continues_as_if_it_had_not_been_parked(
    model: LlamaModel, name: str
) -> None:
    # Forced tokens are reported together, so that there would be few places to park.
    sampling = sampling_of(name, temp=2.0, seed=3, jump_forward=False)
    text = answer(model, sampling)
    for park_at in (0, 3, 6):
        assert answer(model, sampling, park_at) == text


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_continues_identically_in_another_sampler(model: LlamaModel, name: str) -> None:
    """As after a crash or a swap, where its tokens are replayed."""
    sampling = sampling_of(name, temp=2.0, seed=3)
    tokens = [3 + byte for byte in answer(model, sampling).encode()]
    whole = model.sampler(sampling, PROMPT)
    assert isinstance(whole, LlamaSampler) and whole.grammar is not None
    for count in range(len(tokens)):
        again = model.sampler(sampling, PROMPT, tokens[:count])
        assert isinstance(again, LlamaSampler) and again.grammar is not None
        assert again.grammar.allowed().tolist() == whole.grammar.allowed().tolist(), count
        assert again.complete == whole.complete
        whole.grammar.accept(tokens[count])
        again.close()
    assert whole.complete
    whole.close()


@pytest.mark.parametrize("name", ["regex", "lark"])
def test_a_format_may_begin_at_a_trigger(model: LlamaModel, name: str) -> None:
    sampling = sampling_of(name, temp=0, grammar_triggers=(("word", "now:"),))
    before = [3 + byte for byte in b"free text now:"]
    sampler = model.sampler(sampling, PROMPT, before)
    assert isinstance(sampler, LlamaSampler) and sampler.grammar is not None
    text = "ab-123" if name == "regex" else "-ab\n"
    for byte in text.encode():
        assert sampler.grammar.allows(3 + byte), text
        sampler.grammar.accept(3 + byte)
    assert sampler.complete
    sampler.close()


def test_stop_grammar_ends_an_answer_at_its_shortest_form(model: LlamaModel) -> None:
    stopping = StoppingParams(stop_grammar=True)
    text = answer(model, sampling_of("regex", temp=2.0, seed=1), stopping=stopping)
    assert re.fullmatch("[a-f]{2,4}-[0-9]{3}", text)


def test_free_text_continues_until_a_part_begins(model: LlamaModel) -> None:
    """The model has random weights: a bias makes it write `<` and `f` often."""
    parts = 0
    for seed in range(4):
        sampling = SamplingParams(
            structural_tag=read_structural_tag(TAG),
            seed=seed,
            temp=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            logit_bias=tuple((3 + ord(letter), 7.0) for letter in "<f"),
        )
        text = answer(model, sampling)
        found = re.findall(r"<f>(.*?)</f>", text)
        assert text.count("<f") - len(found) in (0, 1), "the last one may be cut off"
        assert all(json.loads(part) in ("left", "right", 7) for part in found)
        parts += len(found)
    assert parts >= 4
