"""The configuration: whether it can be read and is valid."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ...config.settings import Config
from ...config.show import InForce, in_force
from ...config.sources import ConfigError, configuration_file, read_sources
from ..finding import Finding, fail, ok


class Settings(msgspec.Struct, frozen=True):
    """The configuration, or its errors."""

    file: Path | None = None
    config: Config | None = None
    """With errors it lacks what is invalid."""
    shown: InForce | None = None
    """The values in force with their origins."""
    errors: list[str] = []


def read_settings_facts(named: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the configuration as a daemon in *environ* would; a *named* file must exist."""
    file = configuration_file(named, environ)
    try:
        sources = read_sources({"config": named}, environ)
        return Settings(sources.file, sources.config, in_force(sources))
    except ConfigError as exc:
        return Settings(file, exc.rest, errors=exc.lines)


def check_settings(settings: Settings) -> Iterator[Finding]:
    """Check that the configuration is valid."""
    if settings.errors:
        yield fail(
            "\n".join(settings.errors),
            "correct these errors; `inferd config check` lists the remaining ones",
        )
    elif settings.file is None:
        yield ok("no file: the defaults, and settings of the environment")
    else:
        yield ok(f"{settings.file} is valid")
