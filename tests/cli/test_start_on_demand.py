"""The daemon that `run` and `chat` start where none runs, unless that is forbidden; the service."""

from __future__ import annotations

import os
import socket as sockets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.backends.errors import (
    BackendError,
    InvalidArgument,
    ModelNotFound,
    PermissionDenied,
)
from inferd.cli import starting
from inferd.cli.model_arguments import check_offered
from inferd.daemon.config.sources import load_config
from inferd.daemon.service import install
from inferd.daemon.service.install import Service, Write, install_plan
from inferd.daemon.state_files import SETTINGS_FILE
from inferd.ipc.paths import SYSTEM_SOCKET
from tests.daemon.command_line import inferd_process, on_terminal
from tests.daemon.other_users import ADA, as_user
from tests.models import smollm2
from tests.tiny_gguf import write_split, write_tiny

from .home import COMMAND_S_MAX, Home, home_of


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with home_of(monkeypatch) as found:
        yield found


def test_run_starts_a_daemon_and_writes_only_the_answer_to_its_output(home: Home) -> None:
    done = home.inferd("run", "echo", "hello there")
    [daemon] = home.daemons()
    assert (done.status, done.stdout) == (0, "hello there\n")
    assert done.stderr == (
        f"started a daemon (pid {daemon.pid}) in the background; `inferd stop` stops it\n"
    )
    again = home.inferd("run", "echo", "once more")
    assert (again.stdout, again.stderr) == ("once more\n", "")
    assert home.inferd("stop").status == 0


@pytest.mark.parametrize(
    ("model", "sentence", "hint"),
    [
        ("typo", "there is no model 'typo'", "`inferd pull` gets a model"),
        ("eco", "there is no model 'eco'", "did you mean 'echo'?"),
        ("SmolLM2", "there is no model 'SmolLM2'", "`inferd pull smollm2` gets it"),
        ("smolm2", "there is no model 'smolm2'", "did you mean 'smollm2'? `inferd pull` gets it"),
        ("gemma3-270m", "there is no model", "`inferd pull gemma3-270m-base` gets it"),
        ("./none.gguf", "the file ./none.gguf does not exist", "check the path"),
        ("./", "./ is not a file", "name a GGUF file, or a model"),
    ],
)
def test_a_model_that_is_not_there_starts_no_daemon(
    home: Home, model: str, sentence: str, hint: str
) -> None:
    for command in (("run", model, "hello"), ("chat", model)):
        done = home.inferd(*command)
        assert (done.status, done.stdout) == (1, ""), done
        message, advice = done.stderr.splitlines()
        assert sentence in message and hint in advice, done
    assert home.daemons() == []


def test_each_name_of_a_model_that_is_there_starts_one(home: Home) -> None:
    folder = home.folder / "data" / "inferd" / "models"
    (folder / "sub").mkdir(parents=True)
    write_tiny("llama", folder / "sub")
    home.configure("[models.mine]\nbackend = 'echo'\n")
    config = load_config()
    for name in ("echo", "mine", "MINE:latest", "sub-tiny-llama", "sub/tiny-llama.gguf"):
        check_offered(name, config)
    with pytest.raises(ModelNotFound):
        check_offered("absent", config)
    home.state.mkdir()
    (home.state / SETTINGS_FILE).write_text('{"models": {"absent": {}}}')
    check_offered("absent", config)
    done = home.inferd("run", "sub/tiny-llama.gguf", "hello", "--n-predict", "2")
    assert done.status == 0 and done.stderr.startswith("started a daemon"), done


def test_a_file_is_run_from_its_descriptor(home: Home) -> None:
    """The daemon needs no right to read it, and the model keeps no name."""
    file = write_tiny("llama", home.folder)
    prompt = ("hello", "--temp", "0", "--n-predict", "4")
    done = home.inferd("run", str(file), *prompt)
    assert done.status == 0 and done.stdout.strip(), done
    again = home.inferd("chat", str(file), *prompt[1:], "-o", "ctx-size=256")
    assert again.status == 0, again
    assert home.inferd("embed", str(file), "hello").status == 0
    assert "hello" in home.inferd("template", str(file), "hello").stdout
    assert '"echo"' in home.inferd("models", "--json").stdout


