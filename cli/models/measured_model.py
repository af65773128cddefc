"""The model that a command measures: its file and options, as a daemon would load it."""

from __future__ import annotations

import os
from pathlib import Path

from ...backends import ENGINES
from ...backends.engine_options import engine_options_of
from ...backends.errors import ModelNotFound, UnsupportedOperation
from ...backends.model_spec import ModelSpec
from ...daemon.config.model_settings import ECHO, ModelConfig
from ...daemon.config.settings import Config
from ...daemon.models.model import SLOTS_DEFAULT
from ...daemon.models.model_files import find_models
from ...ipc.model_names import find_name
from ..model_arguments import check_offered, file_of


def measured_spec(model: str, config: Config) -> ModelSpec:
    """Return the spec with which a daemon with *config* would load *model*, a name or a file.

    :raises ModelNotFound: the name is unknown, or has no file.
    :raises NotFound: the file does not exist.
    :raises UnsupportedOperation: it is an echo model or a graph.
    """
    name, own = _found(model, config)
    if own.backend == ECHO or name == ECHO:
        raise UnsupportedOperation(
            "an echo model computes nothing, so it has no settings to measure",
            hint="measure a model with a GGUF file; `inferd models` lists them",
        )
    if ENGINES[own.backend].graphs:
        raise UnsupportedOperation(
            f"{name!r} is a graph, which has no settings to measure",
            hint="measure a model with a GGUF file; `inferd models` lists them",
        )
    if own.file is None:
        raise ModelNotFound(
            f"the model {name!r} has no file", hint=f"its file belongs into {config.models_dir}"
        )
    options = config.defaults | own.options
    return ModelSpec(
        name=name,
        path=str(own.file),
        slots=int(options.get("slots", SLOTS_DEFAULT)),
        ctx_size=max(0, options.get("ctx-size", 0)),
        batch_size=options.get("batch-size", 512),
        n_gpu_layers=options.get("n-gpu-layers", -1),
        threads=options.get("threads", 0) or config.cores,
        options=engine_options_of(options),
    )


def _found(model: str, config: Config) -> tuple[str, ModelConfig]:
    """Return the name and the configuration of *model*."""
    file = file_of(model)
    if file is not None:
        return file.name, ModelConfig().with_file(Path(os.path.abspath(file)))
    check_offered(model, config)
    files = find_models(config.models_dir).files
    name = find_name(model, {ECHO, *config.tables, *files}) or model
    if (derived := config.names.get(name)) is not None:
        name = find_name(derived.of, {ECHO, *config.models, *files}) or derived.of
    configured = config.models.get(name, ModelConfig())
    own = configured.file or files.get(name)
    found = ModelConfig(backend=configured.backend, options=configured.options)
    return name, found.with_file(own)
