"""The configuration, and the settings that were measured on this machine, or else the rule for its
CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ....backends.library import LLAMA_COMMIT
from ....backends.tuning_choice import TuningRecord, choose_by_cpu, this_cpu
from ...config.settings import Config
from ...config.show import InForce, in_force
from ...config.sources import ConfigError, configuration_file, read_sources
from ...models.tuning_records import read_records
from ...state_files import TUNING_FILE
from ..finding import Finding, fail, ok, warn


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


# Measured settings.


SHOWN_MAX = 8
"""Records that have a line of their own, the latest ones."""


class TunedSettings(msgspec.Struct, frozen=True):
    """The records of this CPU and build, or the *problem* that prevents reading them."""

    rule: str
    records: tuple[TuningRecord, ...] = ()
    problem: str = ""
    is_on: bool = True


def inspect_tuned_settings(config: Config) -> TunedSettings | None:
    """Read the records in the state directory; return None if it cannot be read."""
    cpu = this_cpu(config.cores)
    by_cpu = choose_by_cpu(cpu)
    rule = f"flash attention {_on_off(by_cpu.setting.flash_attn)}: {by_cpu.reason}"
    try:
        found = read_records(config.state_dir / TUNING_FILE)
    except FileNotFoundError:
        found = ()
    except OSError:  # another user's; the check of the state directory reports it
        return None
    except ValueError as exc:
        return TunedSettings(rule, problem=str(exc), is_on=config.tuning)
    here = tuple(r for r in found if (r.cpu, r.build) == (cpu.key, LLAMA_COMMIT))
    return TunedSettings(rule, here, is_on=config.tuning)


def check_tuned_settings(settings: TunedSettings) -> Iterator[Finding]:
    """Yield a line for each measured model, or one for the rule."""
    if settings.problem:
        yield warn(
            f"{TUNING_FILE} in the state directory is ignored: {settings.problem}",
            "delete it: models are measured again when they have no work",
        )
    if not settings.records:
        when = "a model is measured once it has no work" if settings.is_on else "`tuning` is off"
        yield ok(f"no measured settings, {when}; {settings.rule}")
    for record in settings.records[-SHOWN_MAX:]:
        shape = record.shape
        model = f"{shape.architecture} with {shape.layers} layers of {shape.embedding}"
        yield ok(
            f"{model}: flash attention {_on_off(record.chosen.flash_attn)},"
            f" measured: {record.reason}"
        )


def _on_off(value: bool) -> str:
    return "on" if value else "off"
