"""Model files with one changed field: each is refused by a typed error, or loaded.

`INFERD_TESTS_FACTOR=10` loads 2000 of them. `python -m tools.mutated_models` loads all 66 000.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import inferd
from inferd.backends import ModelSpec
from inferd.backends.errors import InvalidArgument, LoadFailed
from inferd.backends.gguf.header import TensorEntry
from inferd.backends.llama.loading.field_check import (
    BYTES_MAX,
    bad_place,
    bad_tensor,
    bad_value,
    bad_vocabulary,
    is_charsmap_usable,
)
from inferd.backends.llama.loading.gguf_check import open_model_file, read_gguf
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.text.vocab import Spelling
from inferd.testing import running_daemon
from tests.backends.llama.mutated_files import (
    F32,
    FINDINGS,
    LIST,
    TEXT,
    U32,
    Header,
    chosen_variants,
    packed,
    read,
    texts,
)
from tests.backends.llama.mutated_loads import Outcome
from tests.models import smollm2
from tests.repetitions import repetitions
from tests.tiny_gguf import write_tiny

COUNT = 200
PARTS = 2


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Return how the loads of variants have ended, each in a process of its own."""
    command = [sys.executable, "-m", "tools.mutated_models", "--json"]
    command += ["--count", str(repetitions(COUNT))]
    running = [
        subprocess.Popen([*command, "--part", f"{number}/{PARTS}"], stdout=subprocess.PIPE)
        for number in range(PARTS)
    ]
    lines = [line for process in running for line in process.communicate()[0].splitlines()]
    assert not any(process.returncode for process in running)
    found = (Outcome(*json.loads(line)) for line in lines)
    return {outcome.name: outcome for outcome in found}


@pytest.mark.process
def test_no_changed_file_ends_its_process(outcomes: dict[str, Outcome]) -> None:
    assert [outcome for outcome in outcomes.values() if outcome.is_finding] == []
    kinds = Counter(outcome.kind for outcome in outcomes.values())
    assert sum(kinds.values()) >= COUNT
    for kind in ("refused", "failed", "loaded"):
        assert kinds[kind] > COUNT / 20, kinds


@pytest.mark.process
@pytest.mark.parametrize("name", FINDINGS)
def test_a_file_that_has_ended_a_process_is_refused(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    """The error names the field and its value."""
    outcome = outcomes[name]
    assert outcome.kind in ("refused", "failed")
    assert FINDINGS[name] in outcome.detail and "llama.cpp" not in outcome.detail


# The decisions, without a file.

PLAIN = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.rope.dimension_count": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
LATENT = {  # keys and values of different lengths, of which RoPE rotates a part
    "general.architecture": "deepseek2",
    "deepseek2.block_count": 60,
    "deepseek2.embedding_length": 5120,
    "deepseek2.attention.head_count": 128,
    "deepseek2.attention.key_length": 192,
    "deepseek2.attention.value_length": 128,
    "deepseek2.rope.dimension_count": 64,
    "deepseek2.expert_count": 160,
    "deepseek2.expert_used_count": 6,
    "deepseek2.expert_group_count": 8,
    "deepseek2.expert_group_used_count": 3,
}


@pytest.mark.parametrize(
    ("values", "lists"),
    [
        (PLAIN, {}),
        (LATENT, {}),
        ({}, {}),
        ({"general.architecture": "llama"}, {}),
        (PLAIN | {"llama.block_count": 512}, {}),
        (PLAIN | {"llama.expert_count": 8}, {"llama.expert_used_count": (2, 2)}),
        (PLAIN, {"llama.attention.head_count": (0, 4)}),
        (PLAIN | {"llama.attention.key_length": "16"}, {}),
        ({"general.architecture": "hunyuan-dense", "hunyuan-dense.expert_count": 1}, {}),
        (PLAIN | {"llama.rope.scaling.type": "yarn"}, {}),
    ],
)
def test_values_of_working_models_are_not_refused(
    values: dict[str, object], lists: dict[str, tuple[int, ...]]
) -> None:
    assert bad_value(values, lists, {}) is None


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"llama.block_count": 0}, "llama.block_count"),
        ({"llama.block_count": 513}, "llama.block_count"),
        ({"llama.block_count": -1}, "llama.block_count"),
        ({"llama.nextn_predict_layers": 3}, "llama.nextn_predict_layers"),
        ({"llama.expert_count": 1025, "llama.expert_used_count": 1}, "llama.expert_count"),
        ({"llama.expert_count": 8}, "llama.expert_used_count"),
        ({"llama.expert_used_count": 1}, "llama.expert_used_count"),
        ({"llama.rope.scaling.type": "x"}, "llama.rope.scaling.type"),
        ({"llama.attention.sliding_window": (1 << 24) + 1}, "llama.attention.sliding_window"),
        (
            {"llama.attention.sliding_window": 64, "llama.attention.sliding_window_pattern": 1},
            "llama.attention.sliding_window_pattern",
        ),
        ({"llama.rope.dimension_count": 18}, "llama.rope.dimension_count"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
        (
            {"llama.attention.layer_norm_epsilon": float("nan")},
            "llama.attention.layer_norm_epsilon",
        ),
    ],
)
def test_a_value_that_llama_cpp_asserts_is_refused_by_its_key(
    changed: dict[str, object], key: str
) -> None:
    bad = bad_value(PLAIN | changed, {}, {})
    assert bad is not None and bad.key == key
    assert str(bad).startswith(f"{key} is ")


