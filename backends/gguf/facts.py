"""The facts about a model that its files' headers state, for people who choose between models, and
the contents of files that are named as models but hold something else.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from .. import ENGINES, format_of_file
from ..model_encodings import IR_ELEMENT, XML_BEGINNING
from . import MAGIC, FileFacts
from .header import (
    CutOffHeader,
    DamagedHeader,
    GgufHeader,
    TensorEntry,
    read_beginning,
    read_header,
)

READ_BYTES = (1 << 20, 1 << 24, 1 << 26)
"""The bytes that are read of a file, more each time until its header is complete. Vocabularies take
up to 20 MB.
"""
TEXT_CHARACTERS_MAX = 1 << 18
"""Longer texts are omitted; templates have up to 20 k characters."""
NUMBER_MAX = (1 << 63) - 1
"""Larger numbers, which only garbage has, do not fit into a reply."""
KV_VALUE_BYTES = 2
"""KV states are in F16."""
QUANTIZATIONS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
    39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
"""Names of `general.file_type`: `llama_ftype` in llama.h."""
_KV_WEIGHT = re.compile(r"blk\.(\d+)\.attn_[kv]\.weight")
ValueT = TypeVar("ValueT")


def uses_tools(template: str) -> bool:
    """Return whether a chat template uses the tools of a request."""
    return re.search(r"\btools\b", template) is not None


def read_facts(files: Sequence[Path]) -> FileFacts:
    """Return the facts about the model in *files*, which are several if it is split. Blocks.

    :raises OSError: a file cannot be read.
    :raises DamagedHeader: a file is not a GGUF file, or its header is damaged.
    """
    headers = [header_of(file) for file in files]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    return facts_of(headers[0].values, tensors)


def header_of(file: Path) -> GgufHeader:
    """Return a file's header. The file is not mapped into memory: if another program shortened it,
    the kernel would end this process.
    """
    with opened(file) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedHeader("it is not a regular file")
        for size in READ_BYTES:
            data = os.pread(fd, size, 0)
            if not data.startswith(MAGIC):
                raise DamagedHeader("it is not a GGUF file")
            try:
                return read_header(data)
            except CutOffHeader:
                if len(data) < size:
                    raise
        raise DamagedHeader(f"its header has more than {READ_BYTES[-1]} bytes")


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """Open a file for reading; yield its descriptor.

    :raises OSError: the file cannot be opened.
    """
    # O_NONBLOCK: opening a FIFO would otherwise wait for its writer.
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def facts_of(values: Mapping[str, object], tensors: Mapping[str, TensorEntry]) -> FileFacts:
    """Return the facts that a header states by its *values* and *tensors*.

    :raises DamagedHeader: no file is large enough for the *tensors*.
    """
    architecture = _value(values, "general.architecture", str)
    layers = _value(values, f"{architecture}.block_count", int)
    template = _value(values, "tokenizer.chat_template", str)
    tools_template = _value(values, "tokenizer.chat_template.tool_use", str)
    kind = _value(values, "general.file_type", int)
    causal = values.get(f"{architecture}.attention.causal", True)  # encoders have no KV state
    return FileFacts(
        title=_value(values, "general.name", str),
        architecture=architecture,
        quantization=None if kind is None else QUANTIZATIONS.get(kind, f"type {kind}"),
        parameters=_parameters(tensors),
        ctx_size_trained=_value(values, f"{architecture}.context_length", int),
        embedding_size=_value(values, f"{architecture}.embedding_length", int),
        layers=layers,
        nextn_layers=min(nextn_layers(values), NUMBER_MAX),
        license=_value(values, "general.license.name", str)
        or _value(values, "general.license", str),
        license_link=_value(values, "general.license.link", str),
        chat_template=template,
        supports_tools=uses_tools(tools_template or template or ""),
        kv_token_bytes_max=_kv_token_bytes(layers, tensors) if causal else 0,
    )


def _value(values: Mapping[str, object], key: str, kind: type[ValueT]) -> ValueT | None:
    value = values.get(key)
    if not isinstance(value, kind):
        return None
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX:
        return None
    if isinstance(value, int) and value > NUMBER_MAX:
        return None
    return value


def _parameters(tensors: Mapping[str, TensorEntry]) -> int:
    found = sum(math.prod(tensor.shape) for tensor in tensors.values())
    if found > NUMBER_MAX:
        raise DamagedHeader(f"its tensors have {found} values")
    return found


def _kv_token_bytes(layers: int | None, tensors: Mapping[str, TensorEntry]) -> int | None:
    """Return the bytes of a token's keys and values; None unless each layer has both."""
    widths: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if (match := _KV_WEIGHT.fullmatch(name)) and len(tensor.shape) > 1:
            widths.setdefault(match[1], []).append(tensor.shape[1])
    if len(widths) != layers or any(len(pair) != 2 for pair in widths.values()):
        return None
    found = KV_VALUE_BYTES * sum(sum(pair) for pair in widths.values())
    return found if found <= NUMBER_MAX else None


