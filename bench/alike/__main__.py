"""`python -m bench.alike`: query both sides, explain each difference, write docs/compare.md.

Answers are kept: if a run was interrupted or has used up its minutes, the next one continues it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import msgspec

from bench import llama_server
from bench.__main__ import alone
from bench.machine import machine

from . import page, results
from .bare import Bare
from .corpus import MODELS, PROMPTS, digest, request_of
from .evidence import evidence, measure_noise
from .results import Answers, Comparison, rows_of
from .sides import SIDES


async def ask(answers: Answers, side: str, model: str, until: float) -> None:
    """Let a side answer what it has not answered yet, set by set."""
    missing = answers.missing(side, model)
    if not missing or time.monotonic() > until:
        return
    async with SIDES[side](MODELS[model]) as running:
        for name in missing:
            if time.monotonic() > until:
                return
            begin = time.monotonic()
            request = request_of(name)
            answers.of(side, model)[name] = [await running.ask(p, request) for p in PROMPTS]
            answers.keep()
            took = time.monotonic() - begin
            print(f"{model:8} {side:12} {name:22} {took:5.1f} s", flush=True)


def look(answers: Answers, model: str, until: float) -> None:
    """Measure the noise of a model whose answers are all there, and look behind differences."""
    if any(answers.missing(side, model) for side in SIDES) or time.monotonic() > until:
        return
    with Bare(MODELS[model]) as bare:
        if model not in answers.noise:
            answers.noise[model] = measure_noise(bare, PROMPTS[::2])
            answers.keep()
            print(f"{model:8} noise {answers.noise[model].most:.4f} at most", flush=True)
        for row, own, other in answers.unseen(model):
            if time.monotonic() > until:
                break
            prompt, request = PROMPTS[row.prompt], request_of(row.set)
            answers.seen[row.key] = evidence(bare, prompt, request, own, other)
    answers.keep()


def compare(answers: Answers) -> Comparison:
    """Return the comparison that complete answers make."""
    rows = [row for model in MODELS for row, _, _ in rows_of(answers, model)]
    return Comparison(
        asked=digest(),
        facts=machine(),
        noise=answers.noise,
        rows=[msgspec.structs.replace(row, evidence=answers.seen.get(row.key)) for row in rows],
    )


def main() -> None:
    """Read the command line, ask, compare, write."""
    parser = argparse.ArgumentParser(prog="make compare", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="stop then; the next run continues"
    )
    parser.add_argument("--anew", action="store_true", help="discard earlier answers")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    arguments = parser.parse_args()
    if not arguments.page:
        with alone():
            llama_server.binary()
            _compare(arguments.minutes, anew=arguments.anew)
    comparison = results.load()
    page.PAGE.write_text(page.page(comparison))
    open_ones = comparison.unexplained()
    print(f"{page.PAGE}: {len(open_ones)} differences without an explanation")
    sys.exit(1 if open_ones else 0)


def _compare(minutes: float, *, anew: bool) -> None:
    if anew:
        Answers.forget()
    answers, until = Answers.kept(), time.monotonic() + 60 * minutes
    for model in MODELS:
        for side in SIDES:
            asyncio.run(ask(answers, side, model, until))
        look(answers, model, until)
    if not answers.complete:
        print("the minutes are used up: run it again to continue", flush=True)
        sys.exit(3)
    results.save(compare(answers))
    Answers.forget()  # the next comparison starts from nothing


if __name__ == "__main__":
    main()
