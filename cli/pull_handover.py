"""Models that `inferd pull` hands to a running daemon with another models directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from ..backends.errors import InferdError, InvalidArgument
from ..daemon.pull.part import NOTE_NAME, Progress
from ..daemon.pull.sources import LocalFile
from ..daemon.pull.target import (
    Answer,
    Caller,
    Destination,
    Pulled,
    Source,
    choose_destination,
    fetch,
)
from .client import client_of, socket_of

COPY_S_MAX = 6 * 3600.0
NOTES_BYTES_MAX = 512 << 10
"""Texts beside a model that fit into a frame with the other parameters."""


def find_destination(socket: Path | None, models_dir: Path, name: str) -> Destination:
    """Return the folder for the model *name*, by the answer of the daemon that would serve it."""
    caller = Caller(os.geteuid(), models_dir, platformdirs.user_cache_path("inferd"))
    return choose_destination(caller, _ask_daemon(socket_of(socket), name))


def _ask_daemon(socket: Path, name: str) -> Answer:
    client = client_of(socket)
    try:
        client.open()
    except InferdError as exc:
        return Answer(socket, exc, is_connected=False, start=_start_command(socket))
    with client:
        try:
            found = client.add_model(name, timeout=COPY_S_MAX)
        except InferdError as exc:
            return Answer(socket, exc)
    try:
        owner = os.stat(Path(found.file).parent).st_uid
    except OSError:  # the user cannot look into the folder's parent
        owner = None
    return Answer(socket, found, owner=owner)


def _start_command(socket: Path) -> str:
    """Return the command that starts the installed service of *socket*, or an empty text."""
    from ..daemon.service.install import UNITS, installed_service

    service = installed_service(socket)
    if service is None:
        return ""
    command = service.systemctl("start", UNITS[1]).command
    return " ".join(command if service.user or os.geteuid() == 0 else ("sudo", *command))


def add_to_daemon(
    socket: Path | None,
    source: Source,
    destination: Destination,
    name: str,
    sha256: str,
    *,
    force: bool,
    progress: Progress,
) -> Pulled:
    """Fetch *source*, and let the daemon copy the file. A file of this machine is passed as it is.

    :raises InvalidArgument: the daemon has a file of this name with other contents.
    :raises InferdError: the file cannot be fetched, or the daemon refuses it; it is then kept.
    """
    if destination.exists:
        return _existing(socket, source, name, sha256, force)
    if isinstance(source, LocalFile):
        return _hand_over(socket, source.find(), name, sha256, {}, progress)
    pulled = fetch(
        source, destination.folder, name=name, sha256=sha256, force=True, progress=progress
    )
    file, notes = Path(pulled.file), _notes_of(Path(pulled.file), name)
    try:
        added = _hand_over(socket, file, name, pulled.sha256, notes, progress)
    except InferdError as exc:
        exc.hint = f"{exc.hint}; the file is kept: `inferd pull {file} --name {name}`"
        raise
    for path in (file, *(file.with_name(f"{name}.{note}") for note in notes)):
        path.unlink(missing_ok=True)
    return added


def _existing(socket: Path | None, source: Source, name: str, sha256: str, force: bool) -> Pulled:
    with client_of(socket) as client:
        found = client.add_model(name, with_hash=True, timeout=COPY_S_MAX)
    required = sha256 or source.sha256
    if force or (required and required.lower() != found.sha256):
        folder = Path(found.file).parent
        raise InvalidArgument(
            f"{found.file} exists already{'' if force else ', with other contents'}",
            hint=f"remove it: `sudo inferd rm {name} --models-dir {folder}`; or use --name",
        )
    return Pulled(name, found.file, found.size_bytes, found.sha256, up_to_date=True)


def _hand_over(
    socket: Path | None,
    file: Path,
    name: str,
    sha256: str,
    notes: Mapping[str, bytes],
    progress: Progress,
) -> Pulled:
    size = file.stat().st_size

    def report(fraction: float) -> None:
        progress("handing over", round(fraction * size), size)

    with client_of(socket) as client:
        added = client.add_model(
            name, file, sha256=sha256, notes=notes, on_progress=report, timeout=COPY_S_MAX
        )
    return Pulled(name, added.file, added.size_bytes, added.sha256)


def _notes_of(file: Path, name: str) -> dict[str, bytes]:
    """Return the texts beside a model, such as its licence, as far as they fit into a frame."""
    notes, size = dict[str, bytes](), 0
    for path in sorted(file.parent.glob(f"{name}.*")):
        note = path.name.removeprefix(f"{name}.")
        if NOTE_NAME.fullmatch(note) and (size := size + path.stat().st_size) <= NOTES_BYTES_MAX:
            notes[note] = path.read_bytes()
    return notes
