"""The models directory, and the files of a model.

A split model `NAME` has several files: `NAME-00001-of-00003.gguf` and so on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ...backends.split_gguf import PART, parts_of
from ..config.model_settings import MODEL_NAME, ModelConfig

Signature = tuple[tuple[int, ...], ...]
"""A value that changes with the files."""


def models_in(directory: Path) -> dict[str, Path]:
    """Return the models in *directory* by name, each with its (first) file; none if there is no
    directory. A split model counts if any part exists; its load then reports missing parts.

    :raises OSError: the directory cannot be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return {}
    found: dict[str, Path] = {}
    for file in sorted(directory / name for name in names if name.endswith(".gguf")):
        name = name_of_file(file.name)
        if MODEL_NAME.fullmatch(name):
            found.setdefault(name, parts_of(file)[0])
    return found


def name_of_file(file: str) -> str:
    """Return the name of the model in a *file* of the models directory."""
    part = PART.fullmatch(file)
    return part["stem"] if part else file.removesuffix(".gguf")


def missing_files(models: Mapping[str, ModelConfig], others: Collection[str]) -> list[str]:
    """Return a sentence for each model or adapter in the tables *models* whose file is missing. The
    models directory has files for *others*.
    """
    files: dict[str, Path] = {}
    lines = []
    for name, model in models.items():
        if model.file is not None:
            files[name] = model.file
        elif model.backend == "llama" and name not in others:
            lines.append(f"[models.{name}]: `file` is missing, and so is {name}.gguf in models-dir")
        files |= {f"{name}.adapters.{key}": a.file for key, a in model.adapters.items()}
    # `Path.exists` raises most errors, such as EACCES.
    missing = [(n, f) for n, f in files.items() if not os.path.exists(f)]
    return lines + [f"[models.{n}]: {f} does not exist" for n, f in missing]


def files_in_use(file: Path | None) -> list[Path]:
    """Return all files of the model of *file*."""
    return parts_of(file) if file is not None else []


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
