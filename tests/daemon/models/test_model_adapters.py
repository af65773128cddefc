"""Adapters through a real daemon: chosen by turns, added and removed while a model runs, kept."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from inferd import Client
from inferd.backends.errors import (
    Busy,
    Cancelled,
    InvalidArgument,
    LoadFailed,
    NotFound,
    OutOfMemory,
    PermissionDenied,
    UnsupportedOperation,
)
from inferd.backends.model_spec import ADAPTERS_MAX
from inferd.daemon.config.settings import Config
from inferd.daemon.core import Daemon
from inferd.ipc.messages import CALLS, AddAdapterParams, RemoveAdapterParams
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.daemon.other_users import Stranger
from tests.models import ONE_THREAD, short_smollm2
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.tiny_lora import matrices, write_lora

TEXT = "A Text that has Both"
UPPER, LOWER = TEXT.upper(), TEXT.lower()


def total_bytes(client: Client) -> int:
    return int((client.show("m")["memory"] or {})["total"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a models directory with two adapters of the echo model, and one file that is none."""
    (tmp_path / "loras").mkdir()
    (tmp_path / "loud.txt").write_text("upper")
    (tmp_path / "loras" / "soft.txt").write_text("lower")
    (tmp_path / "none.txt").write_text("neither")
    return tmp_path


def daemon_of(folder: Path, adapters: str = 'loud = "loud.txt"', more: str = "") -> RunningDaemon:
    config = f'{more}\n[models.m]\nbackend = "echo"\n[models.m.adapters]\n{adapters}\n'
    return running_daemon(config, models_dir=folder)


def said(client: Client, options: dict[str, Any] | None = None, model: str = "m") -> str:
    with client.session(model, raw=True) as session:
        return session.chat(TEXT, options=options)


def adapters_of(client: Client, model: str = "m") -> dict[str, dict[str, Any]]:
    return {found["name"]: found for found in client.show(model)["adapters"]}


def test_a_turn_and_a_context_have_the_adapters_that_they_choose(folder: Path) -> None:
    both = 'loud = "loud.txt"\nsoft = "loras/soft.txt"'
    with daemon_of(folder, both) as daemon, Client(daemon.socket) as client:
        assert said(client) == TEXT
        assert said(client, {"lora": {"loud": 1}}) == UPPER
        assert said(client, {"lora": [{"id": 1, "scale": 0.5}]}) == LOWER
        assert said(client, {"lora": {"loud": 0}}) == TEXT
        with client.session("m", raw=True, options={"lora": {"soft": 0.7}}) as session:
            assert session.chat(TEXT) == LOWER
            assert session.metadata["lora"] == {"soft": 0.7}
            assert session.chat(TEXT, options={"lora": {"loud": 0.3}}) == UPPER
            assert session.metadata["lora"] == {"loud": 0.3}
            assert session.metadata["cached_tokens"] == 0, "states of the other one were used"
            assert session.chat(TEXT, options={"lora": []}) == TEXT
            assert session.metadata["lora"] == {}
            with pytest.raises(InvalidArgument, match="'lood'") as caught:
                session.chat(TEXT, options={"lora": ["lood"]})
            assert "'loud'" in caught.value.hint
            assert session.chat(TEXT) == LOWER


def test_a_configured_scale_holds_for_turns_without_one(folder: Path) -> None:
    adapters = 'loud = { file = "loud.txt", scale = 0.5 }\nsoft = "loras/soft.txt"'
    with daemon_of(folder, adapters) as daemon, Client(daemon.socket) as client:
        assert said(client) == UPPER
        assert said(client, {"lora": {"soft": 1}}) == LOWER
        assert said(client, {"lora": {}}) == TEXT
        found = adapters_of(client)
        assert [(f["id"], f["scale"], f["error"]) for f in found.values()] == [
            ("upper", 0.5, None),
            ("lower", 0.0, None),
        ]


