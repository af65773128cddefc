"""Operation and failures of the service under systemd."""

from __future__ import annotations

import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import ConnectionLost
from tests.echo import echo_model
from tests.models import short_smollm2
from tests.raw import RawClient
from tests.repetitions import repetitions

from .service import SOCKET, UNIT, BootedService

TEXT = "word " * 20
RESTARTS = 6
"""More than systemd allows within ten seconds by itself."""
RELOADS = repetitions(2)


def worker_pid(client: Client, model: str) -> int:
    """Return the process of a model's worker, as the machine numbers it."""
    return int(client.show(model)["pid"])


def part_loaded(status: str) -> int:
    """Return the progress of the only loading model in per cent."""
    shown = re.fullmatch(r"serving; loading: m (\d+)%", status)
    return int(shown[1]) if shown else 0


def chat(service: BootedService, model: str, **options: Any) -> str:
    """Run one turn on a separate connection."""
    with service.client() as client, client.session(model, **options) as session:
        return str(session.chat("hello"))


def test_only_members_of_the_group_can_connect(service: BootedService) -> None:
    refused = service.inferd("run", "echo", "hello", user="bob", check=False)
    assert refused.returncode and "is not open to this user" in refused.stderr, refused
    assert service.show("ActiveState")["ActiveState"] == "inactive", (
        "the refused user has started nothing"
    )
    service.machine.run("usermod", "--append", "--groups=inferd", "ada")
    assert service.inferd("run", "echo", "hello", user="ada").stdout == "hello\n"


def test_systemd_gets_readiness_when_the_socket_answers_and_then_the_status(
    service: BootedService,
) -> None:
    service.configure(echo_model("m", load_ms=1500))
    started = service.machine.start("systemctl", "start", "inferd")
    with RawClient(service.socket, timeout_s=30.0) as early:
        assert started.wait(60) == 0, "what has been told is READY"
        assert service.show("ActiveState", "SubState", "NRestarts") == {
            "ActiveState": "active",
            "SubState": "running",
            "NRestarts": "0",
        }
        assert early.call("stats")["stats"]["socket_activated"] is True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(chat, service, "m")
        service.until("StatusText", lambda text: text.startswith("serving; loading: m "))
        assert answer.result(30) == "hello"
    service.until("StatusText", lambda text: text == "serving")
    assert 'Status: "serving"' in service.systemctl("status", "inferd").stdout


def test_a_reload_holds_when_it_returns_and_fails_with_an_error_in_the_file(
    service: BootedService,
) -> None:
    service.systemctl("start", "inferd")
    with service.client() as client:
        for number in range(20, 20 + RELOADS):
            service.configure(f"[daemon]\nsessions-max = {number}\n")
            service.systemctl("reload", "inferd")
            assert client.stats()["sessions_max"] == number
        service.configure("[daemon]\nsessions-max = 'many'\n")
        refused = service.systemctl("reload", "inferd", check=False)
        assert refused.returncode == 1
        assert client.stats()["sessions_max"] == number
        status = service.systemctl("status", "inferd").stdout
        assert "serving; degraded: config (" in status and "sessions-max" in status
        service.configure("[daemon]\nsessions-max = 30\n")
        service.systemctl("reload", "inferd")
        assert client.stats()["sessions_max"] == 30
    shown = service.show("ActiveState", "StatusText", "NRestarts")
    assert shown == {"ActiveState": "active", "StatusText": "serving", "NRestarts": "0"}


def test_a_daemon_that_hangs_is_replaced_and_its_sessions_come_back(
    service: BootedService,
) -> None:
    assert service.show("WatchdogUSec")["WatchdogUSec"] == "30s", "as it ships"
    with service.override("WatchdogSec=2"), service.client() as client:
        assert chat(service, "echo", session_id="diary") == "hello"
        service.systemctl("kill", "--signal=STOP", "--kill-who=main", "inferd")
        with pytest.raises(ConnectionLost):
            client.stats(timeout=15)
        with service.client() as next_client:
            [session] = next_client.sessions(dormant=True)
            assert session["session_id"] == "diary" and session["turns"] == 1
        shown = service.show("NRestarts", "ActiveState")
        assert shown == {"NRestarts": "1", "ActiveState": "active"}
    said = [e["MESSAGE"] for e in service.entries() if e["SYSLOG_IDENTIFIER"] == "systemd"]
    assert any("Watchdog timeout" in message for message in said), said


