"""Persisted run-time settings of models: swaps, pins, keep-alives.

One small file in the state directory holds them. Each change writes a new file and renames it into
place, so that a kill at any line leaves the old file or the new one. Lives on the daemon's event
loop.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ..config.model_settings import ModelConfig
from ..state_files import replace_file

PERSISTED_NAMES_MAX = 1000
"""Names with settings; the name changed longest ago is dropped first."""
SETTINGS_BYTES_MAX = 16 << 20
SETTINGS_VERSION = 2
"""Since version 2 all values are stored, so that later defaults do not change them."""

log = structlog.get_logger()


class SwappedName(msgspec.Struct, frozen=True):
    """The configurations of a swapped name: at the time of the swap, and in force since. *to* is
    the name or file of the swap, or empty if only adapters have changed.
    """

    configured: ModelConfig
    now: ModelConfig
    to: str = ""


class PersistedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a name."""

    swapped: SwappedName | None = None
    pinned: bool = False
    keep_alive_s: float | None = None


def version_checksum(version: int) -> int:
    """Return the checksum that distinguishes a newer version from a damaged one."""
    return zlib.crc32(f"inferd models {version}".encode())


class _File(msgspec.Struct):
    version: int = SETTINGS_VERSION
    checksum: int = version_checksum(SETTINGS_VERSION)
    models: dict[str, PersistedSettings] = {}


def pinned_names(path: Path) -> list[str]:
    """Return the names that the file at *path* pins; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(SETTINGS_BYTES_MAX)
        models = msgspec.json.decode(data, type=_File, dec_hook=_path).models
    except (OSError, ValueError):
        return []
    return [name for name, settings in models.items() if settings.pinned]


class PersistedModels:
    """Settings by model name. A damaged file is set aside, one of a newer version is not touched.
    If no file can be written, settings hold until the daemon stops. *note_state* is called with the
    reason why the file does not hold the settings, or with None once it does.
    """

    def __init__(self, path: Path, note_state: Callable[[str | None], None] = lambda _: None):
        self._path, self._note_state = path, note_state
        self._writable = True
        self._models = self._read()

    def settings_of(self, name: str, configured: ModelConfig) -> PersistedSettings:
        """Return the settings of a name that is *configured* now. A swap no longer holds if the
        configuration has changed since.
        """
        settings = self._models.get(name, PersistedSettings())
        swapped = settings.swapped
        if swapped is not None and _packed(swapped.configured) != _packed(configured):
            log.warning("model.swap_ended", model=name, cause="its configuration has changed")
            return msgspec.structs.replace(settings, swapped=None)
        return settings

    def swapped_names(self, folder: Path) -> dict[str, ModelConfig]:
        """Return the configurations before the swap of models in *folder*, because a swapped name
        stays even if its file is removed.
        """
        return {
            name: swap.configured
            for name, settings in self._models.items()
            if (swap := settings.swapped) is not None
            and (file := swap.configured.file) is not None
            and file != swap.now.file
            and file.is_relative_to(folder)
            and swap.configured == ModelConfig().with_file(file)
        }

    def store_settings(self, name: str, settings: PersistedSettings) -> None:
        """Store the settings of a name, if they have changed."""
        if self._models.get(name, PersistedSettings()) == settings:
            return
        self._models.pop(name, None)
        if settings != PersistedSettings():
            self._models[name] = settings
        while len(self._models) > PERSISTED_NAMES_MAX:
            del self._models[next(iter(self._models))]
        self._write()

    def _read(self) -> dict[str, PersistedSettings]:
        try:
            with self._path.open("rb") as file:
                data = file.read(SETTINGS_BYTES_MAX)
            head = msgspec.json.decode(data, type=_Version)
            if head.version <= SETTINGS_VERSION or head.checksum != version_checksum(head.version):
                return msgspec.json.decode(data, type=_File, dec_hook=_path).models
            self._writable = False
            self._note_state(f"{self._path} has a newer version: {head.version}")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as exc:  # not JSON, or of another form
            self._set_aside(exc)
        return {}

    def _set_aside(self, cause: Exception) -> None:
        damaged = self._path.with_name(f"{self._path.name}.damaged-{time.time_ns()}")
        try:
            self._path.rename(damaged)
        except OSError as exc:
            self._note_state(f"{self._path} can be neither read nor set aside: {exc}")
        else:
            self._note_state(f"a damaged file was set aside as {damaged}: {cause}")

    def _write(self) -> None:
        if not self._writable:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._path, _packed(_File(models=self._models)))
        except OSError as exc:
            self._note_state(str(exc))
        else:
            self._note_state(None)


class _Version(msgspec.Struct):
    version: int
    checksum: int = 0


def _packed(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str, order="deterministic")


def _path(kind: type, value: Any) -> Any:
    return kind(value)
