"""The text of a fleet's metrics, joined from those of the entry and its nodes."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from inferd.gateways.fleet.metrics.exposition import CHILD_NICE, fleet_text
from inferd.gateways.fleet.metrics.scrape import CHILD_MODULE
from inferd.gateways.fleet.metrics.scraped import Samples, ScrapedTexts
from tests.daemon.metrics.scraping import ScrapedMetrics

GAUGE = "# HELP inferd_cores Cores.\n# TYPE inferd_cores gauge\ninferd_cores 2\n"
COUNTER = "# TYPE inferd_cores_total counter\ninferd_cores_total 3\n"


def joined(own: dict[str, Samples] | None = None, **texts: str) -> ScrapedMetrics:
    nodes = [*texts, "lost"]
    scraped = ScrapedTexts(os.getpid(), own or {}, nodes, texts)
    return ScrapedMetrics(fleet_text(scraped).decode())


def test_a_family_of_several_nodes_is_one_family() -> None:
    found = joined(a=GAUGE, b=GAUGE)
    assert found.text.count("# TYPE inferd_cores gauge") == 1
    assert (found("cores", node="a"), found("cores", node="b")) == (2, 2)


def test_a_node_is_up_if_its_text_was_read() -> None:
    found = joined(a=GAUGE, b="inferd_cores{ 2\n", c=GAUGE + "inferd_cores many\n")
    up = {node: found("fleet_node_up", node=node) for node in ("a", "b", "c", "lost")}
    assert up == {"a": 1, "b": 0, "c": 0, "lost": 0}
    assert found("cores", node="b") == found("cores", node="c") == 0


def test_of_two_kinds_of_a_family_the_first_nodes_remains() -> None:
    found = joined(a=GAUGE, b=COUNTER)
    assert found("cores", node="a") == 2
    assert "inferd_cores_total" not in found.text


def test_a_node_names_neither_itself_nor_the_entrys_families() -> None:
    text = '# TYPE inferd_x gauge\ninferd_x{node="other"} 1\n'
    text += '# TYPE inferd_fleet_node_up gauge\ninferd_fleet_node_up{node="lost"} 1\n'
    found = joined(a=text)
    assert (found("x", node="a"), found("x", node="other")) == (1, 0)
    assert (found("fleet_node_up", node="a"), found("fleet_node_up", node="lost")) == (1, 0)


def test_names_of_models_keep_their_characters() -> None:
    name = 'a "model"\\with\nall'
    line = 'inferd_slots{model_name="a \\"model\\"\\\\with\\nall"} 4\n'
    assert joined(a=f"# TYPE inferd_slots gauge\n{line}")("slots", model_name=name, node="a") == 4


def test_the_entrys_samples_and_process_have_no_node() -> None:
    found = joined({"connections": [((), 3.0)], "ray_up": []}, a=GAUGE)
    assert found("fleet_connections") == 3
    assert found.families["inferd_fleet_ray_up"].samples == []
    (sample,) = found.families["process_resident_memory_bytes"].samples
    assert sample.labels == {} and sample.value > 0


def test_the_child_leaves_the_cores_to_others() -> None:
    program = (
        f"import os, sys\nfrom {CHILD_MODULE} import main\n"
        "main()\nprint(os.nice(0), file=sys.stderr)"
    )
    message = msgspec.msgpack.encode(ScrapedTexts(os.getpid(), {}, [], {}))
    done = subprocess.run(
        [sys.executable, "-c", program], input=message, capture_output=True, check=True, timeout=30
    )
    assert int(done.stderr) == os.nice(0) + CHILD_NICE
