"""The metadata of a turn, which sessions make, and calls return."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ..backends.errors import ErrorFields


class Metadata(msgspec.Struct, kw_only=True):
    """The metadata of a turn. All keys are sent, except those that are unset."""

    input_tokens: int
    """Tokens of the prompt, including the history; known as soon as the input is set."""
    output_tokens: int
    """Tokens of the answer, sampled or forced, including the one that ended the turn."""
    llama_build_number: int
    """0: unknown. It counts the commits of llama.cpp's repository, and the source package that
    the engine is built from has no repository. `llama_commit` identifies the build.
    """
    llama_commit: str
    """The commit of llama.cpp that the daemon's engine is built from, also before any input, and
    for `echo`.
    """
    cached_tokens: int
    """Tokens of the prompt that were not computed again."""
    queue_ms: float
    """Time from queueing to the first slot, or to the end of a turn that got none."""
    ttft_ms: float
    """Time from queueing to the first token; 0 before it, and in a turn without one."""
    prompt_ms: float
    """Time from the first slot to the end of the prompt; in a turn that was cancelled or has
    failed, to its first token, or without one to its end.
    """
    predicted_ms: float
    """Time from the end of the prompt to the end of the turn; 0 if the prompt did not end."""
    stop_reason: str | None
    """Nil before the end; `eos`, `token`, `stop`, `pattern`, `complete`, `indent`, `similarity`,
    `repetition`, `surprisal`, `grammar`, `time`, `length`, `context_full`, `embedded`
    ([meanings](stopping.md)); the name of the error that ended it, or that refused it if there
    is no other turn; `detached` in a reopened session whose last turn was interrupted. A
    reopened session has the metadata of its last turn's end, for [`resume`](#resume).
    """
    stop_detail: str
    """The token, text, pattern or limit that ended it, or the measured value; the pooling of an
    embedding; the message of the error that ended it; `operator` if an operator cancelled it.
    """
    error: ErrorFields | UnsetType = UNSET
    """The error that ended the turn, or with which the last `compute`, `compute_single`,
    `prompt_compute`, `run_inference`, or `stream` or `chat` without input failed: `name`,
    `number`, `message`, `hint`, `retryable` and `data` as in an [error](#errors). Absent without
    an error, and after `EndOfSequence` or `SessionBusy`; input, turns and `fini_single` remove
    it.
    """
    shifts: int
    """Context shifts in this turn."""
    shifted: bool
    """Whether the KV state was approximate because of a shift in this turn or earlier."""
    tool_format: str
    """The form of [tool calls](#tool-calls) that the answer may have."""
    recomputed_tokens: int
    """Tokens of the history before this turn's messages that were no longer valid and were
    computed again.
    """
    recomputed_reason: str
    """The reason, for people; empty: nothing was recomputed."""
    dropped_tokens: int
    """Tokens of the history and the prompt that this turn has dropped because the [context was
    full](scheduling.md#a-full-context), before its answer or in context shifts.
    """
    dropped_turns: int
    """Turns that were dropped before this turn's answer."""
    parks: int | UnsetType = UNSET
    """Number of times that the turn yielded its slot; present after the turn's end."""
    forced_tokens: int
    """Tokens of the output that the grammar forced
    ([jump-forward](scheduling.md#forced-tokens)), or a [bound on reasoning](reasoning.md).
    """
    reasoning_tokens: int | UnsetType = UNSET
    """Tokens of reasoning in the output, with the mark at its end; present once the turn has
    finished.
    """
    drafted_tokens: int
    """Tokens that a drafter proposed and a step computed ([drafts](scheduling.md#drafts))."""
    accepted_tokens: int
    """Those of them that equal the sampled tokens."""
    seed: int
    """The seed of the turn's generator; random if none was given."""
    lora: dict[str, float]
    """The turn's adapters and their scales, a map."""
    model: str
    """The model's name."""
    fingerprint: str
    """The model's fingerprint."""
    session_id: str | None
    """The session's id, or nil."""
    durable: bool | None
    """Whether everything replied so far is written to disk; false if the daemon cannot write;
    nil without an id, or without `persist`.
    """
    not_applied: dict[str, Any]
    """Requested parameters of the model that are not in force, with the values in force."""
    adjusted: dict[str, str]
    """Parameters out of their range in JSON, or that contradict others, with the values used
    instead; those that could not be kept, with the reason; `json-schema` with the paths of the
    constraints that `schema-lenient` left out; `logit-bias` with the tokens outside the
    vocabulary, which are left out; `tools`, if the model's chat template does not use them or
    the input is raw text; `chat-template`, if the model has none and messages are written
    without it; `media`, if the model cannot read images or sounds of the history.
    """
    ignored: list[str]
    """Unknown keys."""
    media_tokens: int | UnsetType = UNSET
    """Tokens of the prompt that are images or sounds. This key and the next two are absent if there
    are none.
    """
    media_cached: int | UnsetType = UNSET
    """The images and sounds of the prompt, or the parts into which they are cut, that were not
    encoded for this turn: the tokens or their embeddings were in memory.
    """
    encode_s: float | UnsetType = UNSET
    """Seconds in which the others were encoded."""
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET
    """With `n-probs`, except for a stream, whose events have it: for each token a map as
    llama-server's, `id`, `token`, `bytes`, `logprob`, `top_logprobs`, or with
    `post-sampling-probs` `prob`, `top_probs`. It covers the first tokens, up to 20 000 such
    entries, and no tokens sampled before an interruption; otherwise the key is absent.
    """
    end_token: dict[str, Any] | UnsetType = UNSET
    """With `n-probs`, if a token ended the answer that is not part of it: such a map of this
    token; otherwise the key is absent.
    """
    prompt_logprobs: list[dict[str, Any]] | UnsetType = UNSET
    """With `prompt-logprobs`, except for a stream, whose events have it: for each token of the
    prompt a map of `id`, `token`, `bytes`, `logprob`, `rank` (1 for the most probable token) and
    `top_logprobs`, with the model's logprobs. The `logprob` of the first token is nil, as
    nothing precedes it. Of the answers of `answers`, only the first one has it. Otherwise the
    key is absent.
    """
