"""Descriptions of models, as the calls `models` and `show` return them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from ...backends import ENGINES
from ...backends.encoder_prompts import ctx_size_trained
from ...backends.engine_options import cache_share_max, engine_options_of
from ...backends.errors import LoadFailed
from ...backends.gguf import FileFacts
from ...backends.gguf.facts import NUMBER_MAX, read_facts
from ...backends.gguf.projector import ProjectorHeader
from ...backends.memory import MemoryNeed
from ...backends.model_spec import device_of
from ...backends.tensors import DeclaredTensors
from ...backends.tuning_choice import ChosenSetting
from ...ipc.messages import ModelInfo, ShownModel
from ..config.model_settings import ECHO, ModelConfig
from ..config.names import CEILINGS, NAME_KEYS
from ..config.settings import Config
from ..residency.machine import has_gpus
from .catalog import NamedModel
from .draft_gains import NO_GAIN, DraftGain
from .model import NO_DRAFT_MODEL, SLOTS_DEFAULT, DraftModelChoice, ManagedModel
from .model_files import files_in_use, modified_at, signature_of, size_bytes
from .projectors import NO_PROJECTOR, ProjectorChoice
from .registry import Lease, Registry
from .specs import (
    CTX_SIZE_DEFAULT,
    adapter_bytes,
    files_of_load,
    spec_of,
    with_adapters,
    with_encoder,
    without_adapters,
)


def describe_model(registry: Registry, named: NamedModel, facts: FileFacts | None) -> ModelInfo:
    """Return the description of a model by one of its names. Its file has these *facts*, if they
    are known.
    """
    name, model = named
    worker, file, loaded = model.worker, model.config.file, model.loaded
    passed = model.passed_file
    need = registry.reservations.of_worker(worker)
    return ModelInfo(
        name=name,
        of=model.name if named.is_derived else "",
        state=model.state.value,
        backend=model.config.backend,
        device=_device(model),
        file=str(file) if file is not None else "",
        swapped_to=model.swapped_to,
        size_bytes=size_bytes(file) if passed is None else passed.size_bytes,
        modified_at=modified_at(file),
        leases=_count_leases(named),
        tasks=(worker.client.work if worker is not None else 0) + len(model.evicted_turns),
        pid=worker.pid if worker is not None else 0,
        slots=loaded.info.slots if loaded is not None else model.slots_configured,
        progress=worker.progress if worker is not None else 0.0,
        load_s=model.load_s,
        idle_s=model.idle_s,
        expires_s=_expires_s(model),
        keep_alive_s=model.keep_alive_s,
        pinned=model.pinned,
        resident_bytes=worker.resident_bytes if worker is not None else 0,
        memory=_memory(need) if need is not None else None,
        adapters=_describe_adapters(model),
        error=model.error.to_wire() if model.error is not None else None,
        info=asdict(loaded.info.by_name(name)) if loaded is not None else None,
        setting=_setting(registry, model),
        need_bytes=_need_bytes(registry, model, facts),
        reads=_reads(registry, model),
        projector=_projector(registry, model),
        draft_model=_draft_model(registry, model),
    )


def show_model(
    registry: Registry,
    named: NamedModel,
    facts: FileFacts | None,
    declared: DeclaredTensors | None,
    file_error: str | None,
    gain: DraftGain = NO_GAIN,
) -> ShownModel:
    """Return the description of a model with the *facts* of its file, or the inputs and outputs
    that a graph's file has *declared*, or the reason why its header cannot be read, and the *gain*
    by its drafts.
    """
    loaded = named.model.loaded
    if loaded is not None and ENGINES[named.model.config.backend].graphs:
        declared = DeclaredTensors(loaded.info.inputs, loaded.info.outputs)
    return ShownModel(
        **asdict(describe_model(registry, named, facts)),
        options=registry.options_of(named.name, named.model),
        file_info=facts,
        file_error=file_error,
        estimate=_estimate_memory(registry, named.model, facts),
        drafts=_drafts(gain),
        names=registry.catalog.other_names_of(named.model),
        ceilings=_ceilings(registry, named.name),
        inputs=None if declared is None else [asdict(one) for one in declared.inputs],
        outputs=None if declared is None else [asdict(one) for one in declared.outputs],
    )


def _device(model: ManagedModel) -> str:
    """Return the device that computes a graph, or that of its next load; "" of other models."""
    if not ENGINES[model.config.backend].graphs:
        return ""
    return model.config.device if model.loaded is None else device_of(model.loaded.spec)


def _drafts(gain: DraftGain) -> dict[str, Any] | None:
    if not gain.drafted:
        return None
    return {
        "drafted": gain.drafted,
        "accepted": gain.accepted,
        "tokens": gain.tokens,
        "seconds": gain.us / 1e6,
        "plain_seconds": gain.plain_us / 1e6,
    }


def _count_leases(named: NamedModel) -> int:
    """Return the number of a model's leases, of which another name has only its own."""
    leases = named.model.leases
    if not named.is_derived:
        return len(leases)
    return sum(isinstance(lease, Lease) and lease.name == named.name for lease in leases)


