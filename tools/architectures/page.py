"""The page docs/architectures.md, made from the outcomes of the checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tests.architectures.checks import CHECKS
from tests.architectures.served import AFTER_A_RESTART, SERVED
from tools.architectures.outcomes import LOAD, Outcome

__all__ = ("PAGE", "Row", "page")

PAGE = Path(__file__).parent.parent.parent / "docs" / "architectures.md"
_REUSE = {
    "plain": "any beginning",
    "window": "a beginning with its window",
    "recurrent": "whole states",
    "hybrid": "a beginning at a checkpoint",
}
_WEIGHTS = {"moe": "with experts", "dense": "dense"}


class Row(msgspec.Struct, frozen=True):
    """The outcomes of a file's checks. Its name is ARCHITECTURE-dense or ARCHITECTURE-moe."""

    name: str
    outcomes: list[Outcome]

    @property
    def kv_kind(self) -> str:
        """The kind of its KV states, which the load has reported, or an empty text."""
        return next((o.detail for o in self.outcomes if o.check == LOAD and o.kind == "passed"), "")

    @property
    def is_served(self) -> bool:
        """Whether a daemon has served it."""
        return any(outcome.check in SERVED for outcome in self.outcomes)


def page(rows: Sequence[Row]) -> str:
    """Return the text of docs/architectures.md."""
    every = [outcome for row in rows for outcome in row.outcomes]
    counts = Counter[str](outcome.kind for outcome in every)
    reasons = list(dict.fromkeys(_reason(o) for o in every if o.kind != "passed"))
    lines = [
        _HEAD.format(
            files=len(rows),
            architectures=len({row.name.rpartition("-")[0] for row in rows}),
            checks=len(every),
            passed=counts["passed"],
            share=100 * counts["passed"] / max(1, len(every)),
            refused=counts["refused"],
            failures=_failures(counts),
            served=sum(row.is_served for row in rows),
        ),
        *(_line(row, reasons) for row in rows),
        "",
        "Reasons:",
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
        _CHECKS,
        *_descriptions(),
    ]
    return "\n".join(lines) + "\n"


def _failures(counts: Counter[str]) -> str:
    if not counts["failed"] and not counts["died"]:
        return "None fails, and none ends a worker's process."
    return f"{counts['failed']} fail, and {counts['died']} end a worker's process."


def _descriptions() -> Iterator[str]:
    yield "- **load**: The model is loaded."
    yield "- **estimate**: The estimate is, within 5 % or 5 MB, the memory of a full context."
    for name, check in (CHECKS | SERVED | AFTER_A_RESTART).items():
        words = " ".join((check.__doc__ or "").split())
        if name == next(iter(SERVED)):
            yield "\nThrough a daemon:\n"
        yield f"- **{name}**: {words}"


def _line(row: Row, reasons: Sequence[str]) -> str:
    architecture, _, experts = row.name.rpartition("-")
    passed = sum(outcome.kind == "passed" for outcome in row.outcomes)
    shift = next((outcome.kind for outcome in row.outcomes if outcome.check == "shift"), "")
    cells = (
        f"`{architecture}`",
        _WEIGHTS[experts],
        _REUSE.get(row.kv_kind, ""),
        {"passed": "yes", "refused": "no"}.get(shift, ""),
        f"{passed} of {len(row.outcomes)}",
        "; ".join(_remarks(row, reasons)),
    )
    return f"| {' | '.join(cells)} |"


def _remarks(row: Row, reasons: Sequence[str]) -> Iterator[str]:
    for number, reason in enumerate(reasons, 1):
        found = [o for o in row.outcomes if o.kind != "passed" and _reason(o) == reason]
        if found:
            yield f"{', '.join(o.check for o in found)}: {found[0].kind} ({number})"


def _reason(outcome: Outcome) -> str:
    """Return the reason of a refusal or failure, without the name of the file."""
    if outcome.check != LOAD or outcome.kind != "refused":
        return outcome.detail
    return outcome.detail.partition("' ")[2] or outcome.detail


_HEAD = """\
# Architectures

`make archs` writes this page. A test program of the pinned llama.cpp saves tiny models with random
weights, and `tests/tiny_gguf.py` writes others: {files} files of {architectures} architectures.
inferd runs them as it runs any model. The checks below compare their logits and answers with those
of bare llama.cpp, and reused KV states with a computation from scratch. Real models of these
architectures differ from them in their size, their weights and their vocabulary.

{passed} of {checks} checks pass ({share:.1f} %). {refused} end with a refusal, quoted below the
table. {failures} {served} of the files were also served by a daemon.

**KV state** says which part of a computed prompt another prompt can use: *any beginning*; *a
beginning with its window*, whose last tokens are still in the cache; *a beginning at a checkpoint*;
or only *whole states*. Checkpoints and whole states are saved
[on the way](scheduling.md#models-with-a-window-or-a-recurrence). **Shift** says whether a
[context shift](scheduling.md#a-full-context) is possible. Without one, an answer ends
when its context is full; conversations still drop their oldest turns.

Encoder-decoders, T5 and its family, have tests of their own: their sessions have one turn.

The table says nothing about the quality of answers. `inferd show MODEL` describes a model's file.

| Architecture | Weights | KV state | Shift | Checks passed | Not passed |
|---|---|---|---|---|---|"""

_CHECKS = """
## The checks

Each file has to pass those without a daemon:
"""
