"""`inferd embed`, `inferd rerank` and `inferd template`: the embeddings of texts, the order of
documents by their scores for a query, and the prompt of a model's chat template.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import typer

from ..client import client_of, repeat_refused
from ..model_arguments import known_model
from ..options import (
    JsonOutput,
    ModelOrFile,
    PriorityOption,
    SocketPath,
    SystemPrompt,
    read_file,
    read_pairs,
)
from ..output import fraction_bar, note, write, write_answer, write_json
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
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate", help="Leave out the end of texts that are too long to be read at once."
        ),
    ] = False,
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
    texts = texts or _lines("TEXT")
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
                truncate=truncate,
                priority=priority,
                timeout=timeout,
                on_progress=report,
            )
        )
    if as_json:
        keys = ("model", "pooling", "size", "tokens", "truncated")
        document = {key: getattr(embeddings, key) for key in keys}
        vectors = embeddings.by_text if embeddings.pooling == "none" else list(embeddings)
        write_json(document | {"embeddings": vectors})
    else:
        for vector in embeddings:
            write(" ".join(f"{x:.9g}" for x in vector))
        _note_truncated("texts", embeddings.truncated)


def _lines(argument: str) -> list[str]:
    if not sys.stdin.isatty() and (lines := read_input().splitlines()):
        return lines
    raise typer.BadParameter(f"{argument} is missing")


def _note_truncated(kind: str, indexes: Sequence[int]) -> None:
    """Print the places, from 1, of the texts or documents that were truncated, if any."""
    if indexes:
        places = ", ".join(str(index + 1) for index in indexes)
        note(f"left out the end of these {kind}: {places}")


def rerank(
    model: ModelOrFile,
    query: Annotated[str, typer.Argument(help="The query.")],
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOCUMENT...",
            help="The documents; without any, each line of standard input is a document.",
        ),
    ] = None,
    top_n: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="How many documents to print.", show_default="all"),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Leave out the end of documents that are too long to be read at once.",
        ),
    ] = False,
    priority: PriorityOption = "normal",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="Timeout for all documents.")
    ] = 600.0,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Order documents by their scores for a query, by a reranking model.

    Each document is a line with its score from 0 to 1, the highest first.
    """
    documents = documents or _lines("DOCUMENT")
    with (
        client_of(socket) as client,
        fraction_bar(f"loading {model}", show=not as_json) as report,
    ):
        ranking = repeat_refused(
            lambda: client.rerank(
                known_model(client, model, None, report),
                query,
                documents,
                top_n=top_n,
                truncate=truncate,
                priority=priority,
                timeout=timeout,
                on_progress=report,
            )
        )
    if as_json:
        keys = ("model", "tokens", "cached_tokens", "truncated")
        results = [asdict(one) for one in ranking]
        write_json({key: getattr(ranking, key) for key in keys} | {"results": results})
        return
    for one in ranking:
        text = " ".join(one.document.split())
        write(f"{one.score:.4f}  {text}")
    _note_truncated("documents", ranking.truncated)


FILE_BYTES_MAX = 4 << 20


def template(
    model: ModelOrFile,
    prompt: Annotated[str | None, typer.Argument(help="The user's message.")] = None,
    system: SystemPrompt = None,
    messages: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Messages before PROMPT: a file with a JSON list."),
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tools: a file with a JSON list.")
    ] = None,
    argument: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A variable of the template, such as enable_thinking=false; repeatable.",
        ),
    ] = None,
    answer: Annotated[
        bool, typer.Option(help="Whether the prompt ends with the beginning of an answer.")
    ] = True,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Show the prompt that a model's chat template renders, and count its tokens."""
    conversation = [{"role": "system", "content": system}] if system is not None else []
    conversation += _list_in(messages)
    conversation += [{"role": "user", "content": prompt}] if prompt is not None else []
    if not conversation:
        raise typer.BadParameter("PROMPT or --messages is missing")
    with client_of(socket) as client:
        graph = client.load_by_name(known_model(client, model, None, None))
        text = client.apply_template(
            graph,
            conversation,
            tools=_list_in(tools),
            arguments=read_pairs(argument, "--argument"),
            add_generation_prompt=answer,
        )
    if as_json:
        write_json({"text": str(text), "tokens": text.tokens})
        return
    write_answer(text)
    note(f"{text.tokens} tokens")


def _list_in(path: Path | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    data = read_file(path, FILE_BYTES_MAX, str(path))
    try:
        return msgspec.json.decode(data, type=list[dict[str, Any]])
    except msgspec.DecodeError as exc:
        raise typer.BadParameter(f"{path} is not a JSON list of objects: {exc}") from None
