"""Proposals from a task's own history: incremental, bounded, and of no other task's text."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from inferd.backends import SamplingParams
from inferd.scheduler.drafting import ngram
from inferd.scheduler.drafting.ngram import NgramDrafter, NgramIndex
from inferd.scheduler.messages import TaskSpec, pack_tokens
from inferd.scheduler.owner import Owner
from inferd.scheduler.task import Task


def task_of(prompt: Sequence[int], number: int = 1, prediction: Sequence[int] = ()) -> Task:
    spec = TaskSpec(
        id=number,
        owner=Owner(number),
        tokens=pack_tokens(prompt),
        sampling=SamplingParams(),
    )
    task = Task.from_spec(spec, arrival=1, clock=0, now=0.0)
    task.prediction = prediction
    return task


def proposal(text: Sequence[int], limit: int = 4) -> list[int]:
    index = NgramIndex()
    index.add(text)
    return index.propose(limit)


def test_the_text_behind_the_last_occurrence_is_proposed() -> None:
    assert proposal([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]
    assert proposal([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3], 2) == [5, 9]
    assert proposal([1, 2, 3, 4, 5, 6]) == []
    assert proposal([1, 2, 8, 9, 1, 2]) == [], "two tokens are too few"
    assert proposal([]) == proposal([1, 2, 3]) == []


def test_a_loop_is_continued() -> None:
    assert proposal([5, 1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert proposal([7, 7, 7, 7], 3) == [7, 7, 7]


def test_a_proposal_is_continued_while_it_is_right() -> None:
    """Although its last three tokens have followed by another one since."""
    index = NgramIndex()
    index.add([1, 2, 3, 4, 5, 6, 0, 3, 4, 5, 9, 1, 2, 3])
    assert index.propose(3) == [4, 5, 6]
    index.add([4, 5])
    assert index.propose(2) == [6, 0]
    index.add([8])
    assert index.propose(2) == []


def test_images_and_huge_ids_are_not_proposed() -> None:
    assert proposal([1, 2, 3, -5, 4, 1, 2, 3]) == []
    assert proposal([1, 2, 3, 4, 1 << 30, 1, 2, 3]) == [4]
    assert proposal([-5, -5, -5, -5]) == []


def test_each_step_indexes_only_the_new_tokens() -> None:
    drafter, task = NgramDrafter(), task_of([1, 2, 3, 4, 5])
    assert drafter.propose(task, 2) == []
    index = drafter._histories[1].index
    task.tokens += [1, 2, 3]
    assert drafter.propose(task, 2) == [4, 5] and len(index.text) == 8
    assert drafter.propose(task, 1) == [4] and len(index.text) == 8
    del task.tokens[2:6]  # a context shift
    task.dropped += 4
    task.tokens.append(4)
    assert drafter.propose(task, 1) == [5] and len(index.text) == 9


def test_a_long_prompt_is_indexed_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "STEP_TOKENS_MAX", 10)
    drafter, task = NgramDrafter(), task_of([*range(100, 125), 100, 101, 102])
    assert [drafter.propose(task, 1) for _ in range(3)] == [(), (), [103]]


def test_the_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "TOKENS_MAX", 64)
    index, numbers = NgramIndex(), random.Random(1)
    index.add(range(1000, 1010))
    text = [numbers.randrange(1000) for _ in range(500)]
    index.add(text)
    assert len(index._places) + len(index._older) <= 64
    index.add(text[-30:-27])
    assert index.propose(3) == text[-27:-24], "the last half is there"
    index.add([1000, 1001, 1002])
    assert index.propose(3) == [], "the oldest are not"


def test_a_prediction_is_proposed_from_its_beginning_and_found_again_after_an_error() -> None:
    prediction = [*range(50, 80)]
    drafter, task = NgramDrafter(), task_of([1, 2, 3], prediction=prediction)
    assert drafter.propose(task, 2) == (), "the prediction was indexed"
    assert drafter.propose(task, 2) == [50, 51]
    task.tokens += [50, 51, 99, 98, 56]
    assert drafter.propose(task, 2) == []
    task.tokens += [57, 58]
    assert drafter.propose(task, 40) == [*range(59, 80)], "nothing behind its end"


def test_a_prediction_may_come_after_the_first_token_and_be_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "STEP_TOKENS_MAX", 10)
    monkeypatch.setattr(ngram, "TOKENS_MAX", 32)
    drafter, task = NgramDrafter(), task_of([1, 2, 3])
    task.tokens.append(50)
    assert drafter.propose(task, 2) == []
    task.prediction = [*range(50, 100)]
    assert [drafter.propose(task, 2) for _ in range(4)] == [()] * 4, "10 of 32 tokens a step"
    assert drafter.propose(task, 2) == [51, 52]
    assert len(drafter._histories[1].index.text) == 32 + 1 + 4


def test_no_tasks_text_is_proposed_for_another() -> None:
    drafter, secret = NgramDrafter(), task_of([1, 2, 3, 42, 43, 44], number=1)
    drafter.propose(secret, 4)
    other = task_of([1, 2, 3], number=2)
    assert drafter.propose(other, 4) == []
    secret.tokens += [1, 2, 3]
    assert drafter.propose(secret, 2) == [42, 43]


def test_an_ended_task_leaves_nothing() -> None:
    drafter, task = NgramDrafter(), task_of([1, 2, 3])
    drafter.propose(task, 1)
    drafter.forget(1)
    drafter.forget(1)
    assert not len(drafter)


def test_a_step_of_free_text_takes_microseconds() -> None:
    """Of the fastest of several runs: 0.98 of the pace without drafts is 130 us of a step."""
    numbers, fastest = random.Random(2), 1.0
    for _ in range(5):
        drafter, task = NgramDrafter(), task_of([numbers.randrange(50_000) for _ in range(1000)])
        drafter.propose(task, 16)
        began = time.perf_counter()
        for _ in range(1000):
            task.tokens.append(numbers.randrange(50_000))
            drafter.propose(task, 16)
        fastest = min(fastest, (time.perf_counter() - began) / 1000)
    assert fastest < 50e-6
