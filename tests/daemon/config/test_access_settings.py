"""Access rules in the configuration: their keys, and the errors of invalid rules."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from inferd.daemon.access.rights import find_user
from inferd.daemon.config.access_settings import (
    ACCESS_KEYS,
    NAMES_MAX,
    RULES_MAX,
    Rule,
    SharedState,
)
from inferd.daemon.config.forms import MODE, group_default
from inferd.daemon.config.settings import Config
from inferd.daemon.config.sources import ConfigError, load_config
from inferd.ipc.messages import Right
from inferd.ipc.paths import SYSTEM_SOCKET

ROOT = pwd.getpwuid(0).pw_name
ROOTS = grp.getgrgid(0).gr_name
NAME = "with 1 to 128 characters of the state's name"
LABEL = "has 8 characters, or some that are not allowed"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def load(tmp_path: Path, text: str, **flags: str) -> Config:
    path = tmp_path / "inferd.toml"
    path.write_text(text)
    return load_config({"config": path, **flags}, {})


def errors_of(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return [line.replace(f"{tmp_path}/inferd.toml: ", "") for line in caught.value.lines]


def test_a_daemon_for_one_user_needs_no_rule(tmp_path: Path) -> None:
    assert load(tmp_path, "").access == ()


def test_a_rule_is_read_with_users_groups_rights_and_limits(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        f"""
        [access.operators]
        users = ["{ROOT}", 1001]
        groups = ["{ROOTS}", 77]
        allow = ["use", "manage", "See_All", "drain", "delegate"]
        priority-max = "urgent"
        [access.others]
        allow = ["use"]
        priority_max = "low"
        sessions-max = 1
        tasks_waiting-max = 1000000
        tokens-per-minute = 1000000000
        """,
    )
    assert config.access == (
        Rule(
            name="operators",
            users=frozenset({0, 1001}),
            groups=frozenset({0, 77}),
            allow=frozenset(Right),
            priority_max="urgent",
        ),
        Rule(
            name="others",
            allow=frozenset({Right.USE}),
            priority_max="low",
            sessions_max=1,
            tasks_waiting_max=1_000_000,
            tokens_per_minute=1_000_000_000,
        ),
    )


def test_every_declared_key_is_accepted(tmp_path: Path) -> None:
    values = {
        "users": "[1]",
        "groups": "[1]",
        "allow": "[]",
        "priority-max": '"low"',
        "connections-max": "1",
        "sessions-max": "1",
        "session-bytes-max": "1",
        "kept-sessions-max": "0",
        "descriptor-models-max": "0",
        "tasks-waiting-max": "1",
        "tokens-per-minute": "1",
        **dict.fromkeys(("tokens-per-day", "tokens-per-month"), "1"),
        **dict.fromkeys(("seconds-per-day", "seconds-per-month"), "1"),
        "reasoning-max": "{ low = 1 }",
        "states": '["1/a"]',
        "models": '["m"]',
    }
    assert set(values) == set(ACCESS_KEYS)
    text = "".join(f"{key} = {value}\n" for key, value in values.items())
    [rule] = load(tmp_path, f"[access.r]\n{text}").access
    assert rule.allow == frozenset()
    assert None not in (rule.priority_max, rule.sessions_max, rule.tokens_per_minute)


def test_a_rule_names_users_of_one_gateway_by_the_gateways_name_or_number(tmp_path: Path) -> None:
    text = f"[access.r]\nusers = ['{ROOT}@ada', '{ROOT}@eve@example.com', '54323@ada']"
    [rule] = load(tmp_path, text).access
    known = {("@ada", 0), ("@eve@example.com", 0), ("@ada", 54323)}
    assert rule.users == {find_user(name, gateway).number for name, gateway in known}
    assert len(rule.users) == 3


def test_a_rule_names_states_by_their_owner_label_and_name(tmp_path: Path) -> None:
    written = {
        f"{ROOT}/story": (0, "", "story"),
        "1001/agent-7/notes": (1001, "agent-7", "notes"),
        "1001//a/b": (1001, "", "a/b"),
        "1001/agent-7/a/b": (1001, "agent-7", "a/b"),
        "54323@ada/my story": (find_user("@ada", 54323).number, "", "my story"),
    }
    [rule] = load(tmp_path, f"[access.r]\nstates = {list(written)}").access
    assert rule.states == {SharedState(name, *state) for name, state in written.items()}
    numbered = {state.numbered_name for state in rule.states}
    assert {"0/story", "1001//a/b", "1001/agent-7/notes"} < numbered


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[access.r]\nuser = [1]", "[access.r] unknown key 'user'; did you mean 'users'?"),
        (
            f"[access.r]\nusers = ['{ROOT}x']",
            f"[access.r] users: there is no user '{ROOT}x'; did you mean '{ROOT}'?",
        ),
        (
            f"[access.r]\ngroups = ['{ROOTS}x']",
            f"[access.r] groups: there is no group '{ROOTS}x'; did you mean '{ROOTS}'?",
        ),
        ("[access.r]\nusers = ['@a']", "[access.r] users: '@a' has no gateway; write 'GATEWAY@a'"),
        (
            f"[access.r]\nusers = ['{ROOT}x@a']",
            f"[access.r] users: there is no user '{ROOT}x'; did you mean '{ROOT}'?",
        ),
        (
            f"[access.r]\nusers = ['{ROOT}@']",
            f"[access.r] users: there is no user '{ROOT}@'; did you mean '{ROOT}'?",
        ),
        ("[access.r]\nusers = [-1]", "[access.r] users: -1 is not the number of a user"),
        (
            "[access.r]\nusers = [4294967295]",
            "[access.r] users: 4294967295 is not the number of a user",
        ),
        (
            "[access.r]\nusers = [true]",
            "[access.r] users: true is not the name or number of a user",
        ),
        ("[access.r]\nusers = ['']", "[access.r] users: '' is not the name or number of a user"),
        (
            "[access.r]\nusers = 'ada'",
            "[access.r] users: 'ada' is not a list of at most 1024",
        ),
        (
            "[access.r]\ngroups = []",
            "[access.r] groups: is empty; without the key the rule applies to all other users",
        ),
        (
            f"[access.r]\nstates = ['{ROOT}x/story']",
            f"[access.r] states: there is no user '{ROOT}x'; did you mean '{ROOT}'?",
        ),
        *(
            (
                f"[access.r]\nstates = ['{name}']",
                f"[access.r] states: '{name}' is not 'OWNER/STATE' or 'OWNER/LABEL/STATE', {NAME}",
            )
            for name in ("story", "1/", "1/agent/", "1//")
        ),
        (
            "[access.r]\nstates = ['1/an agent/story']",
            f"[access.r] states: '1/an agent/story': the label 'an agent' {LABEL}",
        ),
        (
            "[access.r]\nallow = ['us']",
            "[access.r] allow: 'us' is not one of use, manage, see-all, drain, delegate",
        ),
        (
            "[access.r]\nallow = 'use'",
            "[access.r] allow: 'use' is not a list of at most 1024",
        ),
        (
            "[access.r]\npriority-max = 3",
            "[access.r] priority-max: 3 is not one of low, normal, high, urgent",
        ),
        ("[access.r]\nsessions-max = 0", "[access.r] sessions-max: 0 is outside 1 … 100000"),
        ("[access.r]\nsessions-max = 1.5", "[access.r] sessions-max: 1.5 is not a whole number"),
        ("[access.r]\nsessions-max = true", "[access.r] sessions-max: true is not a whole number"),
        (
            "[access.r]\ntokens-per-minute = 1000000001",
            "[access.r] tokens-per-minute: 1000000001 is outside 1 … 1000000000",
        ),
        (
            "[access.r]\nsessions-max = 1\nsessions_max = 1",
            "[access.r] sessions_max: given twice, in two spellings",
        ),
        ("[access]\nr = 1", "[access.r] is 1, not a table"),
        ("access = 1", "access is 1, not a table: write [access]"),
        (
            "[access.'a b']",
            "[access.a b] 'a b' is not a name for a rule: use letters, digits, . _ -",
        ),
        (
            "[access.a]\nusers = [1]\n[access.b]\nusers = [2, 1]",
            "[access.b] applies to user 1, as [access.a] does",
        ),
        (
            "[access.a]\ngroups = [1]\n[access.b]\nusers = [1]\ngroups = [1]",
            "[access.b] applies to group 1, as [access.a] does",
        ),
        ("[access.a]\n[access.b]", "[access.b] applies to everybody else, as [access.a] does"),
        ("[acces.a]", "unknown key 'acces'; did you mean 'access'?"),
    ],
)
def test_an_error_names_its_place_and_value(tmp_path: Path, text: str, line: str) -> None:
    assert errors_of(tmp_path, text) == [line]


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    text = "[access.a]\nusers = [-1, 'no such user']\nallow = ['x', 'y']\n[access.b]\nmy = 1\n"
    lines = errors_of(tmp_path, f"{text}[daemon]\nsessions-max = 0\n")
    assert len(lines) == 6
    assert sum("[access.a] users" in line for line in lines) == 2
    assert sum("[access.a] allow" in line for line in lines) == 2


def test_the_number_of_rules_and_of_their_names_is_bounded(tmp_path: Path) -> None:
    def rules(count: int) -> str:
        return "".join(f"[access.r{n}]\nusers = [{n}]\n" for n in range(count))

    def names(count: int) -> str:
        return f"[access.r]\nusers = {list(range(count))}\n"

    assert len(load(tmp_path, rules(RULES_MAX)).access) == RULES_MAX
    assert errors_of(tmp_path, rules(RULES_MAX + 1)) == ["[access]: 257 rules, 256 at most"]
    [rule] = load(tmp_path, names(NAMES_MAX)).access
    assert len(rule.users) == NAMES_MAX
    [line] = errors_of(tmp_path, names(NAMES_MAX + 1))
    assert line.endswith("is not a list of at most 1024")


# The socket.


@pytest.mark.parametrize(("text", "mode"), [("0660", 0o660), ("600", 0o600), ("0o666", 0o666)])
def test_a_mode_is_text_in_octal(tmp_path: Path, text: str, mode: int) -> None:
    assert load(tmp_path, f"[daemon]\nsocket-mode = '{text}'").socket_mode == mode
    assert load(tmp_path, "", **{"socket-mode": text}).socket_mode == mode
    assert str(MODE.parse(text)) == f"{mode:04o}"


@pytest.mark.parametrize(
    "value", ["'0770'", "'0460'", "'rw'", "660", "0o660", "'01660'", "''", "true"]
)
def test_an_invalid_socket_mode_is_refused(tmp_path: Path, value: str) -> None:
    [line] = errors_of(tmp_path, f"[daemon]\nsocket-mode = {value}")
    assert line.startswith("[daemon] socket-mode: ")


def test_an_unknown_group_is_refused(tmp_path: Path) -> None:
    config = load(tmp_path, f"[daemon]\nsocket-group = '{ROOTS}'")
    assert (config.socket_group, config.socket_mode) == (ROOTS, 0o660)
    [line] = errors_of(tmp_path, f"[daemon]\nsocket-group = '{ROOTS}x'")
    assert line == f"[daemon] socket-group: there is no group '{ROOTS}x'; did you mean '{ROOTS}'?"


def test_a_users_own_socket_is_open_to_that_user_alone(tmp_path: Path) -> None:
    config = load(tmp_path, f"[daemon]\nsocket = '{tmp_path}/s'")
    assert (config.socket_group, config.socket_mode) == ("", 0o600)
    assert group_default(Path("/run/user/7/inferd/inferd.sock")) == ""


def test_the_machines_socket_gets_its_group_if_the_daemon_may_assign_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"inferd": grp.struct_group(("inferd", "x", 4711, []))}
    monkeypatch.setattr(grp, "getgrnam", known.__getitem__)
    monkeypatch.setattr(os, "getegid", lambda: 4711)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert group_default(SYSTEM_SOCKET) == "inferd"
    assert load_config({}, {}).socket_mode == 0o660
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [7])
    assert group_default(SYSTEM_SOCKET) == ""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert group_default(SYSTEM_SOCKET) == "inferd"
    known.clear()
    assert group_default(SYSTEM_SOCKET) == ""
