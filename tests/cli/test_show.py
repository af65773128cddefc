"""`inferd show`: a model in sections, loaded or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd import Client
from inferd.backends.answer_form import PLAIN_ANSWERS, read_answer_form
from inferd.cli.models.show_command import count_text
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.tiny_gguf import CHAT_TEMPLATE, write_tiny
from tests.tiny_lora import lora
from tests.tiny_projector import write_pair, write_projector

CONFIG = """
[models.tiny-llama]
slots = 2
temp = 0.25
top-k = 40
[models.tiny-llama.adapters.style]
file = "style.gguf"
scale = 0.5
[models.tiny-bare.tool-format]
reasoning = [{ begin = "<why>", end = "</why>" }]
calls = [{ begin = "<run>", end = "</run>", arguments_key = "with" }]
[models.tiny-mamba]
tool-format = "hermes"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    for kind in ("llama", "mamba", "gemma3", "bare"):
        write_tiny(kind, models)
    lora(models / "style.gguf")
    (models / "broken.gguf").write_bytes(b"GGUF and garbage")
    with running_daemon(CONFIG, models_dir=models) as daemon:
        yield daemon


def sections(daemon: RunningDaemon, model: str) -> dict[str, dict[str, str]]:
    """Return the entries that `inferd show` prints, by section."""
    found: dict[str, dict[str, str]] = {}
    entries: dict[str, str] = {}
    for line in inferd("show", model, socket=daemon.socket).stdout.splitlines():
        if line.startswith("  "):
            name, _, value = line.strip().partition("   ")
            entries[name] = value.strip()
        elif line:
            entries = found.setdefault(line, {})
    return found


def test_a_model_that_was_never_loaded_is_described_by_its_file(daemon: RunningDaemon) -> None:
    found = sections(daemon, "tiny-llama")
    kind = found["tiny-llama"]
    assert kind["architecture"] == "llama" and kind["quantization"] == "F32"
    assert kind["context"] == "4096 tokens, as trained" and kind["tools"] == "no"
    assert found["State"] == {
        "state": "not loaded",
        "context": "4096 tokens in each of 2 sessions at once",
    }
    memory = found["Memory for its next load, estimated"]
    assert memory["KV states"].startswith("at most ") and " a token" in memory["KV states"]
    assert memory["compute buffers"] == "known after its first load"
    assert "scale 0.5" in found["Adapters"]["style"]
    assert found["Settings that differ from the defaults"] == {"slots": "2", "temp": "0.25"}
    assert "m.role" in str(found["Chat template of the file"])


def test_a_loaded_model_is_described_as_it_runs_and_afterwards_as_estimated(
    daemon: RunningDaemon,
) -> None:
    with Client(daemon.socket) as client, client.session("tiny-mamba"):
        found = sections(daemon, "tiny-mamba")
        assert found["State"]["until"] == "in use" and "in use" in found["State"]["process"]
        assert "total" in found["Memory, estimated"]
        assert found["Special tokens"]["eos"].split() == ["2", '"</s>"']
        assert "token" not in found["Memory, estimated"]["KV states"], "it does not grow"
    assert inferd("unload", "tiny-mamba", "--force", socket=daemon.socket).exit_code == 0
    again = sections(daemon, "tiny-mamba")
    assert again["State"]["state"] == "not loaded"
    expected = found["Memory, estimated"]
    assert again["Memory for its next load, estimated"] == expected, "as at its last load"


def test_a_model_without_a_template_shows_how_chats_are_written(daemon: RunningDaemon) -> None:
    assert "role prefixes" in sections(daemon, "tiny-bare")["tiny-bare"]["chat template"]
    with Client(daemon.socket) as client, client.session("tiny-bare"):
        kind = sections(daemon, "tiny-bare")["tiny-bare"]
    assert "`role: text`" in kind["chat template"] and kind["tools"] == "no"


