"""Facts in the headers of projectors, and their comparison with language models."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest
from llama_cpp import mtmd_cpp
from msgspec.structs import replace

from inferd.backends.gguf import projector as module
from inferd.backends.gguf.header import DamagedHeader, GgufHeader, TensorEntry
from inferd.backends.gguf.projector import (
    TextSide,
    projector_mismatch,
    projector_of,
    read_projector,
    read_text_side,
)
from tests.tiny_gguf import EMBEDDING, write_tiny
from tests.tiny_projector import KINDS, TEXT_MODELS, write_pair, write_projector


def header(kind: str, **tensors: tuple[int, ...]) -> GgufHeader:
    """Return the header of a projector of *kind* with *tensors*, whose names have __ for dots."""
    values: dict[str, object] = {
        "general.architecture": "clip",
        "clip.projector_type": kind,
        "clip.has_vision_encoder": True,
        "clip.vision.image_size": 224,
        "clip.vision.patch_size": 14,
    }
    found = {n.replace("__", "."): TensorEntry(0, shape, 0) for n, shape in tensors.items()}
    return GgufHeader(values=values, tensors=found)


@pytest.mark.parametrize("kind", KINDS)
def test_each_tiny_projector_fits_its_model(kind: str, tmp_path: Path) -> None:
    model, file = write_pair(kind, tmp_path)
    found = read_projector(file)
    assert (found.kind, found.width) == (kind, EMBEDDING)
    assert (found.images, found.sounds) == (kind != "ultravox", kind == "ultravox")
    assert bool(found.patch_size) == found.images
    assert 0.9 * file.stat().st_size < found.weights_bytes < file.stat().st_size
    assert projector_mismatch(found, read_text_side(model)) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_another_width_is_refused_with_both_sides(kind: str, tmp_path: Path) -> None:
    found = read_projector(write_projector(kind, tmp_path, width=96))
    reason = projector_mismatch(found, read_text_side(write_tiny(TEXT_MODELS[kind], tmp_path)))
    assert "96" in reason and str(EMBEDDING) in reason and kind in reason


@pytest.mark.parametrize(
    ("kind", "model", "token"),
    [
        ("gemma3", "gemma3", "<start_of_image>"),
        ("idefics3", "llama", "<fake_token_around_image>"),
        ("qwen2vl_merger", "llama", "<|vision_start|>"),
    ],
)
def test_missing_tokens_are_named(kind: str, model: str, token: str, tmp_path: Path) -> None:
    found = read_projector(write_projector(kind, tmp_path))
    reason = projector_mismatch(found, read_text_side(write_tiny(model, tmp_path)))
    assert token in reason and "lacks" in reason


def test_line_breaks_have_several_spellings(tmp_path: Path) -> None:
    found = read_projector(write_projector("idefics3", tmp_path))
    text = read_text_side(write_tiny("llama-tiles", tmp_path))
    assert {"<0x0A>", "\n\n"} < text.tokens
    for spelling in ("Ċ", "\n"):
        other = replace(text, tokens=(text.tokens - {"<0x0A>"}) | {spelling})
        assert projector_mismatch(found, other) == ""
    assert "'\\n'" in projector_mismatch(found, replace(text, tokens=text.tokens - {"<0x0A>"}))


def test_layers_that_get_a_part_of_an_embedding_count(tmp_path: Path) -> None:
    tensors = {"mm__2__bias": (2048,)}
    plain = projector_of(header("qwen3vl_merger", **tensors))
    deep = {f"v__deepstack__{layer}__fc1__weight": (8, 8) for layer in (5, 11, 17)}
    found = projector_of(header("qwen3vl_merger", **tensors, **deep))
    assert (plain.width, found.width) == (2048, 4 * 2048)
    path = tmp_path / "deep.gguf"
    writer = gguf.GGUFWriter(path, "qwen3vl")
    writer.add_embedding_length(2048)
    writer.add_uint32("qwen3vl.n_deepstack_layers", 3)
    writer.add_token_list(["<|vision_start|>", "a", "<|vision_end|>"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    text = read_text_side(path)
    assert text == TextSide(
        architecture="qwen3vl",
        width=8192,
        tokens=frozenset(("<|vision_start|>", "<|vision_end|>")),
    )
    assert projector_mismatch(found, text) == ""


def test_both_media_must_have_one_width() -> None:
    found = header("qwen2.5o", mm__2__bias=(3584,), mm__a__fc__weight=(1280, 3584))
    found.values["clip.has_audio_encoder"] = True
    both = projector_of(found)
    assert (both.images, both.sounds, both.width) == (True, True, 3584)
    assert ("<|audio_bos|>",) in both.tokens and ("<|vision_start|>",) in both.tokens
    found.tensors["mm.a.fc.weight"] = TensorEntry(0, (1280, 2048), 0)
    with pytest.raises(DamagedHeader, match=r"3584.*2048"):
        projector_of(found)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (header("mlp"), "lacks the tensor"),
        (header("unheard-of"), "unknown"),
        (header("hunyuanvl"), "not supported"),
        (header("mlp", mm__2__weight=(64,)), "1 dimensions"),
        (header("mlp", mm__2__weight=(64, 0)), "0 numbers"),
        (header("mlp", mm__2__weight=(64, 1 << 40)), "numbers"),
        (GgufHeader(values={"general.architecture": "clip"}), "neither"),
        (GgufHeader(values={"general.architecture": "llama"}), "not a projector"),
    ],
)
def test_unusable_projectors_are_refused(found: GgufHeader, reason: str) -> None:
    with pytest.raises(DamagedHeader, match=reason):
        projector_of(found)


@pytest.mark.parametrize("value", [0, -1, 1 << 40, "14", None])
def test_sizes_that_llama_cpp_divides_by_are_checked(value: object) -> None:
    found = header("mlp", mm__2__weight=(64, 64))
    found.values["clip.vision.patch_size"] = value
    with pytest.raises(DamagedHeader, match="patch_size"):
        projector_of(found)


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    file = write_projector("mlp", tmp_path)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(DamagedHeader, match="cut off"):
        read_projector(file)


def test_other_files_are_not_projectors(tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("GGUF, but not really")
    with pytest.raises(DamagedHeader):
        read_projector(text)


def test_the_types_are_those_of_the_engine() -> None:
    content = Path(mtmd_cpp._libmtmd._name).read_bytes()
    names = set(module._KINDS) | set(module._BOTH) | set(module._REFUSED)
    assert len(names) == 63  # as many as `PROJECTOR_TYPE_NAMES` has
    assert not [name for name in names if name.encode() not in content]


@pytest.mark.parametrize("alignment", [1 << 40, 1 << 62, 1 << 63])
def test_an_alignment_beyond_the_file_takes_no_memory(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    tokens = [b"a", b"<start_of_image>", b"<end_of_image>"]
    values = [
        (b"general.architecture", 8, struct.pack("<Q", 6) + b"gemma3"),
        (b"general.alignment", 10, struct.pack("<Q", alignment)),
        (b"gemma3.embedding_length", 4, struct.pack("<I", EMBEDDING)),
        (
            b"tokenizer.ggml.tokens",
            9,
            struct.pack("<IQ", 8, len(tokens))
            + b"".join(struct.pack("<Q", len(t)) + t for t in tokens),
        ),
    ]
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for key, kind, value in values:
        data += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
    path.write_bytes(data)

    try:
        side = read_text_side(path)
    except DamagedHeader:
        return
    assert side.width == EMBEDDING and "<start_of_image>" in side.tokens
