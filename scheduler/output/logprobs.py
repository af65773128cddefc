"""How likely drawn tokens were: from the model to what a client is told, as by llama-server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...backends import Model
from .. import messages as m
from ..task import Task


def token_logprobs(model: Model, task: Task) -> list[m.TokenLogprob]:
    """Return what is to be told of the token that *task* has just drawn; mostly nothing."""
    probs = None if task.sampler is None else task.sampler.probs
    if probs is None or not task.spec.sampling.n_probs:
        return []
    top = [m.TokenLogprob(token, model.piece(token), value) for token, value in probs.top]
    return [m.TokenLogprob(probs.token, model.piece(probs.token), probs.value, top)]


def described(found: Iterable[m.TokenLogprob], *, after_sampling: bool) -> list[dict[str, Any]]:
    """Return `completion_probabilities` (`tools/server/server-task.cpp`)."""
    value, top = ("prob", "top_probs") if after_sampling else ("logprob", "top_logprobs")
    return [_one(one, value) | {top: [_one(other, value) for other in one.top]} for one in found]


def _one(one: m.TokenLogprob, value: str) -> dict[str, Any]:
    text = one.piece.decode("utf-8", "ignore")
    return {"id": one.token, "token": text, "bytes": list(one.piece), value: one.value}
