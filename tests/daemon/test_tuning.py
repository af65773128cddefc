"""Settings by measurement in a real daemon: when it measures, and what the next load does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.backends.tuning_choice import RULES, this_cpu
from inferd.daemon.state_files import TUNING_FILE
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd
from tests.daemon.log_events import JSON, Event, named
from tests.echo import echo_model
from tests.models import short_smollm2
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

SERVE = """
import sys
from inferd.daemon.app import serve
from inferd.daemon.config.sources import load_config
from inferd.daemon.models.tuner import TuningPace

_, *pairs = sys.argv[1:]
flags = {key.removeprefix("--"): value for key, value in zip(pairs[::2], pairs[1::2])}
pace = TuningPace(idle_s=0.05, retry_s=0.05, external_cores_max=1e9)
read = lambda: load_config(flags)
sys.exit(serve(read(), read=read, tuning_pace=pace))
"""
SECONDS_MAX = 150.0
"""A real measurement ends within twice the time for its slices."""
NEVER_MS = 600_000
"""A probe of this time is aborted, or else a test fails."""


class TuningDaemon(RunningDaemon):
    """A daemon that measures soon, whatever else the machine does."""

    def _command(self) -> list[str]:
        options = super()._command()[len(("python", "-m", "inferd", "serve")) :]
        return [sys.executable, "-c", SERVE, "serve", *options]


def daemon_with(*models: str, settings: str = "") -> TuningDaemon:
    return TuningDaemon("\n".join([JSON + 'log-level = "debug"', settings, *models]))


def rule_has_flash() -> bool:
    cpu = this_cpu()
    rule = RULES.get((cpu.vendor, cpu.family))
    return rule is not None and rule.flash_attn


def share_against_rule() -> float:
    """Return the time with flash attention for which the rule for this CPU is wrong."""
    return 2.0 if rule_has_flash() else 0.5


def logged(daemon: RunningDaemon, event: str, count: int = 1) -> list[Event]:
    """Wait until the log has *count* such events, and return them."""
    wait_until(lambda: len(named(daemon, event)) >= count, SECONDS_MAX)
    return named(daemon, event)


def until_measuring(daemon: RunningDaemon) -> None:
    """Wait until a model measures now: a load and the turn after it may be two begins."""
    wait_until(
        lambda: len(named(daemon, "tuning.began")) > len(named(daemon, "tuning.stopped")),
        SECONDS_MAX,
    )


def setting(client: Client, name: str) -> dict[str, Any]:
    """Return the setting of a loaded model as `show` describes it."""
    found = client.show(name)["setting"]
    assert found is not None
    return found


def fingerprint(client: Client, name: str) -> str:
    info = client.show(name)["info"]
    assert info is not None
    return str(info["fingerprint"])


def turn(client: Client, name: str, text: str = "hello") -> str:
    with client.session(name, raw=True, options={"n-predict": 4, "temp": 0}) as session:
        return str(session.chat(text))


def test_an_idle_model_is_measured_and_its_next_load_uses_the_result() -> None:
    model = echo_model("e", probe_ms=1, probe_share=share_against_rule(), probe_bytes=1)
    with daemon_with(model) as daemon, Client(daemon.socket) as client:
        turn(client, "e")
        before, states = setting(client, "e"), fingerprint(client, "e")
        (measured,) = logged(daemon, "tuning.measured")
        after, states_after = setting(client, "e"), fingerprint(client, "e")
        client.unload_model("e", force=True)
        turn(client, "e")
        loaded = setting(client, "e")

        assert before["source"] in ("rule", "default")
        assert before["flash_attn"] == after["flash_attn"] == rule_has_flash()
        assert states_after == states  # the loaded model keeps its states
        assert after["next_load"]["flash_attn"] == measured["flash_attn"] != rule_has_flash()
        assert loaded["flash_attn"] == measured["flash_attn"]
        assert (loaded["source"], loaded["reason"]) == ("measured", measured["reason"])
        assert fingerprint(client, "e") != states
        assert measured["slices"] > 0
        assert named(daemon, "model.loaded")[-1]["setting_by"] == "measured"
        assert (daemon.directory / "state" / TUNING_FILE).exists()
        shown = inferd("show", "e", socket=daemon.socket).stdout
        assert f"measured here: {measured['reason']}" in shown


def test_a_worker_in_place_of_one_that_died_keeps_the_setting() -> None:
    model = echo_model("e", probe_ms=1, probe_share=share_against_rule(), probe_bytes=1)
    with daemon_with(model) as daemon, Client(daemon.socket) as client:
        turn(client, "e")
        logged(daemon, "tuning.measured")
        states = fingerprint(client, "e")
        os.kill(client.show("e")["pid"], signal.SIGKILL)
        logged(daemon, "worker.died")
        turn(client, "e")
        assert fingerprint(client, "e") == states
        client.unload_model("e", force=True)
        turn(client, "e")
        assert fingerprint(client, "e") != states


def test_states_of_the_other_setting_are_deleted_once_it_is_in_force() -> None:
    model = echo_model("e", probe_ms=1, probe_share=share_against_rule(), probe_bytes=1)
    with daemon_with(model) as daemon, Client(daemon.socket) as client:
        with Client(daemon.socket) as writer:
            graph = writer.load_by_name("e")
            context = writer.init_execution_context_with_session_id(graph, "kept")
            writer.set_input(context, 0, b"once upon a time there was a king " * 20)
            writer.compute(context)
        folder = daemon.directory / "state" / "kv" / fingerprint(client, "e")

        def files() -> list[Path]:
            return [path for path in folder.rglob("*") if path.is_file()]

        logged(daemon, "tuning.measured")
        client.unload_model("e", force=True)
        logged(daemon, "model.unloaded")
        assert len(files()) == 1
        turn(client, "e")
        (deleted,) = logged(daemon, "kv.other_setting_deleted")
        assert (deleted["model"], deleted["files"]) == ("e", 1)
        wait_until(lambda: not files())


def test_another_daemon_on_the_same_state_uses_the_result() -> None:
    model = echo_model("e", probe_ms=1, probe_share=share_against_rule(), probe_bytes=1)
    with daemon_with(model) as daemon:
        with Client(daemon.socket) as client:
            turn(client, "e")
            logged(daemon, "tuning.measured")
        daemon.stop()
        daemon.start_again()
        with Client(daemon.socket) as client:
            turn(client, "e")
            assert setting(client, "e")["source"] == "measured"


def test_a_turn_in_a_slice_begins_at_once() -> None:
    model = echo_model("e", probe_ms=NEVER_MS, probe_bytes=1)
    with daemon_with(model) as daemon, Client(daemon.socket) as client:
        for _ in range(5):
            turn(client, "e")
            until_measuring(daemon)
        assert turn(client, "e", "hello") == "hell"


def test_a_query_in_a_slice_is_answered_at_once() -> None:
    model = echo_model("e", probe_ms=NEVER_MS, probe_bytes=1)
    with (
        daemon_with(model) as daemon,
        Client(daemon.socket) as client,
        client.session("e", raw=True) as session,
    ):
        session.chat("hello")
        until_measuring(daemon)
        assert session.chat("again") == "again"


def test_a_model_with_work_stops_the_measurement_of_another() -> None:
    models = echo_model("e", probe_ms=NEVER_MS, probe_bytes=1), echo_model("other", step_ms=5)
    with daemon_with(*models) as daemon, Client(daemon.socket) as client:
        turn(client, "e")
        until_measuring(daemon)
        with client.session("other", raw=True, options={"n-predict": 40}) as session:
            stream = iter(session.stream("x" * 60))
            next(stream)
            before = len(named(daemon, "tuning.began"))
            for _ in range(20):
                next(stream)
                assert len(named(daemon, "tuning.began")) == before
            assert "".join(stream)
        logged(daemon, "tuning.began", before + 1)


def test_a_worker_that_dies_in_a_measurement_is_replaced_and_not_measured_again() -> None:
    models = (
        echo_model("e", probe_ms=NEVER_MS, probe_bytes=1),
        echo_model("next", probe_ms=1, probe_bytes=1, vocabulary=1),
    )
    with daemon_with(*models) as daemon, Client(daemon.socket) as client:
        turn(client, "e")
        until_measuring(daemon)
        os.kill(client.show("e")["pid"], signal.SIGKILL)
        logged(daemon, "tuning.worker_died")
        count = len(named(daemon, "tuning.began"))
        assert turn(client, "e") == "hell"
        turn(client, "next")
        logged(daemon, "tuning.measured")
        began = [event["model"] for event in named(daemon, "tuning.began")]
        assert began[count:] and set(began[count:]) == {"next"}


def test_a_reload_of_the_configuration_switches_it_on() -> None:
    model = echo_model("e", probe_ms=1, probe_bytes=1)
    with daemon_with(model, settings="tuning = false") as daemon, Client(daemon.socket) as client:
        turn(client, "e")
        config = daemon.directory / "config.toml"
        config.write_text(config.read_text().replace("tuning = false", "tuning = true"))
        os.kill(daemon.pid, signal.SIGHUP)
        logged(daemon, "tuning.measured")
        order = [e["event"] for e in named(daemon, "config.read_again", "tuning.began")]
        assert order[0] == "config.read_again"


def test_short_memory_leaves_the_default() -> None:
    model = echo_model("e", probe_ms=1, weight_bytes=900, probe_bytes=200)
    settings = "memory-bytes = 1000"
    with daemon_with(model, settings=settings) as daemon, Client(daemon.socket) as client:
        turn(client, "e")
        logged(daemon, "tuning.postponed")
        assert turn(client, "e") == "hell"
        assert named(daemon, "tuning.began") == []


def test_a_load_gets_the_memory_of_a_measurement() -> None:
    models = (
        echo_model("e", probe_ms=NEVER_MS, weight_bytes=400, probe_bytes=300),
        echo_model("large", weight_bytes=500),
    )
    settings = "memory-bytes = 1000"
    with daemon_with(*models, settings=settings) as daemon, Client(daemon.socket) as client:
        turn(client, "e")
        until_measuring(daemon)
        turn(client, "large")
        assert client.show("e")["state"] == "ready"


def test_a_configured_setting_is_neither_measured_nor_replaced() -> None:
    models = (
        f"""[models.set]
