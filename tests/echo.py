"""Echo models in a daemon's configuration file."""

from __future__ import annotations

import json

from inferd.backends.echo.options import EchoOptions

__all__ = ("echo_model",)

_OPTIONS = frozenset(EchoOptions.__struct_fields__)


def echo_model(name: str, **keys: object) -> str:
    """Return the tables of the echo model *name*.

    Keys of `EchoOptions` become its options, and all others keys of the model.
    """
    own = [_line(key, value) for key, value in keys.items() if key not in _OPTIONS]
    options = [_line(key, value) for key, value in keys.items() if key in _OPTIONS]
    lines = [f"[models.{name}]", 'backend = "echo"', *own, f"[models.{name}.echo]", *options]
    return "\n".join(lines) + "\n"


def _line(key: str, value: object) -> str:
    return f"{key} = {json.dumps(value)}"
