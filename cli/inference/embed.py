"""`inferd embed`: the embeddings of texts."""

from __future__ import annotations

import sys
from typing import Annotated, Literal, get_args

import typer

from ..client import client_of, repeat_refused
from ..model_arguments import known_model
from ..options import JsonOutput, ModelOrFile, PriorityOption, SocketPath
from ..output import fraction_bar, write, write_json
from .run import read_input

Pooling = Literal["none", "mean", "cls", "last", "rank"]


def embed(
    model: ModelOrFile,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT...", help="The texts; without any, each line of standard input is a text."
        ),
    ] = None,
    pooling: Annotated[
        Pooling | None,
        typer.Option(
            metavar="|".join(get_args(Pooling)),
            help="How token vectors are combined into the vector of a text.",
            show_default="the model's default",
        ),
    ] = None,
    normalize: Annotated[
        int,
        typer.Option(
            metavar="N", help="-1: none, 0: maximum 32760, 1: taxicab, 2: euclidean, P: p-norm."
        ),
    ] = 2,
    priority: PriorityOption = "normal",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="Timeout for all texts.")
    ] = 600.0,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Compute embeddings of texts.

    Each vector is printed as a line of numbers.
    """
    texts = texts or _lines()
    with (
        client_of(socket) as client,
        fraction_bar(f"loading {model}", show=not as_json) as report,
    ):
        embeddings = repeat_refused(
            lambda: client.embed(
                known_model(client, model, None, report),
                texts,
                pooling=pooling or "",
                normalize=normalize,
                priority=priority,
                timeout=timeout,
                on_progress=report,
            )
        )
    if as_json:
        keys = ("model", "pooling", "size", "tokens")
        document = {key: getattr(embeddings, key) for key in keys}
        vectors = embeddings.by_text if embeddings.pooling == "none" else list(embeddings)
        write_json(document | {"embeddings": vectors})
    else:
        for vector in embeddings:
            write(" ".join(f"{x:.9g}" for x in vector))


def _lines() -> list[str]:
    if not sys.stdin.isatty() and (lines := read_input().splitlines()):
        return lines
    raise typer.BadParameter("TEXT is missing")
