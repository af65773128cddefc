"""Other names of models, ``[models.NAME]`` with `of`: each has parameters, adapters and ceilings of
its own, and shares the model's process and KV states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...backends.params import BY_NAME, PARAMETERS
from ...ipc.names import Priority
from .ceilings import REASONING_CEILINGS
from .declaration import (
    REQUIRED,
    TEXT,
    Applies,
    ErrorList,
    Form,
    hyphens,
    read_table,
    setting,
    settings_of,
    table_of,
)
from .model_settings import (
    ADAPTERS,
    ECHO,
    MODEL_KEYS,
    OF,
    AdapterConfig,
    Folders,
    ModelConfig,
    NameTemplate,
    find_adapters,
    named_tables,
    parse_adapters,
    read_options_table,
)

SCALE_DEFAULT = 1.0
"""The scale of a name's adapter that has none: the name selects it for its turns."""
TEMPLATES = ("chat-template", "chat-template-file")
NAME_PARAMETERS = frozenset(p.name for p in PARAMETERS if p.level != "model") | {
    "ctx-size",
    "tool-format",
    *TEMPLATES,
}
"""The parameters that need no process of their own. A context may be smaller than the model's, and
a process has a template and a form of answers for each name.
"""
AT_ONCE = Applies.AT_ONCE


def _parse_of(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("is not the name of a model")
    return value


@dataclass(frozen=True, kw_only=True)
class DerivedName:
    """Another name of the model *of*. `options` holds the checked values of parameters."""

    of: str = setting(
        REQUIRED,
        "model of which NAME is another name; both share its process and KV states",
        form=Form(_parse_of, TEXT),
    )
    options: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, AdapterConfig] = setting(
        {},
        "LoRA files of the name's turns, each a file or a file and a scale (1 without one)",
        form=Form(parse_adapters, ADAPTERS),
    )
    n_predict_max: int | None = setting(
        None, "maximum number of tokens of an answer", 1, int(BY_NAME["n-predict"].high), AT_ONCE
    )
    reasoning_max: dict[str, int] | None = setting(
        None,
        "maximum number of tokens of a thought, for all turns or by class: a number, or a table as"
        " `{ low = 1000 }`",
        applies=AT_ONCE,
        form=REASONING_CEILINGS,
    )
    priority_max: Priority | None = setting(
        None, "highest priority of a turn; a higher one is lowered to it", applies=AT_ONCE
    )

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters with which a context of the name begins, over those of the model."""
        scales = [[name, a.scale or SCALE_DEFAULT] for name, a in self.adapters.items()]
        return ({"lora": scales} if scales else {}) | self.options

    @property
    def template(self) -> NameTemplate | None:
        """Its chat template and form of answers; None if both are the model's."""
        source, file = (self.options.get(key, "") for key in TEMPLATES)
        form = self.options.get("tool-format")
        if not source and not file and form is None:
            return None
        return NameTemplate(source=source, file=file, tool_format=form)


NAME_KEYS = settings_of(DerivedName)
"""The keys of another name that are not parameters."""

CEILINGS = ("n-predict-max", "reasoning-max", "priority-max")
"""The keys that bound turns, whatever a request says."""


def read_names(
    document: Mapping[str, Any],
    models: Mapping[str, ModelConfig],
    folders: Folders,
    errors: ErrorList,
) -> dict[str, DerivedName]:
    """Read the tables ``[models.NAME]`` that have the key `of`, and check them against *models*."""
    tables = table_of(document, "models", ErrorList(lines=[]))
    names: dict[str, DerivedName] = {}
    for name, table, here in named_tables(tables, "models", "a model", ErrorList(lines=[])):
        at = errors.at(here.place)
        if OF in table and (found := _read_name(name, table, folders, at)) is not None:
            names[name] = found
    for line in check_names(names, models):
        errors.add(line)
    return names


def _read_name(
    name: str, table: Mapping[str, Any], folders: Folders, errors: ErrorList
) -> DerivedName | None:
    own = {key: value for key, value in table.items() if hyphens(key) in NAME_KEYS}
    foreign = [key for key in table if key in MODEL_KEYS.keys() - NAME_KEYS.keys()]
    parameters = {k: v for k, v in table.items() if k not in own and k not in foreign}
    values = read_table(own, NAME_KEYS, errors)
    options = read_options_table(parameters, folders, errors, known=tuple(NAME_KEYS))
    if OF not in values:
        return None
    of = values[OF]
    if not_shared := [*foreign, *(key for key in options if key not in NAME_PARAMETERS)]:
        errors.add(
            f"{', '.join(not_shared)}: {name!r} shares the process of {of!r}, which decides them;"
            f" set them under [models.{of}], or give {name!r} a `file` in place of `of`"
        )
    values["adapters"] = find_adapters(values.get("adapters", {}), folders, errors)
    return DerivedName(options=options, **values)


def check_names(
    names: Mapping[str, DerivedName], models: Mapping[str, ModelConfig]
) -> Iterator[str]:
    """Yield a sentence for each contradiction between other *names* and the tables of *models*."""
    adapters = {
        (m, key): a.file for m, model in models.items() for key, a in model.adapters.items()
    }
    for name, derived in names.items():
        place, of = f"[models.{name}]", derived.of
        if name == ECHO:
            yield f"{place} of: {ECHO!r} is the name of the built-in model; choose another one"
        if of == name:
            yield f"{place} of: {name!r} names itself; write the name of a model"
        elif of in names:
            yield (
                f"{place} of: {of!r} is another name itself, of {names[of].of!r};"
                " write the name of a model"
            )
        is_echo = of == ECHO or (of in models and models[of].backend == ECHO)
        if is_echo and any(derived.options.get(key) for key in TEMPLATES):
            yield f"{place} chat-template: {of!r} is an echo model, which has no templates"
        if is_echo and "tool-format" in derived.options:
            yield (
                f"{place} tool-format: {of!r} is an echo model, whose option tool_format decides it"
            )
        size = derived.options.get("ctx-size", 0)
        size_max = models[of].options.get("ctx-size", 0) if of in models else 0
        if size_max and size > size_max:
            yield (
                f"{place} ctx-size: {size} is more than the {size_max} of [models.{of}], whose"
                " process it shares"
            )
        for key, adapter in derived.adapters.items():
            file = adapters.setdefault((of, key), adapter.file)
            if file != adapter.file:
                yield (
                    f"{place} adapters: {key}: {of!r} has another file of this name, {file};"
                    " choose another name"
                )


def with_name(config: ModelConfig, name: str, derived: DerivedName) -> ModelConfig:
    """Return the configuration of a model with the adapters and the template of another *name* of
    it, which only the turns by this name select.
    """
    added = {key: AdapterConfig(file=adapter.file) for key, adapter in derived.adapters.items()}
    templates = {} if derived.template is None else {name: derived.template}
    return replace(config, adapters=added | config.adapters, templates=config.templates | templates)
