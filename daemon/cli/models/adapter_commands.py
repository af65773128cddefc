"""Commands on a model's adapters: add, remove."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from ...residency.sizes import size_text
from ..client import client_of
from ..options import JsonOutput, ModelName, SocketPath
from ..output import write, write_json

Adapter = Annotated[str, typer.Argument(help="The name by which requests choose the adapter.")]


def add_adapter(
    model: ModelName,
    adapter: Adapter,
    file: Annotated[str, typer.Argument(help="A file in the models directory or a subfolder.")],
    scale: Annotated[
        float,
        typer.Option(metavar="NUMBER", help="Its scale for requests that choose no adapters."),
    ] = 0.0,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Add a LoRA adapter to a model while it runs."""
    with client_of(socket) as client:
        result = client.add_adapter(model, adapter, file, scale=scale)
    if as_json:
        write_json({"added": adapter, **msgspec.structs.asdict(result)})
    elif result.loaded:
        write(f"{model} has the adapter {adapter} ({size_text(result.size_bytes)})")
    else:
        write(f"{model} will have the adapter {adapter} after its next load, which checks the file")


def rm_adapter(
    model: ModelName,
    adapter: Adapter,
    force: Annotated[
        bool, typer.Option("--force", help="Remove it even if turns use it; they fail.")
    ] = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Remove an adapter from a model."""
    with client_of(socket) as client:
        client.remove_adapter(model, adapter, force=force)
    if as_json:
        write_json({"removed": adapter})
    else:
        write(f"{model} no longer has the adapter {adapter}")
