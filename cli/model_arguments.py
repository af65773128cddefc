"""The MODEL of a command: a name that a daemon knows, or the path of a file of the user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..backends.errors import InvalidArgument, ModelNotFound, NotFound
from ..backends.gguf import PART
from ..backends.params import nearest
from ..ipc.model_names import find_name, is_model_file, model_not_found

if TYPE_CHECKING:
    from ..daemon.config.settings import Config
    from ..ipc.client import Client
    from .output import Fraction

_PATHS = ("./", "../", "~")
"""The beginnings of a MODEL that is always a path; the daemon knows files by absolute paths."""


def file_of(model: str) -> Path | None:
    """Return the file that *model* names, or None if *model* is a name.

    :raises NotFound: it is a path, and no file is there.
    :raises InvalidArgument: it is the path of something else than a file.
    """
    path = Path(os.path.expanduser(model))
    is_path = model.startswith(_PATHS)
    if not is_path and "/" not in model and not is_model_file(model):
        return None
    if os.path.isfile(path):
        return path
    if is_path and not os.path.exists(path):
        raise NotFound(
            f"the file {model} does not exist",
            hint="check the path, or name a model; `inferd models` lists the names",
        )
    if os.path.exists(path):
        raise InvalidArgument(f"{model} is not a file", hint="name a GGUF file, or a model")
    return None


def known_model(
    client: Client, model: str, config: dict[str, Any] | None, on_progress: Fraction | None
) -> str:
    """Return the name by which the daemon knows *model*. A file is loaded: by its path where the
    daemon offers it, else from its descriptor, so that the daemon needs no right to read it.

    :raises InvalidArgument: it is a part of a split model that the daemon does not offer.
    """
    file = file_of(model)
    if file is None:
        return model
    try:
        return client.load_by_name_with_config(
            os.path.abspath(file), config or "", on_progress=on_progress
        ).model
    except ModelNotFound:
        if PART.fullmatch(file.name):
            raise InvalidArgument(
                f"{model} is one part of a split model, and a single file is loaded",
                hint="put all its parts into the models directory (`inferd config show` has its"
                " path), or merge them: llama-gguf-split --merge",
            ) from None
        return client.load_file(file, config=config, on_progress=on_progress).model


def check_offered(model: str, config: Config) -> None:
    """Check that a daemon with *config* would have *model*, before one is started for it.

    :raises ModelNotFound: it would not.
    """
    from ..daemon.config.model_settings import ECHO
    from ..daemon.models.model_files import find_models
    from ..daemon.state_files import SETTINGS_FILE

    if file_of(model) is not None:
        return
    try:
        found = find_models(config.models_dir)
    except OSError:
        return  # the daemon reports it
    names = {
        ECHO,
        *config.tables,
        *found.files,
        *_persisted_names(config.state_dir / SETTINGS_FILE),
    }
    if find_name(model, names) is None and not found.refusal_of(model):
        raise with_pull_hint(
            model,
            model_not_found(
                model,
                names,
                f"there is no model {model[:200]!r}",
                f"`inferd pull` gets a model; the models are in {config.models_dir}",
            ),
        )


def _persisted_names(file: Path) -> set[str]:
    """Return the names with settings: a swapped name stays without its file."""
    try:
        return set(msgspec.json.decode(file.read_bytes(), type=_PersistedNames).models)
    except (OSError, msgspec.DecodeError):
        return set()


class _PersistedNames(msgspec.Struct):
    models: dict[str, Any] = {}


def with_pull_hint(model: str, error: ModelNotFound) -> ModelNotFound:
    """Return *error* with a hint that names the pull of *model*, if that is a known one."""
    from ..daemon.pull.sources import KNOWN_MODELS, known_name

    if known := known_name(model):
        hint = f"`inferd pull {known}` gets it"
    elif "did you mean" not in error.hint and (close := nearest(model, KNOWN_MODELS)):
        hint = f"{close} `inferd pull` gets it"
    else:
        return error
    return ModelNotFound(error.message, hint=hint, data=error.data)
