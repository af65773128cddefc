"""Load model files with one changed field, and print those that end their process.

Each load has a process of its own. `--count 2000` takes about three minutes on two idle cores; all
66 000 variants take an hour and a half.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.backends.llama.mutated_files import chosen_variants
from tests.backends.llama.mutated_loads import load_variants


def main() -> None:
    """Load the variants that the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=0, help="0: all variants")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the choice")
    parser.add_argument("--only", default="", help="only variants whose name contains this text")
    parser.add_argument("--part", default="0/1", help="N/M: every M-th variant from the N-th on")
    parser.add_argument("--json", action="store_true", help="print each outcome as a line of JSON")
    given = parser.parse_args()
    number, parts = (int(word) for word in given.part.split("/"))
    began, counts = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        found = chosen_variants(directory, given.count, given.seed)
        found = [v for v in found if given.only in v.name][number::parts]
        for outcome in load_variants(found, directory):
            counts[outcome.kind] += 1
            if given.json:
                print(json.dumps(outcome), flush=True)
            elif outcome.is_finding:
                print(f"{outcome.kind:8} {outcome.name}: {outcome.detail}", flush=True)
    if not given.json:
        seconds = time.monotonic() - began
        print(f"{sum(counts.values())} variants in {seconds:.0f} s: {dict(counts)}")


if __name__ == "__main__":
    main()
