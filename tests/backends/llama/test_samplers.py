"""Each sampler changes logits by its definition, in the requested order."""

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
from inferd.backends.llama.sampling.chain import PROTOTYPES_MAX
from tests import tiny_gguf
from tests.backends.driving import prefill

ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0}
"""A chain that keeps all tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = tiny_gguf.write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(name="tiny", path=str(path), slots=2, ctx_size=256, threads=1)
    model = load_llama(spec, lambda _: True)
    prefill(model, 0, [1, *range(10, 40)])
    yield model
    model.close()


@pytest.fixture
def logits(model: LlamaModel) -> NDArray[np.float32]:
    """Return logits with six top tokens, 3 … 8 in order; the others are far below."""
    logits = np.full(model.info.vocab_size, -20.0, np.float32)
    logits[3:9] = np.log([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    return logits


def sample_from(
    model: LlamaModel,
    logits: NDArray[np.float32],
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (),
    count: int = 400,
    begin: int = 0,
) -> list[int]:
    """Sample *count* tokens from the same logits, as the tokens *begin* … of one turn."""
    sampler = model.sampler(params, prompt)
    tokens = []
    for index in range(begin, begin + count):
        model.put_logits(0, logits.copy())
        tokens.append(model.sample(0, sampler, index))
    sampler.close()
    return tokens


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
def test_each_sampler_keeps_the_tokens_of_its_definition(
    model: LlamaModel, logits: NDArray[np.float32], fields: dict[str, object], kept: set[int]
) -> None:
    tokens = sample_from(model, logits, SamplingParams(seed=1, **{**ALL, **fields}))  # type: ignore[arg-type]
    assert set(tokens) == kept


def test_top_n_sigma_measures_from_the_highest_logit(
    model: LlamaModel, logits: NDArray[np.float32]
) -> None:
    for n in (0.05, 0.2, 1.0):
        params = SamplingParams(seed=1, **{**ALL, "top_n_sigma": n})  # type: ignore[arg-type]
        least = logits.max() - n * logits.std()
        assert set(sample_from(model, logits, params)) == set(
            np.flatnonzero(logits >= least).tolist()
        ) & set(range(3, 9))


def test_samplers_act_in_the_requested_order(
    model: LlamaModel, logits: NDArray[np.float32]
) -> None:
    """Of the six, xtc drops the first three; top-k 4 then keeps four or, before it, one."""
    fields = {**ALL, "top_k": 4, "xtc_probability": 1.0, "xtc_threshold": 0.099}
    before = SamplingParams(seed=1, samplers=("top-k", "xtc"), **fields)  # type: ignore[arg-type]
    after = SamplingParams(seed=1, samplers=("xtc", "top-k"), **fields)  # type: ignore[arg-type]
    assert set(sample_from(model, logits, before)) == {6}
    assert {6, 7, 8} <= set(sample_from(model, logits, after, count=2000))


def test_a_sampler_that_is_not_named_does_nothing(
    model: LlamaModel, logits: NDArray[np.float32]
) -> None:
    params = SamplingParams(seed=1, top_k=1, samplers=("temperature",))
    assert len(set(sample_from(model, logits, params))) > 3


def test_dry_ends_a_repetition_and_respects_its_breakers(
    model: LlamaModel, logits: NDArray[np.float32]
) -> None:
    """After 3 4 5 … 3 4 the token 5 would be a repetition, except with a breaker between."""
    logits[3:9] = [1, 1, 9, 8, 1, 1]
    for breaker, last_n, expected in (("zzz", -1, 6), ("zzz", 0, 5), ("\x02", -1, 5)):
        params = SamplingParams(
            temp=0, dry_multiplier=5.0, dry_sequence_breakers=(breaker,), dry_penalty_last_n=last_n
        )
        repeated = (3, 4, 5, 4, 3, 4) if breaker == "zzz" else (3, 5, 5, 4, 3, 5)
        assert sample_from(model, logits, params, prompt=repeated, count=1) == [expected], (
            breaker,
            last_n,
        )


def test_biases_add_up_and_a_text_stands_for_its_tokens(
    model: LlamaModel, logits: NDArray[np.float32]
) -> None:
    params = SamplingParams(temp=0, logit_bias=((9, 30.0), (9, 30.0), (10, 40.0)))
    assert sample_from(model, logits, params, count=1) == [9]
    params = SamplingParams(temp=0, logit_bias=(("x", 100.0),))
    assert sample_from(model, logits, params, count=1)[0] in model.tokenize(
        b"x", special=True, bos=False
    )


@pytest.mark.parametrize("token", [-1, 259, 1 << 40])
def test_a_bias_for_an_unknown_token_is_refused(model: LlamaModel, token: int) -> None:
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
def test_a_turn_continues_identically_in_another_sampler(
    model: LlamaModel, logits: NDArray[np.float32], fields: dict[str, object]
) -> None:
    params = SamplingParams(seed=3, **{**ALL, **fields})  # type: ignore[arg-type]
    whole = sample_from(model, logits, params, count=60)
    assert (
        sample_from(model, logits, params, count=30)
        + sample_from(model, logits, params, begin=30, count=30)
        == whole
    )
    assert len(set(whole)) > 1


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_controls_the_surprisal(model: LlamaModel, version: int) -> None:
    """With a low target the sampled tokens have less surprisal; the logits follow Zipf's law."""
    size = model.info.vocab_size
    logits = (-1.1 * np.log(np.arange(1, size + 1))).astype(np.float32)
    bits = -np.log2(np.exp(logits) / np.exp(logits).sum())
    tokens = {}
    for tau in (0.5, 3.5):
        params = SamplingParams(seed=2, temp=1.0, mirostat=version, mirostat_tau=tau)
        tokens[tau] = sample_from(model, logits, params)
        assert sample_from(model, logits, params) == tokens[tau], "the same seed samples the same"
    low, high = (bits[tokens[tau][100:]].mean() for tau in (0.5, 3.5))
    assert low + 1 < high