file = "{short_smollm2()}"
threads = 1
ctx-size = 256
flash-attn = "on"
""",
        echo_model("e", probe_ms=1, probe_bytes=1),
    )
    with daemon_with(*models) as daemon, Client(daemon.socket) as client:
        turn(client, "set")
        turn(client, "e")
        logged(daemon, "tuning.measured")
        assert {event["model"] for event in named(daemon, "tuning.began")} == {"e"}
        assert setting(client, "set")["source"] == "configured"


@pytest.mark.model
def test_a_model_of_llama_cpp_is_measured_by_itself(tmp_path: Path) -> None:
    """It is tiny, so that the measurement reaches its bound on samples within seconds. Its context
    is too short for the deep probes.
    """
    model = f"""[models.tiny]
file = "{write_tiny("llama", tmp_path)}"
slots = 4
threads = 1
ctx-size = 1024
"""
    with daemon_with(model) as daemon, Client(daemon.socket) as client:
        answer = turn(client, "tiny")
        (measured,) = logged(daemon, "tuning.measured")
        assert measured["seconds"] < 125
        client.unload_model("tiny", force=True)
        assert turn(client, "tiny") == answer
        found = setting(client, "tiny")
        assert (found["source"], found["flash_attn"]) == ("measured", measured["flash_attn"])
