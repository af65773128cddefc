"""Messages of calls that compute a turn on a context, whole or streamed."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...wire.metadata import Metadata
from .base import CREDIT_DEFAULT, Map, ScheduledParams, Tensor, Traceparent


class PromptComputeParams(Map):
    """`prompt_compute` of the prompt interface; the history keeps prompt and answer."""

    context: int
    """The handle."""
    prompt: str
    """The text."""
    priority: str = ""
    """For this turn."""
    timeout_s: float = 0.0
    """The turn must end within this; 0: no bound."""
    traceparent: Traceparent = ""
    """The caller's span; see [traces](#traces)."""


class PromptComputeResult(Map):
    """The answer's text."""

    text: str
    """The answer."""


class RunInferenceParams(Map):
    """`run_inference` of apuslabs/wasi_nn_backend: one turn by the chat template."""

    context: int
    """The handle."""
    tensor: Tensor
    """The text, as for `set_input`; zero bytes at its end are removed."""
    index: int = 0
    """Ignored."""
    config: str = ""
    """Parameters for this turn as JSON."""
    size_max: int = -1
    """As in `get_output`."""
    priority: str = ""
    """For this turn."""
    timeout_s: float = 0.0
    """The turn must end within this; 0: no bound."""
    traceparent: Traceparent = ""
    """The caller's span; see [traces](#traces)."""


INFILL_EXTRA_MAX = 256
"""The largest number of parts of other files in one prompt to fill in."""


class Infill(Map):
    """A place in a file: the answer is the text between `prefix` and `suffix`."""

    prefix: str
    """The text of the file before the place."""
    suffix: str
    """The text of the file behind the place."""
    typed: str = ""
    """Text at the place that is not in the file; the answer continues it."""
    extra: Annotated[list[dict[str, str]], msgspec.Meta(max_length=INFILL_EXTRA_MAX)] = []
    """Parts of other files, at most `INFILL_EXTRA_MAX`: maps with `text` and, if it is known, its
    file's `name`.
    """
    suffix_first: bool = False
    """The suffix precedes the prefix in the prompt, so that only the text that was typed since the
    previous prompt is computed; for models that were trained with this order (SPM).
    """


SUPERSEDE_CHARACTERS_MAX = 256
SupersedeKey = Annotated[str, msgspec.Meta(max_length=SUPERSEDE_CHARACTERS_MAX)]


class StreamedParams(ScheduledParams, kw_only=True):
    """Params of a streamed call: its first credit, and whether it gets `QueueEvent`s, and events
    with the progress of the prompt. With `start_event`, a `QueueEvent` with the position 0 says
    that the turn has got its slot.
    """

    credit: int = CREDIT_DEFAULT
    """[events](#credit) that may be sent at first, 1 … 1024; of `resume` a first event with the
    daemon's output so far is not counted.
    """
    queue_events: bool = False
    """Send the turn's position in the queue."""
    prompt_progress: bool = False
    """Send the progress of the prompt; ignored by `chat`."""
    start_event: bool = False
    """Send an event when the turn gets its slot."""


class StreamParams(StreamedParams):
    """`stream` and `chat`: one turn, with parameters in `options`.

    Without `prompt`, `prompt_tokens` and `messages` it computes the input of `set_input`. Otherwise
    these are added to the history, through the chat template or, with `raw`, unchanged. Token ids
    are always added unchanged.
    """

    context: int
    """The handle."""
    prompt: str | None = None
    """The user's next message."""
    prompt_tokens: list[int] | None = None
    """Token ids of the model, added to the history unchanged; with them, `prompt` and `raw` are
    ignored.
    """
    messages: list[dict[str, Any]] | None = None
    """1 to 1000 [messages](#messages-of-a-chat); with them, `prompt`, `prompt_tokens` and `raw`
    are ignored.
    """
    infill: Infill | None = None
    """[text to fill in](#text-to-fill-in), which replaces the history; with it, all other input is
    ignored.
    """
    raw: bool = False
    """Add `prompt` unchanged."""
    options: dict[str, Any] = {}
    """[parameters](#parameters) for this turn; unknown keys are `InvalidArgument`."""
    supersede: SupersedeKey = ""
    """A key: this request cancels the caller's earlier one with the same key that has not ended,
    before its next step; empty: none.
    """


class ResumeParams(StreamedParams):
    """`resume`: continue the last turn after the part of its answer that the client has."""

    context: int
    """The handle."""
    tokens: list[int] = []
    """The answer's tokens that the client has, from the first one on."""
    text: bytes = b""
    """The answer's text that the client has, from the same events."""
    reasoning: bytes = b""
    """The answer's reasoning that the client has, likewise."""
    raw_text: bytes = b""
    """Of a turn that may have tool calls or marks other than `<think>`, instead of both: the
    `raw_text` of its events, or their `text` where they have none.
    """


