"""A writer of tiny models with random F32 weights, one for each kind of memory in llama.cpp.

With an F32 cache and no flash attention, the batch's shape changes their logits by only 1e-4. Every
single lost KV cell therefore shows: by 0.01 and more 500 tokens later, as measured in
`tests/backends/llama/test_kv_state.py`. In real models, noise of up to 1.2 hides it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_letters, ascii_lowercase
from typing import Any, TypeAlias

import gguf
import numpy as np

__all__ = (
    "CONTROL",
    "EXPERT_BYTES",
    "FIM_NAMES",
    "KINDS",
    "POSITIONS",
    "RANK_MARKS",
    "RANK_TEMPLATE",
    "VOCAB_SIZE",
    "WINDOW",
    "byte_vocabulary",
    "write_split",
    "write_tiny",
)

VOCAB_SIZE = 3 + 256
CONTROL = 3
"""The control token of the kind `calls`."""
WINDOW = 64
EMBEDDING, HEADS, HEADS_KV, FEED_FORWARD = 64, 4, 2, 128
HEAD = EMBEDDING // HEADS
EXPERTS = 4
EXPERT_BYTES = EXPERTS * 3 * FEED_FORWARD * EMBEDDING * 18 // 32
"""The experts of one layer of the kind `moe`."""
BUCKETS = 32
"""T5's buckets of relative positions."""
CONTEXT_TRAINED = 4096
POSITIONS = 300
"""The positions of the kind `gpt2`. llama.cpp rounds contexts to multiples of 256 tokens."""
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"

Template: TypeAlias = str | list[dict[str, str]]
"""A chat template, or several, each with a name."""


class _Writer:
    """A GGUF writer that samples its weights from one seeded generator."""

    def __init__(self, path: Path, architecture: str, split_max_tensors: int = 0):
        self.file = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
        self.vocab_size = VOCAB_SIZE
        self._random = np.random.default_rng(7)

    def weight(self, name: str, *shape: int, scale: float | None = None) -> None:
        self.file.add_tensor(name, self._weights(shape, scale))

    def quantized(self, name: str, *shape: int, scale: float | None = None) -> None:
        """Add weights in Q4_0."""
        kind = gguf.GGMLQuantizationType.Q4_0
        weights = gguf.quants.quantize(self._weights(shape, scale), kind)
        self.file.add_tensor(name, weights, raw_dtype=kind)

    def _weights(self, shape: Sequence[int], scale: float | None) -> Any:
        scale = shape[-1] ** -0.5 if scale is None else scale
        return (self._random.standard_normal(shape) * scale).astype(np.float32)

    def ones(self, name: str, *shape: int) -> None:
        self.file.add_tensor(name, np.ones(shape, np.float32))

    def finish(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def byte_vocabulary(file: Any, control: str = "", more: Sequence[str] = ()) -> None:
    """Add a vocabulary of all bytes to a writer. A *control* token takes the place of byte 0;
    *more* tokens, which texts have too, follow the bytes.
    """
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256
    if control:
        names[CONTROL], types[CONTROL] = control, kinds.CONTROL
    names, types = [*names, *more], types + [kinds.USER_DEFINED] * len(more)
    file.add_tokenizer_model("llama")
    file.add_token_list(names)
    file.add_token_scores([0.0] * len(names))
    file.add_token_types(types)
    file.add_unk_token_id(0)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)


def _common(
    writer: _Writer,
    layers: int,
    norm: str = "output_norm.weight",
    control: str = "",
    template: Template = CHAT_TEMPLATE,
    vocabulary: Callable[[Any], None] | None = None,
    context: int = CONTEXT_TRAINED,
    more: Sequence[str] = (),
) -> None:
    file = writer.file
    writer.vocab_size += len(more)
    if vocabulary is None:
        byte_vocabulary(file, control, more)
    else:
        vocabulary(file)
    if template:
        file.add_chat_template(template)
    file.add_context_length(context)
    file.add_embedding_length(EMBEDDING)
    file.add_block_count(layers)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.weight("token_embd.weight", writer.vocab_size, EMBEDDING, scale=1.0)
    writer.ones(norm, EMBEDDING)


def _output(writer: _Writer) -> None:
    writer.weight("output.weight", writer.vocab_size, EMBEDDING, scale=0.3)


def _heads(file: Any, heads_kv: int | list[int]) -> None:
    file.add_feed_forward_length(FEED_FORWARD)
    file.add_head_count(HEADS)
    file.add_head_count_kv(heads_kv)
    file.add_key_length(HEAD)
    file.add_value_length(HEAD)
    file.add_rope_dimension_count(HEAD)
    file.add_rope_freq_base(10_000.0)


