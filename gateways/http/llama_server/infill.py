"""`/infill`: text between a prefix and a suffix, in llama-server's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ....backends.errors import InferdError
from ....ipc.client import Infill, Piece, QueueEvent
from ....ipc.messages import INFILL_EXTRA_MAX, SUPERSEDE_CHARACTERS_MAX
from ....ipc.names import Priority
from ..exchange import Exchange, chosen_model, collect_answers, stream_turn
from ..exchange.streaming import EVENT_STREAM
from ..fields import OTHER_SERVERS, PRIORITY_FIELD, FieldTable, honoured, ignored
from ..openai.chat import waiting_comment
from ..openai.chat_fields import PROGRESS, STRUCTURED_OUTPUTS
from ..openai.forms import Timings, error_body
from ..turns import Answer, TurnProgress, TurnRequest
from .fields import MODEL

_FIELDS_MAX = 64
_ANSWERS_MAX = 16
SupersedeKey = Annotated[str, Meta(max_length=SUPERSEDE_CHARACTERS_MAX)]


class ExtraText(Struct, kw_only=True):
    """A part of another file."""

    text: str
    filename: str = ""


class InfillRequest(Struct, kw_only=True):
    """The fields that the gateway's own code reads; the others are parameters."""

    model: str = ""
    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: Annotated[list[ExtraText], Meta(max_length=INFILL_EXTRA_MAX)] = []
    suffix_first: bool = False
    supersede: SupersedeKey = ""
    stream: bool = False
    response_fields: Annotated[list[str], Meta(max_length=_FIELDS_MAX)] = []
    n_cmpl: Annotated[int, Meta(ge=1, le=_ANSWERS_MAX)] = 1
    timings_per_token: bool = False
    return_progress: bool = False
    priority: Priority | None = None


INFILL = FieldTable(
    "/infill",
    [
        MODEL,
        honoured("input_prefix", "the text before the place"),
        honoured("input_suffix", "the text behind the place"),
        honoured("prompt", "text at the place, which the answer continues"),
        honoured(
            "input_extra",
            f"up to {INFILL_EXTRA_MAX} parts of other files: `text`, and perhaps `filename`",
        ),
        honoured("stream"),
        honoured("response_fields", "only these fields of the answer, such as `timings/prompt_n`"),
        honoured(
            "suffix_first", "extension: the suffix precedes the prefix, as with `--spm-infill`"
        ),
        honoured(
            "supersede",
            "extension: a key, such as the buffer's name; the caller's earlier request with this"
            " key ends with the status 409",
        ),
        *STRUCTURED_OUTPUTS,
        *PROGRESS,
        PRIORITY_FIELD,
        ignored("return_tokens", "the answer has no token ids"),
        ignored(
            "t_max_prompt_ms",
            "llama-server does not follow it, and editors send 1 with a request that has other"
            " files computed in advance",
        ),
        honoured(
            "n_cmpl",
            f"up to {_ANSWERS_MAX} answers, each with the next seed; several are a list",
        ),
    ],
    kind=InfillRequest,
    parameters=True,
    others=OTHER_SERVERS,
)
_STOP_TYPES = {"stop": "word", "eos": "eos"}
_encode = msgspec.json.encode


async def answer_infill(exchange: Exchange) -> None:
    """Answer with the text between a prefix and a suffix, whole or streamed."""
    fields, options = exchange.read_fields(INFILL)
    fields.model = await chosen_model(exchange, fields.model)
    caller = exchange.caller
    request = TurnRequest(
        model=fields.model,
        prompt=Infill(
            prefix=fields.input_prefix,
            suffix=fields.input_suffix,
            typed=fields.prompt,
            extra=[{"name": each.filename, "text": each.text} for each in fields.input_extra],
            suffix_first=fields.suffix_first,
        ),
        raw=True,
        options=options,
        answers=fields.n_cmpl,
        supersede=fields.supersede,
        priority=caller.class_of(fields.priority),
        progress=fields.stream and (fields.return_progress or fields.timings_per_token),
    )
    frame = _Frame(fields, options)
    try:
        if fields.stream:
            await stream_turn(exchange, request, _Stream(frame))
        else:
            answers = await collect_answers(exchange, request)
            found = [frame.whole(number, answer) for number, answer in enumerate(answers)]
            await exchange.send_json(found[0] if len(found) == 1 else found)
    except InferdError as exc:
        raise INFILL.name_field(exc) from None


