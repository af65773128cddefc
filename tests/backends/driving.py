"""Steps of a model without the engine: prefill, then one token a step."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.backends import (
    Chunk,
    LanguageModel,
    ModelSpec,
    Sampler,
    SamplingParams,
    load_model,
)
from inferd.backends.model_spec import LoadProgress

GREEDY = SamplingParams(temp=0)
SAMPLED = SamplingParams(temp=1.0, seed=7, top_k=0, top_p=1.0, min_p=0.0)


def load_language_model(spec: ModelSpec, progress: LoadProgress = lambda _: True) -> LanguageModel:
    model = load_model(spec, progress)
    assert isinstance(model, LanguageModel)
    return model


def prefill(model: LanguageModel, slot: int, tokens: Sequence[int], position: int = 0) -> int:
    """Decode *tokens* in batches of the largest size; return the position after them."""
    size = model.info.batch_size
    for begin in range(0, len(tokens), size):
        part = tokens[begin : begin + size]
        last = begin + len(part) == len(tokens)
        model.step([Chunk(slot, part, position + begin, logits=last)])
    return position + len(tokens)


def sample_tokens(
    model: LanguageModel,
    slot: int,
    sampler: Sampler,
    position: int,
    *,
    index: int = 0,
    count: int = 6,
) -> list[int]:
    """Sample *count* tokens from a slot that has logits; decode each but the last."""
    tokens = [model.sample(slot, sampler, index)]
    for i in range(1, count):
        model.step([Chunk(slot, tokens[-1:], position + i - 1, logits=True)])
        tokens.append(model.sample(slot, sampler, index + i))
    return tokens


def generate(
    model: LanguageModel,
    slot: int,
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    *,
    count: int = 6,
) -> list[int]:
    """Prefill an empty slot with *prompt* and sample *count* tokens."""
    sampler = model.sampler(params, prompt)
    tokens = sample_tokens(model, slot, sampler, prefill(model, slot, prompt), count=count)
    sampler.close()
    return tokens