class QueueEvent(Map):
    """A turn's position in the queue, sent with `queue_events` before its first token.

    Position 1 gets the next slot; 0 has one. `waiting` is the number of waiting turns.
    `starts_in_s` is the estimated time until the turn gets a slot, or None if that is unknown.
    These events use no credit.
    """

    position: int
    """1: the next turn to get a slot; 0: it has one."""
    waiting: int
    """Turns of all users that wait for the model; with position 0 it is 0."""
    starts_in_s: float | None
    """Seconds until the turn is expected to get a slot; nil: it cannot be estimated."""


class ToolCallPart(Map):
    """A part of the tool call number `index` of an answer.

    The first part has the id and the name; each part has the next piece of the arguments' JSON
    text. If a call is `dropped`, the text was not a call after all, and follows as text.
    """

    index: int
    """The number of the call in the answer."""
    id: str = ""
    """Nine letters and digits, in the first part of a call."""
    name: str = ""
    """The function, in the first part of a call."""
    arguments: str = ""
    """The next part of the JSON text of its arguments, an object."""
    dropped: bool = False
    """The call of this number is not one after all; its source follows as text."""


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
    """Ids of the new tokens."""
    text: bytes = b""
    """The text that they release: whole UTF-8 characters, and nothing that a stop text may still
    cut.
    """
    reasoning: bytes = b""
    """The reasoning that they release instead of text, with the parameter `reasoning-format`."""
    tool_calls: list[ToolCallPart] = []
    """The parts of [tool calls](#tool-calls) that they release."""
    raw_text: bytes = b""
    """In a turn that may have tool calls or marks other than `<think>`: the text with reasoning and
    calls as the model wrote them, where it differs from `text`.
    """
    offset: int = 0
    """Number of the answer's tokens before these."""
    completion_probabilities: list[dict[str, Any]] = []
    """With `n-probs`: the tokens' logprobs, see [metadata](#metadata)."""
    prompt_logprobs: list[dict[str, Any]] = []
    """With `prompt-logprobs`, in the events before the first token: the next of the prompt's
    logprobs, see [metadata](#metadata).
    """
    prompt_offset: int = 0
    """Number of the prompt's tokens before these; a turn that another worker repeats may begin
    at 0 again.
    """
    prompt_progress: dict[str, Any] = {}
    """With the param `prompt_progress`, in events of their own: `total`, `cache` (not computed),
    and `processed` tokens of the prompt, and `time_ms` since the first slot.
    """


class TurnResult(Map):
    """The end of a turn. `text` is the whole answer of `chat`, or the last piece of `stream`."""

    text: bytes = b""
    """The answer; of a stream the rest of it, which was withheld until the end."""
    reasoning: bytes = b""
    """The reasoning before the answer, with `reasoning-format`; of a stream the rest of it."""
    tool_calls: list[ToolCallPart] = []
    """The answer's [tool calls](#tool-calls); of a stream the last parts of them."""
    metadata: Annotated[Any, Metadata] = {}
    """The [metadata](#metadata)."""


class AnswersParams(ScheduledParams):
    """`answers`: `n` answers to one prompt; the other fields are those of `chat`."""

    context: int
    """The handle."""
    n: int = 2
    """Number of answers, 1 … 16."""
    prompt: str | None = None
    """As in `stream`; without `prompt` and `messages`, the turns compute the input that
    `set_input` left.
    """
    prompt_tokens: list[int] | None = None
    """As in `stream`."""
    messages: list[dict[str, Any]] | None = None
    """As in `stream`."""
    infill: Infill | None = None
    """As in `stream`."""
    raw: bool = False
    """Add `prompt` unchanged."""
    options: dict[str, Any] = {}
    """[parameters](#parameters) for these turns."""
    supersede: SupersedeKey = ""
    """As in `stream`."""


class AnswersEvent(Map):
    """The contexts of the answers, in order, by which each can be cancelled."""

    contexts: list[int] = []
    """The contexts of the answers, sent once the first answer has begun: `cancel` ends a running
    one.
    """


class AnswersResult(Map):
    """A map for each answer: `text`, `reasoning`, `tool_calls`, `metadata`, `error`."""

    answers: list[dict[str, Any]]
    """In their order: `text`, `reasoning` and `tool_calls` as in `chat`, `metadata` (its
    [metadata](#metadata)), and `error`, nil or the error with which it failed; `text` is then
    its output until the error.
    """
