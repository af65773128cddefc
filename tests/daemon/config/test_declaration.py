"""Settings have one declaration each, from which every other place derives them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from inferd.cli.completion import settings as completed
from inferd.daemon.config import sources
from inferd.daemon.config.declaration import Applies, setting, settings_of
from inferd.daemon.config.settings import SETTINGS, Config, applies
from inferd.daemon.config.show import config_schema
from inferd.daemon.config.sources import ConfigError, load_config
from tests.daemon.command_line import document, inferd
from tools.settings_page import page


@dataclass(frozen=True, kw_only=True, slots=True)
class Wider(Config):
    """The configuration with an additional setting."""

    scratch_ms_max: int = setting(7, "a limit for tests", 1, 9, Applies.AT_ONCE)


@pytest.fixture(autouse=True)
def _declared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sources, "Config", Wider)
    monkeypatch.setitem(SETTINGS, "scratch-ms-max", settings_of(Wider)["scratch-ms-max"])


def read(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> int:
    config = load_config(flags, environ or {})
    assert isinstance(config, Wider)
    return config.scratch_ms_max


def test_it_is_read_from_flags_environment_and_file_and_converted(tmp_path: Path) -> None:
    file = tmp_path / "inferd.toml"
    file.write_text("[daemon]\nscratch_ms_max = 2\n")
    environ = {"INFERD_SCRATCH_MS_MAX": "3"}
    assert read() == 7
    assert read({"config": file}) == 2
    assert read({"config": file}, environ) == 3
    assert read({"config": file, "scratch-ms-max": "4"}, environ) == 4


def test_its_bounds_hold_in_each_source(tmp_path: Path) -> None:
    file = tmp_path / "inferd.toml"
    file.write_text("[daemon]\nscratch-ms-max = 10\n")
    with pytest.raises(ConfigError) as caught:
        load_config({"config": file, "scratch-ms-max": "0"}, {"INFERD_SCRATCH_MS_MAX": "1.5"})
    assert caught.value.lines == [
        f"{file}: [daemon] scratch-ms-max: 10 is outside 1 … 9",
        "INFERD_SCRATCH_MS_MAX: '1.5' is not a whole number",
        "--scratch-ms-max: 0 is outside 1 … 9",
    ]


def test_it_is_in_the_schema_and_on_the_page() -> None:
    schema = config_schema()
    assert schema["properties"]["daemon"]["properties"]["scratch-ms-max"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "description": "a limit for tests (a change takes effect at once)",
        "default": 7,
    }
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"daemon": {"scratch_ms_max": 9}})
    assert not validator.is_valid({"daemon": {"scratch_ms_max": 10}})
    assert "| `scratch-ms-max` | 7 | 1 … 9 | a limit for tests | at once |\n" in page()


def test_it_is_shown_with_its_origin_and_completed() -> None:
    shown = inferd("config", "show", "--origin", "--set", "scratch-ms-max=5").stdout
    assert "scratch-ms-max = 5  # --set scratch-ms-max\n" in shown
    shown = document(inferd("config", "show", "--json"))["settings"]["scratch-ms-max"]
    assert shown == {"value": 7, "origin": "default"}
    assert ("scratch-ms-max=", "a limit for tests") in completed("")
    assert applies("scratch-ms-max") is Applies.AT_ONCE
