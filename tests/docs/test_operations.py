"""The commands of docs/operations.md, one after the other, on a machine made of a folder."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd import Cancelled, Client
from inferd.backends.library import LINES_MAX, REPEAT_S, WINDOW_S
from inferd.daemon.config.forms import LOGGERS
from inferd.daemon.service.notifier import END_S_MAX, START_S_MAX
from inferd.daemon.workers.process import KILLED_S
from tests.daemon.systemd_tools import SYSTEMD, directives
from tests.journal_versions import mark_version
from tests.models import short_smollm2

from .machine import Machine

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
Section = dict[str, list[list[str]]]


def sections() -> Section:
    """Return the blocks of commands by the headings above them."""
    found: Section = {}
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading = part.partition("\n")[0]
        blocks = re.findall(r"```sh\n(.*?)```", part, re.DOTALL)
        found[heading] = [block.strip().splitlines() for block in blocks]
    return found


SECTIONS = sections()


@pytest.fixture
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="inferd-"))  # a socket's path is short
    machine = Machine(root)
    try:
        yield machine
    finally:
        machine.close()
        shutil.rmtree(root)


def do(machine: Machine, heading: str, block: int = 0) -> list[str]:
    """Run a block of commands; return the output of each."""
    return [machine.command(line) for line in SECTIONS[heading][block]]


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_commands_of_the_page_lead_from_an_empty_machine_and_back(machine: Machine) -> None:
    root, state = machine.root, machine.root / "var/lib/inferd"
    for name in ("mine.gguf", "smollm2.gguf"):
        (machine.home / name).symlink_to(short_smollm2())

    shown, *_, hello = do(machine, "Install")[-3:]
    assert "systemctl enable --now inferd.socket" in shown
    assert hello.strip() == "hello"
    for cell in re.findall(r"^\| .*?\|", PAGE, re.MULTILINE):
        for path in re.findall(r"`(/[^`]+)`", cell):
            assert Path(f"{root}{path}").exists(), path

    machine.replacements = {"smollm2": str(machine.home / "smollm2.gguf")}  # nothing is fetched
    names = do(machine, "Models")[-1]
    assert "mine" in names and "smollm2" in names
    machine.replacements = {}
    assert do(machine, "Users")[-1].strip("\n"), "a model has answered, maybe with spaces"

    config = root / "etc/inferd/config.toml"
    config.write_text(config.read_text() + "sessions-max = 7\ncores = 1\n")
    assert "sessions: 0 of 7" in do(machine, "Configuration")[-1]
    status, text, stats, frame, _ = do(machine, "Monitoring")
    assert "counts are since its start" in stats and "POSITION" in frame
    assert "serving; restart for: cores" in status.splitlines()
    assert "applied after a restart: cores" in text

    examined, *_, shown = do(machine, "Diagnosis")
    assert " ok, " in examined and (machine.home / "inferd-report.txt").is_file()
    assert "sessions-max = 100  # default" in shown

    say(machine, "before the upgrade")
    pid = machine.service.pid if machine.service else 0
    do(machine, "Upgrade")
    assert machine.service is not None and machine.service.pid != pid
    assert "applied after" not in machine.command("inferd status")
    assert turns_of_session(machine) == 1

    do(machine, "Backup")
    archive = machine.home / "inferd-backup.tar"
    assert archive.is_file()
    say(machine, "after the backup")
    assert turns_of_session(machine) == 2
    do(machine, "Backup", 1)
    assert turns_of_session(machine) == 1, "as it was when it was saved"
    assert (state / "models" / "mine.gguf").is_file()

    do(machine, "Uninstall")
    remaining = [p for p in (root / "etc").rglob("*") if "inferd" in str(p.relative_to(root))]
    assert not remaining and not state.exists() and not (root / "opt/inferd").exists()

    do(machine, "A user's own service")
    assert not list(machine.root.rglob("systemd/user/inferd.*"))

    started, logged, stopped = do(machine, "Without a service")
    assert f"is ready at {machine.socket}" in started and "daemon.ready" in logged
    assert "has ended" in stopped and not machine.socket.exists()
    assert not any(SECTIONS[h] for h in ("Confinement",))


def say(machine: Machine, text: str) -> None:
    machine.command("inferd status")  # starts the service
    with Client(machine.socket) as client, client.session("echo", session_id="diary") as session:
        session.chat(text)


def turns_of_session(machine: Machine) -> int:
    """Return the number of turns of the session."""
    machine.command("inferd status")
    with Client(machine.socket) as client:
        [session] = client.sessions(dormant=True)
        return int(session["turns"])


def test_a_newer_version_s_journal_is_left_alone_by_an_older_one(machine: Machine) -> None:
    do(machine, "Install")
    say(machine, "of the newer version")
    machine.command("sudo systemctl stop inferd.socket inferd")
    journal = machine.root / "var/lib/inferd/sessions.db"
    mark_version(journal, 1000)
    before = journal.read_bytes()
    machine.command("sudo systemctl start inferd.socket")
    text = machine.command("inferd status")
    assert "newer version of inferd" in text and "start the newer version again" in text
    assert machine.command("inferd run echo hello").strip() == "hello"
    assert machine.service is not None
    machine.command("sudo systemctl stop inferd.socket inferd")
    assert journal.read_bytes() == before


def test_the_tasks_of_others_are_parked_and_cancelled_as_the_page_says(machine: Machine) -> None:
    do(machine, "Install")
    config = machine.root / "etc/inferd/config.toml"
    config.write_text("[models.slow]\nbackend = 'echo'\n[models.slow.echo]\nstep_ms = 10\n")
    machine.command("sudo systemctl restart inferd")
    machine.command("inferd status")
    with Client(machine.socket) as client, client.session("slow", session_id="diary") as session:
        stream = session.stream("word by word " * 200)
        next(stream)
        listed, parked, cancelled = do(machine, "Users", 1)
        assert "diary" in listed and "not parked" in parked and cancelled == "cancelled\n"
        with pytest.raises(Cancelled):
            list(stream)


def test_the_times_of_the_page_match_the_code() -> None:
    unit = directives(SYSTEMD / "system" / "inferd.service")
    assert f"`WatchdogSec={unit['WatchdogSec'][0]}`" in PAGE
    assert f"every {int(unit['WatchdogSec'][0]) // 2} s" in PAGE
    assert f"{KILLED_S:g} s after its last check" in PAGE
    assert START_S_MAX == 600 and "up to ten minutes for the start" in PAGE
    assert f"`shutdown-grace-s` and {END_S_MAX:g} s for the end" in " ".join(PAGE.split())


def test_the_log_of_the_service_is_shown_and_its_levels_change(machine: Machine) -> None:
    do(machine, "Install")
    config = machine.root / "etc/inferd/config.toml"
    section = PAGE.split("## Logs")[1].split("\n## ")[0]
    [toml] = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    file = machine.root / "var/lib/inferd/inferd.log"
    config.write_text(toml.replace("[daemon]\n", f"[daemon]\nlog-file = '{file}'\n", 1))
    machine.command("sudo systemctl stop inferd")
    shown, turned_up, *_ = do(machine, "Logs")
    assert shown == "", "nothing to warn of"
    assert turned_up.split()[-2:] == ["llama", "debug"]
    machine.command("inferd run echo hello")
    text = machine.command("sudo inferd logs")
    assert "task.finished" not in text, "the third command has reset the levels"
    do(machine, "Configuration")
    machine.command("inferd run echo hello")
    assert "task.finished" in machine.command("sudo inferd logs"), "the file's levels hold again"


def test_the_loggers_and_bounds_of_the_page_match_the_code() -> None:
    section = PAGE.split("## Logs")[1].split("\n## ")[0]
    loggers = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert loggers == list(LOGGERS)
    assert f"{LINES_MAX} lines in ten seconds" in section and WINDOW_S == 10
    assert "once a minute" in " ".join(section.split()) and REPEAT_S == 60
