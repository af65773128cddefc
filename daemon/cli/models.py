"""Commands on models: list, show, load, unload, remove."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from ...backends.errors import ConnectionLost, InvalidArgument, ModelNotFound
from .client import client_of
from .options import ConfigFile, JsonOutput, ModelsDir, SocketPath
from .output import fraction_bar, note, size_text, table, write, write_json

__all__ = ("add_to",)

Name = Annotated[str, typer.Argument(help="The model's name.")]
Force = Annotated[bool, typer.Option("--force", help="Even if it is in use.")]


def models(socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """List the models that the daemon knows."""
    with client_of(socket) as client:
        found = client.models()
    if as_json:
        write_json({"models": found})
        return
    rows = [
        (m["name"], m["state"], size_text(m["size_bytes"]), m["backend"], m["file"] or "-")
        for m in found
    ]
    table(("NAME", "STATE", "SIZE", "BACKEND", "FILE"), rows)


def show(name: Name, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
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


def load(name: Name, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Load a model ahead of its first use.

    It stays for the daemon's keep-alive.
    """
    with client_of(socket) as client, fraction_bar(f"loading {name}", show=not as_json) as tell:
        graph = client.load_by_name(name, on_progress=tell)
        answer = {
            "model": graph.model,
            "fingerprint": graph.fingerprint,
            "ctx_size": graph.ctx_size,
            "slots": graph.slots,
        }
    if as_json:
        write_json(answer)
    else:
        write(f"{name} is loaded: {graph.slots} sessions at once, {graph.ctx_size} tokens each")


def unload(
    name: Name, force: Force = False, socket: SocketPath = None, as_json: JsonOutput = False
) -> None:
    """Unload a model now."""
    with client_of(socket) as client:
        client.unload_model(name, force=force)
    if as_json:
        write_json({"unloaded": name})
    else:
        write(f"{name} is unloaded")


def rm(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Force = False,
    config: ConfigFile = None,
    models_dir: ModelsDir = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Remove a model's file.

    Only files in the models directory are removed.
    """
    from ..config import load_config
    from ..pull import files_of

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
    _let_go(name, files[0], force, socket)
    for path in files:
        path.unlink(missing_ok=True)
    if as_json:
        write_json({"removed": [str(path) for path in files], "size_bytes": size})
    else:
        write(f"{name} is removed: {size_text(size)}")


def _let_go(name: str, file: Path, force: bool, socket: Path | None) -> None:
    """See that no daemon has *file* loaded; with *force* unload it."""
    with contextlib.suppress(ConnectionLost), client_of(socket) as client:
        try:
            found = client.show(name)
        except ModelNotFound:
            return
        if found["state"] in ("cold", "failed") or not _same(found["file"], file):
            return
        if not force:
            raise InvalidArgument(
                f"{name} is {found['state']}", hint=f"`inferd unload {name}` first, or --force"
            )
        client.unload_model(name, force=True)


def _same(one: str, other: Path) -> bool:
    try:
        return bool(one) and other.samefile(one)
    except OSError:
        return False


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (models, show, load, unload, rm):
        app.command()(command)
