"""`inferd config`: check of the configuration, its values in force, and its schema."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..options import ConfigFile, JsonOutput, SettingPairs, read_settings
from ..output import note, write, write_json, write_result

if TYPE_CHECKING:
    from ...daemon.config.settings import Config

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
    there are errors. A missing file of a model is a warning, as are pinned and preloaded models
    that do not fit into the memory together.
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
    warnings += list(_memory_warnings(config, found.files))
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


def _memory_warnings(config: Config, files: Mapping[str, Path]) -> Iterator[str]:
    """Yield a sentence for each preloaded model that is missing, and for each set of pinned and
    preloaded models whose estimates exceed the memory budget.
    """
    from ...backends.gguf.header import DamagedHeader
    from ...daemon.config.model_settings import ECHO, ModelConfig
    from ...daemon.models.description import need_by_header
    from ...daemon.models.persisted_settings import pinned_names
    from ...daemon.printable import size_text
    from ...daemon.residency.machine import MachineMemory, headroom_bytes
    from ...daemon.residency.plan import sets_too_large
    from ...daemon.state_files import SETTINGS_FILE
    from ...ipc.model_names import find_name

    names = {ECHO, *config.models, *files}
    needs: dict[str, int] = {}
    pinned = pinned_names(config.state_dir / SETTINGS_FILE)
    for name in dict.fromkeys((*config.preload, *pinned)):
        found = find_name(name, names | config.names.keys())
        if found is None and name in config.preload:
            yield f"preload: there is no model {name!r}"
        base = config.names[found].of if found in config.names else found
        base = None if base is None else find_name(base, names)
        if base is None or base in needs:
            continue
        model = config.models.get(base, ModelConfig())
        if model.backend != ECHO and base != ECHO:
            model = model.with_file(model.file or files.get(base))
            with suppress(OSError, DamagedHeader):  # the load reports it
                if (need := need_by_header(config, model)) is not None:
                    needs[base] = need
    total = MachineMemory().total_bytes()
    budget = config.memory_bytes or total - headroom_bytes(total)
    for found_set in sets_too_large(needs, budget):
        shown = ", ".join(f"{name} ({size_text(needs[name])})" for name in found_set)
        need = sum(needs[name] for name in found_set)
        yield (
            f"memory: these pinned and preloaded models need {size_text(need)} with full contexts,"
            f" and there are {size_text(budget)}: {shown}"
        )


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