def test_a_part_of_a_split_file_is_refused_unless_the_daemon_offers_all(home: Home) -> None:
    part, *others = write_split(home.folder)
    done = home.inferd("run", str(part), "hello")
    assert done.status == 1 and "is one part of a split model" in done.stderr
    assert "llama-gguf-split --merge" in done.stderr
    folder = home.folder / "data" / "inferd" / "models"
    folder.mkdir(parents=True)
    for each in (part, *others):
        each.rename(folder / each.name)
    done = home.inferd("run", str(folder / part.name), "hello", "--n-predict", "2")
    assert done.status == 0, done


def test_in_a_pipeline_the_answer_ends_with_the_command(home: Home) -> None:
    inferd = f"{sys.executable} -m inferd"
    done = subprocess.run(
        f"echo text | {inferd} run echo | cat", shell=True, capture_output=True, text=True,
        timeout=COMMAND_S_MAX, env={**os.environ, "INFERD_SOCKET": ""},
    )  # fmt: skip
    assert done.stdout == "text\n"
    assert len(home.daemons()) == 1


def test_several_runs_at_once_start_one_daemon(home: Home) -> None:
    processes = [inferd_process("run", "echo", f"text {n}") for n in range(4)]
    outputs = [process.communicate(timeout=COMMAND_S_MAX) for process in processes]
    assert [stdout for stdout, _ in outputs] == [f"text {n}\n".encode() for n in range(4)], outputs
    assert len(home.daemons()) == 1
    assert sum(b"started a daemon" in stderr for _, stderr in outputs) == 1


def test_a_chat_on_a_terminal_starts_one(home: Home) -> None:
    with on_terminal("run", "echo", socket="") as terminal:
        terminal.until("started a daemon (pid ")
        terminal.until(">>> ")
        terminal.type("hello\n")
        terminal.until("hello\r\nhello")
        terminal.until(">>> ")
        terminal.type("\x04")
        assert terminal.process.wait(COMMAND_S_MAX) == 0
    assert len(home.daemons()) == 1, "it outlives the terminal"


