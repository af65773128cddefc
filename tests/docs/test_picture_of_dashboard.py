"""The dashboard's picture shows the current dashboard without empty panels."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tools.dashboard import FILE
from tools.dashboard_panels import PANELS

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "dashboard.png"
BYTES_MAX = 400_000
SECONDS_MIN = 180


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PICTURE.with_suffix(".json").read_text())
    return found


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_it_shows_the_current_dashboard(record: dict[str, Any]) -> None:
    assert record["dashboard_sha256"] == sha256(FILE), "run `make dashboard-picture`: it is old"
    assert record["picture_sha256"] == sha256(PICTURE)


def test_each_panel_shows_the_results_of_its_queries(record: dict[str, Any]) -> None:
    panels = [panel for row in PANELS.values() for panel in row]
    assert [p["title"] for p in record["panels"]] == [panel.title for panel in panels]
    for shown, panel in zip(record["panels"], panels, strict=True):
        assert list(shown["queries"]) == [expression for expression, _ in panel.queries]
        assert sum(found["values"] for found in shown["queries"].values()) > 1, panel.title


def test_the_daemon_was_under_load(record: dict[str, Any]) -> None:
    greatest = {
        panel["title"]: max(found["greatest"] for found in panel["queries"].values())
        for panel in record["panels"]
    }
    busy = (
        *("Running", "Waiting", "Parked", "Tokens", "Ends", "Rejected requests, by reason"),
        *("Waiting for a place among the open sessions", "Connections and labels"),
        *("Tensors that stay, by graph", "Buffers of clients", "Loaded graphs, by device"),
        *("Jobs by state", "Requests of jobs", "Ended requests of jobs, by outcome"),
    )
    assert all(greatest[title] > 0 for title in busy), greatest
    assert record["seconds"] >= SECONDS_MIN


def test_it_is_a_png_of_the_whole_grid_and_small() -> None:
    data = PICTURE.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) < BYTES_MAX
    width, height = struct.unpack(">II", data[16:24])
    panels = json.loads(FILE.read_text())["panels"]
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    assert width >= 1200 and height > 38 * bottom


def test_the_page_of_the_metrics_shows_it() -> None:
    assert "](dashboard.png)" in (ROOT / "docs" / "metrics.md").read_text()
