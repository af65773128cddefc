"""Answers of real models with a draft model equal those without.

The tiny models are of F32, whose logits hardly depend on the number of tokens of a step. The draft
model is the same file, which is always right, a copy with fewer layers, or another random model. A
model's NextN layer is random, or predicts most tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from inferd.backends import SamplingParams
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.model_spec import AdapterSpec, ModelSpec, adapter_key
from inferd.backends.params import StoppingParams
from inferd.scheduler import EngineSettings
from inferd.scheduler.owner import Owner, Priority
from tests.backends.tiny import tiny_spec, tokens_of
from tests.models import first_blocks_of_smollm2, smollm2, write_first_blocks
from tests.repetitions import FACTOR
from tests.scheduler.engine.test_real_drafts import GREEDY, PREDICT, SAMPLINGS, Line, spec_of
from tests.tiny_gguf import write_tiny
from tests.tiny_lora import SHAPES, matrices, write_lora

pytestmark = pytest.mark.process  # grammars are compiled on trial in a process
KINDS = ("same", "nextn", "cut", "random", "nextn-token", "nextn-hybrid")


def spec_with(kind: str, folder: Path, **fields: int) -> ModelSpec:
    if kind.startswith("nextn"):
        return replace(tiny_spec(write_tiny(kind, folder), **fields), nextn=True)
    path = write_tiny("llama", folder)
    draft = path
    if kind == "cut":
        draft = folder / "cut.gguf"
        write_first_blocks(path, draft, 2, 3)
    elif kind == "random":
        draft = write_tiny("gemma3", folder)
    return replace(tiny_spec(path, **fields), draft_model=str(draft))


@pytest.fixture(scope="module", params=KINDS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaModel]:
    spec = spec_with(request.param, tmp_path_factory.mktemp("models"))
    with contextlib.closing(load_llama(spec, lambda _: True)) as found:
        yield found


def kind_of(model: LlamaModel) -> str:
    names = {"tiny-llama.gguf": "same", "cut.gguf": "cut", "tiny-gemma3.gguf": "random"}
    return names.get(model.info.draft_model, "nextn")


def drafter_of(model: LlamaModel) -> str:
    return "mtp" if model.info.nextn else "draft"


def line_of(model: LlamaModel, settings: EngineSettings | None = None) -> Line:
    """Return an engine on a machine on which all steps take as long, and drafts no time."""
    line = Line(model, settings)
    line.know({}, 0.0)
    cost = line.engine.speculation.by_model.drafter.cost
    learn = cost.learn_step
    cost.learn_step = lambda load, seconds: learn(load, 1e-6)  # type: ignore[method-assign]
    return line


STOPS: dict[str, dict[str, Any]] = {
    "words": {"stop": ("e", "zz")},
    "predict": {"n_predict": 7},
    "few drafts": {"draft_max": 2},
    "ends": {"sampling": SamplingParams(seed=4, temp=2.0, logit_bias=((2, 7.0),))},
    "surprisal": {"stopping": StoppingParams(stop_surprisal=12.0)},
}


OF_EVERY_KIND: tuple[str, ...] = ("greedy", "seeded", "schema", "words", "ends")
if FACTOR > 1:
    OF_EVERY_KIND = ("greedy", "seeded", "penalties", "logprobs", "schema", *STOPS)


@pytest.mark.parametrize("name", OF_EVERY_KIND)
def test_the_answer_is_the_same(model: LlamaModel, name: str) -> None:
    assert_answers_equal(model, name)


@pytest.mark.parametrize("model", KINDS[:2], indirect=True)
@pytest.mark.parametrize("name", [n for n in (*SAMPLINGS, *STOPS) if n not in OF_EVERY_KIND])
def test_the_answer_is_the_same_for_other_samplers_and_ends(model: LlamaModel, name: str) -> None:
    """They do not depend on the drafter."""
    assert_answers_equal(model, name)


def assert_answers_equal(model: LlamaModel, name: str) -> None:
    share = accepted_share(model, name)
    if name == "greedy":
        shares = {"same": (0.95, 1), "cut": (0, 0.95), "random": (0, 0.2), "nextn": (0, 1)}
        low, high = shares[kind_of(model)]
        assert low <= share <= high


def accepted_share(model: LlamaModel, name: str) -> float:
    """Compare an answer with drafts to one without; return the share of the accepted drafts."""
    fields = dict(STOPS.get(name, {}))
    sampling = fields.pop("sampling", SAMPLINGS.get(name, GREEDY))
    outcomes, stats = [], []
    for speculation in ("off", drafter_of(model)):
        with contextlib.closing(line_of(model)) as line:
            line.run(spec_of(1, tokens_of(4, 90), sampling, speculation=speculation, **fields))
            outcomes.append(line.outcome(1))
            stats.append(line.stats(1))
            assert not line.engine.speculation.by_model.error
    assert outcomes[0] == outcomes[1]
    assert not stats[0].drafted_tokens
    return stats[1].accepted_tokens / max(1, stats[1].drafted_tokens)


OF_ONE_KIND = {f"{kind} twice": (kind, kind) for kind in ("mamba", "jamba", "lfm2", "rwkv7")}
PAIRS = {
    **OF_ONE_KIND,
    "mamba for llama": ("llama", "mamba"),
    "jamba for llama": ("llama", "jamba"),
    "lfm2 for jamba": ("jamba", "lfm2"),
    "llama for lfm2": ("lfm2", "llama"),
    "llama for mamba": ("mamba", "llama"),
}
"""Recurrent models and hybrids, with llama.cpp's rollback (LFM2) and without, as models and as
draft models. A draft model of another kind is nearly never right.
"""


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaModel]:
    folder = tmp_path_factory.mktemp("pair")
    kind, draft = (write_tiny(name, folder) for name in PAIRS[request.param])
    spec = replace(tiny_spec(kind), draft_model=str(draft))
    with contextlib.closing(load_llama(spec, lambda _: True)) as found:
        yield found


@pytest.mark.parametrize("name", ["greedy", "ends"])
def test_recurrent_models_draft_and_have_draft_models(pair: LlamaModel, name: str) -> None:
    check_pair(pair, name)


@pytest.mark.parametrize("pair", OF_ONE_KIND if FACTOR == 1 else PAIRS, indirect=True)
@pytest.mark.parametrize("name", ["seeded", "penalties", "schema", "words"])
def test_recurrent_models_draft_whatever_the_samplers_and_ends(pair: LlamaModel, name: str) -> None:
    check_pair(pair, name)


def check_pair(pair: LlamaModel, name: str) -> None:
    share = accepted_share(pair, name)
    if name == "greedy":
        same = pair.info.draft_model.endswith(f"-{pair_kind(pair)}.gguf")
        assert share >= 0.95 if same else share < 0.3


def pair_kind(pair: LlamaModel) -> str:
    return pair.info.description.split()[0]


def test_streams_of_recurrent_models_share_the_steps_of_a_draft_model(pair: LlamaModel) -> None:
    """They are parked and continued in other slots, and their sessions' next turns reuse states."""
    found, parks = [], 0
    for speculation in ("off", "draft"):
        with contextlib.closing(line_of(pair, EngineSettings(quantum_tokens=16))) as line:
            streams = range(1, 7)
            line.run(
                *(
                    spec_of(
                        *(n, tokens_of(n, 20 + 7 * n), GREEDY),
                        speculation=speculation,
                        priority=Priority.NORMAL,
                        no_cache=False,
                    )
                    for n in streams
                )
            )
            found.append([line.tokens(n) for n in streams])
            parks = sum(line.stats(n).parks for n in streams)
            history = [*tokens_of(1, 27), *line.tokens(1), *tokens_of(9, 5)]
            line.run(
                spec_of(
                    *(7, history, GREEDY),
                    speculation=speculation,
                    owner=Owner(1),
                    no_cache=False,
                )
            )
            found[-1].append(line.tokens(7))
    assert found[0] == found[1] and parks > 3


