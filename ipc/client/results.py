"""The maps that calls return, with the types of their keys."""

from __future__ import annotations

from typing import Any, TypedDict


class Metadata(TypedDict, total=False):
    """The metadata of a turn; empty before the turn's end. docs/protocol.md describes the keys."""

    input_tokens: int
    output_tokens: int
    llama_build_number: int
    llama_commit: str
    cached_tokens: int
    queue_ms: float
    ttft_ms: float
    prompt_ms: float
    predicted_ms: float
    stop_reason: str | None
    stop_detail: str
    error: dict[str, Any]
    shifts: int
    shifted: bool
    parks: int
    forced_tokens: int
    tool_format: str
    recomputed_tokens: int
    recomputed_reason: str
    dropped_tokens: int
    dropped_turns: int
    seed: int
    lora: dict[str, float]
    model: str
    fingerprint: str
    session_id: str | None
    durable: bool | None
    not_applied: dict[str, Any]
    adjusted: dict[str, str]
    ignored: list[str]
    completion_probabilities: list[dict[str, Any]]
    end_token: dict[str, Any]
    prompt_logprobs: list[dict[str, Any]]


class ModelInfo(TypedDict, total=False):
    """A model as `models` and `show` describe it; only `show` has the last four."""

    name: str
    state: str
    backend: str
    file: str
    swapped_to: str
    size_bytes: int
    modified_at: float | None
    leases: int
    tasks: int
    pid: int
    slots: int
    progress: float
    load_s: float
    idle_s: float
    expires_s: float | None
    keep_alive_s: float
    pinned: bool
    resident_bytes: int
    memory: dict[str, int] | None
    adapters: list[dict[str, Any]]
    error: dict[str, Any] | None
    info: dict[str, Any] | None
    need_bytes: int | None
    options: dict[str, Any]
    file_info: dict[str, Any] | None
    file_error: str | None
    estimate: dict[str, Any] | None
