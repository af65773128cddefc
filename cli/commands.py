"""Lazy imports of the commands, by their names, and of optional dependencies."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperGroup

from ..backends.errors import UnsupportedOperation
from ..backends.texts import choice_of

COMMANDS = {
    "operations.start": ("start",),
    "operations.serve": ("serve",),
    "inference.run": ("run",),
    "inference.chat": ("chat",),
    "inference.infill_command": ("infill",),
    "inference.text_commands": ("embed", "rerank", "template"),
    "..gateways.wasm.command": ("wasm",),
    "..gateways.nnrpc.command": ("nnrpc",),
    "..gateways.http.command": ("gateway",),
    "..gateways.fleet.command": ("fleet",),
    "..gateways.conformance.command": ("conformance",),
    "models.show_command": ("show",),
    "models.model_commands": (
        *("models", "load", "unload", "pin", "unpin", "swap"),
        *("add-adapter", "rm-adapter"),
    ),
    "models.file_commands": ("pull", "rm"),
    "models.tune_command": ("tune",),
    "inference.parameter_options": ("parameters",),
    "monitoring.status_commands": ("ps", "sessions", "queue", "status"),
    "operations.logs_command": ("logs", "log-level"),
    "operations.session_commands": (
        *("cancel", "park", "end-reasoning"),
        *("edit-session", "rm-session", "restore-session"),
        "states",
    ),
    "operations.job_commands": ("jobs",),
    "operations.end_commands": ("drain", "stop"),
    "operations.backup_commands": ("backup", "restore"),
    "operations.doctor_command": ("doctor",),
    "operations.service_commands": ("install-service", "uninstall-service"),
    "monitoring.top_command": ("top",),
    "monitoring.stats": ("stats",),
    "monitoring.usage_command": ("usage",),
    "operations.config_commands": ("config",),
}
"""Commands by module, in the order of the help; each is a function or group of its name. Modules of
gateways are named only here, because the daemon does not import them.
"""
OTHER_COMMANDS = {
    **dict.fromkeys(("list", "ls", "tags", "images"), "models"),
    **dict.fromkeys(("download", "get", "add", "install", "fetch"), "pull"),
    **dict.fromkeys(("delete", "remove", "del"), "rm"),
    **dict.fromkeys(("generate", "complete", "ask", "prompt", "exec"), "run"),
    **dict.fromkeys(("daemon", "server"), "serve"),
    **dict.fromkeys(("up", "launch"), "start"),
    **dict.fromkeys(("kill", "quit", "shutdown", "down"), "stop"),
    **dict.fromkeys(("info", "inspect", "describe"), "show"),
    **dict.fromkeys(("embeddings", "embedding"), "embed"),
    **dict.fromkeys(("fim", "fill"), "infill"),
    **dict.fromkeys(("reranking", "rank", "score"), "rerank"),
    **dict.fromkeys(("options", "params"), "parameters"),
    **dict.fromkeys(("http", "api", "openai"), "gateway"),
    **dict.fromkeys(("batch", "batches", "submit"), "jobs"),
    **dict.fromkeys(("benchmark", "bench", "optimize"), "tune"),
    **{"log": "logs", "tokenize": "template", "settings": "config", "tasks": "queue"},
    **{"help": "--help", "version": "--version"},
}
"""Words of other programs, with the commands that they mean."""
_MODULES = {name: module for module, names in COMMANDS.items() for name in names}


class LazyCommands(TyperGroup):
    """A group whose commands are imported by name."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters of the group itself."""
        return _without_pydantic(super().get_params, ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is none; click then suggests the nearest name."""
        if cmd_name in _MODULES and cmd_name not in self.commands:
            self._import(_MODULES[cmd_name])
        elif cmd_name not in self.commands:
            self.import_all()
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name. The error for an unknown one suggests the
        command that another program's word means, or else the nearest name.
        """
        word = args[0] if args else ""
        if word not in _MODULES and (meant := meant_command(word)):
            ctx.fail(f"No such command {word!r}. Did you mean {meant!r}?")
        return super().resolve_command(ctx, args)

    def import_all(self) -> None:
        """Import the modules of all commands."""
        for module in COMMANDS:
            self._import(module)

    def _import(self, module: str) -> None:
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        relative = module if module.startswith(".") else f".{module}"
        functions = importlib.import_module(relative, __package__)
        for name in COMMANDS[module]:
            command = getattr(functions, name.replace("-", "_"))
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
        found: dict[str, Any] = dict(typer.main.get_group(app).commands)
        for command in found.values():
            command.get_params = partial(_without_pydantic, command.get_params)
        self.commands.update(found)


def meant_command(word: str) -> str:
    """Return the command that *word* means in other programs, also with a typo unless it is nearer
    to a command of this one; empty if there is none.
    """
    if word in OTHER_COMMANDS or difflib.get_close_matches(word, _MODULES):
        return OTHER_COMMANDS.get(word, "")
    close = difflib.get_close_matches(word, OTHER_COMMANDS, n=1)
    return OTHER_COMMANDS[close[0]] if close else ""


def _without_pydantic(get_params: Callable[[Any], Any], ctx: Any) -> Any:
    """Return parameters that use pydantic only for values that need it.

    Typer converts all values with pydantic, whose import takes longer than the rest of a command.
    """
    parameters = get_params(ctx)
    for parameter in parameters:
        if parameter.nargs == 1 and not isinstance(parameter.process_value, partial):
            parameter.process_value = partial(_convert, parameter, parameter.process_value)
    return parameters


def _convert(parameter: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    # Versions of typer without pydantic give the choices as a type of click.
    choices = get_args(kind) if get_origin(kind) is Literal else _choices_of(parameter)
    if choices and isinstance(value, str):
        choice = choice_of(value, choices)
        if choice is None:
            message = f"{value!r} is not one of {', '.join(choices)}"
            raise typer.BadParameter(message, ctx, parameter)
        value = choice
    if kind in (str, Path) and isinstance(value, str):
        value = kind(value)
    elif kind == list[str] and value is not None:
        value = list(value)
    elif not _is_converted(value, kind) or (value is None and parameter.required):
        return convert(ctx, value)
    return parameter.callback(ctx, parameter, value) if parameter.callback else value


def _choices_of(parameter: Any) -> list[str]:
    return [str(choice) for choice in getattr(getattr(parameter, "type", None), "choices", ())]


def _is_converted(value: Any, kind: Any) -> bool:
    """Return whether *value* is missing, a choice as it stands, or a default of its *kind*."""
    return value is None or type(value) is kind or value in get_args(kind)


@contextmanager
def optional_import(need: str, extra: str, otherwise: str = "") -> Iterator[None]:
    """Convert a failed import of another package to an error that states the *need*.

    :raises UnsupportedOperation: the package is not installed; the hint has the command that
        installs *extra*, and *otherwise*.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("inferd"):
            raise
        from ..backends.library import install_command

        hint = install_command(extra) + otherwise
        raise UnsupportedOperation(f"{need}; {exc.name} is missing", hint=hint) from exc
