"""The access rules in docs/operations.md and docs/protocol.md match the code."""

from __future__ import annotations

import grp
import pwd
import re
from pathlib import Path

import pytest

from inferd.daemon.access.rules import MEMBER, OPERATOR, Rights, rights_of
from inferd.daemon.config.settings import Config
from inferd.daemon.config.sources import load_config
from inferd.ipc.messages import CALLS as ROWS
from inferd.ipc.messages import Right
from inferd.ipc.metrics_address import LOOPBACK
from inferd.scheduler.owner import Priority
from tests.daemon.systemd_tools import SYSTEMD, directives

DOCS = Path(__file__).resolve().parents[2] / "docs"
USERS = (DOCS / "operations.md").read_text().split("\n## Users\n")[1].split("\n## ")[0]
CALLS = (DOCS / "protocol.md").read_text().split("\n## Access rights\n")[1].split("\n## ")[0]
ADA, SERVICE, GATEWAY, STRANGER, STUDENTS, STAFF = 1001, 999, 997, 1005, 200, 100


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the page's example as read on a machine with these users and groups."""
    users = {"ada": ADA, "chat-gateway": GATEWAY}
    groups = {"students": STUDENTS}
    monkeypatch.setattr(
        pwd, "getpwnam", lambda n: pwd.struct_passwd((n, "x", users[n], 1, "", "", ""))
    )
    monkeypatch.setattr(grp, "getgrnam", lambda n: grp.struct_group((n, "x", groups[n], [])))
    [text] = re.findall(r"```toml\n(.*?)```", USERS, re.DOTALL)
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_config({"config": path, "socket": tmp_path / "s"}, {})


def test_the_example_gives_the_rights_in_its_comments(example: Config) -> None:
    def of(uid: int, *gids: int) -> Rights:
        return rights_of(example.access, uid, gids, SERVICE)

    for uid in (ADA, 1004):
        assert of(uid, STUDENTS).allowed == set(Right) - {Right.DELEGATE}
        assert of(uid).quota.priority_max == Priority.URGENT
    student = of(STRANGER, STAFF, STUDENTS)
    assert student.allowed == {Right.USE}, "what the rule does not say stays"
    assert student.quota.priority_max == Priority.NORMAL
    assert (student.quota.sessions_max, student.quota.tasks_waiting_max) == (4, 8)
    assert student.quota.tokens_per_minute == 20_000
    assert of(GATEWAY).allowed == {Right.USE, Right.DELEGATE}
    assert of(STRANGER, STAFF).allowed == frozenset()
    assert of(0) == of(SERVICE, STUDENTS) == OPERATOR


def rows() -> dict[str, str]:
    return dict(re.findall(r"^\| (\S.*?) \| (.*?) \|$", USERS, re.MULTILINE))


@pytest.mark.parametrize(
    ("row", "rights"),
    [
        ("root and the service's user `inferd`", OPERATOR),
        ("all other users that can connect", MEMBER),
    ],
)
def test_the_table_of_defaults_matches_the_code(row: str, rights: Rights) -> None:
    named = re.findall(r"`([\w-]+)`", rows()[row])
    assert set(named[:-1]) == rights.allowed
    assert named[-1] == rights.quota.priority_max.label
    assert rights.quota.sessions_max is rights.quota.tasks_waiting_max is None
    assert rights.quota.tokens_per_minute is None


def test_the_socket_and_the_metrics_match_the_table(tmp_path: Path) -> None:
    unit = directives(SYSTEMD / "system" / "inferd.socket")
    mode, group = unit["SocketMode"][0], unit["SocketGroup"][0]
    config = load_config({"socket": tmp_path / "s"}, {})
    assert rows()["the socket"].startswith(f"mode {mode}, group `{group}`")
    assert rows()["the socket"].endswith(f"a user's own socket {config.socket_mode}")
    assert f"on {LOOPBACK}:" in rows()["metrics for Prometheus"]


def test_the_rights_and_the_calls_that_need_none_are_named() -> None:
    manage = re.search(r"\*manage\*: (.*?)\.\n", CALLS, re.DOTALL)
    free = re.search(r"These calls need no right: (.*?)\.\s+A", CALLS, re.DOTALL)
    assert manage and free
    assert names_in(manage[1]) == {name for name, row in ROWS.items() if row.right is Right.MANAGE}
    assert names_in(free[1]) == {name for name, row in ROWS.items() if row.right is None}
    for right in Right:
        assert f"`{right}`" in USERS


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))
