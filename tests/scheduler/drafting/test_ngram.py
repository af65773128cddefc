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


def task_of(
    prompt: Sequence[int],
    number: int = 1,
    prediction: Sequence[int] = (),
    *,
    user: int = 0,
    session: str = "",
    ctx_size: int = 256,
) -> Task:
    spec = TaskSpec(
        id=number,
        owner=Owner(user),
        tokens=pack_tokens(prompt),
        sampling=SamplingParams(),
        session=session,
    )
    task = Task.from_spec(spec, arrival=1, clock=0, now=0.0)
    task.prediction, task.ctx_size = prediction, ctx_size
    return task


def text_of(drafter: NgramDrafter, user: int = 0, session: str = "task 1") -> list[int]:
    return drafter._histories[user, session].index.text.tolist()


def proposal(text: Sequence[int], limit: int = 4) -> list[int]:
    index = NgramIndex(64)
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
    index = NgramIndex(64)
    index.add([1, 2, 3, 4, 5, 6, 0, 3, 4, 5, 9, 1, 2, 3])
    assert index.propose(3) == [4, 5, 6]
    index.add([4, 5])
    assert index.propose(2) == [6, 0]
    index.add([8])
    assert index.propose(2) == []


def test_images_and_huge_ids_are_not_proposed() -> None:
    assert proposal([1, 2, 3, -5, 4, 1, 2, 3]) == []
    assert proposal([1, 2, 3, 4, 1 << 31, 1, 2, 3]) == [4]
    assert proposal([-5, -5, -5, -5]) == []


def test_each_step_indexes_only_the_new_tokens() -> None:
    drafter, task = NgramDrafter(), task_of([1, 2, 3, 4, 5])
    assert drafter.propose(task, 2) == []
    task.tokens += [1, 2, 3]
    assert drafter.propose(task, 2) == [4, 5] and len(text_of(drafter)) == 8
    assert drafter.propose(task, 1) == [4] and len(text_of(drafter)) == 8
    del task.tokens[2:6]  # a context shift
    task.dropped += 4
    task.tokens.append(4)
    assert drafter.propose(task, 1) == [5] and len(text_of(drafter)) == 9


def test_a_long_prompt_is_indexed_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "STEP_TOKENS_MAX", 10)
    drafter, task = NgramDrafter(), task_of([*range(100, 125), 100, 101, 102])
    assert [drafter.propose(task, 1) for _ in range(3)] == [(), (), [103]]


def test_the_last_half_at_least_of_a_long_text_is_indexed() -> None:
    """And tokens that are dropped before they are indexed are left out."""
    numbers = random.Random(1)
    text = [numbers.randrange(1000) for _ in range(500)]
    drafter, task = NgramDrafter(), task_of(text[:300], ctx_size=64)
    for token in text[300:]:
        drafter.propose(task, 1)
        assert 32 <= len(text_of(drafter)) <= 64
        task.tokens.append(token)
    task.tokens += text[-30:-27]
    assert drafter.propose(task, 3) == text[-27:-24]
    task.dropped, task.tokens = 480, task.tokens[480:]
    task.tokens += [*range(2000, 2040)]
    del task.tokens[:30]
    task.dropped += 30
    drafter.propose(task, 1)
    assert text_of(drafter)[-32:] == task.tokens[-32:]


def test_places_behind_a_cut_are_refused() -> None:
    index = NgramIndex(64)
    index.add([1, 2, 3, 4, 5, 6, 7, 8])
    index.cut(4)
    assert index.text.tolist() == [1, 2, 3, 4]
    index.add([1, 2, 3])
    assert index.propose(2) == [4, 1]
    index.add([9, 9, 9, 9, 4, 5, 6])
    assert index.propose(2) == [], "7 no longer follows 4, 5, 6"


def turn(drafter: NgramDrafter, text: Sequence[int], number: int, **fields: object) -> list[int]:
    task = task_of(text, number, **{"session": "s", **fields})  # type: ignore[arg-type]
    found = drafter.propose(task, 4)
    drafter.forget(number)
    return [*found]