def _ceilings(registry: Registry, name: str) -> dict[str, Any]:
    """Return the ceilings that are set for turns by *name*."""
    derived = registry.config.names.get(name)
    if derived is None:
        return {}
    values = {key: getattr(derived, NAME_KEYS[key].field) for key in CEILINGS}
    return {key: value for key, value in values.items() if value is not None}


def _estimate_memory(
    registry: Registry, model: ManagedModel, facts: FileFacts | None
) -> dict[str, Any] | None:
    """Return the memory that the next load needs: as llama.cpp has estimated it for an earlier
    load, or else by the file's *facts*, as far as they are known. Return None if nothing is known.
    """
    choice = _choice_of(registry, model)
    draft = _draft_model_of(registry, model).file
    spec = spec_of(model, registry.config, registry.tuner)
    spec = replace(spec, mmproj=choice.file, draft_model=draft)
    encoder = registry.loader.encoder_bytes(spec, choice)
    signature = signature_of(files_of_load(model, spec))
    for estimate in registry.loader.estimates.estimates_of(without_adapters(spec), signature)[:1]:
        shape, need = estimate.shape, with_adapters(estimate, spec).need
        need = with_encoder(need, encoder)
        return {"slots": shape.slots, "ctx_size": shape.ctx_size} | _memory(need)
    if ENGINES[model.config.backend].graphs:
        weights = graph_bytes(model.config)
        return _known(weights=weights, context=0, projector=0)
    if facts is None:
        return None
    ctx_size = spec.ctx_size or ctx_size_default(facts)
    kv_bytes = kv_bytes_by_header(facts, spec.options, ctx_size * spec.slots)
    weights = weight_bytes(model.config)
    if draft:
        weights += size_bytes(Path(draft))
    known = _known(weights=weights, context=kv_bytes, projector=encoder)
    return {"slots": spec.slots, "ctx_size": ctx_size} | known


def _known(**needs: int | None) -> dict[str, Any]:
    """Return the memory of a load of which only these *needs* are known."""
    return dict.fromkeys(_memory(MemoryNeed())) | needs


def ctx_size_default(facts: FileFacts) -> int:
    """Return the tokens of a context whose size is not configured."""
    trained = ctx_size_trained(facts.architecture, facts.ctx_size_trained or CTX_SIZE_DEFAULT)
    return min(trained, CTX_SIZE_DEFAULT)


def kv_bytes_by_header(facts: FileFacts, options: Mapping[str, Any], tokens: int) -> int | None:
    """Return an upper bound of the KV states of *tokens* with the engine's *options*, or None."""
    per_token = facts.kv_token_bytes_max
    if per_token is None:
        return None
    kv_bytes = round(per_token * cache_share_max(options)) * tokens
    return None if kv_bytes > NUMBER_MAX else kv_bytes


def graph_bytes(config: ModelConfig) -> int:
    """Return the memory of a graph's weights, without those in other files."""
    return round(ENGINES[config.backend].weights_factor * size_bytes(config.file))


def weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of a model's files and adapters."""
    return size_bytes(config.file) + sum(adapter_bytes(a.file) for a in config.adapters.values())


def need_by_header(config: Config, model: ModelConfig) -> int | None:
    """Return the host's memory that a load of *model* needs, with all slots and full contexts, from
    its file alone; None if it is not known, or if a GPU may hold a part.

    :raises OSError: the file cannot be read.
    :raises DamagedHeader: it has no valid header.
    """
    options = config.defaults | model.options
    if ENGINES[model.backend].graphs:
        return graph_bytes(model)
    if model.file is None or (has_gpus() and options.get("n-gpu-layers") != 0):
        return None
    facts = read_facts(files_in_use(model.file))
    tokens = max(options.get("ctx-size", 0), 0) or ctx_size_default(facts)
    tokens *= int(options.get("slots", SLOTS_DEFAULT))
    kv_bytes = kv_bytes_by_header(facts, engine_options_of(options), tokens)
    return None if kv_bytes is None else weight_bytes(model) + kv_bytes


