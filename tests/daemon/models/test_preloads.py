"""Models that are loaded at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd import Client
from inferd.daemon.config.sources import ConfigError, load_config
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.echo import echo_model
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

NAMES = '[models.coder]\nof = "base"\n'


def states(client: Client) -> dict[str, str]:
    return {model["name"]: model["state"] for model in client.models()}


def component(client: Client) -> str | None:
    [found] = [c for c in client.stats()["components"] if c["component"] == "preload"]
    return found["cause"]  # type: ignore[no-any-return]


def daemon_of(names: str, config: str, head: str = "") -> RunningDaemon:
    return running_daemon(f"[daemon]\npreload = {names}\n{head}{config}")


def test_models_are_loaded_while_the_daemon_serves_already() -> None:
    config = echo_model("base", load_ms=700) + NAMES + echo_model("second")
    with daemon_of('["coder", "second"]', config) as daemon, Client(daemon.socket) as client:
        found = states(client)
        assert found["second"] == "cold" or found["base"] == "ready", (
            "one is loaded after the other"
        )
        with client.session("echo") as session:
            assert session.chat("hi") == "hi"
        wait_until(lambda: states(client)["second"] == "ready")
        assert states(client) | {"base": "ready", "coder": "ready"} == states(client)
        assert daemon.log.index("daemon.ready") < daemon.log.index("model.loaded")
        assert component(client) is None
        wait_until(lambda: client.show("base")["leases"] == 0)


def test_a_failure_is_shown_until_a_request_loads_the_model(tmp_path: Path) -> None:
    file = tmp_path / "late.txt"
    config = f'[models.late]\nfile = "{file}"\n' + echo_model("other")
    with daemon_of('"late,absent,other"', config) as daemon, Client(daemon.socket) as client:
        wait_until(lambda: states(client)["other"] == "ready")
        cause = component(client) or ""
        assert "late: " in cause and "absent: there is no model 'absent'" in cause
        assert "model.preload_failed" in daemon.log
        status = inferd("status", socket=daemon.socket).stdout
        assert "absent" in status and "inferd load NAME" in status
        file.write_bytes(write_tiny("llama", tmp_path).read_bytes())
        client.load_by_name("late")
        assert "late: " not in (component(client) or "")


def test_a_model_that_the_next_one_has_evicted_is_named() -> None:
    size = 60_000_000
    config = echo_model("a", weight_bytes=size) + echo_model("b", weight_bytes=size)
    head = "memory-bytes = 100_000_000\n"
    with daemon_of('["a", "b"]', config, head) as daemon, Client(daemon.socket) as client:
        wait_until(lambda: component(client) is not None)
        assert "a: it was unloaded for the others" in (component(client) or "")
        assert states(client)["b"] == "ready"


def test_the_check_names_sets_that_do_not_fit(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("one", "two", "three"):
        write_tiny("llama", models).rename(models / f"{name}.gguf")
    path = tmp_path / "config.toml"
    sets = ("--set", f"models-dir={models}", "--set", f"state-dir={tmp_path / 'state'}")
    text = '[daemon]\npreload = ["one", "alias", "two", "gone"]\nmemory-bytes = {}\n'
    text += '[defaults]\nn-gpu-layers = 0\n[models.alias]\nof = "one"\n'

    def warnings(budget: int) -> list[str]:
        path.write_text(text.replace("{}", str(budget)))
        return list(document(inferd("config", "check", str(path), "--json", *sets))["warnings"])

    assert warnings(10**12) == ["preload: there is no model 'gone'"]
    [_, memory] = warnings(10**6)[:2]
    assert memory.startswith("memory: these pinned and preloaded models need")
    assert "one (" in " ".join(warnings(10**6)) and "three" not in " ".join(warnings(10**6))
    with running_daemon(models_dir=models) as daemon, Client(daemon.socket) as client:
        client.pin("three")
        wait_until((daemon.directory / "state" / "models.json").exists)
        pinned = (*sets[:3], f"state-dir={daemon.directory / 'state'}")
        path.write_text(text.replace("{}", "1000000"))
        checked = document(inferd("config", "check", str(path), "--json", *pinned))
        assert "three (" in " ".join(checked["warnings"])


@pytest.mark.parametrize("value", ["3", '["a/b"]', "[1]", f"{['m'] * 65}"])
def test_a_wrong_list_is_an_error(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[daemon]\npreload = {value}\n")
    with pytest.raises(ConfigError, match=r"\[daemon\] preload: "):
        load_config({"config": path}, {})
    assert load_config({"preload": "a, b,a"}, {}).preload == ("a", "b")
