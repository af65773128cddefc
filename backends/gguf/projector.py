"""The header of a projector, with which a language model reads images or sounds, and the comparison
of this header with the language model's.

llama.cpp aborts or computes nonsense with a projector of another model: a token that it puts around
an image and that the vocabulary lacks becomes −1, and a width of 0 is not compared. The widths and
tokens here are those of `clip_n_mmproj_embd` in llama.cpp's `tools/mtmd/clip.cpp` and of
`mtmd_context` in `mtmd.cpp`.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from .facts import READ_BYTES, header_of, opened
from .header import BLOCKS, DamagedHeader, GgufHeader, bytes_promised

_CLIP = "clip"
_IMAGE_KIND, _SOUND_KIND = "clip.vision.projector_type", "clip.audio.projector_type"
_TOKENS = "tokenizer.ggml.tokens"
NUMBER_MAX = (1 << 31) - 1
"""llama.cpp's sizes are `int32`."""


class ProjectorHeader(msgspec.Struct, frozen=True, kw_only=True):
    """A projector as its header describes it."""

    kind: str
    """Its type for images, or for sounds if it reads no images, by llama.cpp's name."""
    images: bool
    sounds: bool
    width: int
    """The numbers of an embedding."""
    image_size: int
    """The side of an image in pixels, if the projector has a fixed one; 0 if it reads no images."""
    patch_size: int
    weights_bytes: int
    tokens: tuple[tuple[str, ...], ...]
    """The tokens that it puts around images and sounds, each with its possible spellings in a
    vocabulary.
    """


class TextSide(msgspec.Struct, frozen=True, kw_only=True):
    """A language model as a projector has to fit it."""

    architecture: str
    width: int
    """The numbers of an embedding that the model takes instead of a token (`n_embd_inp`)."""
    tokens: frozenset[str]
    """The tokens of its vocabulary that some projector needs."""


class _Width(NamedTuple):
    """The tensor that ends with the width, and the dimension of its shape that is the width."""

    tensor: str
    dimension: int


class _Kind(NamedTuple):
    """A type of projectors: its widths, of which the first found counts, and the tokens that it
    needs.
    """

    widths: tuple[_Width, ...]
    tokens: tuple[tuple[str, ...], ...] = ()


def _kind(*widths: str, tokens: str = "", lines: bool = False) -> _Kind:
    """Return a type with widths given as `TENSOR:DIMENSION`; with *lines* it needs line breaks."""
    found = []
    for width in widths:
        tensor, _, dimension = width.rpartition(":")
        found.append(_Width(tensor, int(dimension)))
    spelled = tuple((token,) for token in tokens.split())
    return _Kind(tuple(found), (*spelled, _LINE_BREAK) if lines else spelled)


_LINE_BREAK = ("\n", "Ċ", "<0x0A>")
_TWO_LINE_BREAKS = ("\n\n", "ĊĊ")
_MM2 = "mm.2.weight:1"
_MM2_BIAS = "mm.2.bias:0"
_FC = "mm.model.fc.weight:1"
_SOUND_MLP = "mm.a.mlp.2.weight:1"
_VISION = "<|vision_start|> <|vision_end|>"
_IMAGE = "<|image_start|> <|image_end|>"
_SLICES = "<image> </image> <slice> </slice>"
_BEGIN = "<|begin_of_image|> <|end_of_image|>"