def _feed_forward(writer: _Writer, block: str) -> None:
    writer.ones(f"{block}.ffn_norm.weight", EMBEDDING)
    writer.weight(f"{block}.ffn_gate.weight", FEED_FORWARD, EMBEDDING)
    writer.weight(f"{block}.ffn_up.weight", FEED_FORWARD, EMBEDDING)
    writer.weight(f"{block}.ffn_down.weight", EMBEDDING, FEED_FORWARD)


def _attention(writer: _Writer, block: str, *, has_kv: bool = True) -> None:
    writer.ones(f"{block}.attn_norm.weight", EMBEDDING)
    # Queries and keys are not scaled up, to keep attention soft. Sharp attention (0.5) reads a
    # single cell, so that the loss of nearly any other stays unseen, and has 50 times the noise.
    for name, rows, scale in (("q", HEADS, None), ("k", HEADS_KV, None), ("v", HEADS_KV, 0.5)):
        if name == "q" or has_kv:
            writer.weight(f"{block}.attn_{name}.weight", rows * HEAD, EMBEDDING, scale=scale)
    writer.weight(f"{block}.attn_output.weight", EMBEDDING, HEADS * HEAD, scale=0.5)


def _qk_norms(writer: _Writer, block: str) -> None:
    writer.ones(f"{block}.attn_q_norm.weight", HEAD)
    writer.ones(f"{block}.attn_k_norm.weight", HEAD)


def _llama(
    path: Path,
    split_max_tensors: int = 0,
    control: str = "",
    template: Template = CHAT_TEMPLATE,
    more: Sequence[str] = (),
) -> None:
    """Plain attention."""
    writer = _Writer(path, "llama", split_max_tensors)
    _common(writer, layers=3, control=control, template=template, more=more)
    _output(writer)
    _heads(writer.file, HEADS_KV)
    for layer in range(3):
        _attention(writer, f"blk.{layer}")
        _feed_forward(writer, f"blk.{layer}")
    writer.finish()


def _repacked(path: Path) -> None:
    """Plain attention, with most weights in blocks, so that llama.cpp repacks them."""
    writer = _Writer(path, "llama")
    _common(writer, layers=10)
    _output(writer)
    _heads(writer.file, HEADS_KV)
    writer.weight = writer.quantized  # type: ignore[method-assign]
    for layer in range(10):
        _attention(writer, f"blk.{layer}")
        _feed_forward(writer, f"blk.{layer}")
    writer.finish()


def _moe(path: Path) -> None:
    """Plain attention, with experts in every layer, quantized so that llama.cpp repacks them."""
    writer = _Writer(path, "llama")
    _common(writer, layers=3)
    _output(writer)
    _heads(writer.file, HEADS_KV)
    writer.file.add_expert_count(EXPERTS)
    writer.file.add_expert_used_count(2)
    for layer in range(3):
        block = f"blk.{layer}"
        _attention(writer, block)
        writer.ones(f"{block}.ffn_norm.weight", EMBEDDING)
        writer.weight(f"{block}.ffn_gate_inp.weight", EXPERTS, EMBEDDING)
        for name in ("gate", "up"):
            writer.quantized(f"{block}.ffn_{name}_exps.weight", EXPERTS, FEED_FORWARD, EMBEDDING)
        writer.quantized(f"{block}.ffn_down_exps.weight", EXPERTS, EMBEDDING, FEED_FORWARD)
    writer.finish()


def _gemma3(path: Path, more: Sequence[str] = ()) -> None:
    """A sliding window in five of six layers: llama.cpp derives the pattern from the kind."""
    writer = _Writer(path, "gemma3")
    _common(writer, layers=6, more=more)
    _output(writer)
    _heads(writer.file, HEADS_KV)
    writer.file.add_sliding_window(WINDOW)
    for layer in range(6):
        block = f"blk.{layer}"
        _attention(writer, block)
        _qk_norms(writer, block)
        _feed_forward(writer, block)
        writer.ones(f"{block}.post_attention_norm.weight", EMBEDDING)
        writer.ones(f"{block}.post_ffw_norm.weight", EMBEDDING)
    writer.finish()


def _gemma3_images(path: Path) -> None:
    """A sliding window, and the tokens around an image."""
    _gemma3(path, more=("<start_of_image>", "<end_of_image>"))


def _llama_tiles(path: Path) -> None:
    """Plain attention, and the tokens around an image that idefics3 cuts into tiles."""
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    around = ["<fake_token_around_image>", "<global-img>"]
    _llama(path, more=("\n\n", *around, *tiles))