def test_an_adapter_that_cannot_be_loaded_fails_only_turns_that_choose_it(folder: Path) -> None:
    adapters = 'bad = "none.txt"\ngone = "gone.txt"\nloud = "loud.txt"'
    with daemon_of(folder, adapters) as daemon, Client(daemon.socket) as client:
        assert said(client) == TEXT
        assert said(client, {"lora": ["loud"]}) == UPPER
        for name in ("bad", "gone"):
            with pytest.raises(LoadFailed, match=f"{'none' if name == 'bad' else 'gone'}.txt"):
                said(client, {"lora": [name]})
            assert adapters_of(client)[name]["error"]["name"] == "LoadFailed"


def test_adapters_are_added_and_removed_while_the_model_runs(folder: Path) -> None:
    with daemon_of(folder) as daemon, Client(daemon.socket) as client:
        with client.session("m", raw=True) as session:
            before = session.chat(TEXT)
            result = client.add_adapter("m", "soft", "loras/soft.txt")
            assert (result.loaded, result.id, result.size_bytes) == (True, "lower", 5)
            assert session.chat(TEXT, options={"lora": ["soft"]}) == LOWER
            pid = client.show("m")["pid"]
            client.remove_adapter("m", "soft")
            with pytest.raises(InvalidArgument, match="'soft'"):
                session.chat(TEXT, options={"lora": ["soft"]})
            assert session.chat(TEXT) == before
            assert client.show("m")["pid"] == pid, "the worker was another"
        client.remove_adapter("m", "loud")
        assert adapters_of(client) == {}
        with pytest.raises(NotFound, match="'loud'"):
            client.remove_adapter("m", "loud")


def test_an_adapter_in_use_is_removed_only_by_force(folder: Path) -> None:
    slow = "[models.m.echo]\nstep_ms = 20"
    with (
        daemon_of(folder, f'loud = "loud.txt"\n{slow}') as daemon,
        Client(daemon.socket) as client,
        client.session("m", raw=True, options={"lora": ["loud"]}) as session,
    ):
        stream = session.stream(TEXT * 10)
        next(stream)
        with pytest.raises(Busy, match="1 turns"):
            client.remove_adapter("m", "loud")
        piece = next(stream)
        assert piece == piece.upper()
        client.remove_adapter("m", "loud", force=True)
        with pytest.raises(Cancelled, match="adapter"):
            for _ in stream:
                pass


NOT_ADDED = [
    ("soft", "gone.txt", "no file"),
    ("soft", "loras", "not a file in"),
    ("soft", "", "not a file name"),
    ("soft", "../outside.txt", "not a file in"),
    ("soft", "/etc/hostname", "not a file in"),
    ("soft", "link.txt", "not a file in"),
    ("soft", "x" * 1001, "not a file name"),
    ("soft", "loras/so\0ft.txt", "not a file name"),
    ("../soft", "loras/soft.txt", "not a name"),
    ("loud", "loras/soft.txt", "already"),
]


def test_only_files_of_the_models_directory_under_new_names_are_added(folder: Path) -> None:
    models = folder / "models"
    models.mkdir()
    for item in ("loud.txt", "loras"):
        (folder / item).rename(models / item)
    (folder / "outside.txt").write_text("lower")
    (models / "link.txt").symlink_to(folder / "outside.txt")
    with daemon_of(models) as daemon, Client(daemon.socket) as client:
        for name, file, message in NOT_ADDED:
            with pytest.raises(InvalidArgument, match=message) as caught:
                client.add_adapter("m", name, file)
            assert caught.value.hint, (name, file)
        assert list(adapters_of(client)) == ["loud"]


def test_an_invalid_or_too_large_adapter_changes_nothing(folder: Path) -> None:
    with daemon_of(folder) as daemon, Client(daemon.socket) as client:
        client.load_by_name("m")
        with pytest.raises(LoadFailed, match=r"none\.txt"):
            client.add_adapter("m", "none", "none.txt")
        with pytest.raises(InvalidArgument, match="scale"):
            client.add_adapter("m", "soft", "loras/soft.txt", scale=101)
        assert list(adapters_of(client)) == ["loud"]
        for number in range(ADAPTERS_MAX - 1):
            client.add_adapter("m", f"n{number}", "loras/soft.txt")
        with pytest.raises(InvalidArgument, match=str(ADAPTERS_MAX)):
            client.add_adapter("m", "one-more", "loras/soft.txt")
        assert said(client, {"lora": ["n62"]}) == LOWER
        for number in range(ADAPTERS_MAX - 2):
            client.remove_adapter("m", f"n{number}")
        assert said(client, {"lora": ["n62"]}) == LOWER, "another name has the same file"


