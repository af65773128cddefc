"""Values that workers are started with, computed from a model, its files and the configuration, and
the results of earlier loads: memory estimates and failures, valid while the files are unchanged.

No file holds the results. Both caches live on the daemon's event loop.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ...backends import ENGINES, AdapterSpec, MemoryNeed, ModelSpec
from ...backends.engine_options import engine_options_of
from ...backends.errors import (
    InferdError,
    InvalidArgument,
    LoadFailed,
    OutOfMemory,
    UnsupportedOperation,
)
from ...backends.model_spec import CPU, DEVICE_OPTION, LANES_MAX, TemplateSpec
from ...scheduler.messages import MemoryEstimate
from ..config.model_settings import AdapterConfig
from ..config.settings import Config
from .model import ManagedModel
from .model_files import Signature, files_in_use, signature_of
from .tuner import Tuner

ESTIMATED_MODELS_MAX = 1000
SHAPES_MAX = 64
"""Estimates per model; each smaller shape halves the slots, the context or the batch."""
FAILURES_MAX = 1000
_PERMANENT = (LoadFailed, UnsupportedOperation, InvalidArgument)


class EstimateCache:
    """Memory estimates by spec, whatever the model's name.

    Estimates that name devices are not stored, because they depend on the devices' free memory.
    """

    def __init__(self) -> None:
        self._by_spec: dict[bytes, tuple[Signature, list[MemoryEstimate]]] = {}

    def estimates_of(self, spec: ModelSpec, signature: Signature) -> list[MemoryEstimate]:
        """Return the estimates for *spec* and files with *signature*, oldest first."""
        stored_for, estimates = self._by_spec.get(_key(spec), ((), []))
        return list(estimates) if stored_for == signature else []

    def store_estimate(
        self, spec: ModelSpec, signature: Signature, estimate: MemoryEstimate
    ) -> None:
        """Store an estimate for files that had *signature* before it was made."""
        if spec.fd >= 0 or estimate.devices:
            return
        estimates = self.estimates_of(spec, signature)
        if len(estimates) < SHAPES_MAX and all(e.shape != estimate.shape for e in estimates):
            self._by_spec.pop(_key(spec), None)
            while len(self._by_spec) >= ESTIMATED_MODELS_MAX:
                del self._by_spec[next(iter(self._by_spec))]
            self._by_spec[_key(spec)] = signature, [*estimates, estimate]


def _key(spec: ModelSpec) -> bytes:
    """Return a digest, because the records of measured settings in a spec can have many bytes."""
    packed = msgspec.msgpack.encode(msgspec.structs.replace(spec, name=""))
    return hashlib.sha256(packed).digest()


class FailedLoads:
    """Failed loads by model name, kept for *retry_s*; with 0, none are kept."""

    def __init__(self, retry_s: float, seconds: Callable[[], float]):
        self._retry_s, self._seconds = retry_s, seconds
        self._failures: dict[str, tuple[InferdError, float, Signature, object]] = {}
        """Each with its error, time, files and conditions."""

    def note_load(
        self, name: str, files: list[Path], conditions: object, error: InferdError
    ) -> None:
        """Store the failed load of *name* if the same load would fail again."""
        if not self._retry_s or not _is_permanent(error):
            return
        self._failures.pop(name, None)
        while len(self._failures) >= FAILURES_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = error, self._seconds(), signature_of(files), conditions

    def forget_load(self, name: str) -> None:
        """Forget that *name* could not be loaded."""
        self._failures.pop(name, None)

    def check_load(self, name: str, files: list[Path], conditions: object) -> None:
        """Raise the error of the last load again if it is recent and neither the files nor the
        *conditions* have changed.

        :raises InferdError: that error, with the seconds since and the seconds until a retry.
        """
        if name not in self._failures:
            return
        error, failed_at, signature, failed_conditions = self._failures[name]
        passed_s = self._seconds() - failed_at
        if passed_s >= self._retry_s or signature_of(files) != signature:
            del self._failures[name]
        elif failed_conditions == conditions:
            times = {"failed_s_ago": passed_s, "retry_in_s": self._retry_s - passed_s}
            raise type(error)(
                f"{error.message} (failed {passed_s:.1f} s ago; tried again after"
                f" {self._retry_s:.15g} s, or when its file changes)",
                hint=error.hint,
                data=error.data | times,
                retryable=error.retryable,
            )


def _is_permanent(error: InferdError) -> bool:
    """Return whether the same load would fail again. Memory may become free, but never more than
    the total. Death or silence of the process and an upgrade prove nothing about the file.
    """
    if error.data.get("cause") in ("died", "upgraded", "silent"):
        return False
    if isinstance(error, OutOfMemory):
        return int(error.data.get("needed_bytes", 0)) > int(error.data.get("total_bytes", 0))
    return isinstance(error, _PERMANENT)


CTX_SIZE_DEFAULT = 4096
TEMPLATE = {"chat_template": "chat-template", "chat_template_file": "chat-template-file"}
"""Parameters by the fields of a spec."""


def spec_of(model: ManagedModel, config: Config, tuner: Tuner) -> ModelSpec:
    """Return the spec to load: the configured values, or else those that a client requested."""
    options, requested = model.options(), model.requested
    ctx_size = max(options.get("ctx-size", 0), 0)
    if not ctx_size and requested.get("ctx-size", 0) > CTX_SIZE_DEFAULT:
        ctx_size = requested["ctx-size"]
    threads = options.get("threads", 0) or config.cores
    is_graph = ENGINES[model.config.backend].graphs
    keeps_threads = bool(options.get("threads", 0) or options.get("threads-batch", 0))
    return ModelSpec(
        name=model.name,
        backend=model.config.backend,
        path=str(model.config.file or ""),
        fd=-1 if model.passed_file is None else model.passed_file.fd,
        weights_fd=-1 if model.passed_file is None else model.passed_file.weights_fd,
        slots=model.slots_configured,
        ctx_size=ctx_size,
        batch_size=options.get("batch-size", 512),
        n_gpu_layers=options.get("n-gpu-layers", requested.get("n-gpu-layers", -1)),
        main_gpu=options.get("main-gpu", requested.get("main-gpu", -1)),
        tensor_split=tuple(options.get("tensor-split", requested.get("tensor-split", ()))),
        threads=threads,
        lanes=min(threads, LANES_MAX) if is_graph and not model.config.latency else 1,
        batch_max=model.config.batch_max if is_graph else 1,
        **_template(model, config),
        templates=tuple(
            TemplateSpec(name=name, source=t.source, path=t.file, tool_format=t.tool_format)
            for name, t in model.config.templates.items()
        ),
        tool_format=options.get("tool-format", ""),
        mmproj=model.projector.file,
        draft_model=model.draft.file,
        nextn=model.config.options.get("speculation") == "mtp" and model.config.file is not None,
        options=_engine_options(model),
        adapters=tuple(adapter_spec(*adapter) for adapter in model.config.adapters.items()),
        tuning=model.kept_tuning or tuner.load_tuning(keeps_threads=keeps_threads),
    )


def _engine_options(model: ManagedModel) -> dict[str, Any]:
    """Return the options of the model's backend."""
    if model.config.backend == "echo":
        return model.config.echo
    if ENGINES[model.config.backend].graphs:
        found = {} if model.config.device == CPU else {DEVICE_OPTION: model.config.device}
        if model.config.backend == "openvino":
            found["precision"] = model.config.precision
        return found
    return engine_options_of(model.options())


