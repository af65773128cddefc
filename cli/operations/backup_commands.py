"""`inferd backup` and `inferd restore`: the state of a daemon in one file, and back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from ...backends.errors import InferdError, InvalidArgument, NotFound, PermissionDenied
from ..commands import optional_import
from ..options import ConfigFile, JsonOutput, StateDir
from ..output import write_result

BackupFile = Annotated[Path, typer.Argument(metavar="FILE", help="The backup, a tar file.")]


def backup(
    file: BackupFile,
    kv: Annotated[bool, typer.Option("--kv", help="Also save the KV states on disk.")] = False,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: JsonOutput = False,
) -> None:
    """Save sessions, named states, jobs and the settings of models in a new file.

    The daemon may run meanwhile. The file has texts of users; only you can read it.
    """
    with optional_import("inferd backup needs the engine", "daemon"):
        from ...daemon.backup import write_backup

    state = _state_directory(state_dir, config)
    with _new_file(file) as target, _acting_as_owner(state):
        manifest = write_backup(state, target, time.time(), kv=kv)
    files, count = sorted(manifest.files), manifest.kv_files
    found = {"file": str(file), "state_dir": str(state), "files": files, "kv_files": count}
    text = f"saved {', '.join(files)}{f' and {count} KV files' if kv else ''} in {file}"
    write_result(as_json, found, text)


def restore(
    file: BackupFile,
    state_dir: StateDir = None,
    config: ConfigFile = None,
    as_json: JsonOutput = False,
) -> None:
    """Replace the state of a daemon that does not run by a backup.

    The previous state is kept in a folder of its own. After an interruption the state is either the
    previous one or that of the backup.
    """
    with optional_import("inferd restore needs the engine", "daemon"):
        from ...daemon.backup import restore_backup
        from ...daemon.state_lock import StateDirectory

    state = _state_directory(state_dir, config)
    with _existing_file(file) as source:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _acting_as_owner(state), StateDirectory(state).locked():
            aside = restore_backup(source, state, time.time())
    text = f"restored {file} in {state}"
    if aside is not None:
        text += f"; the previous state is in {aside}, which may be deleted"
    found = {"state_dir": str(state), "previous": None if aside is None else str(aside)}
    write_result(as_json, found, text)


def _state_directory(named: Path | None, config: Path | None) -> Path:
    from ...daemon.config.sources import load_config

    return load_config({"config": config, "state_dir": named}).state_dir


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that only its owner can read; it is removed after an error."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InvalidArgument(
            f"{path} exists already", hint="name another file: nothing is overwritten"
        ) from None
    except OSError as exc:
        raise _cannot_open(path, exc) from None
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def _existing_file(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as exc:
        raise _cannot_open(path, exc) from None
    with file:
        yield file


def _cannot_open(path: Path, error: OSError) -> InferdError:
    message = f"{path} cannot be opened: {error.strerror}"
    if isinstance(error, PermissionError):
        return PermissionDenied(message, hint="name a file that you may open")
    if isinstance(error, FileNotFoundError):
        return NotFound(message, hint="check its folder and name")
    return InvalidArgument(message, hint="name another file")


@contextmanager
def _acting_as_owner(state: Path) -> Iterator[None]:
    """Act as the owner of the state directory, if root calls. Its files then belong to the daemon's
    user, and no link in it leads root to a file of another user.
    """
    try:
        found = state.stat()
    except OSError as exc:
        raise NotFound(
            f"the state directory {state} cannot be used: {exc.strerror}",
            hint="name it by --state-dir: /var/lib/inferd is the service's",
        ) from None
    if os.geteuid() != 0 or found.st_uid == 0:
        yield
        return
    groups, group = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(found.st_gid)
    os.seteuid(found.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
