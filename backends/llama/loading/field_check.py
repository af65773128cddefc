"""The checks of a model's metadata and tensors for which llama.cpp would end the process.

llama.cpp refuses most bad values by itself. These are the values that it only asserts, in
`llama_model_base::load_hparams`, in its vocabulary, or in the first step. Assertions about the
graphs of single architectures remain: their loads end the worker, which the daemon reports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from ...encoder_prompts import ENCODER_DECODERS
from ...gguf.header import TensorEntry

LAYERS_MAX, EXPERTS_MAX = 512, 1024
"""`LLAMA_MAX_LAYERS` and `LLAMA_MAX_EXPERTS` of llama-hparams.h."""
DATA_ALIGNMENT = 32
"""`TENSOR_ALIGNMENT` of ggml-impl.h, of the first tensor in a file that is mapped into memory."""
WINDOW_MAX = 1 << 24
"""llama.cpp's memory grows with a model's window, also if its context is small: 2^30 tokens take
more than 4 GiB. The windows of real models are far below it.
"""
TOKEN_BYTES_MAX = 1 << 12
"""llama.cpp overflows its stack for longer names in some vocabularies; real ones have 128 bytes."""
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
BYTE_TOKEN = 6
"""`LLAMA_TOKEN_TYPE_BYTE`."""
_VOCABULARY = "tokenizer.ggml."
_UINT32 = (1 << 32) - 1
_NO_WEIGHTS = (
    *(lib.GGML_TYPE_I8, lib.GGML_TYPE_I16, lib.GGML_TYPE_I32, lib.GGML_TYPE_I64),
    *(lib.GGML_TYPE_F64, lib.GGML_TYPE_Q8_1, lib.GGML_TYPE_Q8_K),
)
"""The types of integers, and others that llama.cpp does not multiply. The last two are those of its
own intermediate results.
"""
_INTEGERS_ALLOWED = ("d2t",)
"""Tensors of integers: the tokens of a draft model's smaller vocabulary."""
_FEW_EXPERTS = ("hunyuan-vl", "hunyuan-dense")
"""llama.cpp ignores a single expert of these."""
_EPSILONS = ("layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon")
_FULL_ROTATION = frozenset((
    "apertus", "arcee", "arctic", "baichuan", "chameleon", "codeshell", "cogvlm", "cohere2moe",
    "dbrx", "deci", "deepseek", "dots1", "dream", "exaone", "falcon", "granite", "grok",
    "hunyuan-moe", "internlm2", "jais2", "llada", "llada-moe", "llama", "llama4", "maincoder",
    "mellum", "mistral3", "olmo", "olmo2", "olmoe", "orion", "paddleocr", "plamo", "qwen2",
    "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "rnd1", "smallthinker",
    "smollm3", "starcoder2", "xverse",
))  # fmt: skip
"""Architectures whose graphs assert that RoPE rotates whole heads."""
_EQUAL_HEADS = _FULL_ROTATION | frozenset((
    "afmoe", "bailingmoe2", "bert", "bitnet", "bloom", "chatglm", "cohere2", "command-r",
    "eurobert", "glm4", "gpt2", "gptneox", "jais", "laguna", "minimax-m2", "modern-bert", "mpt",
    "nemotron", "neo-bert", "openelm", "phi2", "phi3", "qwen", "qwen35", "qwen35moe", "qwen3next",
    "refact", "stablelm", "starcoder", "t5",
))  # fmt: skip
"""Architectures whose graphs assert that keys are as long as values."""
_RELATIVE_BUCKETS = range(4, 256)
"""Numbers of buckets for relative positions, up to 128 tokens apart, that lead to no other bucket
(`llama_relative_position_bucket`).
"""
_UNCHECKED_HEADS = ("lfm2", "lfm2moe")
"""Architectures whose queries and keys llama.cpp compares only in the graph with the heads."""
_QUERY_OR_KEY = re.compile(r"blk\.(\d{1,3})\.attn_(q|k)\.weight")


class BadField(NamedTuple):
    """A field with a value that llama.cpp does not survive, and the rule that it breaks."""

    key: str
    value: object
    rule: str

    def __str__(self) -> str:
        return f"{self.key} is {self.value}; {self.rule}"


def bad_value(
    values: Mapping[str, object],
    lists: Mapping[str, Sequence[int]],
    shapes: Mapping[str, Sequence[int]],
) -> BadField | None:
    """Return the first bad one of a header's *values* and *lists* of numbers, or None. *shapes* are
    those of its tensors.
    """
    return next(_bad_values(values, lists, shapes), None)


