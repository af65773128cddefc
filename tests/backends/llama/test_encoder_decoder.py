"""An encoder-decoder computes what llama.cpp computes with one prompt in a context of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from inferd.backends import Chunk, ModelSpec, SamplingParams, estimate_memory
from inferd.backends.errors import (
    BackendError,
    InvalidArgument,
    LoadFailed,
    UnsupportedOperation,
)
from inferd.backends.llama.llama_log import capture
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.model_spec import AdapterSpec
from tests.backends.driving import GREEDY, SAMPLED
from tests.backends.tiny import BATCH_SIZE, NOISE_MAX, SLOTS, difference, tiny_spec, tokens_of
from tests.tiny_gguf import write_tiny
from tests.tiny_lora import lora

START = 0
Logits = NDArray[np.float32]


class BareT5:
    """One prompt in one context, computed only by llama.cpp's raw calls."""

    def __init__(self, path: Path):
        capture()
        self.model = lib.llama_model_load_from_file(
            os.fsencode(path), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 512, 512, 512
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        self.context = lib.llama_init_from_model(self.model, params)

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> list[Logits]:
        """Return the logits after the start token and after each token of *answer*."""
        lib.llama_memory_clear(lib.llama_get_memory(self.context), True)
        assert lib.llama_encode(self.context, self._batch(prompt)) == 0
        found = []
        for token in (START, *answer):
            assert lib.llama_decode(self.context, self._batch([token])) == 0
            pointer = lib.llama_get_logits_ith(self.context, -1)
            size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
            found.append(np.ctypeslib.as_array(pointer, (size,)).copy())
        return found

    def _batch(self, tokens: Sequence[int]) -> Any:
        self._tokens = (lib.llama_token * len(tokens))(*tokens)
        return lib.llama_batch_get_one(self._tokens, len(tokens))

    def close(self) -> None:
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("t5", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def bare(path: Path) -> Iterator[BareT5]:
    with closing(BareT5(path)) as found:
        yield found


@pytest.fixture(scope="module")
def loaded(path: Path) -> Iterator[LlamaModel]:
    with closing(load_llama(tiny_spec(path), lambda _: True)) as found:
        yield found


@pytest.fixture
def model(loaded: LlamaModel) -> LlamaModel:
    for slot in range(SLOTS):
        loaded.trim(slot, 0)
    return loaded


def spec_of(path: Path, options: dict[str, Any]) -> ModelSpec:
    return tiny_spec(path, **options)


def begin(model: LlamaModel, slot: int, prompt: Sequence[int], logits: int = 1) -> int:
    """Encode a prompt in an emptied slot, decode the start token; return the position behind it."""
    model.trim(slot, 0)
    model.step([Chunk(slot, [*prompt, START], 0, logits)])
    return len(prompt) + 1


def assert_logits(found: Logits, expected: Logits) -> None:
    assert np.isfinite(found).all()
    assert difference(found, expected) < NOISE_MAX


def test_the_facts_of_the_model(model: LlamaModel) -> None:
    info = model.info
    assert info.decoder_start_token == START and info.generates and info.embedding is None
    assert (info.kv_kind, info.can_shift, model.tuning) == ("window", False, None)
    assert (info.slots, info.ctx_size, info.batch_size) == (SLOTS, 1024, BATCH_SIZE)
    assert set(info.unused) >= {"append", "ctx-shift", "cache-reuse"}


@pytest.mark.parametrize("length", [1, 2, 20, BATCH_SIZE - 1])
def test_the_logits_are_those_of_a_bare_loop(model: LlamaModel, bare: BareT5, length: int) -> None:
    prompt, answer = tokens_of(1, length), tokens_of(2, 40)
    expected = bare.logits(prompt, answer)
    position = begin(model, 1, prompt)
    assert_logits(model.logits(1), expected[0])
    for number, token in enumerate(answer):
        model.step([Chunk(1, [token], position + number, 1)])
        assert_logits(model.logits(1), expected[number + 1])
    assert model.length(1) == position + len(answer)


def test_the_encoder_and_the_decoder_both_matter(bare: BareT5) -> None:
    """This shows that the comparisons work: another prompt or answer gives other logits."""
    prompt, answer = tokens_of(1, 20), tokens_of(2, 10)
    expected = bare.logits(prompt, answer)[-1]
    for other in (bare.logits([5, *prompt[1:]], answer), bare.logits(prompt, [5, *answer[1:]])):
        assert difference(other[-1], expected) > 10 * NOISE_MAX


def test_several_prompts_at_once_equal_single_ones(model: LlamaModel, bare: BareT5) -> None:
    """Prompts of different lengths begin in different steps, while others are being answered."""
    prompts = [tokens_of(10 + slot, 5 + 11 * slot) for slot in range(SLOTS)]
    answers = [tokens_of(20 + slot, 12) for slot in range(SLOTS)]
    expected = [bare.logits(p, a) for p, a in zip(prompts, answers, strict=True)]
    done = dict.fromkeys(range(SLOTS), 0)
    for step in range(SLOTS + 12):
        chunks = []
        for slot, prompt in enumerate(prompts):
            number = step - slot
            if number == 0:
                chunks.append(Chunk(slot, [*prompt, START], 0, 1))
            elif 0 < number <= 12:
                token = answers[slot][number - 1]
                chunks.append(Chunk(slot, [token], len(prompt) + number, 1))
        if not chunks:
            break
        model.step(chunks)
        for chunk in chunks:
            assert_logits(model.logits(chunk.slot), expected[chunk.slot][done[chunk.slot]])
            done[chunk.slot] += 1
    assert set(done.values()) == {13}


def test_held_logits_survive_the_prompt_of_another_slot(model: LlamaModel, bare: BareT5) -> None:
    prompt = tokens_of(1, 20)
    begin(model, 0, prompt)
    model.hold_logits(0)
    begin(model, 1, tokens_of(3, 30))
    assert_logits(model.logits(0), bare.logits(prompt, [])[0])


def test_a_resumed_answer_is_computed_in_one_chunk(model: LlamaModel, bare: BareT5) -> None:
    prompt, answer = tokens_of(1, 20), tokens_of(2, 30)
    expected = bare.logits(prompt, answer)
    position = begin(model, 2, prompt, logits=0)
    model.step([Chunk(2, answer, position, 1)])
    assert_logits(model.logits(2), expected[-1])
    model.trim(2, position)
    model.step([Chunk(2, answer, position, 3)])
    for back in range(3):
        place = position + len(answer) - 3 + back
        assert_logits(model.logits(2, place), expected[-3 + back])


def test_an_answer_can_be_cut_back_and_a_prompt_cannot(model: LlamaModel, bare: BareT5) -> None:
    prompt, answer = tokens_of(1, 20), tokens_of(2, 12)
    position = begin(model, 0, prompt)
    model.step([Chunk(0, answer, position, 1)])
    assert model.trim_min(0) == position
    assert model.trim(0, position + 5) == position + 5
    model.step([Chunk(0, [9], position + 5, 1)])
    assert_logits(model.logits(0), bare.logits(prompt, [*answer[:5], 9])[-1])
    assert model.trim(0, position) == position
    model.step([Chunk(0, [9], position, 1)])
    assert_logits(model.logits(0), bare.logits(prompt, [9])[-1])
    assert model.trim(0, position - 1) == 0 == model.length(0)
    begin(model, 0, answer)
    assert_logits(model.logits(0), bare.logits(answer, [])[0])


def test_states_are_restored_with_their_prompts(model: LlamaModel, bare: BareT5) -> None:
    """The output of the encoder is not in a state; the restored slot encodes the prompt again."""
    prompt, answer, more = tokens_of(1, 20), tokens_of(2, 12), tokens_of(3, 6)
    position = begin(model, 0, prompt)
    model.step([Chunk(0, answer, position, 1)])
    state, empty = model.save(0), model.save(3)
    begin(model, 0, tokens_of(4, 40))
    begin(model, 2, tokens_of(5, 40))
    assert model.restore(2, state) and model.restore(1, state)
    end = position + len(answer)
    assert model.length(1) == model.length(2) == end
    model.step([Chunk(1, more, end, 1), Chunk(2, more[:2], end, 1)])
    expected = bare.logits(prompt, answer + more)
    assert_logits(model.logits(1), expected[-1])
    assert_logits(model.logits(2), expected[-1 - 4])
    assert model.restore(2, empty) and model.length(2) == 0
    for bad in (b"", state[:11], state[:60], state[:-1], b"xxxx" + state[4:], state + b"x"):
        assert not model.restore(1, bad)
        assert model.length(1) == 0
    wrong = bytearray(state)
    wrong[8:12] = b"\xff\xff\xff\x7f"  # a token that the vocabulary does not have
    assert not model.restore(1, bytes(wrong))


def test_slots_are_exchanged_with_their_logits(model: LlamaModel, bare: BareT5) -> None:
    a, b = tokens_of(1, 20), tokens_of(2, 30)
    model.step([Chunk(0, [*a, START], 0, 1), Chunk(3, [*b, START], 0, 1)])
    model.swap(0, 3)
    assert (model.length(0), model.length(3)) == (len(b) + 1, len(a) + 1)
    assert_logits(model.logits(0), bare.logits(b, [])[0])
    assert_logits(model.logits(3), bare.logits(a, [])[0])
    model.step([Chunk(0, [7], len(b) + 1, 1), Chunk(3, [8], len(a) + 1, 1)])
    assert_logits(model.logits(0), bare.logits(b, [7])[-1])
    assert_logits(model.logits(3), bare.logits(a, [8])[-1])


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk(0, [5, 6], 0, 1)],
        [Chunk(0, [START], 0, 1)],
        [Chunk(0, [5, START], 0, 2)],
        [Chunk(0, [5] * BATCH_SIZE + [START], 0, 1)],
        [Chunk(0, [5, START, 6], 0, 1)],
        [Chunk(0, [5], 1, 1)],
        [Chunk(0, [5, 259, START], 0, 1)],
        [Chunk(SLOTS, [5, START], 0, 1)],
    ],
    ids=["no-start", "empty", "logits", "long", "behind", "position", "token", "slot"],
)
def test_a_wrong_batch_is_refused_and_changes_nothing(
    model: LlamaModel, bare: BareT5, chunks: list[Chunk]
) -> None:
    prompt = tokens_of(1, 9)
    begin(model, 1, prompt)
    with pytest.raises(BackendError):
        model.step(chunks)
    assert model.length(0) == 0
    model.step([Chunk(1, [7], 10, 1)])
    assert_logits(model.logits(1), bare.logits(prompt, [7])[-1])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_answers_of_parallel_turns_are_those_of_single_ones(
    model: LlamaModel, params: SamplingParams
) -> None:
    prompts = [[*tokens_of(30 + slot, 10 + slot), START] for slot in range(SLOTS)]

    def answers(slots: Sequence[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {slot: [] for slot in slots}
        samplers = {slot: model.sampler(params, prompts[slot]) for slot in slots}
        model.step([Chunk(slot, prompts[slot], 0, 1) for slot in slots])
        for index in range(12):
            for slot in slots:
                found[slot].append(model.sample(slot, samplers[slot], index))
            model.step([Chunk(s, found[s][-1:], len(prompts[s]) + index, 1) for s in slots])
        for slot in slots:
            samplers[slot].close()
            model.trim(slot, 0)
        return found

    together = answers(range(SLOTS))
    assert all(answers([slot])[slot] == together[slot] for slot in range(SLOTS))
    assert len({tuple(answer) for answer in together.values()}) == SLOTS


def test_penalties_count_only_tokens_of_the_decoder(model: LlamaModel) -> None:
    """The words of a text to summarize are not repetitions."""
    prompt = tokens_of(1, 20)
    position = begin(model, 0, prompt)
    top = int(model.logits(0).argmax())
    params = SamplingParams(temp=0, repeat_penalty=100.0, last_n_penalty=-1)
    for answer, expected in (([], True), ([top], False)):
        begin(model, 0, prompt)
        sampler = model.sampler(params, [*[top] * 5, *prompt, START], answer)
        assert (model.sample(0, sampler, 0) == top) is expected
        sampler.close()
    assert model.length(0) == position


def test_a_tokenized_prompt_ends_with_the_start_token(model: LlamaModel) -> None:
    tokens = model.tokenize(b"a cat", special=True, bos=True)
    assert tokens[-2:] == [1, START] and START not in tokens[:-1]
    assert model.tokenize(b"", special=True, bos=True) == [1, START]
    assert model.tokenize(b"a cat", special=True, bos=False) == tokens[:-2]
    assert b"".join(map(model.piece, tokens[:-2])) == b" a cat"
    named = model.tokenize(b"a<pad> cat", special=True, bos=True)
    assert named.count(START) == 1 and named[-1] == START
    assert START in model.tokenize(b"a<pad> cat", special=True, bos=False)


@pytest.mark.process
def test_a_chat_without_a_template_is_its_last_turn_with_the_system_messages(
    model: LlamaModel,
) -> None:
    def message(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    task, first = message("system", "translate to German:"), message("user", "Hello")
    answer, second = message("assistant", "Hallo"), message("user", "Bye ")
    assert model.render([first]) == "Hello"
    assert model.render([task, first]) == "translate to German: Hello"
    assert model.render([task, first, answer, second]) == "translate to German: Bye"
    assert model.render([task, first, second]) == "translate to German: Hello Bye"
    assert "earlier turns are not read" in model.info.chat_notes["chat-template"]


def test_what_an_encoder_decoder_does_not_do_is_refused(
    model: LlamaModel, path: Path, tmp_path: Path
) -> None:
    begin(model, 0, tokens_of(1, 20))
    with pytest.raises(UnsupportedOperation, match="cannot be shifted"):
        model.shift(0, 1, 2)
    with pytest.raises(UnsupportedOperation, match="has no checkpoints"):
        model.save_checkpoint(0)
    with pytest.raises(UnsupportedOperation, match="makes no embeddings"):
        model.embedder()
    with pytest.raises(UnsupportedOperation, match="settings are not measured"):
        model.probe_runner()
    adapter = lora(tmp_path / "adapter.gguf", architecture="t5")
    with pytest.raises(UnsupportedOperation, match="runs no adapters on such models"):
        model.add_adapter(AdapterSpec(name="a", path=str(adapter)))
    with pytest.raises(InvalidArgument, match="no flash attention for it"):
        load_llama(spec_of(path, {"flash-attn": "on"}), lambda _: True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("t5-no-start", r"t5\.decoder_start_token_id is -1"),
        ("t5-no-biases", r"enc\.blk\.0\.attn_rel_b\.weight is missing"),
    ],
)
def test_files_with_which_llama_cpp_would_fail_later(kind: str, words: str, tmp_path: Path) -> None:
    spec = tiny_spec(write_tiny(kind, tmp_path))
    with pytest.raises(LoadFailed, match=words):
        load_llama(spec, lambda _: True)
    with pytest.raises(LoadFailed, match=words):
        estimate_memory(spec)


def test_the_start_token_can_be_set_and_else_is_the_bos_token(tmp_path: Path) -> None:
    file = write_tiny("t5-no-start", tmp_path)
    for key in ("t5.decoder_start_token_id", "tokenizer.ggml.bos_token_id"):
        spec = spec_of(file, {"override-kv": [f"{key}=int:4"]})
        with closing(load_llama(spec, lambda _: True)) as found:
            assert found.info.decoder_start_token == 4
            assert found.tokenize(b"", special=True, bos=True) == [1, 4]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("t5.attention.relative_buckets_count", 2),
        ("t5.attention.relative_buckets_count", 256),
        ("t5.attention.head_count_kv", 2),
        ("t5.decoder_block_count", 3),
        ("t5.decoder_block_count", 0),
        ("t5.context_length", 0),
        ("t5.embedding_length_out", 32),
        ("t5.context_length", 1 << 31),
    ],
)
def test_values_for_which_llama_cpp_would_abort_are_refused(
    path: Path, key: str, value: int
) -> None:
    with pytest.raises(LoadFailed, match=f"{key} is {value}"):
        load_llama(spec_of(path, {"override-kv": [f"{key}=int:{value}"]}), lambda _: True)


@pytest.mark.process
def test_a_chat_template_of_the_file_is_used(tmp_path: Path) -> None:
    spec = tiny_spec(write_tiny("t5-chat", tmp_path))
    with closing(load_llama(spec, lambda _: True)) as found:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert found.render(messages) == "<user>a\n<assistant>b\n"
        assert "chat-template" not in found.info.chat_notes


def test_the_memory_estimate_counts_a_context_for_each_slot(path: Path) -> None:
    with closing(estimate_memory(tiny_spec(path))) as estimator:
        need = estimator.need(estimator.shape)
    with closing(estimate_memory(tiny_spec(path, slots=1))) as estimator:
        one = estimator.need(estimator.shape)
    with closing(load_llama(tiny_spec(path), lambda _: True)) as found:
        assert need.weights == found.info.size_bytes
    assert need.context == pytest.approx(SLOTS * one.context, abs=30_000)
    assert need.compute > 3 * one.compute
    assert need.embedding == need.measuring == 0
