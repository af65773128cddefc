"""Random moves of KV states, as the engine makes them, with a check after each append."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from inferd.backends import LanguageModel
from tests.backends.driving import prefill

__all__ = ("make_moves",)

SLOTS = 3
MOVES = ("append", "append", "append", "trim", "swap", "save", "restore")
MOVES_OF_HYBRIDS = (*MOVES, "checkpoint", "cut")


def make_moves(
    model: LanguageModel,
    seed: int,
    *,
    tokens_max: int,
    vocab_size: int,
    check: Callable[[int, Sequence[int]], None],
    count: int = 40,
) -> None:
    """Append, trim, swap, save and restore in random order, in three empty slots. Cut hybrids back
    to checkpoints.

    *check* is called with a slot and its tokens. It may use other slots.
    """
    random_source = random.Random(seed)
    texts: list[list[int]] = [[] for _ in range(SLOTS)]
    saved: list[tuple[bytes, list[int]]] = []
    checkpoints: list[tuple[bytes, list[int]]] = []
    moves = MOVES_OF_HYBRIDS if model.info.kv_kind == "hybrid" else MOVES
    for _ in range(count):
        slot, move = random_source.randrange(SLOTS), random_source.choice(moves)
        if move == "append":
            size = random_source.choice((1, 1, 7, 60, 130))
            if len(texts[slot]) + size > tokens_max:
                continue
            more = random_source.choices(range(3, vocab_size), k=size)
            prefill(model, slot, more, len(texts[slot]))
            texts[slot] = texts[slot] + more
            check(slot, texts[slot])
        elif move == "trim":
            keep = max(0, len(texts[slot]) - random_source.choice((1, 5, 40, 300)))
            kept = model.trim(slot, keep)
            assert kept in (0, keep)
            texts[slot] = texts[slot][:kept]
        elif move == "swap":
            to = random_source.randrange(SLOTS)
            model.swap(slot, to)
            texts[slot], texts[to] = texts[to], texts[slot]
        elif move == "save":
            saved.append((model.save(slot), texts[slot]))
        elif move == "checkpoint" and texts[slot]:
            checkpoints.append((model.save_checkpoint(slot), texts[slot]))
        elif move == "cut":
            fitting = [c for c in checkpoints if texts[slot][: len(c[1])] == c[1]]
            if fitting:
                checkpoint, texts[slot] = random_source.choice(fitting)
                assert model.restore_checkpoint(slot, checkpoint)
        elif move == "restore" and saved:
            state, text = random_source.choice(saved)
            assert model.restore(slot, state)
            texts[slot] = text