def test_a_load_is_given_time_where_the_service_may_run_for_some_time_only(
    service: BootedService,
) -> None:
    service.configure(echo_model("m", load_ms=5000))
    with service.override("WatchdogSec=2", "RuntimeMaxSec=2"):
        with service.client() as client, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(chat, service, "m")
            service.until("StatusText", lambda text: text.startswith("serving; loading: m "))
            assert answer.result(30) == "hello", "loading takes longer than the service may run"
            client.stats()
        service.until("NRestarts", lambda n: n == "1")
        said = [e["MESSAGE"] for e in service.entries() if e["SYSLOG_IDENTIFIER"] == "systemd"]
        assert any("reached runtime time limit" in message for message in said), said


def test_a_daemon_that_hangs_beside_a_load_is_replaced_no_later(service: BootedService) -> None:
    service.configure(echo_model("m", load_ms=5000))
    with service.override("WatchdogSec=2"), ThreadPoolExecutor(1) as pool:
        load = pool.submit(chat, service, "m")
        # Late enough that the daemon has asked for time.
        service.until("StatusText", lambda text: part_loaded(text) >= 40)
        service.mark()
        service.systemctl("kill", "--signal=STOP", "--kill-who=main", "inferd")
        began = time.monotonic()
        service.until("NRestarts", lambda n: n == "1")
        assert time.monotonic() - began < 15.0, "not after the 30 s for which a load asks"
        said = [e["MESSAGE"] for e in service.entries() if e["SYSLOG_IDENTIFIER"] == "systemd"]
        assert any("Watchdog timeout" in message for message in said), said
        with pytest.raises(ConnectionLost):
            load.result(30)


def test_a_worker_killed_with_9_is_replaced_and_the_service_goes_on(
    service: BootedService,
) -> None:
    service.configure(echo_model("m", step_ms=5))
    with service.client() as client, client.session("m", raw=True) as session:
        before = service.show("MainPID", "OOMPolicy")
        assert before["OOMPolicy"] == "continue"
        stream = session.stream(TEXT)
        shown = next(stream)
        worker = worker_pid(client, "m")
        score = (service.machine.root / f"proc/{worker}/oom_score_adj").read_text()
        assert score == "500\n", "the kernel takes it before the daemon"
        service.machine.run("kill", "-9", str(worker))
        assert shown + "".join(stream) == TEXT
        assert worker_pid(client, "m") != worker
        after = service.show("MainPID", "OOMPolicy", "ActiveState", "NRestarts")
    assert after == before | {"ActiveState": "active", "NRestarts": "0"}


def test_stopped_under_load_it_finishes_running_turns(service: BootedService) -> None:
    service.configure(echo_model("m", step_ms=15))
    with service.client() as client, client.session("m", raw=True) as session:
        stream = session.stream(TEXT)
        shown = next(stream)
        stopping = service.machine.start("systemctl", "stop", "inferd")
        service.until("StatusText", lambda text: text == "shutting down; running turns: 1")
        assert service.show("ActiveState")["ActiveState"] == "deactivating"
        assert shown + "".join(stream) == TEXT
        assert stopping.wait(30) == 0
    stopped = service.show("ActiveState", "Result", "ExecMainStatus")
    assert stopped == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}
    group = service.machine.root / "sys/fs/cgroup/system.slice" / UNIT
    assert not group.exists(), "no worker is left"


