"""Publication of a pulled model: the lock on its name, its checks and its rename, the folder into
which it is written, and the daemon that gets it from there.

A daemon opens no connections to other machines. So the command downloads, and hands the file to a
daemon with another models directory as a descriptor, if the user may manage that daemon.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from ...backends import FILE_SUFFIXES
from ...backends.errors import (
    ConnectionLost,
    InferdError,
    InvalidArgument,
    PermissionDenied,
    UnsupportedOperation,
)
from ...backends.gguf import PART, parts_of
from ...ipc.messages import AddModelResult
from ...ipc.model_names import FILE_SUFFIX, find_name
from ..config.model_settings import check_model_name
from ..models.model_files import FoundModels, find_models
from .part import NOTE_NAME, Part, Progress, PullFailed, hash_file

PROJECTOR_ENDING = "-mmproj"
"""Of the name of a projector that is pulled with its model."""
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class Source(Protocol):
    """The source of a model; `str()` names it in messages."""

    @property
    def name(self) -> str:
        """The model's name, unless the user gives one."""

    @property
    def sha256(self) -> str:
        """The SHA-256 of the model, if it is known before it is fetched, or an empty text."""

    @property
    def suffix(self) -> str:
        """The end of the file's name: that of a language model, or of a graph."""

    def fetch(self, part: Part) -> str:
        """Write the model into *part*; return its required SHA-256, or an empty text."""


class Pulled(msgspec.Struct, frozen=True):
    """A model that was pulled."""

    name: str
    file: str
    size_bytes: int
    sha256: str
    up_to_date: bool = False
    """Whether nothing was fetched, because the model was there already."""