def _need_bytes(registry: Registry, model: ManagedModel, facts: FileFacts | None) -> int | None:
    """Return the memory of the host that the next load needs, with all slots and full contexts.
    Return None if it is not known, or if the model has a process.
    """
    if model.worker is not None:
        return None
    found = _estimate_memory(registry, model, facts)
    if found is None:
        return None
    total: int | None = found["total"]
    if total is not None:
        return total
    if found["context"] is None or (has_gpus() and model.options().get("n-gpu-layers") != 0):
        return None  # devices may hold any part of it
    return int(found["weights"] + found["context"] + found["projector"])


def _draft_model_of(registry: Registry, model: ManagedModel) -> DraftModelChoice:
    """Return the draft model of the loaded model, or that of its next load, if there is one."""
    if model.worker is not None:
        return model.draft
    try:
        return registry.draft_model_of(model)
    except LoadFailed:
        return NO_DRAFT_MODEL


def _draft_model(registry: Registry, model: ManagedModel) -> dict[str, Any] | None:
    """Return the draft model of a model, or the reason why it has none; None if none is named."""
    error = None
    try:
        choice = model.draft if model.worker is not None else registry.draft_model_of(model)
    except LoadFailed as exc:
        choice, error = NO_DRAFT_MODEL, exc.message
    if not choice.file and error is None:
        return None
    return {
        "name": choice.name,
        "file": choice.file,
        "size_bytes": size_bytes(Path(choice.file)) if choice.file else 0,
        "error": error,
    }


# Images and sounds.


def _choice_of(registry: Registry, model: ManagedModel) -> ProjectorChoice:
    """Return the projector of the loaded model, or that of its next load as far as it is known."""
    if model.worker is not None:
        return model.projector
    return registry.projectors.known(registry.projector_wish(model)) or NO_PROJECTOR


def _reads(registry: Registry, model: ManagedModel) -> list[str]:
    if model.config.backend == ECHO:
        return ["text", "image", "audio"] if model.config.echo.get("media") else ["text"]
    if ENGINES[model.config.backend].graphs:
        return []
    return ["text", *_kinds(_choice_of(registry, model).header)]


def _kinds(header: ProjectorHeader | None) -> list[str]:
    if header is None:
        return []
    return [name for name, reads in (("image", header.images), ("audio", header.sounds)) if reads]


def _projector(registry: Registry, model: ManagedModel) -> dict[str, Any] | None:
    """Return the projector of a model, or the reason why it has none; None if there is no file."""
    choice, header = _choice_of(registry, model), _choice_of(registry, model).header
    error = None if choice.refusal is None else choice.refusal.message
    encoder = None if model.loaded is None else model.loaded.client.encoder
    if encoder is not None and encoder.error is not None:
        error = encoder.error.message
    if not choice.file and not choice.note and error is None:
        return None
    facts = registry.loader.measured_projectors.facts_of(choice.file) if choice.file else None
    return {
        "file": choice.file,
        "type": "" if header is None else header.kind,
        "kinds": _kinds(header),
        "width": 0 if header is None else header.width,
        "image_size": 0 if header is None else header.image_size,
        "size_bytes": size_bytes(Path(choice.file)) if choice.file else 0,
        "image_tokens_max": None if facts is None else facts.image_tokens_max,
        "buffer_bytes": None if facts is None else facts.buffer_bytes,
        "pid": 0 if encoder is None else encoder.pid,
        "note": choice.note,
        "error": error,
    }


def _memory(need: MemoryNeed) -> dict[str, Any]:
    return asdict(need) | {"total": need.total}


def _setting(registry: Registry, model: ManagedModel) -> dict[str, Any] | None:
    """Return the setting of a loaded model, and that of its next load, with their reasons."""
    worker = model.loaded
    if worker is None or worker.tuning is None:
        return None
    next_choice = registry.tuner.next_choice(worker.tuning)
    return _choice(worker.tuning.chosen) | {"next_load": _choice(next_choice)}


def _choice(choice: ChosenSetting) -> dict[str, Any]:
    return asdict(choice.setting) | {"source": choice.source, "reason": choice.reason}


def _expires_s(model: ManagedModel) -> float | None:
    """Return the seconds until the model expires, or None if it does not."""
    if model.worker is None or model.busy or model.keep_alive_s < 0:
        return None
    return max(0.0, model.keep_alive_s - model.idle_s)


def _describe_adapters(model: ManagedModel) -> list[dict[str, Any]]:
    reports = {} if model.loaded is None else model.loaded.client.adapters
    found = []
    for name, adapter in model.config.adapters.items():
        report = reports.get(name)
        info = report.info if report is not None else None
        found.append(
            {
                "name": name,
                "file": str(adapter.file),
                "scale": adapter.scale,
                "size_bytes": adapter_bytes(adapter.file),
                "id": info.id if info is not None else "",
                "error": report.error if report is not None else None,
            }
        )
    return found
