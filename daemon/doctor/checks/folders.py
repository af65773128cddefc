"""The daemon's folders: the models, and what it keeps."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ...config.settings import Config
from ...residency.model_files import files_in_use, models_in, size_bytes
from ...residency.sizes import size_text
from ..finding import Finding, fail, ok, warn
from .accounts import READ, SEARCH, WRITE, Account, barrier
from .engine_packages import ModelFile

DISK_BYTES_MIN = 1 << 30
"""With less than this left a disk counts as full."""
NAMED_MAX = 20
JOURNAL = "sessions.db*"


class Models(msgspec.Struct, frozen=True):
    """The models that there are for a daemon that *account* runs."""

    folder: Path
    account: Account
    exists: bool
    barrier: str = ""
    """What keeps the daemon from the folder."""
    files: dict[str, Path] = {}
    """By name, those of the folder and of the configuration; of several parts the first."""
    sizes: dict[str, int] = {}
    missing: dict[str, Path] = {}
    """Configured files that are not there: of models, and of their adapters."""
    unreadable: dict[str, str] = {}
    """What keeps the daemon from a file, by the file."""

    @property
    def smallest(self) -> tuple[str, int] | None:
        """Return the smallest model and its bytes."""
        found = [(name, size) for name, size in self.sizes.items() if size > 0]
        return min(found, key=lambda it: it[1], default=None)


def look_at_models(config: Config, account: Account) -> Models:
    """Look for the models of the folder and of the configuration."""
    folder = config.models_dir
    if not folder.is_dir():
        files, stopped = {}, ""
    else:
        stopped = barrier(account, folder, READ | SEARCH)
        files = models_in(folder)
    configured = _configured(config)
    missing = {name: file for name, file in configured.items() if not file.exists()}
    own = {name for name in config.models if name not in missing}
    files = {**files, **{name: file for name, file in configured.items() if name in own}}
    parts = [part for file in files.values() for part in files_in_use(file) if part.exists()]
    return Models(
        folder=folder,
        account=account,
        exists=folder.is_dir(),
        barrier=stopped,
        files=files,
        sizes={name: size_bytes(file, -1) for name, file in files.items()},
        missing=missing,
        unreadable={str(p): b for p in parts if not stopped and (b := barrier(account, p, READ))},
    )


def _configured(config: Config) -> dict[str, Path]:
    """Return the files that the configuration names, each by what it is for."""
    found = {name: m.file for name, m in config.models.items() if m.file is not None}
    for name, model in config.models.items():
        for adapter, entry in model.adapters.items():
            found[f"{name}.adapters.{adapter}"] = entry.file
    return found


def check_models(models: Models) -> Iterator[Finding]:
    """Check that the models are there, and that the daemon may read them."""
    who = models.account.name
    if models.barrier:
        yield fail(
            "models",
            f"{who} may not read {models.folder}: stopped at {models.barrier}",
            f"let {who} read and search it, or name another models-dir",
        )
    for part, stopped in list(models.unreadable.items())[:NAMED_MAX]:
        yield fail(
            "models",
            f"{who} may not read {part}: stopped at {stopped}",
            f"let {who} read or search {stopped}",
        )
    for name, file in list(models.missing.items())[:NAMED_MAX]:
        yield fail(
            "models", f"[models.{name}]: {file} is not there", "correct `file`, or put it there"
        )
    if not models.exists:
        yield warn(
            "models", f"there is no folder {models.folder}", "`inferd pull smollm2` makes it"
        )
    elif not models.files and not models.barrier:
        yield warn(
            "models", f"no model in {models.folder}", "`inferd pull smollm2` gets a small one"
        )
    elif models.files:
        size = size_text(sum(models.sizes.values()))
        yield ok("models", f"{len(models.files)} of {size}, in {models.folder}")


def check_files(files: Sequence[ModelFile]) -> Iterator[Finding]:
    """Check what was read of the models' headers."""
    for file in [f for f in files if f.error][:NAMED_MAX]:
        yield fail("models", f"{file.path}: {file.error}", file.hint)


class State(msgspec.Struct, frozen=True):
    """Where a daemon that *account* runs keeps what outlives it."""

    folder: Path
    account: Account
    barrier: str = ""
    read_only: bool = False
    free_bytes: int = 0
    seen_by_others: list[str] = []
    """Files with what users wrote, that others than their owner may read."""


def look_at_state(config: Config, account: Account) -> State:
    """Look at the folder, or at the one in which it would be made."""
    place = next(p for p in (config.state_dir, *config.state_dir.parents) if p.exists())
    files = [*config.state_dir.glob(JOURNAL)] if place == config.state_dir else []
    return State(
        folder=config.state_dir,
        account=account,
        barrier=barrier(account, place, WRITE | SEARCH),
        read_only=bool(os.statvfs(place).f_flag & os.ST_RDONLY),
        free_bytes=shutil.disk_usage(place).free,
        seen_by_others=[str(file) for file in files if _seen_by_others(file)],
    )


def _seen_by_others(file: Path) -> bool:
    try:
        return bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except FileNotFoundError:  # the daemon has just done without it
        return False


def check_state(state: State) -> Iterator[Finding]:
    """Check that the daemon can keep something, and that it is private."""
    who = state.account.name
    if state.barrier or state.read_only:
        why = f"stopped at {state.barrier}" if state.barrier else "its file system is read-only"
        yield fail(
            "state",
            f"{who} may not write to {state.folder}: {why}; sessions end with the daemon",
            f"let {who} write there, or name another state-dir",
        )
    for file in state.seen_by_others:
        yield fail(
            "state", f"others may read {file}: it holds what users wrote", f"chmod 600 {file}"
        )
    if state.free_bytes < DISK_BYTES_MIN:
        yield warn(
            "state",
            f"{size_text(state.free_bytes)} are free on the disk of {state.folder}",
            "make room: sessions are not written down where there is none, nor KV states",
        )
    elif not state.barrier:
        yield ok("state", f"{state.folder}, {size_text(state.free_bytes)} free")
