"""`python -m bench`: measure the scenarios, show their tables, write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial

from rich.console import Console
from rich.table import Table

from tools.build_engine import CACHE_DIR, ROOT

from . import llama_server, own_setting, report, result_files
from .compare import EXTERNAL_CORES_MAX, compare, warm_up
from .daemon import TUNING_RECORDS
from .machine import machine
from .runs import Run, over_rounds, reached
from .scenarios import SCENARIOS, Scenario
from .scenarios.base import Work

ROUNDS = 5


async def bench(scenario: Scenario, arguments: argparse.Namespace, console: Console) -> None:
    """Start the servers of a scenario, compare the sides, print and save the result."""
    console.rule(scenario.name)
    works = [
        Work(case, number, 0, arguments.small)
        for number in range(1, arguments.rounds + 1)
        for case in scenario.cases
        if not arguments.cases or case in arguments.cases
    ]
    async with AsyncExitStack() as stack:
        started = await scenario.start(stack)
        names = arguments.sides or list(started.sides)
        if unknown := set(names) - set(started.sides):
            raise SystemExit(f"no side {', '.join(unknown)}; there are {', '.join(started.sides)}")
        sides = {name: side for name, side in started.sides.items() if name in names}
        if not arguments.small:
            await warm_up(scenario, sides)
        runs = await compare(scenario, sides, works, partial(print_run, scenario, console))
    facts = {**machine(), **started.facts, "inferd's own setting": own_setting.in_force()}
    console.print(table(scenario, runs))
    print_targets(scenario, runs, console)
    console.print(f"raw figures: {result_files.save(scenario, facts, runs).relative_to(ROOT)}")
    if arguments.report:
        result_files.publish(scenario, facts, runs)
        report.write()


def print_run(scenario: Scenario, console: Console, run: Run) -> None:
    """Print a line after a run."""
    case = f"{run.case:3} {scenario.case_heading}  " if scenario.case_heading else ""
    shown = "  ".join(f"{f.name} {run.figures[f.name]:.{f.digits}f}" for f in scenario.figures)
    noise = f"  ({run.external_cores:.1f} cores busy with others)" * (
        run.external_cores > EXTERNAL_CORES_MAX
    )
    console.print(f"round {run.round}  {case}{run.side:20} {shown}{noise}", soft_wrap=True)


def table(scenario: Scenario, runs: Sequence[Run]) -> Table:
    """Return the medians over the rounds as a table for the terminal."""
    view = Table(title=f"{scenario.title}: {max(r.round for r in runs)} alternating rounds")
    for heading in (
        scenario.case_heading or "case",
        "side",
        *(f.heading for f in scenario.figures),
    ):
        view.add_column(heading)
    for (case, side), row in over_rounds(runs, scenario.figures).items():
        values = (f"{row[figure.name]:.{figure.digits}f}" for figure in scenario.figures)
        view.add_row(str(case or ""), side, *values)
    return view


def print_targets(scenario: Scenario, runs: Sequence[Run], console: Console) -> None:
    """Print the measured value of each target."""
    counted = over_rounds(runs, scenario.figures)
    for target in scenario.targets:
        value = reached(counted, target)
        if value is not None:
            sides = f"{target.side} / {target.other}" if target.other else target.side
            met = "" if target.met(value) else "  NOT MET"
            case = f"[{target.case}] " if target.case else ""
            line = f"{case}{sides}: {target.figure} = {value:.3f} {target.bound()}{met}"
            console.print(line, markup=False, highlight=False)


@contextmanager
def alone() -> Iterator[None]:
    """Hold the machine's bench lock: two benches at once would disturb each other."""
    CACHE_DIR.mkdir(parents=True, exist_ok=True)
    with (CACHE_DIR / "bench.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another bench is running; waiting for its end", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the scenarios")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cases", type=int, nargs="+", help="run only these; no report")
    parser.add_argument("--sides", nargs="+", help="run only these; no report")
    parser.add_argument(
        "--small", action="store_true", help="run little work, as a check; no report"
    )
    parser.add_argument(
        "--keep-setting", action="store_true", help="use the setting that the last run has chosen"
    )
    parser.add_argument("--no-report", dest="report", action="store_false")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds is at least 1")
    partial_run = arguments.small or arguments.sides or arguments.cases
    arguments.report = arguments.report and not partial_run
    return arguments


def main() -> None:
    """Read the command line and run the scenarios."""
    arguments = parse()
    if arguments.list:
        for scenario in SCENARIOS.values():
            print(f"{scenario.name:12} {scenario.title}")
        return
    with alone():
        llama_server.binary()
        keeps_setting = arguments.keep_setting and TUNING_RECORDS.exists()
        if not (arguments.small or keeps_setting):
            print("inferd chooses its setting, 2 to 5 minutes", flush=True)
            print(asyncio.run(own_setting.measure()), flush=True)
        for name in arguments.scenario:
            asyncio.run(bench(SCENARIOS[name], arguments, Console()))


if __name__ == "__main__":
    main()
