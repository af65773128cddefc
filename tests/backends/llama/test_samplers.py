"""Each sampler does to a row of logits what its definition says, in the order that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from inferd.backends import ModelSpec, SamplingParams
from inferd.backends.errors import InvalidArgument
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.llama.sampling.samplers import PROTOTYPES_MAX
from tests import tiny_gguf
from tests.backends.driving import prefill

ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0}
"""A chain that takes nothing away."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = tiny_gguf.write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(name="tiny", path=str(path), slots=2, ctx_size=256, threads=1)
    model = load_llama(spec, lambda _: True)
    prefill(model, 0, [1, *range(10, 40)])
    yield model
    model.close()


@pytest.fixture
def row(model: LlamaModel) -> NDArray[np.float32]:
    """Logits with a few likely tokens: 3 … 8, from the likeliest down, the rest far below."""
    row = np.full(model.info.vocab_size, -20.0, np.float32)
    row[3:9] = np.log([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    return row


def draw(
    model: LlamaModel,
    row: NDArray[np.float32],
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (),
    count: int = 400,
    begin: int = 0,
) -> list[int]:
    """Draw *count* tokens from the same row, as the tokens *begin* … of one turn."""
    sampler = model.sampler(params, prompt)
    drawn = []
    for index in range(begin, begin + count):
        model.put_logits(0, row.copy())
        drawn.append(model.sample(0, sampler, index))
    sampler.close()
    return drawn


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, {3, 4}),
        ({"top_p": 0.69}, {3, 4}),
        ({"top_p": 0.69, "min_keep": 4}, {3, 4, 5, 6}),
        ({"min_p": 0.3}, {3, 4, 5}),
        ({"top_n_sigma": 0.4}, {3, 4, 5}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.12}, {5, 6, 7, 8}),
        ({"logit_bias": ((3, False), (4, False))}, {5, 6, 7, 8}),
        ({"logit_bias": ((200, 60.0),)}, {200}),
        ({"dynatemp_range": 0.9, "top_k": 2}, {3, 4}),
    ],
    ids=str,
)
def test_a_sampler_leaves_the_tokens_that_its_definition_says(
    model: LlamaModel, row: NDArray[np.float32], fields: dict[str, object], kept: set[int]
) -> None:
    drawn = draw(model, row, SamplingParams(seed=1, **{**ALL, **fields}))  # type: ignore[arg-type]
    assert set(drawn) == kept


def test_top_n_sigma_measures_from_the_highest_logit(
    model: LlamaModel, row: NDArray[np.float32]
) -> None:
    for n in (0.05, 0.2, 1.0):
        params = SamplingParams(seed=1, **{**ALL, "top_n_sigma": n})  # type: ignore[arg-type]
        least = row.max() - n * row.std()
        assert set(draw(model, row, params)) == set(np.flatnonzero(row >= least).tolist()) & set(
            range(3, 9)
        )


def test_samplers_act_in_the_order_that_was_asked_for(
    model: LlamaModel, row: NDArray[np.float32]
) -> None:
    """Of the six, xtc leaves out the first three; top-k 4 then leaves four or, before, one."""
    fields = {**ALL, "top_k": 4, "xtc_probability": 1.0, "xtc_threshold": 0.099}
    before = SamplingParams(seed=1, samplers=("top-k", "xtc"), **fields)  # type: ignore[arg-type]
    after = SamplingParams(seed=1, samplers=("xtc", "top-k"), **fields)  # type: ignore[arg-type]
    assert set(draw(model, row, before)) == {6}
    assert {6, 7, 8} <= set(draw(model, row, after, count=2000))


def test_a_sampler_that_is_not_named_does_nothing(
    model: LlamaModel, row: NDArray[np.float32]
) -> None:
    params = SamplingParams(seed=1, top_k=1, samplers=("temperature",))
    assert len(set(draw(model, row, params))) > 3


def test_dry_breaks_a_repetition_and_heeds_its_breakers(
    model: LlamaModel, row: NDArray[np.float32]
) -> None:
    """After 3 4 5 … 3 4 the token 5 would repeat; a breaker between makes it none."""
    row[3:9] = [1, 1, 9, 8, 1, 1]
    for breaker, last_n, expected in (("zzz", -1, 6), ("zzz", 0, 5), ("\x02", -1, 5)):
        params = SamplingParams(
            temp=0, dry_multiplier=5.0, dry_sequence_breakers=(breaker,), dry_penalty_last_n=last_n
        )
        repeated = (3, 4, 5, 4, 3, 4) if breaker == "zzz" else (3, 5, 5, 4, 3, 5)
        assert draw(model, row, params, prompt=repeated, count=1) == [expected], (breaker, last_n)


