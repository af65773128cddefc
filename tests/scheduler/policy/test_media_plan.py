"""Plans of steps and slots for tasks with images."""

from __future__ import annotations

import msgspec
import pytest

from inferd.backends.batch import MediaInput
from inferd.backends.media import MediaItem
from inferd.scheduler.messages import pack_tokens
from inferd.scheduler.owner import Owner, OwnerClock, Priority
from inferd.scheduler.policy.batch_plan import item_step_s, next_trial, plan_trial
from inferd.scheduler.policy.order import Order
from inferd.scheduler.policy.slot_plan import plan_slots
from inferd.scheduler.task import Task
from tests.scheduler.media_bench import image
from tests.scheduler.policy.test_guarantees import shares_of
from tests.scheduler.policy.test_plan import (
    SETTINGS,
    Known,
    decoding,
    order,
    running,
    slots_of,
    task,
)

TOKEN_S = 0.01


def with_image(
    number: int, size: int = 60, *, priority: Priority = Priority.NORMAL, owner: int = 1
) -> Task:
    """Return a task whose prompt is two tokens, an image without embeddings, and three tokens."""
    it = task(number, priority=priority, owner=owner)
    item: MediaItem = image(str(number), size)
    spec = msgspec.structs.replace(
        it.spec, tokens=pack_tokens([5, 6, *item.entries(), 7, 8, 9]), media=(item,)
    )
    return Task.from_spec(spec, arrival=number, clock=0, now=0.0)


def encoded(it: Task, *, causal: bool = True) -> Task:
    size = it.items[2]
    it.embeddings = {2: MediaInput(memoryview(bytes(size * 16)), size, size, causal=causal)}
    return it


def test_a_task_knows_what_comes_next() -> None:
    it = with_image(1)
    assert it.has_work and not it.awaits_media and it.tokens_to_checkpoint() == 2
    it.computed = 2
    assert it.awaits_media and not it.has_work and it.computes_alone
    encoded(it)
    assert it.has_work and it.item_left == 60 and not it.item_is_whole
    it.computed = 40
    assert it.has_work and it.item_left == 22 and it.media_needed()
    it.embeddings = {}
    assert it.awaits_media and not it.has_work
    it.computed = 62
    assert it.has_work and not it.computes_alone and not it.media_needed()


@pytest.mark.parametrize("causal", [True, False])
def test_a_step_has_a_part_of_an_image_that_can_be_cut(causal: bool) -> None:
    it = encoded(running(slots_of(1)[0], with_image(1), computed=2), causal=causal)
    [part] = plan_trial(it, SETTINGS, 512, Known(TOKEN_S), 8, seconds=0.3)
    assert part.count == (30 if causal else 60)
    chunk = part.chunk()
    assert chunk.media is it.embeddings[2] and chunk.offset == 0 and not chunk.logits
    it.computed += part.count
    if causal:
        [part] = plan_trial(it, SETTINGS, 20, Known(TOKEN_S), 8, seconds=9.0)
        assert part.count == 20 and part.chunk().offset == 30 and part.chunk().position == 32


def test_an_image_beside_a_stream_keeps_to_the_target_and_alone_takes_longer() -> None:
    one, two = slots_of(2)
    it, stream = encoded(running(one, with_image(1), computed=2)), decoding(two, task(2))
    stream.first_logits_at = 0.0
    cost = Known(TOKEN_S)
    alone = item_step_s(it, [], order(), SETTINGS, cost)
    assert SETTINGS.step_s_target < alone <= SETTINGS.step_s_max
    assert item_step_s(it, [stream], order(), SETTINGS, cost) <= SETTINGS.step_s_target


def test_images_alternate_with_other_steps_and_wait_for_prompts_of_a_higher_class() -> None:
    one, two = slots_of(2)
    it, stream = encoded(running(one, with_image(1), computed=2)), decoding(two, task(2))
    assert next_trial([it, stream], order(), tried=False) is it
    assert next_trial([it, stream], order(), tried=True) is None
    assert next_trial([it], order(), tried=True) is it
    for priority, first in ((Priority.HIGH, None), (Priority.NORMAL, it), (Priority.LOW, it)):
        prompt = running(two, task(3, priority=priority))
        assert next_trial([it, prompt], order(), tried=False) is first
    it.embeddings = {}
    assert next_trial([it, stream], order(), tried=False) is None


def test_a_task_that_waits_for_embeddings_loses_its_slot_first() -> None:
    slots = slots_of(2)
    waiting = running(slots[0], with_image(1, priority=Priority.URGENT), computed=2)
    stream = decoding(slots[1], task(2, priority=Priority.LOW))
    other = task(3, priority=Priority.LOW)
    plan = plan_slots([other], slots, order(), SETTINGS, 0.0)
    assert plan.park == (waiting,) and plan.start == (other,)
    encoded(waiting)
    assert plan_slots([other], slots, order(), SETTINGS, 0.0).park == ()
    assert stream.slot == 1


def test_a_slot_of_a_task_that_waits_for_embeddings_does_not_count_for_its_user() -> None:
    slots = slots_of(2)
    waiting = running(slots[0], with_image(1, owner=1), computed=2)
    decoding(slots[1], task(2, owner=2))
    first, second = task(3, owner=2), task(4, owner=1)
    users = Order(0, OwnerClock(), SETTINGS, shares_of(Owner(1), Owner(2)))
    plan = plan_slots([first, second], slots, users, SETTINGS, 0.0)
    assert (plan.park, plan.start) == ((waiting,), (second,)), "its user has no other slot"