def test_adapters_count_in_memory(folder: Path) -> None:
    os.truncate(folder / "loud.txt", 400)
    os.truncate(folder / "loras" / "soft.txt", 400)
    more = "[daemon]\nmemory-bytes = 1000"
    adapters = 'loud = "loud.txt"\n[models.m.echo]\nweight_bytes = 300'
    with daemon_of(folder, adapters, more) as daemon, Client(daemon.socket) as client:
        client.load_by_name("m")
        assert total_bytes(client) == 700
        with pytest.raises(OutOfMemory) as caught:
            client.add_adapter("m", "soft", "loras/soft.txt")
        assert caught.value.data == {"needed_bytes": 400, "free_bytes": 300}
        assert list(adapters_of(client)) == ["loud"]
        client.remove_adapter("m", "loud")
        assert total_bytes(client) == 300
        client.add_adapter("m", "soft", "loras/soft.txt")
        assert total_bytes(client) == 700
        assert said(client, {"lora": ["soft"]}) == LOWER


def test_adapters_survive_a_kill_until_the_configuration_changes(folder: Path) -> None:
    with daemon_of(folder) as daemon:
        with Client(daemon.socket) as client:
            result = client.add_adapter("m", "soft", "loras/soft.txt", scale=1.0)
            assert not result.loaded, "the model is cold"
            assert said(client) == LOWER
            client.remove_adapter("m", "loud")
        daemon.kill()
        daemon.start_again()
        with Client(daemon.socket) as client:
            assert said(client) == LOWER
            assert list(adapters_of(client)) == ["soft"]
        path = daemon.directory / "config.toml"
        path.write_text(path.read_text() + 'new = "loud.txt"\n')
        daemon.kill()
        daemon.start_again()
        with Client(daemon.socket) as client:
            assert said(client) == TEXT
            assert list(adapters_of(client)) == ["loud", "new"]


def test_a_turn_continues_with_its_adapters_when_its_worker_is_killed(folder: Path) -> None:
    slow = "[models.m.echo]\nstep_ms = 5"
    with daemon_of(folder, f'loud = "loud.txt"\n{slow}') as daemon, Client(daemon.socket) as client:
        client.add_adapter("m", "soft", "loras/soft.txt")
        for name, expected in (("loud", UPPER), ("soft", LOWER)):
            with client.session("m", raw=True) as session:
                text = ""
                for piece in session.stream(TEXT * 5, options={"lora": [name]}):
                    if not text:
                        os.kill(client.show("m")["pid"], signal.SIGKILL)
                    text += piece
            assert text == expected * 5
        assert client.stats()["recovered"] == 2


def swap_once_free(client: Client, to: str, mode: Any) -> None:
    """Swap `m` once the previous swap has ended."""
    while True:
        try:
            client.swap("m", to, mode=mode)
            return
        except Busy:
            time.sleep(0.01)


