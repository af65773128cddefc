"""Writes docs/benchmarks.md and its pictures from bench/results: `python -m bench.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.build_engine import PACKAGE, ROOT

from . import ratios, timeline
from .compare import ATTEMPTS_MAX, FOREIGN_CORES_MAX
from .machine import THREADS
from .runs import Run, keys, over_rounds, reached
from .saving import Result, load
from .scenarios import SCENARIOS, Scenario

TARGET = ROOT / "docs" / "benchmarks.md"
MACHINE = ("date", "processor", "cores", "system", "python", PACKAGE)
FACTS = (
    "{date}, {processor}, {cores} cores, {system}, Python {python}, "
    f"{PACKAGE} {{{PACKAGE}}}; {{rounds}} rounds; others kept at most {{foreign}} cores busy."
)

INTRODUCTION = f"""\
# Benchmarks

Written by `make bench`; each scenario's figures are those of the machine and the day that it names
and of no other. `make bench ARGS="--scenario urgent"` measures one anew, `--list` names them all.

All sides run SmolLM2-135M-Instruct (Q4_1) on {THREADS} threads, greedily, a fixed number of tokens
past the end of generation, so all do the same work.

- **llama-server** is built from the source that the pinned llama-cpp-python vendors (Release,
  native), so all sides run the same kernels. It has the slots and the context of inferd, split KV,
  its cheapest greedy sampling, and, but where it is said, its caches as it has them by itself
  (`--cache-prompt`, 8 GiB of `--cache-ram`). A conversation's later turns send its answers back as
  the token ids that came, so that it finds them again.
- **inferd** is a daemon with its defaults but for slots, context and threads.

Clients are equal: one asyncio connection a program, all in one process. A number in the texts is
new in each run, so that none finds another run's text in a cache; a run in which a server was
spared a prompt that ought to be new is refused, and so is one in which an answer was cut short. The
sides take turns within each round. A run beside which other programs kept more than
{FOREIGN_CORES_MAX:g} cores busy is made again, up to {ATTEMPTS_MAX} times in all, and the calmest
counts. Figures are medians over the rounds; a worst one is the median of each round's worst.
"""


def rows(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    ruler = ["---"] * len(header)
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ruler, *lines])


def _cased(scenario: Scenario, case: int, cells: Sequence[str]) -> list[str]:
    return [str(case), *cells] if scenario.case_heading else list(cells)


def _header(scenario: Scenario, *cells: str) -> list[str]:
    return [scenario.case_heading, *cells] if scenario.case_heading else list(cells)


def median_table(scenario: Scenario, runs: Sequence[Run]) -> str:
    """Return what counts over the rounds, a line for each case and side."""
    lines = [
        _cased(scenario, case, [side, *(f"{row[f.name]:.{f.digits}f}" for f in scenario.figures)])
        for (case, side), row in over_rounds(runs, scenario.figures).items()
    ]
    return rows(_header(scenario, "side", *(f.heading for f in scenario.figures)), lines)


def target_table(scenario: Scenario, runs: Sequence[Run]) -> str:
    """Return ratios and bounds, beside what is to be reached."""
    counted = over_rounds(runs, scenario.figures)
    figures = {figure.name: figure for figure in scenario.figures}
    lines = []
    for target in scenario.targets:
        value = reached(counted, target)
        if value is None:
            continue
        figure = figures[target.figure]
        what = f"{target.side} / {target.other}" if target.other else target.side
        shown = f"{value:.3g}" if target.other else f"{value:.{figure.digits}f}"
        bound = target.bound()
        met = ("yes" if target.met(value) else "no") if bound else ""
        cells = [f"{what}: {figure.heading}", shown, bound, met]
        lines.append(_cased(scenario, target.case, cells))
    return rows(_header(scenario, "figure or ratio", "measured", "to reach", "met"), lines)


def raw_table(scenario: Scenario, runs: Sequence[Run]) -> str:
    """Return every run's value of the figures of which something is to be reached."""
    numbers = range(1, max(run.round for run in runs) + 1)
    wanted = {target.figure for target in scenario.targets}
    by_run = {(run.case, run.side, run.round): run.figures for run in runs}
    lines = []
    for figure in (figure for figure in scenario.figures if figure.name in wanted):
        for key in keys(runs):
            found = (by_run.get((*key, number)) for number in numbers)
            values = [f"{one[figure.name]:.{figure.digits}f}" if one else "" for one in found]
            lines.append(_cased(scenario, key[0], [key[1], figure.heading, *values]))
    return rows(_header(scenario, "side", "figure", *(f"round {n}" for n in numbers)), lines)


def facts_line(facts: Mapping[str, str], runs: Sequence[Run]) -> str:
    """Return where and when it was measured."""
    rounds = max(run.round for run in runs)
    foreign = f"{max(run.foreign_cores for run in runs):.2f}"
    return FACTS.format(**facts, rounds=rounds, foreign=foreign)


def pictures(scenario: Scenario) -> str:
    """Return the pictures that there are."""
    files = ((side, timeline.file_of(scenario.name, side)) for side in scenario.pictures)
    return "\n".join(
        f"![{scenario.title}: {side}](timelines/{file.name})\n"
        for side, file in files
        if file.exists()
    )


def section(scenario: Scenario, result: Result) -> str:
    """Return a scenario's part of the page."""
    others = {name: value for name, value in result.facts.items() if name not in MACHINE}
    parts = [f"## {scenario.title}\n", scenario.about + "\n"]
    parts += [median_table(scenario, result.runs), target_table(scenario, result.runs)]
    parts += [f"{paragraph}\n" for paragraph in result.notes]
    parts += [text for text in (pictures(scenario),) if text]
    parts += ["Every run:\n", raw_table(scenario, result.runs)]
    if others:
        parts.append(rows(["at rest", "value"], [[name, str(v)] for name, v in others.items()]))
    parts.append(facts_line(result.facts, result.runs) + "\n")
    return "\n".join(parts)


def write() -> None:
    """Write the page and its pictures."""
    ratios.write()
    parts = [INTRODUCTION]
    for scenario in SCENARIOS.values():
        if result := load(scenario.name):
            timeline.write(scenario.name, scenario.title, result.pictures)
            parts.append(section(scenario, result))
    TARGET.write_text("\n".join(parts))
    print(f"wrote {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    write()