def fetch(
    source: Source,
    models_dir: Path,
    *,
    name: str = "",
    sha256: str = "",
    force: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Pulled:
    """Fetch *source* into *models_dir* as *name*, and check it.

    :raises InvalidArgument: the name is invalid, or is that of another model and *force* is false.
    :raises PullFailed: the source cannot be read, is not a model, or has another hash.
    """
    name = check_model_name(name or source.name)
    if sha256 and not _SHA256.fullmatch(sha256):
        raise InvalidArgument(f"{sha256!r} is not a SHA-256", hint="give 64 hexadecimal digits")
    target = models_dir / f"{name}{source.suffix}"
    if source.suffix != FILE_SUFFIX and (other := models_dir / f"{name}{FILE_SUFFIX}").exists():
        raise InvalidArgument(f"{other} has the name already", hint="use --name for another name")
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with locked_name(models_dir / f".{name}.lock", name):
            return _fetch_locked(source, target, name, sha256, force, progress)
    except OSError as exc:
        raise write_error(exc, target) from exc


def write_error(exc: OSError, target: Path) -> PullFailed:
    """Return the error for a file that cannot be written."""
    full = exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return PullFailed(
        f"{exc.filename or target}: {exc.strerror or exc}",
        hint="free some space, then run it again" if full else "check the models directory",
    )


def _fetch_locked(
    source: Source, target: Path, name: str, sha256: str, force: bool, progress: Progress
) -> Pulled:
    if target.exists() and not force:
        return _existing(target, name, sha256 or source.sha256)
    part = Part(target.with_name(f"{target.name}.part"), str(source), progress)
    try:
        known = source.fetch(part)
        part.resumable = False  # a file that fails its checks cannot be continued
        part.check_complete()
        part.finish_file(sha256 or known)
        publish_part(part, target, name)
        pulled = Pulled(name, str(target), part.size, part.sha256)
    finally:
        part.close()
        if not part.resumable:
            part.remove()
    return pulled


def publish_part(part: Part, target: Path, name: str, *, replace: bool = True) -> None:
    """Rename a finished file, so that the model exists under *name* even after a power failure.

    :raises PullFailed: not *replace*, and the name has a file.
    """
    for note, text in part.notes.items():
        target.with_name(f"{name}.{note}").write_bytes(text)
    if replace:
        os.replace(part.path, target)
    else:
        _rename_new(part.path, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def exists_error(target: Path) -> PullFailed:
    """Return the error for a model whose file would replace another one."""
    return PullFailed(f"{target.name} exists already", hint="remove it first: `inferd rm`")


def _rename_new(path: Path, target: Path) -> None:
    """Rename a file without replacing another one, even one that was made at this moment."""
    try:
        os.link(path, target)
    except FileExistsError:
        raise exists_error(target) from None
    except OSError:  # the file system has no hard links
        if os.path.lexists(target):
            raise exists_error(target) from None
        os.replace(path, target)
    else:
        os.unlink(path)


def files_of(name: str, models_dir: Path) -> list[Path]:
    """Return the files of the model *name*: the model or its parts, notes, a projector that was
    pulled with it, unfinished files. The file of the model may be in a subfolder, or have another
    name.

    :raises InvalidArgument: *name* is that of a file which is not offered as a model.
    """
    try:
        paths, found = sorted(models_dir.iterdir()), find_models(models_dir)
    except FileNotFoundError:
        paths, found = [], FoundModels()
    if reason := found.refusal_of(name):
        raise InvalidArgument(
            f"{name[:200]!r} is not offered as a model: {reason}",
            hint="remove or rename the file itself",
        )
    name = check_model_name(find_name(name, found.files) or name)
    model, prefix = f"{name}.gguf", f"{name}."
    own = parts_of(found.files[name]) if name in found.files else []
    parts = [p for p in paths if (part := PART.fullmatch(p.name)) and part["stem"] == name]
    notes = [
        path
        for path in paths
        if path.name.startswith(prefix) and NOTE_NAME.fullmatch(path.name.removeprefix(prefix))
    ]
    projector = f"{name}{PROJECTOR_ENDING}.gguf"
    unfinished = [
        models_dir / f"{file}{ending}"
        for file in (model, projector, *(f"{name}{suffix}" for suffix in FILE_SUFFIXES))
        for ending in (".part", ".part.json")
    ]
    pulled = (models_dir / model, models_dir / projector)
    files = dict.fromkeys((pulled[0], *own, *parts, *notes, *pulled, *unfinished))
    return [path for path in files if path.is_file()]


def _existing(target: Path, name: str, sha256: str) -> Pulled:
    """Return the existing model.

    :raises InvalidArgument: *sha256* is given, and the model has another hash.
    """
    found = hash_file(target)
    if sha256 and found != sha256.lower():
        raise InvalidArgument(
            f"{target} exists already, with other contents",
            hint="use --force to replace it, or --name for another name",
        )
    return Pulled(name, str(target), target.stat().st_size, found, up_to_date=True)


@contextlib.contextmanager
def locked_name(path: Path, name: str) -> Iterator[None]:
    """Hold the lock on *path*; the file exists only while it is held.

    :raises PullFailed: another process holds it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise PullFailed(
                f"another pull of {name} is under way", hint="wait for it, or use --name"
            ) from None
        if _is_same_file(path, descriptor):
            break
        os.close(descriptor)  # its owner removed it between the two calls
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class Destination(msgspec.Struct, frozen=True):
    """A folder for the downloaded file."""

    folder: Path
    is_handed_over: bool = False
    """Whether the daemon copies the file from there to its own models directory."""
    exists: bool = False
    """Whether the daemon that gets the file has one of this name already."""
    note: str = ""
    """The reason why the daemon will not offer the file, if so."""


class Caller(msgspec.Struct, frozen=True):
    """The user of the command, with their folders."""

    uid: int
    models_dir: Path
    cache: Path


class Answer(msgspec.Struct, frozen=True):
    """The answer of the daemon at *socket* to `add_model` without a file, or its error."""

    socket: Path
    found: AddModelResult | InferdError
    is_connected: bool = True
    owner: int | None = None
    """The user whose folder the answer names, if it can be examined."""
    start: str = ""
    """The command that starts the installed service of the socket, if there is one."""


def choose_destination(caller: Caller, answer: Answer) -> Destination:
    """Return the place for a model, and the reason if the daemon will not offer it there."""
    own, error = caller.models_dir, answer.found
    if isinstance(error, AddModelResult):
        folder = Path(error.file).parent
        if folder == own or answer.owner == caller.uid:
            return Destination(folder)
        return Destination(caller.cache, is_handed_over=True, exists=error.size_bytes > 0)
    if isinstance(error, ConnectionLost) and not answer.start:
        return Destination(own)
    if isinstance(error, ConnectionLost):
        reason = f"it does not run; `{answer.start}` starts it, then pull again"
    elif isinstance(error, PermissionDenied) and answer.is_connected:
        reason = (
            "for that you need the right `manage`. `sudo inferd pull` adds it for all users;"
            " `inferd run FILE` passes the file"
        )
    elif isinstance(error, PermissionDenied):
        reason = (
            "its socket is not open to you. `sudo inferd pull` adds it for all users; `inferd"
            " start` starts a daemon of your own"
        )
    elif isinstance(error, UnsupportedOperation):
        reason = "it takes no files (a fleet's entry, or a daemon of an older version)"
    else:
        reason = error.message
    unseen = f"the model goes to {own}, from which the daemon at {answer.socket} offers nothing"
    return Destination(own, note=f"{unseen}: {reason}")
