"""The contract of a backend: the suite that each one passes.

On a real model another batch shape changes the logits a little. Where tokens are compared, the
same tokens are therefore decoded in the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inferd.backends import Chunk, InferdError, LanguageModel, ModelSpec, SamplingParams
from inferd.backends.batch import MediaInput
from inferd.backends.errors import BackendError, InvalidArgument
from inferd.backends.media import MediaContent, MediaItem
from tests.backends.driving import (
    GREEDY,
    SAMPLED,
    generate,
    load_language_model,
    prefill,
    sample_tokens,
)
from tests.tiny_gguf import write_tiny

TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
OTHER = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve,"
REFUSED = (AssertionError, InferdError)


@pytest.fixture
def prompt(model: LanguageModel) -> list[int]:
    return model.tokenize(TEXT.encode(), special=False, bos=True)


@pytest.fixture
def other(model: LanguageModel) -> list[int]:
    return model.tokenize(OTHER.encode(), special=False, bos=True)


def test_the_facts_are_true(model: LanguageModel) -> None:
    info = model.info
    assert (info.slots, info.ctx_size, info.batch_size) == (4, 256, 32)
    assert info.vocab_size > 256 and info.ctx_size_trained >= info.ctx_size
    assert info.fingerprint and info.vocab_hash and info.description


def test_pieces_join_to_the_text(model: LanguageModel) -> None:
    text = 'naïve café, 日本語, 🦙🦙, \t"quoted"\r\n  two  spaces, e\u0301'.encode()
    pieces = [model.piece(t) for t in model.tokenize(text, special=False, bos=False)]
    assert b"".join(pieces) == text
    assert max(map(len, pieces)) <= model.info.token_bytes_max


def test_an_empty_text_has_no_tokens(model: LanguageModel) -> None:
    assert model.tokenize(b"", special=False, bos=False) == []


def test_only_special_tokens_are_control_and_end_a_generation(model: LanguageModel) -> None:
    tokens = range(model.info.vocab_size)
    ends = [t for t in tokens if model.is_eog(t)]
    assert ends and all(model.is_control(t) for t in ends)
    assert not any(model.is_control(t) for t in model.tokenize(b"hello", special=False, bos=False))


def test_a_chat_becomes_a_prompt(model: LanguageModel) -> None:
    assert model.info.has_chat_template
    assert "hello" in model.render([{"role": "user", "content": "hello"}])


def test_several_tokens_of_a_chunk_have_logits(
    model: LanguageModel, prompt: list[int], other: list[int]
) -> None:
    """Each has the logprobs that it has as the last token of its chunk."""
    tokens, count = prompt[:12], 5
    expected = []
    for end in range(len(tokens) - count, len(tokens)):
        model.trim(0, 0)
        prefill(model, 0, tokens[:end])
        expected.append(model.probs_after(0, end - 1, tokens[end], 3))
    model.trim(0, 0)
    prefill(model, 1, other[:3])
    model.step([Chunk(0, tokens, 0, logits=count + 1), Chunk(1, other[3:6], 3, logits=2)])
    for position, one in enumerate(expected, start=len(tokens) - count - 1):
        found = model.probs_after(0, position, tokens[position + 1], 3)
        assert found.token == one.token and len(found.top) == 3
        assert found.value == pytest.approx(one.value, abs=0.1)
        values = [value for _, value in found.top]
        assert values == sorted(values, reverse=True) and values[0] >= found.value
        assert found.rank == 1 + sum(value > found.value for value in values) or found.rank > 3
    refused = [(0, len(tokens) - count - 2), (0, len(tokens)), (0, -1), (1, 3), (2, 0)]
    refused += [(1, 2), (1, 0)]  # as far before slot 1's last logits as slot 0's are in the batch
    for slot, position in refused:
        with pytest.raises(REFUSED):
            model.probs_after(slot, position, tokens[0], 1)
    sampler = model.sampler(GREEDY, tokens)
    assert sample_tokens(model, 0, sampler, len(tokens), count=2)
    sampler.close()
    with pytest.raises(REFUSED):
        model.probs_after(1, 4, other[5], 1)


def test_a_step_with_too_many_logits_is_refused_and_changes_nothing(
    model: LanguageModel, prompt: list[int]
) -> None:
    """llama.cpp would abort the process."""
    most = model.info.logits_max
    assert model.info.slots <= most <= model.info.batch_size
    tokens = (prompt * 10)[: model.info.batch_size]
    model.step([Chunk(0, tokens, 0, logits=most)])
    model.trim(0, 0)
    wrong = [
        [Chunk(0, tokens[:4], 0, logits=5)],
        [Chunk(0, tokens[:4], 0, logits=-1)],
    ]
    if most < len(tokens):
        wrong.append([Chunk(0, tokens[:most], 0, most), Chunk(1, tokens[:1], 0, 1)])
    for chunks in wrong:
        with pytest.raises(REFUSED):
            model.step(chunks)
        assert model.length(0) == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_tokens_are_sampled_in_order_after_each_token_of_a_chunk(
    model: LanguageModel, prompt: list[int], params: SamplingParams
) -> None:
    """A chunk of the answer and a wrong token: its tokens are confirmed up to the wrong one."""
    answer = generate(model, 0, prompt, params, count=5)
    wrong = next(t for t in prompt if t != answer[3])
    position = prefill(model, 1, prompt)
    sampler = model.sampler(params, prompt)
    found = [model.sample(1, sampler, 0)]
    drafts = [*answer[1:3], wrong, answer[4]]
    model.step([Chunk(1, [answer[0], *drafts], position, logits=5)])
    for index, draft in enumerate(drafts, start=1):
        at = position + index - 1
        surprisal, value = model.surprisal(1, at), model.probs_after(1, at, draft, 1).value
        if model.info.description[:4] != "echo":
            assert surprisal(draft) == pytest.approx(-value, abs=1e-4)
        found.append(model.sample(1, sampler, index, at))
        with pytest.raises(REFUSED):
            model.sample(1, sampler, index, at)  # used up
        if found[-1] != draft:
            break
    assert found == answer[:4]
    kept = position + 3
    if model.trim(1, kept) == kept:  # the wrong token and the one behind it
        with pytest.raises(REFUSED):
            model.sample(1, sampler, 4, kept - 1)
        model.step([Chunk(1, found[3:], kept, logits=1)])
        assert model.sample(1, sampler, 4) == answer[4]
    sampler.close()


def test_only_tokens_with_logits_can_be_sampled_after(
    model: LanguageModel, prompt: list[int]
) -> None:
    tokens = prompt[:12]
    model.step([Chunk(0, tokens, 0, logits=3), Chunk(1, tokens, 0, logits=0)])
    sampler = model.sampler(GREEDY, tokens)
    for slot, position in [(0, 8), (0, 12), (0, -1), (1, 11), (2, 0)]:
        with pytest.raises(BackendError, match="no logits"):
            model.sample(slot, sampler, 0, position)
        with pytest.raises(BackendError, match="no logits"):
            model.surprisal(slot, position)
    model.sample(0, sampler, 0, 10)
    with pytest.raises(BackendError, match="no logits"):
        model.sample(0, sampler, 0, 9)  # before those used up
    model.sample(0, sampler, 0)
    with pytest.raises(BackendError, match="no logits"):
        model.sample(0, sampler, 0)
    sampler.close()


def test_greedy_text_is_the_same_each_time_and_in_each_slot(
    model: LanguageModel, prompt: list[int]
) -> None:
    assert generate(model, 0, prompt) == generate(model, 3, prompt)


def test_a_sampled_text_depends_only_on_the_seed_and_the_index(
    model: LanguageModel, prompt: list[int]
) -> None:
    """A new sampler for token 3 continues as the first one would have."""
    whole = generate(model, 0, prompt, SAMPLED, count=8)
    first = generate(model, 1, prompt, SAMPLED, count=4)
    position = len(prompt) + 3
    model.step([Chunk(1, first[3:], position, logits=True)])
    again = model.sampler(SAMPLED, prompt + first)
    assert first + sample_tokens(model, 1, again, position + 1, index=4, count=4) == whole


def test_prefill_and_decode_share_a_batch(
    model: LanguageModel, prompt: list[int], other: list[int]
) -> None:
    expected = generate(model, 0, prompt, count=3)
    sampler = model.sampler(GREEDY, [])
    prefill(model, 2, other)
    prefill(model, 1, prompt)
    tokens = [model.sample(1, sampler, 0)]
    position = len(other)
    for i in range(2):
        chunk = Chunk(2, other[i * 8 : i * 8 + 8], position, logits=False)
        model.step([Chunk(1, tokens[-1:], len(prompt) + i, logits=True), chunk])
        position += 8
        tokens.append(model.sample(1, sampler, i + 1))
    assert tokens == expected


def test_a_batch_of_batch_size_tokens_is_accepted_and_one_more_refused(
    model: LanguageModel,
) -> None:
    tokens = model.tokenize(b" a" * 64, special=False, bos=False)[:33]
    model.step([Chunk(0, tokens[:16], 0, logits=True), Chunk(1, tokens[:16], 0, logits=True)])
    with pytest.raises(REFUSED):
        model.step([Chunk(2, tokens, 0, logits=True)])
    model.sample(1, model.sampler(GREEDY, []), 0)


def test_the_context_can_be_filled_to_the_last_token_and_no_further(model: LanguageModel) -> None:
    tokens = model.tokenize(b" a" * 256, special=False, bos=False)[:256]
    assert prefill(model, 0, tokens) == model.info.ctx_size
    with pytest.raises(REFUSED):
        model.step([Chunk(0, tokens[:1], 256, logits=True)])


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([], id="no tokens"),
        pytest.param([(1, 0), (0, 0)], id="slots not ascending"),
        pytest.param([(0, 0), (0, 1)], id="a slot twice"),
        pytest.param([(0, 1)], id="a gap in the positions"),
        pytest.param([(4, 0)], id="a slot too many"),
    ],
)
def test_a_wrong_batch_is_refused(model: LanguageModel, chunks: list[tuple[int, int]]) -> None:
    token = model.tokenize(b"a", special=False, bos=False)[:1]
    with pytest.raises((*REFUSED, IndexError)):
        model.step([Chunk(slot, token, position, logits=True) for slot, position in chunks])


def test_sampling_uses_the_logits_up(model: LanguageModel, prompt: list[int]) -> None:
    prefill(model, 0, prompt)
    sampler = model.sampler(GREEDY, prompt)
    model.sample(0, sampler, 0)
    with pytest.raises(REFUSED):
        model.sample(0, sampler, 1)


def test_a_slot_decoded_without_logits_has_none(model: LanguageModel, prompt: list[int]) -> None:
    model.step([Chunk(0, prompt[:2], 0, logits=False)])
    with pytest.raises(REFUSED):
        model.sample(0, model.sampler(GREEDY, prompt), 0)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_held_logits_give_the_same_token_as_fresh_ones(
    model: LanguageModel, prompt: list[int], other: list[int], params: object
) -> None:
    chosen = GREEDY if params is GREEDY else SAMPLED
    expected = generate(model, 0, prompt, chosen, count=1)
    prefill(model, 1, prompt)
    model.hold_logits(1)
    model.hold_logits(1)
    prefill(model, 2, other)
    assert model.sample(1, model.sampler(chosen, prompt), 0) == expected[0]


def test_logits_taken_out_can_be_put_into_any_slot(
    model: LanguageModel, prompt: list[int], other: list[int]
) -> None:
    expected = generate(model, 0, prompt)
    position = prefill(model, 1, prompt)
    logits, state = model.take_logits(1), model.save(1)
    model.trim(1, 0)
    prefill(model, 1, other)
    assert model.restore(3, state)
    model.put_logits(3, logits)
    assert sample_tokens(model, 3, model.sampler(GREEDY, prompt), position) == expected


def test_a_saved_state_continues_in_another_slot_and_again(
    model: LanguageModel, prompt: list[int]
) -> None:
    expected = generate(model, 0, prompt)
    model.trim(0, 0)
    prefill(model, 0, prompt[:-1])
    state = model.save(0)
    for slot in (2, 3, 0):
        assert model.restore(slot, state)
        sampler = model.sampler(GREEDY, prompt)
        prefill(model, slot, prompt[-1:], len(prompt) - 1)
        assert sample_tokens(model, slot, sampler, len(prompt)) == expected


def test_saving_does_not_change_the_slot_or_its_logits(
    model: LanguageModel, prompt: list[int]
) -> None:
    expected = generate(model, 0, prompt)
    position = prefill(model, 1, prompt)
    model.save(1)
    assert sample_tokens(model, 1, model.sampler(GREEDY, prompt), position) == expected


def test_an_empty_slot_can_be_saved(model: LanguageModel, prompt: list[int]) -> None:
    state = model.save(0)
    prefill(model, 1, prompt)
    assert model.restore(1, state)
    prefill(model, 1, prompt)


def test_a_restored_slot_has_no_logits(model: LanguageModel, prompt: list[int]) -> None:
    prefill(model, 0, prompt)
    assert model.restore(0, model.save(0))
    with pytest.raises(REFUSED):
        model.sample(0, model.sampler(GREEDY, prompt), 0)


def test_a_trimmed_slot_continues_from_the_kept_tokens(
    model: LanguageModel, prompt: list[int], other: list[int]
) -> None:
    keep = len(prompt) - 1
    prefill(model, 0, prompt[:keep])
    prefill(model, 0, prompt[keep:], keep)
    expected = sample_tokens(model, 0, model.sampler(GREEDY, prompt), len(prompt))
    prefill(model, 1, prompt[:keep])
    prefill(model, 1, other, keep)
    assert model.trim(1, keep) == keep
    with pytest.raises(REFUSED):
        model.sample(1, model.sampler(GREEDY, prompt), 0)
    prefill(model, 1, prompt[keep:], keep)
    assert sample_tokens(model, 1, model.sampler(GREEDY, prompt), len(prompt)) == expected


def test_trim_never_adds_tokens(model: LanguageModel, prompt: list[int]) -> None:
    assert model.trim(0, 5) == 0
    prefill(model, 0, prompt)
    assert model.trim(0, 10_000) == len(prompt)
    assert model.trim(0, 0) == 0


def test_swapped_slots_keep_their_logits(
    model: LanguageModel, prompt: list[int], other: list[int]
) -> None:
    expected = generate(model, 0, prompt), generate(model, 1, other)
    model.trim(0, 0)
    model.trim(1, 0)
    prefill(model, 0, prompt)
    model.hold_logits(0)
    prefill(model, 1, other)
    model.swap(0, 1)
    model.hold_logits(0)
    first = sample_tokens(model, 1, model.sampler(GREEDY, prompt), len(prompt))
    second = sample_tokens(model, 0, model.sampler(GREEDY, other), len(other))
    assert (first, second) == expected


def test_a_swap_with_an_empty_slot_moves_the_state(model: LanguageModel, prompt: list[int]) -> None:
    expected = generate(model, 0, prompt)
    position = prefill(model, 2, prompt)
    model.swap(1, 2)
    assert sample_tokens(model, 1, model.sampler(GREEDY, prompt), position) == expected
    prefill(model, 2, prompt)


def test_the_length_counts_the_decoded_tokens_that_were_kept(
    model: LanguageModel, prompt: list[int]
) -> None:
    assert model.length(1) == 0
    prefill(model, 1, prompt)
    assert (model.length(1), model.length(0)) == (len(prompt), 0)
    assert model.restore(0, model.save(1))
    model.trim(1, 4)
    assert (model.length(1), model.length(0)) == (4, len(prompt))


def test_any_part_of_a_plain_memory_can_be_kept(model: LanguageModel, prompt: list[int]) -> None:
    assert model.info.kv_kind == "plain"
    assert model.trim_min(0) == 0
    prefill(model, 0, prompt)
    assert model.trim_min(0) <= 1
    assert model.trim(0, 1) == 1


def shifted(model: LanguageModel, slot: int, prompt: list[int]) -> None:
    prefill(model, slot, prompt)
    model.shift(slot, 4, 6)


def test_a_shifted_state_continues_the_same_in_each_slot(
    model: LanguageModel, prompt: list[int]
) -> None:
    assert model.info.can_shift
    texts = []
    for slot in (0, 2):
        shifted(model, slot, prompt)
        position = len(prompt) - 6
        assert model.length(slot) == position
        prefill(model, slot, prompt[-1:], position)
        texts.append(sample_tokens(model, slot, model.sampler(GREEDY, prompt), position + 1))
    assert texts[0] == texts[1]


def test_a_shifted_slot_has_no_logits(model: LanguageModel, prompt: list[int]) -> None:
    shifted(model, 0, prompt)
    with pytest.raises(REFUSED):
        model.sample(0, model.sampler(GREEDY, prompt), 0)


def test_a_shifted_slot_is_saved_and_swapped_only_after_its_next_step(
    model: LanguageModel, prompt: list[int], other: list[int]
) -> None:
    position = prefill(model, 1, other)
    shifted(model, 0, prompt)
    for call in (lambda: model.save(0), lambda: model.swap(0, 1), lambda: model.swap(1, 0)):
        with pytest.raises(REFUSED):
            call()
    assert (model.length(0), model.length(1)) == (len(prompt) - 6, position)
    prefill(model, 0, prompt[-1:], model.length(0))
    assert model.restore(2, model.save(0))
    model.swap(0, 1)
    assert model.length(1) == model.length(2) == len(prompt) - 5


def test_an_emptied_slot_no_longer_counts_as_shifted(
    model: LanguageModel, prompt: list[int]
) -> None:
    expected = generate(model, 3, prompt)
    for empty in (lambda: model.trim(0, 0), lambda: model.reuse(0, [])):
        shifted(model, 0, prompt)
        empty()
        assert model.save(0)
        assert generate(model, 0, prompt) == expected
        model.trim(0, 0)
    shifted(model, 0, prompt)
    assert model.restore(0, model.save(1))
    assert model.save(0)


@pytest.mark.parametrize("numbers", [(-1, 2), (0, 0), (2, -1), (0, 10), (6, 4), (20, 1)])
def test_a_shift_that_leaves_nothing_to_move_is_refused(
    model: LanguageModel, prompt: list[int], numbers: tuple[int, int]
) -> None:
    prefill(model, 0, prompt[:10])
    with pytest.raises(REFUSED):
        model.shift(0, *numbers)
    assert model.length(0) == 10 and model.save(0)


def test_reuse_after_a_gap_is_a_shift(model: LanguageModel, prompt: list[int]) -> None:
    length = len(prompt) - 6
    texts = []
    for slot in (0, 1):
        prefill(model, slot, prompt)
        if slot:
            model.reuse(slot, [(0, 0, 4), (10, 4, length - 4)])
        else:
            model.shift(slot, 4, 6)
        assert model.length(slot) == length
        prefill(model, slot, prompt[-1:], length)
        texts.append(sample_tokens(model, slot, model.sampler(GREEDY, prompt), length + 1))
    assert texts[0] == texts[1]


def test_reuse_of_runs_that_stay_is_a_trim(
    model: LanguageModel, prompt: list[int], other: list[int]
) -> None:
    """No token has moved, so the slot can be saved at once."""
    keep = len(prompt) - 1
    prefill(model, 0, prompt[:keep])
    prefill(model, 0, prompt[keep:], keep)
    expected = sample_tokens(model, 0, model.sampler(GREEDY, prompt), len(prompt))
    prefill(model, 1, prompt[:keep])
    prefill(model, 1, other, keep)
    model.reuse(1, [(0, 0, 4), (4, 4, keep - 4)])
    assert model.restore(2, model.save(1))
    prefill(model, 2, prompt[keep:], keep)
    assert sample_tokens(model, 2, model.sampler(GREEDY, prompt), len(prompt)) == expected


@pytest.mark.parametrize(
    "moves",
    [[(0, 0, 0)], [(0, 0, 11)], [(0, 0, 4), (2, 4, 2)], [(0, 0, 2), (5, 3, 2)], [(2, 4, 2)]],
    ids=["empty", "long", "overlap", "gap", "up"],
)
def test_reuse_refuses_wrong_moves(
    model: LanguageModel, prompt: list[int], moves: list[tuple[int, int, int]]
) -> None:
    prefill(model, 0, prompt[:10])
    with pytest.raises(REFUSED):
        model.reuse(0, moves)
    assert model.length(0) == 10 and model.save(0)


def test_unknown_adapters_are_refused(model: LanguageModel, prompt: list[int]) -> None:
    model.set_adapters(())
    expected = generate(model, 0, prompt)
    with pytest.raises(InvalidArgument) as caught:
        model.set_adapters(("nobody's",))
    assert "nobody's" in caught.value.message and caught.value.hint
    assert generate(model, 1, prompt) == expected


def test_threads_can_change_between_steps(model: LanguageModel, prompt: list[int]) -> None:
    prefill(model, 0, prompt)
    model.set_threads(2)
    prefill(model, 1, prompt)
    model.set_threads(1)


def test_the_greedy_token_has_the_least_surprisal(model: LanguageModel, prompt: list[int]) -> None:
    """Computing it uses nothing up: held logits give the same numbers."""
    sampler = model.sampler(GREEDY, prompt)
    prefill(model, 0, prompt)
    surprisal = model.surprisal(0)
    model.hold_logits(0)
    held = model.surprisal(0)
    token = model.sample(0, sampler, 0)
    others = [surprisal(other) for other in range(model.info.vocab_size)]
    assert 0 <= surprisal(token) == min(others) == pytest.approx(held(token))
    assert not sampler.complete, "there is no grammar"
    sampler.close()


@pytest.fixture(params=["echo", "llama"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LanguageModel]:
    """Return each backend in turn, with a model that reads embeddings."""
    spec = ModelSpec(name="reader", slots=2, ctx_size=256, batch_size=32, threads=1)
    if request.param == "echo":
        spec = msgspec.structs.replace(spec, backend="echo", options={"media": True})
    else:
        path = str(write_tiny("llama", tmp_path))
        spec = msgspec.structs.replace(spec, path=path, mmproj="projector.gguf")
    found = load_language_model(spec)
    yield found
    found.close()


def item_of(
    model: LanguageModel, size: int, *, causal: bool = True
) -> tuple[list[int], MediaInput]:
    """Return the entries and the embeddings of an item."""
    item = MediaItem.of_content(MediaContent(b"1" * 32), "p", "b", index=0, size=size)
    data = memoryview(bytes(model.info.media_format.bytes_of(size)))
    return item.entries(), MediaInput(data, size, size, causal=causal)


def test_a_model_that_reads_no_embeddings_refuses_an_item(model: LanguageModel) -> None:
    assert model.info.media_width == 0
    entries, media = item_of(model, 5)
    for chunk in (Chunk(0, entries, 0, 0, media), Chunk(0, entries, 0, 0)):
        with pytest.raises(REFUSED):
            model.step([chunk])
    assert model.length(0) == 0


def test_the_entries_of_an_item_count_as_tokens(reader: LanguageModel) -> None:
    assert reader.info.media_width > 0 and reader.info.media_size_max == 32
    entries, media = item_of(reader, 40)
    tokens = reader.tokenize(b"see", special=False, bos=False)
    position = prefill(reader, 0, tokens)
    for begin in (0, 15, 30):
        part = entries[begin : begin + 15]
        reader.step([Chunk(0, part, position + begin, 0, media, begin)])
    prefill(reader, 0, tokens, position + 40)
    length = 2 * position + 40
    assert reader.length(0) == length
    assert reader.restore(1, reader.save(0)) and reader.length(1) == length
    assert reader.trim(0, position + 40) == position + 40
    prefill(reader, 0, tokens, position + 40)
    assert reader.trim(1, position) == reader.length(1) == position
    reader.step([Chunk(1, entries[:20], position, 0, media, 0)])


def test_entries_that_see_each_other_are_one_step_alone(reader: LanguageModel) -> None:
    entries, media = item_of(reader, 20, causal=False)
    wrong = [
        [Chunk(0, entries[:10], 0, 0, media)],
        [Chunk(0, entries, 0, 0, media), Chunk(1, [5], 0, 0)],
        [Chunk(0, [*entries, 5], 0, 0, media)],
    ]
    for chunks in wrong:
        with pytest.raises(REFUSED):
            reader.step(chunks)
    large, more = item_of(reader, 33, causal=False)
    with pytest.raises(REFUSED):
        reader.step([Chunk(0, large, 0, 0, more)])
    reader.step([Chunk(0, entries, 0, 1, media)])
    reader.sample(0, reader.sampler(GREEDY, []), 0)