def _bad_values(
    values: Mapping[str, object],
    lists: Mapping[str, Sequence[int]],
    shapes: Mapping[str, Sequence[int]],
) -> Iterator[BadField]:
    architecture = str(values.get("general.architecture"))

    def number(name: str, default: int = 0) -> int:
        found = values.get(f"{architecture}.{name}", default)
        return found & _UINT32 if isinstance(found, int) else default

    def bad(name: str, rule: str) -> BadField:
        return BadField(f"{architecture}.{name}", number(name), rule)

    layers = number("block_count", 1)  # llama.cpp refuses a file without it
    if not 1 <= layers <= LAYERS_MAX:
        yield bad("block_count", f"1 to {LAYERS_MAX} layers can be loaded")
    for name in ("nextn_predict_layers", "posnet.block_count", "convnext.block_count"):
        if number(name) > layers:
            yield bad(name, f"the model has {layers} layers")
    if number("attention.sliding_window") > WINDOW_MAX:
        yield bad("attention.sliding_window", f"a window has at most {WINDOW_MAX} tokens")
    pattern = f"{architecture}.attention.sliding_window_pattern"
    windows = lists.get(pattern, (number("attention.sliding_window_pattern") != 1,))
    if number("attention.sliding_window") and not any(windows):
        value = lists.get(pattern, number("attention.sliding_window_pattern"))
        yield BadField(pattern, value, "it leaves no layer that has the sliding window")
    yield from _bad_experts(architecture, values, lists)
    scaling = values.get(f"{architecture}.rope.scaling.type", "linear")
    if isinstance(scaling, str) and scaling not in ROPE_SCALINGS:
        rule = f"one of {', '.join(ROPE_SCALINGS)} can be used"
        yield BadField(f"{architecture}.rope.scaling.type", repr(scaling[:40]), rule)
    for name in _EPSILONS:
        epsilon = values.get(f"{architecture}.attention.{name}", 0.0)
        if isinstance(epsilon, float) and not epsilon >= 0:
            yield BadField(f"{architecture}.attention.{name}", epsilon, "it is 0 or more")
    yield from _bad_heads(architecture, values, lists, shapes)
    if architecture in ENCODER_DECODERS:
        yield from _bad_encoder_decoder(architecture, values)


def _bad_encoder_decoder(architecture: str, values: Mapping[str, object]) -> Iterator[BadField]:
    def number(name: str, default: int) -> int:
        found = values.get(f"{architecture}.{name}", default)
        return found & _UINT32 if isinstance(found, int) else default

    if not 1 <= number("context_length", 1) < 1 << 31:
        rule = "a context has 1 to 2147483647 tokens"
        yield BadField(f"{architecture}.context_length", number("context_length", 1), rule)
    layers, heads = number("block_count", 1), number("attention.head_count", 0)
    width = number("embedding_length", 0)
    if number("embedding_length_out", 0) not in (0, width):
        rule = f"the decoder reads the encoder's output, {width} numbers for each token"
        value = number("embedding_length_out", 0)
        yield BadField(f"{architecture}.embedding_length_out", value, rule)
    decoder_layers = number("decoder_block_count", layers)
    if not 1 <= decoder_layers <= layers:
        rule = f"the decoder has 1 to {layers} layers, as many as the encoder at most"
        yield BadField(f"{architecture}.decoder_block_count", decoder_layers, rule)
    key_heads = number("attention.head_count_kv", heads)
    if key_heads != heads:
        rule = f"keys have as many heads as queries, {heads}"
        yield BadField(f"{architecture}.attention.head_count_kv", key_heads, rule)
    buckets = number("attention.relative_buckets_count", 0)
    if buckets not in _RELATIVE_BUCKETS:
        rule = f"{_RELATIVE_BUCKETS.start} to {_RELATIVE_BUCKETS.stop - 1} can be used"
        yield BadField(f"{architecture}.attention.relative_buckets_count", buckets, rule)


