"""What a shell is offered where a word is to be completed: names that the daemon knows, and those
of the tables.

A user waits for it: a daemon is asked for a short time only, and where anything goes wrong there is
nothing to offer, and nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ....backends.params import Parameter
    from ..one_shot import OneShotClient

ASK_S_MAX = 1.0
PLAIN = re.compile(r"[\w.,@%+/-]+")
"""Names that a shell takes for one word: bash puts what is offered onto the line as it is."""
Offers = list[tuple[str, str]]


def models(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer the models that the daemon knows."""
    return _asked(
        ctx,
        lambda client: [
            (m["name"], m["state"]) for m in client.models() if PLAIN.fullmatch(m["name"])
        ],
    )


def sessions(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer the ids of the user's sessions, also of those that sleep."""
    return _asked(
        ctx,
        lambda client: [
            (s["session_id"], f"{s['model']}, {s['state']}")
            for s in client.sessions(dormant=True)
            if PLAIN.fullmatch(s["session_id"] or "")
        ],
    )


def _asked(ctx: typer.Context, ask: Callable[[OneShotClient], Offers]) -> Offers:
    from ..one_shot import OneShotClient

    try:
        path = ctx.meta.get("inferd.socket")
        with OneShotClient(path, timeout_s=ASK_S_MAX) as client:
            return ask(client)
    except Exception:  # no daemon, no answer, whatever: a trace would spoil the line being typed
        return []


def local_models(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer the models of the models directory."""
    from ...config.sources import load_config
    from ...residency.model_files import models_in

    try:
        named = {"config": ctx.params.get("config"), "models_dir": ctx.params.get("models_dir")}
        folder = load_config(named).models_dir
        return [(name, str(file)) for name, file in models_in(folder).items()]
    except Exception:
        return []


def sources(incomplete: str) -> Offers:
    """Offer the models that can be pulled by a name of their own."""
    from ...pull import KNOWN_MODELS

    return [(name, known.licence) for name, known in KNOWN_MODELS.items()]


def parameters(incomplete: str) -> Offers:
    """Offer the parameters' names; another spelling where one is begun."""
    from ....backends.params import BY_SPELLING

    return [(name, BY_SPELLING[name].doc) for name in _spelled(incomplete)]


def options(incomplete: str) -> Offers:
    """Offer KEY=VALUE of a parameter: its values where they are few, else the key alone."""
    from ....backends.params import BY_SPELLING

    return [offer for name in _spelled(incomplete) for offer in _pairs(name, BY_SPELLING[name])]


def _spelled(incomplete: str) -> Iterable[str]:
    from ....backends.params import BY_SPELLING, PARAMETERS

    own = [parameter.name for parameter in PARAMETERS]
    begun = incomplete.partition("=")[0]
    return own if any(name.startswith(begun) for name in own) else list(BY_SPELLING)


def _pairs(name: str, parameter: Parameter) -> Offers:
    values = ("true", "false") if parameter.kind == "bool" else parameter.choices
    return [(f"{name}={value}", parameter.doc) for value in values or ("",)]


def settings(incomplete: str) -> Offers:
    """Offer KEY=VALUE of a setting in the same way."""
    from ...config.settings import SETTINGS

    return [
        (f"{name}={choice}", setting.doc)
        for name, setting in SETTINGS.items()
        for choice in setting.choices or ("",)
    ]
