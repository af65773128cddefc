"""The catalog of models by name, from the configuration, the models directory and swaps."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from ...backends.errors import InvalidArgument, ModelNotFound, ShuttingDown
from ...backends.gguf import parts_of
from ...ipc.model_names import find_name, is_model_file, model_not_found, names_meant_by
from ..components import Components
from ..config.model_settings import ECHO, ModelConfig
from ..config.names import with_name
from ..config.settings import Config
from ..media.settings import MediaSettings
from ..state_files import SETTINGS_FILE
from ..workers.process_client import ProcessClient
from ..workers.worker import Worker
from .file_contents import OtherContents
from .model import ManagedModel, ModelState
from .model_files import FileNotOffered, FoundModels, files_not_offered, find_models, missing_files
from .persisted_settings import PersistedModels
from .specs import engine_settings

LOGGED_MAX = 50
"""Files that are not offered and get a line of their own in the log, of each reading."""
log = structlog.get_logger()


def other_name_refused(name: str, of: str) -> InvalidArgument:
    """Return the error for a swap of, or to, another name of a model."""
    return InvalidArgument(
        f"{name!r} is another name of {of!r}, and has no model of its own to swap",
        hint=f"swap {of!r}, which changes all its names, or change `of` in [models.{name}] of the"
        " configuration",
    )


class NamedModel(NamedTuple):
    """A model by one of its names: its own, or another name in the configuration."""

    name: str
    model: ManagedModel

    @property
    def is_derived(self) -> bool:
        """Whether the name differs from the model's own."""
        return self.name != self.model.name


Allowed = Collection[str] | None
"""The names of models that a client may use; None: all."""