def test_the_form_of_answers_is_shown_as_derived_or_as_set(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client:
        with client.session("tiny-llama"):
            derived = sections(daemon, "tiny-llama")["tiny-llama"]
        with client.session("tiny-bare"):
            data = sections(daemon, "tiny-bare")["tiny-bare"]
            printed = inferd("show", "tiny-bare", "--json", socket=daemon.socket)
        with client.session("tiny-mamba"):
            named = sections(daemon, "tiny-mamba")["tiny-mamba"]
    assert derived["reasoning"] == "<think> … </think>" and derived["tool calls"] == "none"
    assert data["reasoning"] == "<why> … </why>" and data["tool calls"] == "derived, <run>"
    [call] = document(printed)["info"]["answer_form"]["calls"]
    assert call == {"begin": "<run>", "end": "</run>", "arguments_key": "with"}
    assert named["tool calls"] == "hermes, <tool_call>"


def test_a_damaged_file_is_a_problem_of_its_model(daemon: RunningDaemon) -> None:
    kind = sections(daemon, "broken")["broken"]
    assert "broken.gguf cannot be read: version " in kind["problem"]


def test_a_projector_is_shown_or_the_reason_why_there_is_none(tmp_path: Path) -> None:
    write_pair("mlp", tmp_path)
    with running_daemon(models_dir=tmp_path) as daemon:
        found = sections(daemon, "tiny-llama")
        assert found["tiny-llama"]["reads"] == "text, images"
        projector = found["Projector"]
        assert projector["type"] == "mlp" and projector["embedding length"] == "64"
        assert projector["file"].startswith(f"{tmp_path}/mmproj-tiny-mlp.gguf, ")
        assert "32 × 32 pixels" in projector["images"]
        assert "images and sounds" in found["Memory for its next load, estimated"]
        write_projector("mlp", tmp_path, width=32)
        found = sections(daemon, "tiny-llama")
        assert "reads" not in found["tiny-llama"]
        assert "embeddings of 32 numbers" in found["Projector"]["left out"]
        failed = inferd("load", "tiny-llama", "--mmproj", "x.gguf", socket=daemon.socket)
        assert failed.exit_code != 0 and "has no projector" in failed.output
        write_projector("mlp", tmp_path)
        loaded = inferd("load", "tiny-llama", "--mmproj", "none", socket=daemon.socket)
        assert loaded.exit_code == 0 and "not applied" not in loaded.output
        assert "reads" not in sections(daemon, "tiny-llama")["tiny-llama"]


def test_the_echo_model_has_neither_a_file_nor_memory(daemon: RunningDaemon) -> None:
    assert sections(daemon, "echo") == {
        "echo": {"architecture": "echo, which answers with its prompt"},
        "State": {"state": "not loaded"},
    }


def test_the_whole_template_is_printed_alone_with_the_form_of_answers(
    daemon: RunningDaemon,
) -> None:
    result = inferd("show", "tiny-llama", "--template", socket=daemon.socket)
    template, _, comment = result.stdout.partition("{#-")
    assert template == f"{CHAT_TEMPLATE}\n"
    data = comment.partition(":\n")[2].removesuffix("\n-#}\n\n")
    assert read_answer_form(json.loads(data)).reasoning == PLAIN_ANSWERS.reasoning
    missing = inferd("show", "echo", "--template", socket=daemon.socket)
    assert missing.exit_code == 1 and "has no chat template" in missing.stderr


def test_json_has_the_facts_for_programs(daemon: RunningDaemon) -> None:
    found = document(inferd("show", "tiny-gemma3", "--json", socket=daemon.socket))
    assert found["file_info"]["architecture"] == "gemma3" and found["file_error"] is None
    assert found["estimate"]["weights"] == Path(found["file"]).stat().st_size


def test_texts_of_a_file_are_one_line_without_control_characters(tmp_path: Path) -> None:
    whole = write_tiny("llama", tmp_path).read_bytes()
    wild = b"F32\x1b[2J\nx"
    text = b"general.name"
    assert text not in whole
    name = len(text).to_bytes(8, "little") + text
    value = (8).to_bytes(4, "little") + len(wild).to_bytes(8, "little") + wild
    entries = int.from_bytes(whole[16:24], "little") + 1
    (tmp_path / "wild.gguf").write_bytes(
        whole[:16] + entries.to_bytes(8, "little") + name + value + whole[24:]
    )
    with running_daemon(models_dir=tmp_path) as daemon:
        text_shown = inferd("show", "wild", socket=daemon.socket).stdout
        assert "\x1b" not in text_shown and r"F32\u001b[2J x" in text_shown


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999"),
        (134_515_008, "135 million"),
        (8_030_261_248, "8.03 billion"),
        (1_040_000_000_000, "1.04 trillion"),
    ],
)
def test_numbers_of_parameters(count: int, text: str) -> None:
    assert count_text(count) == text
