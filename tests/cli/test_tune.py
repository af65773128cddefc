"""`inferd tune`, as a process, on tiny models."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from inferd.backends import LanguageModel, ModelSpec, load_model
from inferd.backends.library import LLAMA_COMMIT
from inferd.backends.tuning_choice import ChosenSetting, LoadTuning, TuningRecord, this_cpu
from inferd.cli.options import EXIT_BUSY, EXIT_INTERRUPTED
from inferd.daemon.models.tuning_records import TuningRecords
from inferd.daemon.tuning.stages import SHARES
from tests.daemon.command_line import inferd, inferd_process, on_terminal
from tests.models import ONE_THREAD
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

from .home import Home, home_of

SHORT = ("--seconds", "20", "--wait", "0")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with home_of(monkeypatch) as found:
        models = found.folder / "models"
        models.mkdir()
        write_tiny("llama", models)
        found.configure(f'[daemon]\nmodels-dir = "{models}"\ncores = 1\n{ONE_THREAD}')
        yield found


def records_of(home: Home) -> tuple[TuningRecord, ...]:
    return TuningRecords(home.state).of_machine(this_cpu(1).key, LLAMA_COMMIT)


def test_a_measurement_prints_a_table_for_each_setting_and_stores_nothing(home: Home) -> None:
    done = home.inferd("tune", "tiny-llama", *SHORT)
    assert done.status == 0, done
    head, _, rest = done.stdout.partition("\n\n")
    assert head.startswith("llama, 3 layers, ") and "1 core; " in head
    assert [line.partition(" (")[0] for line in rest.splitlines() if " round" in line] == [
        "Flash attention", "Micro-batches of a prompt of 512 tokens",
    ]  # fmt: skip
    assert "flash-attn on " in rest and "4 STREAMS" in rest
    assert records_of(home) == () and home.daemons() == []


def test_the_stored_choice_is_the_printed_one(home: Home) -> None:
    done = home.inferd("tune", "tiny-llama", "--apply", "--json", *SHORT)
    found = msgspec.json.decode(done.stdout)
    assert {stage["name"] for stage in found["stages"]} <= set(SHARES)
    assert found["cores"] == 1 and found["build"] == LLAMA_COMMIT
    records = records_of(home)
    if not found["applied"]:  # the machine is busy
        assert done.status == EXIT_BUSY and records == ()
        return
    (record,) = records
    assert done.status == 0 and record.requested
    assert msgspec.to_builtins(record.chosen) == found["chosen"]
    assert record.reason == found["reason"] and record.shape.layers == 3
    file = home.folder / "models" / "tiny-llama.gguf"
    tuning = LoadTuning(cpu=this_cpu(1), records=records)
    model = load_model(
        ModelSpec(name="m", path=str(file), threads=1, tuning=tuning), lambda _: True
    )
    with contextlib.closing(model):
        assert isinstance(model, LanguageModel) and model.tuning is not None
        assert model.tuning.chosen == ChosenSetting(
            setting=record.chosen, source="measured", reason=record.reason
        )


def test_a_measurement_that_is_too_short_stores_nothing(home: Home) -> None:
    done = home.inferd("tune", "tiny-llama", "--apply", "--seconds", "1", "--wait", "0", "--json")
    found = msgspec.json.decode(done.stdout)
    if found["applied"]:  # nine rounds of all probes in less than half a second
        assert done.status == 0 and len(records_of(home)) == 1
    else:
        assert done.status == EXIT_BUSY and records_of(home) == ()
        assert "1 s were too short to compare both kinds of attention" in done.stderr


def test_an_interrupted_measurement_stores_nothing_and_leaves_no_process(home: Home) -> None:
    arguments = ("tune", "tiny-llama", "--apply", "--seconds", "600", "--wait", "0")
    with inferd_process(*arguments, start_new_session=True) as process:
        command = psutil.Process(process.pid)
        wait_until(lambda: bool(command.children()))
        (child,) = command.children()
        wait_until(lambda: child.cpu_times().user > 0.5)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert process.returncode == EXIT_INTERRUPTED
    assert (stdout, b"Traceback" in stderr) == (b"", False)
    wait_until(lambda: not child.is_running())
    assert records_of(home) == ()


def test_a_killed_command_leaves_no_process(home: Home) -> None:
    with inferd_process("tune", "tiny-llama", "--seconds", "600", "--wait", "0") as process:
        command = psutil.Process(process.pid)
        wait_until(lambda: bool(command.children()))
        (child,) = command.children()
        wait_until(lambda: child.cpu_times().user > 0.5)
        process.kill()
        wait_until(lambda: not child.is_running())


def test_a_pull_on_a_terminal_measures_the_model(home: Home) -> None:
    with on_terminal("pull", str(write_tiny("calls", home.folder)), socket="") as terminal:
        terminal.until("measuring the faster attention here, 5 s at most (Ctrl-C skips it)")
        shown = terminal.until_end()
    records = records_of(home)
    if records:
        assert records[0].reason in shown.replace("\r\n", "\n") and not records[0].requested
    else:  # the machine is busy
        assert "not decided: a daemon measures it while it is idle" in shown
    assert 'try: inferd run tiny-calls "Say hello."' in shown


def test_the_measurement_of_a_pulled_model_can_be_skipped(home: Home) -> None:
    with on_terminal("pull", str(write_tiny("calls", home.folder)), socket="") as terminal:
        terminal.until("(Ctrl-C skips it)")
        terminal.interrupt()
        shown = terminal.until_end()
        assert terminal.process.wait(60) == 0
    assert "skipped: a daemon measures it while it is idle" in shown
    assert "try: inferd run tiny-calls" in shown and records_of(home) == ()


def test_a_pull_of_a_script_and_one_with_tuning_off_measure_nothing(home: Home) -> None:
    done = home.inferd("pull", str(write_tiny("calls", home.folder)))
    assert done.status == 0 and "measuring" not in done.stderr
    home.configure(home.config.read_text().replace("cores = 1", "cores = 1\ntuning = false"))
    arguments = ("pull", str(write_tiny("chatml", home.folder)))
    with on_terminal(*arguments, socket="") as terminal:
        assert "measuring" not in terminal.until_end()


def test_an_unknown_model_gets_a_suggestion(home: Home) -> None:
    done = home.inferd("tune", "tiny-lama")
    assert done.status == 1
    assert "there is no model 'tiny-lama'" in done.stderr
    assert "did you mean 'tiny-llama'?" in done.stderr


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("echo", "an echo model computes nothing"),
        ("./missing.gguf", "the file ./missing.gguf does not exist"),
    ],
)
def test_a_model_without_a_file_is_refused(home: Home, model: str, message: str) -> None:
    done = home.inferd("tune", model)
    assert done.status == 1 and message in done.stderr


def test_a_state_directory_of_another_user_is_refused_before_the_measurement(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.state.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: home.state.stat().st_uid + 1)
    result = inferd("tune", "tiny-llama", "--apply")
    assert result.exit_code == 1
    assert "belongs to another user" in result.stderr and "sudo -u inferd" in result.stderr
