"""The files of the models directory that clients can load, and names by which they do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inferd import Client
from inferd.backends.errors import LoadFailed, ModelNotFound, UnsupportedOperation
from inferd.daemon.models.catalog import LOGGED_MAX
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.gateways.http.driver import RunningGateway, gateway
from tests.tiny_gguf import write_split, write_tiny
from tests.tiny_lora import write_lora
from tests.waiting import wait_until

OFFERED = {
    "Large": "Large.GGUF",
    "a-b": "a:b.gguf",
    "mod-le": "mod\u00e8le.gguf",
    "my-model": "my model.gguf",
    "sub-small": "sub/small.gguf",
    "tiny": "tiny-00001-of-00003.gguf",
}
NOT_OFFERED = {
    "dangling.gguf": "it is a link to a missing file",
    "empty.gguf": "it is empty: its download or copy has failed",
    "page.gguf": "it is a web page: download the file itself",
    "pipe.gguf": "it is not a regular file",
    "style.gguf": (
        "it is an adapter (LoRA): `inferd add-adapter` adds it to the model it was made for"
    ),
    "x y.gguf": "its name 'x-y' is also that of x:y.gguf: rename it",
    "x:y.gguf": "its name 'x-y' is also that of x y.gguf: rename it",
    "\u65e5\u672c.gguf": "its name has no letter A-Z and no digit: rename it",
}
CONFIG = '[models.echo]\nbackend = "echo"\n[models.Echo-2]\nbackend = "echo"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_split(folder)
    model = write_tiny("llama", tmp_path_factory.mktemp("model"))
    for path in (*OFFERED.values(), "x y.gguf", "x:y.gguf", "\u65e5\u672c.gguf"):
        if not (folder / path).exists():
            (folder / path).parent.mkdir(exist_ok=True)
            shutil.copy(model, folder / path)
    write_lora(folder / "style.gguf", {})
    (folder / "page.gguf").write_text("<!DOCTYPE html><html>Log in</html>")
    (folder / "empty.gguf").touch()
    (folder / "dangling.gguf").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.gguf")
    return folder


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG, models_dir=folder) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def http(serving: RunningDaemon) -> Iterator[RunningGateway]:
    with gateway(serving, "--test-models") as running:
        yield running


@pytest.fixture
def client(serving: RunningDaemon) -> Iterator[Client]:
    with Client(serving.socket) as connected:
        yield connected


def test_all_interfaces_list_the_models_alone(
    serving: RunningDaemon, client: Client, http: RunningGateway, folder: Path
) -> None:
    files = {model["name"]: model["file"] for model in client.models()}
    assert files == {name: str(folder / path) for name, path in OFFERED.items()} | {
        "echo": "",
        "Echo-2": "",
    }
    with httpx.Client(base_url=http.url) as web:
        listed = [model["id"] for model in web.get("/v1/models").json()["data"]]
        tags = [model["name"] for model in web.get("/api/tags").json()["models"]]
        own = [model["id"] for model in web.get("/v1/inferd/models").json()["data"]]
    assert sorted(files) == sorted(listed) == sorted(tags) == sorted(own)
    assert client.show("sub-small")["file"] == str(folder / "sub/small.gguf")
    [ready] = [line for line in serving.log.splitlines() if "daemon.ready" in line]
    assert f"models={len(files)}" in ready
    counted = client.stats()["metrics"]["models"]
    assert sum(sample["value"] for sample in counted) == len(files)


def test_the_log_and_the_list_name_each_other_file_with_its_reason(
    serving: RunningDaemon, client: Client
) -> None:
    assert {one["file"]: one["reason"] for one in client.files_not_offered()} == NOT_OFFERED
    lines = [line for line in serving.log.splitlines() if "model.file_not_offered" in line]
    assert len(lines) == len(NOT_OFFERED), "once each, however often the models are listed"
    for file in NOT_OFFERED:
        [line] = [line for line in lines if f"file={file}" in line or f"file='{file}'" in line]
        assert ("info" in line) == (file == "style.gguf"), "only others need a correction"


def test_the_command_lists_them_with_all(serving: RunningDaemon) -> None:
    shown = document(inferd("models", "--all", "--json", socket=serving.socket))
    assert {one["file"]: one["reason"] for one in shown["not_offered"]} == NOT_OFFERED
    table = inferd("models", "--all", socket=serving.socket).stdout
    assert "NOT OFFERED" in table and NOT_OFFERED["empty.gguf"] in table
    plain = inferd("models", socket=serving.socket).stdout
    assert "my-model" in plain and "NOT OFFERED" not in plain and "empty.gguf" not in plain


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("my-model", "my-model"),
        ("my model.gguf", "my-model"),
        ("My-Model:latest", "my-model"),
        ("sub/small.gguf", "sub-small"),
        ("large", "Large"),
        ("ECHO-2:latest", "Echo-2"),
        ("tiny-00001-of-00003.gguf", "tiny"),
        ("{folder}/tiny-00001-of-00003.gguf", "tiny"),
        ("{folder}/tiny-00002-of-00003.gguf", "tiny"),
        ("{folder}/sub/small.gguf", "sub-small"),
        ("{folder}/mod\u00e8le.gguf", "mod-le"),
    ],
)
def test_a_model_is_loaded_by_its_name_in_another_form(
    client: Client, folder: Path, text: str, name: str
) -> None:
    text = text.format(folder=folder)
    graph = client.load_by_name(text)
    assert graph.model == client.load([text, "{}"], target="cpu").model == name
    assert client.show(text)["name"] == name
    client.unload(graph)
    with client.session(text, raw=True, options={"n-predict": 2}) as session:
        assert session.chat("hello").metadata["model"] == name


def test_a_split_model_is_loaded_by_the_path_of_its_first_part(
    client: Client, folder: Path, tmp_path: Path
) -> None:
    for target in ("auto", "cpu"):
        graph = client.load_file(folder / "tiny-00001-of-00003.gguf", target=target)
        assert graph.model == "tiny"
    assert client.load_by_name(f"{folder}/none/../tiny-00002-of-00003.gguf").model == "tiny"
    elsewhere = write_split(tmp_path)[0]
    with pytest.raises(ModelNotFound):
        client.load_file(elsewhere)


@pytest.mark.parametrize("to", ["x y.gguf", "../Large.GGUF", "none/Large.GGUF"])
def test_a_swap_takes_the_named_file_only(client: Client, to: str) -> None:
    with pytest.raises(ModelNotFound):
        client.swap("my-model", to=to)


def test_the_log_names_a_bounded_number_of_files(tmp_path: Path) -> None:
    for number in range(LOGGED_MAX + 3):
        (tmp_path / f"empty-{number}.gguf").touch()
    with running_daemon(models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        assert [model["name"] for model in client.models()] == ["echo"]
        named = [line for line in daemon.log.splitlines() if "file_not_offered" in line]
        others = [line for line in daemon.log.splitlines() if "files_not_offered" in line]
    assert len(named) == LOGGED_MAX
    assert len(others) == 1 and "more=3" in others[0]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("SmallModel", "`inferd models` lists the names"),
        ("my_modle", "did you mean 'my-model'?"),
        ("EKHO", "did you mean 'echo'?"),
    ],
)
def test_the_hint_has_the_nearest_name(client: Client, text: str, hint: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        client.load_by_name(text)
    assert hint in caught.value.hint
    assert caught.value.data["models"] == sorted([*OFFERED, "echo", "Echo-2"])


@pytest.mark.parametrize("text", ["x:y", "x y.gguf", "\u65e5\u672c"])
def test_a_file_without_a_name_is_refused_with_the_reason(client: Client, text: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        client.load_by_name(text)
    assert NOT_OFFERED[text.removesuffix(".gguf") + ".gguf"] in caught.value.message


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("style", UnsupportedOperation, "adapter"),
        ("page", LoadFailed, "not a GGUF file"),
        ("empty", LoadFailed, "empty.gguf"),
        ("dangling", LoadFailed, "No such file"),
    ],
)
def test_the_load_of_another_file_has_the_error_of_its_kind(
    client: Client, name: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        client.load_by_name(name)
    assert name not in [model["name"] for model in client.models()]


def test_a_file_is_listed_once_its_download_is_complete() -> None:
    with running_daemon() as daemon, Client(daemon.socket) as client:
        file = daemon.directory / "models" / "late.gguf"
        file.touch()
        assert [model["name"] for model in client.models()] == ["echo"]
        write_tiny("llama", daemon.directory).rename(file)
        assert [model["name"] for model in client.models()] == ["echo", "late"]
        file.write_text("<html>")
        assert [model["name"] for model in client.models()] == ["echo"]
        assert len([x for x in daemon.log.splitlines() if "file_not_offered" in x]) == 2


def test_a_swap_finds_files_and_names_in_other_forms(client: Client, folder: Path) -> None:
    swapped = client.swap("ECHO-2", "sub/small.gguf")
    assert swapped.mode == "migrate"
    assert client.show("echo-2")["file"] == str(folder / "sub/small.gguf")
    client.swap("Echo-2", "ECHO-2:latest")
    assert client.show("echo-2")["file"] == "" and client.show("echo-2")["swapped_to"] == ""


def test_a_missing_directory_is_a_warning_in_the_log(tmp_path: Path) -> None:
    with (
        running_daemon(models_dir=tmp_path / "models") as daemon,
        Client(daemon.socket) as client,
    ):
        warnings = [x for x in daemon.log.splitlines() if "models.directory_missing" in x]
        assert len(warnings) == 1 and "warning" in warnings[0]
        assert str(tmp_path / "models") in warnings[0] and "inferd pull" in warnings[0]
        for _ in range(2):
            assert [model["name"] for model in client.models()] == ["echo"]
        (tmp_path / "models").mkdir()
        client.models()
        (tmp_path / "models").rmdir()
        client.models()
        wait_until(lambda: daemon.log.count("models.directory_missing") == 2)
