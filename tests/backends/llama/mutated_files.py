"""Variants of model files, each with one field of its header changed.

A header is split into its entries and tensors, of which each is written again from its bytes. So a
variant may have any contents, also those that no writer of GGUF files produces.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tests.tiny_gguf import write_tiny

__all__ = (
    *("F32", "FINDINGS", "LIST", "TEXT", "U32"),
    *("Header", "Variant", "chosen_variants", "headers", "packed", "read", "texts"),
)

U8, I8, U16, I16, U32, I32, F32, BOOL, TEXT, LIST, U64, I64, F64 = range(13)
CODES = dict(
    zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIif?Qqd", strict=True)
)
FLOATS = (F32, F64)
ALIGNMENT = 32
EDGES = {
    kind: (0, 1, 2, 3, (1 << bits) - 1)
    for kind, bits in ((U8, 8), (U16, 16), (U32, 32), (U64, 64))
} | {
    kind: (0, 1, 2, -1, -(1 << bits), (1 << bits) - 1)
    for kind, bits in ((I8, 7), (I16, 15), (I32, 31), (I64, 63))
}  # fmt: skip
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("nan"), float("inf"), float("-inf"))


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def packed(kind: int, value: object) -> bytes:
    """Return the bytes of a value that is not a list."""
    if kind == TEXT:
        assert isinstance(value, bytes)
        return text(value)
    return struct.pack("<" + CODES[kind], value)


def listed(kind: int, items: Iterable[bytes], count: int | None = None) -> bytes:
    """Return the bytes of a list, which may claim another *count* of items than it has."""
    found = list(items)
    return struct.pack("<IQ", kind, len(found) if count is None else count) + b"".join(found)


def texts(*values: bytes) -> bytes:
    return listed(TEXT, map(text, values))


class Entry(NamedTuple):
    key: bytes
    kind: int
    value: bytes

    @property
    def packed(self) -> bytes:
        return text(self.key) + struct.pack("<I", self.kind) + self.value

    def items(self) -> tuple[int, list[bytes]]:
        """Return the type of a list's items, and the bytes of each."""
        kind, count = struct.unpack_from("<IQ", self.value)
        if kind == TEXT:
            found, position = [], 12
            for _ in range(count):
                end = position + 8 + struct.unpack_from("<Q", self.value, position)[0]
                found.append(self.value[position:end])
                position = end
            return kind, found
        size = struct.calcsize(CODES[kind])
        return kind, [self.value[i : i + size] for i in range(12, len(self.value), size)]


class Tensor(NamedTuple):
    name: bytes
    shape: tuple[int, ...]
    kind: int
    begin: int
    dimensions: int = -1

    @property
    def packed(self) -> bytes:
        count = len(self.shape) if self.dimensions < 0 else self.dimensions
        shape = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        place = struct.pack("<IQ", self.kind, self.begin)
        return text(self.name) + struct.pack("<I", count) + shape + place


@dataclass(frozen=True)
class Header:
    """The parts of a file; *counts* are those of tensors and entries that it claims to have."""

    entries: tuple[Entry, ...]
    tensors: tuple[Tensor, ...]
    data: bytes
    version: int = 3
    counts: tuple[int, int] | None = None
    alignment: int = ALIGNMENT

    def begin(self) -> bytes:
        counts = self.counts or (len(self.tensors), len(self.entries))
        return b"GGUF" + struct.pack("<IQQ", self.version, *counts)

    def to_bytes(self) -> bytes:
        parts = (*(e.packed for e in self.entries), *(t.packed for t in self.tensors))
        header = self.begin() + b"".join(parts)
        return header + bytes(-len(header) % self.alignment) + self.data

    def entry(self, key: str) -> Entry:
        return next(e for e in self.entries if e.key == key.encode())

    def with_entry(self, key: str, kind: int, value: bytes) -> Header:
        """Return the header with one entry added or replaced."""
        made = Entry(key.encode(), kind, value)
        if any(e.key == made.key for e in self.entries):
            return replace(
                self, entries=tuple(made if e.key == made.key else e for e in self.entries)
            )
        return replace(self, entries=(*self.entries, made))


