"""The models directory, and the files of a model.

A split model `NAME` has several files: `NAME-00001-of-00003.gguf` and so on.
"""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...backends import (
    ENGINES,
    FILE_SUFFIXES,
    backend_of_file,
    format_of_file,
    suffixes_of_backend,
)
from ...backends.gguf import PART, parts_of
from ...backends.gguf.facts import OtherContent, dangling_reason
from ...backends.model_encodings import PYTORCH_FILE, PYTORCH_SUFFIXES, files_of_graph
from ...backends.params import nearest
from ...ipc.model_names import FILE_SUFFIX, find_name, is_gguf_file, is_model_file, name_of_file
from ..config.model_settings import ECHO, ModelConfig
from ..config.names import DerivedName
from ..printable import escape_controls

ENTRIES_MAX = 10_000
"""Files and folders that are read in the models directory; listing them takes 10 ms."""
DEPTH_MAX = 4
"""Folders within each other in the models directory."""
Signature = tuple[tuple[int, ...], ...]
"""A value that changes with the files."""
PROJECTOR = "it is named as a projector for images or sound, which belongs to a language model"
_PROJECTOR_NAME = re.compile(r"(?:^|[^a-z0-9])mmproj")


def is_named_projector(file: str) -> bool:
    """Return whether a file is named as projectors are: `mmproj-F16.gguf`, `NAME-mmproj.gguf`."""
    return is_gguf_file(file) and _PROJECTOR_NAME.search(file.lower()) is not None


class FoundModels(msgspec.Struct, frozen=True):
    """The models of a directory and its subfolders."""

    files: dict[str, Path] = {}
    """By name, the (first) file."""
    refused: dict[str, str] = {}
    """By path below the directory, the reason why a file gets no name, or a folder was not read."""
    projectors: dict[str, Path] = {}
    """By path below the directory, the files that are named as projectors, which get no name."""
    exists: bool = True

    def refusal_of(self, text: str) -> str:
        """Return the reason why the file *text*, or the one of this name, is not offered, or an
        empty text.
        """
        for path in (text, *(f"{text}{suffix}" for suffix in FILE_SUFFIXES + PYTORCH_SUFFIXES)):
            if reason := self.refused.get(path) or (PROJECTOR if path in self.projectors else ""):
                return reason
        return ""


class FileNotOffered(NamedTuple):
    """A file of the models directory that is not offered as a model."""

    file: str
    """Its path below the models directory."""
    reason: str
    is_expected: bool = False
    """Whether nothing is to be corrected, as with a projector beside its model."""


def find_models(directory: Path) -> FoundModels:
    """Return the models in *directory*. A split model counts if any part exists; its load then
    reports missing parts.

    If several files would have the same name, the first one of `NAME.gguf`, `NAME.onnx`,
    `NAME.tflite`, `NAME.xml` and `NAME/saved_model.pb` has it. Without such a file none has it, so
    that a name never comes to mean another file.

    :raises OSError: the directory cannot be read.
    """
    refused: dict[str, str] = {}
    try:
        paths = list(_paths_in(directory, refused))
    except FileNotFoundError:
        return FoundModels(exists=False)
    by_name: dict[str, dict[Path, str]] = {}
    projectors: dict[str, Path] = {}
    for path in sorted(paths):
        name = name_of_file(path)
        if reason := _refusal(path, name):
            refused[path] = reason
        elif is_named_projector(path.rpartition("/")[2]):
            projectors[path] = directory / path
        else:
            by_name.setdefault(name, {}).setdefault(parts_of(directory / path)[0], path)
    files: dict[str, Path] = {}
    for name, found in by_name.items():
        own = [file for file, path in found.items() if _has_own_name(path, name)]
        if own or len(found) == 1:
            files[name] = (own or [*found])[0]
        for file, path in found.items():
            if file != files.get(name):
                others = ", ".join(other for one, other in found.items() if one != file)
                refused[path] = f"its name {name!r} is also that of {others}: rename it"
    return FoundModels(files, refused, projectors)


def files_not_offered(
    directory: Path,
    found: FoundModels,
    configured: Mapping[str, ModelConfig | DerivedName],
    content_of: Callable[[Path], OtherContent | None],
) -> list[FileNotOffered]:
    """Return the files of *directory* that are not offered as models, by path. *content_of* returns
    the reason why a file holds something else; a model with a table of its own is offered anyway.
    """
    files = [FileNotOffered(escape_controls(path), why) for path, why in found.refused.items()]
    for path, file in found.projectors.items():
        found_content = content_of(file) or OtherContent(PROJECTOR, is_damaged=False)
        is_expected = not found_content.is_damaged
        files.append(FileNotOffered(escape_controls(path), found_content.reason, is_expected))
    for name, file in found.files.items():
        path, model = str(file.relative_to(directory)), configured.get(name)
        if model is None:
            if (content := content_of(file)) is not None:
                reason, is_expected = content.reason, not content.is_damaged
                files.append(FileNotOffered(escape_controls(path), reason, is_expected))
        elif is_other_model(model, file):
            reason = f"[models.{name}] gives its name to another model"
            files.append(FileNotOffered(escape_controls(path), reason, is_expected=True))
    return sorted(files)


def is_other_model(table: ModelConfig | DerivedName, file: Path) -> bool:
    """Return whether a table of the configuration gives its name to something else than *file*."""
    if isinstance(table, DerivedName):
        return True
    other_backend = table.backend not in ("llama", *format_of_file(file.name).backends)
    return other_backend or table.file not in (None, file)


def models_in(directory: Path) -> dict[str, Path]:
    """Return the models in *directory* by name, see `find_models`.

    :raises OSError: the directory cannot be read.
    """
    return find_models(directory).files


