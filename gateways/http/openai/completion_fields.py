"""The fields of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ....ipc.priorities import Priority
from ..fields import (
    OTHER_SERVERS,
    PRIORITY_FIELD,
    FieldTable,
    honoured,
    ignored,
    parameter,
    refused,
)
from .chat_fields import (
    PROGRESS,
    PROMPT_LOGPROBS_FIELD,
    SEED_NOTE,
    STRUCTURED_OUTPUTS,
    THINKING,
    PromptLogprobs,
    ServiceTier,
    StreamOptions,
)

PROMPTS_MAX = 16
ANSWERS_MAX = 64
"""Answers of one request. Each is a session while it runs, and the daemon has 100 sessions."""
TOKENS_DEFAULT = 16
"""OpenAI's default, because programs rely on short completions."""


class CompletionRequest(Struct, kw_only=True):
    """The fields that the gateway's own code reads; the others are parameters."""

    model: str
    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    max_tokens: int = TOKENS_DEFAULT
    echo: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    logit_bias: dict[str, float] = {}
    service_tier: ServiceTier = "auto"
    priority: Priority | None = None


COMPLETIONS = FieldTable(
    "/v1/completions",
    [
        honoured("model"),
        honoured(
            "prompt",
            f"a text or token ids of the model, or up to {PROMPTS_MAX} of either; it is used"
            " unchanged, without a chat template",
            sets="prompt_tokens",
        ),
        honoured("stream"),
        honoured("stream_options", "`include_usage`"),
        honoured("n", f"up to 16, and {ANSWERS_MAX} with all prompts; each has the next seed"),
        honoured("max_tokens", "16 if absent, as with OpenAI", sets="n-predict"),
        honoured("echo", "the text begins with the prompt, and so do the `logprobs`"),
        honoured("logprobs", "up to 5"),
        PROMPT_LOGPROBS_FIELD,
        honoured("logit_bias", sets="logit-bias"),
        honoured("service_tier", "as in a chat"),
        parameter("temperature", note="the default is the model's"),
        parameter("top_p", note="the default is the model's"),
        parameter("frequency_penalty", "frequency-penalty"),
        parameter("presence_penalty", "presence-penalty"),
        parameter("stop"),
        parameter("seed", note=SEED_NOTE),
        *STRUCTURED_OUTPUTS,
        *PROGRESS,
        PRIORITY_FIELD,
        refused("suffix", "the models do not fill in text between two others", ""),
        refused("best_of", "use n, and choose", 1),
        refused("add_special_tokens", "the daemon adds them as the model needs", True),
        *(ignored(field.name, "the prompt has no chat template") for field in THINKING),
        ignored("user", "the key names the user"),
    ],
    kind=CompletionRequest,
    parameters=True,
    others=OTHER_SERVERS,
)
