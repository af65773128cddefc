"""The daemon's events: their fields and levels, and that they hold no texts of users."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from inferd import Client
from inferd.backends.errors import BackendError, InferdError, InvalidArgument, PermissionDenied
from inferd.backends.library import LEVELS, LibraryLog
from inferd.daemon.config.forms import LOGGERS
from inferd.daemon.config.settings import Config
from inferd.daemon.config.sources import ConfigError, load_config
from inferd.daemon.core import Daemon
from inferd.daemon.logs.setup import LibraryHandler, Logs
from inferd.daemon.workers.worker_log import GATHER_S, WorkerLines, cut_quotes
from inferd.ipc.messages import CALLS, LogLevelParams
from inferd.scheduler.engine.reporter import TEXT_CHARACTERS_MAX
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.daemon.log_events import JSON, Event, events, named
from tests.daemon.other_users import Stranger
from tests.daemon.service.test_reload import managed, reload
from tests.models import short_smollm2
from tests.raw import Closed, RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

MODELS = """
[models.fails]
backend = "echo"
[models.fails.echo]
fail_at_step = 1

[models.dies]
backend = "echo"
[models.dies.echo]
abort_on = "die now"
"""
DEBUG = f"{JSON}log-level = 'debug'\n{MODELS}"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(DEBUG) as running:
        yield running


def of_request(daemon: RunningDaemon, request: str) -> dict[str, Event]:
    """Return the events of a request by their names."""
    return {e["event"]: e for e in events(daemon) if e.get("request") == request}


def number_of(client: RawClient, daemon: RunningDaemon) -> int:
    """Return the number of a connection, the last one that was opened."""
    client.call("models")
    return int(named(daemon, "connection.opened")[-1]["connection"])


# The ids of requests.


def test_every_event_names_its_time_its_level_and_its_logger(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client, client.session("echo") as session:
        session.chat("hello")
    found = events(daemon)
    for event in found:
        assert list(event)[:4] == ["timestamp", "level", "logger", "event"]
        assert event["timestamp"].endswith("Z")
        assert event["level"] in LEVELS and event["logger"] in LOGGERS
    assert {"daemon", "ipc", "scheduler"} <= {event["logger"] for event in found}
    [restored] = named(daemon, "sessions.restored")
    assert restored["level"] == "info"


def test_a_request_has_one_id_in_the_daemon_and_in_the_worker(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        number = number_of(client, daemon)
        context = client.context()
        turn = client.start_request("chat", context=context, prompt="hello", raw=True)
        client.wait_result(turn)
        found = of_request(daemon, f"{number}.{turn}")
        assert list(found) == ["task.queued", "task.started", "task.finished", "call.done"]
        assert {event.get("connection") for event in found.values()} == {None, number}
        done, finished = found["call.done"], found["task.finished"]
        assert done["call"] == "chat" and done["logger"] == "ipc" and done["seconds"] > 0
        assert finished["logger"] == "scheduler" and finished["model"] == "echo"
        [model] = [m for m in client.call("models")["models"] if m["name"] == "echo"]
        assert finished["pid"] == model["pid"] != daemon.pid
        assert (finished["output_tokens"], finished["stop_reason"]) == (6, "eos")


def test_a_load_has_the_id_of_its_request_and_its_unload_has_none() -> None:
    with running_daemon(DEBUG) as daemon, RawClient(daemon.socket) as client:
        client.call("load_by_name", name="echo")
        client.call("unload_model", name="echo", force=True)
        wait_until(lambda: named(daemon, "model.unloaded"))
        loading, loaded, left = named(daemon, "model.loading", "model.loaded", "model.unloaded")
        assert loading["request"] == loaded["request"] == "1.1"
        assert "request" not in left and "connection" not in left


def test_a_step_that_fails_names_its_requests(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        number = number_of(client, daemon)
        context = client.context("fails")
        turn = client.start_request("chat", context=context, prompt="hello", raw=True)
        with pytest.raises(BackendError):
            client.wait_result(turn)
    request = f"{number}.{turn}"
    [step] = named(daemon, "step.failed")
    assert (step["level"], step["logger"], step["model"]) == ("error", "backends", "fails")
    assert step["requests"] == [request] and step["cause"]
    found = of_request(daemon, request)
    assert found["task.failed"]["level"] == "info"
    assert found["task.failed"]["error"] == found["call.refused"]["error"] == "RuntimeError"


def test_a_worker_that_dies_names_the_requests_it_computed(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        number = number_of(client, daemon)
        context = client.context("dies")
        turn = client.start_request("chat", context=context, prompt="die now", raw=True)
        with pytest.raises(BackendError):
            client.wait_result(turn)
    died = named(daemon, "worker.died")
    assert died and all(event["requests"] == [f"{number}.{turn}"] for event in died)
    assert all("request" not in event and "connection" not in event for event in died)
    [poisonous] = named(daemon, "task.quarantined")
    assert poisonous["request"] == f"{number}.{turn}"


def test_a_refused_connection_cannot_control_a_terminal() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket, hello=False) as client:
        client.write([0, {"protocol": [1, 0], "software": "\x1b[2J\x1b]0;mine\x07 it"}])
        client.write([99])
        with pytest.raises(Closed):
            while True:
                client.read_message()
        wait_until(lambda: "connection.refused" in daemon.log)
        assert "\x1b" not in daemon.log and "u001b[2J" in daemon.log
        assert "[ipc]" in daemon.log


def test_the_log_names_the_software_of_a_client_with_a_wrong_label() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket, label="a b") as client:
        assert isinstance(client.goodbye(), InvalidArgument)
        wait_until(lambda: "connection.refused" in daemon.log)
        assert "software=raw" in daemon.log


# Levels.


def levels_of(flags: dict[str, Any], environ: dict[str, str] | None = None) -> dict[str, str]:
    return load_config(flags, environ or {}).log_levels


def test_levels_of_loggers_come_from_flags_the_environment_or_a_table(tmp_path: Path) -> None:
    wanted = {"scheduler": "debug", "llama": "error"}
    assert levels_of({"log_levels": "scheduler=debug, llama=error"}) == wanted
    assert levels_of({}, {"INFERD_LOG_LEVELS": "scheduler=debug,llama=error"}) == wanted
    file = tmp_path / "config.toml"
    file.write_text("[daemon.log-levels]\nscheduler = 'debug'\nllama = 'error'\n")
    assert levels_of({"config": file}) == wanted
    file.write_text("[daemon]\nlog_levels = 'scheduler=debug,llama=error'\n")
    assert levels_of({"config": file}) == wanted
    assert levels_of({}) == {}


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("lama=debug", "'lama' is not a logger: there are daemon, ipc, sessions, jobs, scheduler"),
        ("llama=loud", "llama: 'loud' is not one of debug, info, warning, error"),
        ("debug", "'debug' is not a logger"),
        ("llama", "'llama': '' is not one"),
    ],
)
def test_a_wrong_logger_or_level_is_refused(text: str, reported: str) -> None:
    with pytest.raises(ConfigError) as caught:
        levels_of({"log_levels": text})
    assert reported.replace("'llama': ''", "llama: ''") in str(caught.value)
    with pytest.raises(ConfigError):
        levels_of({"log_levels": 3})
    with pytest.raises(ConfigError):
        levels_of({"log_levels": {"llama": ["debug"]}})


def chat(daemon: RunningDaemon, text: str = "hello") -> None:
    with Client(daemon.socket) as client, client.session("echo") as session:
        session.chat(text)


def test_a_logger_has_a_level_of_its_own() -> None:
    config = JSON + "log-level = 'warning'\n[daemon.log-levels]\nscheduler = 'debug'\n"
    with running_daemon(config) as daemon:
        chat(daemon)
        assert {event["logger"] for event in events(daemon)} == {"scheduler"}
        assert named(daemon, "task.finished")


def test_levels_change_while_it_runs_in_the_workers_too() -> None:
    with running_daemon(JSON) as daemon:
        chat(daemon)
        assert not named(daemon, "task.queued", "call.done")
        done = inferd("log-level", "scheduler=debug", "--json", socket=daemon.socket)
        levels = dict.fromkeys(LOGGERS, "info") | {"scheduler": "debug"}
        assert document(done) == {"levels": levels}
        chat(daemon)
        assert len(named(daemon, "task.queued")) == 1 and not named(daemon, "call.done")
        [reported] = named(daemon, "log.levels")
        assert reported["levels"] == levels and "request" in reported
        with Client(daemon.socket) as client:
            assert client.log_level() == levels == client.stats()["log"]["levels"]
        shown = inferd("log-level", "error", "ipc=debug", socket=daemon.socket).stdout
        assert ["scheduler", "error"] in [line.split() for line in shown.splitlines()]
        chat(daemon)
        assert len(named(daemon, "task.queued")) == 1 and named(daemon, "call.done")


def test_a_level_set_during_a_load_reaches_the_worker() -> None:
    slow = '[models.slow]\nbackend = "echo"\n[models.slow.echo]\nload_ms = 3000\n'
    with running_daemon(JSON + slow) as daemon, RawClient(daemon.socket) as client:
        load = client.start_request("load_by_name", name="slow")
        wait_until(lambda: client.call("show", name="slow")["models"][0]["progress"])
        client.call("log_level", levels={"scheduler": "debug"})
        assert not named(daemon, "model.loaded")
        graph = client.wait_result(load)["graph"]
        context = client.call("init_execution_context", graph=graph)["context"]
        client.call("chat", context=context, prompt="hello", raw=True)
        assert named(daemon, "task.finished")


def test_a_wrong_level_is_refused_and_changes_nothing() -> None:
    with running_daemon() as daemon, Client(daemon.socket) as client:
        before = client.log_level()
        with pytest.raises(InvalidArgument, match="'lama' is not a logger"):
            client.log_level({"lama": "debug", "ipc": "debug"})
        assert client.log_level() == before
        result = inferd("log-level", "scheduler=loud", socket=daemon.socket)
        assert result.exit_code == 1 and "'loud' is not one of" in result.stderr


@pytest.mark.asyncio
async def test_only_an_operator_changes_levels(tmp_path: Path) -> None:
    """Called without a socket, since these tests run as one user."""
    somebody = Stranger(os.getuid() + 1)
    config = Config(
        socket=tmp_path / "s", models_dir=tmp_path, state_dir=tmp_path, cores=1, kv_ram_bytes=0
    )
    async with anyio.create_task_group() as group:
        daemon = Daemon(config, group, 1)
        request: Any = SimpleNamespace(
            row=CALLS["log_level"],
            call="log_level",
            number=1,
            params=LogLevelParams(),
            connection=somebody,
        )
        with pytest.raises(PermissionDenied):
            await daemon.run_call(request)


def test_levels_in_the_file_are_in_force_after_a_reload() -> None:
    base = JSON + '[models.m]\nbackend = "echo"\n'
    louder = base.replace("[models.m]", "[daemon.log-levels]\nscheduler = 'debug'\n[models.m]")
    with managed(base) as (daemon, manager, client):
        context = client.context("m")
        client.call("chat", context=context, prompt="a", raw=True)
        reload(daemon, manager, louder)
        client.call("chat", context=context, prompt="b", raw=True)
        assert len(named(daemon, "task.finished")) == 1
        client.call("log_level", levels={"scheduler": "error", "ipc": "debug"})
        reload(daemon, manager, louder)
        levels = client.call("log_level")["levels"]
        assert (levels["scheduler"], levels["ipc"]) == ("debug", "info"), "as the file says"
        reload(daemon, manager, base)
        client.call("chat", context=context, prompt="c", raw=True)
        assert len(named(daemon, "task.finished")) == 1


# Output of a worker's library.


def test_llama_cpp_s_lines_are_events_of_the_model(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    config = JSON + "[daemon.log-levels]\nllama = 'debug'\n"
    with (
        running_daemon(config, models_dir=tmp_path) as daemon,
        RawClient(daemon.socket) as client,
    ):
        client.call("load_by_name", name="tiny-llama")
        said = wait_until(lambda: named(daemon, "llama.output"))
        assert all(e["logger"] == "llama" and e["model"] == "tiny-llama" for e in said)
        assert all(0 < len(e["text"]) <= 2000 and "\n" not in e["text"] for e in said)
        assert any(e["level"] == "debug" and "llama" in e["text"] for e in said)
        assert len({e["text"] for e in said}) == len(said), "each once a minute"


def test_information_of_llama_cpp_is_not_logged_by_default(tmp_path: Path) -> None:
    for kind in ("llama", "unheard-of"):
        write_tiny(kind, tmp_path)
    with (
        running_daemon(JSON, models_dir=tmp_path) as daemon,
        RawClient(daemon.socket) as client,
    ):
        client.call("load_by_name", name="tiny-llama")
        with pytest.raises(InferdError):
            client.call("load_by_name", name="tiny-unheard-of")
        said = wait_until(lambda: named(daemon, "llama.output"))
        assert {e["level"] for e in said} <= {"warning", "error"}
        assert any(e["level"] == "error" and e["model"] == "tiny-unheard-of" for e in said)


Heard = list[tuple[str, str, str]]


async def heard_of(program: str) -> Heard:
    """Return the events of a process that runs a Python program."""
    heard: Heard = []
    lines = WorkerLines(lambda level, event, text: heard.append((level, event, text)))
    process = await anyio.open_process(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=lines.writer
    )
    lines.close_writer()
    await process.wait()
    lines.close()
    return heard


@pytest.mark.asyncio
async def test_the_last_output_of_a_dying_process_is_an_event() -> None:
    program = "import os\nos.write(2, b'<4>careful\\n')\nos.write(2, b'x.cpp:7: GGML_ASSERT(no)')"
    assert await heard_of(program + "\nos.abort()") == [
        ("warning", "llama.output", "careful"),
        ("error", "worker.output", "x.cpp:7: GGML_ASSERT(no)"),
    ]
    [(level, event, text)] = await heard_of("1 / 0")
    assert (level, event) == ("error", "worker.output") and text.endswith("division by zero")
    deep = "def a(n): return b(n - 1) if n else 1 / 0\ndef b(n): return a(n)\n"
    [(_, _, text)] = await heard_of(f"{deep}a(90)")
    assert text.startswith("Traceback") and text.endswith("division by zero")
    assert len(text) <= 2000
    quoting = "import os\nos.write(2, b'after accepting piece: a' + b' secret' * 999 + b'\\nb')"
    assert await heard_of(quoting) == [("error", "worker.output", "after accepting piece:")]


@pytest.mark.asyncio
async def test_a_process_that_outlives_the_worker_does_not_block_the_close() -> None:
    program = (
        "import subprocess\nyes = subprocess.Popen(['yes'], stdout=2)\n"
        "while 'wchar: 0' in open(f'/proc/{yes.pid}/io').read(): pass"
    )
    heard = await heard_of(program)
    assert [event for _, event, _ in heard] == ["worker.output"]


@pytest.mark.asyncio
async def test_endless_output_of_a_process_is_cut() -> None:
    program = (
        "import os\nos.set_blocking(2, True)\n"
        "for n in range(3000): os.write(2, b'x' * 3000 + b'\\n')"
    )
    began = time.monotonic()
    heard = await heard_of(program)
    took = time.monotonic() - began
    assert 0 < len(heard) <= 2 + took / GATHER_S
    assert all(len(text) <= 2000 for _, _, text in heard)


def test_texts_quoted_by_llama_cpp_are_cut_off() -> None:
    said = "what():  Unexpected empty grammar stack after accepting piece: my secret\nof two lines"
    assert cut_quotes(said).endswith("accepting piece:")
    assert cut_quotes("as it is") == "as it is"


def library(least: str = "warning") -> tuple[LibraryLog, list[float], list[tuple[str, str]]]:
    now, reported = [0.0], []
    log = LibraryLog(seconds=lambda: now[0])
    log.least = LEVELS[least]
    log.write_line = lambda level, text: reported.append((level, text))
    return log, now, reported


def test_lines_of_the_library_are_filtered_by_level_and_not_repeated() -> None:
    log, now, reported = library()
    for level in LEVELS:
        log.log_line(level, "a")
    assert reported == [("warning", "a")], "the same line, whatever its level"
    now[0] = 61.0
    log.log_line("error", "a")
    assert reported == [("warning", "a"), ("error", "a")]


def test_lines_of_the_library_are_bounded_and_omitted_lines_are_counted() -> None:
    log, now, reported = library()
    for number in range(1000):
        log.log_line("error", f"line {number}")
    assert len(reported) == 200
    now[0] = 11.0
    log.log_line("error", "at last")
    assert reported[200:] == [("warning", "800 lines were left out"), ("error", "at last")]


@pytest.mark.asyncio
async def test_a_library_s_log_line_from_a_thread_is_logged_by_the_loop() -> None:
    """One thread owns the file: after a close by another its descriptor may be another file's."""
    owner = Logs()
    owner.bind_loop(asyncio.get_running_loop())
    record = logging.LogRecord("urllib3", logging.WARNING, "", 0, "wrong %s", ("headers",), None)
    with capture_logs() as logged:
        thread = threading.Thread(target=LibraryHandler(owner).emit, args=(record,))
        thread.start()
        thread.join()
        assert logged == []
        await anyio.lowlevel.checkpoint()
        [event] = logged
        assert (event["source"], event["text"]) == ("urllib3", "wrong headers")
        LibraryHandler(owner).emit(record)
        assert len(logged) == 2, "its own thread need not wait"


