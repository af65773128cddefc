"""Logprobs of sampled tokens, from the model to the client, in llama-server's form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...backends import Model
from .. import messages as m
from ..task import Task


def token_logprobs(model: Model, task: Task) -> list[m.TokenLogprob]:
    """Return the logprobs of the token that *task* has just sampled; none if it needs none."""
    probs = None if task.sampler is None else task.sampler.probs
    if probs is None or not task.spec.sampling.n_probs:
        return []
    top = [m.TokenLogprob(token, model.piece(token), value) for token, value in probs.top]
    return [m.TokenLogprob(probs.token, model.piece(probs.token), probs.value, top)]


def describe_logprobs(
    found: Iterable[m.TokenLogprob], *, after_sampling: bool
) -> list[dict[str, Any]]:
    """Return logprobs as `completion_probabilities` (`tools/server/server-task.cpp`)."""
    value, top = ("prob", "top_probs") if after_sampling else ("logprob", "top_logprobs")

    def describe(one: m.TokenLogprob) -> dict[str, Any]:
        text = one.piece.decode("utf-8", "ignore")
        return {"id": one.token, "token": text, "bytes": list(one.piece), value: one.value}

    return [describe(one) | {top: [describe(other) for other in one.top]} for one in found]