def test_the_index_of_a_session_continues_over_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn is indexed in one step, although a step indexes fewer tokens than it has."""
    monkeypatch.setattr(ngram, "STEP_TOKENS_MAX", 10)
    drafter, text = NgramDrafter(), [*range(10, 19)]
    assert turn(drafter, text, 1) == []
    assert turn(drafter, [*text, 30, 31, 10, 11, 12], 2) == [13, 14, 15, 16]
    assert text_of(drafter, session="s") == [*text, 30, 31, 10, 11, 12]


def test_a_turn_that_begins_otherwise_keeps_the_common_beginning() -> None:
    drafter = NgramDrafter()
    turn(drafter, [1, 2, 3, 4, 5, 6, 7, 8], 1)
    assert turn(drafter, [1, 2, 3, 4, 9, 1, 2, 3], 2) == [4, 9, 1, 2]
    assert text_of(drafter, session="s") == [1, 2, 3, 4, 9, 1, 2, 3]
    assert turn(drafter, [1, 2, 3, 4, 9, 5, 6, 7], 3) == [], "8 followed in a turn that was undone"
    assert turn(drafter, [70, 71], 4) == [] and text_of(drafter, session="s") == [70, 71]


def test_images_of_a_session_do_not_end_the_common_beginning() -> None:
    drafter = NgramDrafter()
    turn(drafter, [1, 2, 3, -77, -78, 4, 5, 6], 1)
    index = drafter._histories[0, "s"].index
    turn(drafter, [1, 2, 3, -77, -78, 4, 5, 6, 7], 2)
    assert drafter._histories[0, "s"].index is index and len(index.text) == 9


def test_sessions_of_equal_names_are_separate_for_each_user() -> None:
    drafter, secret = NgramDrafter(), [1, 2, 3, 42, 43, 44]
    turn(drafter, secret, 1, user=1)
    assert turn(drafter, [1, 2, 3], 2, user=2) == []
    assert turn(drafter, [1, 2, 3], 3, user=1, session="other") == []
    assert turn(drafter, [*secret, 1, 2, 3], 4, user=1) == [42, 43, 44, 1]


def test_all_indexes_together_are_bounded_and_the_greediest_user_pays() -> None:
    size = NgramIndex.bytes_of(256)
    drafter = NgramDrafter(bytes_max=4 * size)
    turn(drafter, [1, 2, 3], 1, user=1)
    for number in range(2, 30):
        turn(drafter, [1, 2, 3], number, user=2, session=f"s{number}")
        assert drafter.bytes <= 4 * size and drafter.bytes == size * len(drafter)
    turn(drafter, [1, 2, 3], 30, user=2, session="s27")  # it was used last now
    turn(drafter, [1, 2, 3], 31, user=3)
    assert [*drafter._histories] == [(1, "s"), (2, "s29"), (2, "s27"), (3, "s")]
    assert turn(drafter, [1, 2, 3], 32, user=3, ctx_size=1 << 20) == []
    assert drafter.bytes <= 4 * size, "an index that is larger than all is not made"


def test_a_deleted_session_and_an_ended_task_without_one_leave_nothing() -> None:
    drafter = NgramDrafter()
    turn(drafter, [1, 2, 3], 1, user=1)
    turn(drafter, [1, 2, 3], 2, user=2)
    turn(drafter, [1, 2, 3], 3, session="")
    turn(drafter, [1, 2, 3], 4, session="", prediction=[4])
    assert [*drafter._histories] == [(1, "s"), (2, "s")] and not drafter._predicted
    drafter.forget_session(1, "s")
    drafter.forget_session(1, "s")
    assert [*drafter._histories] == [(2, "s")]
    drafter.forget_session(2, "s")
    assert drafter.bytes == 0


def test_an_index_grows_with_the_context() -> None:
    drafter = NgramDrafter()
    turn(drafter, [1, 2, 3, 4], 1)
    assert turn(drafter, [1, 2, 3, 4, 1, 2, 3], 2, ctx_size=1024) == [4, 1, 2, 3]
    assert drafter.bytes == NgramIndex.bytes_of(1024)


def test_a_prediction_is_proposed_from_its_beginning_and_found_again_after_an_error() -> None:
    prediction = [*range(50, 80)]
    drafter, task = NgramDrafter(), task_of([1, 2, 3], prediction=prediction)
    assert not drafter.propose(task, 2), "the prediction was indexed"
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
    assert not any(drafter.propose(task, 2) for _ in range(4)), "10 of 32 tokens a step"
    assert drafter.propose(task, 2) == [51, 52]
    assert len(drafter._predicted[1].index.text) == 32 + 1 + 1


def test_a_step_of_free_text_takes_microseconds() -> None:
    """Of the fastest of several runs: 0.98 of the pace without drafts is 130 us of a step."""
    numbers, fastest = random.Random(2), 1.0
    for _ in range(5):
        drafter, task = (
            NgramDrafter(),
            task_of([numbers.randrange(50_000) for _ in range(1000)], ctx_size=4096),
        )
        drafter.propose(task, 16)
        began = time.thread_time()
        for _ in range(1000):
            task.tokens.append(numbers.randrange(50_000))
            drafter.propose(task, 16)
        fastest = min(fastest, (time.thread_time() - began) / 1000)
    assert fastest < 50e-6
