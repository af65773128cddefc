"""Options that the commands of several gateways share."""

from __future__ import annotations

from typing import Annotated

import typer

from .preloads import Preload, parse_preload

Preloads = Annotated[
    list[str] | None,
    typer.Option(
        "--nn-preload",
        metavar="NAME:GGML:AUTO:MODEL",
        help="A model that the guest loads by NAME: a model of the daemon or the path of a GGUF"
        " file; repeatable. Without it and --allow-model, the guest may load all models of the"
        " daemon.",
    ),
]
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-model",
        metavar="MODEL",
        help="A model of the daemon that the guest may load by its own name; repeatable.",
    ),
]


def models_of(preloads: list[str] | None, allowed: list[str] | None) -> dict[str, Preload]:
    """Return the models that a guest may load by name; an empty dict means all of the daemon's."""
    return {name: Preload(name) for name in allowed or ()} | dict(
        map(parse_preload, preloads or ())
    )