def _bad_experts(
    architecture: str, values: Mapping[str, object], lists: Mapping[str, Sequence[int]]
) -> Iterator[BadField]:
    key = f"{architecture}.expert_"

    def number(name: str) -> int:
        found = values.get(key + name, 0)
        return found & _UINT32 if isinstance(found, int) else 0

    experts, groups = number("count"), number("group_count")
    used = max([number("used_count"), *(n & _UINT32 for n in lists.get(key + "used_count", ()))])
    if architecture in _FEW_EXPERTS and experts <= 1:
        return
    of_all = f"the model has {experts} experts"
    if experts > EXPERTS_MAX:
        yield BadField(key + "count", experts, f"at most {EXPERTS_MAX} experts can be loaded")
    if used > experts or (experts and not used):
        yield BadField(key + "used_count", used, of_all)
    if groups and groups >= experts:
        yield BadField(key + "group_count", groups, of_all)
    elif groups > 1:
        if experts % groups:
            yield BadField(key + "group_count", groups, f"it divides the {experts} experts")
        if not 0 < number("group_used_count") < groups:
            rule = f"the model has {groups} groups of experts"
            yield BadField(key + "group_used_count", number("group_used_count"), rule)


def _bad_heads(
    architecture: str,
    values: Mapping[str, object],
    lists: Mapping[str, Sequence[int]],
    shapes: Mapping[str, Sequence[int]],
) -> Iterator[BadField]:
    def number(name: str, default: int) -> int:
        found = values.get(f"{architecture}.{name}", default)
        return found & _UINT32 if isinstance(found, int) else default

    several = lists.get(f"{architecture}.attention.head_count", ())
    heads = several[0] if several else number("attention.head_count", 0)
    if not 0 < heads <= _UINT32:
        return  # there is no attention
    width = number("embedding_length", 0) // heads
    keys, of_values = (number(f"attention.{name}_length", width) for name in ("key", "value"))
    rotated = number("rope.dimension_count", keys)
    if architecture in _EQUAL_HEADS and keys != of_values:
        name = "key" if f"{architecture}.attention.key_length" in values else "value"
        found, other = (keys, of_values) if name == "key" else (of_values, keys)
        rule = f"keys and values have the same length, here {other}"
        yield BadField(f"{architecture}.attention.{name}_length", found, rule)
    key_heads = lists.get(f"{architecture}.attention.head_count_kv", ())
    for name, shape in shapes.items() if architecture in _UNCHECKED_HEADS else ():
        if (match := _QUERY_OR_KEY.fullmatch(name)) is None:
            continue
        layer, is_key = int(match[1]), match[2] == "k"
        count = number("attention.head_count_kv", heads) if is_key else heads
        if is_key and layer < len(key_heads):
            count = key_heads[layer]
        if math.prod(shape[1:]) != count * keys:
            key = f"{architecture}.attention.head_count{'_kv' if is_key else ''}"
            rule = f"{name!r} of {list(shape)} is not of {count} heads of {keys}"
            yield BadField(key, count, rule)
    for suffix in ("", "_swa"):
        keys = number(f"attention.key_length{suffix}", keys)
        rotated = number(f"rope.dimension_count{suffix}", rotated)
        key = f"{architecture}.rope.dimension_count{suffix}"
        if key not in values:
            continue
        if rotated > keys or rotated % 2:
            yield BadField(key, rotated, f"it is even and at most the length of a key, {keys}")
        elif architecture in _FULL_ROTATION and not suffix and rotated != keys:
            yield BadField(key, rotated, f"it is the length of a key, {keys}")


def bad_vocabulary(
    model: object, tokens: Callable[[], Iterable[bytes]], count: int, kinds: Sequence[int]
) -> BadField | None:
    """Return the field by which a vocabulary of *count* tokens cannot be used, or None. *tokens*
    returns their names, *kinds* are their types.

    Takes 60 ms for Gemma's 262 k tokens, and 2 MB, because only the names' hashes are kept.
    """
    if model == "bert" and BYTE_TOKEN in kinds:
        number = kinds.index(BYTE_TOKEN)
        rule = f"token {number} stands for a byte, which a vocabulary of this kind does not have"
        return BadField(f"{_VOCABULARY}token_type", BYTE_TOKEN, rule)
    hashes = np.fromiter(map(hash, _names(tokens())), np.int64, count)
    hashes.sort()  # numpy.unique takes 20 times as long
    if not (hashes[1:] == hashes[:-1]).any():
        return None
    first: dict[bytes, int] = {}
    for number, name in enumerate(_names(tokens())):
        if first.setdefault(name, number) != number:
            shown = repr(name.decode("utf-8", "replace")[:40])
            rule = f"each token has a name of its own, but {first[name]} and {number} have the same"
            return BadField(f"{_VOCABULARY}tokens", shown, rule)
    return None


