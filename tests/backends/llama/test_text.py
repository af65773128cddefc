"""Tokens, chat templates and sampling of the llama.cpp backend."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from inferd.backends import LanguageModel, ModelSpec, Rendering, SamplingParams, load_model
from inferd.backends.base import NO_DRAFT_MODEL, NO_NEXTN
from inferd.backends.errors import BackendError, InvalidArgument, TooLarge, UnsupportedOperation
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from inferd.backends.llama.sampling.chain import seed_of
from inferd.backends.llama.text.renderer import Renderer
from inferd.backends.llama.text.template import ChatTemplate
from tests.backends.driving import GREEDY, SAMPLED, generate, prefill
from tests.models import gemma3
from tests.tiny_gguf import write_tiny

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def gemma() -> Iterator[LlamaModel]:
    spec = ModelSpec(
        name="gemma", path=str(gemma3()), slots=2, ctx_size=1024, batch_size=128, threads=1
    )
    model = load_llama(spec, lambda _: True)
    yield model
    model.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(name="tiny", path=str(path), slots=2, ctx_size=256, threads=1)
    model = load_llama(spec, lambda _: True)
    yield model
    model.close()


# Tokens


@pytest.mark.model
def test_special_tokens_are_read_from_the_text_only_on_request(llama: LanguageModel) -> None:
    name = b"<|im_end|>"
    (token,) = llama.tokenize(name, special=True, bos=False)
    assert llama.is_eog(token) and llama.is_control(token)
    assert llama.piece(token) == name
    assert len(llama.tokenize(name, special=False, bos=False)) > 1


@pytest.mark.model
def test_bos_is_added_if_the_model_expects_it(llama: LanguageModel, gemma: LanguageModel) -> None:
    assert gemma.piece(gemma.tokenize(b"a", special=False, bos=True)[0]) == b"<bos>"
    assert len(gemma.tokenize(b"a", special=False, bos=False)) == 1
    assert len(llama.tokenize(b"a", special=False, bos=True)) == 1


@pytest.mark.model
def test_no_piece_is_longer_than_token_bytes_max(
    llama: LanguageModel, gemma: LanguageModel
) -> None:
    for model in (llama, gemma):
        longest = max(len(model.piece(t)) for t in range(model.info.vocab_size))
        assert longest <= model.info.token_bytes_max


@pytest.mark.parametrize(
    "text", [b"\xe8", b"ab\xc3", b"\xed\xa0\x80", b"a \xe9 b", b"\xe9 \n\xe8", b"\n\xa9\n\n x"]
)
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.model
def test_bytes_that_are_not_utf8_are_tokens(
    llama: LanguageModel, gemma: LanguageModel, text: bytes, bos: bool
) -> None:
    """llama.cpp's BPE tokenizer reads them as U+FFFD."""
    for model in (llama, gemma):
        tokens = model.tokenize(text, special=False, bos=bos)
        around = model.tokenize(b"", special=False, bos=bos)
        assert tokens[: len(around)] == around
        assert b"".join(map(model.piece, tokens[len(around) :])) == text
        for part in re.findall(rb"[\x80-\xff]", text):
            assert part in map(model.piece, tokens)


@pytest.mark.model
def test_the_text_beside_other_bytes_has_its_usual_tokens(
    llama: LanguageModel, gemma: LanguageModel
) -> None:
    for model in (llama, gemma):
        plain = [model.tokenize(text, special=True, bos=False) for text in (b"Hello ", b" world")]
        [raw] = model.tokenize(b"\xe9", special=True, bos=False)
        found = model.tokenize(b"Hello \xe9 world", special=True, bos=False)
        assert found == [*plain[0], raw, *plain[1]]


def test_a_vocabulary_that_puts_a_space_before_a_text_puts_none_after_a_byte(
    tiny: LlamaModel,
) -> None:
    before = tiny.tokenize(b"a", special=True, bos=True)
    assert len(before) > 2
    tokens = tiny.tokenize(b"a\xe9b\xe8", special=True, bos=True)
    assert tokens[: len(before)] == before
    assert [tiny.piece(t) for t in tokens[len(before) :]] == [b"\xe9", b"b", b"\xe8"]


@pytest.mark.model
def test_a_byte_without_a_token_is_refused_with_its_offset(llama: LanguageModel) -> None:
    with pytest.raises(
        InvalidArgument, match="byte 0xf5 at 4, for which the model has no"
    ) as caught:
        llama.tokenize(b"a\xe9\xc3\xa9\xf5\x80", special=False, bos=True)
    assert caught.value.data == {"byte": 4, "value": 0xF5}


@pytest.mark.model
def test_a_long_text_has_more_tokens_than_guessed(llama: LanguageModel) -> None:
    text = b"1" * 10_000
    assert len(llama.tokenize(text, special=False, bos=False)) == 10_000


