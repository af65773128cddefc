"""`inferd config`: check of a file, the values in force with their origins, and the schema."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from inferd.backends.model_spec import ADAPTERS_MAX
from inferd.backends.params import read_options
from inferd.daemon.access.rules import rights_of
from inferd.daemon.config.access_settings import ACCESS_KEYS
from inferd.daemon.config.settings import SETTINGS
from inferd.daemon.config.show import config_schema, in_force, toml_of
from inferd.daemon.config.sources import load_config, read_sources
from tests.daemon.command_line import document, inferd
from tests.daemon.other_users import ADA, as_user

from .test_settings import (
    test_an_error_names_its_place_and_value,
    test_an_error_of_an_adapter_names_its_place_and_value,
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


def test_check_prints_the_path_of_a_valid_file(rich: Path) -> None:
    assert inferd("config", "check", str(rich)).stdout == f"{rich}: no errors\n"
    shown = document(inferd("config", "check", str(rich), "--json"))
    assert shown.pop("warnings") != []
    assert shown == {"file": str(rich), "models": ["small", "v1.5"], "errors": []}
    assert inferd("config", "check").stdout.startswith("no file; defaults and environment only")


def test_check_prints_all_errors_at_once_and_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[daemon]\nsesions-max = 1\ncores = -1\n[defaults]\ntemp = 1000\n")
    result = inferd("config", "check", str(path), "--set", "shutdown-grace-s=long")
    assert result.exit_code == 2 and result.stdout == ""
    for line in (
        "sesions-max: unknown key; did you mean 'sessions-max'?",
        "cores: -1 is outside 0 … 4096",
        "temp: 1000 is outside 0 … 100",
        "--set shutdown-grace-s: 'long' is not a number",
    ):
        assert line in result.stderr
    shown = inferd("config", "check", str(path), "--json")
    assert shown.exit_code == 2
    assert len(document(shown)["error"]["data"]["errors"]) == 3
    missing = inferd("config", "check", str(tmp_path / "none.toml"))
    assert missing.exit_code == 2 and "cannot be read: No such file" in missing.stderr


def test_check_warns_of_missing_files_of_models(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        '[daemon]\nmodels-dir = "."\n[models.here]\n[models.gone]\nfile = "gone.gguf"\n'
        '[models.gone.adapters]\ntone = "tone.gguf"\n'
        '[models.nowhere]\n[models.e]\nbackend = "echo"\n'
    )
    (tmp_path / "here.gguf").touch()
    (tmp_path / "page.gguf").write_text("<html>")
    lines = [
        "[models.nowhere]: `file` is missing, and so is nowhere.gguf in models-dir",
        f"[models.gone]: {tmp_path}/gone.gguf does not exist",
        f"[models.gone.adapters.tone]: {tmp_path}/tone.gguf does not exist",
        "page.gguf is not offered as a model: it is a web page: download the file itself",
    ]

    shown = inferd("config", "check", str(path))

    assert (shown.exit_code, shown.stdout) == (0, f"{path}: no errors\n")
    assert shown.stderr.splitlines() == [f"warning: {line}" for line in lines]
    assert document(inferd("config", "check", str(path), "--json"))["warnings"] == lines


# show


def test_the_shown_configuration_is_a_file_with_the_same_values(rich: Path, tmp_path: Path) -> None:
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


def test_show_prints_the_origin_of_each_value(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERD_SHUTDOWN_GRACE_S", "3")
    flags = ("--set", "sessions-max=9", "--config", str(rich))
    lines = inferd("config", "show", "--origin", *flags).stdout.splitlines()
    assert "sessions-max = 9  # --set sessions-max" in lines, "a flag comes before the file"
    assert "shutdown-grace-s = 3.0  # INFERD_SHUTDOWN_GRACE_S" in lines, "and the environment, too"
    assert f'kv-share = "all"  # {rich}' in lines
    assert "idle-timeout-ms = 300000  # default" in lines
    assert f"temp = 0.5  # {rich} [defaults]" in lines
    assert f"temp = 0.0  # {rich} [models.small]" in lines, "a model's own"
    plain = inferd("config", "show", *flags).stdout
    assert "#" not in plain and tomllib.loads(plain)["daemon"]["sessions-max"] == 9
    shown = document(inferd("config", "show", "--json", *flags))
    assert shown["settings"]["sessions-max"] == {"value": 9, "origin": "--set sessions-max"}
    assert shown["models"]["small"]["temp"]["value"] == 0.0
    assert set(shown["settings"]) == set(SETTINGS)


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


def test_flags_set_parameters_of_models_and_their_defaults(rich: Path) -> None:
    pairs = (
        "models.small.ctx-size=8192", "models.small.temperature=0.9", "models.v1.5.n-predict=7",
        "models.new.file=new.gguf", "defaults.top_k=3",
    )  # fmt: skip
    flags = [part for pair in pairs for part in ("--set", pair)]
    lines = inferd("config", "show", "--origin", "--config", str(rich), *flags).stdout.splitlines()

    for line in (
        "ctx-size = 8192  # --set models.small.ctx-size",
        "temp = 0.9  # --set models.small.temperature",
        "n-predict = 7  # --set models.v1.5.n-predict",
        f'file = "{rich.parent}/new.gguf"  # --set models.new.file',
        "top-k = 3  # --set defaults.top_k",
    ):
        assert line in lines
    assert f"temp = 0  # {rich} [models.small]" not in lines


@pytest.mark.parametrize(
    ("pair", "error"),
    [
        ("models.small.ctx-sise=1", "[models.small] unknown key 'ctx-sise'; did you mean"),
        ("models.small.ctx-size=no", "'no' is not a number"),
        ("models.small=1", "--set models.small: use models.NAME.KEY or defaults.KEY"),
        ("access.all.allow=use", "--set access.all.allow: use models.NAME.KEY or defaults.KEY"),
    ],
)
def test_a_wrong_flag_for_a_table_is_an_error(pair: str, error: str, rich: Path) -> None:
    result = inferd("config", "check", str(rich), "--set", pair)
    assert result.exit_code == 2 and error in result.stderr


def test_access_rules_are_shown_with_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "ruled.toml"
    path.write_text(RULES)
    shown = document(inferd("config", "show", "--config", str(path), "--json"))["access"]
    assert list(shown) == ["staff", "operators", "rest"], "in the order of the file"
    assert all(list(rule) == list(ACCESS_KEYS) for rule in shown.values())
    here = f"{path} [access.staff]"
    assert shown["staff"]["groups"] == {"value": [4711], "origin": here}
    assert shown["staff"]["tokens-per-minute"] == {"value": 100, "origin": here}
    assert shown["staff"]["allow"] == {"value": ["use"], "origin": "default"}
    assert shown["staff"]["priority-max"] == {"value": "high", "origin": "default"}
    assert shown["staff"]["sessions-max"] == {"value": None, "origin": "default"}
    assert shown["operators"]["users"]["value"] == ["root", 1004], "as they are named there"
    assert shown["operators"]["priority-max"]["value"] is None, "root's is another than 1004's"
    lines = inferd("config", "show", "--config", str(path), "--origin").stdout.splitlines()
    assert f'priority-max = "low"  # {path} [access.rest]' in lines
    assert lines[lines.index("[access.staff]") + 2] == 'allow = ["use"]  # default'


def test_shown_rules_give_every_user_the_same_rights(tmp_path: Path) -> None:
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
    shown = document(inferd("config", "show", "--config", str(path), "--json"))
    writer.join()
    assert shown["settings"]["sessions-max"] == {"value": 7, "origin": str(path)}


def test_the_name_of_the_file_cannot_add_lines(tmp_path: Path) -> None:
    path = tmp_path / "a\n[models.evil]\n.toml"
    path.write_text("[daemon]\nsessions-max = 3\n")
    shown = inferd("config", "show", "--origin", "--config", str(path)).stdout
    assert "models" not in tomllib.loads(shown)


def test_show_refuses_an_invalid_file_as_check_does(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[daemon]\ncores = true\n")
    result = inferd("config", "show", "--config", str(path))
    assert result.exit_code == 2 and "true is not a whole number" in result.stderr


# schema


def accepted(text: str) -> bool:
    # As JSON, which is what a schema is about.
    return bool(SCHEMA.is_valid(json.loads(json.dumps(tomllib.loads(text), allow_nan=False))))


def cases(test: Any) -> list[str]:
    """Return the texts that parametrize a test of invalid configurations."""
    [mark] = [m for m in test.pytestmark if m.name == "parametrize"]
    return [arguments[0] for arguments in mark.args[1]]


def test_the_command_prints_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(config_schema())
    assert document(inferd("config", "schema")) == config_schema()


def test_valid_files_match_the_schema(rich: Path) -> None:
    for text in (*re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL), RICH, ""):
        assert accepted(text)
    assert accepted(toml_of(in_force(read_sources({"config": rich}, {})), origins=True))
    assert accepted("[models.a]\nn_ctx = 512\ntemperature = 0.1\n")


@pytest.mark.parametrize(
    "text", [t for t in cases(test_an_error_names_its_place_and_value) if "= nan" not in t]
)
def test_refused_files_do_not_match_the_schema(text: str) -> None:
    """Cases with NaN are left out, because JSON cannot express it."""
    try:
        assert not accepted(text)
    except ValueError as exc:
        assert "inf" in text and "JSON compliant" in str(exc), "JSON has no infinity, either"


@pytest.mark.parametrize("adapters", cases(test_an_error_of_an_adapter_names_its_place_and_value))
def test_a_refused_adapter_does_not_match_the_schema(adapters: str) -> None:
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
def test_invalid_files_do_not_match_the_schema(text: str) -> None:
    assert not accepted(text)


NESTED = """
[defaults.memory_management.cache_policy]
max_cache_tokens = 5
strategy = "lru"
[models.x]
backend = "echo"
[models.x.sampling]
temp = 0.5
[models.x.sampling.dynatemp]
range = 0.25
[models.x.sampling.mirostat]
tau = 3
[models.x.stopping]
stop = ["END"]
token_conditions = [{token_id = 2, mode = "stop_on_token"}]
[models.x.logging]
level = "debug"
"""


def test_nested_tables_are_read_as_nested_json(tmp_path: Path) -> None:
    file = tmp_path / "nested.toml"
    text = NESTED.replace('strategy = "lru"\n', "")
    file.write_text(text)
    options = load_config({"config": file}).models["x"].options
    document = tomllib.loads(text)["models"]["x"]
    del document["backend"]
    assert options == read_options(document).values
    assert options["dynatemp-range"] == 0.25 and options["stop-tokens"] == [2]
    assert accepted(text)

    result = inferd("config", "check", str(file))
    assert result.exit_code == 0
    level, cache = sorted(result.stderr.splitlines(), key=len, reverse=True)
    assert "[models.x] level has no effect: " in level and "`log-level`" in level
    assert "[defaults] max_cache_tokens has no effect: " in cache and "`kv-ram-bytes`" in cache
    flags = {"config": file, "models.x.temp": 0.75, "models.x.dynatemp_range": 0}
    assert load_config(flags).models["x"].options["temp"] == 0.75

    file.write_text(NESTED)
    refused = inferd("config", "check", str(file))
    assert refused.exit_code == 2 and "[defaults] unknown key 'strategy'" in refused.stderr
    file.write_text(text.replace('backend = "echo"', 'backend = "echo"\ntemperature = 1'))
    assert "temp: given twice" in inferd("config", "check", str(file)).stderr


def test_a_models_directory_that_may_not_be_read_is_not_called_missing() -> None:
    top = Path(tempfile.mkdtemp(prefix="inferd-"))  # unlike pytest's folders, open to others
    try:
        top.chmod(0o711)
        (top / "models").mkdir(mode=0o700)
        (top / "models" / "m.gguf").touch()
        file = top / "config.toml"
        file.write_text(f"[daemon]\nmodels-dir = '{top}/models'\n[models.m]\nslots = 1\n")
        with as_user(ADA):
            checked = inferd("config", "check", str(file))
    finally:
        shutil.rmtree(top)
    assert checked.exit_code == 0
    assert f"{top}/models cannot be read: Permission denied" in checked.output
    assert "missing" not in checked.output