def _names(tokens: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the names that llama.cpp reads: they end at a NUL, and it replaces empty ones."""
    for number, token in enumerate(tokens):
        if not token or 0 in token:
            token = token.partition(b"\0")[0] or b"[EMPTY_%d]" % number
        yield token


def bad_tensor(tensors: Mapping[str, TensorEntry]) -> BadField | None:
    """Return the first tensor of a type that llama.cpp does not compute with, or None."""
    for name, tensor in tensors.items():
        is_vector = len(tensor.shape) == 1
        if name in _INTEGERS_ALLOWED:
            continue
        if tensor.kind in _NO_WEIGHTS:
            return BadField(f"the type of {name!r}", tensor.kind, "weights are of another type")
        if is_vector and tensor.kind != lib.GGML_TYPE_F32:
            return BadField(f"the type of {name!r}", tensor.kind, "vectors are of type 0 (F32)")
    return None


def bad_place(
    data_begin: int, alignment: object, tensors: Mapping[str, TensorEntry]
) -> BadField | None:
    """Return the alignment by which a file's first tensor cannot be used where it is, or None."""
    first = data_begin + min((tensor.begin for tensor in tensors.values()), default=0)
    if first % DATA_ALIGNMENT == 0:
        return None
    rule = f"the first tensor is at byte {first}, which is not a multiple of {DATA_ALIGNMENT}"
    return BadField("general.alignment", alignment, rule)


_SIZE_BYTES, _ENTRY_BYTES = 4, 4
BYTES_MAX = 4 << 20
"""SentencePiece's own maps have 240 to 247 kB. This many bytes take a second to check."""
_BLOCK = 256
_LABEL, _VALUE = 0x8000_00FF, 0x7FFF_FFFF
_STATES = 256
"""States that are followed together: more would take too much memory."""
_Indices = NDArray[np.int64]


# llama.cpp throws at a text that leads out of a Unigram vocabulary's map of characters
# (`tokenizer.ggml.precompiled_charsmap`), which ends the process. The map is that of SentencePiece:
# a XOR-compressed double array, then the replacements, each of which ends with a NUL.


def is_charsmap_usable(data: bytes) -> bool:
    """Return whether no text leads out of the map. A map that is too short for its own size counts
    as usable: llama.cpp refuses it. Takes 25 ms for `nmt_nfkc`.
    """
    if len(data) > BYTES_MAX:
        return False
    size = int.from_bytes(data[:_SIZE_BYTES], "little")
    count = size // _ENTRY_BYTES
    if _SIZE_BYTES + size >= len(data) or not count:
        return True
    entries = np.frombuffer(data, "<u4", count, _SIZE_BYTES)
    return _Walk(entries, data.rfind(b"\0", _SIZE_BYTES + size) - _SIZE_BYTES - size).is_inside()


class _Walk:
    """A walk over all states of the array; *value_max* is the place of the last NUL behind it."""

    def __init__(self, entries: NDArray[np.uint32], value_max: int):
        self._values = (entries & _VALUE).astype(np.int64)
        self._labels = (entries & _LABEL).astype(np.int64)
        self._leaves = (entries >> 8 & 1).astype(np.bool_)
        self._bases = (entries >> 10).astype(np.int64) << ((entries & 0x200) >> 6).astype(np.int64)
        self._value_max = value_max
        self._seen = np.zeros(len(entries), np.bool_)

    def is_inside(self) -> bool:
        """Follow each byte from each state; return whether all entries on the way exist."""
        waiting = [self._bases[:1]]
        while waiting:
            states = waiting.pop()
            if not self._has(states):
                return False
            for begin in range(0, len(states), _STATES):
                found = self._next(states[begin : begin + _STATES])
                if found is None:
                    return False
                if len(found):
                    waiting.append(found)
        return True

    def _has(self, states: _Indices) -> bool:
        """Return whether the entries for all bytes from these states exist."""
        return bool((states | (_BLOCK - 1) < len(self._bases)).all())

    def _next(self, states: _Indices) -> _Indices | None:
        """Return the unseen states after these, or None if one of them leads out of the map."""
        states = np.unique(states[~self._seen[states]])
        self._seen[states] = True
        labels = np.arange(1, _BLOCK)
        entries = states[:, None] ^ labels
        children = entries[self._labels[entries] == labels]
        found = children ^ self._bases[children]
        if not self._has(found):
            return None
        if (self._values[found[self._leaves[children]]] > self._value_max).any():
            return None
        result: _Indices = found[~self._seen[found]]
        return result
