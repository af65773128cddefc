"""Commands on the daemon's models and their adapters: list, load, unload, pin, swap."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import typer

from ...daemon.printable import size_text
from .. import completion
from ..client import client_of, note_not_applied
from ..monitoring.status_commands import columns_for, media_text
from ..nodes import NODE_COLUMN, Node, check_node, on_nodes
from ..one_shot import OneShotClient
from ..options import Force, JsonOutput, ModelName, SocketPath
from ..output import Columns, fraction_bar, table_of, write, write_json, write_result

Adapter = Annotated[str, typer.Argument(help="The name by which requests choose the adapter.")]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="MODEL",
        help="Another model, a file in the models directory, or NAME itself (the same as --undo).",
        autocompletion=completion.models,
    ),
]
Undo = Annotated[
    bool, typer.Option("--undo", help="Load the model again that NAME had before its swaps.")
]
Mode = Annotated[
    Literal["migrate", "drain"],
    typer.Option(
        "--mode",
        metavar="migrate|drain",
        help="migrate: load MODEL first, if memory holds both; drain: unload the old model first.",
    ),
]


GRAPH_KEYS = ("model", "fingerprint", "ctx_size", "slots", "not_applied")
MODELS: Columns = {
    **NODE_COLUMN,
    "NAME": "name",
    "STATE": "state",
    "SIZE": lambda m: size_text(m["size_bytes"]) if m["size_bytes"] else None,
    "BACKEND": "backend",
    "READS": "media",
    "FILE": lambda m: f"another name of {m['of']}" if m.get("of") else m["file"] or None,
}
FILES: Columns = {**NODE_COLUMN, "NOT OFFERED": "file", "REASON": "reason"}


def models(
    all_files: Annotated[
        bool,
        typer.Option(
            "--all", help="Also list the files of the models directory that are not offered."
        ),
    ] = False,
    node: Node = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """List all models."""
    with OneShotClient(socket) as client:
        check_node(client, node)
        result = client.models_and_files(all_files=all_files)
    found, files = on_nodes(result.models, node), on_nodes(result.not_offered, node)
    if as_json:
        write_json({"models": found} | ({"not_offered": files} if all_files else {}))
        return
    shown = [{**model, "media": media_text(model)} for model in found]
    table_of(columns_for(shown, MODELS), shown)
    if files:
        write("")
        table_of(columns_for(files, FILES), files)


def load(
    name: ModelName,
    keep_alive: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long it stays loaded without use; -1: until memory is short.",
        ),
    ] = None,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Context of each session, if this command loads the model and the configuration"
            " sets none.",
        ),
    ] = None,
    mmproj: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Its projector for images and sounds, in the models directory or beside the file"
            " of the model, if this command loads the model and the configuration names none.",
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model that drafts for it, if this command loads the model and the"
            " configuration names none.",
        ),
    ] = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Load a model before its first use.

    It stays loaded for its keep-alive time.
    """
    given: dict[str, float | str | None] = {
        "keep-alive": keep_alive,
        "ctx-size": ctx_size,
        "mmproj": mmproj,
        "draft-model": draft_model,
    }
    config = {key: value for key, value in given.items() if value is not None}
    with client_of(socket) as client, fraction_bar(f"loading {name}", show=not as_json) as report:
        graph = client.load_by_name_with_config(name, config, on_progress=report)
    document = {key: getattr(graph, key) for key in GRAPH_KEYS}
    fitted = graph.not_applied.keys() - config.keys()
    less = ", less than configured because memory is short" if fitted else ""
    sessions = f": {graph.slots} sessions at once, {graph.ctx_size} tokens each{less}"
    text = f"{name} is loaded{sessions if graph.ctx_size else ''}"
    write_result(as_json, document, text)
    if not as_json:
        note_not_applied(graph, config)


def unload(
    name: ModelName, force: Force = False, socket: SocketPath = None, as_json: JsonOutput = False
) -> None:
    """Unload a model now."""
    with client_of(socket) as client:
        client.unload_model(name, force=force)
    write_result(as_json, {"unloaded": name}, f"{name} is unloaded")


def pin(name: ModelName, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Exempt a model from eviction.

    Once loaded, it stays loaded even if other models need memory.
    """
    with client_of(socket) as client:
        client.pin(name)
    write_result(as_json, {"pinned": name}, f"{name} is pinned: once loaded, it is not evicted")


def swap(
    name: ModelName,
    to: To = "",
    undo: Undo = False,
    mode: Mode = "migrate",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Swap to a model that generates no text even if sessions need text."
        ),
    ] = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Replace the model behind a name: its sessions continue, and no request fails."""
    if bool(to) == undo:
        raise typer.BadParameter("give one of --to MODEL and --undo")
    with client_of(socket) as client:
        result = client.swap(name, to or name, mode=mode, force=force)
    now = "again its own model" if to in ("", name) else f"now {to}"
    text = f"{name} is {now} ({result.fingerprint}, {result.mode})"
    if result.unreachable:
        text += f"; not on nodes that cannot be reached: {', '.join(result.unreachable)}"
    write_result(as_json, {"swapped": name, **msgspec.structs.asdict(result)}, text)


def unpin(name: ModelName, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """End the exemption of a model from eviction."""
    with client_of(socket) as client:
        client.unpin(name)
    write_result(as_json, {"unpinned": name}, f"unpinned {name}")


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
    text = f"{model} has the adapter {adapter} ({size_text(result.size_bytes)})"
    if not result.loaded:
        text = f"{model} will have the adapter {adapter} after its next load, which checks the file"
    write_result(as_json, {"added": adapter, **msgspec.structs.asdict(result)}, text)


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
    write_result(as_json, {"removed": adapter}, f"removed the adapter {adapter} from {model}")
