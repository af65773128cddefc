"""`inferd run`: one prompt and its streamed answer, or a graph's outputs."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...backends.errors import TooLarge
from ..client import RESUME_S, session_of
from ..options import (
    JsonOutput,
    Label,
    ModelOptions,
    ModelOrFile,
    PriorityOption,
    SocketPath,
    SystemPrompt,
)
from ..starting import start_on_demand
from .answering import (
    JsonSchema,
    LossNotice,
    Markdown,
    ResumeTimeout,
    SessionId,
    Stats,
    Temperature,
    TokensMax,
    has_format,
    print_answer,
    turn_options,
)
from .chat import chat
from .media_files import (
    ImageFiles,
    MediaFile,
    SoundFiles,
    check_reads,
    media_files,
    naming_files,
    reads_standard_input,
)

if TYPE_CHECKING:
    from ...ipc.payloads import Prompt

INPUT_BYTES_MAX = 64 << 20

Raw = Annotated[
    bool, typer.Option("--raw", help="Send the text unchanged, without a chat template.")
]
GraphInputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=VALUE",
        help="An input of a graph: a file .npy, or numbers in JSON such as [[1, 2]]; repeatable.",
        show_default=False,
    ),
]
GraphOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="DIR|FILE.npz",
        help="Write a graph's outputs into a folder, as files .npy, or into one file .npz.",
        show_default=False,
    ),
]


def run(
    model: ModelOrFile,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The prompt; the text of a pipe or file on standard input is put before it. With"
            " '-' or without a prompt, standard input is the prompt; on a terminal, a chat starts."
        ),
    ] = None,
    image: ImageFiles = None,
    audio: SoundFiles = None,
    graph_inputs: GraphInputs = None,
    output: GraphOutput = None,
    system: SystemPrompt = None,
    raw: Raw = False,
    priority: PriorityOption = "normal",
    temp: Temperature = None,
    n_predict: TokensMax = None,
    option: ModelOptions = None,
    json_schema: JsonSchema = None,
    session: SessionId = None,
    resume_timeout: ResumeTimeout = RESUME_S,
    label: Label = "",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="Timeout of the whole turn.")
    ] = 600.0,
    stats: Stats = False,
    markdown: Markdown = True,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Answer one prompt, or compute a graph's outputs.

    The answer is streamed to standard output. Of a graph, `inferd show` prints the inputs.
    """
    if graph_inputs or output is not None:
        refused = {
            "PROMPT": prompt, "--image": image, "--audio": audio, "--system": system, "--raw": raw,
            "--temp": temp, "--n-predict": n_predict, "--option": option, "--session": session,
            "--json-schema": json_schema, "--stats": stats,
        }  # fmt: skip
        for name, value in refused.items():
            if value not in (None, []) and value is not False:
                raise typer.BadParameter(f"{name} is for language models: leave out --input")
        from .graph_command import run_graph, split_inputs  # with the client library

        run_graph(
            model, split_inputs(graph_inputs or ()), output, priority=priority, label=label,
            timeout=timeout, socket=socket, as_json=as_json,
        )  # fmt: skip
        return
    has_files = bool(image or audio)
    if has_files and raw:
        raise typer.BadParameter("--raw sends text alone: leave out --image and --audio")
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if prompt is None and not raw and not has_files and on_terminal:
        chat(
            model, system, priority, temp, n_predict, option, json_schema, session,
            resume_timeout, stats, markdown, label=label, socket=socket, as_json=as_json,
        )  # fmt: skip
        return
    text = _prompt(prompt, input_is_file=reads_standard_input(image, audio))
    files = media_files(image, audio)
    options = turn_options(option, temp, n_predict, json_schema)
    start_on_demand(socket, model)
    check_reads(socket, model, files)
    losses = LossNotice(socket, model, resume_timeout)
    with session_of(
        socket, model, show_bar=not as_json, system=system, session_id=session, raw=raw,
        priority=priority, options=options, label=label, resume=session is not None,
        resume_s=resume_timeout, on_loss=losses.print,
    ) as conversation, naming_files(files):  # fmt: skip
        print_answer(
            conversation, _with_files(text, files), losses, as_json=as_json, stats=stats,
            markdown=markdown and not raw and not has_format(options), timeout=timeout,
        )  # fmt: skip


def _with_files(text: str, files: Sequence[MediaFile]) -> Prompt:
    """Return a prompt of images and sounds with the text that asks about them."""
    return [*(file.media for file in files), text] if files else text


def _prompt(prompt: str | None, *, input_is_file: bool) -> str:
    """Return the text of the prompt. Standard input is not a part of it if it is an image or a
    sound.
    """
    if input_is_file:
        if prompt in (None, "-"):
            raise typer.BadParameter("PROMPT is missing: standard input is the image or sound")
        return str(prompt)
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("PROMPT is missing; for a conversation: `inferd chat MODEL`")
    if prompt is None or prompt == "-":
        return read_input()
    text = read_input() if _has_input() else ""
    return f"{text.rstrip()}\n\n{prompt}" if text.strip() else prompt


def _has_input() -> bool:
    """Return whether standard input is a pipe or a file, and not a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # it is closed, or an object of Python's
        return not sys.stdin.closed
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def read_input() -> str:
    """Return the text of standard input.

    :raises TooLarge: it has more than `INPUT_BYTES_MAX`.
    """
    data = sys.stdin.buffer.read(INPUT_BYTES_MAX + 1)
    if len(data) > INPUT_BYTES_MAX:
        raise TooLarge(f"an input of more than {INPUT_BYTES_MAX} bytes", hint="send less at once")
    return data.decode(errors="replace")