def test_adaptive_p_samples_only_if_it_is_named(
    model: LlamaModel, logits: NDArray[np.float32]
) -> None:
    fields = {**ALL, "adaptive_target": 0.05}
    named = SamplingParams(seed=2, samplers=("top-k", "adaptive-p"), **fields)  # type: ignore[arg-type]
    unnamed = SamplingParams(seed=2, samplers=("top-k",), **fields)  # type: ignore[arg-type]
    plain = SamplingParams(seed=2, samplers=("top-k",), **ALL)  # type: ignore[arg-type]
    assert sample_from(model, logits, unnamed) == sample_from(model, logits, plain)
    share = [sample_from(model, logits, p).count(3) for p in (named, plain)]
    assert share[0] < share[1], "its target is tokens of lower probability"


def test_a_greedy_chain_respects_samplers_that_drop_the_top_token(
    model: LlamaModel, logits: NDArray[np.float32]
) -> None:
    greedy = SamplingParams(temp=0, xtc_probability=1.0, xtc_threshold=0.12)
    assert sample_from(model, logits, greedy, count=3) == [5, 5, 5]
    greedy = SamplingParams(temp=0, top_k=1, top_p=0.0, min_p=1.0)
    assert sample_from(model, logits, greedy, count=3) == [3, 3, 3]


def test_prototypes_are_bounded_and_copies_are_their_own(
    model: LlamaModel, logits: NDArray[np.float32]
) -> None:
    for last_n in range(1, PROTOTYPES_MAX + 20):
        params = SamplingParams(temp=0, dry_multiplier=1.0, dry_penalty_last_n=last_n)
        assert sample_from(model, logits, params, prompt=(3, 4), count=1) == [3]
    assert len(model._prototypes._made) == PROTOTYPES_MAX


def test_parameters_that_a_file_recommends_are_read_except_invalid_ones(tmp_path: Path) -> None:
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
