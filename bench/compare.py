"""The comparison of all sides, alternating in each round, for each case of a scenario."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .resting import ExternalLoad, calm
from .runs import Run
from .scenarios.base import Scenario, Side, Work

ATTEMPTS_MAX = 4
EXTERNAL_CORES_MAX = 0.05

_serials = itertools.count(1)


async def warm_up(scenario: Scenario, sides: Mapping[str, Side]) -> None:
    """Run each side once with little work, as an uncounted round 0."""
    for side in sides.values():
        await side(Work(scenario.cases[-1], 0, next(_serials), small=True))


async def compare(
    scenario: Scenario,
    sides: Mapping[str, Side],
    works: Sequence[Work],
    print_run: Callable[[Run], None],
) -> list[Run]:
    """Run each of *works* on all sides, one after another; in each round another side begins."""
    runs: list[Run] = []
    names = list(sides)
    for work in works:
        begin = work.round % len(names)
        for name in names[begin:] + names[:begin]:
            runs.append(await undisturbed(scenario, sides[name], name, work))
            print_run(runs[-1])
    return sorted(runs, key=lambda run: names.index(run.side))


async def undisturbed(scenario: Scenario, side: Side, name: str, work: Work) -> Run:
    """Run one side, again if other programs kept the machine busy; return the calmest run."""
    calmest: Run | None = None
    for _ in range(1 if work.small else ATTEMPTS_MAX):
        if not work.small:
            await calm(EXTERNAL_CORES_MAX)
        load = ExternalLoad()
        streams = tuple(await side(replace(work, serial=next(_serials))))
        external_cores = load.cores()
        figures = {name: round(value, 4) for name, value in scenario.measure(streams).items()}
        run = Run(name, work.case, work.round, figures, external_cores, streams)
        if calmest is None or run.external_cores < calmest.external_cores:
            calmest = run
        if calmest.external_cores <= EXTERNAL_CORES_MAX:
            break
    assert calmest is not None
    return calmest
