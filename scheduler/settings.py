"""The settings of the scheduler, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The scheduler's settings; units in the names."""

    ageing_tokens: int = 20_000
    quantum_tokens: int = 256
    passed_over_s: float = 30.0
    """A task that higher classes kept from computing for this time may get a reserved quantum."""
    reserved_share: int = 16
    """One quantum in this many is reserved for tasks of lower classes."""
    priority_strict: bool = False
    """Whether classes order the tasks of all users, instead of those of each user."""
    slot_lag_s: float = 0.25
    """A task of an owner without slots takes one of an owner who is behind by this much less."""
    reader_lag_s: float = 0.2
    reader_timeout_s: float = 300.0
    pull_batch_wait_s: float = 0.005
    """A step waits this long for late pull readers. With 2 ms, 16 readers on two busy cores missed
    a quarter of the steps (152 to 165 steps for 128 tokens); with 5 ms there were 131 steps.
    """
    task_batch_wait_s: float = 0.005
    """A step waits this long for tasks whose prompts were just tokenized."""
    urgent_batch_wait_s: float = 0.02
    """The same for urgent ones, which otherwise would wait for a whole step on a busy machine."""
    step_s_target: float = 0.15
    """Target duration of a step in which prompts are computed beside decoding tasks."""
    step_s_max: float = 0.5
    """Longest step of prompts while no task decodes, or only tasks of lower classes. It bounds how
    long arrivals wait until they are noticed.
    """
    burst_s: float = 3.0
    """Streams that have just started wait at most this long for prompts of the same burst. Chunks
    small enough for the streams would take longer in total.
    """
    prompt_tokens_min: int = 16
    """Prompts advance by at least this many tokens a step, however long that takes."""
    shared_prefix_tokens_min: int = 64
    """A task does not wait for a shared prefix that is shorter."""
    checkpoint_tokens: int = 2048
    """Distance between saved states of a prompt on models whose states cannot be cut anywhere."""
    checkpoints_max: int = 32
    """Maximum number of checkpoints of one conversation on recurrent models and hybrids."""
    shifts_max: int = 8
    """Maximum number of context shifts in one turn."""
    kv_ram_bytes: int = 2 << 30
    kv_shared: bool = False
    """Whether KV states serve every user."""
    media_bytes_max: int = 256 << 20
    """Bound on the embeddings of images and sounds in memory, unless a single one is larger. Tasks
    with others wait.
    """
    fetch_timeout_s: float = 5.0
    """A task waits this long for its state from disk; then its tokens are computed again."""
    probes: bool = True
    """Whether a graph is probed at its load, to join inputs. The previous load may have ended by
    that.
    """
    careful_s: float = 0.0
    """Set after a fault of the previous worker. The worker first computes a token by itself, and
    does not tokenize or compute tensors beside a step for this time. So another fault has only one
    possible cause.
    """
