"""Graphs on the page: their inputs and outputs, their computations, and their usage."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.gateways.http.web_page.driver import WIDE, PageOpener
from tests.ir_graphs import write_ir
from tests.onnx_graphs import Port, affine, graph, loop, write_graphs

FOREVER = 1 << 62
HOSTILE = "<img src=x onerror=alert(1)>"
MANY = 120


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    many: list[Port] = [(f"x{number}", "i64", [1]) for number in range(MANY)]
    hostile: list[Port] = [(HOSTILE, "fp16", [1, ""])]
    graphs = {"affine": affine(), "loop": loop(), "many": graph([], many, many)}
    write_graphs(models, {**graphs, "hostile": graph([], hostile, hostile)})
    write_ir(models, {"old": affine()})
    text = (models / "old.xml").read_text()
    (models / "old.xml").write_text(text.replace('version="11"', 'version="10"', 1))
    with running_daemon(echo_model("echo"), models_dir=models) as running:
        yield running


@pytest.fixture(scope="module")
def http(daemon: RunningDaemon) -> Iterator[RunningGateway]:
    with gateway(daemon) as running:
        yield running


def item(page: Page, model: str) -> Locator:
    return page.locator("#models > li").filter(has=page.locator(".name", has_text=model))


def test_the_inputs_and_outputs_of_a_graph_are_shown_before_and_after_its_load(
    http: RunningGateway, open_page: PageOpener, daemon: RunningDaemon
) -> None:
    page = open_page(http, viewport_size=WIDE)
    shown = item(page, "affine")
    expect(shown.locator(".state")).to_have_text("unloaded")
    tensors, summary = shown.locator("details"), shown.locator("summary")
    summary.focus()
    page.keyboard.press("Enter")
    expect(tensors.get_by_role("list", name="Inputs").locator("li")).to_have_text(
        ["a fp32 [n, 2]", "b fp32 [n, 2]"]
    )
    outputs = tensors.get_by_role("list", name="Outputs").locator("li")
    expect(outputs).to_have_text("y fp32 [n, 2]")
    with Client(daemon.socket) as client, client.graph("affine"):
        expect(shown.locator(".state")).to_have_text("loaded")
        expect(outputs).to_have_text("y fp32 [n, 2]")
        expect(summary).to_be_focused()
    page.keyboard.press("Enter")
    expect(outputs).to_have_count(0)
    expect(item(page, "echo").locator("details")).to_have_count(0)


def test_inputs_that_the_file_does_not_state_are_shown_once_the_graph_is_loaded(
    http: RunningGateway, open_page: PageOpener, daemon: RunningDaemon
) -> None:
    page = open_page(http, viewport_size=WIDE)
    shown = item(page, "old")
    shown.locator("summary").click()
    expect(shown.locator("details")).to_contain_text("Known after its first load.")
    with Client(daemon.socket) as client, client.graph("old"):
        inputs = shown.get_by_role("list", name="Inputs").locator("li")
        expect(inputs).to_have_text(["a fp32 [?, 2]", "b fp32 [?, 2]"])


def test_names_of_tensors_are_text_and_many_are_cut(
    http: RunningGateway, open_page: PageOpener
) -> None:
    page = open_page(http, viewport_size=WIDE)
    item(page, "hostile").locator("summary").click()
    names = item(page, "hostile").locator("details li")
    expect(names).to_have_text([f"{HOSTILE} fp16 [1, ?]"] * 2)
    item(page, "many").locator("summary").click()
    rows = item(page, "many").get_by_role("list", name="Inputs").locator("li")
    expect(rows).to_have_count(101)
    expect(rows.last).to_have_text(f"and {MANY - 100} more")


def test_work_and_usage_of_a_graph_are_computations(
    http: RunningGateway, open_page: PageOpener, daemon: RunningDaemon
) -> None:
    with Client(daemon.socket) as client, client.graph("affine") as graph:
        for _ in range(2):
            graph.run({"a": [[1.0, 2.0]], "b": [[3.0, 4.0]]})
    page = open_page(http, viewport_size=WIDE)
    usage = page.locator("#usage li", has_text="affine")
    expect(usage.locator(".state")).to_have_text("2 computations")
    expect(usage).not_to_contain_text("token")

    program = f"""
from inferd import Client
with Client({daemon.socket!r}) as client, client.graph("loop") as graph:
    graph.run({{"x": [1.0], "times": {FOREVER}}})
"""
    with subprocess.Popen([sys.executable, "-c", program]) as computing:
        facts = item(page, "loop").locator(".note").first
        expect(facts).to_contain_text("1 computation")
        computing.kill()
        expect(facts).not_to_contain_text("computation")
