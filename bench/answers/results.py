"""The results of `make answers`, in bench/results."""

from __future__ import annotations

from typing import Literal

import msgspec

from tools.build_engine import ROOT

__all__ = ("Comparison", "Difference", "Facts", "Results", "Right", "Row")

RESULTS = ROOT / "bench" / "results" / "answers.json"
Right = Literal["inferd", "llama-server", "both", "neither"]


class Facts(msgspec.Struct, frozen=True):
    """Facts about a template. *call* is the text of a call, *again* the tokens that the requests of
    a loop compute again: with reasoning sent back, and without.
    """

    template: str
    form: str
    reasoning: str
    call: str
    parallel: bool
    system: bool
    results: bool
    messages: int
    given_back: int
    exceptions: dict[str, str]
    again: tuple[int, int]
    why_again: str


class Difference(msgspec.Struct, frozen=True):
    """A difference in the message of an answer, *whole* or cut off."""

    template: str
    message: str
    whole: bool
    right: Right
    why: str


class Comparison(msgspec.Struct, frozen=True):
    """The comparison of a template's answers. *answers* and *cuts* count those compared."""

    answers: int
    cuts: int
    differences: list[Difference]


class Row(msgspec.Struct, frozen=True):
    """The results of one template."""

    facts: Facts
    comparison: Comparison

    @property
    def line(self) -> str:
        """The results as people read them."""
        facts, comparison = self.facts, self.comparison
        differences = [d.right for d in comparison.differences]
        rights = ", ".join(f"{differences.count(r)} {r}" for r in sorted(set(differences)))
        return (
            f"{facts.template:48} {facts.form:14} {facts.given_back:2} of {facts.messages:2}"
            f"  again {facts.again[0]:3} {facts.again[1]:3}  differences: {rights or 'none'}"
        )


class Results(msgspec.Struct, frozen=True):
    """The results of all templates, those of this version of the engine."""

    rows: list[Row]
    engine: str


def save_results(results: Results) -> None:
    """Write the results."""
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def saved_results() -> Results:
    """Return the results that were written last."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results)
