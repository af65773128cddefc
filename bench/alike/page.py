"""docs/compare.md, made of docs/compare.json alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tools.build_engine import ROOT

from .bare import SHAPES
from .corpus import BASE, MODELS, PROMPTS, SETS
from .results import Comparison, Row
from .sides import THREADS

__all__ = ("PAGE", "page")

PAGE = ROOT / "docs" / "compare.md"
PROMPT_CHARACTERS = 28


def page(comparison: Comparison) -> str:
    """Return the page's text."""
    return "\n".join(
        [*_head(comparison), *_counts(comparison), *_noise(comparison), *_differences(comparison)]
    )


def _head(comparison: Comparison) -> Iterator[str]:
    facts = comparison.facts
    different = [row for row in comparison.rows if not row.same]
    yield "# inferd beside llama-server: the same text"
    yield ""
    yield (
        "Made by `make compare` from [compare.json](compare.json), which has every answer. Both are"
        f" built from the same llama.cpp and were asked one request after the other: {len(PROMPTS)}"
        f" prompts with each of {len(SETS)} sets of parameters, on {len(MODELS)} models, the very"
        " same JSON to both. The likeliest token is taken each time, or one is left to draw from."
    )
    yield ""
    yield (
        f"{facts['date']}, {facts['processor']}, {facts['cores']} cores, {facts['system']}, Python"
        f" {facts['python']}, llama-cpp-python {facts['llama-cpp-python']}; {THREADS} thread, one"
        " slot on each side."
    )
    yield ""
    yield (
        f"**{len(comparison.rows) - len(different)} of {len(comparison.rows)} answers are the same,"
        f" {len(different)} differ, {len(comparison.unexplained())} of them without an"
        " explanation.**"
    )
    yield ""


def _counts(comparison: Comparison) -> Iterator[str]:
    yield "## Same answers"
    yield ""
    yield "| set | parameters beside " + _code(BASE) + " | " + " | ".join(MODELS) + " |"
    yield "|---|---|" + "---|" * len(MODELS)
    for name, parameters in SETS.items():
        cells = [_same(comparison, model, name) for model in MODELS]
        yield f"| `{name}` | {_code(parameters) if parameters else ''} | {' | '.join(cells)} |"
    yield ""


def _same(comparison: Comparison, model: str, name: str) -> str:
    rows = [row for row in comparison.rows if (row.model, row.set) == (model, name)]
    return f"{sum(row.same for row in rows)} of {len(rows)}"


def _noise(comparison: Comparison) -> Iterator[str]:
    yield "## What the shape of a batch moves"
    yield ""
    yield (
        "How far the gap between the two likeliest tokens moves if the same tokens are decoded in"
        f" batches of another shape ({', '.join(SHAPES)}), measured by a bare llama.cpp loop eight"
        " tokens into the answer to every other prompt. Both sides part some prompts in places of"
        " their own."
    )
    yield ""
    yield "| model | prompts | median | most |"
    yield "|---|---|---|---|"
    for model, noise in comparison.noise.items():
        yield f"| {model} | {noise.prompts} | {noise.median:.4f} | {noise.most:.4f} |"
    yield ""


def _differences(comparison: Comparison) -> Iterator[str]:
    yield "## Differences"
    yield ""
    yield (
        "For each, the first token in which the answers differ, and the logit of inferd's candidate"
        " less llama-server's there, by the shape of the batches: after penalties, DRY and biases,"
        " computed by the bare loop. It is a *near tie* where shapes disagree which one is"
        " likelier, or where the least gap is below the most that the shape moves, or where the"
        " whole chain, with the samplers that cut candidates away, draws both, each in some shape:"
        " then neither answer is righter than the other. Anything else would be a bug."
    )
    yield ""
    different = [row for row in comparison.rows if not row.same]
    if not different:
        yield "There are none."
        yield ""
        return
    parted = sum(row.evidence is not None and row.evidence.as_parted for row in different)
    yield (
        f"In {parted} of the {len(different)} the bare loop draws inferd's token if it parts the"
        " prompt one token before its end, as inferd does for a model with a window, and"
        " llama-server's if it parts it four tokens before, as llama-server does."
    )
    yield ""
    yield "| model | set | prompt | token | inferd | llama-server | gaps | |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in different:
        yield _difference(comparison, row)
    yield ""


def _difference(comparison: Comparison, row: Row) -> str:
    prompt = _code(PROMPTS[row.prompt][:PROMPT_CHARACTERS])
    seen = row.evidence
    if seen is None:
        return (
            f"| {row.model} | `{row.set}` | {prompt} | | {_code(row.text)} ({row.end}) |"
            f" {_code(row.llama_server)} ({row.llama_server_end}) | | **unexplained** |"
        )
    gaps = f"{min(seen.gaps.values()):+.4f} … {max(seen.gaps.values()):+.4f}"
    verdict = "near tie" if comparison.explained(row) else "**unexplained**"
    flips = ", shapes disagree" if seen.flips else ", shapes draw both" if seen.both_drawn else ""
    return (
        f"| {row.model} | `{row.set}` | {prompt} | {seen.at} | {_code(seen.inferd)} |"
        f" {_code(seen.llama_server)} | {gaps} | {verdict}{flips} |"
    )


def _code(value: object) -> str:
    """Return *value* as code in a table's cell."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else repr(value)
    return "`` " + text.replace("|", "\\|").replace("`", "'") + " ``"
