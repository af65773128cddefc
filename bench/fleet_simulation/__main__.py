"""`python -m bench.fleet_simulation`: simulate fleets, compare policies, write docs/fleet.md.

The runs in docs/fleet.md took 24 minutes of CPU time. There is a run for each fleet, policy and
seed; its figures are in `bench/out/fleet` until all are written to
`bench/results/fleet-simulation.json`.
`--calibrate` compares the simulation of one node with a real one.
"""

from __future__ import annotations

import argparse
import json
import time

from tools.build_engine import ROOT

from . import calibrating, page
from .fleets import FLEETS
from .policies import POLICIES
from .simulation import Simulation

OUT_DIR = ROOT / "bench" / "out" / "fleet"


def simulate(fleet: str, policy: str, seed: int) -> None:
    """Run a fleet with a policy, print its figures and save them."""
    began = time.process_time()
    found = Simulation(FLEETS[fleet].scenario(seed), POLICIES[policy]).run()
    cpu_s = round(time.process_time() - began, 1)
    found |= {"fleet": fleet, "policy": policy, "seed": seed, "cpu_s": cpu_s}
    OUT_DIR.mkdir(parents=True, exist_ok=True)
    (OUT_DIR / f"{fleet}, {policy}, {seed}.json").write_text(json.dumps(found))
    print(page.line(found), flush=True)


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet_simulation", description=__doc__)
    parser.add_argument("--calibrate", action="store_true", help="compare one node with a real one")
    parser.add_argument("--report", action="store_true", help="only write results and plots")
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=list(FLEETS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    return parser.parse_args()


def main() -> None:
    """Run what the command line requests."""
    arguments = parse()
    if arguments.calibrate:
        calibrating.calibrate()
        return
    if not arguments.report:
        for fleet in arguments.fleets:
            for policy in arguments.policies:
                for seed in range(1, FLEETS[fleet].seeds + 1):
                    simulate(fleet, policy, seed)
    page.collect(OUT_DIR)
    page.write()


if __name__ == "__main__":
    main()
