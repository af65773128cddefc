"""`inferd infill`: the text at a place in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ..client import RESUME_S, session_of
from ..options import (
    JsonOutput,
    ModelOptions,
    ModelOrFile,
    PriorityOption,
    SocketPath,
    read_file,
)
from ..starting import start_on_demand
from .answering import LossNotice, Stats, Temperature, TokensMax, print_answer, turn_options

FILE_BYTES_MAX = 4 << 20
_PLACE = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")


def infill(
    model: ModelOrFile,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file.")],
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="LINE[:COLUMN]",
            help="The place, counted from 1; without COLUMN it is the end of the line.",
        ),
    ],
    extra: Annotated[
        list[Path] | None,
        typer.Option("--extra", metavar="FILE", help="Another file that the model reads first."),
    ] = None,
    suffix_first: Annotated[
        bool,
        typer.Option("--suffix-first", help="Put the text behind the place first in the prompt."),
    ] = False,
    priority: PriorityOption = "normal",
    temp: Temperature = None,
    n_predict: TokensMax = 128,
    option: ModelOptions = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="Timeout of the whole turn.")
    ] = 600.0,
    stats: Stats = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Fill in the text at a place in a file, by a model that was trained for it.

    The text is streamed to standard output; the file stays as it is.
    """
    prefix, suffix = split_at(_text_of(file), at)
    others = [{"name": path.name, "text": _text_of(path)} for path in extra or ()]
    options = turn_options(option, temp, n_predict, None)
    start_on_demand(socket, model)
    from ...ipc.client import Infill

    place = Infill(prefix=prefix, suffix=suffix, extra=others, suffix_first=suffix_first)
    losses = LossNotice(socket, model, RESUME_S)
    with session_of(
        socket, model, show_bar=not as_json, priority=priority, options=options
    ) as conversation:
        print_answer(
            conversation, place, losses, as_json=as_json, stats=stats, markdown=False,
            timeout=timeout,
        )  # fmt: skip


def _text_of(path: Path) -> str:
    data = read_file(path, FILE_BYTES_MAX, str(path))
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise typer.BadParameter(f"{path} is not UTF-8: {exc.reason}") from None


def split_at(text: str, at: str) -> tuple[str, str]:
    """Return the parts of a text before and behind a place, ``LINE`` or ``LINE:COLUMN``.

    :raises typer.BadParameter: the text has no such place.
    """
    match = _PLACE.fullmatch(at)
    if match is None:
        raise typer.BadParameter(f"--at {at!r} is not LINE or LINE:COLUMN, such as 12:5")
    lines = text.split("\n")
    number = int(match[1])
    if not 1 <= number <= len(lines):
        raise typer.BadParameter(f"--at {at}: the file has {len(lines)} lines")
    line = lines[number - 1]
    column = len(line) + 1 if match[2] is None else int(match[2])
    if not 1 <= column <= len(line) + 1:
        raise typer.BadParameter(f"--at {at}: line {number} has {len(line)} characters")
    begin = sum(len(each) + 1 for each in lines[: number - 1]) + column - 1
    return text[:begin], text[begin:]