# The window


@pytest.mark.model
def test_trim_keeps_nothing_of_gemmas_window_once_cells_are_missing(gemma: LlamaModel) -> None:
    """`seq_rm` returns true here, and the logits are wrong."""
    gemma.trim(0, 0)
    prefill(gemma, 0, [500 + i for i in range(900)])
    assert gemma.trim(0, 890) == 890
    assert gemma.trim(0, 600) == 0
    prefill(gemma, 0, [500 + i for i in range(100)])
    assert gemma.trim(0, 60) == 60


# Chat templates


@pytest.mark.model
def test_smollm2s_template(llama: LanguageModel) -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert llama.render(USER) == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_a_model_without_a_template_names_roles(gemma: LanguageModel) -> None:
    """This Gemma is a base model: its file has none."""
    assert not gemma.info.has_chat_template
    assert list(gemma.info.chat_notes) == ["chat-template"]
    answered = [*USER, {"role": "assistant", "content": " Yes\n"}, *USER]
    assert gemma.render(USER) == "user: Hi\nassistant:"
    assert gemma.render(answered) == "user: Hi\nassistant: Yes\nuser: Hi\nassistant:"
    ended = Rendering(add_generation_prompt=False)
    assert gemma.render(USER, ended) == "user: Hi\n"


@pytest.mark.process
def test_a_model_with_tokens_of_chatml_and_no_template_uses_chatml(tmp_path: Path) -> None:
    path = write_tiny("chatml", tmp_path)
    spec = ModelSpec(name="tiny", path=str(path), slots=1, ctx_size=256, threads=1)
    with closing(load_llama(spec, lambda _: True)) as model:
        assert "ChatML" in model.info.chat_notes["chat-template"]
        assert model.render(USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    own = msgspec.structs.replace(spec, chat_template="{{ messages[0].content }}")
    with closing(load_llama(own, lambda _: True)) as model:
        assert model.info.has_chat_template and model.info.chat_notes == {}
        assert model.render(USER) == "Hi"


@pytest.mark.process
def test_a_second_template_is_used_for_chats_with_tools(tmp_path: Path) -> None:
    path = write_tiny("two-templates", tmp_path)
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    spec = ModelSpec(name="tiny", path=str(path), slots=1, ctx_size=256, threads=1)
    with closing(load_llama(spec, lambda _: True, renders=True)) as model:
        assert model.render(USER) == "<user>Hi\n"
        assert model.render(USER, Rendering(tools=[tool])) == f"{json.dumps([tool])}<user>Hi\n"
        assert model.info.unused == {
            "speculation=draft": NO_DRAFT_MODEL,
            "speculation=mtp": NO_NEXTN,
        }
    own = msgspec.structs.replace(spec, chat_template="{{ messages[0].content }}")
    with closing(load_llama(own, lambda _: True)) as model:
        assert model.render(USER, Rendering(tools=[tool])) == "Hi"


@pytest.mark.process
def test_an_encoder_without_a_template_has_none(tmp_path: Path) -> None:
    path = write_tiny("bert-bare", tmp_path)
    spec = ModelSpec(name="tiny", path=str(path), slots=1, ctx_size=256, threads=1)
    with (
        closing(load_llama(spec, lambda _: True)) as model,
        pytest.raises(UnsupportedOperation, match="no chat template"),
    ):
        model.render(USER)


def render(source: str, messages: list[dict[str, str]] = USER) -> str:
    with closing(ChatTemplate(Renderer(source), bos="<s>", eos="</s>", strip_bos=True)) as template:
        return template.render(messages)


GEMMA_IT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""The parts of instruction-tuned Gemma's template that matter here."""


@pytest.mark.process
def test_the_bos_that_tokenizing_adds_is_not_written_twice() -> None:
    assert render(GEMMA_IT) == "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    with closing(ChatTemplate(Renderer(GEMMA_IT), bos="<s>", eos="", strip_bos=False)) as template:
        assert template.render(USER).startswith("<s><start_of_turn>")


@pytest.mark.process
def test_messages_that_the_template_refuses_are_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        render(GEMMA_IT, USER * 2)


@pytest.mark.process
def test_the_extras_that_templates_use() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ messages | tojson(indent=1) }}").count("\n") == 5
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("a\n  {% if true %}\nb\n  {% endif %}\n") == "a\nb\n"
    assert render("{{ 'x' * 3 }}{{ 2 * 3 }}{{ 2 ** 3 }}") == "xxx68"
    assert render("{% set x = [1] %}{% set _ = x.append(2) %}{{ x }}") == "[1, 2]"
    assert render("{% generation %}{{ 'a' }}{% endgeneration %}b") == "ab"
    assert render("{{ messages | map(attribute='role') | tojson }}") == '["user"]'


