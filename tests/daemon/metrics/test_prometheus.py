"""A real Prometheus reads a real daemon; its tools check the exposition, the alerts, the dashboard.

Prometheus and promtool are Debian's (`make prometheus`); without them these tests fail.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.daemon.metrics.families import FAMILIES, PREFIX
from inferd.gateways.fleet.entry import metrics as fleet
from inferd.testing import running_daemon
from tests.daemon.metrics.scraping import scrape
from tools.dashboard import FILE, dashboard
from tools.dashboard_panels import PANELS
from tools.get_prometheus import MISSING, tool
from tools.prometheus import prometheus, query

FLEET = {family.exposed_name(fleet.PREFIX): family for family in fleet.FAMILIES.values()}
RULES = FILE.parent.parent / "prometheus" / "inferd.rules.yml"
PAGE = FILE.parents[2] / "docs" / "metrics.md"
SECONDS_MAX = 60
EXPOSED = {
    name
    for family in FAMILIES.values()
    for name in (
        [f"{PREFIX}{family.name}{part}" for part in ("_bucket", "_sum", "_count")]
        if family.kind == "histogram"
        else [family.exposed_name(PREFIX)]
    )
}


def run(name: str, *arguments: str, text: str | None = None, folder: Path | None = None) -> str:
    """Run a tool of Prometheus and return its output; it must find nothing."""
    path = tool(name)
    assert path is not None, MISSING
    done = subprocess.run(
        [path, *arguments], input=text, capture_output=True, text=True, cwd=folder, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def talk(socket: str) -> None:
    with Client(socket) as client, client.session("echo", raw=True) as session:
        for priority in ("low", "urgent"):
            session.chat("hello, what is to be said", priority=priority)


def test_promtool_finds_nothing_in_a_scrape() -> None:
    with running_daemon(metrics="127.0.0.1:0") as daemon:
        talk(daemon.socket)
        with Client(daemon.socket) as client:
            address = client.stats()["metrics_address"] or ""
        assert run("promtool", "check", "metrics", text=scrape(address)) == ""


def results_of(address: str, expression: str) -> list[dict[str, Any]]:
    """Return the result of a query once Prometheus has one."""
    rest = threading.Event()
    for _ in range(10 * SECONDS_MAX):
        found = []
        with suppress(OSError):  # it does not listen yet
            found = query(address, "query", query=expression)
        if found:
            return found
        rest.wait(0.1)
    raise AssertionError(f"nothing on {expression}")


def test_a_real_prometheus_reads_a_real_daemon(tmp_path: Path) -> None:
    with running_daemon(metrics="127.0.0.1:0") as daemon:
        talk(daemon.socket)
        with Client(daemon.socket) as client:
            target = client.stats()["metrics_address"] or ""
        with prometheus(target, tmp_path, rules=[RULES]) as address:
            [up] = results_of(address, 'up{job="inferd"} == 1')
            assert up["metric"]["instance"] == target
            [turns] = results_of(
                address, 'sum(inferd_request_success_total{model_name="echo"}) == 2'
            )
            assert turns["value"][1] == "2"
            names = results_of(address, 'count by (__name__) ({__name__=~"inferd_.+"})')
            assert {n["metric"]["__name__"] for n in names} <= EXPOSED
            buckets = "sum by (le) (inferd_time_to_first_token_seconds_bucket)"
            [ttft] = results_of(address, f"histogram_quantile(0.9, {buckets})")
            assert 0 < float(ttft["value"][1]) < 60


def test_the_rules_are_valid_and_each_alert_is_raised_by_its_cause() -> None:
    assert "SUCCESS" in run("promtool", "check", "rules", str(RULES))
    tests = RULES.with_name("inferd.rules.test.yml")
    assert "SUCCESS" in run("promtool", "test", "rules", tests.name, folder=RULES.parent)
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert alerts == set(re.findall(r"alertname: (\w+)\}", tests.read_text()))


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\binferd_\w+", text))


def test_rules_and_dashboard_name_existing_metrics() -> None:
    assert names_in(RULES.read_text()) <= EXPOSED | set(FLEET)
    expressions = [e for row in PANELS.values() for panel in row for e, _ in panel.queries]
    assert names_in("\n".join(expressions)) <= EXPOSED


def test_the_labels_of_rules_and_dashboard_are_those_of_the_families() -> None:
    known = {label for family in FAMILIES.values() for label in family.labels}
    known |= {"instance", "job", "le", "node"}
    expressions = [e for row in PANELS.values() for panel in row for e, _ in panel.queries]
    for text in (RULES.read_text(), *expressions):
        assert set(re.findall(r"[{,]\s*(\w+)\s*[!=]~?\"", text)) <= known
        for by in re.findall(r"by \(([\w, ]+)\)", text):
            assert {label.strip() for label in by.split(",")} <= known


@pytest.mark.parametrize(
    "expression", [e for row in PANELS.values() for panel in row for e, _ in panel.queries]
)
def test_each_query_of_the_dashboard_is_one(expression: str, tmp_path: Path) -> None:
    filled = expression.replace("$__rate_interval", "5m").replace("$instance", ".*")
    rule = {"record": "x", "expr": filled.replace("$model", ".*")}
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": [rule]}]}))
    assert "SUCCESS" in run("promtool", "check", "rules", str(file))


def test_the_dashboard_is_current_and_its_panels_do_not_overlap() -> None:
    assert FILE.read_text() == dashboard(), "run `make docs`: the dashboard is old"
    document = json.loads(FILE.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])


def test_the_page_names_each_family_as_it_is_exposed() -> None:
    rows = re.findall(r"^\| `(inferd_\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    exposed = {family.exposed_name(PREFIX): family.kind for family in FAMILIES.values()}
    assert dict(rows) == exposed | {name: family.kind for name, family in FLEET.items()}
