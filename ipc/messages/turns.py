"""Messages of calls that compute a turn on a context, whole or streamed."""

from __future__ import annotations

from typing import Annotated, Any

from ...wire.metadata import Metadata
from .base import Map, ScheduledParams, Tensor, Traceparent
from .hello import CREDIT_DEFAULT


class PromptComputeParams(Map):
    """`prompt_compute` of the prompt interface; the history keeps prompt and answer."""

    context: int
    prompt: str
    priority: str = ""
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class PromptComputeResult(Map):
    """The answer's text."""

    text: str


class RunInferenceParams(Map):
    """`run_inference` of apuslabs/wasi_nn_backend: one turn by the chat template."""

    context: int
    tensor: Tensor
    index: int = 0
    config: str = ""
    size_max: int = -1
    priority: str = ""
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class StreamedParams(ScheduledParams, kw_only=True):
    """Params of a streamed call: its first credit, and whether it gets `QueueEvent`s, and events
    with the progress of the prompt. With `start_event`, a `QueueEvent` with the position 0 says
    that the turn has got its slot.
    """

    credit: int = CREDIT_DEFAULT
    queue_events: bool = False
    prompt_progress: bool = False
    start_event: bool = False


class StreamParams(StreamedParams):
    """`stream` and `chat`: one turn, with parameters in `options`.

    Without `prompt`, `prompt_tokens` and `messages` it computes the input of `set_input`. Otherwise
    these are added to the history, through the chat template or, with `raw`, unchanged. Token ids
    are always added unchanged.
    """

    context: int
    prompt: str | None = None
    prompt_tokens: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False
    options: dict[str, Any] = {}


class ResumeParams(StreamedParams):
    """`resume`: continue the last turn after the part of its answer that the client has."""

    context: int
    tokens: list[int] = []
    text: bytes = b""
    reasoning: bytes = b""
    raw_text: bytes = b""


class QueueEvent(Map):
    """A turn's position in the queue, sent with `queue_events` before its first token.

    Position 1 gets the next slot; 0 has one. `waiting` is the number of waiting turns.
    `starts_in_s` is the estimated time until the turn gets a slot, or None if that is unknown.
    These events use no credit.
    """

    position: int
    waiting: int
    starts_in_s: float | None


class ToolCallPart(Map):
    """A part of the tool call number `index` of an answer.

    The first part has the id and the name; each part has the next piece of the arguments' JSON
    text. If a call is `dropped`, the text was not a call after all, and follows as text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    dropped: bool = False


class TokensEvent(Map):
    """New tokens of a stream, and the text that is complete with them, in whole characters.

    `offset` is the number of the answer's tokens before them. With `n-probs`,
    `completion_probabilities` has their logprobs, in llama-server's form. `raw_text` is the text
    with tool calls as the model wrote them, where it differs from `text`.

    With `prompt-logprobs`, the events before the first token have parts of the prompt's
    `prompt_logprobs` instead; `prompt_offset` is the number of the prompt's tokens before them.

    An event with `prompt_progress` has nothing else, precedes the first token and uses no credit.
    It has `total`, `cache` and `processed`, numbers of the prompt's tokens, and `time_ms`, since
    the first slot, as in llama-server.
    """

    tokens: list[int] = []
    text: bytes = b""
    reasoning: bytes = b""
    tool_calls: list[ToolCallPart] = []
    raw_text: bytes = b""
    offset: int = 0
    completion_probabilities: list[dict[str, Any]] = []
    prompt_logprobs: list[dict[str, Any]] = []
    prompt_offset: int = 0
    prompt_progress: dict[str, Any] = {}


class TurnResult(Map):
    """The end of a turn. `text` is the whole answer of `chat`, or the last piece of `stream`."""

    text: bytes = b""
    reasoning: bytes = b""
    tool_calls: list[ToolCallPart] = []
    metadata: Annotated[Any, Metadata] = {}


class AnswersParams(ScheduledParams):
    """`answers`: `n` answers to one prompt; the other fields are those of `chat`."""

    context: int
    n: int = 2
    prompt: str | None = None
    prompt_tokens: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False
    options: dict[str, Any] = {}


class AnswersEvent(Map):
    """The contexts of the answers, in order, by which each can be cancelled."""

    contexts: list[int] = []


class AnswersResult(Map):
    """A map for each answer: `text`, `reasoning`, `tool_calls`, `metadata`, `error`."""

    answers: list[dict[str, Any]]