class ModelCatalog:
    """The models by name. *create* returns a model for a name, a configuration and an owner.

    Owned by the daemon's event loop.
    """

    def __init__(
        self,
        config: Config,
        components: Components,
        create: Callable[[str, ModelConfig, int | None], ManagedModel],
    ):
        self.config = config
        self.closing = False
        self._components, self._create = components, create
        self._models: dict[str, ManagedModel] = {}
        self._settings = PersistedModels(
            config.state_dir / SETTINGS_FILE, partial(components.note, "models")
        )
        self._configured: dict[str, ModelConfig] = {}
        """The models that the last scan has found."""
        self._removed: set[str] = set()
        """The models that were removed from the configuration."""
        self._found = FoundModels()
        """The files of the last scan that could read the models directory."""
        self._contents = OtherContents()
        self._logged: set[FileNotOffered] = set()
        self._recovered = 0
        """Recovered turns of models that were removed."""

    def check_open(self) -> None:
        """Raise `ShuttingDown` once all models are being unloaded."""
        if self.closing:
            raise ShuttingDown("the daemon is shutting down and loads no more models")

    def scan(self) -> None:
        """Read the models from the configuration and the models directory again."""
        found = {ECHO: ModelConfig(backend=ECHO)}
        found |= self._settings.swapped_names(self.config.models_dir)
        files, models = self._find_files().files, self.config.models
        found |= {n: ModelConfig().with_file(p) for n, p in files.items()}
        for name, config in models.items():
            own = config.file or (files.get(name) if config.backend != ECHO else None)
            found[name] = config.with_file(own)
        found = {name: config for name, config in found.items() if name not in self.config.names}
        for name, derived in self.config.names.items():
            if base := find_name(derived.of, found):
                found[base] = with_name(found[base], name, derived)
        missing = missing_files(self.config.tables, files)
        self._components.note("model-files", "; ".join(missing) or None)
        self._configured = found
        for name, config in found.items():
            if name not in self._models:
                model = self._models[name] = self._create(name, config, None)
                model.apply_settings(self._settings.settings_of(name, config))
            else:
                self.refresh_model(self._models[name])
        for name, model in list(self._models.items()):
            if name not in found and model.uid is None and not model.busy and not model.worker:
                del self._models[name]

    def refresh_model(self, model: ManagedModel) -> None:
        """Apply the configuration to a model that is not loaded and has no tasks."""
        configured = self._configured.get(model.name)
        if configured is None or configured == model.configured:
            return
        if model.worker is not None or model.has_tasks:
            return
        model.configured = configured
        model.apply_settings(self._settings.settings_of(model.name, configured))

    def reconfigure(self, config: Config) -> list[ManagedModel]:
        """Apply another configuration. Return the loaded models that it changes; they keep the old
        one until their next load.
        """
        before, self.config = self.config, config
        self._removed = (self._removed | before.models.keys()) - config.models.keys()
        self.scan()
        loaded = [m for m in self._models.values() if m.worker is not None and m.uid is None]
        return [model for model in loaded if self._is_outdated(model, before)]

    def _is_outdated(self, model: ManagedModel, before: Config) -> bool:
        """Return whether a load would now differ from the load of *model*."""
        if self._configured.get(model.name) != model.configured:
            return True
        after, media = self.config, MediaSettings.of_config
        if model.projector.file and media(before) != media(after):
            return True
        if before.defaults != after.defaults:
            return True
        return engine_settings(before) != engine_settings(after)

    def _find_files(self) -> FoundModels:
        """Return the models directory's files, or the last known if it is unreadable."""
        folder, existed = self.config.models_dir, self._found.exists
        try:
            self._found = find_models(folder)
        except OSError as exc:
            self._components.note("models-dir", f"{folder}: {exc.strerror or exc}")
        else:
            self._components.note("models-dir", None)
        if existed and not self._found.exists:
            log.warning(
                "models.directory_missing",
                directory=str(folder),
                remedy="create it (`inferd pull` does), or name another models-dir",
            )
        return self._found

    async def refresh(self) -> None:
        """Read the models again, and the beginnings of new files; log those that are not offered.

        A file that holds something else than a model is not listed. A load by its name fails with
        the error of its kind.
        """
        self.scan()
        await self._contents.read([*self._found.files.values(), *self._found.projectors.values()])
        found = self.files_not_offered()
        new = [one for one in found if one not in self._logged]
        self._logged = set(found)
        for one in new[:LOGGED_MAX]:
            write = log.info if one.is_expected else log.warning
            write("model.file_not_offered", file=one.file, reason=one.reason)
        if len(new) > LOGGED_MAX:
            log.warning("model.files_not_offered", more=len(new) - LOGGED_MAX)

    def files_not_offered(self) -> list[FileNotOffered]:
        """Return the files of the models directory that are not offered, by path."""
        config = self.config
        return files_not_offered(
            config.models_dir, self._found, config.tables, self._contents.of_file
        )

    def is_listed(self, model: ManagedModel) -> bool:
        """Return whether clients see *model* in lists: not if its file in the models directory is
        known to hold something else, and the configuration has no table for it.
        """
        file = self._found.files.get(model.name)
        if file is None or model.uid is not None or model.name in self.config.models:
            return True
        return self._contents.of_file(file) is None

    def listed_to(self, uid: int, allowed: Allowed = None) -> list[NamedModel]:
        """Return the models that *uid* sees in lists, by all their names that are *allowed*, as the
        last scan has found them.
        """
        named = self._names_for(uid, allowed).items()
        found = [NamedModel(name, model) for name, model in named if self.is_listed(model)]
        return sorted(found, key=lambda one: one.name)

    def visible_to(self, uid: int) -> list[ManagedModel]:
        """Return the models that *uid* may load."""
        self.scan()
        visible = [m for m in self._models.values() if m.uid in (None, uid)]
        return sorted(visible, key=lambda model: model.name)

    def _names_for(self, uid: int, allowed: Allowed) -> dict[str, ManagedModel]:
        """Return the models that *uid* may load by their names; a name in the configuration for
        another model precedes a model that had it before.
        """
        names = self.config.names
        found = {n: m for n, m in self._models.items() if m.uid in (None, uid) and n not in names}
        bases = {name: model for name, model in found.items() if model.uid is None}
        for name, table in names.items():
            if (base := find_name(table.of, bases)) is not None:
                found[name] = bases[base]
        if allowed is None:
            return found
        return {name: m for name, m in found.items() if name in allowed or m.uid is not None}

    def other_names_of(self, model: ManagedModel) -> list[str]:
        """Return the other names of a model, which the configuration gives it."""
        if model.uid is not None:
            return []
        named = self._names_for(0, None).items()
        return sorted(name for name, one in named if one is model and name != model.name)

    def known(self) -> list[ManagedModel]:
        """Return all users' models without reading the models directory."""
        return list(self._models.values())

    def get(self, name: str, uid: int) -> ManagedModel:
        """Return the model that *name* means; see `find`."""
        return self.find(name, uid).model

    def find(self, name: str, uid: int, allowed: Allowed = None) -> NamedModel:
        """Return the model that *name* means, see `find_name`, with the name that is meant. *name*
        may also be a file's path.

        :raises ModelNotFound: the user sees no such model, or none of the *allowed* names; the hint
            has the nearest name.
        """
        derived = self.config.names
        if not any(
            n in derived or (n in self._models and n in self._configured)
            for n in names_meant_by(name)
        ):
            self.scan()
        model = self._models.get(name)
        if allowed is None and name not in derived and model and model.uid in (None, uid):
            return NamedModel(name, model)
        visible = self._names_for(uid, allowed)
        if name not in visible and (reason := self._found.refusal_of(name)):
            raise ModelNotFound(
                f"the file of {name[:200]!r} in the models directory is not offered: {reason}",
                hint="`inferd models --all` lists the files that are not offered",
            )
        found = find_name(name, visible) or self._name_of_path(name)
        if found in visible:
            return NamedModel(found, visible[found])
        if name in derived and (allowed is None or name in allowed):
            raise ModelNotFound(
                f"{name!r} is another name of {derived[name].of!r}, and there is no such model",
                hint=f"correct `of` in [models.{name}] of the daemon's configuration, or get the"
                " model with `inferd pull`",
            )
        raise model_not_found(
            name,
            [name for name, model in visible.items() if self.is_listed(model)],
            f"there is no model {name[:200]!r}",
            "`inferd models` lists the names, `inferd pull` gets a model",
        )

    def check_configured(self, model: ManagedModel) -> None:
        """Check that a model was not removed from the configuration, with which it may be loaded
        still: contexts that are open go on, and new ones are refused.

        :raises ModelNotFound: it was removed.
        """
        is_removed = model.name in self._removed and model.name not in self._configured
        if is_removed and model.uid is None:
            raise ModelNotFound(
                f"the model {model.name!r} was removed from the configuration",
                hint="`inferd models` lists the names; contexts that are open go on",
            )

    def _name_of_path(self, path: str) -> str | None:
        """Return the name of the model whose file, or whose part, has the absolute *path*."""
        if not (os.path.isabs(path) and is_model_file(path)) or "\0" in path:
            return None
        first = parts_of(Path(os.path.normpath(path)))[0]
        return next((n for n, config in self._configured.items() if config.file == first), None)

    def find_client(self, name: str, uid: int) -> ProcessClient | None:
        """Return the client of a model's worker, or None if the model is not loaded or unknown."""
        try:
            worker = self.get(name, uid).loaded
        except ModelNotFound:
            return None
        return None if worker is None else worker.client

    def configuration_of(self, model: ManagedModel) -> ModelConfig:
        """Return the configuration of a model without any swap."""
        if model.uid is not None:
            return model.configured
        return self._configured.get(model.name, model.configured)

    def swap_target(self, model: ManagedModel, to: str, uid: int) -> ModelConfig:
        """Return the configuration that a swap of *model* loads. *to* names the model itself, for
        its configuration without a swap, a file of the models directory, or another model.

        :raises ModelNotFound: *to* names neither a model nor a file.
        """
        if self.names_itself(model, to):
            self.scan()
            return self.configuration_of(model)
        if is_model_file(to) and "\0" not in to:
            file = parts_of(self.config.models_dir / to)[0]
            if file in self._find_files().files.values():
                return ModelConfig().with_file(file)
        named = self.find(to, uid)
        if named.is_derived:
            raise other_name_refused(named.name, named.model.name)
        return named.model.config

    def names_itself(self, model: ManagedModel, to: str) -> bool:
        """Return whether the target *to* of a swap is the name of *model* itself."""
        is_other = to in self._models or to in self.config.names or is_model_file(to)
        return to == model.name or (not is_other and find_name(to, [model.name]) is not None)

    def has_model(self, model: ManagedModel) -> bool:
        """Return whether *model* still has its name."""
        return self._models.get(model.name) is model

    def ready_workers(self) -> list[Worker]:
        """Return the workers of the models that are ready."""
        return [w for m in self._models.values() if (w := m.loaded) is not None]

    def all_workers(self) -> list[Worker]:
        """Return the workers of all models, including loading and unloading ones."""
        return [m.worker for m in self._models.values() if m.worker is not None]

    def serves_others(self, owner: int) -> bool:
        """Return whether any model computes for users other than *owner*."""
        return any(w.client.tasks.serves_others(owner) for w in self.all_workers())

    @property
    def loading(self) -> dict[str, float]:
        """The models that are being loaded, with their progress."""
        found = [m for m in self._models.values() if m.state is ModelState.LOADING]
        return {m.name: m.worker.progress for m in found if m.worker is not None}

    @property
    def recovered(self) -> int:
        """The number of times that a turn continued in another worker after a death or a swap."""
        return self._recovered + sum(m.recovery.recovered for m in self._models.values())

    def add_model(self, name: str, config: ModelConfig, uid: int) -> ManagedModel:
        """Return a new model that only *uid* sees."""
        model = self._models[name] = self._create(name, config, uid)
        return model

    def remove_model(self, model: ManagedModel) -> None:
        """Remove a model that is unloaded."""
        if self._models.pop(model.name, None) is model:
            self._recovered += model.recovery.recovered

    def close_descriptor(self, model: ManagedModel) -> None:
        """Close and remove a model that came by a descriptor and has no leases."""
        if model.passed_file is not None and not model.leases:
            model.passed_file.close()
            model.passed_file = None
            self._models.pop(model.name, None)

    def persist_settings(self, model: ManagedModel) -> None:
        """Store the run-time settings of a model, unless it came by a descriptor."""
        if model.uid is None:
            self._settings.store_settings(model.name, model.settings)
