"""What was said of models at run time and holds over a restart: swaps, pins, keep-alives.

One small file in the state directory, written whole at each change and renamed into place, so that
a kill at any line leaves the old one or the new one. Lives on the daemon's event loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ..config.model_settings import ModelConfig

__all__ = ("KEPT_FILE", "Kept", "KeptModels", "Taken")

KEPT_FILE = "models.json"
KEPT_MAX = 1000
"""Names that something is kept of; the one changed longest ago goes first."""
KEPT_BYTES_MAX = 16 << 20
VERSION = 2
"""Since 2, all values are stored: a default that changes later changes none of them."""

log = structlog.get_logger()


class Taken(msgspec.Struct, frozen=True):
    """A name that was taken over: what the configuration said of it then, and what it is now."""

    configured: ModelConfig
    now: ModelConfig


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a name."""

    swapped: Taken | None = None
    pinned: bool = False
    keep_alive_s: float | None = None


class _File(msgspec.Struct):
    version: int
    models: dict[str, Kept] = {}


class KeptModels:
    """What is kept, by model name. A file that cannot be read is set aside, one of a newer version
    left alone; where none can be written the daemon serves, and what is said holds until its end.
    *on_file* hears why the file does not keep what was said, or with None that it does.
    """

    def __init__(self, path: Path, on_file: Callable[[str | None], None] = lambda _: None):
        self._path, self._on_file = path, on_file
        self._writable = True
        self._models = self._read()

    def of(self, name: str, configured: ModelConfig) -> Kept:
        """Return what is kept of a name that the configuration says *configured* of. If it said
        something else when the name was taken over, that is over: the operator has changed it.
        """
        kept = self._models.get(name, Kept())
        if kept.swapped is not None and _packed(kept.swapped.configured) != _packed(configured):
            log.warning("model.swap_is_over", model=name, cause="its configuration has changed")
            return msgspec.structs.replace(kept, swapped=None)
        return kept

    def taken(self, folder: Path) -> dict[str, ModelConfig]:
        """Return what models of *folder* were before their names were taken over: such a name stays
        though its file goes.
        """
        swaps = {n: k.swapped for n, k in self._models.items() if k.swapped is not None}
        found = {n: s.configured for n, s in swaps.items() if s.now.file != s.configured.file}
        return {
            name: configured
            for name, configured in found.items()
            if configured.file is not None
            and configured.file.parent == folder
            and configured == ModelConfig(file=configured.file)
        }

    def keep(self, name: str, kept: Kept) -> None:
        """Write down what is said of a name, if that is anything new."""
        if self._models.get(name, Kept()) == kept:
            return
        self._models.pop(name, None)
        if kept != Kept():
            self._models[name] = kept
        while len(self._models) > KEPT_MAX:
            del self._models[next(iter(self._models))]
        self._write()

    def _read(self) -> dict[str, Kept]:
        try:
            with self._path.open("rb") as file:
                data = file.read(KEPT_BYTES_MAX)
            version = msgspec.json.decode(data, type=_Version).version
            if version <= VERSION:
                return msgspec.json.decode(data, type=_File, dec_hook=_path).models
            self._writable = False
            self._on_file(f"{self._path} is of a newer version: {version}")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as exc:  # no JSON, or not of this form
            self._set_aside(exc)
        return {}

    def _set_aside(self, cause: Exception) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.time_ns()}")
        try:
            self._path.rename(aside)
        except OSError as exc:
            self._on_file(f"{self._path} cannot be read, nor set aside: {exc}")
        else:
            self._on_file(f"a damaged one was set aside as {aside}: {cause}")

    def _write(self) -> None:
        if not self._writable:
            return
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_packed(_File(VERSION, self._models)))
            new.replace(self._path)
        except OSError as exc:
            self._on_file(str(exc))
        else:
            self._on_file(None)


class _Version(msgspec.Struct):
    version: int


def _packed(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str, order="deterministic")


def _path(kind: type, value: Any) -> Any:
    return kind(value)
