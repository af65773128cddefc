"""The results of the attacks: printed, kept in bench/results, and shown in docs/security.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from tools.build_engine import ROOT

from .victim import VictimFigures

RESULTS = ROOT / "bench" / "results" / "attacks.json"
RESULTS_BEFORE = RESULTS.with_name("attacks_before.json")
"""The results of the version before the bounds were built, with the same attacks."""
PAGE = ROOT / "docs" / "security.md"
BEGIN = "<!-- written by `make attack` -->"
END = "<!-- end -->"
CALL_P99_MS_MAX = 50.0
COLUMNS = (
    *("attack", "streams", "before", "cores", "ordinary", "busy", "attacked", "ratios", "gap"),
    *("calls", "MB"),
)


@dataclass(frozen=True)
class Measurement:
    """A victim's figures beside other programs."""

    name: str
    title: str
    streams: int
    ordinary: VictimFigures
    """The figures beside an ordinary program."""
    busy: VictimFigures
    """Those beside an ordinary program and a process with as much CPU time as the attacker's."""
    attacked: VictimFigures
    """Those beside the attack."""

    def is_met(self, pace_least: float) -> bool:
        """Return whether the victim's figures under attack are in their bounds."""
        after = self.attacked
        keeps_pace = after.tokens_per_s >= pace_least * self.busy.tokens_per_s
        return keeps_pace and after.call_p99_ms < CALL_P99_MS_MAX and not after.errors


def ratio(attacked: VictimFigures, beside: VictimFigures) -> str:
    """Return the ratio of two paces as a text."""
    if not beside.tokens_per_s:
        return "–"
    return f"{attacked.tokens_per_s / beside.tokens_per_s:.2f}"


def print_measurement(measured: Measurement, pace_least: float, console: Console) -> None:
    """Print one attack's figures and whether they are in their bounds."""
    after = measured.attacked
    console.print(
        f"{measured.name:20} {measured.ordinary.tokens_per_s:6.1f}, as busy "
        f"{measured.busy.tokens_per_s:6.1f} → {after.tokens_per_s:6.1f} tokens/s = "
        f"{ratio(after, measured.ordinary)}, {ratio(after, measured.busy)} "
        f"({after.program_cores:.2f} cores)  gap {after.gap_worst_s:.2f} s  "
        f"calls p99 {after.call_p99_ms:.1f} ms, worst {after.call_worst_ms:.0f} ms  "
        f"daemon {after.daemon_mb:.0f} MB"
        f"{'' if measured.is_met(pace_least) else '  NOT MET'} {' '.join(after.errors)}",
        soft_wrap=True,
        highlight=False,
    )


def save(facts: Mapping[str, str], measurements: Sequence[Measurement]) -> None:
    """Save the measurements beside those of other attacks, and write the page's table."""
    kept: dict[str, Any] = json.loads(RESULTS.read_text())["attacks"] if RESULTS.exists() else {}
    kept |= {m.name: asdict(m) for m in measurements}
    RESULTS.write_text(json.dumps({"facts": facts, "attacks": kept}, indent=1) + "\n")
    write_page()


def write_page() -> None:
    """Write the table of all kept measurements into docs/security.md."""
    if not PAGE.exists():
        return
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{table()}{END}{tail}")


def table() -> str:
    """Return the kept measurements as a Markdown table."""
    kept = json.loads(RESULTS.read_text())["attacks"]
    kept_before = json.loads(RESULTS_BEFORE.read_text())["attacks"]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, fields in kept.items():
        ordinary, busy, attacked = (
            VictimFigures(**fields[beside]) for beside in ("ordinary", "busy", "attacked")
        )
        before = VictimFigures(**kept_before[name]["attacked"])
        lines.append(
            f"| {fields['title']} | {fields['streams']} "
            f"| {before.tokens_per_s:.1f}, {before.call_p99_ms:.0f} ms, {before.daemon_mb:.0f} MB "
            f"| {attacked.program_cores:.2f} "
            f"| {ordinary.tokens_per_s:.1f} | {busy.tokens_per_s:.1f} "
            f"| {attacked.tokens_per_s:.1f} "
            f"| {ratio(attacked, ordinary)}, {ratio(attacked, busy)} "
            f"| {attacked.gap_worst_s:.2f} s "
            f"| {attacked.call_p99_ms:.1f} ms "
            f"| {attacked.daemon_mb:.0f} MB |"
        )
    return "\n".join(lines) + "\n"