@pytest.mark.parametrize("place", ["file", "environment"])
def test_a_setting_forbids_it(home: Home, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "file":
        home.configure("[daemon]\nstart-on-demand = false\n")
    else:
        monkeypatch.setenv("INFERD_START_ON_DEMAND", "false")
    for command in ("run", "chat"):
        done = home.inferd(command, "echo", *(("hello",) if command == "run" else ()))
        assert (done.status, done.stdout) == (3, "")
        assert f"no daemon answers at {home.socket}" in done.stderr
        assert "start it with `inferd start`" in done.stderr
    assert home.daemons() == []
    assert home.inferd("start").status == 0, "it is about other commands"


def test_none_is_started_for_a_socket_that_the_user_names(home: Home) -> None:
    other = str(home.folder / "other.sock")
    assert home.inferd("run", "echo", "hello", "--socket", other).status == 3
    assert home.inferd("run", "echo", "hello", socket=other).status == 3
    assert home.daemons() == []


def test_none_is_started_where_daemons_listen_elsewhere(home: Home) -> None:
    home.configure(f"[daemon]\nsocket = '{home.folder / 'elsewhere.sock'}'\n")
    assert home.inferd("run", "echo", "hello").status == 3
    assert home.daemons() == []


def test_a_socket_without_a_daemon_is_taken_over(home: Home) -> None:
    home.socket.parent.mkdir()
    with sockets.socket(sockets.AF_UNIX) as crashed:
        crashed.bind(str(home.socket))
    assert home.inferd("run", "echo", "hello").stdout == "hello\n"


def test_none_is_started_beside_a_daemon_that_refuses_this_user(
    home: Home,
) -> None:
    assert home.inferd("start").status == 0
    daemons = home.daemons()
    home.folder.chmod(0o711)
    for folder in (home.folder / "run", home.socket.parent):
        folder.chmod(0o711)
    with as_user(ADA):
        starting.start_on_demand(None, "echo")
        with pytest.raises(PermissionDenied):
            starting.find_daemon(home.socket)
    assert home.daemons() == daemons


def test_the_reason_is_given_if_it_cannot_be_started(home: Home) -> None:
    home.configure("[daemon]\nsessions-max = 0\n")
    done = home.inferd("run", "echo", "hello")
    assert (done.status, done.stdout) == (2, "") and "sessions-max" in done.stderr


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_real_model_answers_through_the_daemon_that_was_started(home: Home) -> None:
    models = home.folder / "data" / "inferd" / "models"
    models.mkdir(parents=True)
    (models / "smollm2.gguf").symlink_to(smollm2())
    prompt = ("run", "smollm2", "Count from one to ten.", "--temp", "0", "--n-predict", "24")
    done = home.inferd(*prompt)
    assert done.status == 0 and len(done.stdout) > 20, done
    assert done.stderr.startswith("started a daemon") and done.stderr.count("\n") == 1
    again = home.inferd(*prompt)
    assert (again.stdout, again.stderr) == (done.stdout, "")
    assert home.inferd("stop").status == 0


# An installed service.

SYSTEMCTL = """#!/bin/sh
echo "$@" > "$0.asked"
exec {python} -m inferd start
"""


@pytest.fixture
def service(home: Home, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The user's service, installed but stopped; systemctl starts an ordinary daemon."""
    found = Service(user=True)
    for step in install_plan(found, "/usr/local/bin/inferd"):
        if isinstance(step, Write):
            step.run()
    systemctl = home.folder / "systemctl"
    systemctl.write_text(SYSTEMCTL.format(python=sys.executable))
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(home.folder), prepend=os.pathsep)
    monkeypatch.setattr(install, "BOOTED", home.folder)
    return found


def test_an_installed_service_is_started_by_its_manager(home: Home, service: Service) -> None:
    found = starting.start_daemon((), load_config({}), COMMAND_S_MAX)
    [daemon] = home.daemons()
    assert (found.pid, found.socket, found.started) == (daemon.pid, str(home.socket), True)
    asked = (home.folder / "systemctl.asked").read_text()
    assert asked == "--user start inferd.socket inferd.service\n"


def test_a_stopped_service_is_not_started_on_demand(home: Home, service: Service) -> None:
    starting.start_on_demand(None, "echo")
    assert home.daemons() == [] and not (home.folder / "systemctl.asked").exists()


def test_options_are_refused_for_an_installed_service(home: Home, service: Service) -> None:
    with pytest.raises(InvalidArgument) as raised:
        starting.start_daemon(("--cores=1",), load_config({}), COMMAND_S_MAX)
    assert "`systemctl --user start inferd.socket inferd.service`" in raised.value.hint
    assert home.daemons() == []


def test_a_service_without_a_daemon_is_an_error(home: Home, service: Service) -> None:
    (home.folder / "systemctl").write_text("#!/bin/sh\n")
    with pytest.raises(BackendError, match="no daemon answers"):
        starting.start_daemon((), load_config({}), COMMAND_S_MAX)


def test_only_root_starts_the_system_service() -> None:
    with as_user(ADA), pytest.raises(PermissionDenied) as raised:
        starting._start_service(Service(), SYSTEM_SOCKET, ())
    assert raised.value.hint == "sudo systemctl start inferd.socket inferd.service"


def test_a_listener_that_is_being_closed_is_no_daemon(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Timer(0.05, listener.close).start()
        assert not starting.is_listening(path)
    assert not starting.is_listening(path)
