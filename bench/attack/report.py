"""The results of the attacks: checked, printed, kept in bench/results, and in docs/security.md."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, NamedTuple, get_args

from rich.console import Console

from tools.build_engine import ROOT

from .attack import Attack, Guarantee
from .attacks import ATTACKS
from .measuring import Measurement
from .victim import VictimFigures

RESULTS = ROOT / "bench" / "results" / "attacks.json"
PAGE = ROOT / "docs" / "security.md"
GUARANTEES: tuple[Guarantee, ...] = get_args(Guarantee)
GUARANTEES_BEGIN = "<!-- guarantees, written by `make attack` -->"
TABLE_BEGIN = "<!-- written by `make attack` -->"
END = "<!-- end -->"
COLUMNS = (
    *("attack", "mode", "cores", "alone", "busy", "attacked", "share", "gap", "calls", "MB"),
    *("errors", "missed"),
)

_NUMBERS: dict[Guarantee, str] = {
    "share": "a stream keeps at least {0.share_least} of its pace alone",
    "gap": "no pause of a stream, nor its begin, is longer than {0.gap_s_max} s",
    "calls": "the 99th percentile of cheap calls is below {0.call_ms_max:.0f} ms",
    "memory": "the daemon grows by at most {0.mb_more_max:.0f} MB, and {0.mb_left_max:.0f} MB stay",
    "places": "no call and no stream is refused",
}
_VALUES: dict[Guarantee, str] = {
    "share": "{:.2f}",
    "gap": "{:.2f} s",
    "calls": "{:.1f} ms",
    "memory": "{:.0f} MB",
    "places": "{:.0f} kinds of error",
}


class Check(NamedTuple):
    """A figure under attack, beside the bound of its guarantee."""

    value: float
    bound: float
    is_met: bool


@dataclass(frozen=True)
class Row:
    """An attack in one mode, and its measurement."""

    attack: Attack
    mode: str
    measured: Measurement

    def share(self, beside: VictimFigures) -> float:
        """Return the ratio of the pace under attack to another one."""
        return self.measured.attacked.tokens_per_s / max(beside.tokens_per_s, 1e-9)

    def checks(self) -> dict[Guarantee, Check]:
        """Return the figure of each guarantee, beside its bound."""
        measured, victim = self.measured, self.measured.attacked
        bounds = self.attack.bounds_in(self.mode)
        share = self.share(measured.busy)
        more_mb = measured.largest_mb - measured.before_mb
        left_mb = measured.after_mb - measured.before_mb
        gap_s, call_ms = victim.gap_worst_s, victim.call_p99_ms
        memory_met = more_mb <= bounds.mb_more_max and left_mb <= bounds.mb_left_max
        errors = len(victim.errors)
        return {
            "share": Check(share, bounds.share_least, share >= bounds.share_least),
            "gap": Check(gap_s, bounds.gap_s_max, gap_s <= bounds.gap_s_max),
            "calls": Check(call_ms, bounds.call_ms_max, call_ms < bounds.call_ms_max),
            "memory": Check(more_mb, bounds.mb_more_max, memory_met),
            "places": Check(errors, 0, errors == 0),
        }

    def missed(self) -> list[Guarantee]:
        """Return the guarantees whose bounds are not met."""
        return [name for name, check in self.checks().items() if not check.is_met]


def print_row(row: Row, console: Console) -> None:
    """Print one row's figures, and the guarantees that they miss."""
    measured, after = row.measured, row.measured.attacked
    missed = row.missed()
    console.print(
        f"{row.attack.name:20} {row.mode:8} alone {measured.alone.tokens_per_s:5.1f}, as busy "
        f"{measured.busy.tokens_per_s:5.1f} → {after.tokens_per_s:5.1f} tokens/s = "
        f"{row.share(measured.alone):.2f}, {row.share(measured.busy):.2f} "
        f"({measured.program_cores:.2f} cores)  "
        f"gap {measured.alone.gap_worst_s:.2f} → {after.gap_worst_s:.2f} s  "
        f"calls p99 {measured.alone.call_p99_ms:.1f} → {after.call_p99_ms:.1f} ms, "
        f"worst {after.call_worst_ms:.0f} ms  "
        f"{measured.before_mb:.0f} → {measured.largest_mb:.0f} → {measured.after_mb:.0f} MB  "
        f"shows {', '.join(row.attack.shows)}"
        f"{'  NOT MET: ' if missed else ''}{', '.join(missed)} {' '.join(after.errors)}",
        soft_wrap=True,
        highlight=False,
    )


