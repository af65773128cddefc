"""Judgement of the official test suite of JSON schemas by grammars."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inferd.backends.errors import InferdError

__all__ = ("Fits", "groups_in", "judge")

Fits = Callable[[Any, str], bool]
"""Whether the grammar of a schema allows a text."""


def groups_in(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the suite's groups: a schema, and tests with an instance each."""
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            yield group | {"file": file.stem}


def judge(groups: Iterator[dict[str, Any]], fits: Fits) -> tuple[Counter[str], list[str]]:
    """Return the numbers of schemas and instances by judgement, and the wrong judgements."""
    counts: Counter[str] = Counter()
    wrong = []
    for group in groups:
        counts["schemas"] += 1
        try:
            for test in group["tests"]:
                allowed = fits(group["schema"], json.dumps(test["data"], ensure_ascii=False))
                if allowed == test["valid"]:
                    counts["right"] += 1
                    continue
                kind = "valid rejected" if test["valid"] else "invalid accepted"
                counts[kind] += 1
                names = (group["file"], group["description"], test["description"])
                wrong.append(f"{kind}: {': '.join(names)}")
            counts["accepted"] += 1
        except InferdError:
            counts["refused"] += 1
    return counts, wrong
