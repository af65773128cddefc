"""From logits to the next token of a turn, its text, and perhaps the turn's end."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from ...backends import Model, Sampler, SamplingParams
from ..messages import unpack_floats, unpack_tokens
from ..task import Task
from .stopping import Ending, TurnConditions
from .stopping.ending import CONTEXT_FULL, END_MARK, GRAMMAR, LENGTH, TIME, TOKEN


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token. *text* is what it releases; None where the token is the end mark itself.
    *surprisal* is known where it counts.
    """

    token: int
    text: bytes | None
    ending: Ending | None = None
    surprisal: float | None = None


def sampler_for(model: Model, task: Task, sampling: SamplingParams) -> Sampler:
    """Return a sampler that has seen the tokens of *task* so far."""
    prompt, answer = task.said
    return model.sampler(sampling, prompt, answer)


def sample_token(model: Model, task: Task, now: float, *, last: bool) -> SampledToken:
    """Sample the next token of *task*, whose slot has logits, and add it to its tokens.

    *last* tells that its context has no room for another.
    """
    assert task.sampler is not None
    watch = task.watch
    counts = watch is not None and watch.surprisal is not None
    surprisal_of = model.surprisal(task.slot) if counts else None
    token = model.sample(task.slot, task.sampler, task.generated)
    task.has_logits = False
    task.tokens.append(token)
    spec = task.spec
    if model.is_eog(token) and not spec.sampling.ignore_eos:
        return SampledToken(token, None, Ending(END_MARK, str(token), model.piece(token)))
    if watch is not None and token in watch.tokens:
        return SampledToken(token, None, Ending(TOKEN, str(token)))
    piece = _piece(model, task, token)
    text, ending = task.text.feed(piece)
    surprisal = None if surprisal_of is None else surprisal_of(token)
    if ending is None and watch is not None:
        ending = _watched(watch, task, token, piece, surprisal, now)
    if ending is not None:
        return SampledToken(token, text, ending, surprisal)
    if 0 <= spec.n_predict <= task.generated:
        return SampledToken(token, text, Ending(LENGTH, str(spec.n_predict)), surprisal)
    if last:
        return SampledToken(token, text, Ending(CONTEXT_FULL, str(task.ctx_size)), surprisal)
    return SampledToken(token, text, None, surprisal)


def _watched(
    watch: TurnConditions, task: Task, token: int, piece: bytes, surprisal: float | None, now: float
) -> Ending | None:
    """Return the end that *token* is by what watches the turn, in the order of llama-server's
    checks (`server-context.cpp`) where it has them.
    """
    since = task.first_token_at
    late = since is not None and 0 < watch.line_ms < (now - since) * 1000
    if late and b"\n" in piece:
        return Ending(TIME, f"t-max-predict-ms {watch.line_ms}")
    met = watch.feed(token, surprisal)
    if met is not None:
        return met
    if watch.grammar and task.sampler is not None and task.sampler.complete:
        return Ending(GRAMMAR, "complete")
    return None


def resume_text(model: Model, task: Task) -> Ending | None:
    """Let the text of a turn that another worker had begun go on where its reader is.

    Returns its end where it had met that, and only the end was not told any more; or what ends it
    if its last sentence does not, which is still to be judged.
    """
    before = task.spec.progressed
    if before is None or not before.output_tokens:
        return None
    answer = unpack_tokens(before.answer) if before.answer else task.tokens[-before.output_tokens :]
    text = b"".join(_piece(model, task, token) for token in answer)
    ending = task.text.resume(text, before.text_bytes).ending
    if ending is None and task.watch is not None:
        ending = _replayed(task.watch, answer, before.surprisals)
    if ending is not None:
        return ending
    if 0 <= task.spec.n_predict <= task.generated:
        return Ending(LENGTH, str(task.spec.n_predict))
    return None


def _replayed(watch: TurnConditions, answer: list[int], surprisals: bytes) -> Ending | None:
    """Let *watch* see an answer's tokens; of the last ones the surprisal may not be known."""
    known = unpack_floats(surprisals)
    met = None
    for token, nats in zip_longest(answer, known[: len(answer)]):
        met = watch.feed(token, nats)
    return met


def _piece(model: Model, task: Task, token: int) -> bytes:
    hidden = not task.spec.special and model.is_control(token)
    return b"" if hidden else model.piece(token)
