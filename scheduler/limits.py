"""The settings of the scheduler, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's settings; units in the names."""

    ageing_tokens: int = 20_000
    quantum_tokens: int = 256
    reader_wait_s: float = 0.2
    reader_timeout_s: float = 300.0
    pull_linger_s: float = 0.005
    """What a step waits for late pull readers. With 2 ms, 16 readers on two busy cores missed a
    quarter of the steps (152 to 165 steps for 128 tokens); with 5 ms it is 131.
    """
    task_linger_s: float = 0.005
    """What a step waits for the tasks whose prompts were just told: else they would wait for the
    whole of it.
    """
    credit_max: int = 1024
    step_target_s: float = 0.15
    """What a step may take in which prompts are read beside decoding tasks."""
    step_alone_s: float = 0.5
    """What a step may take in which nothing decodes, or only what waits for the prompts: then
    arrivals and cancels are seen.
    """
    burst_s: float = 3.0
    """What reading prompts may take for which streams wait that have just begun: in small chunks
    beside them these would take longer.
    """
    prompt_tokens_min: int = 16
    """Prompts move by so many tokens a step, whatever that takes."""
    shared_prefix_tokens_min: int = 64
    """A shorter common beginning is not worth waiting for."""
    checkpoint_tokens: int = 2048
    """On models whose state serves only as a whole, it is saved every so many tokens."""
    shifts_max: int = 8
    """Context shifts of one turn."""
    kv_ram_bytes: int = 2 << 30
    kv_shared: bool = False
    """KV states serve every owner."""
    fetch_timeout_s: float = 5.0
    """What a task waits for its state from disk before it is computed again."""
