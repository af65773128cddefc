"""Predicted waits of a turn for a slot of a model on one node."""

from __future__ import annotations

from .loads import ByClass, ModelLoad

BYTES_OF_TOKEN = 4
"""Bytes of a token of a usual text."""
TURN_TOKENS = 128
"""Tokens that a turn is expected to compute, before anything is known of it."""


def free_slots(load: ModelLoad, opened: ByClass) -> int:
    """Return the slots of a loaded model that no turn occupies or waits for.

    *opened* are turns that the node has beside those of its report; negative numbers are turns that
    have ended since.
    """
    if not load.loaded:
        return 0
    turns = sum(load.running) + sum(load.waiting) + sum(opened)
    return max(0, load.slots - max(0, turns))


def must_begin_load(load: ModelLoad, opened: ByClass) -> bool:
    """Return whether a turn would be the first that makes the node load the model."""
    return not (load.loaded or load.loading or sum(load.waiting) + sum(opened) > 0)


def starts_at_once(load: ModelLoad, opened: ByClass, priority: int) -> bool:
    """Return whether a turn of the class *priority* gets a slot at once: a free one, or that of a
    turn of a lower class, which is parked.
    """
    if not load.loaded or not load.slots:
        return False
    ahead = sum(n for turns in (load.running, load.waiting, opened) for n in turns[priority:])
    return ahead < load.slots


def saved_s(load: ModelLoad, covered_bytes: int) -> float:
    """Return the time that a turn saves if *covered_bytes* of its prompt need not be computed."""
    token_s = load.token_s if load.prompt_token_s is None else load.prompt_token_s
    return covered_bytes / BYTES_OF_TOKEN * token_s


def predicted_wait_s(load: ModelLoad, opened: ByClass, priority: int) -> float:
    """Return the time until a turn of the class *priority* is expected to get a slot.

    It waits for the work of its class and higher ones that is queued before it, and for one slot's
    part of the running work. A model that is not loaded is loaded first, and then computes the
    turns that wait for it.
    """
    if not load.loaded:
        ahead = sum(load.waiting[priority:]) + max(0, sum(opened[priority:]))
        if ahead < load.slots:
            return load.load_s
        waiting = sum(load.waiting_tokens[priority:])
        return load.load_s + (waiting + max(0, sum(opened[priority:])) * TURN_TOKENS) * load.token_s
    if starts_at_once(load, opened, priority):
        return 0.0
    queued = sum(load.waiting_tokens[priority:]) + sum(opened[priority:]) * TURN_TOKENS
    running = sum(load.running_tokens[priority:]) / max(1, load.slots)
    return max(load.token_s, (queued + running) * load.token_s)
