"""Completion in shells: the words offered, and typer's scripts.

The user waits for completions, so a call to the daemon has a short timeout. Any failure gives no
completions and no message.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

from ..daemon.printable import escape_controls

if TYPE_CHECKING:
    from ..backends.params import Parameter
    from .one_shot import OneShotClient

CALL_TIMEOUT_S = 1.0
_ONE_WORD = re.compile(r"[\w.,@%+/-]+")
"""Names that a shell parses as one word, because bash inserts completions without quotes."""
Offers = list[tuple[str, str]]
_LAST = "    return 0\n"
_NO_SPACE = '    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace\n'


def models(ctx: typer.Context, incomplete: str) -> Offers:
    """Return the models that the daemon offers, and the test models whose names begin with the
    typed word.
    """
    from ..ipc.model_names import offered_models

    def named(models: list[Any]) -> list[str]:
        return [m["name"] for m in models if incomplete and m["name"].startswith(incomplete)]

    def offers(client: OneShotClient) -> Offers:
        models = client.models()
        return [
            (m["name"], m["state"])
            for m in offered_models(models, named=named(models))
            if _ONE_WORD.fullmatch(m["name"])
        ]

    return _query(ctx, offers)


def sessions(ctx: typer.Context, incomplete: str) -> Offers:
    """Return the ids of the user's sessions, dormant ones included."""
    return _query(
        ctx,
        lambda client: [
            (s["session_id"], escape_controls(f"{s['model']}, {s['state']}"))
            for s in client.sessions(dormant=True)
            if _ONE_WORD.fullmatch(s["session_id"] or "")
        ],
    )


def states(ctx: typer.Context, incomplete: str) -> Offers:
    """Return the names of the user's own named states."""
    return _query(
        ctx,
        lambda client: [
            (s["name"], escape_controls(f"{s['model']}, {s['tokens']} tokens"))
            for s in client.list_states()
            if _ONE_WORD.fullmatch(s["name"]) and s.get("shared_by") is None
        ],
    )


def jobs(ctx: typer.Context, incomplete: str) -> Offers:
    """Return the ids of the user's jobs."""
    return _query(
        ctx,
        lambda client: [
            (j["id"], f"{j['state']}, {j['completed']} of {j['requests']} answered")
            for j in client.jobs()
        ],
    )


def _query(ctx: typer.Context, query: Callable[[OneShotClient], Offers]) -> Offers:
    from .one_shot import OneShotClient

    try:
        path, label = ctx.meta.get("inferd.socket"), ctx.meta.get("inferd.label", "")
        with OneShotClient(path, timeout_s=CALL_TIMEOUT_S, label=label) as client:
            return query(client)
    except Exception:  # a traceback would garble the line that the user types
        return []


def local_models(ctx: typer.Context, incomplete: str) -> Offers:
    """Return the models of the models directory."""
    from ..daemon.config.sources import load_config
    from ..daemon.models.model_files import models_in

    try:
        named = {"config": ctx.params.get("config"), "models_dir": ctx.params.get("models_dir")}
        folder = load_config(named).models_dir
        return [(name, str(file)) for name, file in models_in(folder).items()]
    except Exception:
        return []


def sources(incomplete: str) -> Offers:
    """Return the models that `inferd pull` knows by name."""
    from ..daemon.pull.sources import KNOWN_MODELS

    return [(name, known.description) for name, known in KNOWN_MODELS.items()]


def parameters(incomplete: str) -> Offers:
    """Return the names of parameters, or their aliases if no name begins with the word."""
    from ..backends.params import BY_SPELLING

    return [(name, BY_SPELLING[name].doc) for name in _spelled(incomplete)]


def options(incomplete: str) -> Offers:
    """Return KEY=VALUE for each choice of a parameter, or KEY= if it has no fixed choices."""
    from ..backends.params import BY_SPELLING

    return [offer for name in _spelled(incomplete) for offer in _pairs(name, BY_SPELLING[name])]


def _spelled(incomplete: str) -> Iterable[str]:
    from ..backends.params import BY_SPELLING, PARAMETERS

    own = [parameter.name for parameter in PARAMETERS]
    prefix = incomplete.partition("=")[0]
    return own if any(name.startswith(prefix) for name in own) else list(BY_SPELLING)


def _pairs(name: str, parameter: Parameter) -> Offers:
    values = ("true", "false") if parameter.kind == "bool" else parameter.choices
    return [(f"{name}={value}", parameter.doc) for value in values or ("",)]


def settings(incomplete: str) -> Offers:
    """Return KEY=VALUE for each choice of a setting, or KEY= if it has no fixed choices."""
    from ..daemon.config.settings import SETTINGS

    return [
        (f"{name}={choice}", setting.doc)
        for name, setting in SETTINGS.items()
        for choice in setting.choices or ("",)
    ]


def log_levels(incomplete: str) -> Offers:
    """Return LEVEL and LOGGER=, or the levels of the LOGGER that the word names."""
    from ..backends.library import LEVELS
    from ..daemon.config.forms import LOGGERS

    logger, equals, _ = incomplete.rpartition("=")
    if equals:
        return [(f"{logger}={level}", "") for level in LEVELS]
    levels = [(level, "for all loggers") for level in LEVELS]
    return levels + [(f"{logger}=", about) for logger, about in LOGGERS.items()]


def install_scripts() -> None:
    """Change typer's script for bash, so that bash adds no space after `key=`.

    fish adds no space there by itself. A script that typer has changed or moved stays as it is.
    """
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        from typer import _completion_classes, _completion_shared

        scripts: Any = _completion_shared._completion_scripts
        if _NO_SPACE not in scripts["bash"]:
            scripts["bash"] = scripts["bash"].replace(_LAST, _NO_SPACE + _LAST)
            _completion_classes.BashComplete.source_template = scripts["bash"]
