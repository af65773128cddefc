"""A writer of projectors with random weights, one for each way in which llama.cpp reads images or
sounds, and of the language models that they belong to.

An image becomes 16 tokens (`mlp`), 16 that see each other (`gemma3`), tiles of 9 tokens with texts
around them (`idefics3`), or one token for each 16 × 16 pixels with positions in a grid
(`qwen2vl_merger`). Each 30 s of a sound become 25 tokens (`ultravox`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from tests.tiny_gguf import EMBEDDING, write_tiny

__all__ = (
    "KINDS",
    "TEXT_MODELS",
    "Size",
    "write_pair",
    "write_projector",
    "write_realistic",
)

TEXT_MODELS = {
    "mlp": "llama",
    "gemma3": "gemma3-images",
    "idefics3": "llama-tiles",
    "qwen2vl_merger": "qwen2vl",
    "ultravox": "llama",
}
"""The tiny language model of each kind of projector."""
KINDS = tuple(TEXT_MODELS)


class Size(NamedTuple):
    """The size of a projector's encoder; its images have a side of *image* pixels."""

    embedding: int = 64
    heads: int = 4
    feed_forward: int = 128
    blocks: int = 2
    image: int = 32
    patch: int = 8
    scale: int = 2
    mels: int = 80
    stack: int = 60


SIZES = {"mlp": Size(), "gemma3": Size(image=64), "idefics3": Size(image=48)}
REALISTIC = {
    "mlp": Size(768, 12, 3072, 14, image=512, patch=32),
    "gemma3": Size(768, 12, 3072, 14, image=512, patch=16),
}
"""Projectors with 100 M weights, which make 256 tokens of an image."""
AUDIO_POSITIONS = 1500
"""The positions of Whisper's encoder, for 30 s."""


def write_pair(kind: str, directory: Path) -> tuple[Path, Path]:
    """Write the projector of *kind* and its language model; return the model's path and the
    projector's.
    """
    return write_tiny(TEXT_MODELS[kind], directory), write_projector(kind, directory)


def write_projector(kind: str, directory: Path, width: int = EMBEDDING) -> Path:
    """Write the tiny projector of *kind* for a language model of *width*, and return its path."""
    path = directory / f"mmproj-tiny-{kind}.gguf"
    _write(path, kind, width, SIZES.get(kind, Size()))
    return path


def write_realistic(
    kind: str,
    directory: Path,
    width: int = 640,
    size: Size | None = None,
    matrices: Any = np.float16,
) -> Path:
    """Write a projector of *kind*, `mlp` or `gemma3`, with 100 M weights or another *size*; return
    its path. A file of this name is kept as it is. 640 is the width of gemma-3-270m, and *matrices*
    the type of the matrices.
    """
    size = size or REALISTIC[kind]
    numbers = "-".join(map(str, size[:6]))
    precision = "" if matrices is np.float16 else "-F32"
    path = directory / f"mmproj-realistic-{kind}-{width}-{numbers}{precision}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        _write(unfinished, kind, width, size, matrices)
        unfinished.rename(path)
    return path


def _write(path: Path, kind: str, width: int, size: Size, matrices: Any = np.float32) -> None:
    writer = _Writer(path, kind, size, matrices)
    if kind == "ultravox":
        _ultravox(writer, width)
    else:
        _vision(writer, kind, width)
    writer.finish()


