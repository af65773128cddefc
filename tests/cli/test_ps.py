"""`inferd ps`, and the split of the daemon's statistics between `inferd status` and `stats`."""

from __future__ import annotations

import re
from typing import Any

import psutil
import pytest

from inferd.cli.monitoring.status_commands import LOADED_MODELS, media_text
from inferd.testing import running_daemon
from tests.daemon.command_line import document, inferd
from tests.models import smollm2

KEPT = {"expires_s": 299.7, "pinned": False, "leases": 0, "tasks": 0, "state": "ready"}


def cell(head: str, **model: Any) -> object:
    """Return the text in the column *head* for a model."""
    column = LOADED_MODELS[head]
    assert callable(column)
    return column({"progress": 0.4, **KEPT, **model})


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({}, "in 5 min"),
        ({"expires_s": 59.4}, "in 59 s"),
        ({"expires_s": 0.2}, "now"),
        ({"expires_s": 86_400.0 * 3}, "in 3 d"),
        ({"expires_s": None}, "memory is short"),
        ({"pinned": True, "expires_s": None}, "pinned"),
        ({"leases": 1, "expires_s": None}, "in use"),
        ({"tasks": 2, "expires_s": None}, "in use"),
        ({"state": "loading"}, "loading 40%"),
        ({"state": "unloading"}, "unloading"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_column_until_says_when_a_model_is_unloaded(model: dict[str, Any], text: str) -> None:
    assert cell("UNTIL", **model) == text


def test_the_memory_of_devices_is_added_to_that_of_the_host() -> None:
    devices = {"memory": {"devices": {"CUDA0": 3 * 10**9, "CUDA1": 10**9}}}
    assert cell("MEMORY", resident_bytes=500_000_000, memory=None) == "500 MB"
    assert cell("MEMORY", resident_bytes=500_000_000, **devices) == "500 MB + 4 GB GPU"
    assert cell("MEMORY", memory=None) is None, "an older daemon does not report it"


def test_a_model_that_reads_images_is_marked() -> None:
    assert media_text({"reads": ["text"]}) is None
    assert media_text({}) is None, "an older daemon does not report it"
    assert media_text({"reads": ["text", "image", "audio"]}) == "images, sounds"
    config = '[models.eyes]\nbackend = "echo"\n[models.eyes.echo]\nmedia = true\n'
    with running_daemon(config) as daemon:
        for command in ("models", "ps"):
            assert inferd("load", "echo", socket=daemon.socket).exit_code == 0
            heads, *rows = inferd(command, socket=daemon.socket).stdout.splitlines()
            if command == "ps":
                assert "READS" not in heads, "no loaded model reads more than text"
                assert inferd("load", "eyes", socket=daemon.socket).exit_code == 0
                heads, *rows = inferd(command, socket=daemon.socket).stdout.splitlines()
            assert "READS" in heads
            [row] = [row for row in rows if row.startswith("eyes")]
            assert "images, sounds" in row


@pytest.mark.model
def test_the_memory_in_use_is_that_of_the_process_and_the_size_that_of_the_file() -> None:
    file = smollm2()
    with running_daemon(f'[models.m]\nfile = "{file}"\nctx-size = 512\nslots = 1\n') as daemon:
        assert inferd("load", "m", socket=daemon.socket).exit_code == 0
        [model] = document(inferd("ps", "--json", socket=daemon.socket))["models"]
        resident = psutil.Process(model["pid"]).memory_info().rss
        assert model["resident_bytes"] == pytest.approx(resident, rel=0.05)
        assert model["resident_bytes"] > file.stat().st_size, "the weights are mapped"
        heads, row = inferd("ps", socket=daemon.socket).stdout.splitlines()
        columns = ["NAME", "ID", "SIZE", "MEMORY", "PROCESSOR", "CONTEXT", "UNTIL"]
        assert heads.split()[: len(columns)] == columns
        cells = re.split(r" {2,}", row)
        assert (cells[0], cells[2], cells[6]) == ("m", "98.4 MB", "in 5 min")


def test_status_leaves_the_metrics_to_stats() -> None:
    with running_daemon() as daemon:
        assert inferd("run", "echo", "hello", socket=daemon.socket).exit_code == 0
        status = document(inferd("status", "--json", socket=daemon.socket))
        stats = document(inferd("stats", "--json", socket=daemon.socket))
        assert status["pid"] == daemon.pid and status["models"] == ["echo"]
        assert stats["models"]["echo"]["generated"] >= 5 and stats["metrics"]
        assert status.keys() & stats.keys() == {"instance", "models", "uptime_s"}
