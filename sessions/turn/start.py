"""Checks at the start of a turn: its adapters, the interrupted turn that it resumes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...backends.adapter_keys import adapter_key, split_key
from ...backends.errors import InvalidArgument, error_from_wire
from ...backends.params import nearest
from ...scheduler import PRIORITIES
from ...scheduler import messages as m
from ...scheduler.messages import AdapterReport
from ..entries import Replay
from .options import TurnOptions

PROMPT_LOGPROBS_MAX = 1 << 15
"""Logprobs of a prompt's tokens and of their top tokens, which are described in one reply."""
_NAME_SHOWN_MAX = 100
Reports = Mapping[str, AdapterReport]
"""A model's adapters by their names, in the order of the configuration."""


def check_prompt_logprobs(spec: m.TaskSpec) -> None:
    """Check the number of logprobs that a turn is to return of its prompt.

    :raises InvalidArgument: there are too many.
    """
    size, top = m.count_tokens(spec.tokens), spec.prompt_logprobs
    if top is None or size * (1 + top) <= PROMPT_LOGPROBS_MAX:
        return
    raise InvalidArgument(
        f"prompt-logprobs: {size} tokens with {top} top tokens each make {size * (1 + top)}"
        f" logprobs; at most {PROMPT_LOGPROBS_MAX} are returned",
        hint="request fewer top tokens, or use a shorter prompt",
        data={"prompt_tokens": size, "prompt_logprobs_max": PROMPT_LOGPROBS_MAX},
    )


def resumed(
    before: Replay | None, call: TurnOptions, tokens: Sequence[int], text: bytes, vocab_size: int
) -> tuple[Replay, TurnOptions]:
    """Return the interrupted turn *before*, extended by the *tokens* and the *text* that its reader
    has, and the options to continue with: the turn's own, with its seed. *call* decides the
    timeouts and the delivery, and may change the priority.

    :raises InvalidArgument: no turn was interrupted, or the reader's output differs.
    """
    if before is None or before.ended:
        raise InvalidArgument("no turn of this session was interrupted")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidArgument(f"the tokens are 0 … {vocab_size - 1}")
    so_far, begin = before.extended(tokens, text), before.begin
    options = msgspec.structs.replace(
        call,
        options={**begin.options, "seed": begin.seed},
        priority=PRIORITIES[begin.priority] if call.priority is None else call.priority,
        special=begin.special,
    )
    return so_far, options


def chosen_keys(reports: Reports, lora: Sequence[Sequence[Any]] | None) -> tuple[str, ...]:
    """Return the sorted keys of a turn's adapters, without those at a scale of 0.

    *lora* are pairs of a name, or an index in the order of the configuration, and a scale; None
    means the configured scales of the model's adapters.

    :raises InvalidArgument: the model has no such adapter.
    :raises InferdError: an adapter is not loaded; this is its own error, mostly `LoadFailed`.
    """
    if lora is None:
        pairs = [(report, report.spec.scale) for report in reports.values()]
    else:
        pairs = [(_find(reports, which), scale) for which, scale in lora]
    scales: dict[str, float] = {}
    for report, scale in pairs:
        if not scale:
            continue
        if report.info is None:
            raise error_from_wire(report.error or {})
        scales[report.info.id] = scales.get(report.info.id, 0.0) + scale
    return tuple(sorted(adapter_key(i, scale) for i, scale in scales.items() if scale))


def _find(reports: Reports, which: str | int) -> AdapterReport:
    if isinstance(which, int) and 0 <= which < len(reports):
        return list(reports.values())[which]
    if isinstance(which, str) and which in reports:
        return reports[which]
    names = ", ".join(reports) or "none"
    close = nearest(which, reports) if isinstance(which, str) else ""
    shown = which if isinstance(which, int) else which[:_NAME_SHOWN_MAX]
    raise InvalidArgument(
        f"the model has no adapter {shown!r}",
        hint=f"{close + ' ' if close else ''}it has {names}; an operator adds one with"
        " `inferd add-adapter`",
        data={"adapters": list(reports)},
    )


def scales_by_name(reports: Reports, keys: Iterable[str]) -> dict[str, float]:
    """Return the scales of *keys* by the adapters' names, or by their ids if a name was removed."""
    names = {report.info.id: name for name, report in reports.items() if report.info is not None}
    pairs = [split_key(key) for key in keys]
    return {names.get(adapter_id, adapter_id): scale for adapter_id, scale in pairs}
