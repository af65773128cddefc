"""Generator of docs/dashboard.png: systemd/grafana/inferd.json of a working daemon in Grafana.

A real Prometheus scrapes a real daemon and runs the panels' queries. Grafana's own panel components
render the results in a headless Chromium, without a Grafana server. docs/dashboard.json records the
input of the picture. It needs the models of `make models`, the browser of `make browser`, Node.js,
and Debian's package `pngquant`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import inferd
from inferd.testing import running_daemon
from tools.dashboard import FILE
from tools.dashboard_picture.load import CONFIG, LOAD_S, at_work, link_models
from tools.get_browser import MISSING, browser
from tools.prometheus import prometheus, query

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PICTURE = ROOT / "docs" / "dashboard.png"
RECORD = PICTURE.with_suffix(".json")
ANSWERS = ROOT / ".cache" / "dashboard-answers.json"
SCRAPE_S = 2
RATE_S = 4 * SCRAPE_S
"""Grafana's value of $__rate_interval for a step that is as long as the scrape interval."""
COLOURS = 128


def measure() -> dict[str, Any]:
    """Run programs on a daemon for some minutes; return the results of the panels' queries."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (models := folder / "models").mkdir()
        link_models(models, ROOT / ".cache" / "models")
        with running_daemon(CONFIG, models_dir=models, metrics="127.0.0.1:0") as daemon:
            with inferd.Client(daemon.socket) as client:
                target = client.stats()["metrics_address"] or ""
            scraped = prometheus(target, folder, scrape_s=SCRAPE_S, instance="workstation")
            with scraped as where, at_work(daemon.socket, daemon.pid):
                began = time.time()
                threading.Event().wait(LOAD_S)
                return answers(where, began, _between_minutes(time.time()))


def answers(where: str, began: float, ended: float) -> dict[str, Any]:
    """Return the results of a dashboard's queries for the time from *began* to *ended*."""
    span = {"start": _aligned(began), "end": _aligned(ended)}
    results = {
        target["expr"]: query(
            where, "query_range", query=resolved(target["expr"]), step=SCRAPE_S, **span
        )
        for panel in panels()
        for target in panel["targets"]
    }
    return {**span, "step_s": SCRAPE_S, "answers": results}


def _between_minutes(at: float) -> float:
    """Return the last half minute, because the label of a time at the end would be cut off."""
    return (at - 30) // 60 * 60 + 30


def _aligned(at: float) -> int:
    return int(at // SCRAPE_S * SCRAPE_S)


def resolved(expression: str) -> str:
    """Return a query with all variables replaced by their initial value, all."""
    values = {v["name"]: v.get("allValue", "") for v in _document()["templating"]["list"]}
    for name, value in {**values, "__rate_interval": f"{RATE_S}s"}.items():
        expression = expression.replace(f"${name}", value)
    return expression


def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(FILE.read_text())
    return document


def panels() -> list[dict[str, Any]]:
    """Return the dashboard's panels without the titles of rows."""
    return [panel for panel in _document()["panels"] if "targets" in panel]


def draw() -> None:
    """Render the picture of the results."""
    if not (HERE / "node_modules").exists():
        subprocess.run(["npm", "ci"], cwd=HERE, check=True)
    chromium = browser()
    if chromium is None:
        raise SystemExit(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        full = Path(folder) / "full.png"
        rendered = ["node", str(HERE / "take.mjs"), chromium, str(FILE), str(ANSWERS), str(full)]
        subprocess.run(rendered, check=True)
        quantize = ["pngquant", "--force", "--strip", "--speed=1", f"--output={PICTURE}"]
        subprocess.run([*quantize, str(COLOURS), full], check=True)


def write_record(found: dict[str, Any]) -> None:
    """Write the record of the picture's input."""
    record = {
        "made": datetime.fromtimestamp(found["end"], UTC).isoformat(),
        "seconds": found["end"] - found["start"],
        "dashboard_sha256": sha256(FILE),
        "picture_sha256": sha256(PICTURE),
        "panels": [
            {
                "title": panel["title"],
                "queries": {
                    expression: summary(found["answers"][expression])
                    for expression in (target["expr"] for target in panel["targets"])
                },
            }
            for panel in panels()
        ],
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def summary(series: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the size of a query's result."""
    values = [float(v) for one in series for _, v in one["values"] if v not in ("NaN", "+Inf")]
    return {
        "series": len(series),
        "values": len(values),
        "greatest": float(f"{max(values, default=0):.3g}"),
    }


def sha256(file: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    """Make the picture and its record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="draw what was measured before")
    if not parser.parse_args().again:
        ANSWERS.write_text(json.dumps(measure()))
    draw()
    write_record(json.loads(ANSWERS.read_text()))
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
