"""One request and its response: the body, whole responses, streams, disconnects."""

from __future__ import annotations

from .exchange import (
    Api,
    Endpoint,
    Exchange,
    chosen_model,
    offered_to,
    served_ctx_size,
    usable_models,
)
from .streaming import StreamForm, collect_answers, collect_turns, render_prompt, stream_turn
from .waiting import WaitingStreams

__all__ = (
    "Api",
    "Endpoint",
    "Exchange",
    "StreamForm",
    "WaitingStreams",
    "chosen_model",
    "collect_answers",
    "collect_turns",
    "offered_to",
    "render_prompt",
    "served_ctx_size",
    "stream_turn",
    "usable_models",
)