def _nextn(path: Path, head: str = "random", layers: int = 3) -> None:
    """Blocks of which all but one have experts, and a NextN block, whose *head* predicts from the
    token before ("token"), from the hidden state that it gets ("hidden"), or nothing right.
    """
    trunk = 0.06 / layers if head == "token" else 1.0
    writer = _Writer(path, "glm4moe")
    _common(writer, layers=layers + 1)
    _output(writer)
    file = writer.file
    _heads(file, HEADS_KV)
    file.add_nextn_predict_layers(1)
    file.add_leading_dense_block_count(1)
    file.add_expert_count(EXPERTS)
    file.add_expert_used_count(2)
    file.add_expert_shared_count(1)
    file.add_expert_feed_forward_length(FEED_FORWARD)
    file.add_expert_weights_scale(1.0)
    file.add_expert_weights_norm(True)
    for layer in range(layers + 1):
        block, is_head = f"blk.{layer}", layer == layers
        scale = 0.0 if is_head and head != "random" else trunk
        writer.ones(f"{block}.attn_norm.weight", EMBEDDING)
        for name, rows in (("q", HEADS), ("k", HEADS_KV), ("v", HEADS_KV)):
            writer.weight(f"{block}.attn_{name}.weight", rows * HEAD, EMBEDDING)
        writer.weight(f"{block}.attn_output.weight", EMBEDDING, HEADS * HEAD, scale=0.5 * scale)
        writer.ones(f"{block}.post_attention_norm.weight", EMBEDDING)
        kinds = ("",) if layer == 0 else ("_exps", "_shexp")
        if layer > 0:
            writer.weight(f"{block}.ffn_gate_inp.weight", EXPERTS, EMBEDDING)
            writer.weight(f"{block}.exp_probs_b.bias", EXPERTS, scale=0.1)
        for kind in kinds:
            shape = (EXPERTS,) if kind == "_exps" else ()
            for name in ("gate", "up"):
                weight = f"{block}.ffn_{name}{kind}.weight"
                writer.weight(weight, *shape, FEED_FORWARD, EMBEDDING)
            weight = f"{block}.ffn_down{kind}.weight"
            writer.weight(weight, *shape, EMBEDDING, FEED_FORWARD, scale=0.1 * scale)
    _nextn_head(writer, f"blk.{layers}", head)
    writer.finish()


def _nextn_head(writer: _Writer, block: str, head: str) -> None:
    """Add the tensors that a NextN block has beside those of other blocks."""
    for name in ("enorm", "hnorm", "shared_head_norm"):
        writer.ones(f"{block}.nextn.{name}.weight", EMBEDDING)
    projection = f"{block}.nextn.eh_proj.weight"
    if head == "random":
        writer.weight(projection, EMBEDDING, 2 * EMBEDDING)
    else:
        parts = [np.eye(EMBEDDING), np.zeros((EMBEDDING, EMBEDDING))]
        rows = np.hstack(parts if head == "token" else parts[::-1])
        writer.file.add_tensor(projection, rows.astype(np.float32))


def _nextn_hybrid(path: Path) -> None:
    """Recurrent layers, of which llama.cpp keeps earlier states, attention in every other layer,
    and a NextN block that predicts from the token before (Qwen3.5).
    """
    layers, state, heads, groups, trunk = 4, 16, 4, 2, 0.005
    values, channels = heads * state, (heads + 2 * groups) * state
    writer = _Writer(path, "qwen35")
    _common(writer, layers=layers + 1)
    _output(writer)
    file = writer.file
    _heads(file, HEADS_KV)
    file.add_nextn_predict_layers(1)
    file.add_rope_dimension_sections([2, 3, 3, 0])
    file.add_uint32("qwen35.full_attention_interval", 2)
    file.add_ssm_conv_kernel(KERNEL)
    file.add_ssm_inner_size(values)
    file.add_ssm_state_size(state)
    file.add_ssm_time_step_rank(heads)
    file.add_ssm_group_count(groups)
    for layer in range(layers + 1):
        block, scale = f"blk.{layer}", 0.0 if layer == layers else trunk
        writer.ones(f"{block}.attn_norm.weight", EMBEDDING)
        writer.ones(f"{block}.post_attention_norm.weight", EMBEDDING)
        if layer % 2 or layer == layers:
            _qk_norms(writer, block)
            for name, rows in (("q", 2 * HEADS), ("k", HEADS_KV), ("v", HEADS_KV)):
                writer.weight(f"{block}.attn_{name}.weight", rows * HEAD, EMBEDDING)
            writer.weight(f"{block}.attn_output.weight", EMBEDDING, HEADS * HEAD, scale=scale)
        else:
            writer.weight(f"{block}.attn_qkv.weight", channels, EMBEDDING)
            writer.weight(f"{block}.attn_gate.weight", values, EMBEDDING)
            writer.weight(f"{block}.ssm_conv1d.weight", channels, KERNEL, scale=0.5)
            writer.weight(f"{block}.ssm_dt.bias", heads, scale=0.5)
            file.add_tensor(f"{block}.ssm_a", np.full(heads, -0.05, np.float32))
            writer.weight(f"{block}.ssm_beta.weight", heads, EMBEDDING)
            writer.weight(f"{block}.ssm_alpha.weight", heads, EMBEDDING)
            writer.ones(f"{block}.ssm_norm.weight", state)
            writer.weight(f"{block}.ssm_out.weight", EMBEDDING, values, scale=scale)
        for name in ("gate", "up"):
            writer.weight(f"{block}.ffn_{name}.weight", FEED_FORWARD, EMBEDDING)
        writer.weight(f"{block}.ffn_down.weight", EMBEDDING, FEED_FORWARD, scale=0.2 * scale)
    _nextn_head(writer, f"blk.{layers}", "token")
    writer.finish()


