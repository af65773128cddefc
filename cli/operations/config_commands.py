"""`inferd config`: check of the configuration, its values in force, and its schema."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from ..options import ConfigFile, JsonOutput, SettingPairs, read_settings
from ..output import note, write, write_json, write_result

config = typer.Typer(help="Check, show and describe the configuration.", no_args_is_help=True)


@config.command()
def check(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="The file; by default the one that a daemon would read."
        ),
    ] = None,
    settings: SettingPairs = None,
    as_json: JsonOutput = False,
) -> None:
    """Report all errors of the configuration.

    It checks the file, the environment and --set, as `inferd serve` would. The exit status is 2 if
    there are errors. A missing file of a model is a warning.
    """
    from ...backends.gguf.facts import other_content
    from ...daemon.config.sources import read_sources
    from ...daemon.models.model_files import (
        FoundModels,
        files_not_offered,
        find_models,
        missing_files,
    )

    flags = {**read_settings(settings), "config": file}
    sources = read_sources(flags)
    config, path = sources.config, sources.file
    found, warnings = FoundModels(), list[str]()
    try:
        found = find_models(config.models_dir)
        there: Collection[str] = found.files
    except OSError as exc:  # a folder that may not be read may have the files
        warnings.append(f"models-dir: {config.models_dir} cannot be read: {exc.strerror}")
        there = config.models
    warnings += missing_files(config.tables, there) + sources.notes
    warnings += [
        f"{one.file} is not offered as a model: {one.reason}"
        for one in files_not_offered(config.models_dir, found, config.tables, other_content)
        if not one.is_expected
    ]
    document = {
        "file": str(path or ""),
        "models": list(config.tables),
        "errors": [],
        "warnings": warnings,
    }
    write_result(
        as_json, document, f"{path or 'no file; defaults and environment only'}: no errors"
    )
    for warning in warnings if not as_json else ():
        note(f"warning: {warning}")


@config.command()
def show(
    config: ConfigFile = None,
    settings: SettingPairs = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show the origin of each value.")
    ] = False,
    as_json: JsonOutput = False,
) -> None:
    """Show the values in force, as a configuration file.

    Each setting has the value that `inferd serve` would use here. Each model has its parameters,
    including those from [defaults]; `inferd parameters` lists the defaults of all others. Each
    access rule has its own values, and the inherited ones.
    """
    from ...daemon.config.show import in_force, toml_of
    from ...daemon.config.sources import read_sources

    shown = in_force(read_sources({**read_settings(settings), "config": config}))
    if as_json:
        write_json(shown)
    else:
        write(toml_of(shown, origins=origin), end="")


@config.command()
def schema(as_json: JsonOutput = False) -> None:
    """Print the JSON schema of a configuration file."""
    from ...daemon.config.show import config_schema

    write_json(config_schema())
