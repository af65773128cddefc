"""`inferd template`: the prompt of a model's chat template, and its token count."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ..client import client_of
from ..model_arguments import known_model
from ..options import JsonOutput, ModelOrFile, SocketPath, SystemPrompt, read_pairs
from ..output import note, write_answer, write_json

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
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise typer.BadParameter(f"{path}: {exc.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise typer.BadParameter(f"{path}: more than {FILE_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(data, type=list[dict[str, Any]])
    except msgspec.DecodeError as exc:
        raise typer.BadParameter(f"{path} is not a JSON list of objects: {exc}") from None
