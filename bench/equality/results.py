"""The results of a comparison in `docs/compare.json`, from which the page is generated.

The answers of an incomplete comparison are saved in bench/out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tools.build_engine import ROOT

from .corpus import MODELS, PROMPTS, SETS, digest
from .evidence import Evidence, Noise
from .sides import SIDES, Answer

__all__ = ("JSON", "Answers", "Comparison", "Row", "load", "rows_of", "save")

JSON = ROOT / "docs" / "compare.json"
STATE = ROOT / "bench" / "out" / "compare-answers.json"


class Row(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The result of one prompt with one set: inferd's answer.

    If llama-server's text or end differs, the row also has its answer and the evidence for the
    difference.
    """

    model: str
    set: str
    prompt: int
    text: str
    end: str
    tokens: int
    llama_server: str | None = None
    llama_server_end: str | None = None
    evidence: Evidence | None = None

    @property
    def key(self) -> str:
        """The row's unique name."""
        return f"{self.model}/{self.set}/{self.prompt}"

    @property
    def same(self) -> bool:
        """Whether both answers are the same."""
        return self.llama_server is None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A complete comparison."""

    requests_digest: str
    """Digest of all requests."""
    facts: dict[str, str]
    noise: dict[str, Noise]
    rows: list[Row]

    def unexplained(self) -> list[Row]:
        """Return the differences that are not near ties, and thus bugs."""
        return [row for row in self.rows if not row.same and not self.explained(row)]

    def explained(self, row: Row) -> bool:
        """Return whether the batch shape can decide between the two candidates."""
        return row.evidence is not None and row.evidence.is_near_tie(self.noise[row.model])


class Answers(msgspec.Struct):
    """Answers by side, model and set of a comparison in progress."""

    requests_digest: str
    by_side: dict[str, dict[str, dict[str, list[Answer]]]] = {}
    noise: dict[str, Noise] = {}
    """Noise by model, measured once both sides have answered everything."""
    evidence: dict[str, Evidence | None] = {}
    """Evidence for differences, by the row's key."""

    def missing(self, side: str, model: str) -> list[str]:
        """Return the sets that a side has not answered yet."""
        return [name for name in SETS if name not in self.answers_of(side, model)]

    def answers_of(self, side: str, model: str) -> dict[str, list[Answer]]:
        """Return a side's answers, by set."""
        return self.by_side.setdefault(side, {}).setdefault(model, {})

    def unexplained_rows(self, model: str) -> list[tuple[Row, Answer, Answer]]:
        """Return the differences without evidence, sorted by prompt and answer, so that those at
        the same place are neighbours.
        """
        different = [it for it in rows_of(self, model) if not it[0].same]
        rows = [it for it in different if it[0].key not in self.evidence]
        return sorted(rows, key=lambda it: (it[0].prompt, it[1].tokens))

    @property
    def complete(self) -> bool:
        """Whether all answers and all evidence are there."""
        if any(self.missing(side, model) for side in SIDES for model in MODELS):
            return False
        return set(self.noise) == set(MODELS) and not any(map(self.unexplained_rows, MODELS))

    def save_progress(self) -> None:
        """Write the answers to the file that the next run reads."""
        STATE.parent.mkdir(parents=True, exist_ok=True)
        STATE.write_bytes(msgspec.json.encode(self))

    @classmethod
    def load_progress(cls, path: Path = STATE) -> Answers:
        """Return the answers of a previous run if its requests were the same."""
        if path.exists():
            answers = msgspec.json.decode(path.read_bytes(), type=cls)
            if answers.requests_digest == digest():
                return answers
        return cls(digest())

    @staticmethod
    def delete_progress() -> None:
        """Delete the saved answers, so that the next run starts from nothing."""
        STATE.unlink(missing_ok=True)


def rows_of(answers: Answers, model: str) -> Iterator[tuple[Row, Answer, Answer]]:
    """Yield a model's rows without evidence, and both answers."""
    for name in SETS:
        inferd, llama_server = (answers.answers_of(side, model)[name] for side in SIDES)
        for number in range(len(PROMPTS)):
            own, other = inferd[number], llama_server[number]
            same = (own.text, own.end) == (other.text, other.end)
            row = Row(
                model=model,
                set=name,
                prompt=number,
                text=own.text,
                end=own.end,
                tokens=len(own.tokens),
                llama_server=None if same else other.text,
                llama_server_end=None if same else other.end,
            )
            yield row, own, other


def save(comparison: Comparison) -> None:
    """Write docs/compare.json with one row per line, so that diffs are readable."""
    encode = msgspec.json.encode
    rows = b",\n".join(map(encode, comparison.rows))
    head = {
        "requests_digest": comparison.requests_digest,
        "facts": comparison.facts,
        "noise": {model: msgspec.to_builtins(noise) for model, noise in comparison.noise.items()},
        "columns": list(Row.__struct_fields__),
    }
    parts = [encode(name) + b": " + encode(value) for name, value in head.items()]
    JSON.write_bytes(b"{\n" + b",\n".join(parts) + b',\n"rows": [\n' + rows + b"\n]}\n")


def load(path: Path = JSON) -> Comparison:
    """Return the last comparison."""
    return msgspec.json.decode(path.read_bytes(), type=Comparison)