class Variant(NamedTuple):
    """A file with one change: of a field in *header*, or of the bytes from *place* on."""

    name: str
    header: Header
    place: int = 0
    change: bytes | None = b""
    """None: the file ends here."""

    def to_bytes(self) -> bytes:
        whole = self.header.to_bytes()
        if self.change is None:
            return whole[: self.place]
        return whole[: self.place] + self.change + whole[self.place + len(self.change) :]


def read(path: Path) -> Header:
    """Return the parts of a valid file."""
    data, position = path.read_bytes(), 24
    tensors, entries = struct.unpack_from("<QQ", data, 8)

    def take(form: str) -> int:
        nonlocal position
        (found,) = struct.unpack_from("<" + form, data, position)
        position += struct.calcsize("<" + form)
        return int(found)

    def take_text() -> bytes:
        nonlocal position
        size = take("Q")
        position += size
        return data[position - size : position]

    def skip(kind: int) -> None:
        nonlocal position
        if kind == TEXT:
            take_text()
        elif kind == LIST:
            inner, count = take("I"), take("Q")
            for _ in range(count):
                skip(inner)
        else:
            position += struct.calcsize(CODES[kind])

    found, shapes = [], []
    for _ in range(entries):
        key, kind, begin = take_text(), take("I"), position
        skip(kind)
        found.append(Entry(key, kind, data[begin:position]))
    for _ in range(tensors):
        name = take_text()
        shape = tuple(take("Q") for _ in range(take("I")))
        shapes.append(Tensor(name, shape, take("I"), take("Q")))
    position += -position % ALIGNMENT
    return Header(tuple(found), tuple(shapes), data[position:])


# Vocabularies of the kinds that llama.cpp knows, each for the tiny model of plain attention.

_TYPES = {"normal": 1, "unknown": 2, "control": 3, "user": 4, "unused": 5, "byte": 6}


def _vocabulary(header: Header, model: str, names: list[bytes], kinds: list[int]) -> Header:
    """Return *header* with other tokens, as many as it has."""
    size = len(header.entry("tokenizer.ggml.scores").items()[1])
    names = [*names, *(b"filler%d" % i for i in range(size - len(names)))]
    kinds = [*kinds, *[_TYPES["normal"]] * (size - len(kinds))]
    for key, kind, value in (
        ("tokenizer.ggml.model", TEXT, text(model.encode())),
        ("tokenizer.ggml.tokens", LIST, texts(*names)),
        ("tokenizer.ggml.token_type", LIST, listed(I32, (packed(I32, k) for k in kinds))),
    ):
        header = header.with_entry(key, kind, value)
    return header


