"""The order of contents that wait for an encoder process, and the bounds on them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.errors import Busy
from inferd.backends.media import MediaContent
from inferd.daemon.media.encoder_queue import EncoderBounds, EncoderQueue, Job, JobKey, Wish
from inferd.scheduler.owner import Owner, Priority, Requester

ADA, BOB = Owner(1), Owner(2)


def key(name: str, scope: int = 1, *, encodes: bool = True) -> JobKey:
    return JobKey(scope, MediaContent(name.encode()), encodes)


def add(
    queue: EncoderQueue,
    name: str,
    owner: Owner = ADA,
    priority: Priority = Priority.NORMAL,
    size: int = 1,
) -> tuple[Job, Wish]:
    wish = Wish(Requester(owner, priority), size)
    return queue.add_wish(key(name, owner.user), wish), wish


def names(queue: EncoderQueue, seconds: float = 1.0) -> list[str]:
    """Do all jobs, and return their names in order."""
    done = []
    while (job := queue.next_job()) is not None:
        done.append(job.key.content.sha256.decode())
        queue.end_job(job, seconds)
    return done


def test_users_alternate_however_many_images_one_has() -> None:
    queue = EncoderQueue()
    for number in range(4):
        add(queue, f"a{number}", ADA)
    for number in range(2):
        add(queue, f"b{number}", BOB)
    assert names(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_labels_divide_only_the_part_of_their_user() -> None:
    queue = EncoderQueue()
    for label in ("x", "y"):
        for number in range(2):
            add(queue, f"{label}{number}", Owner(1, label))
    for number in range(3):
        add(queue, f"b{number}", BOB)
    assert names(queue) == ["x0", "b0", "y0", "b1", "x1", "b2", "y1"]


def test_a_higher_class_of_the_same_user_goes_first_until_the_lower_one_has_aged() -> None:
    queue, done = EncoderQueue(), list[str]()
    add(queue, "low", ADA, Priority.LOW)
    for number in range(4):
        add(queue, f"n{number}", ADA, Priority.NORMAL)
        job = queue.next_job()
        assert job is not None
        done.append(job.key.content.sha256.decode())
        queue.end_job(job, 0.4)
    assert done == ["n0", "n1", "n2", "low"], "a second of work is a class"


def test_wishes_for_the_same_content_are_one_job_in_the_place_of_the_highest() -> None:
    queue = EncoderQueue()
    first, _ = add(queue, "late", ADA, Priority.LOW)
    add(queue, "other", ADA, Priority.NORMAL)
    same, high = add(queue, "late", ADA, Priority.HIGH)
    assert same is first and len(queue) == 3
    queue.remove_wish(same, high)
    assert queue.next_job() is not first, "its highest wish has left"
    assert queue.next_job() is first and queue.next_job() is None


def test_the_scopes_of_two_users_have_jobs_of_their_own() -> None:
    queue = EncoderQueue()
    assert add(queue, "x", ADA)[0] is not add(queue, "x", BOB)[0]


def test_reading_and_encoding_a_content_are_two_jobs() -> None:
    queue, requester = EncoderQueue(), Requester(ADA)
    one = queue.add_wish(key("x", encodes=False), Wish(requester, 1))
    assert queue.add_wish(key("x", encodes=True), Wish(requester, 1)) is not one


def test_a_job_ends_with_its_last_wish_unless_it_is_under_way() -> None:
    queue = EncoderQueue()
    job, wish = add(queue, "x")
    queue.remove_wish(job, wish)
    assert not queue.has_waiting_job and len(queue) == 0
    job, wish = add(queue, "y")
    assert queue.next_job() is job
    queue.remove_wish(job, wish)
    joined, later = add(queue, "y")
    assert joined is job and queue.next_job() is None, "the encoding under way serves it"
    assert queue.end_job(job, 1.0) == [later] and len(queue) == 0


def test_a_repeated_job_that_nobody_wants_is_dropped() -> None:
    queue = EncoderQueue()
    job, wish = add(queue, "x")
    queue.next_job()
    queue.repeat_job(job)
    assert queue.next_job() is job
    queue.remove_wish(job, wish)
    queue.repeat_job(job)
    assert queue.next_job() is None and add(queue, "x")[0] is not job


def test_the_bounds_of_a_user_refuse_nobody_else() -> None:
    queue = EncoderQueue(EncoderBounds(waiting_max=6, waiting_user_max=3, bytes_user_max=100))
    queue.check_bounds(1, 50, 10**9)  # a single request is bounded where it is accepted
    for name in "abc":
        add(queue, name, size=10)
    with pytest.raises(Busy) as refused:
        queue.check_bounds(1, 1, 1)
    assert refused.value.data["bound"] == "media-waiting-user-max"
    assert refused.value.retry_after_s > 0
    queue.check_bounds(2, 3, 10)
    queue.end_job(queue.next_job() or pytest.fail("a job waits"), 1.0)
    queue.check_bounds(1, 1, 80)
    with pytest.raises(Busy) as refused:
        queue.check_bounds(1, 1, 81)
    assert refused.value.data["bound"] == "media-bytes-waiting-user-max"


def test_all_users_together_are_bounded() -> None:
    queue = EncoderQueue(EncoderBounds(waiting_max=2))
    add(queue, "a", ADA), add(queue, "b", BOB)
    with pytest.raises(Busy) as refused:
        queue.check_bounds(2, 1, 1)
    assert refused.value.data["bound"] == "media-waiting-max"


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from("abcd"), st.sampled_from("+-.!"))))
def test_no_wish_is_lost_or_counted_twice(steps: Sequence[tuple[int, str, str]]) -> None:
    queue, held, running = EncoderQueue(), list[tuple[Job, Wish]](), list[Job]()
    for user, name, step in steps:
        if step == "+":
            held.append(add(queue, name, Owner(user), Priority(user)))
        elif step == "-" and held:
            queue.remove_wish(*held.pop(0))
        elif step == "." and (job := queue.next_job()) is not None:
            running.append(job)
        elif step == "!" and running:
            ended = queue.end_job(running.pop(0), 1.0)
            held = [pair for pair in held if pair[1] not in ended]
        assert len(queue) == len(held)
    left = {id(wish) for wish in queue.remove_jobs()}
    assert left == {id(wish) for _, wish in held} and len(queue) == 0
