"""Run-time settings of models survive real kills and restarts."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
from anyio import create_task_group

from inferd import Client, ModelInfo
from inferd.backends.errors import Busy, LoadFailed
from inferd.daemon.config.model_settings import ModelConfig
from inferd.daemon.config.sources import load_config
from inferd.daemon.models.model import PassedFile
from inferd.daemon.models.persisted_settings import (
    PERSISTED_NAMES_MAX,
    SETTINGS_VERSION,
    PersistedModels,
    PersistedSettings,
    SwappedName,
    version_checksum,
)
from inferd.daemon.models.registry import Registry
from inferd.daemon.state_files import SETTINGS_FILE
from inferd.testing import RunningDaemon, running_daemon
from tests.waiting import wait_until

CONFIG = """
[models.live]
backend = "echo"
[models.one]
backend = "echo"
[models.one.echo]
variant = "one"
"""
SWAPPED = SwappedName(ModelConfig(file=Path("/m/a.gguf")), ModelConfig(file=Path("/m/b.gguf")))


def live(client: Client) -> ModelInfo:
    return next(m for m in client.models() if m["name"] == "live")


def kill_and_start(daemon: RunningDaemon) -> None:
    daemon.kill()
    daemon.start_again()


def file_of(daemon: RunningDaemon) -> Path:
    return daemon.directory / "state" / SETTINGS_FILE


def test_swaps_pins_and_keep_alives_survive_a_kill() -> None:
    with running_daemon(CONFIG) as daemon:
        with Client(daemon.socket) as client:
            client.load_by_name_with_config("live", {"keep-alive": 77})
            after = client.swap("live", "one").fingerprint
            client.pin("live")
        assert file_of(daemon).stat().st_mode & 0o777 == 0o600
        kill_and_start(daemon)
        with Client(daemon.socket) as client:
            assert live(client)["pinned"]
            assert client.load_by_name("live").fingerprint == after
            client.unpin("live")
            assert live(client)["keep_alive_s"] == 77
            client.swap("live", "echo")
        kill_and_start(daemon)
        with Client(daemon.socket) as client:
            assert client.load_by_name("live").fingerprint == "echo-1"
            assert not live(client)["pinned"]
        [settings] = json.loads(file_of(daemon).read_text())["models"].values()
        expected = {"swapped": None, "pinned": False, "keep_alive_s": 77.0}
        assert settings == expected, "the name is again what the configuration says"


@pytest.mark.parametrize("mode", ["migrate", "drain"])
def test_a_swap_to_the_name_itself_ends_the_swap(mode: Literal["migrate", "drain"]) -> None:
    with running_daemon(CONFIG) as daemon:
        with Client(daemon.socket) as client, client.session("live", raw=True) as session:
            session.chat("a")
            assert client.swap("live", "one", mode=mode).fingerprint == "echo-1one"
            assert live(client)["swapped_to"] == "one"
            assert swap_back(client, mode) == "echo-1"
            assert live(client)["swapped_to"] == ""
            assert session.chat("b") == "b" and session.metadata["fingerprint"] == "echo-1"
            assert swap_back(client, "drain") == "echo-1", "its file is read anew"
            assert json.loads(file_of(daemon).read_text())["models"] == {}
            client.swap("live", "one", mode="drain")
        kill_and_start(daemon)
        with Client(daemon.socket) as client:
            assert live(client)["swapped_to"] == "one"
            assert swap_back(client, mode) == "echo-1"
        kill_and_start(daemon)
        with Client(daemon.socket) as client:
            assert client.load_by_name("live").fingerprint == "echo-1"


def swap_back(client: Client, mode: Literal["migrate", "drain"]) -> str:
    """End the swap once the previous one is complete; return the fingerprint."""
    done: list[str] = []

    def ended() -> bool:
        with suppress(Busy):
            done.append(client.swap("live", "live", mode=mode).fingerprint)
        return bool(done)

    wait_until(ended)
    return done[0]


def test_a_drain_is_kept_and_a_swap_that_failed_is_not() -> None:
    with running_daemon(CONFIG) as daemon:
        (daemon.directory / "models" / "damaged.gguf").write_bytes(b"no model")
        with Client(daemon.socket) as client:
            client.load_by_name("live")
            after = client.swap("live", "one", mode="drain").fingerprint
            with pytest.raises(LoadFailed):
                client.swap("live", "damaged.gguf", mode="drain")
        kill_and_start(daemon)
        with Client(daemon.socket) as client:
            assert client.load_by_name("live").fingerprint == after


def test_a_configuration_that_was_changed_counts_more_than_a_swap() -> None:
    with running_daemon(CONFIG) as daemon:
        with Client(daemon.socket) as client:
            client.swap("live", "one")
            client.pin("live")
        text = CONFIG.replace("[models.one]", '[models.live.echo]\nvariant = "new"\n[models.one]')
        (daemon.directory / "config.toml").write_text(text)
        kill_and_start(daemon)
        with Client(daemon.socket) as client:
            assert client.load_by_name("live").fingerprint == "echo-1new"
            assert live(client)["pinned"]
        assert "model.swap_ended" in daemon.log


def test_a_damaged_file_is_set_aside_and_the_daemon_starts() -> None:
    with running_daemon(CONFIG) as daemon:
        with Client(daemon.socket) as client:
            client.swap("live", "one")
        whole = file_of(daemon).read_bytes()
        file_of(daemon).write_bytes(whole[: len(whole) // 2])
        kill_and_start(daemon)
        with Client(daemon.socket) as client:
            assert client.load_by_name("live").fingerprint == "echo-1"
            client.pin("live")
        [aside] = file_of(daemon).parent.glob(f"{SETTINGS_FILE}.damaged-*")
        assert aside.read_bytes() == whole[: len(whole) // 2]
        assert f"a damaged file was set aside as {aside}" in daemon.log
        kill_and_start(daemon)
        with Client(daemon.socket) as client:
            assert live(client)["pinned"]


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"version": "1"}', '{"version": 1, "models": 3}', ""]
)
def test_a_file_of_another_form_is_set_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / SETTINGS_FILE
    path.write_text(text)
    assert PersistedModels(path).settings_of("m", ModelConfig()) == PersistedSettings()
    assert not path.exists()


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / SETTINGS_FILE
    head = {"version": SETTINGS_VERSION + 1, "checksum": version_checksum(SETTINGS_VERSION + 1)}
    text = json.dumps({**head, "models": [], "more": True})
    path.write_text(text)
    causes: list[str | None] = []
    PersistedModels(path, causes.append).store_settings("m", PersistedSettings(pinned=True))
    assert path.read_text() == text
    assert causes == [f"{path} has a newer version: {SETTINGS_VERSION + 1}"]


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_the_version_costs_no_setting(tmp_path: Path, bit: int) -> None:
    path = tmp_path / SETTINGS_FILE
    PersistedModels(path).store_settings("m", PersistedSettings(pinned=True))
    data = bytearray(path.read_bytes())
    data[data.index(b":") + 1] ^= 1 << bit
    path.write_bytes(data)
    causes: list[str | None] = []

    models = PersistedModels(path, causes.append)

    assert not any("newer" in (cause or "") for cause in causes)
    if not causes:
        assert models.settings_of("m", ModelConfig()).pinned
    models.store_settings("m", PersistedSettings(keep_alive_s=1.0))
    assert PersistedModels(path).settings_of("m", ModelConfig()).keep_alive_s == 1.0


def test_unwritable_settings_hold_until_the_end_and_are_reported(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    causes: list[str | None] = []
    settings = PersistedModels(tmp_path / "file" / SETTINGS_FILE, causes.append)
    settings.store_settings("m", PersistedSettings(pinned=True))
    assert settings.settings_of("m", ModelConfig()) == PersistedSettings(pinned=True)
    (tmp_path / "file").unlink()
    settings.store_settings("m", PersistedSettings())
    unread, refused, written = causes
    assert unread is not None and "can be neither read nor set aside" in unread
    assert refused is not None and "File exists" in refused
    assert written is None


def test_names_are_bounded_and_the_oldest_are_dropped_first(tmp_path: Path) -> None:
    settings = PersistedModels(tmp_path / SETTINGS_FILE)
    settings._models = {
        str(number): PersistedSettings(pinned=True) for number in range(PERSISTED_NAMES_MAX)
    }
    settings.store_settings("0", PersistedSettings(keep_alive_s=1.0))
    settings.store_settings("new", PersistedSettings(pinned=True))
    again = PersistedModels(tmp_path / SETTINGS_FILE)
    assert again.settings_of("1", ModelConfig()) == PersistedSettings()
    assert again.settings_of("0", ModelConfig()) == PersistedSettings(keep_alive_s=1.0)
    assert again.settings_of("new", ModelConfig()) == PersistedSettings(pinned=True)


def test_a_swapped_name_stays_when_its_file_is_removed(tmp_path: Path) -> None:
    settings = PersistedModels(tmp_path / SETTINGS_FILE)
    settings.store_settings("a", PersistedSettings(swapped=SWAPPED))
    settings.store_settings(
        "elsewhere",
        PersistedSettings(swapped=SwappedName(ModelConfig(file=Path("/x/a.gguf")), SWAPPED.now)),
    )
    settings.store_settings(
        "echo", PersistedSettings(swapped=SwappedName(ModelConfig(backend="echo"), SWAPPED.now))
    )
    again = PersistedModels(tmp_path / SETTINGS_FILE)
    assert again.swapped_names(Path("/m")) == {"a": SWAPPED.configured}
    assert again.settings_of("a", SWAPPED.configured).swapped == SWAPPED


@pytest.mark.asyncio
async def test_settings_of_a_descriptors_model_are_not_stored(tmp_path: Path) -> None:
    """No client can name it after a restart."""
    config = load_config({"state_dir": tmp_path, "models_dir": tmp_path}, {})
    async with create_task_group() as group:
        registry = Registry(config, group, lambda: None)
        lease = registry.lease_descriptor("d", PassedFile(-1, 0, (), lambda: None), 0)
        registry.pin_model(registry.catalog.get("d", 0), pinned=True)
        assert not (tmp_path / SETTINGS_FILE).exists()
        registry.pin_model(registry.catalog.get("echo", 0), pinned=True)
        assert (tmp_path / SETTINGS_FILE).exists()
        lease.close()
