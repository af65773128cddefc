"""Commands on models: list, show, load, unload, pin, remove."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from ....backends.errors import ConnectionLost, InvalidArgument, ModelNotFound
from ...residency.sizes import size_text
from .. import completion
from ..client import client_of
from ..one_shot import OneShotClient
from ..options import ConfigFile, JsonOutput, ModelName, ModelsDir, SocketPath
from ..output import fraction_bar, note, table, write, write_json

To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="MODEL",
        help="Another model, or a file in the models directory.",
        autocompletion=completion.models,
    ),
]
Mode = Annotated[
    Literal["migrate", "drain"],
    typer.Option(
        "--mode",
        metavar="migrate|drain",
        help="migrate: load MODEL first; drain: unload the old model first.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Unload it even if it is in use; running turns fail.")
]


def models(socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """List all models."""
    with OneShotClient(socket) as client:
        found = client.models()
    if as_json:
        write_json({"models": found})
        return
    rows = [
        (m["name"], m["state"], size_text(m["size_bytes"]), m["backend"], m["file"] or "-")
        for m in found
    ]
    table(("NAME", "STATE", "SIZE", "BACKEND", "FILE"), rows)


def show(name: ModelName, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Describe a model."""
    with client_of(socket) as client:
        found = client.show(name)
    if as_json:
        write_json(found)
        return
    table(("KEY", "VALUE"), list(_flat(found)))


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, dict):
            rows += _flat(item, f"{prefix}{key}.")
        elif item is not None:
            rows.append((prefix + key, item))
    return rows


def load(
    name: ModelName,
    keep_alive: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long it stays loaded without use; -1: until memory is short.",
        ),
    ] = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Load a model before its first use.

    It stays loaded for its keep-alive time.
    """
    config = {} if keep_alive is None else {"keep-alive": keep_alive}
    with client_of(socket) as client, fraction_bar(f"loading {name}", show=not as_json) as report:
        graph = client.load_by_name_with_config(name, config, on_progress=report)
        answer = {
            "model": graph.model,
            "fingerprint": graph.fingerprint,
            "ctx_size": graph.ctx_size,
            "slots": graph.slots,
            "not_applied": graph.not_applied,
        }
    if as_json:
        write_json(answer)
    else:
        less = ", less than configured because memory is short" if graph.not_applied else ""
        write(
            f"{name} is loaded: {graph.slots} sessions at once, {graph.ctx_size} tokens each{less}"
        )


def unload(
    name: ModelName, force: Force = False, socket: SocketPath = None, as_json: JsonOutput = False
) -> None:
    """Unload a model now."""
    with client_of(socket) as client:
        client.unload_model(name, force=force)
    if as_json:
        write_json({"unloaded": name})
    else:
        write(f"{name} is unloaded")


def pin(name: ModelName, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Exempt a model from eviction.

    Once loaded, it stays loaded even if other models need memory.
    """
    with client_of(socket) as client:
        client.pin(name)
    if as_json:
        write_json({"pinned": name})
    else:
        write(f"{name} is pinned: once loaded, it is not evicted")


def swap(
    name: ModelName,
    to: To,
    mode: Mode = "migrate",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Replace the model behind a name: its sessions continue, and no request fails."""
    with client_of(socket) as client:
        result = client.swap(name, to, mode=mode)
    if as_json:
        write_json({"swapped": name, **msgspec.structs.asdict(result)})
    else:
        write(f"{name} is now {to} ({result.fingerprint}, {result.mode})")


def unpin(name: ModelName, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """End the exemption of a model from eviction."""
    with client_of(socket) as client:
        client.unpin(name)
    if as_json:
        write_json({"unpinned": name})
    else:
        write(f"{name} is no longer pinned")


def rm(
    name: Annotated[
        str, typer.Argument(help="The model's name.", autocompletion=completion.local_models)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    force: Force = False,
    config: ConfigFile = None,
    models_dir: ModelsDir = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Remove a model's file.

    Only files in the models directory are removed.
    """
    from ...config.sources import load_config
    from ...pull import files_of

    directory = load_config({"config": config, "models_dir": models_dir}).models_dir
    files = files_of(name, directory)
    if not files:
        raise ModelNotFound(
            f"there is no file {directory / name}.gguf",
            hint="only files in the models directory are removed; `inferd models` shows all",
        )
    size = sum(path.lstat().st_size for path in files)
    if not yes and not typer.confirm(f"Remove {name} ({size_text(size)})?", err=True):
        note("nothing was removed")
        raise typer.Exit(1)
    _check_not_loaded(name, files[0], force, socket)
    for path in files:
        path.unlink(missing_ok=True)
    if as_json:
        write_json({"removed": [str(path) for path in files], "size_bytes": size})
    else:
        write(f"{name} is removed: {size_text(size)}")


def _check_not_loaded(name: str, file: Path, force: bool, socket: Path | None) -> None:
    """Check that the daemon has not loaded *file*; with *force*, unload it."""
    with contextlib.suppress(ConnectionLost), client_of(socket) as client:
        try:
            found = client.show(name)
        except ModelNotFound:
            return
        if found["state"] in ("cold", "failed") or not _is_same_file(found["file"], file):
            return
        if not force:
            raise InvalidArgument(
                f"{name} is {found['state']}", hint=f"`inferd unload {name}` first, or --force"
            )
        client.unload_model(name, force=True)


def _is_same_file(one: str, other: Path) -> bool:
    try:
        return bool(one) and other.samefile(one)
    except OSError:
        return False
