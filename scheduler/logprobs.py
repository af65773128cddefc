"""Logprobs of sampled tokens and of a prompt's, from the model to the client, in llama-server's
form.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..backends import LanguageModel
from ..backends.base import TokenProbs
from . import messages as m
from .task import Task


def token_logprobs(model: LanguageModel, task: Task) -> list[m.TokenLogprob]:
    """Return the logprobs of the token that *task* has just sampled; none if it needs none."""
    probs = None if task.sampler is None else task.sampler.probs
    if probs is None or not task.spec.sampling.n_probs:
        return []
    return [_with_pieces(model, probs)]


def prompt_logprobs(model: LanguageModel, task: Task, count: int) -> list[m.TokenLogprob]:
    """Return the wanted logprobs of the prompt's tokens that the last step has made known, in which
    *task* computed *count* tokens.
    """
    top = task.spec.prompt_logprobs
    first, end = task.logprobs_done, min(task.computed + count + 1, task.prompt_size)
    if top is None or first >= end:
        return []
    found = []
    if not first:  # nothing precedes it, so it has no rank
        token = task.tokens[0]
        found.append(m.TokenLogprob(token, model.piece(token), 0.0))
    for index in range(max(1, first), end):
        probs = model.probs_after(task.slot, index - 1, task.tokens[index], top)
        found.append(_with_pieces(model, probs))
    return found


def _with_pieces(model: LanguageModel, probs: TokenProbs) -> m.TokenLogprob:
    top = [
        m.TokenLogprob(token, model.piece(token), value, rank=rank)
        for rank, (token, value) in enumerate(probs.top, start=1)
    ]
    piece = model.piece(probs.token)
    return m.TokenLogprob(probs.token, piece, probs.value, top, probs.rank)


def describe_logprobs(
    found: Iterable[m.TokenLogprob], *, after_sampling: bool
) -> list[dict[str, Any]]:
    """Return logprobs as `completion_probabilities` (`tools/server/server-task.cpp`)."""
    value, top = ("prob", "top_probs") if after_sampling else ("logprob", "top_logprobs")

    def describe(one: m.TokenLogprob) -> dict[str, Any]:
        text = one.piece.decode("utf-8", "ignore")
        return {"id": one.token, "token": text, "bytes": list(one.piece), value: one.value}

    return [describe(one) | {top: [describe(other) for other in one.top]} for one in found]


def describe_prompt(found: Iterable[m.TokenLogprob]) -> list[dict[str, Any]]:
    """Return the logprobs of a prompt's tokens in the same form, with the ranks of vLLM's
    `prompt_logprobs`.
    """
    found = list(found)
    described = describe_logprobs(found, after_sampling=False)
    for one, entry in zip(found, described, strict=True):
        if one.rank:
            entry["rank"] = one.rank
        else:
            entry["logprob"] = None
    return described
