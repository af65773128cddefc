"""Projectors that are pulled with their models: from the folder of a file, or from a hub's
repository.

A projector becomes ``NAME-mmproj.gguf`` beside ``NAME.gguf``, where the model finds it.
"""

from __future__ import annotations

import http.client
import re
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ...ipc.model_names import is_gguf_file
from ..models.model_files import is_named_projector
from ..models.projectors import ProjectorFinder, rank_projectors, wish_of
from .part import PullFailed
from .sources import LocalFile
from .target import Source
from .web import Redirects, WebFile

LIST_BYTES_MAX = 4 << 20
LIST_S_MAX = 30.0
_HUB_URL = re.compile(r"(?P<base>.+)/(?P<repository>[^/]+/[^/]+)/resolve/main/(?P<file>.+)")
_TYPES = ("f16", "bf16", "q8", "f32")
"""The types of weights, the preferred one first. F16 is exact enough, and half as large as F32."""


class _File(msgspec.Struct):
    rfilename: str = ""


class _Repository(msgspec.Struct):
    siblings: list[_File] = []


def projector_of(source: Source) -> Source | None:
    """Return the source of the projector that belongs to the model of *source*, or None.

    :raises PullFailed: the list of a repository's files cannot be read.
    """
    if isinstance(source, LocalFile):
        return None if is_named_projector(source.path.name) else _beside(source.path)
    match = _HUB_URL.fullmatch(source.url) if isinstance(source, WebFile) and source.hub else None
    file = "" if match is None else urllib.parse.unquote(match["file"])
    if match is None or is_named_projector(_name(file)):
        return None
    found = choose_projector(file, _list_files(f"{match['base']}/api/models/{match['repository']}"))
    if found is None:
        return None
    folder = f"{match['base']}/{match['repository']}/resolve/main"
    return WebFile(f"{folder}/{urllib.parse.quote(found)}", Path(found).stem, hub=True)


def _beside(file: Path) -> LocalFile | None:
    """Return the projector beside *file*, if exactly one fits."""
    found = ProjectorFinder().find(wish_of(file.name, file.absolute(), "llama", {}, file.parent))
    return LocalFile(Path(found.file)) if found.file else None


def choose_projector(file: str, files: Iterable[str]) -> str | None:
    """Return the projector of the model *file* among the *files* of its repository: one in the same
    folder or else at the top, whose name fits best. Of several types of weights, F16 is chosen.
    """
    paths = [path for path in files if is_gguf_file(path) and ".." not in path.split("/")]
    models = {_name(path) for path in paths if not is_named_projector(_name(path))}
    for folder in dict.fromkeys((_folder(file), "")):
        here = [path for path in paths if _folder(path) == folder]
        projectors = {_name(path): path for path in here if is_named_projector(_name(path))}
        ranks = rank_projectors(_name(file), [*models, *projectors])
        if ranks:
            best = min(ranks, key=lambda name: (-ranks[name], _type_rank(name), name))
            return projectors[best]
    return None


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _type_rank(name: str) -> int:
    words = re.split(r"[^a-z0-9]+", name.lower())
    found = (n for n, kind in enumerate(_TYPES) if any(w.startswith(kind) for w in words))
    return next(found, len(_TYPES))


def _list_files(url: str) -> list[str]:
    request = urllib.request.Request(url, headers={"User-Agent": "inferd"})
    try:
        with urllib.request.build_opener(Redirects()).open(request, timeout=LIST_S_MAX) as answer:
            data = answer.read(LIST_BYTES_MAX)
        return [file.rfilename for file in msgspec.json.decode(data, type=_Repository).siblings]
    except (OSError, http.client.HTTPException, ValueError) as exc:  # JSON's are ValueErrors
        raise PullFailed(
            f"{url} cannot be read: {exc}", hint="pull the projector by its own address"
        ) from None