class _Frame:
    """The parts that the objects of one answer share."""

    def __init__(self, fields: InfillRequest, options: dict[str, Any]):
        self._fields, self._options = fields, options
        self.timings = Timings(per_token=fields.timings_per_token, progress=fields.return_progress)
        self._all_timings = Timings(per_token=True, progress=False)

    def whole(self, number: int, answer: Answer) -> dict[str, Any]:
        """Return the object of an answer that has ended, by its number among those of the request.
        That of a stream has no text.
        """
        metadata, reason = answer.metadata, str(answer.metadata.get("stop_reason"))
        found = {
            "index": number,
            "content": answer.text,
            "tokens": [],
            "stop": True,
            "model": self._fields.model,
            "tokens_predicted": answer.output_tokens,
            "tokens_evaluated": answer.input_tokens,
            "generation_settings": self._options,
            "has_new_line": "\n" in answer.text,
            "truncated": reason == "context_full",
            "stop_type": _STOP_TYPES.get(reason, "limit"),
            "stopping_word": metadata.get("stop_detail", "") if reason == "stop" else "",
            "tokens_cached": answer.input_tokens + answer.output_tokens,
            **self._all_timings.of_end(answer),
            **answer.adjusted,
        }
        if answer.probabilities:
            found["completion_probabilities"] = answer.probabilities
        wanted = self._fields.response_fields
        return found_at(found, wanted) if wanted else found


def found_at(value: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an object at *paths* such as `timings/prompt_n`, each under its path, as
    llama-server's `json_get_nested_values`. Paths that lead nowhere are left out.
    """
    found: dict[str, Any] = {}
    for path in paths:
        at: Any = value
        for name in path.split("/"):
            at = at.get(name) if isinstance(at, dict) else None
        if at is not None:
            found[path] = at
    return found


class _Stream:
    """An answer as events."""

    content_type = EVENT_STREAM
    shows_waiting = True

    def __init__(self, frame: _Frame):
        self._frame = frame
        self._with_new_line = set[int]()

    def begin(self) -> bytes:
        """Return nothing: the stream begins with its first piece."""
        return b""

    def waiting(self, place: QueueEvent | None) -> bytes:
        """Return a comment with the place in the queue."""
        return waiting_comment(place)

    def progress(self, answer: int, progress: TurnProgress) -> bytes:
        """Return the event of a prompt's progress, if it is wanted."""
        more = self._frame.timings.of_prompt(answer, progress)
        return self._part(answer, "", more) if more else b""

    def piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> bytes:
        """Return the event of a piece."""
        more = self._frame.timings.of_piece(answer)
        if probabilities:
            more["completion_probabilities"] = probabilities
        if "\n" in piece:
            self._with_new_line.add(answer)
        return self._part(answer, str(piece), more)

    def _part(self, answer: int, text: str, more: dict[str, Any]) -> bytes:
        return _event({"index": answer, "content": text, "tokens": [], "stop": False, **more})

    def end(self, answer: int, end: Answer) -> bytes:
        """Return the event of the end."""
        found = self._frame.whole(answer, end)
        if "has_new_line" in found:
            found["has_new_line"] = answer in self._with_new_line
        return _event(found)

    def error(self, error: InferdError, status: int) -> bytes:
        """Return the event of an error."""
        return _event(error_body(INFILL.name_field(error), status))

    def finish(self) -> bytes:
        """Return nothing, because `end` has returned the last event."""
        return b""


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