def _bpe(header: Header) -> Header:
    """The bytes in GPT-2's letters, some merges, and control tokens."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (chr(256 + i) for i in range(256 - len(visible)))
    letters = [chr(b) if b in visible else next(hidden) for b in range(256)]
    names = [b"<|im_start|>", b"<|im_end|>", b"<|endoftext|>"]
    names += [letter.encode() for letter in letters[3:]] + [b"he", b"ll", b"hell"]
    control = _TYPES["control"]
    header = _vocabulary(header, "gpt2", names, [control, control, control])
    header = header.with_entry("tokenizer.ggml.pre", TEXT, text(b"gpt-2"))
    merges = texts(b"h e", b"l l", b"he ll")
    return header.with_entry("tokenizer.ggml.merges", LIST, merges)


def _word_pieces(header: Header) -> Header:
    names = [b"[PAD]", b"[UNK]", b"[CLS]", b"[SEP]", b"[MASK]"]
    letters = [chr(i).encode() for i in range(97, 123)]
    names += [b"\xe2\x96\x81" + letter for letter in letters] + letters
    return _vocabulary(header, "bert", names, [_TYPES["control"]] * 5)


def _unigrams(header: Header) -> Header:
    names = [b"<pad>", b"</s>", b"<unk>", *(b"\xe2\x96\x81%c" % i for i in range(97, 123))]
    header = _vocabulary(header, "t5", names, [3, 3, 2])
    charsmap = struct.pack("<I", 2048) + bytes(2048) + b"a\0b\0"
    items = (charsmap[i : i + 1] for i in range(len(charsmap)))
    return header.with_entry("tokenizer.ggml.precompiled_charsmap", LIST, listed(U8, items))


def _rwkv(header: Header) -> Header:
    names = [b"<s>", *(b"\\x%02x" % byte for byte in range(256)), b"ab"]
    return _vocabulary(header, "rwkv", names, [_TYPES["control"]])


def _plamo2(header: Header) -> Header:
    names = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    return _vocabulary(header, "plamo2", names, [2, 3, 3, *[6] * 256])


VOCABULARIES = {
    "bpe": _bpe,
    "wpm": _word_pieces,
    "ugm": _unigrams,
    "rwkv": _rwkv,
    "plamo2": _plamo2,
}
MODELS = ("llama", "gemma3", "mamba", "lfm2", "bert", "bert-rank", "t5", "calls")
_OF_VOCABULARY = b"tokenizer.ggml."


# Variants of one header, each with a name that shows the field and its new value.

_OTHER_TEXTS = {
    b"general.architecture": (
        *(b"llama", b"gemma3", b"mamba", b"lfm2", b"bert", b"t5", b"t5encoder", b"gpt2", b"qwen2"),
        *(b"qwen3", b"qwen3moe", b"falcon", b"phi3", b"deepseek2", b"rwkv6", b"rwkv7", b"clip"),
        *(b"jina-bert-v2", b"nomic-bert", b"modern-bert", b"wavtokenizer-dec", b"mamba2", b"jamba"),
        *(b"mpt", b"bloom", b"starcoder", b"gemma", b"gemma2", b"gemma3n", b"gemma4", b"llama4"),
        *(b"grok", b"dbrx", b"gpt-oss", b"plamo2", b"granitehybrid", b"nemotron_h", b"dream"),
        *(b"llada", b"smollm3", b"minicpm3", b"cohere2", b"olmo2", b"exaone4", b"bitnet", b"plm"),
        *(b"command-r", b"arctic", b"chatglm", b"glm4", b"glm4moe", b"hunyuan-moe", b"kimi-linear"),
        *(b"qwen2vl", b"qwen3next", b"qwen35", b"apertus", b"seed_oss", b"lfm2moe", b"arwkv7"),
    ),
    b"tokenizer.ggml.model": (
        *(b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"plamo2", b"no_vocab", b"none", b"gemma4"),
        *(b"hybriddna",),
    ),
    b"tokenizer.ggml.pre": (
        *(b"default", b"llama-bpe", b"gpt-2", b"qwen2", b"deepseek-llm", b"falcon", b"tekken"),
        *(b"smollm", b"gemma4", b"jina-v1-en", b"chatglm-bpe", b"kimi-k2", b"superbpe", b"whisper"),
    ),
    b"general.type": (b"model", b"adapter", b"mmproj", b"imatrix"),
    b"tokenizer.chat_template": (b"{{", b"{% for %}", b"{{ messages[0].x.y }}"),
}
_SPECIAL = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask", "prefix"),
    *("suffix", "middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
_ADDED_KEYS = (
    *("attention.sliding_window", "attention.sliding_window_pattern", "attention.head_count_kv"),
    *("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count"),
    *("expert_group_used_count", "expert_gating_func", "expert_feed_forward_length"),
    *("expert_weights_scale", "leading_dense_block_count", "interleave_moe_layer_step"),
    *("rope.dimension_count", "rope.dimension_count_swa", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.freq_base"),
    *("rope.freq_base_swa", "rope.scale_linear", "rope.scaling.yarn_log_multiplier"),
    *("rope.scaling.finetuned", "attention.key_length", "attention.value_length"),
    *("attention.key_length_mla", "attention.value_length_mla", "attention.key_length_swa"),
    *("attention.value_length_swa", "attention.kv_lora_rank", "attention.q_lora_rank"),
    *("attention.causal", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"),
    *("attention.temperature_scale", "attention.temperature_length", "attention.output_scale"),
    *(
        "attention.group_norm_groups",
        "attention.group_norm_epsilon",
        "attention.layer_norm_epsilon",
    ),
    *("attention.layer_norm_rms_epsilon", "attention.shared_kv_layers", "attention.head_count"),
    *("attention.relative_buckets_count", "attention.value_scale", "attention.indexer.head_count"),
    *("final_logit_softcapping", "attn_logit_softcapping", "router_logit_softcapping"),
    *("logit_scale", "embedding_scale", "residual_scale", "pooling_type", "vocab_size"),
    *("nextn_predict_layers", "features_length", "token_shift_count", "use_parallel_residual"),
    *("decoder_start_token_id", "decoder_block_count", "classifier.output_labels"),
    *("dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in", "dense_3_feat_out"),
    *("n_embd_features", "embedding_length_per_layer_input", "embedding_length_out"),
    *(
        "ssm.group_count",
        "ssm.dt_b_c_rms",
        "wkv.head_size",
        "time_mix_extra_dim",
        "moe_every_n_layers",
    ),
    *(
        "full_attention_interval",
        "altup.num_inputs",
        "altup.active_idx",
        "activation_sparsity_scale",
    ),
    *("convnext.block_count", "posnet.block_count", "n_deepstack_layers", "swin_norm"),
    *("tensor_data_layout", "block_count", "embedding_length", "feed_forward_length"),
)
_RARE = {
    "{}.rope.scaling.type": (
        TEXT,
        tuple(text(t) for t in (b"yarn", b"longrope", b"none", b"x", b"", b"\xff")),
    ),
    "{}.rope.dimension_sections": (LIST, (listed(I32, [packed(I32, 1 << 30)] * 4),)),
    "general.alignment": (U32, tuple(packed(U32, n) for n in (0, 1, 2, 3, 8, 16, 48, 64, 1 << 31))),
    "general.type": (TEXT, tuple(text(t) for t in _OTHER_TEXTS[b"general.type"])),
    "general.file_type": (U32, tuple(packed(U32, n) for n in (0, 1, 99, 1024, (1 << 32) - 1))),
    "general.quantization_version": (U32, (packed(U32, 0), packed(U32, 99))),
    "split.count": (U16, tuple(packed(U16, n) for n in (0, 1, 2, 65535))),
    "split.no": (U16, (packed(U16, 0), packed(U16, 1), packed(U16, 65535))),
    "split.tensors.count": (I32, (packed(I32, 0), packed(I32, -1), packed(I32, 1 << 30))),
    "tokenizer.ggml.merges": (
        LIST,
        (texts(b"a b"), texts(b"ab"), texts(b""), texts(b" "), texts(b"a b c"), texts(b"x" * 99)),
    ),
    "tokenizer.ggml.precompiled_charsmap": (
        LIST,
        tuple(
            listed(U8, [b[i : i + 1] for i in range(len(b))])
            for b in (b"", b"\0", b"\xff" * 4, b"\xff" * 64, bytes(64), b"\x08\0\0\0" + b"\xff" * 8)
        ),
    ),
    "tokenizer.ggml.suppress_tokens": (
        LIST,
        tuple(listed(I32, [packed(I32, n)]) for n in (0, -1, 1 << 20, (1 << 31) - 1)),
    ),
    "tokenizer.ggml.eog_token_ids": (
        LIST,
        tuple(listed(I32, [packed(I32, n)]) for n in (0, -1, 1 << 20, (1 << 31) - 1)),
    ),
    **{
        f"tokenizer.ggml.{name}": (BOOL, (b"\0", b"\1", b"\2", b"\xff"))
        for name in (
            *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"),
            *("remove_extra_whitespaces", "escape_whitespaces", "normalizer.lowercase"),
        )
    },
    "tokenizer.ggml.token_type_count": (U32, (packed(U32, 0), packed(U32, (1 << 32) - 1))),
    "tokenizer.chat_template.tool_use": (TEXT, (text(b""), text(b"{{"))),
    "tokenizer.huggingface.json": (TEXT, (text(b""), text(b"{"))),
    "general.sampling.temp": (F32, tuple(packed(F32, n) for n in NUMBERS)),
    "general.sampling.top_k": (I32, (packed(I32, -(1 << 31)), packed(I32, (1 << 31) - 1))),
    "general.sampling.sequence": (TEXT, (text(b""), text(b"\xff"), text(b"x" * 5000))),
    "general.sampling.penalty_last_n": (I32, (packed(I32, -2), packed(I32, (1 << 31) - 1))),
    "": (U32, (packed(U32, 1),)),
    "x" * 65536: (U32, (packed(U32, 1),)),
}
_BAD_TEXTS = {
    "empty": b"",
    "one letter": b"x",
    "invalid UTF-8": b"\xff\xfe\x80",
    "NUL": b"a\0b",
    "long": b"x" * 100_000,
    "braces": b"%s%n{}",
}


def _shown(value: object) -> str:
    return repr(value) if len(repr(value)) < 40 else f"{repr(value)[:37]}…"


def _retyped(kind: int) -> Iterator[tuple[str, int, bytes]]:
    for other in CODES:
        if other != kind:
            for value in (0, 1, 7):
                yield f"type {other}, {value}", other, packed(other, value)
    for name, found in (
        ("no texts", texts()),
        ("texts", texts(b"a", b"b")),
        ("lists", listed(LIST, [listed(U32, [packed(U32, 1)])])),
        ("no item of type 99", listed(99, [])),
        ("too many items", listed(U32, [], (1 << 62) + 1)),
        ("a huge text", struct.pack("<Q", (1 << 64) - 1)),
        *((f"list of {k}", listed(k, [packed(k, 1)] * 3)) for k in CODES),
        *((f"empty list of {k}", listed(k, [])) for k in CODES),
    ):
        yield name, TEXT if name == "a huge text" else LIST, found
    if kind != TEXT:
        yield "a text", TEXT, text(b"x")
        yield "an empty text", TEXT, text(b"")
    yield "unknown type", 13, b""
    yield "negative type", (1 << 32) - 1, b""


def _values(entry: Entry) -> Iterator[tuple[str, int, bytes]]:
    """Yield other values of an entry: a name, the type and the bytes."""
    kind = entry.kind
    yield from _retyped(kind)
    if kind in EDGES:
        (old,) = struct.unpack("<" + CODES[kind], entry.value)
        wide = range(*{U32: (0, 1 << 32), I32: (-(1 << 31), 1 << 31)}.get(kind, (0, 256)))
        near = (old - 1, old + 1, 2 * old, old // 2, 5, 7, 100, 513, 1000, 65_536, 1 << 20, 1 << 30)
        for value in dict.fromkeys((*EDGES[kind], *near, *((1 << 31) - 1, 1 << 31))):
            if value in wide or value in EDGES[kind]:
                yield str(value), kind, packed(kind, value)
    elif kind in FLOATS:
        for number in NUMBERS:
            yield str(number), kind, packed(kind, number)
    elif kind == BOOL:
        for byte in (b"\0", b"\1", b"\2", b"\xff"):
            yield str(byte[0]), kind, byte
    elif kind == TEXT:
        for name, value in _BAD_TEXTS.items():
            yield name, kind, text(value)
        for value in _OTHER_TEXTS.get(entry.key, ()):
            yield _shown(value), kind, text(value)
    elif kind == LIST:
        yield from _lists(entry)


def _lists(entry: Entry) -> Iterator[tuple[str, int, bytes]]:
    kind, items = entry.items()
    count = len(items)

    def made(
        name: str, found: Iterable[bytes], claimed: int | None = None
    ) -> tuple[str, int, bytes]:
        return name, LIST, listed(kind, found, claimed)

    yield made("one item less", items[:-1])
    yield made("one item more", [*items, items[0]])
    yield made("one item", items[:1])
    yield made("half", items[: count // 2])
    yield made("twice", items * 2)
    yield made("reversed", items[::-1])
    for claimed in (0, count - 1, count + 1, 1 << 20, 1 << 31, 1 << 40, (1 << 64) - 1):
        yield made(f"claims {claimed} items", items, claimed)
    if kind == TEXT:
        for name, bad in _BAD_TEXTS.items():
            for place in (0, 3, count // 2, count - 1):
                if place < count:
                    yield made(
                        f"{name} at {place}", [*items[:place], text(bad), *items[place + 1 :]]
                    )
            yield made(f"all {name}", [text(bad)] * count)
        for first, second in ((0, 1), (3, 4), (count // 2, count - 1), (1, count - 1)):
            if max(first, second) < count:
                same = [items[first] if i == second else item for i, item in enumerate(items)]
                yield made(f"{first} and {second} equal", same)
        for removed in (b"<0x0A>", b"<unk>", b"\xc4\x8a", b"\n", b"<|im_end|>", b"<s>"):
            found = [text(b"gone") if item == text(removed) else item for item in items]
            if found != items:
                yield made(f"without {_shown(removed)}", found)
    else:
        edges: tuple[float, ...] = NUMBERS if kind in FLOATS else EDGES.get(kind, (0, 1))
        for value in dict.fromkeys((*edges, *(range(11) if kind == I32 else ()))):
            yield made(f"all {value}", [packed(kind, value)] * count)
            for place in (0, 1, count - 1):
                edge = packed(kind, value)
                yield made(f"{value} at {place}", [*items[:place], edge, *items[place + 1 :]])
    for other in CODES:
        if other != kind:
            yield f"items of type {other}", LIST, listed(other, [packed(other, 1)] * count)


def _of_entries(header: Header, keys: Iterable[Entry]) -> Iterator[tuple[str, Header]]:
    entries = header.entries
    for entry in keys:
        key, place = entry.key.decode(), entries.index(entry)
        before, after = entries[:place], entries[place + 1 :]
        yield f"{key} missing", replace(header, entries=before + after)
        yield f"{key} twice", replace(header, entries=(*before, entry, entry, *after))
        for name, bad in _BAD_TEXTS.items():
            renamed = entry._replace(key=bad)
            yield f"{key} named {name}", replace(header, entries=(*before, renamed, *after))
        for name, kind, value in _values(entry):
            changed = Entry(entry.key, kind, value)
            yield f"{key}: {name}", replace(header, entries=(*before, changed, *after))


def _added(header: Header) -> Iterator[tuple[str, Header]]:
    """Yield the header with entries that it lacks."""
    present = {e.key.decode() for e in header.entries}
    architecture = header.entry("general.architecture").value[8:].decode()
    size = len(header.entry("tokenizer.ggml.tokens").items()[1])
    for name in _SPECIAL:
        key = f"tokenizer.ggml.{name}_token_id"
        for number in (0, size - 1, size, size + 1, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
            yield f"{key}: {number}", header.with_entry(key, U32, packed(U32, number))
    for name in _ADDED_KEYS:
        key = f"{architecture}.{name}"
        for number in (0, 1, 2, 3, 8, 513, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
            if key not in present:
                yield f"{key}: {number}", header.with_entry(key, U32, packed(U32, number))
        for value in (0.0, -1.0, float("nan"), float("inf"), 1e-45):
            yield f"{key}: {value}", header.with_entry(key, F32, packed(F32, value))
        for count in (0, 1, 3, 6, 600):
            for item in (0, 1, (1 << 32) - 1):
                items = listed(U32, [packed(U32, item)] * count)
                yield f"{key}: {count} times {item}", header.with_entry(key, LIST, items)
        yield f"{key}: true", header.with_entry(key, BOOL, b"\1")
    for form, (kind, found) in _RARE.items():
        key = form.format(architecture)
        for number, data in enumerate(found):
            shown: object = data[12:40] if kind == LIST else data
            if kind == TEXT:
                shown = data[8:].decode("utf-8", "replace")
            elif kind in CODES:
                (shown,) = struct.unpack("<" + CODES[kind], data)
            made = header.with_entry(key, kind, data)
            yield f"{key[:60]}: {_shown(shown)}{f' ({number})' * (kind == LIST)}", made


_SIZES = (0, 1, 2, 3, 31, 32, 33, 1 << 20, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)
_KINDS = (*range(45), 100, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def _of_tensors(header: Header) -> Iterator[tuple[str, Header]]:
    tensors = header.tensors
    chosen = [t for t in tensors if not t.name.startswith((b"blk.1", b"blk.2", b"blk.3", b"blk.4"))]
    for tensor in chosen:
        name, place = tensor.name.decode(), tensors.index(tensor)

        def made(
            *found: Tensor, before: tuple[Tensor, ...] = tensors[:place],
            after: tuple[Tensor, ...] = tensors[place + 1 :],
        ) -> Header:  # fmt: skip
            return replace(header, tensors=(*before, *found, *after))

        yield f"{name} missing", made()
        yield f"{name} twice", made(tensor, tensor)
        for label, bad in (*_BAD_TEXTS.items(), ("64 letters", b"x" * 64), ("63", b"x" * 63)):
            yield f"{name} named {label}", made(tensor._replace(name=bad))
        yield f"{name} named as another", made(tensor._replace(name=tensors[place - 1].name))
        for axis, old in enumerate(tensor.shape):
            for size in dict.fromkeys((*_SIZES, old - 1, old + 1, old // 2, old * 2)):
                shape = (*tensor.shape[:axis], max(0, size), *tensor.shape[axis + 1 :])
                yield f"{name}: {shape}", made(tensor._replace(shape=shape))
        shapes = (
            *((), tensor.shape[:1], tensor.shape[::-1], (*tensor.shape, 1), (*tensor.shape, 2)),
            *((1, 1, 1, 1), (1, 1, 1, 1, 1), (*tensor.shape, 0), (1 << 32, 1 << 32), (0, 0, 0, 0)),
            *((1 << 62, 4), (1 << 31, 1 << 31, 4), (1 << 16,) * 4, ((1 << 63) - 1, 1)),
        )
        for shape in dict.fromkeys(shapes):
            yield f"{name}: {shape}", made(tensor._replace(shape=shape))
        for count in (0, 1, 3, 4, 5, (1 << 32) - 1):
            yield f"{name}: claims {count} axes", made(tensor._replace(dimensions=count))
        for kind in _KINDS:
            yield f"{name}: type {kind}", made(tensor._replace(kind=kind))
        for begin in (1, 4, 32, 1 << 20, 1 << 62, (1 << 63) - 32, 1 << 63, (1 << 64) - 32):
            yield f"{name} at {begin}", made(tensor._replace(begin=begin))
            yield (
                f"{name} at +{begin}",
                made(tensor._replace(begin=(tensor.begin + begin) % (1 << 64))),
            )
    yield "no tensors", replace(header, tensors=())
    yield "tensors reversed", replace(header, tensors=tensors[::-1])
    yield "no entries", replace(header, entries=())
    yield "no entries and tensors", replace(header, entries=(), tensors=())
    for number, change in enumerate((-1, 1, 1 << 16, 1 << 31, 1 << 62, 1 << 63)):
        counts = len(tensors), len(header.entries)
        for which in (0, 1):
            claimed = tuple((c + change * (i == which)) % (1 << 64) for i, c in enumerate(counts))
            yield (
                f"counts {number} {which}",
                replace(header, counts=(claimed[0], claimed[1])),
            )
    for version in (0, 1, 2, 4, 3 << 24, (1 << 32) - 1):
        yield f"version {version}", replace(header, version=version)
    for alignment in (1, 8, 64):
        yield f"data aligned to {alignment}", replace(header, alignment=alignment)


def _cut_off(header: Header) -> Iterator[Variant]:
    whole, end = header.to_bytes(), len(header.begin())
    ends = [0, 3, 4, 8, 16, end]
    for part in (*(e.packed for e in header.entries), *(t.packed for t in header.tensors)):
        ends += [end + 4, end + len(part)]
        end += len(part)
    for end in (*ends, len(whole) - len(header.data) + 1, len(whole) - 32, len(whole) - 1):
        yield Variant(f"cut off at {end}", header, end, None)
    yield Variant("with more behind it", header, len(whole), b"\xff" * 100)


def _garbled(header: Header, seed: str) -> Iterator[Variant]:
    """Yield the file with bytes of its header overwritten at random places."""
    source, size = random.Random(seed), len(header.to_bytes()) - len(header.data)
    for number in range(GARBLED):
        place, length = source.randrange(4, size), source.choice((1, 1, 1, 2, 4, 8, 16))
        part = source.choice((bytes(length), b"\xff" * length, source.randbytes(length)))
        yield Variant(f"garbled {number}: {part.hex()} at {place}", header, place, part)


def _of_vocabulary(header: Header) -> Iterator[tuple[str, Header]]:
    yield "unchanged", header
    for name in ("bos", "eos"):
        kept = (e for e in header.entries if e.key != f"tokenizer.ggml.{name}_token_id".encode())
        lacking = replace(header, entries=tuple(kept))
        key = f"tokenizer.ggml.add_{name}_token"
        yield f"{key} without the token", lacking.with_entry(key, BOOL, b"\1")
    keys = (e for e in header.entries if e.key.startswith(_OF_VOCABULARY))
    for name, found in (*_of_entries(header, keys), *_added(header)):
        if "tokenizer.ggml" in name:
            yield name, found


GARBLED = 300
"""Files of each model with random bytes in their header."""


def _variants_of(label: str, header: Header) -> Iterator[Variant]:
    if label in VOCABULARIES:
        for name, found in _of_vocabulary(header):
            yield Variant(f"{label} {name}", found)
    else:
        fields = (("unchanged", header), *_of_entries(header, header.entries), *_added(header))
        for name, found in (*fields, *_of_tensors(header)):
            yield Variant(f"{label} {name}", found)
        for variant in _cut_off(header):
            yield variant._replace(name=f"{label} {variant.name}")
    for variant in _garbled(header, label):
        yield variant._replace(name=f"{label} {variant.name}")


def headers(directory: Path) -> dict[str, Header]:
    """Return the unchanged headers by name: of the tiny models, and with other vocabularies."""
    found = {kind: read(write_tiny(kind, directory)) for kind in MODELS}
    return found | {name: change(found["llama"]) for name, change in VOCABULARIES.items()}


def all_variants(directory: Path) -> list[Variant]:
    """Return the variants of all models, which are written into *directory*."""
    found = headers(directory).items()
    variants = (variant for label, header in found for variant in _variants_of(label, header))
    return list({variant.name: variant for variant in variants}.values())


FINDINGS = {
    "llama tokenizer.ggml.tokens: 3 and 4 equal": "tokenizer.ggml.tokens",
    "wpm tokenizer.ggml.tokens: 129 and 258 equal": "tokenizer.ggml.tokens",
    "bpe tokenizer.ggml.tokens: all NUL": "tokenizer.ggml.tokens",
    "wpm tokenizer.ggml.token_type: 6 at 0": "tokenizer.ggml.token_type",
    "ugm tokenizer.ggml.add_bos_token without the token": "tokenizer.ggml.bos_token_id",
    "llama llama.block_count: 0": "llama.block_count",
    "calls llama.block_count: 513": "llama.block_count",
    "llama llama.nextn_predict_layers: 513": "llama.nextn_predict_layers",
    "lfm2 lfm2.expert_count: 1048576": "lfm2.expert_count",
    "bert bert.expert_count: 513": "bert.expert_used_count",
    "bert bert.expert_used_count: 513": "bert.expert_used_count",
    "bert-rank bert.expert_used_count: 1 times 4294967295": "bert.expert_used_count",
    "mamba mamba.expert_group_count: 1": "mamba.expert_group_count",
    "lfm2 lfm2.rope.scaling.type: 'x'": "lfm2.rope.scaling.type",
    "llama llama.attention.layer_norm_rms_epsilon: nan": "attention.layer_norm_rms_epsilon",
    "gemma3 gemma3.rope.dimension_count: 65536": "gemma3.rope.dimension_count",
    "gemma3 gemma3.rope.dimension_count_swa: 2147483647": "gemma3.rope.dimension_count_swa",
    "lfm2 lfm2.rope.dimension_count: 5": "lfm2.rope.dimension_count",
    "lfm2 lfm2.attention.head_count: 8": "lfm2.attention.head_count",
    "bert bert.attention.key_length: 2": "bert.attention.key_length",
    "gemma3 gemma3.attention.sliding_window: 1073741824": "gemma3.attention.sliding_window",
    "gemma3 gemma3.attention.sliding_window_pattern: 0 times 0": "sliding_window_pattern",
    "ugm tokenizer.ggml.tokens: long at 3": "tokenizer.ggml.tokens",
    "ugm tokenizer.ggml.precompiled_charsmap: 2 at 1": "precompiled_charsmap",
    "mamba general.alignment: 1": "general.alignment",
    "bert blk.0.layer_output_norm.bias: type 30": "'blk.0.layer_output_norm.bias'",
    "gemma3 blk.0.ffn_up.weight: type 26": "'blk.0.ffn_up.weight'",
    "t5 dec.blk.1.ffn_down.weight: type 9": "'dec.blk.1.ffn_down.weight'",
    "t5 t5.context_length: 0": "t5.context_length",
    "t5 t5.embedding_length_out: 1048576": "t5.embedding_length_out",
    "lfm2 tokenizer.ggml.tokens: all empty": "no token for the character",
    "llama tokenizer.ggml.tokens: without b'<0x0A>'": "no token for the character",
}
"""Variants that have ended llama.cpp's process, and a part of the present error for each."""


def chosen_variants(directory: Path, count: int, seed: int = 1) -> list[Variant]:
    """Return the findings and *count* of all variants, the same for each *seed*; 0: all."""
    found = all_variants(directory)
    if not count:
        return found
    chosen = random.Random(seed).sample(found, min(count, len(found)))
    return [v for v in found if v.name in FINDINGS] + [v for v in chosen if v.name not in FINDINGS]