_NEXTN_ARCHITECTURES = frozenset(
    (
        *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa"),
        *("glm4moe", "glm5-next", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe"),
        *("qwen3next", "step35"),
    )
)
"""The architectures for whose NextN layers llama.cpp builds graphs (`LLM_GRAPH_TYPE_DECODER_MTP` in
`src/models/`).
"""


def nextn_layers(values: Mapping[str, object]) -> int:
    """Return the number of NextN layers that a header states by its *values*."""
    architecture = values.get("general.architecture")
    found = values.get(f"{architecture}.nextn_predict_layers", 0)
    return max(0, found) if isinstance(found, int) else 0


def nextn_refusal(values: Mapping[str, object], tensors: Container[str]) -> str:
    """Return the reason for which the NextN layers of a file with these *values* and *tensors*
    cannot draft, or empty. llama.cpp would abort.
    """
    architecture, layers = str(values.get("general.architecture")), nextn_layers(values)
    blocks = values.get(f"{architecture}.block_count", 0)
    if not layers or not isinstance(blocks, int):
        return "it has none"
    if architecture not in _NEXTN_ARCHITECTURES:
        return f"llama.cpp does not compute those of the architecture {architecture!r}"
    if layers > 1:
        return f"it has {layers}, of which each would predict another token; one is supported"
    if f"blk.{blocks - layers}.nextn.eh_proj.weight" not in tensors:
        return "its file leaves their tensors out"
    return ""


CONTENT_BYTES = 1 << 16
"""The beginning of a file that is read: the keys `general.*` come first."""
_TYPES = {
    "adapter": "an adapter (LoRA): `inferd add-adapter` adds it to the model it was made for",
    "imatrix": "an importance matrix, for quantizing a model",
    "mmproj": "a projector for images or sound, which belongs to a language model",
}
_ARCHITECTURES = {
    "clip": _TYPES["mmproj"],
    "controlvector": "a control vector, which belongs to a language model",
}
_LFS_POINTER = b"version https://git-lfs.github.com/"


class OtherContent(msgspec.Struct, frozen=True):
    """The reason why a file is not a language model."""

    reason: str
    is_damaged: bool = True
    """False for a part of a model, such as a projector, which may lie beside it."""


def other_content(file: Path) -> OtherContent | None:
    """Return the reason why *file* is certainly not a model, or None. Files are language models
    unless their name ends as that of a graph. Blocks.
    """
    try:
        status = os.stat(file)
    except OSError as exc:  # a load reports a denied access, or a file server that does not answer
        reason = dangling_reason(exc) if os.path.islink(file) else ""
        return OtherContent(reason) if reason else None
    if not stat.S_ISREG(status.st_mode):
        return OtherContent("it is not a regular file")
    if not status.st_size:
        return OtherContent("it is empty: its download or copy has failed")
    try:
        with opened(file) as fd:
            beginning = os.pread(fd, CONTENT_BYTES, 0)
    except OSError:
        return None  # a load reports it
    model_format = format_of_file(file.name)
    if model_format.encoding == "openvino":
        return _ir_content(beginning)
    is_graph = ENGINES[model_format.backends[0]].graphs
    return _download(beginning) if is_graph else _content(beginning)


def dangling_reason(error: OSError) -> str:
    """Return the reason why a link cannot be followed, or an empty text if that may be possible for
    others.
    """
    if error.errno == errno.ELOOP:
        return "it is a link that leads to itself"
    is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    return "it is a link to a missing file" if is_missing else ""


def _download(beginning: bytes) -> OtherContent | None:
    """Return the reason for a file that a failed download has left."""
    if beginning.startswith(_LFS_POINTER):
        return OtherContent("it is a pointer of Git LFS: `git lfs pull` gets the model")
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()[:15].lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return OtherContent("it is a web page: download the file itself")
    return None


def _ir_content(beginning: bytes) -> OtherContent | None:
    """Return the reason why an XML file is not a graph of OpenVINO."""
    if IR_ELEMENT in beginning:
        return None
    is_other = beginning.startswith(XML_BEGINNING) and b"<html" not in beginning.lower()
    other = OtherContent("it is XML, and not a graph of OpenVINO", is_damaged=False)
    return other if is_other else _download(beginning) or other


def _content(beginning: bytes) -> OtherContent | None:
    if (failed := _download(beginning)) is not None:
        return failed
    if not beginning.startswith(MAGIC):
        return OtherContent("it is not a GGUF file")
    values = read_beginning(beginning)
    kind = _TYPES.get(str(values.get("general.type"))) or _ARCHITECTURES.get(
        str(values.get("general.architecture"))
    )
    return None if kind is None else OtherContent(f"it is {kind}", is_damaged=False)