class _Writer:
    """A GGUF writer that samples its weights from one seeded generator."""

    def __init__(self, path: Path, kind: str, size: Size, matrices: Any):
        self.file = gguf.GGUFWriter(path, "clip")
        self.size = size
        self._matrices = matrices
        self._random = np.random.default_rng(11)
        self.file.add_type("mmproj")
        self.file.add_string("clip.projector_type", kind)
        self.file.add_bool("clip.use_gelu", True)
        self.file.add_file_type(gguf.LlamaFileType.ALL_F32)

    def tensor(self, name: str, *shape: int, scale: float | None = None, kind: Any = None) -> None:
        scale = shape[-1] ** -0.5 if scale is None else scale
        kind = kind or (self._matrices if len(shape) > 1 else np.float32)
        weights = self._random.standard_normal(shape, np.float32) * np.float32(scale)
        self.file.add_tensor(name, weights.astype(kind))

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = True) -> None:
        self.tensor(f"{name}.weight", rows, columns)
        if bias:
            self.tensor(f"{name}.bias", rows, scale=0.1)

    def norm(self, name: str, width: int, *, bias: bool = True) -> None:
        self.file.add_tensor(f"{name}.weight", np.ones(width, np.float32))
        if bias:
            self.tensor(f"{name}.bias", width, scale=0.1)

    def blocks(self, prefix: str, *, key_bias: bool = True) -> None:
        size = self.size
        for index in range(size.blocks):
            block = f"{prefix}.blk.{index}"
            for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
                bias = key_bias or name != "attn_k"
                self.linear(f"{block}.{name}", size.embedding, size.embedding, bias=bias)
            self.norm(f"{block}.ln1", size.embedding)
            self.norm(f"{block}.ln2", size.embedding)
            self.linear(f"{block}.ffn_up", size.feed_forward, size.embedding)
            self.linear(f"{block}.ffn_down", size.embedding, size.feed_forward)

    def sizes(self, prefix: str, width: int) -> None:
        file, size = self.file, self.size
        file.add_uint32(f"{prefix}.embedding_length", size.embedding)
        file.add_uint32(f"{prefix}.feed_forward_length", size.feed_forward)
        file.add_uint32(f"{prefix}.block_count", size.blocks)
        file.add_uint32(f"{prefix}.projection_dim", width)
        file.add_uint32(f"{prefix}.attention.head_count", size.heads)
        file.add_float32(f"{prefix}.attention.layer_norm_epsilon", 1e-5)

    def finish(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def _vision(writer: _Writer, kind: str, width: int) -> None:
    file, size = writer.file, writer.size
    embedding = size.embedding
    file.add_bool("clip.has_vision_encoder", True)
    writer.sizes("clip.vision", width)
    file.add_uint32("clip.vision.image_size", size.image)
    file.add_uint32("clip.vision.patch_size", size.patch)
    file.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    file.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    patch = (embedding, 3, size.patch, size.patch)
    scale = (3 * size.patch * size.patch) ** -0.5
    writer.tensor("v.patch_embd.weight", *patch, scale=scale)
    if kind != "qwen2vl_merger":
        writer.tensor("v.patch_embd.bias", embedding, scale=0.1)
        positions = (size.image // size.patch) ** 2
        writer.tensor("v.position_embd.weight", positions, embedding, scale=0.5, kind=np.float32)
    writer.blocks("v")
    if kind != "mlp":
        writer.norm("v.post_ln", embedding)
    if kind == "mlp":
        writer.linear("mm.0", width, embedding)
        writer.linear("mm.2", width, width)
    elif kind == "gemma3":
        file.add_uint32("clip.vision.projector.scale_factor", size.scale)
        writer.norm("mm.soft_emb_norm", embedding, bias=False)
        writer.tensor(
            "mm.input_projection.weight", embedding, width, scale=embedding**-0.5, kind=np.float32
        )
    elif kind == "idefics3":
        file.add_uint32("clip.vision.projector.scale_factor", size.scale)
        file.add_uint32("clip.vision.preproc_image_size", 2 * size.image)
        writer.linear("mm.model.fc", width, embedding * size.scale**2, bias=False)
    else:
        assert kind == "qwen2vl_merger"
        writer.tensor("v.patch_embd.weight.1", *patch, scale=scale)
        writer.linear("mm.0", 4 * embedding, 4 * embedding)
        writer.linear("mm.2", width, 4 * embedding)


def _ultravox(writer: _Writer, width: int) -> None:
    file, size = writer.file, writer.size
    embedding, stacked = size.embedding, size.embedding * size.stack
    file.add_bool("clip.has_audio_encoder", True)
    writer.sizes("clip.audio", width)
    file.add_uint32("clip.audio.num_mel_bins", size.mels)
    file.add_uint32("clip.audio.projector.stack_factor", size.stack)
    writer.tensor("a.position_embd.weight", AUDIO_POSITIONS, embedding, scale=0.5, kind=np.float32)
    for index, channels in ((1, size.mels), (2, embedding)):
        name = f"a.conv1d.{index}"
        scale = (3 * channels) ** -0.5
        writer.tensor(f"{name}.weight", embedding, channels, 3, scale=scale, kind=np.float16)
        writer.tensor(f"{name}.bias", embedding, 1, scale=0.1, kind=np.float32)
    writer.blocks("a", key_bias=False)
    writer.norm("a.post_ln", embedding)
    hidden = 2 * embedding
    writer.norm("mm.a.norm_pre", stacked, bias=False)
    writer.linear("mm.a.mlp.1", 2 * hidden, stacked, bias=False)
    writer.norm("mm.a.norm_mid", hidden, bias=False)
    writer.linear("mm.a.mlp.2", width, hidden, bias=False)
