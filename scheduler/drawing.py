"""From a row of logits to the next token of a turn, its text, and perhaps the turn's end."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends import Model
from .task import Task

__all__ = ("Drawn", "Ending", "draw", "take_up")


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a turn ends: the reason's name and its detail; *piece* is the text of the end mark."""

    reason: str
    detail: str
    piece: bytes = b""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token. *text* is what it releases; None where the token is the end mark itself."""

    token: int
    text: bytes | None
    ending: Ending | None = None


def draw(model: Model, task: Task, ctx_size: int, *, may_shift: bool) -> Drawn:
    """Draw the next token of *task*, whose slot has a row of logits, and add it to its tokens.

    *may_shift* tells that a full context is no end.
    """
    assert task.sampler is not None
    token = model.sample(task.slot, task.sampler, task.generated)
    task.row = False
    task.tokens.append(token)
    spec = task.spec
    if model.is_eog(token) and not spec.sampling.ignore_eos:
        return Drawn(token, None, Ending("eos", str(token), model.piece(token)))
    text, stop = task.text.feed(_piece(model, task, token))
    if stop is not None:
        return Drawn(token, text, Ending("stop", stop))
    if 0 <= spec.n_predict <= task.generated:
        return Drawn(token, text, Ending("length", str(spec.n_predict)))
    if len(task.tokens) >= ctx_size and not may_shift:
        return Drawn(token, text, Ending("context_full", str(ctx_size)))
    return Drawn(token, text)


def take_up(model: Model, task: Task) -> None:
    """Let the text of a turn that another worker had begun go on where its reader is."""
    before = task.spec.progressed
    if before is None or not before.told:
        return
    answer = task.tokens[-before.told :] if before.told < len(task.tokens) else task.tokens
    told = b"".join(_piece(model, task, token) for token in answer)
    task.text.take_up(told, None if before.dropped else before.text_bytes)


def _piece(model: Model, task: Task, token: int) -> bytes:
    hidden = not task.spec.special and model.is_control(token)
    return b"" if hidden else model.piece(token)