_KINDS: Mapping[str, _Kind] = {
    # Yi's variant has a third layer.
    "mlp": _kind("mm.3.bias:0", _MM2),
    "ldp": _kind("mm.model.mb_block.1.block.2.1.bias:0"),
    "ldpv2": _kind("mm.model.peg.0.bias:0"),
    "resampler": _kind("resampler.proj.weight:0", tokens=_SLICES, lines=True),
    "minicpmv4_6": _kind("mm.down.weight:1", tokens=_SLICES, lines=True),
    "adapter": _kind("adapter.linear.dense_4h_to_h.weight:1"),
    "qwen2vl_merger": _kind(_MM2_BIAS, tokens=_VISION),
    "qwen2.5vl_merger": _kind(_MM2_BIAS, tokens=_VISION),
    "qwen3vl_merger": _kind(_MM2_BIAS, tokens=_VISION),
    "ling3vl": _kind(_MM2_BIAS, tokens=_VISION),
    "mimovl": _kind(_MM2, tokens=_VISION),
    "youtuvl": _kind(_MM2_BIAS, tokens=_VISION),
    "step3vl": _kind(_FC, tokens="<im_start> <im_end> <patch_start> <patch_end> <patch_newline>"),
    "gemma3": _kind("mm.input_projection.weight:0", tokens="<start_of_image> <end_of_image>"),
    "gemma3nv": _kind("mm.input_projection.weight:0", tokens="<start_of_image> <end_of_image>"),
    "gemma4v": _kind("mm.input_projection.weight:1", tokens="<|image> <image|>"),
    "gemma4uv": _kind("mm.input_projection.weight:1", tokens="<|image> <image|>"),
    "phi4": _kind(_MM2),
    "pixtral": _kind(_MM2, tokens="[IMG_END]"),
    "lightonocr": _kind(_MM2, tokens="<|im_start|> <|im_end|>"),
    "internvl": _kind("mm.model.mlp.3.weight:1", tokens="<img> </img>"),
    "nemotron_v2_vl": _kind("mm.model.mlp.3.weight:1"),
    "llama4": _kind(_FC, tokens=_IMAGE),
    "lfm2": _kind(_MM2, tokens=f"{_IMAGE} <|img_thumbnail|>"),
    "kimivl": _kind(_MM2, tokens="<|media_start|> <|media_end|>"),
    "paddleocr": _kind(_MM2, tokens="<|IMAGE_START|> <|IMAGE_END|>"),
    "cogvlm": _kind("mm.down.weight:1"),
    "janus_pro": _kind("mm.1.bias:0"),
    "dots_ocr": _kind(_MM2, tokens="<|img|> <|endofimg|>"),
    "dots3note_v": _kind(_MM2, tokens="<|img|> <|endofimg|>"),
    "deepseekocr": _kind(_FC),
    "deepseekocr2": _kind(_FC),
    "glm4v": _kind("mm.down.weight:1", tokens=_BEGIN),
    "glm5v": _kind("mm.down.weight:1", tokens=_BEGIN),
    "yasa2": _kind(_MM2, tokens="<image> </image>"),
    "exaone4_5": _kind(_MM2_BIAS, tokens="<vision> </vision>"),
    "minimax_m3": _kind("mm.merger.fc2.bias:0"),
    "granite4_vision": _kind("v.proj_blk.0.linear.weight:1"),
    "muse-glimmer": _kind(_MM2, tokens=_IMAGE),
    "kimik25": _Kind(
        (_Width("mm.2.weight", 1),),
        (("<|begin_of_image|>", "<|media_begin|>"), ("<|end_of_image|>", "<|media_end|>")),
    ),
    "idefics3": _Kind(
        (_Width("mm.model.fc.weight", 1),),
        (
            ("<fake_token_around_image>",),
            ("<global-img>",),
            ("<row_1_col_1>",),
            _LINE_BREAK,
            _TWO_LINE_BREAKS,
        ),
    ),
    # Sounds.
    "ultravox": _kind(_SOUND_MLP),
    "voxtral": _kind(_SOUND_MLP, tokens="[BEGIN_AUDIO]"),
    "musicflamingo": _kind(_SOUND_MLP, tokens="<sound>"),
    "meralion": _kind("mm.a.mlp.3.weight:1"),
    "qwen2a": _kind("mm.a.fc.weight:1", tokens="<|audio_bos|> <|audio_eos|>"),
    "qwen3a": _kind(_SOUND_MLP, tokens="<|audio_start|> <|audio_end|>"),
    "glma": _kind(_SOUND_MLP),
    "lfm2a": _kind("a.position_embd.weight:0"),
    "granite_speech": _kind("a.proj_linear.weight:1"),
    "gemma4a": _kind("mm.a.input_projection.weight:1", tokens="<|audio> <audio|>"),
    "gemma4ua": _kind("mm.a.input_projection.weight:1", tokens="<|audio> <audio|>"),
    "dots3note_a": _kind("mm.a.mlp.3.weight:1", tokens="<|audio_comp_start|> <|audio_comp_end|>"),
    "mimo_audio": _kind(_SOUND_MLP, tokens="<|mimo_audio_start|> <|mimo_audio_end|>"),
    "parakeet": _kind(_SOUND_MLP),
}
"""By llama.cpp's name (`PROJECTOR_TYPE_NAMES` in `clip-impl.h`)."""
_BOTH = {"qwen2.5o": ("qwen2.5vl_merger", "qwen2a")}
"""Names that stand for one type of images and another one of sounds."""
_REFUSED = {
    "deepseek4v": "the tokens of an image depend on its place in the prompt",
    "hunyuanvl": "the positions of an image depend on the images before it",
    "gemma3na": "llama.cpp cannot read sounds with it",
    "qwen3tts_spkenc": "it makes speech",
    "qwen3tts_gen": "it makes speech",
    "pockettts_spkenc": "it makes speech",
    "pockettts_gen": "it makes speech",
}
"""Types that are not supported, and the reasons."""
_NEEDED = frozenset(
    spelling for kind in _KINDS.values() for token in kind.tokens for spelling in token
)


