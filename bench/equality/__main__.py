"""`python -m bench.equality`: query both sides, explain each difference, write docs/compare.md.

Answers are saved: the next run continues a run that was interrupted or has used up its minutes.
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


async def complete_answers(answers: Answers, side: str, model: str, until: float) -> None:
    """Have a side answer the sets that it has not answered yet."""
    missing = answers.missing(side, model)
    if not missing or time.monotonic() > until:
        return
    async with SIDES[side](MODELS[model]) as running:
        for name in missing:
            if time.monotonic() > until:
                return
            begin = time.monotonic()
            request = request_of(name)
            answers.answers_of(side, model)[name] = [
                await running.send_request(p, request) for p in PROMPTS
            ]
            answers.save_progress()
            seconds = time.monotonic() - begin
            print(f"{model:8} {side:12} {name:22} {seconds:5.1f} s", flush=True)


def explain_differences(answers: Answers, model: str, until: float) -> None:
    """Measure the noise of a model with complete answers, and find the evidence for differences."""
    if any(answers.missing(side, model) for side in SIDES) or time.monotonic() > until:
        return
    with Bare(MODELS[model]) as bare:
        if model not in answers.noise:
            answers.noise[model] = measure_noise(bare, PROMPTS[::2])
            answers.save_progress()
            print(f"{model:8} noise {answers.noise[model].most:.4f} at most", flush=True)
        for row, own, other in answers.unexplained_rows(model):
            if time.monotonic() > until:
                break
            prompt, request = PROMPTS[row.prompt], request_of(row.set)
            answers.evidence[row.key] = evidence(bare, prompt, request, own, other)
    answers.save_progress()


def compare(answers: Answers) -> Comparison:
    """Return the comparison that complete answers make."""
    rows = [row for model in MODELS for row, _, _ in rows_of(answers, model)]
    return Comparison(
        requests_digest=digest(),
        facts=machine(),
        noise=answers.noise,
        rows=[msgspec.structs.replace(row, evidence=answers.evidence.get(row.key)) for row in rows],
    )


def main() -> None:
    """Read the command line, request, compare, write."""
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
    unexplained = comparison.unexplained()
    print(f"{page.PAGE}: {len(unexplained)} differences without an explanation")
    sys.exit(1 if unexplained else 0)


def _compare(minutes: float, *, anew: bool) -> None:
    if anew:
        Answers.delete_progress()
    answers, until = Answers.load_progress(), time.monotonic() + 60 * minutes
    for model in MODELS:
        for side in SIDES:
            asyncio.run(complete_answers(answers, side, model, until))
        explain_differences(answers, model, until)
    if not answers.complete:
        print("the minutes are used up: run it again to continue", flush=True)
        sys.exit(3)
    results.save(compare(answers))
    Answers.delete_progress()  # the next comparison starts from nothing


if __name__ == "__main__":
    main()
