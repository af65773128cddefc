"""Model files that programs hand to the daemon as descriptors."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd import Client, Image
from inferd.backends.errors import (
    BackendError,
    Busy,
    InferdError,
    InvalidArgument,
    PermissionDenied,
)
from inferd.daemon.models import transfers
from inferd.daemon.models.transfers import ArrivingFile
from inferd.daemon.pull.part import BLOCK
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd, inferd_process
from tests.daemon.other_users import ADA, as_user, daemon_for_all
from tests.daemon.pull.web_server import file as web_file
from tests.daemon.pull.web_server import serving
from tests.pictures import png
from tests.tiny_gguf import write_tiny
from tests.tiny_projector import write_pair
from tests.waiting import size_of, wait_until

HEADER = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
"""A model without tensors and entries."""
LARGE_BYTES = 16 << 30


def content_of(size: int = 3 * BLOCK + 7) -> bytes:
    """Return a model of some blocks."""
    return HEADER + os.urandom(size)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    path.write_bytes(content_of())
    return path


def names(daemon: RunningDaemon) -> list[str]:
    """Return the names of all files in the models directory."""
    return sorted(path.name for path in (daemon.directory / "models").iterdir())


def test_a_file_is_copied_checked_and_offered(
    daemon: RunningDaemon, client: Client, tmp_path: Path
) -> None:
    path = write_tiny("llama", tmp_path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    before = client.add_model("m")
    assert (before.size_bytes, before.sha256, before.added) == (0, "", False)
    shown: list[float] = []
    added = client.add_model(
        "m", path, sha256=sha256, notes={"LICENSE": b"free"}, on_progress=shown.append
    )
    assert added.file == before.file == str(daemon.directory / "models" / "m.gguf")
    assert added.added and added.sha256 == sha256 and added.size_bytes == path.stat().st_size
    assert shown[-1] == 1.0 and shown == sorted(shown)
    assert names(daemon) == ["m.LICENSE", "m.gguf"]
    path.unlink()
    with client.session("m") as session:
        session.chat("hello", options={"n-predict": 2})


def test_a_file_that_is_there_is_never_replaced(
    daemon: RunningDaemon, client: Client, source: Path
) -> None:
    added = client.add_model("m", source)
    again = client.add_model("m", source, sha256=added.sha256)
    assert not again.added and again.sha256 == added.sha256
    assert client.add_model("m", with_hash=True).sha256 == added.sha256
    assert client.add_model("m").sha256 == "", "it is not read without need"
    other = source.with_name("other.gguf")
    other.write_bytes(content_of(50))
    sha256 = hashlib.sha256(other.read_bytes()).hexdigest()
    for given in ("", sha256):
        with pytest.raises(InvalidArgument, match="exists already") as raised:
            client.add_model("m", other, sha256=given)
        assert "inferd rm m --models-dir" in raised.value.hint
    file = daemon.directory / "models" / "m.gguf"
    assert file.read_bytes() == source.read_bytes()
    file.with_name("dangling.gguf").symlink_to("/none")
    with pytest.raises(InferdError):
        client.add_model("dangling", other)
    assert not os.path.exists("/none")


@pytest.mark.parametrize(
    ("content", "sha256", "cause"),
    [
        (b"<html>" + bytes(50), "", "is not a GGUF file"),
        (b"", "", "GGUF"),
        (HEADER[:10], "", "ends within its GGUF header"),
        (HEADER + bytes(9), "0" * 64, "has the SHA-256"),
    ],
)
def test_a_file_that_fails_its_checks_leaves_nothing(
    daemon: RunningDaemon, client: Client, source: Path, content: bytes, sha256: str, cause: str
) -> None:
    source.write_bytes(content)
    with pytest.raises(BackendError, match=cause):
        client.add_model("m", source, sha256=sha256)
    assert names(daemon) == []


def test_a_cut_off_file_leaves_nothing(
    daemon: RunningDaemon, client: Client, tmp_path: Path
) -> None:
    whole = write_tiny("llama", tmp_path)
    os.truncate(whole, whole.stat().st_size - 100)
    with pytest.raises(BackendError, match="its header promises"):
        client.add_model("m", whole)
    assert names(daemon) == []


@pytest.mark.parametrize("name", ["../m", "a/b", "", ".hidden"])
def test_a_name_that_is_a_path_is_refused(client: Client, source: Path, name: str) -> None:
    with pytest.raises(InvalidArgument):
        client.add_model(name, source)


def test_notes_are_only_licences_notices_and_terms(client: Client, source: Path) -> None:
    for name in ("../LICENSE", "gguf", "config.toml", "LICENSE/x"):
        with pytest.raises(InvalidArgument, match="notes"):
            client.add_model("m", source, notes={name: b"text"})
    with pytest.raises(InvalidArgument, match="notes"):
        client.add_model("m", source, notes={f"LICENSE{n}": b"" for n in range(9)})


def test_a_name_that_the_configuration_gives_to_another_model_is_refused(source: Path) -> None:
    with (
        running_daemon('[models.m]\nbackend = "echo"\n') as daemon,
        Client(daemon.socket) as client,
    ):
        with pytest.raises(InvalidArgument, match="gives the name m to another model"):
            client.add_model("m", source)
        assert names(daemon) == []


def test_only_managers_add_models(source: Path) -> None:
    source.chmod(0o644)
    with daemon_for_all() as daemon:
        with as_user(ADA):
            client = Client(daemon.socket)
            with client, pytest.raises(PermissionDenied):
                client.add_model("m")
        assert names(daemon) == []
    rule = f'[access.ada]\nusers = [{ADA}]\nallow = ["use", "manage"]\n'
    fd = os.open(source, os.O_RDONLY)
    with daemon_for_all(rule) as daemon, as_user(ADA), Client(daemon.socket) as client:
        assert client.add_model("m", f"/proc/self/fd/{fd}").added
    os.close(fd)


def write_large(path: Path) -> Path:
    """Write a sparse model, whose copy takes longer than the test."""
    with path.open("wb") as file:
        file.write(HEADER)
        file.truncate(LARGE_BYTES)
    return path


ADD = "import sys; from inferd import Client; Client(sys.argv[1]).add_model('m', sys.argv[2])"


@pytest.mark.process
def test_a_client_that_vanishes_and_a_daemon_that_is_killed_leave_nothing(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    large, part = write_large(tmp_path / "large.gguf"), daemon.directory / "models/m.gguf.import"

    def begin() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ADD, daemon.socket, str(large)]
        program = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        wait_until(lambda: size_of(part) > BLOCK)
        return program

    with begin() as program:
        with Client(daemon.socket) as other, pytest.raises(Busy):
            other.add_model("m", large)
        program.kill()
    wait_until(lambda: names(daemon) == [])
    with begin() as program:
        daemon.kill()
        assert program.wait(60)
    assert part.exists()
    daemon.start_again()
    assert names(daemon) == [], "it is removed at the start"


def test_a_projector_that_is_added_with_its_model_reads_images(
    daemon: RunningDaemon, client: Client, tmp_path: Path
) -> None:
    model, projector = write_pair("mlp", tmp_path)
    client.add_model("eyes-mmproj", projector)
    client.add_model("eyes", model)
    assert client.show("eyes")["reads"] == ["text", "image"]
    with client.session("eyes", options={"n-predict": 1}) as session:
        reply = session.chat(["What?", Image(png(32, 32))])
        assert reply.metadata["media_tokens"] == 16


def test_a_copy_leaves_space_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "FREE_BYTES_MIN", 1 << 60)
    source = tmp_path / "source.gguf"
    source.write_bytes(content_of())
    models = tmp_path / "models"
    found = ArrivingFile("m", models, source.stat().st_size)
    with source.open("rb") as file, pytest.raises(BackendError, match=r"needs \d+ bytes"):
        found.copy_block(file.fileno())
    found.discard()
    assert list(models.iterdir()) == []


def test_a_file_that_becomes_shorter_or_longer_is_refused(tmp_path: Path, source: Path) -> None:
    size = source.stat().st_size
    for announced in (size + 1, size - 1):
        found = ArrivingFile("m", tmp_path / "models", announced)
        with source.open("rb") as file:
            if announced > size:
                with pytest.raises(BackendError, match="became shorter"):
                    while not found.copy_block(file.fileno()):
                        pass
            else:
                while not found.copy_block(file.fileno()):
                    pass
                assert found.received == announced, "not a byte more is copied"
        found.discard()
        assert list((tmp_path / "models").iterdir()) == []


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path, source: Path) -> None:
    found = ArrivingFile("m", tmp_path / "models", source.stat().st_size)
    with source.open("rb") as file:
        while not found.copy_block(file.fileno()):
            pass
    other = tmp_path / "models" / "m.gguf"
    other.write_text("another user's")
    found.finish("", {})
    with pytest.raises(BackendError, match="exists already"):
        found.publish()
    found.discard()
    assert other.read_text() == "another user's"
    assert list((tmp_path / "models").iterdir()) == [other]


# The command.


def test_pull_hands_the_file_to_a_daemon_with_a_folder_of_another_user(
    daemon: RunningDaemon, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    models = daemon.directory / "models"
    os.chown(models, ADA, ADA)
    shown = inferd("pull", str(source), "--name", "local", socket=daemon.socket)
    assert shown.exit_code == 0, shown.output
    assert f"{models}/local.gguf: " in shown.stdout
    with serving() as web:
        web.answers["/m.gguf"] = [web_file(content_of())]
        arguments = ("pull", f"{web.url}/m.gguf")
        fetched = inferd(*arguments, "--json", socket=daemon.socket)
        assert fetched.exit_code == 0, fetched.output
        again = inferd(*arguments, socket=daemon.socket)
        assert "up to date" in again.stdout
        other = "0" * 64
        refused = inferd(*arguments, "--sha256", other, socket=daemon.socket)
        assert refused.exit_code == 1 and "with other contents" in refused.stderr
        forced = inferd(*arguments, "--force", socket=daemon.socket)
        assert forced.exit_code == 1 and "exists already" in forced.stderr
        assert len(web.requests) == 1, "what is there is not fetched again"
    assert document(fetched)["file"] == str(models / "m.gguf")
    assert names(daemon) == ["local.gguf", "m.gguf"]
    assert not [*(tmp_path / "cache").rglob("*.gguf*")], "nothing is left behind"
    assert not (tmp_path / "data").exists()


def test_a_refused_file_is_kept_and_its_place_named(
    daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    os.chown(daemon.directory / "models", ADA, ADA)
    content = content_of()
    with serving() as web, Client(daemon.socket) as client:
        rival = tmp_path / "rival.gguf"
        rival.write_bytes(content_of(9))

        def answer(handler: object) -> None:
            client.add_model("m", rival)  # another user's file arrives meanwhile
            web_file(content)(handler)  # type: ignore[arg-type]

        web.answers["/m.gguf"] = [answer]
        refused = inferd("pull", f"{web.url}/m.gguf", socket=daemon.socket)
    kept = tmp_path / "cache" / "inferd" / "m.gguf"
    assert refused.exit_code == 1 and f"inferd pull {kept} --name m" in refused.stderr
    assert kept.read_bytes() == content


def test_pull_says_at_once_why_the_daemon_will_not_offer_the_file(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "data" / "inferd" / "models"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with daemon_for_all() as daemon:
        for folder in (tmp_path, *tmp_path.parents):
            if folder.name.startswith(("pytest-", "popen-")) or folder == tmp_path:
                folder.chmod(0o711)
        os.chown(tmp_path, ADA, ADA)
        source.chmod(0o644)
        with as_user(ADA):
            shown = inferd("pull", str(source), "--name", "m", socket=daemon.socket)
    assert shown.exit_code == 0, shown.output
    assert f"the model goes to {own}" in shown.stderr and "`manage`" in shown.stderr
    assert (own / "m.gguf").exists()


def test_a_named_folder_is_the_folder(daemon: RunningDaemon, tmp_path: Path, source: Path) -> None:
    with inferd_process(
        "pull", str(source), "--models-dir", str(tmp_path / "own"), socket=daemon.socket
    ) as process:
        output, errors = process.communicate()
    assert process.returncode == 0 and b"goes to" not in errors
    assert output.startswith(str(tmp_path / "own" / "source.gguf").encode())
    assert names(daemon) == []
