"""The Grafana dashboard, systemd/grafana/inferd.json, generated from its panels by `make docs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.dashboard_panels import LOGARITHMIC, PANELS, Panel

__all__ = ("FILE", "dashboard")

FILE = Path(__file__).parent.parent / "systemd" / "grafana" / "inferd.json"

GRID = 24
SIZES = {"stat": (3, 4), "timeseries": (6, 7)}
"""Width and height of the kinds of panels, in cells of the grid."""
COLOURS = {
    "{{priority}}": {"urgent": "red", "high": "orange", "normal": "green", "low": "blue"},
    "{{outcome}}": {
        "ok": "green",
        "cancelled": "blue",
        "timeout": "yellow",
        "refused": "orange",
        "failed": "red",
        "completed": "green",
        "given_up": "orange",
    },
    "{{state}}": {
        "ready": "green",
        "running": "dark-green",
        "waiting": "yellow",
        "parked": "orange",
        "done": "light-green",
        "empty": "light-blue",
        "failed": "red",
        "unloaded": "purple",
        "yielded": "light-purple",
        "dormant": "dark-blue",
        "cold": "blue",
        "loading": "yellow",
        "unloading": "orange",
        "completed": "green",
        "cancelled": "blue",
        "expired": "light-orange",
    },
}
"""Colours of legends with the same meaning in all panels."""


def dashboard() -> str:
    """Return the dashboard in Grafana's import format."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in PANELS.items():
        panels.append(_placed({"type": "row", "title": title, "collapsed": False}, GRID, 1, 0, top))
        top += 1
        left = 0
        for panel in row:
            width, height = SIZES[panel.kind]
            panels.append(_placed(_rendered(panel), width, height, left, top))
            left = (left + width) % GRID
            top += height * (left == 0 or panel is row[-1])
    for number, panel_json in enumerate(panels, start=1):
        panel_json["id"] = number
    document = {
        "title": "inferd",
        "uid": "inferd",
        "tags": ["inferd", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _placed(panel: dict[str, Any], width: int, height: int, left: int, top: int) -> dict[str, Any]:
    return panel | {"gridPos": {"w": width, "h": height, "x": left, "y": top}}


def _rendered(panel: Panel) -> dict[str, Any]:
    config: dict[str, Any] = {"unit": panel.unit, "noValue": panel.empty}
    if panel.style is not LOGARITHMIC:
        config["min"] = 0
    if panel.top is not None:
        config["max"] = panel.top
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        **(_number(panel, config) if panel.kind == "stat" else _graph(panel, config)),
        "targets": [
            {"refId": chr(ord("A") + n), "expr": expression, "legendFormat": legend}
            for n, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _graph(panel: Panel, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "fieldConfig": {
            "defaults": {**config, "custom": panel.style},
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": name},
                    "properties": [
                        {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}
                    ],
                }
                for _, legend in panel.queries
                for name, colour in COLOURS.get(legend, {}).items()
            ],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _number(panel: Panel, config: dict[str, Any]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.warns is not None:
        steps.append({"color": "orange", "value": panel.warns})
    thresholds = {"mode": "absolute", "steps": steps}
    return {
        "fieldConfig": {"defaults": {**config, "thresholds": thresholds}, "overrides": []},
        "options": {
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "value",
            "text": {"valueSize": 36},
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    queries = {
        "instance": "label_values(inferd_build_info, instance)",
        "model": 'label_values(inferd_slots{instance=~"$instance"}, model_name)',
    }
    return [
        source,
        *(
            {
                "name": name,
                "type": "query",
                "query": query,
                "datasource": {"type": "prometheus", "uid": "${source}"},
                "includeAll": True,
                "allValue": ".*",
                "multi": True,
                "current": {"text": "All", "value": "$__all"},
                "refresh": 2,
            }
            for name, query in queries.items()
        ),
    ]


def main() -> None:
    """Write the file."""
    FILE.write_text(dashboard())
    print(FILE)


if __name__ == "__main__":
    main()