@pytest.mark.process
@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ messages.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ undefined_function() }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** 10 ** 10 ** 10 ** 10 }}",
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ [0] * 999999999 }}",
        "{% include 'a' %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_hostile_template_gives_an_error(source: str) -> None:
    with pytest.raises(InvalidArgument):
        render(source)


@pytest.mark.process
def test_an_endless_template_ends() -> None:
    loops = "{% for i in range(99999) %}" * 2 + "{{ 'x' * 1000 }}" + "{% endfor %}" * 2
    with pytest.raises((TooLarge, InvalidArgument)):
        render(loops)


# Sampling


def test_seeds_of_a_turn_differ_and_never_change() -> None:
    seeds = {seed_of(seed, index) for seed in range(40) for index in range(100)}
    assert len(seeds) == 4000 and max(seeds) < 0xFFFFFFFF
    # Fixed values: a turn that began before an upgrade continues identically after it.
    assert (seed_of(0, 0), seed_of(7, 3), seed_of(0xFFFFFFFF, 1)) == (
        2065550767,
        2756279400,
        2457217219,
    )


def test_another_seed_samples_another_text(tiny: LlamaModel) -> None:
    prompt = [1, *range(10, 40)]
    texts = []
    for seed in (1, 2):
        tiny.trim(0, 0)
        params = SamplingParams(seed=seed, temp=1.5, top_k=0, top_p=1, min_p=0)
        texts.append(generate(tiny, 0, prompt, params, count=12))
    assert texts[0] != texts[1]


def test_sampling_follows_the_probabilities(tiny: LlamaModel) -> None:
    """Tokens at 2000 indices are compared with the softmax: new seeds add no bias."""
    tiny.trim(0, 0)
    prefill(tiny, 0, [1, *range(10, 40)])
    logits = tiny.take_logits(0)
    assert isinstance(logits, np.ndarray)
    sampler, counts = tiny.sampler(SAMPLED, []), np.zeros(len(logits))
    for index in range(2000):
        tiny.put_logits(0, logits)
        counts[tiny.sample(0, sampler, index)] += 1
    sampler.close()
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    assert np.abs(counts / 2000 - expected).max() < 0.05


def test_greedy_samples_the_top_token(tiny: LlamaModel) -> None:
    tiny.trim(0, 0)
    prefill(tiny, 0, [1, 10, 11])
    logits = tiny.logits(0)
    assert tiny.sample(0, tiny.sampler(GREEDY, []), 0) == int(logits.argmax())


def test_penalties_see_the_prompt_and_the_sampled_tokens(tiny: LlamaModel) -> None:
    tiny.trim(0, 0)
    prefill(tiny, 0, [1, 10, 11])
    logits = tiny.take_logits(0)
    assert isinstance(logits, np.ndarray)
    ranked = [int(t) for t in logits.argsort()[::-1]]
    params = SamplingParams(temp=0, presence_penalty=100.0, last_n_penalty=8)
    sampler = tiny.sampler(params, [ranked[0]])
    tokens = []
    for index in range(3):
        tiny.put_logits(0, logits)
        tokens.append(tiny.sample(0, sampler, index))
    assert tokens == ranked[1:4]


@pytest.mark.model
def test_ignore_eos_never_ends(llama: LanguageModel) -> None:
    prompt = llama.tokenize(llama.render(USER).encode(), special=True, bos=True)
    params = SamplingParams(temp=0, ignore_eos=True)
    assert not any(llama.is_eog(t) for t in generate(llama, 0, prompt, params, count=40))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temp=0.7, top_k=1 << 24, top_p=0, min_p=1, typ_p=0),
        SamplingParams(temp=100, top_k=0, top_p=1, min_p=0, typ_p=0.5),
        SamplingParams(temp=1e-6, repeat_penalty=100, last_n_penalty=1 << 24),
        SamplingParams(temp=0, frequency_penalty=-100, presence_penalty=-100),
    ],
    ids=str,
)
def test_extreme_parameters_sample_a_token(tiny: LlamaModel, params: SamplingParams) -> None:
    tiny.trim(0, 0)
    assert len(generate(tiny, 0, [1, 10, 11], params)) == 6


def test_a_closed_sampler_is_refused(tiny: LlamaModel) -> None:
    tiny.trim(0, 0)
    prefill(tiny, 0, [1, 2])
    sampler = tiny.sampler(GREEDY, [])
    sampler.close()
    sampler.close()
    with pytest.raises(BackendError):
        tiny.sample(0, sampler, 0)


def test_the_backend_is_named_by_the_spec(tmp_path: Path) -> None:
    model = load_model(ModelSpec(name="t", path=str(write_tiny("llama", tmp_path))), lambda _: True)
    assert isinstance(model, LlamaModel)
    model.close()
    with pytest.raises(UnsupportedOperation):
        load_model(ModelSpec(name="t", backend="none"), lambda _: True)