def test_streams_that_are_parked_and_have_an_adapter(model: LlamaModel, tmp_path: Path) -> None:
    """More streams than slots take turns of a few tokens; the last one has an adapter."""
    streams = range(1, 7)
    architecture = model.info.description.split()[0]
    changed = {"blk.1.attn_v.weight"} if model.info.nextn else set(SHAPES)
    pairs = matrices({name: SHAPES[name] for name in changed}, strength=3.0)
    adapter = write_lora(tmp_path / "adapter.gguf", pairs, architecture=architecture)
    added = model.add_adapter(AdapterSpec(name="a", path=str(adapter)))
    key = (adapter_key(added.id, 1.0),)
    found, parks, accepted = [], 0, 0
    for speculation in ("off", drafter_of(model)):
        with contextlib.closing(line_of(model, EngineSettings(quantum_tokens=16))) as line:
            line.run(
                *(
                    spec_of(
                        *(n, tokens_of(n, 50), GREEDY),
                        speculation=speculation,
                        adapters=key if n == 6 else (),
                        n_predict=120 if n == 5 else PREDICT,
                        priority=Priority.NORMAL,
                        no_cache=False,
                    )
                    for n in streams
                )
            )
            found.append([line.tokens(n) for n in streams])
            parks = sum(line.stats(n).parks for n in streams)
            accepted = sum(line.stats(n).accepted_tokens for n in streams)
    model.set_adapters(())
    model.remove_adapter(added.id)
    assert found[0] == found[1] and parks > 3
    assert accepted or kind_of(model) != "same"


