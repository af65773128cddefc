"""`inferd config`: what is wrong, what holds and who said it, what may stand in the file."""

from __future__ import annotations

import json
import os
import re
import threading
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from inferd.backends.adapter_keys import ADAPTERS_MAX
from inferd.daemon.access.rules import rights_of
from inferd.daemon.config.access_settings import ACCESS_KEYS
from inferd.daemon.config.settings import SETTINGS
from inferd.daemon.config.settings_schema import config_schema
from inferd.daemon.config.show import in_force, toml_of
from inferd.daemon.config.sources import load_config, read_sources
from tests.daemon.command_line import document, inferd

from .test_settings import (
    test_an_adapter_that_cannot_be_is_named,
    test_one_wrong_thing_is_named,
)

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "configuration.md").read_text()
SCHEMA = jsonschema.Draft202012Validator(config_schema())
RICH = r"""
[daemon]
sessions-max = 7
kv_share = "all"
metrics = 9000
traces = "http://127.0.0.1:4318"
state-dir = "state"
shutdown-grace-s = 0.25
[defaults]
temperature = 0.5
stop = ["a\nb", "\u007f", "\"\\"]
logit-bias = [[7, false], ["x", -1.5]]
[models.small]
file = "small.gguf"
temp = 0
json-schema = { type = "object", properties = { "a b" = { const = 1 } } }
[models.small.adapters]
tone = "tone.gguf"
loud = { file = "/m/loud.gguf", scale = -0.5 }
[models."v1.5"]
backend = "echo"
[models."v1.5".echo]
step-ms = 5
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.delenv("INFERD_CONFIG", raising=False)


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    path = tmp_path / "rich.toml"
    path.write_text(RICH)
    return path


# check


def test_check_says_that_a_file_is_right_and_where_it_is(rich: Path) -> None:
    assert inferd("config", "check", str(rich)).stdout == f"{rich}: all right\n"
    told = document(inferd("config", "check", str(rich), "--json"))
    assert told == {"file": str(rich), "models": ["small", "v1.5"], "errors": []}
    assert inferd("config", "check").stdout.startswith("no file: the defaults hold")


def test_check_tells_all_errors_at_once_and_ends_with_2(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[daemon]\nsesions-max = 1\ncores = -1\n[defaults]\ntemp = 1000\n")
    result = inferd("config", "check", str(path), "--set", "shutdown-grace-s=long")
    assert result.exit_code == 2 and result.stdout == ""
    for line in (
        "sesions-max: unknown key; did you mean 'sessions-max'?",
        "cores: -1 is outside 0 … 4096",
        "temp: 1000 is outside 0 … 100",
        "--shutdown-grace-s: 'long' is no number",
    ):
        assert line in result.stderr
    told = inferd("config", "check", str(path), "--json")
    assert told.exit_code == 2
    assert len(document(told)["error"]["data"]["errors"]) == 3
    missing = inferd("config", "check", str(tmp_path / "none.toml"))
    assert missing.exit_code == 2 and "cannot be read: No such file" in missing.stderr


# show


def test_what_is_shown_is_a_file_that_says_the_same(rich: Path, tmp_path: Path) -> None:
    shown = inferd("config", "show", "--config", str(rich), "--origin")
    assert shown.exit_code == 0
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout)
    environ = {"INFERD_SOCKET": "/nonexistent/inferd.sock"}  # where the command runs
    before, after = load_config({"config": rich}, environ), load_config({"config": again}, {})
    for name in SETTINGS:
        field = name.replace("-", "_")
        assert getattr(before, field) == getattr(after, field), name
    assert before.defaults == after.defaults
    assert after.models["v1.5"].echo == before.models["v1.5"].echo == {"step_ms": 5.0}
    assert after.models["small"].adapters == before.models["small"].adapters
    for name, model in before.models.items():
        assert after.models[name].options == before.defaults | model.options
        assert after.models[name].file == model.file
    assert inferd("config", "check", str(again)).exit_code == 0


def test_show_says_who_said_each_of_them(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_SHUTDOWN_GRACE_S", "3")
    flags = ("--set", "sessions-max=9", "--config", str(rich))
    lines = inferd("config", "show", "--origin", *flags).stdout.splitlines()
    assert "sessions-max = 9  # --sessions-max" in lines, "a flag comes before the file"
    assert "shutdown-grace-s = 3.0  # INFERD_SHUTDOWN_GRACE_S" in lines, "and the environment, too"
    assert f'kv-share = "all"  # {rich}' in lines
    assert "idle-timeout-ms = 300000  # default" in lines
    assert f"temp = 0.5  # {rich} [defaults]" in lines
    assert f"temp = 0.0  # {rich} [models.small]" in lines, "a model's own"
    plain = inferd("config", "show", *flags).stdout
    assert "#" not in plain and tomllib.loads(plain)["daemon"]["sessions-max"] == 9
    told = document(inferd("config", "show", "--json", *flags))
    assert told["settings"]["sessions-max"] == {"value": 9, "origin": "--sessions-max"}
    assert told["models"]["small"]["temp"]["value"] == 0.0
    assert set(told["settings"]) == set(SETTINGS)


RULES = """
[access.staff]
groups = [4711]
tokens_per_minute = 100
[access.operators]
users = ["root", 1004]
allow = ["see-all", "manage"]
[access.rest]
allow = []
priority-max = "low"
sessions-max = 2
"""


def test_rules_of_access_are_shown_with_what_holds_where_they_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ruled.toml"
    path.write_text(RULES)
    told = document(inferd("config", "show", "--config", str(path), "--json"))["access"]
    assert list(told) == ["staff", "operators", "rest"], "in the order of the file"
    assert all(list(rule) == list(ACCESS_KEYS) for rule in told.values())
    here = f"{path} [access.staff]"
    assert told["staff"]["groups"] == {"value": [4711], "origin": here}
    assert told["staff"]["tokens-per-minute"] == {"value": 100, "origin": here}
    assert told["staff"]["allow"] == {"value": ["use"], "origin": "default"}
    assert told["staff"]["priority-max"] == {"value": "high", "origin": "default"}
    assert told["staff"]["sessions-max"] == {"value": None, "origin": "default"}
    assert told["operators"]["users"]["value"] == ["root", 1004], "as they are named there"
    assert told["operators"]["priority-max"]["value"] is None, "root's is another than 1004's"
    lines = inferd("config", "show", "--config", str(path), "--origin").stdout.splitlines()
    assert f'priority-max = "low"  # {path} [access.rest]' in lines
    assert lines[lines.index("[access.staff]") + 2] == 'allow = ["use"]  # default'


def test_what_is_shown_of_rules_is_a_file_by_which_everybody_may_the_same(tmp_path: Path) -> None:
    before, again = tmp_path / "before.toml", tmp_path / "again.toml"
    before.write_text(RULES)
    again.write_text(inferd("config", "show", "--config", str(before)).stdout)
    assert accepted(again.read_text())
    rules = [load_config({"config": path}, {}).access for path in (before, again)]
    assert [rule.name for rule in rules[1]] == ["staff", "operators", "rest"]
    for uid, gid in ((0, 0), (1004, 4711), (1005, 4711), (1005, 5), (990, 4711)):
        one, other = (rights_of(each, uid, {gid}, own=990) for each in rules)
        assert one == other, uid


def test_a_configuration_from_a_pipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(RICH,))
    writer.start()
    told = document(inferd("config", "show", "--config", str(path), "--json"))
    writer.join()
    assert told["settings"]["sessions-max"] == {"value": 7, "origin": str(path)}


def test_the_name_of_the_file_writes_no_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a\n[models.evil]\n.toml"
    path.write_text("[daemon]\nsessions-max = 3\n")
    shown = inferd("config", "show", "--origin", "--config", str(path)).stdout
    assert "models" not in tomllib.loads(shown)


def test_show_refuses_a_wrong_file_as_check_does(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[daemon]\ncores = true\n")
    result = inferd("config", "show", "--config", str(path))
    assert result.exit_code == 2 and "True is no whole number" in result.stderr


# schema


def accepted(text: str) -> bool:
    # As JSON, which is what a schema is about.
    return bool(SCHEMA.is_valid(json.loads(json.dumps(tomllib.loads(text), allow_nan=False))))


def cases(test: Any) -> list[str]:
    """Return the texts that a test of wrong configurations goes through."""
    [mark] = [m for m in test.pytestmark if m.name == "parametrize"]
    return [arguments[0] for arguments in mark.args[1]]


def test_the_schema_is_one_and_is_written_by_the_command() -> None:
    jsonschema.Draft202012Validator.check_schema(config_schema())
    assert document(inferd("config", "schema")) == config_schema()


def test_what_is_right_fits_the_schema(rich: Path) -> None:
    for text in (*re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL), RICH, ""):
        assert accepted(text)
    assert accepted(toml_of(in_force(read_sources({"config": rich}, {})), origins=True))
    assert accepted("[models.a]\nn_ctx = 512\ntemperature = 0.1\n")


@pytest.mark.parametrize(
    "text", [t for t in cases(test_one_wrong_thing_is_named) if "= nan" not in t]
)
def test_what_is_refused_does_not_fit_the_schema(text: str) -> None:
    """NaN is left out: JSON has none."""
    try:
        assert not accepted(text)
    except ValueError as exc:
        assert "inf" in text and "JSON compliant" in str(exc), "JSON has no infinity, either"


@pytest.mark.parametrize("adapters", cases(test_an_adapter_that_cannot_be_is_named))
def test_an_adapter_that_is_refused_does_not_fit_the_schema(adapters: str) -> None:
    if "nan" not in adapters:
        assert not accepted(f"[models.m.adapters]\n{adapters}")


@pytest.mark.parametrize(
    "text",
    [
        "[daemon]\nsesions-max = 3",
        "[daemon]\ncores = -1",
        "[daemon]\nsessions-max = 1\nsessions_max = 2",
        "[daemon]\nlog_level = 'loud'",
        "[daemon]\nmetrics = 'nowhere'",
        "[daemon]\nmetrics = 70000",
        "[daemon]\ntraces = 'somewhere'",
        "[daemon]\nsocket = '/" + "s" * 107 + "'",
        "[defaults]\ntemperatur = 1",
        "[defaults]\ntemp = 1\nn-predict = 'many'",
        "[models.small]\nfile = 3",
        "[models.small]\ntemp = 200",
        "[models.'a/b']",
        "[models.m.adapters]\n" + "".join(f"a{i} = 'f'\n" for i in range(ADAPTERS_MAX + 1)),
        "socke = 'x'",
    ],
)
def test_what_is_wrong_does_not_fit_the_schema(text: str) -> None:
    assert not accepted(text)
