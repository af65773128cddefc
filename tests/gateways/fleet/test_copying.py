"""Copies of models' files between nodes: once, checked, and nothing is left of a failed one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from inferd import Client
from inferd.backends.errors import (
    BackendError,
    InferdError,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    UnsupportedOperation,
    WorkerCrashed,
)
from tests.daemon.command_line import inferd_process
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.pictures import png
from tests.tiny_gguf import write_tiny
from tests.tiny_projector import write_pair
from tests.waiting import size_of, wait_until

HEADER = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
LARGE_BYTES = 8 << 30


@contextmanager
def fleet_of(tmp_path: Path, *names: str) -> Iterator[tuple[RunningFleet, Client]]:
    with (
        running_fleet(tmp_path, "", *(names or ("a", "b"))) as fleet,
        Client(fleet.socket) as client,
    ):
        yield fleet, client


def models_dir(fleet: RunningFleet, node: str) -> Path:
    return fleet.daemons[node].directory / "models"


def write_file(fleet: RunningFleet, node: str = "a", size: int = 3 << 20) -> str:
    """Write a model of random bytes, of several parts; return its SHA-256."""
    content = HEADER + os.urandom(size)
    (models_dir(fleet, node) / "m.gguf").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def write_large_file(fleet: RunningFleet) -> None:
    """Write a sparse model whose copy takes longer than the test."""
    with (models_dir(fleet, "a") / "m.gguf").open("wb") as file:
        file.write(HEADER)
        file.truncate(LARGE_BYTES)


def files_on(fleet: RunningFleet, node: str) -> list[str]:
    return sorted(file.name for file in models_dir(fleet, node).iterdir())


def until_arriving(fleet: RunningFleet) -> None:
    """Wait until a part of the file is on node b."""
    part = models_dir(fleet, "b") / "m.gguf.import"
    wait_until(lambda: size_of(part) > 0)


@contextmanager
def copying(fleet: RunningFleet) -> Iterator[subprocess.Popen[bytes]]:
    """Run a copy of a large file, and wait until its first bytes have arrived."""
    write_large_file(fleet)
    arguments = ("fleet", "copy", "m", "--to", "b")
    with inferd_process(*arguments, socket=fleet.socket) as process:
        try:
            until_arriving(fleet)
            yield process
        finally:
            process.kill()
            process.communicate()


def test_a_copied_model_answers_on_its_new_node(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, client):
        file = write_tiny("llama", models_dir(fleet, "a"))
        result = client.copy_model(file.stem, "b")
        assert (result.source, result.up_to_date) == ("a", False)
        assert result.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        copied = models_dir(fleet, "b") / file.name
        assert copied.read_bytes() == file.read_bytes() and files_on(fleet, "b") == [file.name]
        client.drain(node="a")
        with client.session(file.stem, raw=True, options={"n-predict": 2}) as session:
            assert session.chat("hello").metadata["output_tokens"] == 2
            assert [one["node"] for one in client.sessions()] == ["b"]


def about_picture() -> list[dict[str, object]]:
    """Return a message with an image."""
    content = [{"type": "text", "text": "What?"}, {"type": "image", "data": png(32, 32)}]
    return [{"role": "user", "content": content}]


def test_a_copied_model_reads_images_with_its_projector(tmp_path: Path) -> None:
    source = tmp_path / "elsewhere"
    source.mkdir()
    file, projector = write_pair("mlp", source)
    config = f'[models.eyes]\nfile = "{file}"\nmmproj = "{projector}"\n'
    with (
        running_fleet(tmp_path, {"a": config, "b": ""}, "a", "b") as fleet,
        Client(fleet.socket) as client,
    ):
        result = client.copy_model("eyes", "b")
        assert result.projector_bytes == projector.stat().st_size
        assert files_on(fleet, "b") == ["eyes-mmproj.gguf", "eyes.gguf"]
        for name, original in (("eyes", file), ("eyes-mmproj", projector)):
            copied = models_dir(fleet, "b") / f"{name}.gguf"
            assert copied.read_bytes() == original.read_bytes()
        assert client.copy_model("eyes", "b").up_to_date
        client.drain(node="a")
        with client.session("eyes", options={"n-predict": 2}) as session:
            assert session.chat(about_picture()).metadata["media_tokens"] == 16
            assert [one["node"] for one in client.sessions()] == ["b"]


def test_a_node_that_has_only_the_model_gets_the_projector(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, client):
        file, projector = write_pair("mlp", models_dir(fleet, "a"))
        shutil.copy(file, models_dir(fleet, "b"))
        result = client.copy_model(file.stem, "b")
        size = projector.stat().st_size
        assert (result.up_to_date, result.sha256, result.projector_bytes) == (False, "", size)
        assert files_on(fleet, "b") == [f"{file.stem}-mmproj.gguf", file.name]
        assert client.copy_model(file.stem, "b").up_to_date


def test_a_model_in_another_folder_of_the_node_gets_no_projector(tmp_path: Path) -> None:
    elsewhere = write_tiny("llama", tmp_path)
    config = f'[models.{elsewhere.stem}]\nfile = "{elsewhere}"\n'
    with (
        running_fleet(tmp_path, {"a": "", "b": config}, "a", "b") as fleet,
        Client(fleet.socket) as client,
    ):
        write_pair("mlp", models_dir(fleet, "a"))
        with pytest.raises(InvalidArgument, match="in its models directory") as caught:
            client.copy_model(elsewhere.stem, "b")
        assert "beside" in caught.value.hint
        assert files_on(fleet, "b") == []


def test_a_model_that_turns_its_projector_off_is_copied_without_it(tmp_path: Path) -> None:
    with (
        running_fleet(
            tmp_path, {"a": '[models.tiny-llama]\nmmproj = ""\n', "b": ""}, *"ab"
        ) as fleet,
        Client(fleet.socket) as client,
    ):
        file, _ = write_pair("mlp", models_dir(fleet, "a"))
        assert client.copy_model(file.stem, "b").projector_bytes == 0
        assert files_on(fleet, "b") == [file.name]


def test_an_interrupted_copy_keeps_neither_the_projector_nor_the_model(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, client), ThreadPoolExecutor() as pool:
        file, _ = write_pair("mlp", models_dir(fleet, "a"))
        with file.open("r+b") as opened:
            opened.truncate(LARGE_BYTES)  # its copy takes longer than the test
        part = models_dir(fleet, "b") / f"{file.name}.import"
        with inferd_process(
            "fleet", "copy", file.stem, "--to", "b", socket=fleet.socket
        ) as process:
            wait_until(lambda: size_of(part) > 0)
            assert f"{file.stem}-mmproj.gguf.import" in files_on(fleet, "b")
            process.kill()
            wait_until(lambda: files_on(fleet, "b") == [])
            process.communicate()
        copy = pool.submit(client.copy_model, file.stem, "b")
        wait_until(lambda: size_of(part) > 0)
        fleet.daemons["b"].kill()
        with pytest.raises(WorkerCrashed):
            copy.result()
        assert len(files_on(fleet, "b")) == 4, "two files and their locks"
        fleet.daemons["b"].start_again()
        assert files_on(fleet, "b") == []


def test_the_command_copies_a_file_of_several_parts(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, _):
        sha256 = write_file(fleet)
        arguments = ("fleet", "copy", "m", "--to", "b", "--sha256", sha256.upper(), "--json")
        with inferd_process(*arguments, socket=fleet.socket) as process:
            output, errors = process.communicate()
        assert process.returncode == 0, errors
        assert json.loads(output)["sha256"] == sha256
        copied = (models_dir(fleet, "b") / "m.gguf").read_bytes()
        assert hashlib.sha256(copied).hexdigest() == sha256


def test_simultaneous_requests_copy_a_file_once(tmp_path: Path) -> None:
    with fleet_of(tmp_path, "a", "b", "c") as (fleet, client):
        write_file(fleet)
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(client.copy_model, "m", to) for to in "bcbcbc"]
            results = [future.result() for future in asked]
        assert [result.up_to_date for result in results].count(False) == 2
        for node in "bc":
            assert fleet.daemons[node].log.count("model.arrived") == 1


def test_a_file_with_another_hash_is_not_kept(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, client):
        write_file(fleet)
        with pytest.raises(BackendError, match="has the SHA-256") as caught:
            client.copy_model("m", "b", sha256="0" * 64)
        assert caught.value.hint
        assert files_on(fleet, "b") == []
        assert not client.copy_model("m", "b").up_to_date, "the transfer has ended"


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, client):
        write_large_file(fleet)
        with ThreadPoolExecutor() as pool:
            copy = pool.submit(client.copy_model, "m", "b")
            until_arriving(fleet)
            with (models_dir(fleet, "a") / "m.gguf").open("r+b") as file:
                file.write(HEADER + b"changed")
            with pytest.raises(BackendError, match="has changed"):
                copy.result()
        assert files_on(fleet, "b") == []


def test_a_client_that_goes_leaves_no_file(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, _), copying(fleet) as process:
        process.kill()
        wait_until(lambda: files_on(fleet, "b") == [])


def test_a_lost_source_leaves_no_file(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, client):
        write_large_file(fleet)
        with ThreadPoolExecutor() as pool:
            copy = pool.submit(client.copy_model, "m", "b")
            until_arriving(fleet)
            fleet.daemons["a"].kill()
            with pytest.raises(WorkerCrashed) as caught:
                copy.result()
        assert caught.value.data["node"] == "a"
        wait_until(lambda: files_on(fleet, "b") == [])


def test_a_killed_target_removes_the_file_at_its_next_start(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, client):
        write_large_file(fleet)
        with ThreadPoolExecutor() as pool:
            copy = pool.submit(client.copy_model, "m", "b")
            until_arriving(fleet)
            fleet.daemons["b"].kill()
            with pytest.raises(WorkerCrashed):
                copy.result()
        assert files_on(fleet, "b") == [".m.lock", "m.gguf.import"]
        fleet.daemons["b"].start_again()
        assert files_on(fleet, "b") == []


def test_files_that_cannot_be_copied_are_refused(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, client):
        write_file(fleet, "a", 100)
        write_file(fleet, "b", 200)
        for part in (1, 2):
            (models_dir(fleet, "a") / f"big-0000{part}-of-00002.gguf").write_bytes(HEADER)
        (models_dir(fleet, "a") / "page.gguf").write_bytes(b"<html>" * 100)
        (models_dir(fleet, "a") / "old.gguf").write_bytes(HEADER[:4] + bytes(100))
        cases: list[tuple[str, str, type[InferdError]]] = [
            ("m", "b", InvalidArgument),
            ("m", "z", NotFound),
            ("missing", "b", ModelNotFound),
            ("echo", "b", ModelNotFound),
            ("big", "b", UnsupportedOperation),
            ("page", "b", ModelNotFound),
            ("old", "b", BackendError),
        ]
        for name, to, error in cases:
            with pytest.raises(error):
                client.copy_model(name, to)
        assert files_on(fleet, "b") == ["m.gguf"]


def test_only_operators_copy_and_nobody_reads_a_file_through_the_entry(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, client):
        write_file(fleet)
        with (
            Client(fleet.socket, on_behalf_of="@eve") as eve,
            pytest.raises(PermissionDenied) as caught,
        ):
            eve.copy_model("m", "b")
        assert caught.value.data["right"] == "manage"
        with pytest.raises(UnsupportedOperation):
            client.export_model("m", "transfer")
        with Client(fleet.daemons["a"].socket, on_behalf_of="@eve") as eve:
            for attempt in (
                lambda: eve.export_model("m", "transfer"),
                lambda: eve.export_model("m", "transfer", projector=True),
                lambda: eve.import_model("n", "transfer", HEADER, 99),
            ):
                with pytest.raises(PermissionDenied):
                    attempt()
