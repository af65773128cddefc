"""Other names of models in the configuration: their keys, contradictions, schema and forms."""

from __future__ import annotations

import tomllib
from pathlib import Path

import jsonschema
import pytest

from inferd.daemon.config.model_settings import AdapterConfig, NameTemplate
from inferd.daemon.config.names import DerivedName, with_name
from inferd.daemon.config.show import config_schema, in_force, toml_of
from inferd.daemon.config.sources import ConfigError, load_config, read_sources
from inferd.daemon.models.model_files import missing_files
from tests.daemon.command_line import document, inferd

SCHEMA = jsonschema.Draft202012Validator(config_schema())
BASE = '[models.base]\nbackend = "echo"\nctx-size = 100\nadapters = { a = "a.gguf" }\n'
NAME = """[models.coder]
of = "base"
temperature = 0.25
system_prompt = "You write code."
ctx-size = 50
n-predict-max = 7
reasoning-max = { low = 5 }
priority-max = "low"
adapters = { loud = "loud.gguf", soft = { file = "soft.gguf", scale = 0.5 } }
"""


def read(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def errors_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config({"config": read(folder, text)}, {})
    return [line.partition("config.toml: ")[2] for line in caught.value.lines]


def test_a_name_has_parameters_adapters_and_ceilings(tmp_path: Path) -> None:
    config = load_config({"config": read(tmp_path, BASE + NAME)}, {})
    assert list(config.models) == ["base"] and list(config.tables) == ["base", "coder"]
    coder = config.names["coder"]
    assert coder == DerivedName(
        of="base",
        options={"temp": 0.25, "system-prompt": "You write code.", "ctx-size": 50},
        adapters={
            "loud": AdapterConfig(file=tmp_path / "loud.gguf"),
            "soft": AdapterConfig(file=tmp_path / "soft.gguf", scale=0.5),
        },
        n_predict_max=7,
        reasoning_max={"low": 5},
        priority_max="low",
    )
    assert coder.parameters["lora"] == [["loud", 1.0], ["soft", 0.5]]


def test_shown_names_give_the_same_configuration(tmp_path: Path) -> None:
    path = read(tmp_path, BASE + NAME)
    sources = read_sources({"config": path}, {})
    again = tmp_path / "again.toml"
    again.write_text(toml_of(in_force(sources), origins=True))
    assert load_config({"config": again}, {}).names == sources.config.names
    assert SCHEMA.is_valid(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ('[models.a]\nof = "a"', "[models.a] of: 'a' names itself; write the name of a model"),
        (
            '[models.a]\nof = "b"\n[models.b]\nof = "base"',
            "[models.a] of: 'b' is another name itself, of 'base'; write the name of a model",
        ),
        (
            '[models.a]\nof = "base"\nslots = 8\ncache-type-k = "q8_0"',
            (
                "[models.a] slots, cache-type-k: 'a' shares the process of 'base', which decides"
                " them; set them under [models.base], or give 'a' a `file` in place of `of`"
            ),
        ),
        (
            '[models.a]\nof = "base"\nfile = "x.gguf"\nbackend = "echo"',
            (
                "[models.a] file, backend: 'a' shares the process of 'base', which decides them;"
                " set them under [models.base], or give 'a' a `file` in place of `of`"
            ),
        ),
        (
            '[models.a]\nof = "base"\nctx-size = 101',
            (
                "[models.a] ctx-size: 101 is more than the 100 of [models.base], whose process it"
                " shares"
            ),
        ),
        (
            '[models.a]\nof = "base"\nadapters = { a = "b.gguf" }',
            (
                "[models.a] adapters: a: 'base' has another file of this name, {}/a.gguf; choose"
                " another name"
            ),
        ),
        (
            '[models.a]\nof = "base"\nchat-template = "{{ messages }}"',
            "[models.a] chat-template: 'base' is an echo model, which has no templates",
        ),
        (
            '[models.a]\nof = "base"\ntool-format = "hermes"',
            (
                "[models.a] tool-format: 'base' is an echo model, whose option tool_format decides"
                " it"
            ),
        ),
        (
            '[models.a]\nof = "base"\nkeep-alive = -1\nsimilarity-model = "e"',
            (
                "[models.a] keep-alive, similarity-model: 'a' shares the process of 'base', which"
                " decides them; set them under [models.base], or give 'a' a `file` in place of `of`"
            ),
        ),
        (
            '[models.echo]\nof = "base"',
            "[models.echo] of: 'echo' is the name of the built-in model; choose another one",
        ),
        ('[models.a]\nof = ""', "[models.a] of: is not the name of a model"),
        ("[models.a]\nof = 3", "[models.a] of: is not the name of a model"),
        (
            '[models.a]\nof = "base"\nn-predict-max = 0',
            "[models.a] n-predict-max: 0 is outside 1 … 16777216",
        ),
        (
            '[models.a]\nof = "base"\npriority-max = "top"',
            "[models.a] priority-max: 'top' is not one of low, normal, high, urgent",
        ),
        (
            '[models.a]\nof = "base"\nn-predict-mux = 1',
            "[models.a] unknown key 'n-predict-mux'; did you mean 'n-predict-max'?",
        ),
    ],
)
def test_a_contradiction_is_an_error(tmp_path: Path, table: str, error: str) -> None:
    assert errors_of(tmp_path, BASE + table) == [error.replace("{}", str(tmp_path))]


def test_a_cycle_is_an_error_at_each_name(tmp_path: Path) -> None:
    lines = errors_of(tmp_path, '[models.a]\nof = "b"\n[models.b]\nof = "a"\n')
    assert [line.partition(";")[0] for line in lines] == [
        "[models.a] of: 'b' is another name itself, of 'a'",
        "[models.b] of: 'a' is another name itself, of 'b'",
    ]


def test_keys_of_names_belong_to_names_alone(tmp_path: Path) -> None:
    for key in ("n-predict-max = 3", 'priority-max = "low"'):
        text = f'[models.m]\nfile = "m.gguf"\n{key}\n'
        [line] = errors_of(tmp_path, text)
        assert line.startswith("[models.m] unknown key")
        assert not SCHEMA.is_valid(tomllib.loads(text))
    assert not SCHEMA.is_valid(tomllib.loads('[models.a]\nof = "m"\nslots = 2\n'))


def test_a_missing_model_is_a_warning_of_the_check(tmp_path: Path) -> None:
    path = read(tmp_path, '[models.a]\nof = "ech"\n')
    tables = load_config({"config": path}, {}).tables
    [line] = missing_files(tables, ())
    assert line == "[models.a] of: there is no model 'ech'; did you mean 'echo'?"
    checked = document(inferd("config", "check", str(path), "--json"))
    assert line in checked["warnings"] and checked["models"] == ["a"]


def test_a_name_has_a_form_of_answers_with_or_without_a_template(tmp_path: Path) -> None:
    text = '[models.base]\nfile = "m.gguf"\ntool-format = "llama"\n'
    text += '[models.a]\nof = "base"\ntool-format = "hermes"\n'
    text += '[models.b]\nof = "base"\nchat-template = "{{ messages }}"\n[models.b.tool-format]\n'
    text += 'calls = [{ begin = "<do>", end = "</do>" }]\n[models.c]\nof = "base"\n'
    config = load_config({"config": read(tmp_path, text)}, {})
    templates = config.models["base"]
    for name in config.names:
        templates = with_name(templates, name, config.names[name])
    assert list(templates.templates) == ["a", "b"]
    assert templates.templates["a"] == NameTemplate(tool_format="hermes")
    own = templates.templates["b"]
    assert own.source == "{{ messages }}" and isinstance(own.tool_format, dict)
    assert SCHEMA.is_valid(tomllib.loads(text))
