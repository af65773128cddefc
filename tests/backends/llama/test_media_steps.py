"""Images in a context: steps of their embeddings, positions, saved states, and attention without
order. The models are tiny; embeddings are random.

The reference is bare llama.cpp, called as mtmd's helper calls it.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from inferd.backends import Chunk
from inferd.backends.errors import BackendError, UnsupportedOperation
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from tests.backends.driving import prefill
from tests.backends.pictures import (
    Part,
    Picture,
    compute,
    picture,
    reference,
    size_of,
    step_picture,
)
from tests.backends.tiny import (
    BATCH_SIZE,
    NOISE_MAX,
    SLOTS,
    Bare,
    difference,
    tiny_spec,
    tokens_of,
)
from tests.tiny_gguf import EMBEDDING, write_tiny

KINDS = ("llama", "gemma3", "gemma3-full", "mamba", "lfm2", "jamba", "qwen2vl")
"""Those of `tests.backends.tiny`, and one with M-RoPE."""
WHOLE_ONLY = ("mamba", "lfm2", "jamba")
"""Those whose states cannot be cut."""


def only(*kinds: str) -> pytest.MarkDecorator:
    """Run a test with these kinds of models, to the memory of which it applies."""
    return pytest.mark.parametrize("_loaded", kinds, indirect=True)


MOVES = ("text", "image", "image", "trim", "swap", "save", "load")


class Loaded(NamedTuple):
    kind: str
    model: LlamaModel
    bare: Bare
    path: Path

    def picture(
        self, seed: int, rows: int = 3, columns: int = 4, *, causal: bool = True
    ) -> Picture:
        mrope = self.model.info.media_mrope
        return picture(seed, rows, columns, mrope=mrope, causal=causal)


def load(path: Path, *, full: bool = False) -> LlamaModel:
    spec = tiny_spec(path, **{"swa-full": full})
    return load_llama(msgspec.structs.replace(spec, mmproj="projector.gguf"), lambda _: True)


@pytest.fixture(scope="module", params=KINDS)
def _loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    name, _, full = request.param.partition("-")
    path = write_tiny(name, tmp_path_factory.mktemp("tiny"))
    model, bare = load(path, full=bool(full)), Bare(path, full=bool(full))
    yield Loaded(request.param, model, bare, path)
    model.close()
    bare.close()


@pytest.fixture
def loaded(_loaded: Loaded) -> Loaded:
    for slot in range(SLOTS):
        _loaded.model.trim(slot, 0)
    return _loaded


def assert_as_reference(loaded: Loaded, slot: int, parts: Sequence[Part]) -> None:
    assert difference(loaded.model.logits(slot), reference(loaded.bare, parts)) < NOISE_MAX


def test_the_facts_say_what_a_model_reads(loaded: Loaded) -> None:
    info = loaded.model.info
    assert info.media_width == EMBEDDING and info.media_mrope == (loaded.kind == "qwen2vl")
    assert info.media_size_max == BATCH_SIZE


def test_an_image_equals_that_of_mtmds_helper(loaded: Loaded) -> None:
    parts: list[Part] = [tokens_of(1, 30), loaded.picture(1), tokens_of(2, 9)]
    parts += [loaded.picture(2, 2, 7), loaded.picture(3, 5, 5), tokens_of(3, 3)]
    assert compute(loaded.model, 1, parts) == 30 + 12 + 9 + 14 + 25 + 3
    assert_as_reference(loaded, 1, parts)


def test_an_image_at_the_beginning_and_at_the_end(loaded: Loaded) -> None:
    it, text = loaded.picture(1), tokens_of(4, 5)
    compute(loaded.model, 0, [it, text])
    assert_as_reference(loaded, 0, [it, text])
    compute(loaded.model, 1, [text, it])  # the last entry has logits
    assert_as_reference(loaded, 1, [text, it])


def test_an_image_in_parts_equals_a_whole_one(loaded: Loaded) -> None:
    parts: list[Part] = [tokens_of(1, 20), loaded.picture(1, 4, 6), tokens_of(2, 7)]
    for chunk in (1, 7, 23):
        loaded.model.trim(0, 0)
        compute(loaded.model, 0, parts, chunk)
        assert_as_reference(loaded, 0, parts)


def test_an_image_larger_than_a_batch_is_computed_in_parts(loaded: Loaded) -> None:
    parts: list[Part] = [tokens_of(1, 5), loaded.picture(1, 10, 12), tokens_of(2, 7)]
    found = []
    for slot, chunk in ((0, BATCH_SIZE), (1, 50)):
        assert compute(loaded.model, slot, parts, chunk) == 132
        found.append(loaded.model.logits(slot))
    assert difference(*found) < NOISE_MAX


def test_an_image_is_the_same_in_each_slot_and_another_one_differs(loaded: Loaded) -> None:
    model, text, more = loaded.model, tokens_of(1, 10), tokens_of(2, 5)
    found = []
    for slot, seed in ((0, 1), (2, 1), (1, 2)):
        compute(model, slot, [text, loaded.picture(seed), more])
        found.append(model.logits(slot))
    assert (found[0] == found[1]).all() and difference(found[0], found[2]) > 0.1


def test_streams_beside_an_image_are_not_disturbed(loaded: Loaded) -> None:
    model, text = loaded.model, tokens_of(1, 20)
    compute(model, 0, [text])
    compute(model, 1, [loaded.picture(1)])
    model.step([Chunk(0, [9], 20, 1), Chunk(1, [9], model.length(1), 1)])
    assert_as_reference(loaded, 1, [loaded.picture(1), [9]])
    assert_as_reference(loaded, 0, [[*text, 9]])


def test_a_saved_state_continues_in_another_slot(loaded: Loaded) -> None:
    model = loaded.model
    parts: list[Part] = [tokens_of(1, 20), loaded.picture(1), tokens_of(2, 9), loaded.picture(2)]
    length = compute(model, 0, parts)
    state = model.save(0)
    model.swap(0, 1)
    assert model.restore(2, state) and model.length(2) == model.length(1) == length
    for slot in (1, 2):
        compute(model, slot, [tokens_of(3, 5)])
        assert_as_reference(loaded, slot, [*parts, tokens_of(3, 5)])


def test_a_state_saved_inside_an_image_continues_there(loaded: Loaded) -> None:
    model, it, text = loaded.model, loaded.picture(1, 4, 5), tokens_of(1, 20)
    prefill(model, 0, text)
    model.step([Chunk(0, it.entries[:7], 20, 0, it.media, 0)])
    state = model.save(0)
    assert model.restore(1, state) and model.length(1) == 27
    model.step([Chunk(1, it.entries[7:], 27, 0, it.media, 7)])
    compute(model, 1, [[9, 8]])
    assert_as_reference(loaded, 1, [text, it, [9, 8]])


def restored_logits(path: Path, kind: str, state: bytes, tokens: list[int]) -> list[float]:
    """Return the logits after *tokens* behind a saved *state*. This runs in another process."""
    model = load(path, full=kind.endswith("full"))
    assert model.restore(3, state)
    prefill(model, 3, tokens, model.length(3))
    logits: list[float] = model.logits(3).tolist()
    model.close()
    return logits


def test_a_saved_state_continues_in_another_process(loaded: Loaded) -> None:
    parts: list[Part] = [tokens_of(1, 20), loaded.picture(1), tokens_of(2, 9)]
    compute(loaded.model, 0, parts)
    more, context = tokens_of(3, 5), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        arguments = loaded.path, loaded.kind, loaded.model.save(0), more
        found = pool.submit(restored_logits, *arguments).result()
    expected = reference(loaded.bare, [*parts, more])
    assert difference(np.array(found, np.float32), expected) < NOISE_MAX


def test_a_slot_is_trimmed_before_behind_and_between_images(loaded: Loaded) -> None:
    model = loaded.model
    parts: list[Part] = [tokens_of(1, 12), loaded.picture(1), tokens_of(2, 6), loaded.picture(2)]
    parts.append(tokens_of(3, 8))
    compute(model, 0, parts)
    state, borders = model.save(0), [sum(map(size_of, parts[:n])) for n in range(1, 5)]
    cuts = [*((keep, parts[:n]) for n, keep in enumerate(borders, 1))]
    cuts.append((borders[3] + 3, [*parts[:4], tokens_of(3, 8)[:3]]))
    cuts.append((borders[1] + 2, [*parts[:2], tokens_of(2, 6)[:2]]))
    for keep, kept in cuts:
        assert model.restore(0, state)
        found = model.trim(0, keep)
        assert found == (0 if loaded.kind in WHOLE_ONLY else keep)
        if found:
            assert model.length(0) == keep and model.trim_min(0) <= keep
            compute(model, 0, [tokens_of(4, 5)])
            assert_as_reference(loaded, 0, [*kept, tokens_of(4, 5)])


def test_a_window_that_moved_past_an_image_is_cut_behind_it_only(loaded: Loaded) -> None:
    model, it = loaded.model, loaded.picture(1, 6, 6)
    parts: list[Part] = [tokens_of(1, 60), it, tokens_of(2, 200)]
    length = compute(model, 0, parts)
    least = model.trim_min(0)
    state = model.save(0)
    if loaded.kind in WHOLE_ONLY:
        assert least == length
        return
    assert model.trim(0, least) == least
    compute(model, 0, [tokens_of(4, 5)])
    kept = [*parts[:2], tokens_of(2, 200)[: least - 96]] if least > 96 else [tokens_of(1, 60)[:1]]
    assert_as_reference(loaded, 0, [*kept, tokens_of(4, 5)])
    assert model.restore(0, state)
    if loaded.kind == "gemma3":
        assert model.trim(0, 96) == 0


@only("qwen2vl")
def test_images_whose_positions_are_fewer_are_never_cut_or_moved(loaded: Loaded) -> None:
    model, it = loaded.model, loaded.picture(1)
    compute(model, 0, [tokens_of(1, 10), it, tokens_of(2, 30)])
    assert not model.info.can_shift
    with pytest.raises(UnsupportedOperation):
        model.shift(0, 2, 4)
    with pytest.raises(UnsupportedOperation):
        model.reuse(0, [(0, 0, 10), (22, 10, 30)])
    assert model.length(0) == 52
    assert model.trim(0, 15) == 0 and model.length(0) == 0
    assert model.trim_min(0) == 0


@only("llama", "gemma3-full")
def test_chunk_reuse_behind_an_image_is_that_of_bare_llama_cpp(loaded: Loaded) -> None:
    model, it = loaded.model, loaded.picture(1)
    assert model.info.can_shift
    text, rest = tokens_of(1, 10), tokens_of(2, 30)
    compute(model, 0, [text, it, rest])
    model.reuse(0, [(0, 0, 22), (32, 22, 20)])
    compute(model, 0, [[9]])
    bare = loaded.bare
    reference(bare, [text, it, rest])
    bare.move(0, 32, 52, 22)
    assert difference(model.logits(0), bare.decode(0, [9], 42)) < NOISE_MAX


@pytest.mark.parametrize("seed", range(2))
def test_after_any_moves_a_slot_with_images_equals_one_computed_from_scratch(
    loaded: Loaded, seed: int
) -> None:
    source, model = random.Random(seed), loaded.model
    texts: list[list[Part]] = [[] for _ in range(3)]
    saved: list[tuple[bytes, list[Part]]] = []
    for number in range(60):
        slot, move = source.randrange(3), source.choice(MOVES)
        parts = texts[slot]
        if move in ("text", "image") and sum(map(size_of, parts)) < 400:
            more: list[Part] = [tokens_of(number, source.choice((1, 2, 40)))]
            if move == "image":
                rows, columns = source.choice(((1, 1), (3, 4), (7, 2), (6, 6)))
                more = [loaded.picture(number, rows, columns), *more]
            compute(model, slot, more, source.choice((0, 5)))
            texts[slot] = [*parts, *more]
            assert_as_reference(loaded, slot, texts[slot])
        elif move == "trim" and parts:
            kept = parts[: source.randrange(len(parts))]
            keep = sum(map(size_of, kept))
            found = model.trim(slot, keep)
            assert found in (0, keep)
            texts[slot] = kept if found else []
        elif move == "swap":
            to = source.randrange(3)
            model.swap(slot, to)
            texts[slot], texts[to] = texts[to], texts[slot]
        elif move == "save":
            saved.append((model.save(slot), parts))
        elif move == "load" and saved:
            state, texts[slot] = source.choice(saved)
            assert model.restore(slot, state)
        assert model.length(slot) == sum(map(size_of, texts[slot]))


@only("lfm2", "jamba")
def test_a_hybrid_is_cut_back_to_a_checkpoint_before_an_image(loaded: Loaded) -> None:
    model = loaded.model
    assert model.info.kv_kind == "hybrid"
    text, it = tokens_of(1, 20), loaded.picture(1)
    compute(model, 0, [text, it, tokens_of(2, 5)])
    before = model.save_checkpoint(0)
    compute(model, 0, [loaded.picture(2), tokens_of(3, 5)])
    assert model.restore_checkpoint(0, before)
    assert model.length(0) == 37
    compute(model, 0, [[9, 8]])
    assert_as_reference(loaded, 0, [text, it, [*tokens_of(2, 5), 9, 8]])


# Entries that see each other.


@only("llama", "gemma3", "gemma3-full", "qwen2vl")
def test_entries_that_see_each_other_equal_those_of_mtmds_helper(loaded: Loaded) -> None:
    model, text = loaded.model, tokens_of(1, 20)
    parts: list[Part] = [text, loaded.picture(1, 4, 4, causal=False), tokens_of(2, 9)]
    compute(model, 0, parts)
    assert_as_reference(loaded, 0, parts)
    ordered = reference(loaded.bare, [text, loaded.picture(1, 4, 4), tokens_of(2, 9)])
    assert difference(model.logits(0), ordered) > 0.01
    compute(model, 1, [tokens_of(3, 30)])  # the setting does not outlive its step
    assert_as_reference(loaded, 1, [tokens_of(3, 30)])


def test_a_failed_step_leaves_the_attention_in_order(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, it = loaded.model, loaded.picture(1, 4, 4, causal=False)
    threads = model._context._threads
    decode = type(threads).decode

    def failing(self: object, batch: object) -> int:
        raise OSError

    monkeypatch.setattr(type(threads), "decode", failing)
    with pytest.raises(OSError):
        step_picture(model, 0, it, 0)
    monkeypatch.setattr(type(threads), "decode", lambda self, batch: -3)
    with pytest.raises(BackendError):
        step_picture(model, 0, it, 0)
    monkeypatch.setattr(type(threads), "decode", decode)
    model.trim(0, 0)
    compute(model, 1, [tokens_of(3, 30)])
    assert_as_reference(loaded, 1, [tokens_of(3, 30)])


def test_more_entries_that_see_each_other_than_a_step_holds_are_refused(loaded: Loaded) -> None:
    """llama.cpp would end the process."""
    model = loaded.model
    it = loaded.picture(1, BATCH_SIZE // 8 + 1, 8, causal=False)
    with pytest.raises(BackendError):
        step_picture(model, 0, it, 0)
    whole = loaded.picture(1, BATCH_SIZE // 8, 8, causal=False)
    with pytest.raises(BackendError, match="see each other"):
        step_picture(model, 0, whole, 0, BATCH_SIZE // 2)
    step_picture(model, 0, whole, 0)
    assert model.length(0) == BATCH_SIZE


# Refusals.


def test_impossible_embeddings_and_places_are_refused_and_change_nothing(loaded: Loaded) -> None:
    model, text, it = loaded.model, tokens_of(1, 10), loaded.picture(1)
    compute(model, 0, [text])
    rows = it.rows.copy()
    rows[3, 3] = np.nan
    wrong = [msgspec.structs.replace(it.media, embeddings=memoryview(rows.tobytes()))]
    wrong.append(msgspec.structs.replace(it.media, embeddings=memoryview(bytes(8))))
    if model.info.media_mrope:
        for row, column, number in ((0, 0, 1), (5, 1, 4), (5, 2, -1), (5, 0, 9)):
            places = it.places.copy()
            places[row, column] = number
            wrong.append(msgspec.structs.replace(it.media, places=memoryview(places.tobytes())))
        backwards = it.places.copy()
        backwards[5, 0] = 1
        wrong.append(msgspec.structs.replace(it.media, places=memoryview(backwards.tobytes())))
        wrong.append(msgspec.structs.replace(it.media, places=None))
    for media in wrong:
        with pytest.raises(BackendError):
            model.step([Chunk(0, it.entries, 10, 0, media, 0)])
        assert model.length(0) == 10
    compute(model, 0, [it, [9]])
    assert_as_reference(loaded, 0, [text, it, [9]])


@only("qwen2vl")
def test_a_part_of_an_image_is_continued_and_not_left(loaded: Loaded) -> None:
    model, it = loaded.model, loaded.picture(1)
    assert model.info.media_mrope
    model.step([Chunk(0, it.entries[:5], 0, 0, it.media, 0)])
    for chunk in (Chunk(0, [9], 5, 1), Chunk(0, it.entries[6:], 5, 0, it.media, 6)):
        with pytest.raises(BackendError):
            model.step([chunk])
    model.step([Chunk(0, it.entries[5:], 5, 0, it.media, 5)])
    compute(model, 0, [[9]])
    assert_as_reference(loaded, 0, [it, [9]])


def test_damaged_states_of_images_are_refused(loaded: Loaded) -> None:
    model = loaded.model
    compute(model, 0, [tokens_of(1, 10), loaded.picture(1), [9]])
    state = model.save(0)
    for damaged in (state[:-1], state[:30], state[:24], b"", state[:4] + bytes(40)):
        assert not model.restore(1, damaged) and model.length(1) == 0
    if model.info.media_mrope:
        longer = bytearray(state)
        longer[28:32] = (100).to_bytes(4, "little")  # the number of images
        assert not model.restore(1, bytes(longer)) and model.length(1) == 0
    compute(model, 1, [tokens_of(1, 10)])
    assert_as_reference(loaded, 1, [tokens_of(1, 10)])


def test_a_model_without_a_projector_refuses_embeddings(loaded: Loaded) -> None:
    model = load_llama(tiny_spec(loaded.path), lambda _: True)
    assert model.info.media_width == 0
    with pytest.raises(BackendError, match="reads no embeddings"):
        step_picture(model, 0, loaded.picture(1), 0)
    assert model.length(0) == 0
    model.close()