@pytest.mark.parametrize(("groups", "used"), [(160, 3), (7, 3), (8, 0), (8, 8)])
def test_groups_that_do_not_divide_the_experts_are_refused(groups: int, used: int) -> None:
    changed = {
        "deepseek2.expert_group_count": groups,
        "deepseek2.expert_group_used_count": used,
    }
    bad = bad_value(LATENT | changed, {}, {})
    assert bad is not None and bad.key in changed


def test_names_of_tokens_are_compared_as_llama_cpp_reads_them() -> None:
    def found(*names: bytes) -> str | None:
        bad = bad_vocabulary("llama", lambda: names, len(names), ())
        return None if bad is None else str(bad.rule)

    assert found() is found(b"a", b"b", b"") is None
    assert found(b"a", b"", b"") is None, "each empty name gets a name of its own"
    for names in ((b"a", b"b", b"a"), (b"x", b"a", b"a\0b"), (b"y", b"[EMPTY_2]", b"")):
        rule = found(*names)
        assert rule is not None and "have the same" in rule


def test_only_vectors_of_f32_and_weights_of_other_types_than_integers_are_used() -> None:
    def bad(kind: int, *shape: int, name: str = "w") -> bool:
        return bad_tensor({name: TensorEntry(kind, shape, 0)}) is not None

    assert not bad(0, 64) and not bad(1, 64, 2) and not bad(2, 64, 2)
    assert bad(1, 64) and bad(26, 64, 2) and bad(28, 64, 2)
    assert not bad(27, 64, name="d2t")


def test_the_first_tensor_is_at_a_place_that_can_be_mapped() -> None:
    tensors = {"a": TensorEntry(0, (1,), 64), "b": TensorEntry(0, (1,), 8)}
    assert bad_place(24, 8, tensors) is None
    bad = bad_place(32, 8, tensors)
    assert bad is not None and "at byte 40" in bad.rule


def charsmap(entries: dict[int, int], replacements: bytes) -> bytes:
    """Return a map with 512 entries, of which only these are not empty."""
    packed = struct.pack("<512I", *(entries.get(index, 0) for index in range(512)))
    return struct.pack("<I", len(packed)) + packed + replacements


def test_a_map_of_characters_leads_out_of_itself_at_no_text() -> None:
    base, leaf, to = 256, 1 << 8, 10  # of the root; a bit; the place of an entry's base
    root, child = base << to, ord("a") | leaf | (1 << to)
    at_child, at_value = base ^ ord("a"), base ^ ord("a") ^ 1
    entries = {0: root, at_child: child, at_value: 1 << 31 | 2}
    assert is_charsmap_usable(charsmap(entries, b"x\0y\0"))
    for changed, replacements in (
        ({0: 512 << to}, b"x\0y\0"),
        ({at_child: ord("a") | 512 << to}, b"x\0y\0"),
        ({at_value: 1 << 31 | 4}, b"x\0y\0"),
        ({}, b"x\0y"),
        ({}, b"x"),
    ):
        assert not is_charsmap_usable(charsmap(entries | changed, replacements))
    for short in (b"", b"\0", b"\xff" * 9, charsmap(entries, b"")):
        assert is_charsmap_usable(short), "llama.cpp refuses it"
    assert not is_charsmap_usable(bytes(BYTES_MAX + 1)), "it would take too long to check"


def test_characters_that_a_vocabulary_cannot_spell() -> None:
    whole = Spelling(b"<0x%02X>" % byte for byte in range(256))
    assert whole.is_complete
    some = Spelling([b"<0xC3>", b"<0xA9>", b"a", "\u2581".encode(), "\u2581b".encode()])
    assert not some.is_complete
    assert some.first_lacking("a \u00e9a") == ""
    assert some.first_lacking("a b") == "b"
    assert some.first_lacking("\u00e8") == "\u00e8"
    assert Spelling([b"a"]).first_lacking("a a") == " "