# Texts of users.


SECRET = "zebra7f3a"
"""Part of every text; the echo model repeats it."""


def forms(text: str) -> list[str]:
    """Return the forms in which a log could contain a text."""
    raw = text.encode()
    return [text, text[1:], base64.b64encode(raw).decode()[:8], raw.hex(), str(list(raw))[1:20]]


def say_everything(daemon: RunningDaemon) -> None:
    """Make every kind of call with the secret, those that fail included."""
    with RawClient(daemon.socket) as raw:
        graph = raw.call("load_by_name", name="echo")["graph"]
        context = raw.call("init_execution_context", graph=graph)["context"]
        raw.set_input(context, SECRET.encode())
        raw.call("compute", context=context)
        assert raw.output(context) == SECRET.encode()
        raw.set_input(context, SECRET.encode())
        raw.compute_single(context)
        raw.call("fini_single", context=context)
        tensor = {"data": SECRET.encode(), "dimensions": [1]}
        raw.call("run_inference", context=context, index=0, tensor=tensor)
        prompt = raw.call("prompt_init", graph=graph)["context"]
        raw.call("prompt_compute", context=prompt, prompt=SECRET)
        raw.call("embed", graph=graph, texts=[SECRET])
        raw.call("tokenize", graph=graph, text=SECRET)
        raw.call("detokenize", graph=graph, tokens=list(SECRET.encode()))
        messages = [{"role": "user", "content": SECRET}]
        raw.call("apply_template", graph=graph, messages=messages)
        raw.call("fork_session", context=context, n=1)
        raw.call("rewind", context=context, turns=1)
        raw.call("cancel", context=context)
        fails, dies = raw.context("fails"), raw.context("dies")
        for refused, params in (
            ("chat", {"context": context, "prompt": SECRET, "options": {SECRET: 1}}),
            ("chat", {"context": context, "prompt": SECRET, "options": {"temp": SECRET}}),
            ("chat", {"context": context, "messages": [{"role": SECRET, "content": 3}]}),
            (
                "chat",
                {"context": context, "prompt": SECRET, "options": {"stop-regex": ["(" + SECRET]}},
            ),
            ("chat", {"context": context, "prompt": SECRET * 1000}),
            ("chat", {"context": fails, "prompt": SECRET}),
            ("chat", {"context": dies, "prompt": f"{SECRET} die now"}),
            ("tokenize", {"graph": graph, "text": SECRET, "bos": SECRET}),
        ):
            with pytest.raises(InferdError):
                raw.call(refused, **params)
        left = raw.start_request("stream", context=context, prompt=SECRET * 50, raw=True, credit=1)
        raw.read_message()
        raw.call("cancel", request=left)
    with Client(daemon.socket) as client, client.session("echo", session_id="diary") as session:
        session.chat(SECRET, options={"stop": [SECRET[3:]]})
        assert "".join(session.stream(SECRET))
        session.answers(SECRET, n=2)