def save(facts: Mapping[str, Any], row: Row) -> None:
    """Save a measurement beside those of other rows, and write the page's tables."""
    kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    kept.setdefault(row.attack.name, {})[row.mode] = asdict(row.measured)
    RESULTS.write_text(json.dumps({"facts": facts, "rows": kept}, indent=1) + "\n")
    PAGE.write_text(page())


def read_rows() -> list[Row]:
    """Return the kept measurements of present attacks, in the order of the attacks."""
    kept = json.loads(RESULTS.read_text())["rows"]
    return [
        Row(attack, mode, _measurement(kept[attack.name][mode]))
        for attack in ATTACKS.values()
        for mode in attack.modes
        if mode in kept.get(attack.name, {})
    ]


def _measurement(fields: Mapping[str, Any]) -> Measurement:
    victims = {name: VictimFigures(**fields[name]) for name in ("alone", "busy", "attacked")}
    return Measurement(**{**fields, **victims})


def page(rows: Sequence[Row] | None = None) -> str:
    """Return the page's text with tables of *rows*, or of the kept measurements."""
    rows = read_rows() if rows is None else rows
    text = PAGE.read_text()
    for begin, lines in (
        (GUARANTEES_BEGIN, guarantee_table(ATTACKS.values(), rows)),
        (TABLE_BEGIN, measurement_table(rows)),
    ):
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(END)
        text = f"{head}{begin}\n" + "".join(f"{line}\n" for line in lines) + f"{END}{tail}"
    return text


def guarantee_table(attacks: Collection[Attack], rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table of the guarantees, with the attacks that show each number."""
    yield "| guarantee | number | shown by `make attack` | worst measured |"
    yield "|---|---|---|---|"
    shown: dict[tuple[Guarantee, str], dict[Attack, list[str]]] = {}
    for guarantee in GUARANTEES:
        for attack in attacks:
            for mode in attack.modes if guarantee in attack.shows else ():
                number = _NUMBERS[guarantee].format(attack.bounds_in(mode))
                shown.setdefault((guarantee, number), {}).setdefault(attack, []).append(mode)
    for (guarantee, number), modes in shown.items():
        names = ", ".join(
            f"`{attack.name}`" + ("" if tuple(found) == attack.modes else f" ({', '.join(found)})")
            for attack, found in modes.items()
        )
        measured = [row for row in rows if row.mode in modes.get(row.attack, ())]
        yield f"| {guarantee} | {number} | {names} | {_worst(guarantee, measured)} |"


def _worst(guarantee: Guarantee, rows: Sequence[Row]) -> str:
    """Return the worst figure of the rows as a text, with its row."""
    if not rows:
        return "–"
    figures = [(row.checks()[guarantee].value, row) for row in rows]
    pick = min if guarantee == "share" else max
    value, row = pick(figures, key=itemgetter(0))
    return f"{_VALUES[guarantee].format(value)} (`{row.attack.name}` {row.mode})"


def measurement_table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the lines of a table of all rows."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for row in rows:
        measured, after = row.measured, row.measured.attacked
        yield (
            f"| {row.attack.title} (`{row.attack.name}`) | {row.mode} "
            f"| {measured.program_cores:.2f} "
            f"| {measured.alone.tokens_per_s:.1f} | {measured.busy.tokens_per_s:.1f} "
            f"| {after.tokens_per_s:.1f} "
            f"| {row.share(measured.alone):.2f}, {row.share(measured.busy):.2f} "
            f"| {measured.alone.gap_worst_s:.2f}, {after.gap_worst_s:.2f} s "
            f"| {measured.alone.call_p99_ms:.1f}, {after.call_p99_ms:.1f} ms "
            f"| {measured.before_mb:.0f}, {measured.largest_mb:.0f}, {measured.after_mb:.0f} "
            f"| {', '.join(after.errors) or '–'} | {', '.join(row.missed()) or '–'} |"
        )
