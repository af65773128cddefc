"""`inferd tune`: the measurement of a model's settings on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...backends.errors import BackendError, PermissionDenied
from ..options import EXIT_BUSY, ConfigFile, JsonOutput, ModelOrFile, ModelsDir, StateDir
from ..output import fail, fraction_bar, note, table, write, write_json

if TYPE_CHECKING:
    from ...backends import ModelSpec
    from ...backends.llama.measuring.requests import Opened
    from ...backends.tuning_choice import CpuFacts, TuningRecord
    from ...daemon.config.settings import Config
    from ...daemon.models.tuning_records import TuningRecords
    from ...daemon.tuning.measured_stages import TuneResult

SECONDS, SECONDS_MIN, SECONDS_MAX = 120.0, 1.0, 3600.0
WAIT_S = 20.0
TOO_SHORT = "use more --seconds, or measure when other programs are idle"


def tune(
    model: ModelOrFile,
    apply: Annotated[
        bool, typer.Option("--apply", help="Store the choice; the next loads use it.")
    ] = False,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="SECONDS",
            min=SECONDS_MIN,
            max=SECONDS_MAX,
            help="The time of the measurement; large models need more.",
        ),
    ] = SECONDS,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            max=SECONDS_MAX,
            help="The longest wait until other programs are idle.",
        ),
    ] = WAIT_S,
    config: ConfigFile = None,
    models_dir: ModelsDir = None,
    state_dir: StateDir = None,
    as_json: JsonOutput = False,
) -> None:
    """Measure which settings of a model are fastest on this machine.

    It compares flash attention, numbers of threads, sizes of micro-batches and types of KV states,
    in a process of its own: it needs no daemon, and the load of other programs distorts it.
    """
    from ...daemon.config.sources import load_config
    from ...daemon.models.tuning_records import TuningRecords
    from ...daemon.tuning.measured_stages import IDLE_CORES_MAX
    from .measured_model import measured_spec

    settings = load_config({"config": config, "models_dir": models_dir, "state_dir": state_dir})
    spec = measured_spec(model, settings)
    records = TuningRecords(settings.state_dir)
    if apply:
        _check_writable(settings.state_dir)
    found = _measure(spec, settings, records, seconds, wait, show_bar=not as_json)
    if apply and found.is_decided:
        _store(records, found.record, settings.state_dir)
    if as_json:
        write_json(_document(found, settings, spec.name, applied=apply and found.is_decided))
    else:
        _write_tables(found, settings)
    if found.load > IDLE_CORES_MAX:
        used = f"other programs used {found.load:.1f} cores meanwhile"
        note(f"{used}: measure again when they are idle")
    if not found.is_decided:
        fail(f"{seconds:g} s were too short to compare both kinds of attention", TOO_SHORT)
        raise typer.Exit(EXIT_BUSY if apply else 0)
    if not as_json:
        _write_choice(found, settings, model, spec.name, applied=apply)
    for name in ("flash-attn", "threads", "threads-batch"):
        if spec.options.get(name, "auto") not in ("auto", 0):
            note(f"{name} is set in the configuration, which goes before a stored choice")


class _Found(NamedTuple):
    """A measurement of the *opened* model. *load* is that of other programs, in cores."""

    measurement: TuneResult
    opened: Opened
    cpu: CpuFacts
    load: float
    record: TuningRecord

    @property
    def is_decided(self) -> bool:
        """Whether both kinds of attention were compared."""
        from ...daemon.tuning.report import is_attention_decided

        return is_attention_decided(self.measurement)


def _measure(
    spec: ModelSpec,
    settings: Config,
    records: TuningRecords,
    seconds: float,
    wait: float,
    *,
    show_bar: bool,
) -> _Found:
    """Measure a model for *seconds*, once other programs are idle or *wait* seconds are over."""
    from ...backends.library import LLAMA_COMMIT
    from ...backends.tuning_choice import this_cpu
    from ...daemon.residency.machine import MachineMemory
    from ...daemon.tuning.measured_stages import MeasuringProcess, OtherPrograms, measure_model
    from ...daemon.tuning.report import present_choice, record_of, variant_of

    others = OtherPrograms()
    load = others.wait_until_idle(wait, _note_busy)
    with MeasuringProcess() as process, fraction_bar(spec.name, show=show_bar) as bar:
        opened = process.open_model(spec, MachineMemory().free_bytes())
        cpu = this_cpu(settings.cores)
        choice = present_choice(spec, opened.shape, cpu, records)
        others.restart()
        measurement = measure_model(
            process,
            opened,
            spec,
            variant_of(choice.setting, opened.shape),
            settings.cores,
            seconds,
            lambda stage, fraction: bar(fraction) if bar else None,
        )
        load = max(load, others.cores())
    record = record_of(measurement, opened.shape, cpu.key, LLAMA_COMMIT, time.time())
    return _Found(measurement, opened, cpu, load, record)


def _document(found: _Found, settings: Config, name: str, *, applied: bool) -> dict[str, Any]:
    """Return the measurement of the model *name* for `--json`."""
    from ...backends.library import LLAMA_COMMIT
    from ...daemon.tuning.report import document_of

    facts: dict[str, Any] = {"model": name, "cpu": found.cpu.name, "cores": settings.cores}
    facts |= {"other_programs": round(found.load, 2), "build": LLAMA_COMMIT}
    facts |= {"reason": found.record.reason, "applied": applied}
    return facts | document_of(found.measurement)


def _write_choice(found: _Found, settings: Config, model: str, name: str, *, applied: bool) -> None:
    """Write the fastest setting, and the command that stores it for *model* if that is not done."""
    from ...daemon.tuning.report import setting_text

    chosen = setting_text(found.measurement.chosen, settings.cores)
    if applied:
        write(f"\nstored: {chosen}; the next load of {name} uses it")
    else:
        write(f"\nfastest: {chosen}\n`inferd tune {model} --apply` stores it for the next loads")


def _store(records: TuningRecords, record: TuningRecord, state_dir: Path) -> None:
    try:
        records.store(record)
    except OSError as exc:
        raise BackendError(
            f"the choice cannot be stored in {state_dir}: {exc.strerror or exc}",
            hint="free space there, or name another --state-dir",
        ) from None


def _note_busy(cores: float) -> None:
    note(f"waiting until other programs are idle: they use {cores:.1f} cores")


def _check_writable(state_dir: Path) -> None:
    """Check before the measurement that its choice can be stored, and read by the daemon.

    :raises PermissionDenied: the directory belongs to another user.
    """
    place = next(p for p in (state_dir, *state_dir.parents) if p.exists())
    is_own = place != state_dir or place.stat().st_uid == os.geteuid()
    if not is_own or not os.access(place, os.W_OK):
        raise PermissionDenied(
            f"{state_dir} belongs to another user, whose daemon could not read the choice",
            hint="run it as the daemon's user, as with `sudo -u inferd inferd tune …`",
        )


def _write_tables(found: _Found, config: Config) -> None:
    from ...daemon.printable import size_text
    from ...daemon.tuning.report import TITLES, counted, table_of_stage

    shape, measurement = found.opened.shape, found.measurement
    write(
        f"{shape.architecture}, {shape.layers} layers, {size_text(shape.size_bytes)};"
        f" {found.cpu.name or 'unknown CPU'}, {counted(config.cores, 'core')};"
        f" {measurement.seconds:.0f} s\n"
        "Medians; TIME is that of a usual mix of steps, as a share of the first row's, with its"
        " 95 % interval."
    )
    for result in measurement.stages:
        rounds = max((c.rounds for c in result.comparisons), default=0)
        write(f"\n{TITLES[result.stage.name]} ({counted(rounds, 'round')})")
        table(*table_of_stage(result, config.cores))
