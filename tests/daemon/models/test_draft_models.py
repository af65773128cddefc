"""The draft model of a model: named by the configuration or by a load, checked, and shown."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import InferdError, ModelNotFound
from inferd.daemon.config.sources import ConfigError, load_config
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
from tests.tiny_gguf import write_tiny

EXACT = 'flash-attn = "off"\ncache-type-k = "f32"\ncache-type-v = "f32"\nctx-size = 512\n'
NOTE = "draft model"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("draft-models")
    main, draft, other = (write_tiny(kind, folder) for kind in ("llama", "gemma3", "bert"))
    tables = {
        "plain": "",
        "by-file": f'draft-model = "{draft}"\nspeculation = "draft"',
        "by-name": 'draft-model = "small"',
        "itself": 'draft-model = "itself"\nspeculation = "draft"',
        "missing": 'draft-model = "nobody"',
        "echoed": 'draft-model = "echo"',
        "unfit": f'draft-model = "{other}"',
    }
    echo = (
        '[models.drafted]\nbackend = "echo"\n[models.drafted.echo]\ndraft_errs = 7\nstep_ms = 2\n'
    )
    text = f'[models.small]\nfile = "{draft}"\n' + "".join(
        f'[models.{name}]\nfile = "{main}"\n{EXACT}{lines}\n' for name, lines in tables.items()
    )
    with running_daemon(echo + text) as running:
        yield running


def loaded(client: Client, name: str, **config: Any) -> dict[str, Any]:
    client.load_by_name_with_config(name, config)
    return dict(client.show(name))


@pytest.mark.parametrize(
    ("name", "shown", "file"),
    [
        ("by-file", "tiny-gemma3.gguf", "tiny-gemma3.gguf"),
        ("by-name", "small", "tiny-gemma3.gguf"),
        ("itself", "itself", "tiny-llama.gguf"),
    ],
)
def test_the_configuration_names_it(client: Client, name: str, shown: str, file: str) -> None:
    """Its memory counts in the estimate of the load, and in that of the next one."""
    before = client.show(name)
    found = loaded(client, name)
    assert before["draft_model"] == found["draft_model"]
    assert Path(found["draft_model"]["name"]).name == shown
    assert Path(found["draft_model"]["file"]).name == file
    assert found["draft_model"]["size_bytes"] > 500_000 and not found["draft_model"]["error"]
    memory = found["memory"]
    parts = ("weights", "context", "compute", "process", "projector", "draft")
    assert memory["draft"] > 500_000
    assert memory["total"] == sum(memory[part] for part in parts)
    assert found["info"]["draft_model"] == file


def test_the_command_line_shows_it(daemon: RunningDaemon, client: Client) -> None:
    loaded(client, "by-name")
    text = inferd("show", "by-name", "--socket", daemon.socket).stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    at = lines.index("Draft model")
    assert lines[at + 1].startswith("file /") and "tiny-gemma3.gguf" in lines[at + 1]
    assert any(line.startswith("draft model ") and line.endswith("MB") for line in lines)
    plain = inferd("show", "plain", "--socket", daemon.socket).stdout
    assert "raft model" not in plain


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "the draft model of 'missing': there is no model 'nobody'"),
        ("echoed", "'echo' has no file"),
        ("unfit", "'tiny-bert.gguf' only makes embeddings"),
    ],
)
def test_a_model_without_its_draft_model_is_not_loaded(
    client: Client, name: str, message: str
) -> None:
    with pytest.raises(InferdError, match="draft") as refused:
        client.load_by_name(name)
    assert message in refused.value.message and refused.value.hint
    assert client.show(name)["state"] in ("failed", "cold")
    if name != "unfit":
        assert message in (client.show(name)["draft_model"] or {})["error"]


def test_a_load_names_it(client: Client) -> None:
    """A client names a model. It names no file: the daemon opens none for it."""
    client.unload_model("plain", force=True)
    graph = client.load_by_name_with_config("plain", {"draft-model": "small"})
    assert "draft-model" not in graph.not_applied
    assert (client.show("plain")["draft_model"] or {})["name"] == "small"
    client.unload_model("plain", force=True)
    client.load_by_name_with_config("plain", {})
    assert client.show("plain")["draft_model"] is None
    later = client.load_by_name_with_config("plain", {"draft-model": "small"})
    assert later.not_applied["draft-model"] == ""
    client.unload_model("plain", force=True)
    for text in ("/etc/passwd", "../../etc/passwd", "/no/such/file.gguf"):
        with pytest.raises(ModelNotFound, match="there is no model"):
            client.load_by_name_with_config("plain", {"draft-model": text})
    assert client.show("plain")["draft_model"] is None


def test_a_turn_reports_that_there_is_no_draft_model(client: Client) -> None:
    with client.session("plain") as session:
        text = session.chat("ab", n_predict=4, temp=0, speculation="draft")
        assert NOTE in session.metadata["adjusted"]["speculation"]
    with client.session("itself") as session:
        assert session.chat("ab", n_predict=4, temp=0) == text
        assert "speculation" not in session.metadata["adjusted"]


def test_a_worker_that_dies_within_a_turn_with_drafts_loses_nothing(client: Client) -> None:
    """Its next worker has an empty draft model, which catches up."""
    text = "the quick brown fox jumps over the lazy dog; " * 12
    options: dict[str, Any] = {"speculation": "draft", "draft_max": 4}
    with client.session("drafted") as session:
        answer, killed = "", 0
        for part in session.stream(text, raw=True, **options):
            answer += part
            if len(answer) > 100 * (killed + 1) and killed < 2:
                os.kill(client.show("drafted")["pid"], signal.SIGKILL)
                killed += 1
        assert answer == text and killed == 2
        metadata = session.metadata
        assert metadata["drafted_tokens"] > metadata["accepted_tokens"] > 100


def test_a_swap_replaces_the_draft_model(client: Client) -> None:
    """The session continues with the same history, first with a draft model, then without."""
    options: dict[str, Any] = {"n_predict": 12, "temp": 0, "ignore_eos": True}
    answers = []
    for swaps in (False, True):
        with client.session("by-file", **options) as session:
            first = session.chat("ab")
            if swaps:
                client.swap("by-file", to="plain")
                assert client.show("by-file")["draft_model"] is None
            answers.append((first, session.chat("cd")))
            if swaps:
                client.swap("by-file", to="by-file")
                again = client.show("by-file")["draft_model"]
                assert again is not None and again["file"].endswith("tiny-gemma3.gguf")
    assert answers[0] == answers[1]


def test_its_file_is_confined_and_checked_with_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "inferd.toml"
    config.write_text('[models.m]\nfile = "m.gguf"\ndraft-model = "../../x.gguf"\n')
    with pytest.raises(ConfigError, match="draft-model: "):
        load_config({"config": config}, {})
    for text, value in (("d.gguf", str(tmp_path / "d.gguf")), ("other", "other"), ("", "")):
        config.write_text(f'[models.m]\nfile = "m.gguf"\ndraft-model = "{text}"\n')
        found = load_config({"config": config}, {})
        assert found.models["m"].options["draft-model"] == value