def _nextn_token(path: Path) -> None:
    """A NextN block that predicts from the token before, as the other blocks do in large part."""
    _nextn(path, "token")


def _nextn_deep(path: Path) -> None:
    """The same beside 24 blocks, so that its drafts take little time."""
    _nextn(path, "token", layers=24)


def _nextn_hidden(path: Path) -> None:
    """A NextN block that repeats the prediction for the token before."""
    _nextn(path, "hidden")


FIM_NAMES = (
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
"""Names by which llama.cpp finds the tokens of models that fill in the middle."""


def _fim(path: Path) -> None:
    """Plain attention, and the tokens to fill in the middle, with those of repositories."""
    _llama(path, more=FIM_NAMES)


def _fim_gemma3(path: Path) -> None:
    """A sliding window, and the tokens to fill in the middle, without those of repositories."""
    _gemma3(path, more=FIM_NAMES[:3])


def _qwen2vl(path: Path) -> None:
    """Plain attention, with several positions of a token (M-RoPE), and the tokens around an
    image.
    """
    writer = _Writer(path, "qwen2vl")
    _common(writer, layers=3, more=("<|vision_start|>", "<|vision_end|>"))
    _output(writer)
    _heads(writer.file, HEADS_KV)
    writer.file.add_rope_dimension_sections([2, 3, 3, 0])
    for layer in range(3):
        block = f"blk.{layer}"
        _attention(writer, block)
        for name, rows in (("q", HEADS), ("k", HEADS_KV), ("v", HEADS_KV)):
            writer.weight(f"{block}.attn_{name}.bias", rows * HEAD, scale=0.1)
        _feed_forward(writer, block)
    writer.finish()


INNER, STATE, RANK, KERNEL = 128, 16, 8, 4
"""The sizes of Mamba's layers."""


def _mamba(path: Path) -> None:
    """Recurrent: no cells, one state per sequence."""
    writer = _Writer(path, "mamba")
    _common(writer, layers=2)
    _output(writer)
    writer.file.add_feed_forward_length(0)
    writer.file.add_head_count(0)
    _mamba_sizes(writer.file)
    for layer in range(2):
        _mamba_layer(writer, f"blk.{layer}")
    writer.finish()


def _jamba(path: Path) -> None:
    """Hybrid: Mamba, with attention in every other layer."""
    attends = [0, 1, 0, 1]
    writer = _Writer(path, "jamba")
    _common(writer, layers=4)
    _output(writer)
    _heads(writer.file, [HEADS_KV * a for a in attends])
    _mamba_sizes(writer.file)
    for layer, attention in enumerate(attends):
        block = f"blk.{layer}"
        _feed_forward(writer, block)
        if attention:
            _attention(writer, block)
            continue
        _mamba_layer(writer, block)
        for name, size in (("dt", RANK), ("b", STATE), ("c", STATE)):
            writer.ones(f"{block}.ssm_{name}_norm.weight", size)
    writer.finish()


def _mamba_sizes(file: Any) -> None:
    file.add_ssm_conv_kernel(KERNEL)
    file.add_ssm_inner_size(INNER)
    file.add_ssm_state_size(STATE)
    file.add_ssm_time_step_rank(RANK)


def _mamba_layer(writer: _Writer, block: str) -> None:
    inner, state, rank, kernel = INNER, STATE, RANK, KERNEL
    writer.ones(f"{block}.attn_norm.weight", EMBEDDING)
    writer.weight(f"{block}.ssm_in.weight", 2 * inner, EMBEDDING)
    writer.weight(f"{block}.ssm_conv1d.weight", inner, kernel, scale=0.5)
    writer.weight(f"{block}.ssm_conv1d.bias", inner, scale=0.1)
    writer.weight(f"{block}.ssm_x.weight", rank + 2 * state, inner)
    writer.weight(f"{block}.ssm_dt.weight", inner, rank)
    writer.weight(f"{block}.ssm_dt.bias", inner, scale=0.5)
    # Small decay: tokens read hundreds of tokens ago must still have an effect.
    decay = -0.05 * np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
    writer.file.add_tensor(f"{block}.ssm_a", decay)
    writer.ones(f"{block}.ssm_d", inner)
    writer.weight(f"{block}.ssm_out.weight", EMBEDDING, inner)


def _lfm2(path: Path, control: str = "", template: Template = CHAT_TEMPLATE) -> None:
    """Hybrid: short convolutions, with attention in every other layer."""
    kernel, attends = 3, [0, 1, 0, 1]
    writer = _Writer(path, "lfm2")
    _common(writer, layers=4, norm="token_embd_norm.weight", control=control, template=template)
    _output(writer)
    _heads(writer.file, [HEADS_KV * a for a in attends])
    writer.file.add_shortconv_l_cache(kernel)
    for layer, attention in enumerate(attends):
        block = f"blk.{layer}"
        _feed_forward(writer, block)
        if attention:
            _attention(writer, block)
            _qk_norms(writer, block)
            continue
        writer.ones(f"{block}.attn_norm.weight", EMBEDDING)
        writer.weight(f"{block}.shortconv.conv.weight", EMBEDDING, kernel, scale=0.6)
        writer.weight(f"{block}.shortconv.in_proj.weight", 3 * EMBEDDING, EMBEDDING)
        writer.weight(f"{block}.shortconv.out_proj.weight", EMBEDDING, EMBEDDING)
    writer.finish()


def _lfm2_chatml(path: Path) -> None:
    """Hybrid, with a control token before each message, and a template that begins reasoning, of
    which later prompts have nothing.
    """
    mark = "<|im_start|>"
    template = (
        "{% for m in messages %}" + mark + "{{ m.role }}\n"
        "{{ m.content[:5] if m.role == 'assistant' else m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}" + mark + "assistant\n<think>{% endif %}"
    )
    _lfm2(path, control=mark, template=template)


def _bert(path: Path, pooling: Any = gguf.PoolingType.MEAN, template: str = CHAT_TEMPLATE) -> None:
    """An encoder, for embeddings."""
    writer = _Writer(path, "bert")
    file = writer.file
    _common(writer, layers=1, norm="token_embd_norm.weight", template=template)
    file.add_feed_forward_length(FEED_FORWARD)
    file.add_head_count(HEADS)
    file.add_layer_norm_eps(1e-5)
    file.add_causal_attention(False)
    file.add_pooling_type(pooling)
    file.add_token_type_count(1)
    writer.weight("token_types.weight", 1, EMBEDDING)
    writer.weight("position_embd.weight", CONTEXT_TRAINED, EMBEDDING)
    writer.weight("token_embd_norm.bias", EMBEDDING)
    block = "blk.0"
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.weight(f"{block}.{name}.weight", EMBEDDING, EMBEDDING)
        writer.weight(f"{block}.{name}.bias", EMBEDDING)
    writer.weight(f"{block}.ffn_up.weight", FEED_FORWARD, EMBEDDING)
    writer.weight(f"{block}.ffn_up.bias", FEED_FORWARD)
    writer.weight(f"{block}.ffn_down.weight", EMBEDDING, FEED_FORWARD)
    writer.weight(f"{block}.ffn_down.bias", EMBEDDING)
    for name in ("attn_output_norm", "layer_output_norm"):
        writer.ones(f"{block}.{name}.weight", EMBEDDING)
        writer.weight(f"{block}.{name}.bias", EMBEDDING)
    if pooling == gguf.PoolingType.RANK:
        writer.weight("cls.weight", EMBEDDING, EMBEDDING)
        writer.weight("cls.bias", EMBEDDING)
        writer.weight("cls.output.weight", 1, EMBEDDING)
        writer.weight("cls.output.bias", 1)
    writer.finish()


def _bert_rank(path: Path) -> None:
    """An encoder that ranks."""
    _bert(path, gguf.PoolingType.RANK)


RANK_MARKS = ("<|im_start|>", "<|im_end|>")
"""The control tokens of the kind `qwen3-rank`."""
RANK_TEMPLATE = (
    "<|im_start|>user\n<Instruct>: Find passages that answer the query\n<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
)
"""The rerank template of the kind `qwen3-rank`: a short form of Qwen3-Reranker's."""


def _pair_vocabulary(file: Any) -> None:
    """Add a vocabulary as Qwen's to a writer: bytes, a space with each letter, and marks."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # others move behind U+00FF
    hidden = [byte for byte in range(256) if byte not in shown]
    names = [chr(256 + hidden.index(b)) if b in hidden else chr(b) for b in range(256)]
    space, kinds = names[ord(" ")], gguf.TokenType
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("qwen2")
    names += [space + letter for letter in ascii_letters]
    file.add_token_list([*names, *RANK_MARKS])
    file.add_token_types([kinds.NORMAL] * len(names) + [kinds.CONTROL] * len(RANK_MARKS))
    file.add_token_merges([f"{space} {letter}" for letter in ascii_letters])
    file.add_eos_token_id(len(names) + 1)
    file.add_add_bos_token(False)


def _qwen3_rank(path: Path) -> None:
    """A causal model that ranks, in the form of Qwen3-Reranker."""
    writer = _Writer(path, "qwen3")
    writer.vocab_size = 256 + len(ascii_letters) + len(RANK_MARKS)
    template = [{"name": "rerank", "template": RANK_TEMPLATE}]
    _common(writer, layers=2, template=template, vocabulary=_pair_vocabulary)
    file = writer.file
    _heads(file, HEADS_KV)
    file.add_pooling_type(gguf.PoolingType.RANK)
    file.add_classifier_output_labels(["yes", "no"])
    for block in ("blk.0", "blk.1"):
        _attention(writer, block)
        _qk_norms(writer, block)
        _feed_forward(writer, block)
    writer.weight("cls.output.weight", 2, EMBEDDING)
    writer.finish()


def _bert_bare(path: Path) -> None:
    """An encoder without a chat template."""
    _bert(path, template="")


def _unigram_vocabulary(file: Any) -> None:
    """Add a vocabulary like T5's to a writer: start token, end of a text, letters and pairs."""
    pairs = map("".join, product(ascii_lowercase, repeat=2))
    names = ["<pad>", "</s>", "<unk>", "\u2581", *map(chr, range(33, 127))]
    names += ["\u2581" + letter for letter in ascii_letters]
    names += islice(pairs, VOCAB_SIZE - len(names))
    kinds = gguf.TokenType
    types = [kinds.CONTROL, kinds.CONTROL, kinds.UNKNOWN]
    file.add_tokenizer_model("t5")
    file.add_tokenizer_pre("default")
    file.add_token_list(names)
    file.add_token_scores([-float(3 - len(name)) for name in names])
    file.add_token_types(types + [kinds.NORMAL] * (len(names) - len(types)))
    file.add_add_space_prefix(True)
    file.add_eos_token_id(1)
    file.add_unk_token_id(2)
    file.add_pad_token_id(0)


def _t5(
    path: Path,
    *,
    start: int | None = 0,
    biases: bool = True,
    decodes: bool = True,
    template: Template = "",
) -> None:
    """An encoder, and a decoder that reads the encoder's output."""
    writer = _Writer(path, "t5" if decodes else "t5encoder")
    file = writer.file
    _common(writer, 2, "enc.output_norm.weight", template=template, vocabulary=_unigram_vocabulary)
    _output(writer)
    file.add_feed_forward_length(FEED_FORWARD)
    file.add_head_count(HEADS)
    file.add_relative_attn_buckets_count(BUCKETS)
    if start is not None:
        file.add_decoder_start_token_id(start)
    parts = {"enc": ["attn"]}
    if decodes:
        parts["dec"] = ["attn", "cross_attn"]
        writer.ones("dec.output_norm.weight", EMBEDDING)
    for part, attentions in parts.items():
        if biases:
            writer.weight(f"{part}.blk.0.attn_rel_b.weight", BUCKETS, HEADS, scale=1.0)
        for layer in range(2):
            block = f"{part}.blk.{layer}"
            for attention in attentions:
                writer.ones(f"{block}.{attention}_norm.weight", EMBEDDING)
                # T5 does not divide the products of queries and keys by the root of their length.
                for name, scale in (("q", 0.03), ("k", None), ("v", 0.5), ("o", 0.5)):
                    weight = f"{block}.{attention}_{name}.weight"
                    writer.weight(weight, EMBEDDING, EMBEDDING, scale=scale)
            _feed_forward(writer, block)
    writer.finish()


def _t5_no_start(path: Path) -> None:
    """A T5 without a start token, which has no BOS token either."""
    _t5(path, start=None)


def _t5_no_biases(path: Path) -> None:
    """A T5 that lacks tensors of its attention."""
    _t5(path, biases=False)


def _t5_encoder(path: Path) -> None:
    """The encoder of a T5 alone."""
    _t5(path, decodes=False)


def _t5_chat(path: Path) -> None:
    """A T5 whose chat template writes whole conversations."""
    _t5(path, template=CHAT_TEMPLATE)


def _gpt2(path: Path) -> None:
    """A learned embedding of each position, as many as `POSITIONS`."""
    writer = _Writer(path, "gpt2")
    file = writer.file
    _common(writer, layers=2, context=POSITIONS)
    file.add_layer_norm_eps(1e-5)
    file.add_feed_forward_length(FEED_FORWARD)
    file.add_head_count(HEADS)
    writer.weight("position_embd.weight", POSITIONS, EMBEDDING, scale=1.0)
    writer.weight("output_norm.bias", EMBEDDING, scale=0.1)
    for block in ("blk.0", "blk.1"):
        for name, rows, columns in (
            ("attn_qkv", 3 * EMBEDDING, EMBEDDING),
            ("attn_output", EMBEDDING, EMBEDDING),
            ("ffn_up", FEED_FORWARD, EMBEDDING),
            ("ffn_down", EMBEDDING, FEED_FORWARD),
        ):
            writer.weight(f"{block}.{name}.weight", rows, columns)
            writer.weight(f"{block}.{name}.bias", rows, scale=0.1)
        for name in ("attn_norm", "ffn_norm"):
            _norm(writer, f"{block}.{name}")
    writer.finish()


def _gemma4(path: Path) -> None:
    """A sliding window; the last layers read the KV states of others, and each layer has its own
    embeddings of the tokens.
    """
    windows, own = [True, True, True, False, True, False], 8
    shared = 2
    writer = _Writer(path, "gemma4")
    layers = len(windows)
    _common(writer, layers=layers)
    _output(writer)
    file = writer.file
    _heads(file, HEADS_KV)
    file.add_sliding_window(WINDOW)
    file.add_sliding_window_pattern(windows)
    for name in ("attention.key_length_swa", "attention.value_length_swa"):
        file.add_uint32(f"gemma4.{name}", HEAD)
    file.add_uint32("gemma4.rope.dimension_count_swa", HEAD)
    file.add_uint32("gemma4.attention.shared_kv_layers", shared)
    file.add_uint32("gemma4.embedding_length_per_layer_input", own)
    writer.ones("rope_freqs.weight", HEAD // 2)
    writer.weight("per_layer_token_embd.weight", VOCAB_SIZE, own * layers, scale=1.0)
    writer.weight("per_layer_model_proj.weight", own * layers, EMBEDDING)
    writer.ones("per_layer_proj_norm.weight", own)
    for layer in range(layers):
        block = f"blk.{layer}"
        _attention(writer, block, has_kv=layer < layers - shared)
        # Its attention has no scale, and would be sharp.
        file.add_tensor(f"{block}.attn_q_norm.weight", np.full(HEAD, 0.25, np.float32))
        if layer < layers - shared:
            writer.ones(f"{block}.attn_k_norm.weight", HEAD)
        _feed_forward(writer, block)
        for name in ("post_attention_norm", "post_ffw_norm", "post_norm"):
            writer.ones(f"{block}.{name}.weight", EMBEDDING)
        writer.weight(f"{block}.inp_gate.weight", own, EMBEDDING)
        writer.weight(f"{block}.proj.weight", EMBEDDING, own)
    writer.finish()


def _rwkv7(path: Path) -> None:
    """Recurrent, of another kind than Mamba."""
    rank = 8
    writer = _Writer(path, "rwkv7")
    file = writer.file
    _common(writer, layers=2)
    _output(writer)
    file.add_feed_forward_length(FEED_FORWARD)
    file.add_head_count(0)
    file.add_layer_norm_eps(1e-5)
    file.add_wkv_head_size(EMBEDDING)
    file.add_token_shift_count(2)
    for name in ("decay", "iclr", "value_residual_mix", "gate"):
        file.add_uint32(f"rwkv7.attention.{name}_lora_rank", rank)
    writer.weight("output_norm.bias", EMBEDDING, scale=0.1)
    _norm(writer, "token_embd_norm")
    for layer in range(2):
        mix = f"blk.{layer}.time_mix"
        for name in ("attn_norm", "attn_norm_2"):
            _norm(writer, f"blk.{layer}.{name}")
        _norm(writer, f"{mix}_ln")
        for name in ("w", "a", "v"):
            writer.weight(f"{mix}_{name}0.weight", EMBEDDING, scale=0.5)
        for name in ("w", "a", "v", "g"):
            writer.weight(f"{mix}_{name}1.weight", rank, EMBEDDING)
            writer.weight(f"{mix}_{name}2.weight", EMBEDDING, rank)
        writer.weight(f"{mix}_lerp_fused.weight", 6, 1, 1, EMBEDDING, scale=0.3)
        for name in ("k_k", "k_a", "r_k"):
            writer.weight(f"{mix}_{name}.weight", EMBEDDING, scale=0.5)
        for name in ("key", "value", "receptance", "output"):
            writer.weight(f"{mix}_{name}.weight", EMBEDDING, EMBEDDING)
        mix = f"blk.{layer}.channel_mix"
        writer.weight(f"{mix}_lerp_k.weight", 1, 1, EMBEDDING, scale=0.3)
        writer.weight(f"{mix}_key.weight", FEED_FORWARD, EMBEDDING)
        writer.weight(f"{mix}_value.weight", EMBEDDING, FEED_FORWARD)
    writer.finish()


def _norm(writer: _Writer, name: str) -> None:
    writer.ones(f"{name}.weight", EMBEDDING)
    writer.weight(f"{name}.bias", EMBEDDING, scale=0.1)


def _unknown_architecture(path: Path) -> None:
    """A complete file of an architecture that llama.cpp does not know."""
    writer = _Writer(path, "unheard-of")
    _common(writer, layers=1)
    writer.finish()


def _calls(path: Path) -> None:
    """Plain attention, and a control token that begins tool calls."""
    _llama(path, control="[TOOL_CALLS]")


def _bare(path: Path) -> None:
    """Plain attention, without a chat template."""
    _llama(path, template="")


def _two_templates(path: Path) -> None:
    """Plain attention, and a second chat template for chats with tools."""
    tools = "{{ tools | tojson }}" + CHAT_TEMPLATE
    templates = [
        {"name": "default", "template": CHAT_TEMPLATE},
        {"name": "tool_use", "template": tools},
    ]
    _llama(path, template=templates)


def _chatml(path: Path) -> None:
    """Plain attention, without a chat template, and with the token that begins ChatML messages."""
    _llama(path, control="<|im_start|>", template="")


KINDS: dict[str, Callable[[Path], None]] = {
    "llama": _llama,
    "repacked": _repacked,
    "moe": _moe,
    "nextn": _nextn,
    "nextn-token": _nextn_token,
    "nextn-deep": _nextn_deep,
    "nextn-hidden": _nextn_hidden,
    "nextn-hybrid": _nextn_hybrid,
    "calls": _calls,
    "bare": _bare,
    "two-templates": _two_templates,
    "chatml": _chatml,
    "gemma3": _gemma3,
    "gemma3-images": _gemma3_images,
    "llama-tiles": _llama_tiles,
    "fim": _fim,
    "fim-gemma3": _fim_gemma3,
    "qwen2vl": _qwen2vl,
    "mamba": _mamba,
    "lfm2": _lfm2,
    "lfm2-chatml": _lfm2_chatml,
    "jamba": _jamba,
    "gpt2": _gpt2,
    "gemma4": _gemma4,
    "rwkv7": _rwkv7,
    "bert": _bert,
    "bert-rank": _bert_rank,
    "bert-bare": _bert_bare,
    "qwen3-rank": _qwen3_rank,
    "t5": _t5,
    "t5-no-start": _t5_no_start,
    "t5-no-biases": _t5_no_biases,
    "t5-chat": _t5_chat,
    "t5-encoder": _t5_encoder,
    "unheard-of": _unknown_architecture,
}


def write_split(directory: Path, name: str = "tiny") -> list[Path]:
    """Write the tiny llama in three parts, and return their paths."""
    _llama(directory / f"{name}.gguf", split_max_tensors=12)
    return sorted(directory.glob(f"{name}-*-of-*.gguf"))


def write_tiny(kind: str, directory: Path) -> Path:
    """Write the tiny model of *kind*, one of `KINDS`, and return its path."""
    path = directory / f"tiny-{kind}.gguf"
    KINDS[kind](path)
    return path