def read_projector(file: Path) -> ProjectorHeader:
    """Return the facts in the header of a projector. Blocks.

    :raises OSError: the file cannot be read.
    :raises DamagedHeader: it is not a projector, or one that cannot be used; the message says why.
    """
    header, size = header_of(file), os.stat(file).st_size
    if bytes_promised(header) > size:
        raise DamagedHeader(f"it is cut off: it has {size} of {bytes_promised(header)} bytes")
    return projector_of(header)


def projector_of(header: GgufHeader) -> ProjectorHeader:
    """Return the facts in a projector's *header*.

    :raises DamagedHeader: as `read_projector`.
    """
    values = header.values
    if values.get("general.architecture") != _CLIP:
        raise DamagedHeader("it is not a projector for images or sounds")
    kinds = {"vision": _kind_of(values, "vision"), "audio": _kind_of(values, "audio")}
    names = [name for name in kinds.values() if name]
    if not names:
        raise DamagedHeader("it reads neither images nor sounds")
    for name in names:
        if name in _REFUSED:
            raise DamagedHeader(f"its type {name!r} is not supported: {_REFUSED[name]}")
        if name not in _KINDS:
            raise DamagedHeader(f"its type {name!r} is unknown")
    widths = [_width(header, name) for name in names]
    if len(set(widths)) != 1:
        raise DamagedHeader(
            f"it makes embeddings of {widths[0]} numbers from images, and of {widths[1]} from"
            " sounds"
        )
    return ProjectorHeader(
        kind=names[0],
        images=bool(kinds["vision"]),
        sounds=bool(kinds["audio"]),
        width=widths[0],
        image_size=_size(values, "image_size") if kinds["vision"] else 0,
        patch_size=_size(values, "patch_size") if kinds["vision"] else 0,
        weights_bytes=_weights_bytes(header),
        tokens=tuple(token for name in names for token in _KINDS[name].tokens),
    )


def _kind_of(values: Mapping[str, object], medium: str) -> str:
    """Return the type that reads images ("vision") or sounds ("audio"); "" if there is none."""
    if values.get(f"clip.has_{medium}_encoder") is not True:
        return ""
    name = values.get("clip.projector_type") or values.get(f"clip.{medium}.projector_type") or ""
    found = str(name)[:64]
    if found in _BOTH:
        found = _BOTH[found][medium == "audio"]
    return found or "(none)"


def _size(values: Mapping[str, object], name: str) -> int:
    found = values.get(f"clip.vision.{name}")
    if not isinstance(found, int) or not 0 < found <= NUMBER_MAX:
        raise DamagedHeader(f"its {name} is {found!r}")
    return found