def _has_own_name(path: str, name: str) -> bool:
    part = PART.fullmatch(path)
    own = [f"{name}{suffix}" for suffix in FILE_SUFFIXES]
    return path in own or (part is not None and part["stem"] == name)


def _refusal(path: str, name: str) -> str:
    """Return the reason why the file *path* cannot have *name*, or an empty text."""
    if path.rpartition("/")[2].startswith("."):
        return "it is hidden: its name begins with a dot"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8: rename it"
    if not path.endswith(FILE_SUFFIX) and PART.fullmatch(path.lower()):
        return f"llama.cpp finds the parts of a split model only if they end in {FILE_SUFFIX}"
    return "" if name else "its name has no letter A-Z and no digit: rename it"


def _paths_in(directory: Path, refused: dict[str, str]) -> Iterator[str]:
    """Yield the paths of files that are named as models, relative to *directory*. Reasons for which
    a folder was not read are added to *refused*.
    """
    folders, seen, entries = deque([""]), dict[tuple[int, int], str](), 0
    while folders:
        folder = folders.popleft()
        try:
            status = os.stat(directory / folder)
            with os.scandir(directory / folder) as found:
                names = list(islice(found, ENTRIES_MAX + 1 - entries))
        except OSError as exc:
            if not folder:
                raise
            refused[folder] = f"the folder cannot be read: {exc.strerror}"
            continue
        read_as = seen.setdefault((status.st_dev, status.st_ino), folder)
        if read_as != folder:  # a link to a folder that was read already
            if folder.startswith(read_as):
                refused[folder] = f"it is a link that leads back to {read_as or './'}"
            continue
        names.sort(key=lambda entry: entry.name)
        entries += len(names)
        if entries > ENTRIES_MAX:
            refused[folder or "./"] = f"it is not read: there are more than {ENTRIES_MAX} entries"
            return
        for entry in names:
            path = f"{folder}{entry.name}"
            if is_model_file(entry.name):
                yield path
            elif entry.name.startswith("."):
                continue
            elif entry.name.lower().endswith(PYTORCH_SUFFIXES):
                refused[path] = PYTORCH_FILE
            elif reason := _dangling(entry):
                refused[path] = reason
            elif _is_folder(entry):
                if path.count("/") >= DEPTH_MAX:
                    refused[f"{path}/"] = f"folders are read to a depth of {DEPTH_MAX}"
                else:
                    folders.append(f"{path}/")


def _dangling(entry: os.DirEntry[str]) -> str:
    """Return the reason why a link cannot be followed, or an empty text."""
    if not entry.is_symlink():
        return ""
    try:
        os.stat(entry.path)
    except OSError as exc:
        return dangling_reason(exc)
    return ""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that forms a loop
        return False


def missing_files(
    tables: Mapping[str, ModelConfig | DerivedName], others: Collection[str]
) -> list[str]:
    """Return a sentence for each model or adapter in *tables* whose file is missing, and for each
    name of a model that is missing. The models directory has files for *others*.
    """
    files: dict[str, Path] = {}
    lines = []
    bases = {ECHO, *others, *(n for n, t in tables.items() if isinstance(t, ModelConfig))}
    for name, model in tables.items():
        if isinstance(model, DerivedName):
            if find_name(model.of, bases) is None:
                hint = nearest(model.of, bases)
                lines.append(
                    f"[models.{name}] of: there is no model {model.of!r}; {hint}".rstrip("; ")
                )
        elif model.file is not None:
            files[name] = model.file
        elif model.backend != ECHO and name not in others:
            files_sought = " or ".join(f"{name}{s}" for s in suffixes_of_backend(model.backend))
            lines.append(
                f"[models.{name}]: `file` is missing, and so is {files_sought} in models-dir"
            )
        files |= {f"{name}.adapters.{key}": a.file for key, a in model.adapters.items()}
    causes = {name: _cause_of_absence(file) for name, file in files.items()}
    return lines + [f"[models.{n}]: {files[n]} {cause}" for n, cause in causes.items() if cause]


def _cause_of_absence(file: Path) -> str:
    """Return why a file cannot be found, as the end of a sentence; an empty text if it can."""
    try:
        os.stat(file)
    except PermissionError:
        return "is in a folder that may not be read"
    except OSError as exc:
        is_loop = exc.errno == errno.ELOOP
        return "is a link that leads to itself" if is_loop else "does not exist"
    return ""


def files_in_use(file: Path | None) -> list[Path]:
    """Return all files of the model of *file*."""
    if file is None:
        return []
    is_graph = ENGINES[backend_of_file(file.name)].graphs
    return files_of_graph(file) if is_graph else parts_of(file)


def size_bytes(file: Path | None) -> int:
    """Return the bytes of a model's files."""
    try:
        return sum(part.stat().st_size for part in files_in_use(file))
    except OSError:
        return 0


def modified_at(file: Path | None) -> float | None:
    """Return the Unix time at which a model's files were last changed, or None if that is not
    known.
    """
    try:
        return max((part.stat().st_mtime for part in files_in_use(file)), default=None)
    except OSError:
        return None


def signature_of(files: Iterable[Path]) -> Signature:
    """Return the files' places, sizes and times, or the error numbers of missing ones."""
    return tuple(map(_status, files))


def _status(file: Path) -> tuple[int, ...]:
    try:
        s = os.stat(file)
    except OSError as exc:
        return (exc.errno or -1,)
    return *identity_of(s), s.st_ctime_ns


def identity_of(s: os.stat_result) -> tuple[int, ...]:
    """Return a value that identifies an unchanged file under each of its names. A new hard link or
    a rename changes only the time of its status (ctime), which is left out.
    """
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns
