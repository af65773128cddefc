"""`inferd config`: check of the configuration, its values in force, and its schema."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..options import ConfigFile, JsonOutput, SettingPairs, read_settings
from ..output import write, write_json


def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The file; nothing: the one that a daemon would read."),
    ] = None,
    settings: SettingPairs = None,
    as_json: JsonOutput = False,
) -> None:
    """Tell everything that is wrong with the configuration.

    Looks at the file, the environment and --set, as `inferd serve` would; ends with 2 if anything
    is wrong.
    """
    from ...config.sources import configuration_file, load_config

    flags = {**read_settings(settings), "config": file}
    config, path = load_config(flags), configuration_file(file, os.environ)
    if as_json:
        write_json({"file": str(path or ""), "models": list(config.models), "errors": []})
    else:
        write(f"{path or 'no file: the defaults hold, and what the environment says'}: all right")


def show(
    config: ConfigFile = None,
    settings: SettingPairs = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say who said each of them.")] = False,
    as_json: JsonOutput = False,
) -> None:
    """Show what holds, as a configuration file.

    Of each setting the value that `inferd serve` would use here; of each model its parameters,
    those of [defaults] among them. Others have their own defaults: `inferd parameters`. Of each
    rule of access what it says, and what holds where it does not.
    """
    from ...config.show import in_force, toml_of
    from ...config.sources import read_sources

    shown = in_force(read_sources({**read_settings(settings), "config": config}))
    if as_json:
        write_json(shown)
    else:
        write(toml_of(shown, origins=origin), end="")


def schema(as_json: JsonOutput = False) -> None:
    """Write the JSON schema of a configuration file."""
    from ...config.settings_schema import config_schema

    write_json(config_schema())


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Check, show and describe the configuration.", no_args_is_help=True)
    for command in (check, show, schema):
        group.command()(command)
    app.add_typer(group, name="config")
