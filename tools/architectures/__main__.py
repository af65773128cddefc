"""Checks of inferd on a tiny model of every architecture of llama.cpp, for docs/architectures.md.

Each file is checked in processes of its own, which llama.cpp may abort, and then through a daemon
that serves all of them. The outcomes are kept in `.cache/architectures/`, and the page is
made of all of them: `--only` checks some files again.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.architectures.served import AFTER_A_RESTART, CONFIG, SERVED, Served
from tests.backends.llama.test_memory_estimate import measure, spec_of
from tools.architectures.models import WRITTEN, every_model
from tools.architectures.outcomes import Outcome, outcome_of, run_checks
from tools.architectures.page import PAGE, Row, page
from tools.build_engine import ROOT

PROCESSES = 2
PARTNERS = (("llama-dense", "qwen2-dense"), ("gemma4-dense", "rwkv7-dense"))
"""Models that replace all others, and those that replace these: of the vocabulary of llama.cpp's
test models, and of bytes.
"""
ESTIMATE_SHARE_MAX, ESTIMATE_BYTES_MAX = 0.05, 5_000_000
"""An estimate may be off by one of these."""
RESULTS = ROOT / ".cache" / "architectures"
Part = Literal["checks", "served"]
_Rows = dict[str, Row]


def check_files(files: Sequence[Path]) -> Iterator[Row]:
    """Run the checks without a daemon, of several files at once."""
    with ThreadPoolExecutor(PROCESSES) as threads:
        for file, outcomes in zip(files, threads.map(_check_file, files), strict=True):
            yield Row(file.stem, outcomes)


def _check_file(file: Path) -> list[Outcome]:
    outcomes = run_checks(file)
    if outcomes[1:] and outcomes[1].kind != "refused":  # it generates text
        outcomes.append(outcome_of("estimate", partial(_check_estimate, file)))
    return outcomes


def _check_estimate(file: Path) -> None:
    """Compare the estimate with the memory of a process whose context is full."""
    estimated, measured = measure(spec_of(file), "computed")
    off = estimated - measured
    figures = f"estimated {estimated / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB"
    assert abs(off) <= max(ESTIMATE_BYTES_MAX, ESTIMATE_SHARE_MAX * measured), figures


def serve_files(files: Sequence[Path]) -> Iterator[Row]:
    """Run the checks through a daemon; yield each file's outcomes twice, then with all of them."""
    rows: _Rows = {}
    with _folder_of(files) as folder, running_daemon(CONFIG, models_dir=folder) as daemon:
        for checks in (SERVED, AFTER_A_RESTART):
            for file in files:
                with Client(daemon.socket) as client:
                    served = Served(client, file.stem, _partner(file.stem), folder)
                    found = [
                        _outcome_of_served(daemon, name, partial(check, served))
                        for name, check in checks.items()
                    ]
                    client.unload_model(file.stem, force=True)
                before = rows[file.stem].outcomes if file.stem in rows else []
                rows[file.stem] = Row(file.stem, before + found)
                yield rows[file.stem]
            daemon.stop()
            daemon.start_again()


def _outcome_of_served(daemon: RunningDaemon, name: str, check: partial[None]) -> Outcome:
    """Return the outcome of a check, which is a failure if a worker has died."""
    deaths = daemon.log.count("worker.died")
    outcome = outcome_of(name, check)
    if daemon.log.count("worker.died") == deaths:
        return outcome
    return Outcome(name, "died", outcome.detail)


def _partner(name: str) -> str:
    first, second = PARTNERS[name.rpartition("-")[0] in WRITTEN]
    return second if name == first else first


@contextmanager
def _folder_of(files: Sequence[Path]) -> Iterator[Path]:
    """Make a models directory of links to *files*, for adapters beside them."""
    partners = [files[0].with_name(f"{name}.gguf") for pair in PARTNERS for name in pair]
    with tempfile.TemporaryDirectory() as folder:
        for file in {*files, *partners}:
            Path(folder, file.name).symlink_to(file)
        yield Path(folder)


def _print(row: Row) -> None:
    counts = Counter(outcome.kind for outcome in row.outcomes)
    print(f"{row.name:24} {', '.join(f'{n} {kind}' for kind, n in counts.items())}", flush=True)
    for outcome in row.outcomes:
        if outcome.is_finding:
            print(f"    {outcome.check}: {outcome.kind}: {outcome.detail}", flush=True)


def _kept(part: Part) -> _Rows:
    """Return the outcomes of earlier runs."""
    path = RESULTS / f"{part}.json"
    return msgspec.json.decode(path.read_bytes(), type=_Rows) if path.exists() else {}


def _keep(part: Part, rows: _Rows) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{part}.json").write_bytes(msgspec.json.encode(_kept(part) | rows))


def _write_page(files: Sequence[Path]) -> None:
    """Write the page, if all files were checked; the daemon may have served only some."""
    checks, served = _kept("checks"), _kept("served")
    if any(file.stem not in checks for file in files):
        return
    rows = [checks[file.stem] for file in files]
    for index, row in enumerate(rows):
        if row.name in served and row.outcomes[1:]:
            rows[index] = Row(row.name, row.outcomes + served[row.name].outcomes)
    PAGE.write_text(page(rows))


def main() -> None:
    """Check the files that the arguments choose, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only files whose name matches this pattern")
    parser.add_argument("--part", choices=("checks", "served"), help="only these checks")
    parser.add_argument("--missing", action="store_true", help="only files not checked yet")
    given = parser.parse_args()
    began, every = time.monotonic(), every_model()
    files = [file for file in every if re.search(given.only, file.stem)]
    parts: list[Part] = [given.part] if given.part else ["checks", "served"]
    counts = Counter[str]()
    for part in parts:
        if part == "served":
            checks = _kept("checks")
            files = [f for f in files if f.stem not in checks or checks[f.stem].outcomes[1:]]
        chosen = [f for f in files if not given.missing or f.stem not in _kept(part)]
        rows: _Rows = {}
        for row in (check_files if part == "checks" else serve_files)(chosen):
            _print(row)
            rows[row.name] = row
            _keep(part, rows)
        counts.update(outcome.kind for row in rows.values() for outcome in row.outcomes)
    _write_page(every)
    print(f"{len(files)} files, {dict(counts)}, {time.monotonic() - began:.0f} s")
    raise SystemExit(counts["failed"] + counts["died"] > 0)


if __name__ == "__main__":
    main()