@pytest.mark.parametrize("mode", ["migrate", "drain"])
def test_a_swap_keeps_the_adapters_of_the_name(folder: Path, mode: Any) -> None:
    other = '[models.other]\nbackend = "echo"\n[models.other.echo]\nvariant = "other"\n'
    other += '[models.other.adapters]\nloud = "loras/soft.txt"\n'
    with daemon_of(folder, more=other) as daemon, Client(daemon.socket) as client:
        client.add_adapter("m", "soft", "loras/soft.txt")
        with client.session("m", raw=True, options={"lora": ["soft"]}) as session:
            assert session.chat(TEXT) == LOWER
            swap_once_free(client, "other", mode)
            assert session.chat(TEXT) == LOWER
            assert session.metadata["fingerprint"] == "echo-1other"
            assert session.chat(TEXT, options={"lora": ["loud"]}) == LOWER, "the new model's own"
            swap_once_free(client, "echo", mode)
            assert session.chat(TEXT) == LOWER
        assert list(adapters_of(client)) == ["loud", "soft"]


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["add_adapter", "remove_adapter"])
async def test_only_an_operator_changes_adapters(call: str, tmp_path: Path) -> None:
    """Asked without a socket: these tests run as one user."""
    somebody = Stranger(os.getuid() + 1)
    config = Config(
        socket=tmp_path / "s", models_dir=tmp_path, state_dir=tmp_path, cores=1, kv_ram_bytes=0
    )
    params = {
        "add_adapter": AddAdapterParams(name="echo", adapter="a", file="f"),
        "remove_adapter": RemoveAdapterParams(name="echo", adapter="a"),
    }
    async with anyio.create_task_group() as group:
        daemon = Daemon(config, group, 1)
        request: Any = SimpleNamespace(
            row=CALLS[call], call=call, number=1, params=params[call], connection=somebody
        )
        with pytest.raises(PermissionDenied):
            await daemon.run_call(request)


def test_a_model_loaded_from_a_descriptor_takes_no_adapters(folder: Path) -> None:
    fd = os.open(write_tiny("llama", folder), os.O_RDONLY)
    with daemon_of(folder) as daemon, RawClient(daemon.socket) as client:
        name = client.call("load", [fd], fd=0)["model"]
        with pytest.raises(UnsupportedOperation, match="outside the models directory"):
            client.call("add_adapter", name=name, adapter="soft", file="loras/soft.txt")
    os.close(fd)


def test_the_command_line_adds_and_removes(folder: Path) -> None:
    with daemon_of(folder) as daemon:
        socket = daemon.socket
        added = inferd("add-adapter", "m", "soft", "loras/soft.txt", socket=socket)
        assert added.exit_code == 0 and "after its next load" in added.stdout
        assert inferd("load", "m", socket=socket).exit_code == 0
        arguments = ("m", "more", "loras/soft.txt", "--scale", "0.5", "--json")
        found = document(inferd("add-adapter", *arguments, socket=socket))
        assert found == {"added": "more", "loaded": True, "id": "lower", "size_bytes": 5}
        assert inferd("rm-adapter", "m", "soft", socket=socket).exit_code == 0
        again = inferd("rm-adapter", "m", "soft", socket=socket)
        assert again.exit_code == 1 and "it has loud, more" in again.stderr


@pytest.mark.model
def test_adapters_of_a_real_model(tmp_path: Path) -> None:
    """SmolLM2, of which four blocks are enough: quantised; its output is that of its embeddings."""
    shapes = {f"blk.{n}.ffn_down.weight": (576, 1536) for n in range(4)}
    shapes |= {f"blk.{n}.attn_q.weight": (576, 576) for n in range(4)}
    write_lora(tmp_path / "style.gguf", matrices(shapes, strength=0.5))
    embeddings = matrices({"token_embd.weight": (4, 576)})
    write_lora(tmp_path / "embeddings.gguf", embeddings)
    config = f'{ONE_THREAD}ctx-size = 256\n[models.smollm2]\nfile = "{short_smollm2()}"\n'
    config += '[models.smollm2.adapters]\nstyle = "style.gguf"'
    options = {"temp": 0, "n-predict": 24, "cache-prompt": False}
    with running_daemon(config, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:

        def answer(**lora: float) -> str:
            with client.session("smollm2") as session:
                return session.chat("Name three animals.", options={**options, "lora": lora})

        plain = answer()
        assert plain == answer(style=0)
        assert plain != answer(style=1) == answer(style=1)
        assert plain == answer()
        client.add_adapter("smollm2", "more", "style.gguf", scale=0.5)
        assert answer(more=1) == answer(style=1)
        with pytest.raises(UnsupportedOperation, match="output"):
            client.add_adapter("smollm2", "embeddings", "embeddings.gguf")
        client.remove_adapter("smollm2", "style")
        assert answer(more=1) != plain == answer()