def test_restarts_refuse_no_connection(service: BootedService) -> None:
    over = threading.Event()
    failures: list[BaseException] = []
    instances: list[int] = []

    def connect() -> None:
        try:
            while not over.is_set():
                with RawClient(service.socket, hello=False, timeout_s=30.0) as client:
                    instances.append(client.server_hello[1]["instance"])
        except BaseException as exc:
            failures.append(exc)

    def served(instance: int) -> None:
        end = time.monotonic() + 30
        while not failures and (not instances or instances[-1] < instance):
            assert time.monotonic() < end
            over.wait(0.01)

    threads = [threading.Thread(target=connect) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        served(1)
        for number in (2, 3):
            service.systemctl("restart", "inferd")
            served(number)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures and set(instances) == {1, 2, 3}


def test_a_client_that_connects_with_a_wrong_file_is_served_once_it_is_corrected(
    service: BootedService,
) -> None:
    service.configure("[daemon]\nno-such-setting = 1\n")
    # As often within seconds as else within a minute.
    with service.override("RestartSec=10ms"), ThreadPoolExecutor(1) as pool:
        assert service.systemctl("start", "inferd", check=False).returncode
        answer = pool.submit(chat, service, "echo")
        service.until("NRestarts", lambda n: int(n) >= RESTARTS)
        assert service.machine.run("systemctl", "is-active", "inferd.socket").stdout == "active\n"
        assert not answer.done()
        service.configure("")
        assert answer.result(30) == "hello"
    assert service.show("ActiveState")["ActiveState"] == "active"


@pytest.mark.model
def test_a_real_model_answers_in_the_service(service: BootedService) -> None:
    model = service.machine.root / "var/lib/inferd/models/smollm2.gguf"
    shutil.copyfile(short_smollm2(), model)
    service.machine.run("chown", "inferd:inferd", "/var/lib/inferd/models/smollm2.gguf")
    model.chmod(0o640)
    answer = service.inferd(
        "run", "smollm2", "Say hello.", "--n-predict", "8", "--temp", "0"
    ).stdout
    assert answer.strip() and service.show("StatusText")["StatusText"] == "serving"


def test_its_socket_outlives_it_and_ends_with_its_own_unit(service: BootedService) -> None:
    service.systemctl("start", "inferd")
    assert service.inferd("stop").returncode == 0
    service.until("ActiveState", lambda state: state == "inactive")
    assert service.inferd("run", "echo", "again").stdout == "again\n"
    service.systemctl("stop", "inferd.socket", "inferd")
    assert not (service.machine.root / SOCKET[1:]).exists()
    shown = service.inferd("run", "echo", "hello", check=False)
    assert shown.returncode and "no daemon answers" in shown.stderr


def test_stopped_it_is_started_by_inferd_start_but_by_no_other_command(
    service: BootedService,
) -> None:
    service.systemctl("stop", "inferd.socket", "inferd")
    refused = service.inferd("start", user="ada", check=False)
    assert refused.returncode == 1 and "only root may start the system service" in refused.stderr
    assert service.inferd("run", "echo", "hello", check=False).returncode == 3
    started = service.inferd("start").stdout
    assert f"is ready at {SOCKET}\n" in started
    shown = service.show("ActiveState", "MainPID")
    assert shown["ActiveState"] == "active" and f"(pid {shown['MainPID']})" in started
    assert "already runs" in service.inferd("start").stdout


def test_a_user_whom_it_refuses_gets_a_daemon_of_their_own_by_inferd_start_alone(
    service: BootedService,
) -> None:
    service.machine.run("usermod", "--groups=", "ada")  # another test may have added inferd
    service.machine.run("install", "--directory", "--owner=ada", "/home/ada", "/home/ada/run")
    own = ("env", "HOME=/home/ada", "XDG_RUNTIME_DIR=/home/ada/run", "INFERD_METRICS=off", "inferd")
    socket = "/home/ada/run/inferd/inferd.sock"
    refused = service.machine.run(*own, "run", "echo", "hello", user="ada", check=False)
    assert refused.returncode == 1 and f"{SOCKET} is not open to this user" in refused.stderr
    try:
        started = service.machine.run(*own, "start", user="ada").stdout
        assert f"is ready at {socket}\nlog: /home/ada/.local/state/inferd/inferd.log\n" in started
        answer = service.machine.run(*own, "run", "echo", "hello", user="ada").stdout
        assert answer == "hello\n"
    finally:
        ended = service.machine.run(*own, "stop", user="ada", check=False)
    assert f"the daemon at {socket} has ended" in ended.stderr
