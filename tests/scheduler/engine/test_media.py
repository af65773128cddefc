"""Images among the tokens of tasks: their steps, KV states and embeddings. The echo model ignores
the embeddings' numbers.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from inferd.backends import EmbedSpec, SamplingParams
from inferd.backends.echo.options import EchoOptions
from inferd.backends.errors import InvalidArgument
from inferd.scheduler import EngineSettings, Priority
from inferd.scheduler import messages as m
from inferd.scheduler.engine import item_store
from inferd.scheduler.kv.disk import KvFiles
from inferd.scheduler.record import WaitReason
from tests.scheduler.doubles import Bench
from tests.scheduler.media_bench import SIZE, MediaBench, image, is_open, memory

MEMORIES = ["plain", "window", "recurrent", "hybrid"]


def bench_of(memory: str, **more: object) -> MediaBench:
    return MediaBench(options=EchoOptions(media=True, memory=memory, window=4), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_image_is_computed_whole_and_alone(memory: str) -> None:
    bench = bench_of(memory)
    one, two = image("one"), image("two")
    bench.iterate(bench.submit(1, "beside it " * 8))
    bench.run(bench.submit_parts(2, "see ", one, two, " and say", session="s"))
    assert bench.text(1) == b"beside it " * 8 and bench.text(2) == b"see  and say"
    with_entries = [batch for batch in bench.batches if any(min(c.tokens) < -1 for c in batch)]
    assert [[list(chunk.tokens) for chunk in batch] for batch in with_entries] == [
        [one.entries()],
        [two.entries()],
    ]
    assert [chunk.media.size for chunk in bench.item_batches if chunk.media] == [SIZE, SIZE]


def test_streams_continue_between_two_images() -> None:
    bench = MediaBench()
    bench.iterate(bench.submit(1, "a stream of its own"))
    while len(bench.tokens(1)) < 2:
        bench.iterate()
    images = [image(str(number)) for number in range(4)]
    bench.run(bench.submit_parts(2, *images, "end"))
    alone = [index for index, batch in enumerate(bench.batches) if min(batch[0].tokens) < -1]
    assert len(alone) == 4 and all(b - a > 1 for a, b in pairwise(alone))


@pytest.mark.parametrize("memory", MEMORIES)
def test_kv_state_is_reused_up_to_an_image_or_behind_it_but_never_inside(memory: str) -> None:
    bench = bench_of(memory)
    one = image("one")
    bench.run(bench.submit_parts(1, "see ", one, session="s"))
    same, cut = bench.spec(2, "see ").tokens[:-4], len(b"see ") + 1
    assert len(same) == 4 * cut
    bench.run(bench.submit_parts(2, "see ", one, " again", session="s"))
    bench.run(bench.submit_parts(3, "see ", image("two"), " again", session="s"))
    cached = [bench.stats(number).cached_tokens for number in (2, 3)]
    assert cached[0] in (cut + SIZE, 0) and cached[1] in (cut, 0)
    if memory == "plain":
        assert cached == [cut + SIZE, cut]
    bench.run(bench.submit_parts(4, "see ", one, session="s"))
    assert bench.text(4) == b"see "
    ends = {chunk.position + len(chunk.tokens) for batch in bench.batches for chunk in batch}
    assert not ends & set(range(cut + 1, cut + SIZE))


def test_an_image_at_the_end_is_computed_again_for_its_logits() -> None:
    bench = MediaBench()
    prompt = bench.spec_of(1, "see ", image("one"))
    ends_with_it = m.pack_tokens(m.unpack_tokens(prompt.tokens)[:-1])
    for number in (1, 2):
        spec = msgspec.structs.replace(prompt, id=number, tokens=ends_with_it)
        bench.run(m.Submit(spec))
    assert bench.stats(2).cached_tokens == 5
    assert [len(batch[0].tokens) for batch in bench.batches] == [5, SIZE, SIZE]
    assert bench.batches[-1][0].logits == 1


def test_a_prefix_with_an_image_is_shared_between_waiting_tasks() -> None:
    bench = MediaBench(slots=4, ctx_size=512)
    text, one = "a text that all of them begin with, " * 4, image("one")
    bench.run(*(bench.submit_parts(n, text, one, str(n)) for n in (1, 2, 3)))
    assert [bench.text(n) for n in (1, 2, 3)] == [(text + str(n)).encode() for n in (1, 2, 3)]
    assert len([b for b in bench.batches if min(b[0].tokens) < -1]) == 1
    assert [bench.stats(n).cached_tokens for n in (2, 3)] == [1 + len(text) + SIZE] * 2


def test_a_parked_and_a_resumed_task_keep_their_images() -> None:
    bench = MediaBench(slots=1)
    bench.iterate(bench.submit_parts(1, "see ", image("one"), "and say"))
    while len(bench.tokens(1)) < 3:
        bench.iterate()
    bench.run(bench.submit(2, "urgent", priority=Priority.URGENT))
    assert bench.stats(1).parks == 1 and bench.text(1) == b"see and say"
    other = MediaBench()
    spec, done = other.spec_of(3, "see ", image("one"), "and say"), b"see a"
    history = [*m.unpack_tokens(spec.tokens), *done]
    point = m.ResumePoint(output_tokens=len(done), text_bytes=len(done))
    other.run(
        m.Submit(msgspec.structs.replace(spec, tokens=m.pack_tokens(history), resume_point=point))
    )
    assert other.text(3) == b"nd say"


def test_images_are_refused_where_they_have_no_meaning() -> None:
    bench, one = MediaBench(), image("one")
    undeclared = msgspec.structs.replace(bench.spec_of(1, "see ", one), media=())
    bench.run(m.Submit(undeclared))
    assert bench.error(1) == "InvalidArgument"
    bench.run(bench.submit_parts(3, one, prompt_logprobs=1))
    bench.run(bench.submit_parts(4, one, embed=EmbedSpec()))
    assert bench.error(3) == bench.error(4) == "UnsupportedOperation"
    assert not bench.batches and not bench.wanted


def test_a_model_without_a_projector_refuses_images() -> None:
    bench = MediaBench(options=EchoOptions())
    bench.run(bench.submit_parts(1, "see ", image("one")))
    end = bench.end(1)
    assert isinstance(end, m.Failed) and end.error["name"] == "UnsupportedOperation"
    assert "mmproj" in end.error["hint"]


def test_the_context_of_a_task_with_an_image_is_not_shifted() -> None:
    bench = MediaBench(ctx_size=64)
    parts = ("a long text in it", image("one"))
    bench.run(bench.submit_parts(1, *parts, ctx_shift=True, n_predict=50, ctx_size=42))
    assert bench.stats(1).stop_reason == "context_full" and not bench.stats(1).shifts


def test_penalties_see_only_text() -> None:
    bench = MediaBench()
    seen: list[list[int]] = []
    sampler = bench.model.sampler

    def recorded(params: SamplingParams, prompt: list[int], *more: object) -> object:
        seen.append(list(prompt))
        return sampler(params, prompt, *more)  # type: ignore[arg-type]

    bench.model.sampler = recorded  # type: ignore[assignment]
    bench.run(bench.submit_parts(1, "see ", image("one"), "!"))
    assert [min(tokens) >= 0 and len(tokens) for tokens in seen] == [len(b"see !") + 2]


def test_a_state_with_a_short_item_stays_in_its_worker(tmp_path: Path) -> None:
    """A file would outlive the digest, by which such items are told apart."""
    for size, files in ((4, 0), (5, 1)):
        bench = MediaBench(files=KvFiles(tmp_path / str(size), bench_fingerprint()))
        bench.run(bench.submit_parts(1, "see ", image("one", size), "!" * 40, persist=True))
        bench.engine.kv.close()
        assert len(list((tmp_path / str(size)).glob("*/*/*"))) == files


def bench_fingerprint() -> str:
    return Bench().model.info.fingerprint


def test_the_text_of_a_history_leaves_images_out() -> None:
    bench = MediaBench()
    history = m.unpack_tokens(bench.spec_of(1, "see ", image("one"), "this").tokens)
    reports = bench.iterate(m.Detokenize(7, m.pack_tokens(history)))
    while not any(isinstance(r, m.CommandResult) for r in reports):
        reports = bench.iterate()
    (answer,) = (r.value for r in reports if isinstance(r, m.CommandResult))
    assert b"see this" in answer


# Embeddings.


def test_embeddings_are_requested_at_submit_and_freed_once_they_are_computed() -> None:
    bench, one, two = MediaBench(held=True), image("one"), image("two")
    bench.iterate(bench.submit_parts(1, "see ", one, " and ", two, "which of them?"))
    assert bench.wanted == [(1, one), (1, two)]
    bench.run()
    assert [len(batch[0].tokens) for batch in bench.batches] == [5], "the text before is computed"
    assert bench.state(1) == "encoding" and bench.engine.wait_s_max() is None
    items = bench.engine.tasks.items
    bench.iterate(bench.ready(two), bench.ready(one))
    assert len(items) == 2 and items.size_bytes == 2 * SIZE * 16
    while len(bench.item_batches) < 2:
        bench.iterate()
    assert bench.state(1) == "running"
    bench.iterate()
    assert not items and bench.end(1) is None
    bench.run()
    assert bench.text(1) == b"see  and which of them?" and len(bench.wanted) == 2


def test_a_task_gives_its_slot_to_others_while_its_image_is_encoded() -> None:
    bench, one = MediaBench(held=True, slots=1), image("one")
    bench.run(bench.submit_parts(1, "see ", one, "!", priority=Priority.HIGH))
    bench.run(bench.submit(2, "another text", priority=Priority.LOW))
    assert bench.text(2) == b"another text" and bench.state(1) == "encoding"
    assert bench.engine.tasks.find_task(1) in bench.engine.tasks.queue
    bench.iterate(bench.submit(3, "a long text" * 5, priority=Priority.LOW))
    bench.iterate(bench.ready(one))
    assert bench.state(1) == "running", "its class takes the slot back"
    bench.run()
    assert bench.text(1) == b"see !" and bench.text(3) == b"a long text" * 5


def test_a_task_keeps_an_idle_slot_while_its_image_is_encoded() -> None:
    bench, one = MediaBench(held=True), image("one")
    bench.run(bench.submit_parts(1, "see ", one, "!"), bench.submit(2, "another text"))
    assert bench.text(2) == b"another text"
    assert [task.spec.id for task in bench.engine.tasks.slots.tasks] == [1]
    bench.run(bench.ready(one))
    assert bench.stats(1).parks == 0


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_task_behind_a_known_state_waits_in_the_queue_for_its_image(memory: str) -> None:
    bench, one, two = bench_of(memory, held=True), image("one"), image("two")
    bench.run(bench.submit_parts(1, "look at this ", one, session="s"))
    bench.run(bench.ready(one))
    assert bench.text(1) == b"look at this " and bench.wanted == [(1, one)]
    bench.run(bench.submit_parts(2, "look at this ", one, two, "?", session="s"))
    assert bench.wanted[1:] == [(2, two)]
    [entry] = bench.engine.tasks.view_queue().entries()
    assert entry.state == "encoding" and entry.position == 1 and entry.starts_in_s is None
    bench.engine.metrics.publish(at_once=True)
    gauges = bench.engine.metrics.page.read_gauges()
    assert gauges[f"waiting_{WaitReason.ENCODING}"] == 1
    assert bench.engine.wait_s_max(), "the engine waits for the answer, and not in a loop"
    bench.run(bench.ready(one), bench.ready(two))
    assert bench.text(2) == b"look at this ?"


def test_what_a_kv_state_covers_is_not_requested_unless_the_state_vanishes() -> None:
    bench, one = MediaBench(slots=1), image("one")
    parts = ("a text of some length ", one, "what is it?")
    bench.run(bench.submit_parts(1, *parts, session="s"))
    bench.held, bench.wanted = True, []
    bench.iterate(bench.submit(9, "a stream that runs for long " * 2))
    bench.iterate(bench.submit_parts(2, *parts, " Again", session="s"))
    for _ in range(3):
        bench.iterate()
    assert not bench.wanted
    bench.iterate(m.DeleteSessionStates(5, 1, "s"))
    assert bench.wanted == [(2, one)]
    bench.run(bench.ready(one))
    assert bench.stats(2).cached_tokens < len("a text of") and bench.text(2).endswith(b"Again")


def test_one_answer_serves_all_tasks_of_a_scope_and_no_other_user() -> None:
    bench, one = MediaBench(held=True, slots=4), image("one")
    bench.iterate(
        *(bench.submit_parts(n, one, f"text {n}", owner=owner) for n, owner in enumerate((1, 1, 2)))
    )
    assert sorted(number for number, _ in bench.wanted) == [0, 1, 2]
    bench.run(bench.ready(one))
    assert bench.text(0) == b"text 0" and bench.text(1) == b"text 1" and bench.end(2) is None
    late = bench.ready(one)
    bench.run(late)
    assert bench.end(2) is None and not is_open(late.fd) and not bench.engine.tasks.items
    bench.run(bench.ready(one, scope=2))
    assert bench.text(2) == b"text 2"


def test_embeddings_that_no_task_waits_for_are_dropped() -> None:
    bench, one = MediaBench(held=True), image("one")
    bench.run(bench.submit_parts(1, "see ", one))
    bench.run(m.Cancel(1))
    assert bench.error(1) == "Cancelled"
    late = bench.ready(one)
    bench.run(late)
    assert not is_open(late.fd) and not bench.engine.tasks.items
    bench.run(bench.submit_parts(2, "see ", one, "!"))
    bench.run(first := bench.ready(one), again := bench.ready(one))
    assert bench.text(2) == b"see !"
    assert not is_open(first.fd) and not is_open(again.fd)


def test_a_failed_encoding_fails_the_tasks_that_wait_for_it() -> None:
    bench, one, two = MediaBench(held=True, slots=4), image("one"), image("two")
    error = InvalidArgument("this is not an image", data={"item": 0}).to_wire()
    bench.iterate(bench.submit_parts(1, one), bench.submit_parts(2, two, "!"))
    bench.iterate(bench.submit_parts(3, one, owner=2))
    bench.run(m.MediaFailed(one.digest, error, 1), bench.ready(two))
    end = bench.end(1)
    assert isinstance(end, m.Failed) and end.error == error
    assert bench.text(2) == b"!" and bench.end(3) is None
    bench.run(m.MediaFailed(one.digest, error, 2))
    assert bench.error(3) == "InvalidArgument"


def test_wrong_memory_fails_the_tasks_and_is_closed(tmp_path: Path) -> None:
    right = SIZE * 16
    unsealed, short, long = memory(right, 0), memory(right - 4), memory(right + 1)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, right)
    for fd in (unsealed, short, long, file, -1):
        bench, one = MediaBench(held=True), image("one")
        bench.iterate(bench.submit_parts(1, "see ", one))
        bench.run(m.MediaReady(one.digest, True, 1, fd))
        assert bench.error(1) == "RuntimeError" and not is_open(fd)


def test_the_bound_on_embeddings_holds_and_no_task_waits_forever() -> None:
    settings = replace(EngineSettings(), media_bytes_max=2 * SIZE * 16)
    bench = MediaBench(settings=settings, slots=4, ctx_size=512)
    items = bench.engine.tasks.items
    images = [image(str(number)) for number in range(9)]
    for n in range(3):
        bench.iterate(bench.submit_parts(n, *images[3 * n : 3 * n + 3], f"text {n}"))
        assert items.size_bytes <= settings.media_bytes_max
    for _ in range(500):
        bench.iterate()
        assert items.size_bytes <= settings.media_bytes_max
    assert [bench.text(n) for n in range(3)] == [b"text 0", b"text 1", b"text 2"]
    large = image("large", 100)
    bench.run(bench.submit_parts(4, large, "!"))
    assert bench.text(4) == b"!", "one item may be larger than the bound"


def test_adjacent_images_are_requested_one_after_the_other_within_the_bound() -> None:
    """The engine does not wait for commands before it has requested the next one."""
    settings = replace(EngineSettings(), media_bytes_max=SIZE * 16)
    bench, images = MediaBench(settings=settings), [image(str(number)) for number in range(4)]
    bench.run(bench.submit_parts(1, *images, "!"))
    assert bench.text(1) == b"!" and bench.wanted == [(1, it) for it in images]


def test_tasks_that_cannot_be_parked_do_not_keep_the_first_one_from_its_image() -> None:
    settings = replace(EngineSettings(), media_bytes_max=SIZE * 16, kv_ram_bytes=1)
    bench = MediaBench(settings=settings)
    images = [image(str(number)) for number in range(3)]
    for number in (1, 2):
        bench.iterate(bench.submit_parts(number, "a text", images[number], "!"))
    bench.run(bench.submit_parts(3, images[0], "?", priority=Priority.URGENT))
    assert [bench.text(number) for number in (1, 2, 3)] == [b"a text!", b"a text!", b"?"]


def test_a_task_of_a_higher_class_gets_its_embeddings_first() -> None:
    settings = replace(EngineSettings(), media_bytes_max=SIZE * 16)
    bench, low, urgent = MediaBench(held=True, settings=settings), image("low"), image("urgent")
    bench.run(bench.submit_parts(1, low, "low", priority=Priority.LOW))
    bench.run(bench.submit_parts(2, urgent, "urgent", priority=Priority.URGENT))
    assert bench.wanted == [(1, low), (2, urgent)]
    bench.run(bench.ready(low))
    assert not bench.engine.tasks.items, "the memory is for the task before it"
    bench.run(bench.ready(urgent))
    assert bench.text(2) == b"urgent" and bench.wanted[2:] == [(1, low)]
    bench.run(bench.ready(low))
    assert bench.text(1) == b"low"


def test_a_task_without_a_reader_keeps_no_memory_from_others() -> None:
    settings = replace(EngineSettings(), media_bytes_max=SIZE * 16)
    bench, one, two = MediaBench(held=True, settings=settings), image("one"), image("two")
    bench.run(bench.submit_parts(1, one, "high", priority=Priority.HIGH, credit=0))
    bench.run(bench.submit_parts(2, two, "low", priority=Priority.LOW))
    bench.run(bench.ready(two))
    assert bench.text(2) == b"low" and bench.end(1) is None
    bench.run(m.Credit(1, 100), bench.ready(one))
    bench.run(bench.ready(one))
    assert bench.text(1) == b"high"


def test_time_bounds_end_a_task_whose_image_is_being_encoded() -> None:
    bench, one = MediaBench(held=True), image("one")
    bench.run(bench.submit_parts(1, "see ", one, total_timeout_s=5.0))
    wait_s = bench.engine.wait_s_max()
    assert wait_s == pytest.approx(5.0)
    bench.now += 5.0
    bench.iterate()
    assert bench.error(1) == "Timeout"


def test_the_tasks_of_a_lost_worker_request_their_embeddings_from_the_next() -> None:
    bench, one = MediaBench(held=True), image("one")
    spec = bench.spec_of(1, "see ", one, "and say")
    history = [*m.unpack_tokens(spec.tokens), *b"see "]
    tokens, point = m.pack_tokens(history), m.ResumePoint(output_tokens=4, text_bytes=4)
    bench.run(m.Submit(msgspec.structs.replace(spec, tokens=tokens, resume_point=point)))
    assert bench.wanted == [(1, one)]
    bench.run(bench.ready(one))
    assert bench.text(1) == b"and say"


# Parts.


def test_a_long_image_is_computed_in_parts_between_the_steps_of_streams() -> None:
    bench, one = MediaBench(), image("one", 60)
    bench.iterate(bench.submit(1, "a stream of its own " * 3))
    while len(bench.tokens(1)) < 2:
        bench.iterate()
    bench.run(bench.submit_parts(2, "see ", one, "end"))
    parts = bench.item_batches
    assert [(c.offset, len(c.tokens), c.position) for c in parts] == [
        (0, 24, 5),
        (24, 24, 29),
        (48, 12, 53),
    ]
    places = [bench.batches.index([chunk]) for chunk in parts]
    assert all(b - a > 1 for a, b in pairwise(places))
    assert bench.text(2) == b"see end"


def test_entries_that_see_each_other_are_computed_at_once_or_refused() -> None:
    bench, one, large = MediaBench(held=True), image("one", 24), image("large", 25)
    bench.run(bench.submit_parts(1, "a", one, "b"), bench.submit_parts(2, "a", large, "b"))
    bench.run(bench.ready(one, causal=False), last := bench.ready(large, causal=False))
    assert [len(chunk.tokens) for chunk in bench.item_batches] == [24]
    end = bench.end(2)
    assert isinstance(end, m.Failed) and end.error["name"] == "TooLarge"
    assert "batch-size" in end.error["hint"] and not is_open(last.fd)
    assert bench.text(1) == b"ab"


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_task_parked_inside_an_image_continues_there(memory: str) -> None:
    bench, one = bench_of(memory, slots=1), image("one", 100)
    bench.iterate(bench.submit_parts(1, "see ", one, "and say", session="s"))
    while len(bench.item_batches) < 2:
        bench.iterate()
    bench.run(bench.submit(2, "urgent", priority=Priority.URGENT, owner=2))
    assert bench.stats(1).parks == 1 and bench.text(1) == b"see and say"
    assert [chunk.offset for chunk in bench.item_batches] == [0, 24, 48, 72, 96]


@pytest.mark.parametrize("memory", MEMORIES)
def test_no_other_task_uses_a_part_of_an_image(memory: str) -> None:
    bench, one = bench_of(memory, slots=2), image("one", 100)
    bench.iterate(bench.submit_parts(1, "see ", one, "and say", session="s"))
    while len(bench.item_batches) < 2:
        bench.iterate()
    bench.run(m.Cancel(1))
    bench.run(bench.submit_parts(2, "see ", one, "and say", session="s"))
    assert bench.text(2) == b"see and say" and bench.stats(2).cached_tokens in (0, 5)
    assert [chunk.offset for chunk in bench.item_batches[2:]] == [0, 24, 48, 72, 96]


def test_an_image_waits_for_prompts_of_a_higher_class() -> None:
    bench, one = MediaBench(slots=2), image("one", 60)
    bench.iterate(bench.submit_parts(1, one, "low", priority=Priority.LOW))
    while not bench.item_batches:
        bench.iterate()
    bench.run(bench.submit(2, "u" * 100, priority=Priority.URGENT))
    kinds = [chunk.slot for batch in bench.batches for chunk in batch if len(chunk.tokens) > 4]
    first, second = (bench.item_batches[n].slot for n in (0, 1))
    assert first == second and kinds[: 1 + 4] == [first, *[1 - first] * 4]


def test_as_many_items_are_in_memory_as_a_worker_has_descriptors_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_store, "ITEMS_MAX", 2)
    bench, images = MediaBench(slots=2), [image(str(number)) for number in range(6)]
    for n in range(2):
        bench.iterate(bench.submit_parts(n, *images[3 * n : 3 * n + 3], f"text {n}"))
        assert len(bench.wanted) <= 2
    for _ in range(300):
        bench.iterate()
    assert [bench.text(n) for n in range(2)] == [b"text 0", b"text 1"]
