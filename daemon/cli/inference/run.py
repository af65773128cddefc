"""`inferd run`: one prompt and its streamed answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....backends.errors import TooLarge
from ....backends.params import BY_NAME
from .. import completion
from ..client import session_of
from ..options import (
    JsonOutput,
    ModelName,
    ModelOptions,
    PriorityOption,
    SocketPath,
    SystemPrompt,
    read_pairs,
)
from ..output import note, write, write_answer, write_dimmed, write_json_line

if TYPE_CHECKING:
    from ....ipc.client import Session

INPUT_BYTES_MAX = 64 << 20

Raw = Annotated[
    bool, typer.Option("--raw", help="Send the text unchanged, without a chat template.")
]
Temperature = Annotated[float | None, typer.Option("--temp", metavar="T", help=BY_NAME["temp"].doc)]
TokensMax = Annotated[
    int | None, typer.Option("--n-predict", metavar="N", help=BY_NAME["n-predict"].doc)
]
SessionId = Annotated[
    str | None,
    typer.Option(
        "--session",
        metavar="ID",
        help="Continue the session with this id.",
        autocompletion=completion.sessions,
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print token counts and times at the end.")]


def run(
    model: ModelName,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or no argument reads standard input.")
    ] = None,
    system: SystemPrompt = None,
    raw: Raw = False,
    priority: PriorityOption = "normal",
    temp: Temperature = None,
    n_predict: TokensMax = None,
    option: ModelOptions = None,
    session: SessionId = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="Timeout of the whole turn.")
    ] = 600.0,
    stats: Stats = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Answer one prompt.

    The answer is streamed to standard output.
    """
    text = _prompt(prompt)
    options = turn_options(option, temp, n_predict)
    with session_of(
        socket, model, show_bar=not as_json, system=system, session_id=session, raw=raw,
        priority=priority, options=options,
    ) as conversation:  # fmt: skip
        print_answer(conversation, text, as_json=as_json, stats=stats, timeout=timeout)


def _prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("PROMPT is missing; for a conversation: `inferd chat MODEL`")
    return read_input()


def read_input() -> str:
    """Return the text of standard input.

    :raises TooLarge: it has more than `INPUT_BYTES_MAX`.
    """
    data = sys.stdin.buffer.read(INPUT_BYTES_MAX + 1)
    if len(data) > INPUT_BYTES_MAX:
        raise TooLarge(f"an input of more than {INPUT_BYTES_MAX} bytes", hint="send less at once")
    return data.decode(errors="replace")


def turn_options(
    pairs: list[str] | None, temp: float | None, n_predict: int | None
) -> dict[str, Any]:
    """Return the parameters of a session; flags override --option."""
    named = {"temp": temp, "n-predict": n_predict}
    return read_pairs(pairs) | {k: v for k, v in named.items() if v is not None}


def print_answer(
    session: Session, text: str, *, as_json: bool, stats: bool, timeout: float
) -> None:
    """Stream the answer to *text*; an early exit, also by Ctrl-C, cancels the turn."""
    last = ""
    with session.stream(text, timeout=timeout) as stream:
        try:
            for piece in stream:
                reasoning = getattr(piece, "reasoning", "")
                if as_json:
                    line = {"text": str(piece)}
                    write_json_line(line | ({"reasoning": reasoning} if reasoning else {}))
                else:
                    write_dimmed(reasoning)
                    write_answer(piece, end="")
                last = piece or last
        finally:
            if not as_json and not last.endswith("\n"):
                write("")
    if as_json:
        write_json_line({"metadata": session.metadata})
    if stats:
        note(stats_text(session.metadata))


def stats_text(metadata: dict[str, Any]) -> str:
    """Return the statistics of a turn in one line."""
    tokens, predicted_ms = metadata.get("output_tokens", 0), metadata.get("predicted_ms", 0.0)
    rate = f", {1000 * tokens / predicted_ms:.1f} tokens/s" if predicted_ms > 0 else ""
    recomputed, reason = metadata.get("recomputed_tokens", 0), metadata.get("recomputed_reason", "")
    history = f"; {recomputed} of the history recomputed: {reason}" if recomputed else ""
    return (
        f"prompt {metadata.get('input_tokens', 0)} tokens"
        f" ({metadata.get('cached_tokens', 0)} cached{history})"
        f", first token after {metadata.get('ttft_ms', 0.0):.0f} ms"
        f", answer {tokens} tokens{rate}, stopped by {metadata.get('stop_reason')}"
    )
