"""Writes docs/benchmarks.md from a run's JSON: `python -m bench.report [FILE]`, else the newest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tools.build_engine import ROOT

from .decode import ATTEMPTS_MAX, FOREIGN_CORES_MAX, OUT_DIR
from .scenario import CTX_SIZE, FIGURES, N_PREDICT, SLOTS, THREADS, Run, medians

TARGET = ROOT / "docs" / "benchmarks.md"
HEADINGS = {
    "tokens_per_s": "tokens/s",
    "ttft_ms": "first token, ms",
    "itl_p50_ms": "gap p50, ms",
    "itl_p99_ms": "gap p99, ms",
}
# (of which side, to which, at least): what a release is to reach.
TARGETS = (
    ("inferd stream", "llama-server", {1: 1.0, 4: 1.0, 16: 1.0}),
    ("inferd stream", "bare", {1: 0.85, 4: 0.85, 16: 0.9}),
    ("inferd pull", "inferd stream", {1: 0.9, 16: 0.9}),
)

INTRODUCTION = f"""\
# Benchmarks

Written by `make bench`; the figures are those of the machine below and no other.

Each stream sends a prompt of 40 to 60 tokens, new in each run, and reads {N_PREDICT} tokens,
greedily, past the end of generation. All streams of a run ask at once. Tokens per second count the
generated tokens over the whole run, prompts included; the first token's time is the median over
the streams, gaps are those between one piece of a stream and the next.

- **llama-server** is built from the source that the pinned llama-cpp-python vendors (Release,
  native), so all sides run the same kernels. {SLOTS} slots of {CTX_SIZE} tokens, split KV,
  {THREADS} threads, its prompt caches off (every prompt is new), its cheapest greedy sampling; its
  clients name neighbouring slots, without which its batches fall apart in time.
- **inferd stream** and **inferd pull** (`compute_single`, a call a token): the same model file,
  slots, context and threads. Each side has one asyncio connection a stream from one client process.
- **bare** is a loop around llama.cpp that does nothing else: no queue, no text, no other process.

The sides take turns within each round. A run beside which other programs kept more than
{FOREIGN_CORES_MAX:g} cores busy is made again, up to {ATTEMPTS_MAX} times in all, and the calmest
counts. A run in which a server had part of a prompt in a cache is refused.
"""


def load(path: Path) -> tuple[dict[str, Any], list[Run]]:
    """Return facts and runs of a file that `decode.save` wrote."""
    content = json.loads(path.read_text())
    return content["facts"], [Run(**run) for run in content["runs"]]


def rows(header: list[str], lines: list[list[str]]) -> str:
    """Return a Markdown table."""
    ruler = ["---"] * len(header)
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ruler, *lines])


def median_table(runs: list[Run]) -> str:
    """Return the medians, a line for each number of streams and side."""
    by_key = sorted(medians(runs).items(), key=lambda item: item[0][1])
    lines = [
        [str(streams), side, *(f"{row[name]:.1f}" for name in FIGURES)]
        for (side, streams), row in by_key
    ]
    return rows(["streams", "side", *HEADINGS.values()], lines)


def ratio_table(runs: list[Run]) -> str:
    """Return tokens/s of one side over the other's, beside what it is to be at least."""
    by_key = medians(runs)
    lines = []
    for side, other, targets in TARGETS:
        for streams, least in targets.items():
            if (side, streams) in by_key and (other, streams) in by_key:
                pair = [by_key[name, streams]["tokens_per_s"] for name in (side, other)]
                ratio = f"{pair[0] / pair[1]:.2f}"
                lines.append([f"{side} / {other}", str(streams), ratio, f"{least:.2f}"])
    return rows(["ratio of tokens/s", "streams", "measured", "at least"], lines)


def raw_table(runs: list[Run]) -> str:
    """Return every run's tokens/s."""
    rounds = range(1, max(run.round for run in runs) + 1)
    keys = sorted(medians(runs), key=lambda key: key[1])
    rate = {(r.side, r.streams, r.round): f"{r.tokens_per_s:.1f}" for r in runs}
    lines = [[str(n), side, *(rate.get((side, n, i), "") for i in rounds)] for side, n in keys]
    return rows(["streams", "side", *(f"round {i}" for i in rounds)], lines)


def page(facts: dict[str, Any], runs: list[Run]) -> str:
    """Return the whole page."""
    facts = {
        **facts,
        "cores busy with others, worst run": f"{max(r.foreign_cores for r in runs):.2f}",
    }
    facts_table = rows(["fact", "value"], [[name, str(value)] for name, value in facts.items()])
    parts = [INTRODUCTION, "## Medians\n", median_table(runs), "## Ratios\n", ratio_table(runs)]
    parts += ["## Machine and resting costs\n", facts_table]
    parts += ["## Every run, tokens/s\n", raw_table(runs)]
    return "\n".join(parts)


def newest() -> Path:
    """Return the newest run's file.

    :raises SystemExit: there is none.
    """
    files = sorted(OUT_DIR.glob("decode-*.json"))
    if not files:
        raise SystemExit(f"no run in {OUT_DIR}; make one with `make bench`")
    return files[-1]


def write(path: Path) -> None:
    """Write docs/benchmarks.md from the run at *path*."""
    facts, runs = load(path)
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page(facts, runs))
    print(f"wrote {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else newest())
