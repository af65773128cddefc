"""Turns on a context: text in, text out, whole or piece by piece."""

from __future__ import annotations

from typing import Any

from .base import Map, Traceparent
from .hello import CREDIT_DEFAULT
from .tensors import Tensor

__all__ = (
    "AnswersEvent",
    "AnswersParams",
    "AnswersResult",
    "PromptComputeParams",
    "PromptComputeResult",
    "QueueEvent",
    "ResumeParams",
    "RunInferenceParams",
    "StreamParams",
    "TokensEvent",
    "TurnResult",
)


class PromptComputeParams(Map):
    """`prompt_compute` of the prompt interface: text in, text out, the history is kept."""

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


class StreamParams(Map):
    """`stream` and `chat`: one turn.

    Without `prompt` and `messages` the context's input is computed (as `set_input` left it). With
    `prompt` or `messages` these are added to the history: by the chat template, or, with `raw`, as
    they stand. `options` hold for this turn.
    """

    context: int
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False
    options: dict[str, Any] = {}
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""
    credit: int = CREDIT_DEFAULT
    queue_events: bool = False


class ResumeParams(Map):
    """`resume`: go on with a turn that was interrupted. `tokens` and `text` are what the client has
    of it, from its start.
    """

    context: int
    tokens: list[int] = []
    text: bytes = b""
    reasoning: bytes = b""
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""
    credit: int = CREDIT_DEFAULT
    queue_events: bool = False


class QueueEvent(Map):
    """A turn\'s position in the queue, sent with `queue_events` before its first token.

    Position 1 gets the next slot; `waiting` turns wait in all, and the slot is expected in
    `starts_in_s`. These events use no credit.
    """

    position: int
    waiting: int
    starts_in_s: float


class TokensEvent(Map):
    """New tokens of a stream: `text` is what they release, whole UTF-8 characters; with `n-probs`
    `completion_probabilities` tells how likely they were, as llama-server does.
    """

    tokens: list[int] = []
    text: bytes = b""
    reasoning: bytes = b""
    position: int = 0
    completion_probabilities: list[dict[str, Any]] = []


class TurnResult(Map):
    """The end of a turn: `text` is the whole answer (`chat`), or what was left of it (`stream`)."""

    text: bytes = b""
    reasoning: bytes = b""
    metadata: dict[str, Any] = {}


class AnswersParams(Map):
    """`answers`: `n` answers to one prompt; the other fields are those of `chat`."""

    context: int
    n: int = 2
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool = False
    options: dict[str, Any] = {}
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class AnswersEvent(Map):
    """The contexts of the answers, in their order, by which `cancel` ends one."""

    contexts: list[int] = []


class AnswersResult(Map):
    """One map an answer: `text`, `reasoning`, `metadata`, `error`."""

    answers: list[dict[str, Any]]
