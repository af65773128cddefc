"""Names of models: the names of files in a models directory, the models that clients mean, the
models that are offered to people, and the one with which a chat begins.

A test model is not offered: it repeats its prompt, so that the first answer to a new user would be
their own question.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..backends import ENGINES, FILE_SUFFIXES
from ..backends.errors import ModelNotFound
from ..backends.gguf import PART
from ..backends.params import nearest

if TYPE_CHECKING:  # completion in shells would wait for the client library
    from .client.results import ModelInfo

NAME_CHARACTERS_MAX = 128
MODEL_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARACTERS_MAX - 1}}}")
"""The name of a model. It is used in file names, so it cannot contain a path."""
FILE_SUFFIX = ".gguf"
"""The end of the names of language models' files."""
_LATEST = ":latest"
"""The tag that Ollama's clients add."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_NAMES_LISTED_MAX = 100
"""Names in the data of an error."""


def is_model_file(name: str) -> bool:
    """Return whether a file's name ends as those of models do, in any case."""
    return f"/{name.lower()}".endswith(FILE_SUFFIXES)


def is_gguf_file(name: str) -> bool:
    """Return whether a file's name ends as those of language models and their parts do."""
    return name.lower().endswith(FILE_SUFFIX)


def name_of_file(path: str) -> str:
    """Return the name of the model in the file *path*, which is relative to the models directory;
    other characters than those of names become ``-``. It is empty if no character may begin a name.
    """
    part = PART.fullmatch(path)
    stem = part["stem"] if part else _without_suffix(path)
    name = _NOT_IN_NAMES.sub("-", unicodedata.normalize("NFC", stem))
    return name.lstrip("._-")[:NAME_CHARACTERS_MAX]


def find_name(text: str, names: Collection[str]) -> str | None:
    """Return the one of *names* that *text* means, or None if there is none.

    It is *text* itself, or *text* without Ollama's tag `latest`, or the name of the file *text*; or
    else the only one of *names* that equals one of these in another case.
    """
    candidates = dict.fromkeys(names_meant_by(text))
    for candidate in candidates:
        if candidate in names:
            return candidate
    for candidate in candidates:
        same = [name for name in names if name.lower() == candidate.lower()]
        if len(same) == 1:
            return same[0]
    return None


def names_meant_by(text: str) -> Iterator[str]:
    """Yield the names that *text* may mean, the first of which exists is meant."""
    yield text
    if text.lower().endswith(_LATEST):
        text = text[: -len(_LATEST)]
        yield text
    # Another beginning would be cut off, so that `../a` would mean the model `a`.
    if text[:1].isascii() and text[:1].isalnum() and len(text) < NAME_CHARACTERS_MAX:
        yield name_of_file(text)


def model_not_found(text: str, names: Collection[str], sentence: str, advice: str) -> ModelNotFound:
    """Return the error for a *text* that means none of *names*; its hint has the nearest names and
    *advice*.
    """
    candidates = list(names_meant_by(text))
    same = sorted(n for n in names if any(n.lower() == c.lower() for c in candidates))
    close = f"did you mean {' or '.join(map(repr, same))}?" if same else ""
    close = close or next(filter(None, (nearest(c, names) for c in candidates)), "")
    return ModelNotFound(
        sentence,
        hint=" ".join(filter(None, (close, advice))),
        data={"models": sorted(names)[:_NAMES_LISTED_MAX]},
    )


def _without_suffix(path: str) -> str:
    for suffix in FILE_SUFFIXES:
        if f"/{path.lower()}".endswith(suffix):
            # The file of a folder that is the models directory itself has its own name.
            return f"/{path}"[: -len(suffix)][1:] or path.rpartition(".")[0]
    return path


M = TypeVar("M", bound=Mapping[str, object])
TEST_BACKEND = "echo"


def is_test_model(model: Mapping[str, object]) -> bool:
    """Return whether a model has no weights and is for tests."""
    return model.get("backend") == TEST_BACKEND


def is_graph(model: Mapping[str, object]) -> bool:
    """Return whether a model is a graph, which has no language."""
    engine = ENGINES.get(str(model.get("backend")))
    return engine is not None and engine.graphs


def offered_models(
    models: Sequence[M], *, named: Collection[str] = (), test_models: bool = False
) -> list[M]:
    """Return those of *models* that are offered to people: all but the test models, except those
    that a setting has *named*. If there are no other models, or with *test_models*, these are all.
    """
    offered = [m for m in models if not is_test_model(m) or m["name"] in named]
    return list(models) if test_models or not offered else offered


def preferred_model(models: Sequence[ModelInfo], memory: Mapping[str, Any]) -> str | None:
    """Return the model with which a chat begins unless its user has chosen one: a loaded one, else
    the largest that fits into the *memory* of the daemon's statistics, else the smallest. Return
    None if there are only test models, or models that generate no text.
    """
    usable = [m for m in models if not is_test_model(m) and not m.get("of") and _generates(m)]
    loaded = [m for m in usable if m["state"] == "ready"]
    fitting = loaded or [m for m in usable if _fits(m, memory)]
    if fitting:
        return max(fitting, key=_need_bytes)["name"]
    return min(usable, key=_need_bytes)["name"] if usable else None


def _generates(model: ModelInfo) -> bool:
    """Return whether a model generates text, which is known once it has been loaded, or of a graph
    before.
    """
    return not is_graph(model) and bool((model.get("info") or {}).get("generates", True))


def _fits(model: ModelInfo, memory: Mapping[str, Any]) -> bool:
    """Return whether a model can be loaded; its last load may have failed for another reason."""
    free = memory.get("load_free_bytes")
    if model["state"] == "failed":
        return False
    return free is None or _need_bytes(model) <= free + memory.get("load_evictable_bytes", 0)


def _need_bytes(model: ModelInfo) -> int:
    """Return the memory of the next load, or at least the size of the file."""
    return int(model.get("need_bytes") or model.get("size_bytes") or 0)