def test_no_log_has_texts_of_users_or_models() -> None:
    with running_daemon(DEBUG) as daemon:
        say_everything(daemon)
        daemon.stop()
        found = {event["event"] for event in events(daemon)}
        assert {"task.queued", "task.finished", "task.failed", "call.refused"} <= found
        for form in forms(SECRET):
            assert form not in daemon.log


def test_texts_are_logged_with_log_text_on() -> None:
    with running_daemon(DEBUG.replace("[daemon]", "[daemon]\nlog-text = true")) as daemon:
        chat(daemon, SECRET)
        [queued] = named(daemon, "task.queued")
        [finished] = named(daemon, "task.finished")
        assert SECRET in queued["prompt"] and finished["answer"].startswith(SECRET)
        with Client(daemon.socket) as client:
            assert client.stats()["log"]["texts"] is True
            client.log_level({"scheduler": "info"})
        chat(daemon, "zebra in private")
        assert "in private" not in daemon.log, "it stands in events of the level debug alone"


def test_a_text_that_is_logged_is_bounded() -> None:
    config = DEBUG.replace("[daemon]", "[daemon]\nlog-text = true")
    config += '[models.wide]\nbackend = "echo"\nctx-size = 40000\n'
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with client.session("wide", raw=True) as session:
            session.chat("a" * 15_000, options={"n-predict": 3})
        [queued] = named(daemon, "task.queued")
        [finished] = named(daemon, "task.finished")
        assert len(queued["prompt"]) == TEXT_CHARACTERS_MAX == 10_000
        assert finished["answer"] == "aaa"


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_real_model_s_log_has_no_text_either(tmp_path: Path) -> None:
    (tmp_path / "smollm2.gguf").symlink_to(short_smollm2())
    with running_daemon(DEBUG, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        with client.session("smollm2") as session:
            answer = session.chat(f"Say {SECRET}.", options={"n-predict": 24, "temp": 0})
            with pytest.raises(InvalidArgument, match=SECRET):
                session.chat("no", options={"grammar": f'root ::= "{SECRET}" {SECRET}'})
            session.chat("yes", options={"grammar": f'root ::= "{SECRET} it is"'})
        assert named(daemon, "llama.output")
        for form in [*forms(SECRET), str(answer)[:24]]:
            assert form not in daemon.log