def _width(header: GgufHeader, kind: str) -> int:
    for width in _KINDS[kind].widths:
        tensor = header.tensors.get(width.tensor)
        if tensor is None:
            continue
        if width.dimension >= len(tensor.shape):
            raise DamagedHeader(f"its tensor {width.tensor} has {len(tensor.shape)} dimensions")
        found = tensor.shape[width.dimension] * _parts(header, kind)
        if not 0 < found <= NUMBER_MAX:
            raise DamagedHeader(f"it makes embeddings of {found} numbers")
        return found
    raise DamagedHeader(f"it lacks the tensor {_KINDS[kind].widths[-1].tensor}")


def _parts(header: GgufHeader, kind: str) -> int:
    """Return the number of layers of the language model to which an embedding adds (deepstack)."""
    if kind == "qwen3vl_merger":
        return 1 + sum(
            name.startswith("v.deepstack.") and name.endswith(".fc1.weight")
            for name in header.tensors
        )
    if kind == "granite4_vision":
        layers = header.lists.get("clip.vision.feature_layer")
        return layers.length if layers else 1
    return 1


def _weights_bytes(header: GgufHeader) -> int:
    found = 0
    for tensor in header.tensors.values():
        numbers, size = BLOCKS.get(tensor.kind, (1, 4))
        found += math.prod(tensor.shape) // numbers * size
    if found > (1 << 63) - 1:
        raise DamagedHeader(f"its tensors have {found} bytes")
    return found


def read_text_side(file: Path) -> TextSide:
    """Return the facts about a language model that a projector has to fit; *file* is its first part
    if it is split. Blocks: it takes 0.1 s for a vocabulary of 262 k tokens.

    :raises OSError: the file cannot be read.
    :raises DamagedHeader: it is not a GGUF file, or its header is damaged.
    """
    header, data = header_of(file), b""
    tokens = header.lists.get(_TOKENS)
    found: set[str] = set()
    if tokens is not None and tokens.is_of_texts:
        needed = {spelling.encode(): spelling for spelling in _NEEDED}
        data = _beginning(file, header.data_begin)
        try:
            found = {needed[token] for token in tokens.texts(data) if token in needed}
        except struct.error as exc:  # it was shortened meanwhile
            raise DamagedHeader("it continues past the file's end") from exc
    values = header.values
    architecture = str(values.get("general.architecture"))
    width = values.get(f"{architecture}.embedding_length")
    return TextSide(
        architecture=architecture,
        width=width * _text_parts(header, data, architecture) if isinstance(width, int) else 0,
        tokens=frozenset(found),
    )


def _beginning(file: Path, size: int) -> bytes:
    with opened(file) as fd:
        return os.pread(fd, min(size, READ_BYTES[-1]), 0)  # an alignment may promise any size


def _text_parts(header: GgufHeader, data: bytes, architecture: str) -> int:
    layers = header.values.get(f"{architecture}.n_deepstack_layers", 0)
    mapping = header.lists.get(f"{architecture}.deepstack_mapping")
    if mapping is not None and mapping.is_of_integers and data:
        layers = len({index for index in mapping.integers(data) if index >= 0})
    return 1 + layers if isinstance(layers, int) and layers >= 0 else 1


def projector_mismatch(projector: ProjectorHeader, text: TextSide) -> str:
    """Return the reason why *projector* does not belong to the language model *text*, with the
    values of both sides; "" if it fits.
    """
    if projector.width != text.width:
        return (
            f"the projector ({projector.kind}) makes embeddings of {projector.width} numbers, and"
            f" the model ({text.architecture}) takes embeddings of {text.width}"
        )
    missing = [token[0] for token in projector.tokens if not text.tokens.intersection(token)]
    if missing:
        return (
            f"the projector ({projector.kind}) puts {', '.join(map(repr, missing))} around images"
            f" or sounds, and the vocabulary of the model ({text.architecture}) lacks that"
        )
    return ""