# Loads.


@pytest.fixture(scope="module")
def without_newline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant_file(
        "llama tokenizer.ggml.tokens: without b'<0x0A>'", tmp_path_factory.mktemp("newline")
    )


def variant_file(name: str, folder: Path) -> Path:
    """Write the variant of this name, one of `FINDINGS`."""
    variant = next(v for v in chosen_variants(folder, 1) if v.name == name)
    path = folder / "variant.gguf"
    path.write_bytes(variant.to_bytes())
    return path


def test_an_option_that_overrides_a_value_is_checked(tmp_path: Path) -> None:
    options: dict[str, Any] = {"override-kv": ["llama.block_count=int:513"]}
    spec = ModelSpec(name="tiny", path=str(write_tiny("llama", tmp_path)), options=options)
    with pytest.raises(LoadFailed, match="block_count is 513") as caught:
        load_llama(spec, lambda _: True)
    assert "override-kv" in caught.value.hint
    assert caught.value.data == {"key": "llama.block_count", "value": "513"}


def test_a_text_with_a_character_without_tokens_is_refused(without_newline: Path) -> None:
    spec = ModelSpec(name="tiny", path=str(without_newline), ctx_size=256)
    model = load_llama(spec, lambda _: True)
    assert model.tokenize(b"abc", special=True, bos=True)
    with pytest.raises(InvalidArgument, match="the character") as caught:
        model.tokenize(b"a\nb", special=True, bos=True)
    assert caught.value.data == {"character": "\n"} and caught.value.hint
    model.close()


@pytest.fixture(scope="module")
def real() -> Header:
    """Return the header of a real model, whose weights are left out."""
    return replace(read(smollm2()), data=b"")


def real_file(header: Header, path: Path) -> Path:
    """Write a file whose weights are a hole: zeros that take no place on the disk."""
    path.write_bytes(header.to_bytes())
    os.truncate(path, smollm2().stat().st_size + (1 << 20))
    return path


@pytest.mark.model
@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("llama.block_count", U32, 513),
        ("llama.expert_used_count", U32, 2),
        ("llama.rope.dimension_count", U32, 62),
        ("llama.attention.layer_norm_rms_epsilon", F32, -1.0),
        ("llama.rope.scaling.type", TEXT, b"yarn2"),
    ],
)
def test_a_real_model_with_a_changed_field_is_refused(
    key: str, kind: int, value: object, real: Header, tmp_path: Path
) -> None:
    path = real_file(real.with_entry(key, kind, packed(kind, value)), tmp_path / "real.gguf")
    with pytest.raises(LoadFailed) as caught:
        load_llama(ModelSpec(name="real", path=str(path)), lambda _: True)
    assert caught.value.data["key"] == key


@pytest.mark.model
def test_a_real_vocabulary_in_which_one_of_49_000_tokens_occurs_twice(
    real: Header, tmp_path: Path
) -> None:
    _, tokens = real.entry("tokenizer.ggml.tokens").items()
    names = [token[8:] for token in tokens]
    for changed, fits in ((names, True), ([*names[:-1], names[123]], False)):
        header = real.with_entry("tokenizer.ggml.tokens", LIST, texts(*changed))
        path = real_file(header, tmp_path / "real.gguf")
        with open_model_file(str(path)) as fd:
            if fits:
                read_gguf(fd, path.name)
                continue
            with pytest.raises(LoadFailed, match=f"but 123 and {len(names) - 1} have the same"):
                read_gguf(fd, path.name)


@pytest.mark.process
def test_a_client_reads_which_field_is_bad_and_no_worker_ends(
    tmp_path: Path, without_newline: Path
) -> None:
    bad = variant_file("llama tokenizer.ggml.tokens: 3 and 4 equal", tmp_path)
    config = f'[models.bad]\nfile = "{bad}"\n[models.odd]\nfile = "{without_newline}"\n'
    with running_daemon(config) as daemon, inferd.Client(daemon.socket) as client:
        with pytest.raises(LoadFailed, match="but 3 and 4 have the same") as caught:
            client.load_by_name("bad")
        assert caught.value.data["key"] == "tokenizer.ggml.tokens"
        assert "cause" not in caught.value.data, "its worker has not died"
        with client.session("odd", raw=True) as session:
            with pytest.raises(InvalidArgument, match="the character"):
                session.chat("a\nb", options={"n-predict": 2})
            assert session.chat("ab", options={"n-predict": 2}) is not None
