"""The configuration: can it be read, and is everything in it right."""

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
    """What is configured, or why nothing is."""

    file: Path | None = None
    config: Config | None = None
    shown: InForce | None = None
    """What of it is in force, and who said it."""
    errors: list[str] = []


def look_at_settings(named: Path | None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the configuration as a daemon in *environ* would; a *named* file must be there."""
    file = configuration_file(named, environ)
    try:
        sources = read_sources({"config": named}, environ)
        return Settings(sources.file, sources.config, in_force(sources))
    except ConfigError as exc:
        return Settings(file, errors=exc.lines)


def check_settings(settings: Settings) -> Iterator[Finding]:
    """Check that the configuration can be used."""
    if settings.errors:
        yield fail(
            "configuration",
            "\n".join(settings.errors),
            "correct these; `inferd config check` tells what is left",
        )
    elif settings.file is None:
        yield ok("configuration", "no file: the defaults, and what the environment says")
    else:
        yield ok("configuration", f"{settings.file} is right")
