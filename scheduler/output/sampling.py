"""Sampling of a turn's next token, with its text and the ending that it may cause."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from ...backends import CompiledGrammar, LanguageModel, Sampler, SamplingParams
from ...backends.media import text_tokens
from ..messages import unpack_floats, unpack_tokens
from ..task import Task
from .stopping import Ending, TurnConditions
from .stopping.ending import CONTEXT_FULL, END_MARK, GRAMMAR, LENGTH, TIME, TOKEN


class AddedToken(NamedTuple):
    """A token of an answer, sampled or *forced* by the grammar. *text* is the text that it
    releases, or None if it only ends the turn. The *surprisal* is known if the turn needs it.
    """

    token: int
    text: bytes | None
    ending: Ending | None = None
    surprisal: float | None = None
    forced: bool = False


def needs_preparation(sampling: SamplingParams) -> bool:
    """Return whether making the sampler reads texts, which takes time and may be refused."""
    return bool(sampling.logit_bias) or sampling.has_grammar or sampling.dry_multiplier > 0


def sampler_for(
    model: LanguageModel, task: Task, sampling: SamplingParams, grammar: CompiledGrammar | None
) -> Sampler:
    """Return a sampler that has seen the tokens of *task* so far, with its compiled *grammar*."""
    prompt, answer = task.prompt_and_answer
    return model.sampler(sampling, text_tokens(prompt), answer, grammar)


def sample_token(model: LanguageModel, task: Task, now: float, *, last: bool) -> AddedToken:
    """Sample the next token of *task*, whose slot has logits, and add it to its tokens.

    *last* means that this token fills the context.
    """
    assert task.sampler is not None
    surprisal_of = model.surprisal(task.slot) if _needs_surprisal(task) else None
    token = model.sample(task.slot, task.sampler, task.generated)
    task.forced_behind = 0
    surprisal = None if surprisal_of is None else surprisal_of(token)
    text, ending = _add_token(model, task, token, surprisal, now, last=last)
    return AddedToken(token, text, ending, surprisal)


def take_forced(model: LanguageModel, task: Task, now: float, *, last: bool) -> AddedToken | None:
    """Add the next token of *task* to its tokens, if its grammar forces it. Logits are not needed,
    and those that the slot has are out of date afterwards.

    No token is forced for a turn that needs the surprisal of its tokens, or that may shift its
    context, because a shift happens only when a single token is left to compute.
    """
    if task.sampler is None or task.spec.ctx_shift or _needs_surprisal(task):
        return None
    token = task.sampler.take_forced()
    if token is None:
        return None
    task.forced += 1
    task.forced_behind += 1
    text, ending = _add_token(model, task, token, None, now, last=last)
    return AddedToken(token, text, ending, forced=True)


def _needs_surprisal(task: Task) -> bool:
    return task.conditions is not None and task.conditions.surprisal is not None


def _add_token(
    model: LanguageModel, task: Task, token: int, surprisal: float | None, now: float, *, last: bool
) -> tuple[bytes | None, Ending | None]:
    """Add *token* to *task*; return the text that it releases, and the ending that it causes."""
    spec, conditions = task.spec, task.conditions
    task.has_logits = False
    task.tokens.append(token)
    if model.is_eog(token) and not spec.sampling.ignore_eos:
        return None, Ending(END_MARK, str(token), model.piece(token))
    if conditions is not None and token in conditions.tokens:
        return None, Ending(TOKEN, str(token))
    piece = _piece(model, task, token)
    text, ending = task.text.add_piece(piece)
    if ending is None and conditions is not None:
        ending = _met_condition(conditions, task, token, piece, surprisal, now)
    if ending is None and 0 <= spec.n_predict <= task.generated:
        ending = Ending(LENGTH, str(spec.n_predict))
    elif ending is None and last:
        ending = Ending(CONTEXT_FULL, str(task.ctx_size))
    return text, ending


def _met_condition(
    conditions: TurnConditions,
    task: Task,
    token: int,
    piece: bytes,
    surprisal: float | None,
    now: float,
) -> Ending | None:
    """Return the ending by a condition that *token* meets. The order is that of llama-server's
    checks (`server-context.cpp`), as far as llama-server has them.
    """
    since = task.first_token_at
    late = since is not None and 0 < conditions.line_ms < (now - since) * 1000
    if late and b"\n" in piece:
        return Ending(TIME, f"t-max-predict-ms {conditions.line_ms}")
    met = conditions.check_token(token, surprisal)
    if met is not None:
        return met
    if conditions.grammar and task.sampler is not None and task.sampler.complete:
        return Ending(GRAMMAR, "complete")
    return None


def resume_text(model: LanguageModel, task: Task) -> Ending | None:
    """Restore the text of a turn resumed from another worker up to where its reader is.

    Return an ending that the turn met and that was not reported. If its last sentence is still to
    be compared, the ending counts only after that.
    """
    before = task.spec.resume_point
    if before is None or not before.output_tokens:
        return None
    answer = unpack_tokens(before.answer) if before.answer else task.tokens[-before.output_tokens :]
    text = b"".join(_piece(model, task, token) for token in answer)
    ending = task.text.resume(text, before.text_bytes).ending
    if ending is None and task.conditions is not None:  # the last surprisals may not be known
        known = unpack_floats(before.surprisals)[: len(answer)]
        for token, surprisal in zip_longest(answer, known):
            ending = task.conditions.check_token(token, surprisal)
    if ending is not None:
        return ending
    if 0 <= task.spec.n_predict <= task.generated:
        return Ending(LENGTH, str(task.spec.n_predict))
    return None


def _piece(model: LanguageModel, task: Task, token: int) -> bytes:
    piece, spec = model.piece(token), task.spec
    if spec.special or not model.is_control(token):
        return piece
    return piece if piece.decode(errors="replace") in spec.shown_tokens else b""
