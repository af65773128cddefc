"""NextN layers draft for a model whose configuration names them, and are shown."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import InferdError
from inferd.cli.monitoring.stats import DRAFTED, MetricSums
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

EXACT = 'flash-attn = "off"\ncache-type-k = "f32"\ncache-type-v = "f32"\nctx-size = 512\n'
DRIVEN: dict[str, Any] = {"temp": 0, "ignore_eos": True, "n_predict": 200, "draft_max": 4}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("nextn")
    main, other = write_tiny("nextn-deep", folder), write_tiny("llama", folder)
    tables = {
        "plain": (main, ""),
        "drafted": (main, 'speculation = "mtp"'),
        "without": (other, 'speculation = "mtp"'),
        "both": (main, f'speculation = "mtp"\ndraft-model = "{main}"'),
    }
    text = '[defaults]\nspeculation = "mtp"\n' + "".join(
        f'[models.{name}]\nfile = "{file}"\n{EXACT}{lines}\n'
        for name, (file, lines) in tables.items()
    )
    with running_daemon(text) as running:
        yield running


def shown(daemon: RunningDaemon, name: str) -> list[str]:
    text = inferd("show", name, "--socket", daemon.socket).stdout
    return [" ".join(line.split()) for line in text.splitlines()]


def test_they_are_loaded_shown_and_counted(daemon: RunningDaemon, client: Client) -> None:
    for name in ("plain", "drafted"):
        client.load_by_name(name)
    plain, drafted = (dict[str, Any](client.show(name)) for name in ("plain", "drafted"))
    assert (plain["info"]["nextn"], drafted["info"]["nextn"]) == (False, True)
    assert drafted["draft_model"] is None
    memory = drafted["memory"]
    parts = ("weights", "context", "compute", "process", "projector", "draft")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert memory["draft"] > 100_000 and not plain["memory"]["draft"]
    assert memory["weights"] > plain["memory"]["weights"] + 500_000
    lines = shown(daemon, "drafted")
    assert "drafts with its NextN layer" in lines and "NextN layers 1" in lines
    assert any(line.startswith("NextN layers ") and line.endswith("MB") for line in lines)
    plain_lines = shown(daemon, "plain")
    assert [line for line in plain_lines if "NextN" in line] == ["NextN layers 1"]


@pytest.mark.parametrize(
    ("name", "message"), [("without", "NextN layers: it has none"), ("both", "has a draft model")]
)
def test_a_model_that_cannot_draft_so_is_not_loaded(
    client: Client, name: str, message: str
) -> None:
    with pytest.raises(InferdError) as refused:
        client.load_by_name(name)
    assert message in refused.value.message and "speculation" in refused.value.hint


def test_a_turn_reports_that_they_are_not_loaded(client: Client) -> None:
    """The defaults load none, and neither does a request."""
    with client.session("plain") as session:
        text = session.chat("ab", n_predict=4, temp=0, speculation="mtp")
        assert "NextN" in session.metadata["adjusted"]["speculation"]
    with client.session("drafted") as session:
        assert session.chat("ab", n_predict=4, temp=0) == text
        assert "speculation" not in session.metadata["adjusted"]


def test_a_worker_that_dies_within_a_turn_with_drafts_loses_nothing(client: Client) -> None:
    """Its next worker has no hidden states."""
    with client.session("plain") as session:
        expected = "".join(session.stream("the fox", raw=True, **DRIVEN))
    with client.session("drafted") as session:
        answer, killed = "", 0
        for part in session.stream("the fox", raw=True, **DRIVEN):
            answer += part
            if len(answer) > 40 * (killed + 1) and killed < 2:
                os.kill(client.show("drafted")["pid"], signal.SIGKILL)
                killed += 1
        metadata = session.metadata
    assert killed == 2 and answer == expected
    assert metadata["drafted_tokens"] > 0
    labels = {"model_name": "drafted", "drafter": "mtp"}
    wait_until(lambda: MetricSums(client.stats()).total(DRAFTED, **labels) > 0)