def _template(model: ManagedModel, config: Config) -> dict[str, Any]:
    """Return the configured chat template: the model's own, else the default."""
    for options in (model.config.options, config.defaults):
        if any(name in options for name in TEMPLATE.values()):
            return {field: options.get(name, "") for field, name in TEMPLATE.items()}
    return {}


def conditions_of(model: ManagedModel, spec: ModelSpec) -> tuple[list[Path], object]:
    """Return the files and values that decide whether a load succeeds."""
    return files_of_load(model, spec), (spec, model.requested.get("ctx-size", 0))


def files_of_load(model: ManagedModel, spec: ModelSpec) -> list[Path]:
    """Return the files that the load of *spec* reads: those of the model, its projector, and its
    draft model.
    """
    projector = [Path(spec.mmproj)] if spec.mmproj else []
    draft = files_in_use(Path(spec.draft_model)) if spec.draft_model else []
    return [*files_in_use(model.config.file), *projector, *draft]


def engine_settings(config: Config) -> dict[str, Any]:
    """Return the part of the configuration that a worker gets."""
    return {
        "reader_lag_s": config.reader_lag_ms / 1000,
        "reader_timeout_s": config.reader_timeout_s,
        "ageing_tokens": config.ageing_tokens,
        "quantum_tokens": config.quantum_tokens,
        "priority_strict": config.priority_strict,
        "step_s_target": config.step_ms_target / 1000,
        "shared_prefix_tokens_min": config.shared_prefix_tokens_min,
        "checkpoint_tokens": config.checkpoint_tokens,
        "checkpoints_max": config.checkpoints_max,
        "shifts_max": config.shifts_max,
        "kv_ram_bytes": config.kv_ram_bytes,
        "kv_shared": config.kv_share == "all",
    }


# Adapters and projectors.


def adapter_spec(name: str, adapter: AdapterConfig) -> AdapterSpec:
    """Return the spec by which a worker loads an adapter."""
    return AdapterSpec(name=name, path=str(adapter.file), scale=adapter.scale)


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """Return *spec* without adapters, as workers estimate it; `with_adapters` adds their sizes."""
    return replace(spec, adapters=())


def with_adapters(report: MemoryEstimate, spec: ModelSpec) -> MemoryEstimate:
    """Return *report* with the memory of the adapters of *spec*. Adapters lie on the devices of
    their layers, so they count on the host and on each device.
    """
    size = sum(adapter_bytes(Path(adapter.path)) for adapter in spec.adapters)
    devices = {device: used + size for device, used in report.need.devices.items()}
    need = replace(report.need, weights=report.need.weights + size, devices=devices)
    return replace(report, need=need)


def with_encoder(need: MemoryNeed, size: int) -> MemoryNeed:
    """Return *need* with the memory of an encoder process that takes *size* bytes beside the
    vocabulary, the libraries and the interpreter, which it has as the worker does.
    """
    return replace(need, projector=need.process + size) if size else need


def adapter_bytes(file: Path) -> int:
    """Return the memory that an adapter takes: its file's size, because its header is small."""
    try:
        return os.stat(file).st_size
    except OSError:
        return 0
