"""Images among the tokens of tasks, computed by the echo model, which ignores them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from inferd.backends import Chunk, EmbedSpec, SamplingParams
from inferd.backends.echo.options import EchoOptions
from inferd.backends.errors import BackendError
from inferd.backends.media import MediaItem
from inferd.scheduler import Priority
from inferd.scheduler import messages as m
from inferd.scheduler.kv.disk import KvFiles
from tests.scheduler.doubles import Bench

SIZE = 20
BATCH_SIZE = 24


def image(name: str, size: int = SIZE) -> MediaItem:
    return MediaItem.of_content(hashlib.sha256(name.encode()).digest(), "p", "s", "b", size)


def spec_of(bench: Bench, number: int, *parts: str | MediaItem, **fields: object) -> m.TaskSpec:
    """Return a task whose prompt has texts and images."""
    spec = bench.spec(number, "", **fields)
    begin, *end = m.unpack_tokens(spec.tokens)
    tokens = [begin]
    for part in parts:
        tokens += part.entries() if isinstance(part, MediaItem) else part.encode()
    media = tuple(part for part in parts if isinstance(part, MediaItem))
    return msgspec.structs.replace(spec, tokens=m.pack_tokens([*tokens, *end]), media=media)


class Recording(Bench):
    """An engine whose batches are recorded."""

    def __init__(self, **more: object):
        super().__init__(batch_size=BATCH_SIZE, **more)  # type: ignore[arg-type]
        self.batches: list[list[Chunk]] = []
        step = self.model.step

        def recorded(chunks: Sequence[Chunk]) -> None:
            self.batches.append([*chunks])
            step(chunks)

        self.model.step = recorded  # type: ignore[method-assign]

    def submit_parts(self, number: int, *parts: str | MediaItem, **fields: object) -> m.Submit:
        return m.Submit(spec_of(self, number, *parts, **fields))


@pytest.mark.parametrize("memory", ["plain", "window", "recurrent", "hybrid"])
def test_an_image_is_computed_whole_and_alone(memory: str) -> None:
    bench = Recording(options=EchoOptions(memory=memory))  # type: ignore[arg-type]
    one, two = image("one"), image("two")
    bench.iterate(bench.submit(1, "beside it " * 8))
    bench.run(bench.submit_parts(2, "see ", one, two, " and say", session="s"))
    assert bench.text(1) == b"beside it " * 8 and bench.text(2) == b"see  and say"
    with_entries = [batch for batch in bench.batches if any(min(c.tokens) < -1 for c in batch)]
    assert [[list(chunk.tokens) for chunk in batch] for batch in with_entries] == [
        [one.entries()],
        [two.entries()],
    ]


def test_streams_continue_between_two_images() -> None:
    bench = Recording()
    bench.iterate(bench.submit(1, "a stream of its own"))
    while len(bench.tokens(1)) < 2:
        bench.iterate()
    images = [image(str(number)) for number in range(4)]
    bench.run(bench.submit_parts(2, *images, "end"))
    alone = [index for index, batch in enumerate(bench.batches) if min(batch[0].tokens) < -1]
    assert len(alone) == 4 and all(b - a > 1 for a, b in pairwise(alone))


@pytest.mark.parametrize("memory", ["plain", "window", "recurrent", "hybrid"])
def test_kv_state_is_reused_up_to_an_image_or_behind_it_but_never_inside(memory: str) -> None:
    bench = Recording(options=EchoOptions(memory=memory, window=4))  # type: ignore[arg-type]
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
    bench = Recording()
    prompt = spec_of(bench, 1, "see ", image("one"))
    ends_with_it = m.pack_tokens(m.unpack_tokens(prompt.tokens)[:-1])
    for number in (1, 2):
        spec = msgspec.structs.replace(prompt, id=number, tokens=ends_with_it)
        bench.run(m.Submit(spec))
    assert bench.stats(2).cached_tokens == 5
    assert [len(batch[0].tokens) for batch in bench.batches] == [5, SIZE, SIZE]
    assert bench.batches[-1][0].logits == 1


def test_a_prefix_with_an_image_is_shared_between_waiting_tasks() -> None:
    bench = Recording(slots=4, ctx_size=512)
    text, one = "a text that all of them begin with, " * 4, image("one")
    bench.run(*(bench.submit_parts(n, text, one, str(n)) for n in (1, 2, 3)))
    assert [bench.text(n) for n in (1, 2, 3)] == [(text + str(n)).encode() for n in (1, 2, 3)]
    assert len([b for b in bench.batches if min(b[0].tokens) < -1]) == 1
    assert [bench.stats(n).cached_tokens for n in (2, 3)] == [1 + len(text) + SIZE] * 2


def test_a_parked_and_a_resumed_task_keep_their_images() -> None:
    bench = Recording(slots=1)
    bench.iterate(bench.submit_parts(1, "see ", image("one"), "and say"))
    while len(bench.tokens(1)) < 3:
        bench.iterate()
    bench.run(bench.submit(2, "urgent", priority=Priority.URGENT))
    assert bench.stats(1).parks == 1 and bench.text(1) == b"see and say"
    spec, done = spec_of(bench, 3, "see ", image("one"), "and say"), b"see a"
    history = [*m.unpack_tokens(spec.tokens), *done]
    point = m.ResumePoint(output_tokens=len(done), text_bytes=len(done))
    other = Recording()
    other.run(
        m.Submit(msgspec.structs.replace(spec, tokens=m.pack_tokens(history), resume_point=point))
    )
    assert other.text(3) == b"nd say"


def test_images_are_refused_where_they_have_no_meaning() -> None:
    bench, one = Recording(), image("one")
    undeclared = msgspec.structs.replace(spec_of(bench, 1, "see ", one), media=())
    bench.run(m.Submit(undeclared))
    assert bench.error(1) == "InvalidArgument"
    bench.run(bench.submit_parts(2, image("large", BATCH_SIZE + 1)))
    assert bench.error(2) == "TooLarge"
    bench.run(bench.submit_parts(3, one, prompt_logprobs=1))
    bench.run(bench.submit_parts(4, one, embed=EmbedSpec()))
    assert bench.error(3) == bench.error(4) == "UnsupportedOperation"
    assert not bench.batches
    bench.run(bench.submit_parts(5, "a", image("x", BATCH_SIZE), "b"))
    assert bench.text(5) == b"ab"


def test_the_context_of_a_task_with_an_image_is_not_shifted() -> None:
    bench = Recording(ctx_size=64)
    parts = ("a long text in it", image("one"))
    bench.run(bench.submit_parts(1, *parts, ctx_shift=True, n_predict=50, ctx_size=42))
    assert bench.stats(1).stop_reason == "context_full" and not bench.stats(1).shifts


def test_penalties_see_only_text() -> None:
    bench = Recording()
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
        bench = Recording(files=KvFiles(tmp_path / str(size), bench_fingerprint()))
        bench.run(bench.submit_parts(1, "see ", image("one", size), "!" * 40, persist=True))
        bench.engine.kv.close()
        assert len(list((tmp_path / str(size)).glob("*/*/*"))) == files


def bench_fingerprint() -> str:
    return Bench().model.info.fingerprint


def test_the_text_of_a_history_leaves_images_out() -> None:
    bench = Recording()
    history = m.unpack_tokens(spec_of(bench, 1, "see ", image("one"), "this").tokens)
    reports = bench.iterate(m.Detokenize(7, m.pack_tokens(history)))
    while not any(isinstance(r, m.CommandResult) for r in reports):
        reports = bench.iterate()
    (answer,) = (r.value for r in reports if isinstance(r, m.CommandResult))
    assert b"see this" in answer


def test_a_batch_with_an_image_and_more_is_refused() -> None:
    bench, entries = Recording(), image("one").entries()
    model = bench.model
    wrong = [
        [Chunk(0, entries, 0, 0), Chunk(1, [5], 0, 0)],
        [Chunk(0, [5, *entries], 0, 0)],
        [Chunk(0, [*entries, 5], 0, 0)],
        [Chunk(0, entries[1:], 0, 0)],
        [Chunk(0, entries, 0, 2)],
        [Chunk(0, [-1], 0, 0)],
    ]
    for chunks in wrong:
        with pytest.raises(BackendError):
            model.step(chunks)
    model.step([Chunk(0, entries, 0, 1)])
