"""Projectors that `inferd pull` gets along with their models."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from inferd.daemon.models.projectors import ProjectorFinder, wish_of
from inferd.daemon.pull import projectors
from inferd.daemon.pull.part import PullFailed
from inferd.daemon.pull.projectors import choose_projector, projector_of
from inferd.daemon.pull.sources import LocalFile, parse_source
from inferd.daemon.pull.target import files_of
from inferd.daemon.pull.web import WebFile
from tests.daemon.command_line import document, inferd
from tests.tiny_gguf import write_tiny
from tests.tiny_projector import write_pair, write_projector

from .web_server import Web, file, serving, status

LIST = "/api/models/o/r"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    with serving() as web:
        monkeypatch.setenv("HF_ENDPOINT", web.url)
        yield web


def offer(web: Web, **contents: bytes) -> None:
    """Serve a repository with these files."""
    siblings = [{"rfilename": name} for name in contents]
    web.answers[LIST] = [file(json.dumps({"id": "o/r", "siblings": siblings}).encode())]
    for name, content in contents.items():
        web.answers[f"/o/r/resolve/main/{quote(name)}"] = [file(content)]


@pytest.mark.parametrize(
    ("model", "files", "chosen"),
    [
        ("m-Q4_K_M.gguf", ["m-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("m-Q4_K_M.gguf", ["mmproj-BF16.gguf", "mmproj-F32.gguf"], "mmproj-BF16.gguf"),
        ("m.gguf", ["README.md", "mmproj.bin"], None),
        ("m.gguf", ["../mmproj-m.gguf"], None),
        ("sub/m.gguf", ["mmproj-F16.gguf", "sub/mmproj-q8_0.gguf"], "sub/mmproj-q8_0.gguf"),
        ("sub/m.gguf", ["mmproj-F16.gguf", "other/mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("a-4b.gguf", ["a-12b.gguf", "mmproj-a-12b.gguf", "mmproj-a-4b.gguf"], "mmproj-a-4b.gguf"),
        ("a.gguf", ["b.gguf", "mmproj-b.gguf"], None),
        ("a.gguf", ["b.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
    ],
)
def test_the_projector_of_a_repository(model: str, files: list[str], chosen: str | None) -> None:
    assert choose_projector(model, [model, *files]) == chosen


def test_a_file_of_this_machine_has_the_one_beside_it_that_fits(tmp_path: Path) -> None:
    model, projector = write_pair("mlp", tmp_path)
    assert projector_of(LocalFile(model)) == LocalFile(projector)
    assert projector_of(LocalFile(projector)) is None
    write_projector("mlp", tmp_path, width=32)
    assert projector_of(LocalFile(model)) is None
    assert projector_of(WebFile("https://example.org/m.gguf", "m")) is None


def test_a_model_of_a_hub_comes_with_its_projector_and_finds_it(web: Web, tmp_path: Path) -> None:
    model, projector = write_pair("mlp", tmp_path)
    offer(web, **{model.name: model.read_bytes(), "mmproj-F16.gguf": projector.read_bytes()})
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(write_tiny("mamba", tmp_path), models)  # another model
    source, where = f"hf:o/r/{model.name}", ("--models-dir", str(models))
    result = inferd("pull", source, "--name", "eyes", "--json", *where)
    assert result.exit_code == 0, result.output
    pulled = models / "eyes-mmproj.gguf"
    assert document(result)["projector"]["file"] == str(pulled)
    assert (
        document(result)["projector"]["sha256"]
        == hashlib.sha256(projector.read_bytes()).hexdigest()
    )
    wish = wish_of("eyes", models / "eyes.gguf", "llama", {}, models)
    assert ProjectorFinder().find(wish).file == str(pulled)
    again = inferd("pull", source, "--name", "eyes", "--json", *where)
    assert document(again)["up_to_date"] and document(again)["projector"]["up_to_date"]
    assert {path.name for path in files_of("eyes", models)} == {"eyes.gguf", "eyes-mmproj.gguf"}
    assert inferd("rm", "eyes", "--yes", *where).exit_code == 0
    assert [path.name for path in models.iterdir()] == ["tiny-mamba.gguf"]


def test_a_model_is_pulled_without_a_projector_on_request_or_without_a_list(
    web: Web, tmp_path: Path
) -> None:
    model, projector = write_pair("mlp", tmp_path)
    offer(web, **{model.name: model.read_bytes(), "mmproj-F16.gguf": projector.read_bytes()})
    models, source = tmp_path / "models", f"hf:o/r/{model.name}"
    result = inferd("pull", source, "--no-mmproj", "--json", "--models-dir", str(models))
    assert "projector" not in document(result) and LIST not in [path for path, _ in web.requests]
    web.answers[LIST] = [status(500)]
    result = inferd("pull", source, "--json", "--models-dir", str(models))
    assert result.exit_code == 0 and "projector" not in document(result)
    assert "without a projector" in result.stderr
    assert [path.name for path in models.iterdir()] == [model.name]


def test_the_list_of_a_repository_is_bounded(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    web.answers[LIST] = [file(json.dumps({"siblings": [{"rfilename": "m.gguf"}] * 99}).encode())]
    source = parse_source("hf:o/r/m.gguf")
    assert projector_of(source) is None
    monkeypatch.setattr(projectors, "LIST_BYTES_MAX", 100)
    with pytest.raises(PullFailed, match="cannot be read"):
        projector_of(source)