def test_biases_add_up_and_texts_mean_their_tokens(
    model: LlamaModel, row: NDArray[np.float32]
) -> None:
    params = SamplingParams(temp=0, logit_bias=((9, 30.0), (9, 30.0), (10, 40.0)))
    assert draw(model, row, params, count=1) == [9]
    params = SamplingParams(temp=0, logit_bias=(("x", 100.0),))
    assert draw(model, row, params, count=1)[0] in model.tokenize(b"x", special=True, bos=False)


@pytest.mark.parametrize("token", [-1, 259, 1 << 40])
def test_a_bias_for_a_token_that_there_is_not_is_refused(model: LlamaModel, token: int) -> None:
    with pytest.raises(InvalidArgument, match="logit-bias"):
        model.sampler(SamplingParams(logit_bias=((token, 1.0),)), ())


@pytest.mark.parametrize(
    "fields",
    [
        {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"top_k": 4},
        {"xtc_probability": 0.5, "samplers": ("temperature", "xtc", "top-k"), "temp": 2.0},
    ],
    ids=str,
)
def test_a_turn_goes_on_in_another_sampler_as_it_would_have(
    model: LlamaModel, row: NDArray[np.float32], fields: dict[str, object]
) -> None:
    params = SamplingParams(seed=3, **{**ALL, **fields})  # type: ignore[arg-type]
    whole = draw(model, row, params, count=60)
    assert (
        draw(model, row, params, count=30) + draw(model, row, params, begin=30, count=30) == whole
    )
    assert len(set(whole)) > 1


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_steers_the_surprise(model: LlamaModel, version: int) -> None:
    """With a low aim the tokens drawn are less surprising, on a row as Zipf's law has it."""
    size = model.info.vocab_size
    row = (-1.1 * np.log(np.arange(1, size + 1))).astype(np.float32)
    bits = -np.log2(np.exp(row) / np.exp(row).sum())
    drawn = {}
    for tau in (0.5, 3.5):
        params = SamplingParams(seed=2, temp=1.0, mirostat=version, mirostat_tau=tau)
        drawn[tau] = draw(model, row, params)
        assert draw(model, row, params) == drawn[tau], "the same seed draws the same"
    low, high = (bits[drawn[tau][100:]].mean() for tau in (0.5, 3.5))
    assert low + 1 < high


def test_adaptive_p_draws_only_where_it_is_named(
    model: LlamaModel, row: NDArray[np.float32]
) -> None:
    fields = {**ALL, "adaptive_target": 0.05}
    named = SamplingParams(seed=2, samplers=("top-k", "adaptive-p"), **fields)  # type: ignore[arg-type]
    unnamed = SamplingParams(seed=2, samplers=("top-k",), **fields)  # type: ignore[arg-type]
    plain = SamplingParams(seed=2, samplers=("top-k",), **ALL)  # type: ignore[arg-type]
    assert draw(model, row, unnamed) == draw(model, row, plain)
    share = [draw(model, row, p).count(3) for p in (named, plain)]
    assert share[0] < share[1], "it aims at less likely tokens"


def test_a_greedy_end_heeds_what_may_leave_the_likeliest_out(
    model: LlamaModel, row: NDArray[np.float32]
) -> None:
    greedy = SamplingParams(temp=0, xtc_probability=1.0, xtc_threshold=0.12)
    assert draw(model, row, greedy, count=3) == [5, 5, 5]
    greedy = SamplingParams(temp=0, top_k=1, top_p=0.0, min_p=1.0)
    assert draw(model, row, greedy, count=3) == [3, 3, 3]


def test_prototypes_are_bounded_and_copies_are_their_own(
    model: LlamaModel, row: NDArray[np.float32]
) -> None:
    for last_n in range(1, PROTOTYPES_MAX + 20):
        params = SamplingParams(temp=0, dry_multiplier=1.0, dry_penalty_last_n=last_n)
        assert draw(model, row, params, prompt=(3, 4), count=1) == [3]
    assert len(model._prototypes._made) == PROTOTYPES_MAX


def test_a_file_recommends_parameters_and_a_bad_one_is_left_out(tmp_path: Path) -> None:
    path = tiny_gguf.write_tiny("llama", tmp_path)
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.sampling.temp") is None
    write = gguf.GGUFWriter.write_header_to_file

    def with_more(self: gguf.GGUFWriter, *arguments: object) -> None:
        self.add_float32("general.sampling.temp", 0.25)
        self.add_int32("general.sampling.top_k", 7)
        self.add_float32("general.sampling.top_p", 9.0)
        self.add_string("general.sampling.sequence", "kt")
        write(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_more)
        path = tiny_gguf.write_tiny("llama", tmp_path)
    spec = ModelSpec(name="tiny", path=str(path), slots=1, ctx_size=128, threads=1)
    model = load_llama(spec, lambda _: True)
    assert model.info.sampling == {
        "temp": 0.25,
        "top-k": 7,
        "samplers": ["top-k", "temperature"],
    }
    model.close()
