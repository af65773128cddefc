"""`make attack`: another user's stream and cheap calls, alone and beside each attack."""

from __future__ import annotations

import argparse
import asyncio
import os

from rich.console import Console

from bench.__main__ import alone
from bench.machine import machine

from .attack import MODES
from .attacks import ATTACKS
from .measuring import measure, median_of
from .report import Row, print_row, save

SECONDS = 4.0
ROUNDS = 2
"""With these, all attacks in all modes take a little less than an hour."""


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the attacks")
    parser.add_argument("--attack", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a measurement")
    parser.add_argument("--no-report", dest="report", action="store_false")
    return parser.parse_args()


async def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure the chosen attacks in the chosen modes; print and save each row when it is done."""
    facts = {**machine(), "rounds": arguments.rounds, "seconds": arguments.seconds}
    for attack in (ATTACKS[name] for name in arguments.attack):
        for mode in (mode for mode in attack.modes if mode in arguments.mode):
            rounds = [
                await measure(attack, MODES[mode], arguments.seconds)
                for _ in range(arguments.rounds)
            ]
            row = Row(attack, mode, median_of(rounds))
            print_row(row, console)
            if arguments.report:
                save(facts, row)


def main() -> None:
    """Read the command line, measure, and save the results."""
    arguments = parse()
    if arguments.list:
        for attack in ATTACKS.values():
            print(f"{attack.name:20} {', '.join(attack.modes):22} {attack.title}")
        return
    if os.geteuid() != 0:
        raise SystemExit("`make attack` needs root: it runs programs of several users")
    with alone():
        asyncio.run(run(arguments, Console()))


if __name__ == "__main__":
    main()
