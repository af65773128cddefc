"""A measurement of how many JSON schemas that programs use become grammars, and how fast.

`python -m tools.schema_coverage` reads the schemas of `make schemas` and prints, with and without
`schema-lenient`, the numbers of accepted schemas, the time of a trial, and the causes of refusals.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from inferd.backends.errors import InferdError
from inferd.backends.grammars.trial import CheckRequest, GrammarChecker
from inferd.backends.params.json_texts import SCHEMA_BYTES_MAX
from tools.get_schemas import MISSING, store

__all__ = ("Coverage", "measure", "small_schemas")


@dataclass
class Coverage:
    """The results of trials."""

    accepted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Constraints that were left out, by keyword."""
    refused: Counter[str] = field(default_factory=Counter)
    """Schemas that were refused, by the last part of the path, or the error's name."""
    seconds: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Return the time in ms that this share of the trials has at most."""
        return (
            1000 * sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]
        )


def small_schemas(folder: Path) -> list[str]:
    """Return the texts of the schemas that are not too large, by name."""
    texts = (path.read_text() for path in sorted(folder.glob("*.json")))
    return [text for text in texts if len(text.encode()) <= SCHEMA_BYTES_MAX]


def measure(texts: list[str], *, lenient: bool) -> Coverage:
    """Return the results of trying all *texts*."""
    coverage, checker = Coverage(), GrammarChecker()
    checker.check(CheckRequest(schema="{}"))
    for text in texts:
        started = time.perf_counter()
        try:
            reply = checker.check(CheckRequest(schema=text, lenient=lenient))
            coverage.accepted += 1
            coverage.dropped.update(path.rpartition("/")[2] for path in reply.dropped)
        except InferdError as exc:
            path = str(exc.data.get("path", exc.name))
            coverage.refused[path.rpartition("/")[2]] += 1
        coverage.seconds.append(time.perf_counter() - started)
    checker.close()
    return coverage


def main() -> None:
    """Print the figures."""
    folder = store()
    if folder is None:
        sys.exit(MISSING)
    texts = small_schemas(folder)
    for lenient in (False, True):
        found = measure(texts, lenient=lenient)
        print(f"{'lenient' if lenient else 'strict'}: {found.accepted} of {len(texts)} accepted")
        times = ", ".join(f"p{100 * q:.0f} {found.quantile(q):.1f}" for q in (0.5, 0.9, 0.99, 1))
        print(f"  ms: {times}")
        for name, counts in (("refused", found.refused), ("left out", found.dropped)):
            print(f"  {name}: " + ", ".join(f"{key} {n}" for key, n in counts.most_common(25)))


if __name__ == "__main__":
    main()
