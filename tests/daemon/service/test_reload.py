"""Reload by SIGHUP: changes that can be applied are applied, the others are named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from inferd.backends.errors import Busy, ModelNotFound
from inferd.daemon.config.declaration import Applies
from inferd.daemon.config.settings import SETTINGS, TABLES, Config, applies
from inferd.daemon.service.reload import merge
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
from tests.daemon.manager import Manager, manager_of
from tests.raw import RawClient
from tests.waiting import wait_until

CONFIG = """
[daemon]
sessions_max = 10
cores = 1
[defaults]
temp = 0.5
[models.m]
backend = "echo"
slots = 2
[models.m.echo]
step_ms = 2
"""


@contextmanager
def managed(config: str = CONFIG) -> Iterator[tuple[RunningDaemon, Manager, RawClient]]:
    with (
        running_daemon(config) as daemon,
        manager_of(daemon) as manager,
        RawClient(daemon.socket) as client,
    ):
        yield daemon, manager, client


def reload(daemon: RunningDaemon, manager: Manager, config: str) -> str:
    """Change the file, reload it, and return the status afterwards."""
    (daemon.directory / "config.toml").write_text(config)
    os.kill(daemon.pid, signal.SIGHUP)
    manager.until(lambda m: "RELOADING" in m)
    manager.until(lambda m: "READY" in m)
    return next((m["STATUS"] for m in reversed(manager.messages) if "STATUS" in m), "serving")


def model(client: RawClient, name: str = "m") -> dict[str, object]:
    [described] = client.call("show", name=name)["models"]
    return dict(described)


def test_a_reload_is_notified_with_its_time_in_one_message() -> None:
    with managed() as (daemon, manager, _):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        reload(daemon, manager, CONFIG)
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        reported = [m for m in manager.messages if "RELOADING" in m or "READY" in m]
        assert ["RELOADING" in m for m in reported] == [True, False]
        assert before <= int(reported[0]["MONOTONIC_USEC"]) <= after


def test_a_reload_applies_changes_at_once_and_names_those_that_need_a_restart() -> None:
    with managed() as (daemon, manager, client):
        context = client.context("m")
        changed = CONFIG.replace("sessions_max = 10", "sessions_max = 1\nlog_level = 'warning'")
        status = reload(daemon, manager, changed.replace("cores = 1", "cores = 2"))
        assert status == "serving; restart for: cores"
        with pytest.raises(Busy):
            client.context("m")
        stats = client.call("stats")["stats"]
        assert (stats["sessions_max"], stats["cores"]) == (1, 1)
        assert stats["pending_restart"] == ["cores"]
        line = "changed in the file, applied after a restart: cores"
        assert line in inferd("status", socket=daemon.socket).stdout
        assert client.call("chat", context=context, prompt="still", raw=True)["text"] == b"still"
        log = daemon.log
        assert reload(daemon, manager, CONFIG.replace("10", "10\nlog_level = 'error'")) == "serving"
        assert client.call("stats")["stats"]["pending_restart"] == []
        assert daemon.log == log, "below the level that holds now"
        client.context("m")


def test_an_error_changes_nothing_and_is_reported_until_it_is_corrected() -> None:
    with managed() as (daemon, manager, client):
        wrong = CONFIG.replace("= 10", "= 0").replace("[models.m]", "[models.n]") + "slotz = 1\n"
        status = reload(daemon, manager, wrong)
        assert status.startswith("serving; degraded: config (") and "slotz" in status
        assert client.call("stats")["stats"]["sessions_max"] == 10
        assert model(client)["state"] == "cold"
        with pytest.raises(ModelNotFound):
            model(client, "n")
        reported = inferd("status", socket=daemon.socket).stdout
        assert "config fails" in reported and "sessions_max: 0 is outside" in reported
        assert "config.refused" in daemon.log
        assert reload(daemon, manager, CONFIG) == "serving"
        assert "config fails" not in inferd("status", socket=daemon.socket).stdout


def test_a_reload_adds_changes_and_removes_models() -> None:
    with managed() as (daemon, manager, client):
        client.call("load_by_name", name="m")
        first = model(client)["info"]
        assert isinstance(first, dict) and first["slots"] == 2
        text = "finished by the worker that started it " * 20
        context = client.context("m")
        turn = client.begin_stream(context, text)
        changed = CONFIG.replace("slots = 2", "slots = 3").replace("temp = 0.5", "temp = 0.25")
        reload(daemon, manager, changed + '[models.n]\nbackend = "echo"\n')
        assert model(client, "n")["state"] == "cold"
        client.wait_result(turn)
        assert client.streamed_text == text
        assert isinstance(found := model(client)["info"], dict) and found["slots"] == 2
        client.call("unload_model", name="m", force=True)
        assert client.call("chat", context=context, prompt="new", raw=True)["text"] == b"new"
        assert isinstance(found := model(client)["info"], dict) and found["slots"] == 3
        assert model(client)["options"] == {"slots": 3, "temp": 0.25}
        reload(daemon, manager, changed)
        with pytest.raises(ModelNotFound):
            model(client, "n")


def test_a_model_that_is_removed_while_it_is_in_use_gets_no_new_contexts() -> None:
    with managed() as (daemon, manager, client):
        context = client.context("m")
        assert client.call("chat", context=context, prompt="old", raw=True)["text"] == b"old"
        with RawClient(daemon.socket) as other:
            reload(daemon, manager, CONFIG.replace("[models.m", "[models.n"))
            with pytest.raises(ModelNotFound, match="was removed from the configuration"):
                other.context("m")
            assert other.call("show", name="m")["models"][0]["name"] == "m", "while it is loaded"
            assert client.call("chat", context=context, prompt="on", raw=True)["text"] == b"on"
            reload(daemon, manager, CONFIG)
            assert other.call("chat", context=other.context("m"), prompt="new", raw=True)


def test_an_idle_loaded_model_is_unloaded_for_its_new_parameters() -> None:
    with managed() as (daemon, manager, client):
        with RawClient(daemon.socket) as other:
            other.call("load_by_name", name="m")
        wait_until(lambda: not model(client)["leases"])
        reload(daemon, manager, CONFIG.replace("slots = 2", "slots = 3"))
        graph = client.call("load_by_name", name="m")
        assert graph["slots"] == 3


def test_an_unchanged_file_changes_nothing() -> None:
    with managed() as (daemon, manager, client):
        with RawClient(daemon.socket) as other:
            other.call("load_by_name", name="m")
        pid = model(client)["pid"]
        for _ in range(3):
            assert reload(daemon, manager, CONFIG) == "serving"
        assert (model(client)["state"], model(client)["pid"]) == ("ready", pid)
        assert "changed=[]" in daemon.log and "models_at_next_load=[]" in daemon.log


def test_each_setting_has_the_time_when_a_change_takes_effect() -> None:
    assert {applies(name) for name in (*SETTINGS, *TABLES)} == set(Applies)
    for name in ("access", "sessions-max", "shutdown-grace-s", "log-file"):
        assert applies(name) is Applies.AT_ONCE
    for name in ("models", "defaults", "kv-ram-bytes", "worker-hang-timeout-s"):
        assert applies(name) is Applies.NEXT_LOAD
    for name in ("socket", "socket-mode", "socket-group", "state-dir", "kv-share", "cores"):
        assert applies(name) is Applies.RESTART


def test_merging_a_reread_file_with_the_running_configuration(tmp_path: Path) -> None:
    running = Config(
        socket=tmp_path, models_dir=tmp_path, state_dir=tmp_path, cores=2, kv_ram_bytes=1
    )
    read = replace(
        running, cores=4, kv_share="all", sessions_max=7, kv_ram_bytes=2, defaults={"temp": 1.0}
    )
    reloaded = merge(running, read)
    assert reloaded.changed == ["sessions-max", "kv-ram-bytes", "defaults"]
    assert reloaded.restart == ["cores", "kv-share"]
    assert reloaded.config == replace(read, cores=2, kv_share="user")
    assert merge(reloaded.config, read).changed == []
    assert merge(reloaded.config, running).restart == []


def test_the_end_of_a_swap_loads_the_model_as_it_is_configured_now() -> None:
    config = CONFIG + '[models.one]\nbackend = "echo"\n[models.one.echo]\nvariant = "one"\n'
    with managed(config) as (daemon, manager, client):
        client.call("swap", name="m", to="one", mode="drain")
        assert model(client)["swapped_to"] == "one"
        changed = config.replace("step_ms = 2", 'step_ms = 2\nvariant = "new"')
        reload(daemon, manager, changed)
        assert client.call("swap", name="m", to="m", mode="drain")["fingerprint"] == "echo-1new"
        assert model(client)["swapped_to"] == ""
        assert (
            client.call("swap", name="m", to="m", mode="drain")["previous_fingerprint"]
            == "echo-1new"
        )
