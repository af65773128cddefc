"""`inferd embed`: the embeddings of texts."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from ....backends.errors import TooLarge
from ..client import RETRIES, client_of
from ..options import JsonOutput, ModelName, PriorityName, PriorityOption, SocketPath
from ..output import fraction_bar, write, write_json
from .run import PROMPT_BYTES_MAX


class Pooling(StrEnum):
    """The pooling of token vectors to the vector of a text."""

    NONE = "none"
    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    RANK = "rank"


def embed(
    model: ModelName,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT...", help="The texts; without any, each line of standard input is a text."
        ),
    ] = None,
    pooling: Annotated[
        Pooling | None,
        typer.Option(
            metavar="|".join(Pooling),
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
    priority: PriorityOption = PriorityName.NORMAL,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="Timeout for all texts.")
    ] = 600.0,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Compute embeddings of texts.

    Each vector is printed as a line of numbers.
    """
    given = texts or _lines()
    with (
        client_of(socket, retries=RETRIES) as client,
        fraction_bar(f"loading {model}", show=not as_json) as report,
    ):
        embeddings = client.embed(
            model,
            given,
            pooling="" if pooling is None else pooling.value,
            normalize=normalize,
            priority=priority.value,
            timeout=timeout,
            on_progress=report,
        )
    if as_json:
        whole = embeddings.pooling == "none"
        write_json(
            {
                "model": embeddings.model,
                "pooling": embeddings.pooling,
                "size": embeddings.size,
                "tokens": embeddings.tokens,
                "embeddings": embeddings.by_text if whole else list(embeddings),
            }
        )
    else:
        for vector in embeddings:
            write(" ".join(f"{x:.9g}" for x in vector))


def _lines() -> list[str]:
    if sys.stdin.isatty():
        raise typer.BadParameter("there is no TEXT")
    data = sys.stdin.buffer.read(PROMPT_BYTES_MAX + 1)
    if len(data) > PROMPT_BYTES_MAX:
        raise TooLarge(f"texts of more than {PROMPT_BYTES_MAX} bytes", hint="send fewer at a time")
    lines = data.decode(errors="replace").splitlines()
    if not lines:
        raise typer.BadParameter("there is no TEXT")
    return lines