def test_the_next_turn_has_the_same_history(model: LlamaModel) -> None:
    found = []
    for speculation in ("off", drafter_of(model)):
        with contextlib.closing(line_of(model)) as line:
            fields: dict[str, Any] = {"owner": Owner(1), "no_cache": False}
            fields["speculation"] = speculation
            line.run(spec_of(1, tokens_of(9, 40), GREEDY, **fields))
            history = [*tokens_of(9, 40), *line.tokens(1), *tokens_of(8, 5)]
            line.run(spec_of(2, history, GREEDY, **fields))
            assert line.stats(2).cached_tokens >= 79
            found.append((line.tokens(1), line.tokens(2)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["same", "nextn-token"])
def test_a_context_that_is_full_within_a_draft(kind: str, tmp_path: Path) -> None:
    spec = spec_with(kind, tmp_path, ctx_size=256)
    with contextlib.closing(load_llama(spec, lambda _: True)) as model:
        found = []
        for speculation in ("off", drafter_of(model)):
            with contextlib.closing(line_of(model)) as line:
                prompt = tokens_of(2, 200)
                line.run(spec_of(1, prompt, GREEDY, speculation=speculation, n_predict=-1))
                found.append(line.outcome(1))
                assert line.stats(1).stop_reason == "context_full"
                assert bool(line.stats(1).accepted_tokens) == (speculation != "off")
        assert found[0] == found[1]


def test_smollm2_and_its_copy_without_the_last_layer() -> None:
    """Two thirds of its drafts are right. The model's logits depend on the size of a step, so the
    text is not compared.
    """
    cut = first_blocks_of_smollm2(29)
    spec = ModelSpec(
        name="s", path=str(smollm2()), draft_model=str(cut), slots=1, ctx_size=512, threads=1
    )
    with contextlib.closing(load_llama(spec, lambda _: True)) as model:
        prompt = model.tokenize(b"The capital of France is", special=False, bos=True)
        with contextlib.closing(line_of(model)) as line:
            greedy = SamplingParams(temp=0, ignore_eos=True)
            line.run(spec_of(1, prompt, greedy, speculation="draft", n_predict=50, draft_max=1))
            stats = line.stats(1)
        assert 0.5 < stats.accepted_tokens / stats.drafted_tokens < 0.95
        assert stats.drafted_tokens > 20
