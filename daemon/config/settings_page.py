"""docs/settings.md: every setting with its default, its range, and when a change of it holds."""

from __future__ import annotations

import math

import msgspec

from .access_settings import ACCESS_BOUNDS, ACCESS_KEYS, CLASSES, Right
from .settings import SETTINGS, Applies, Config, Setting, applies

__all__ = ("page",)

HEAD = """\
# Settings

Made from the code by `make docs`. Under `[daemon]` in the file, as `INFERD_SESSIONS_MAX` in the
environment, or `inferd serve --set sessions-max=200`; the flag comes before the environment, and
that before the file. The machine's service sets `socket`, `models-dir` and `state-dir` by its
environment: its file cannot move them. A change in the file holds when the file is read again
(`systemctl reload inferd`, SIGHUP), or later, as the last column says; one of `[models]` and
`[defaults]` from a model's next load on, but at once where only turns need it, as `temp`.

`inferd config check` tells what is wrong in the file, `inferd config show --origin` what holds and
who said it; [config.schema.json](config.schema.json) is its JSON schema, for editors
(`inferd config schema`).

| setting | default | from … to | is | a change holds |
|---|---|---|---|---|
"""
MADE_HERE = {
    "socket": "`$XDG_RUNTIME_DIR/inferd/inferd.sock`, else `/run/inferd/inferd.sock`",
    "socket-mode": "`0600`; `0660` with a group",
    "socket-group": "none; `inferd` for the machine's socket",
    "models-dir": "`$XDG_DATA_HOME/inferd/models`",
    "state-dir": "`$XDG_STATE_HOME/inferd`",
    "cores": "0",
    "kv-ram-bytes": "0",
    "log-levels": "none",
    "log-file": "none",
}
"""Defaults that depend on the machine, or are not there."""
ACCESS_HEAD = """
## Access

Rules of who may do what, tables `[access.NAME]` of the file; a change holds at once.
[operations.md](operations.md#users) tells which rule holds for whom, and what holds without one.
Each key may be left out.

| key | from … to | is |
|---|---|---|
"""


def page() -> str:
    """Return the page."""
    settings = "".join(_row(name, setting) for name, setting in SETTINGS.items())
    return HEAD + settings + ACCESS_HEAD + "".join(map(_access_row, ACCESS_KEYS))


def _access_row(key: str) -> str:
    ranges = {k: f"1 … {_number(high)}" for k, high in ACCESS_BOUNDS.items()}
    ranges["may"] = ", ".join(f"`{right}`" for right in Right)
    ranges["top-priority"] = ", ".join(f"`{name}`" for name in CLASSES)
    return f"| `{key}` | {ranges.get(key, '')} | {ACCESS_KEYS[key]} |\n"


def _row(name: str, setting: Setting) -> str:
    when = applies(name)
    holds = f"**{when}**" if when is Applies.RESTART else when
    cells = (f"`{name}`", _default(name), _range(setting), setting.doc, holds)
    return f"| {' | '.join(cells)} |\n"


def _default(name: str) -> str:
    if name in MADE_HERE:
        return MADE_HERE[name]
    [field] = [f for f in msgspec.structs.fields(Config) if f.name == name.replace("-", "_")]
    default = field.default
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, int | float):
        return _number(default)
    return f"`{default}`"


def _range(setting: Setting) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if setting.kind is bool:
        return "`true`, `false`"
    if setting.kind not in (int, float):
        return ""
    low, high = (
        _number(bound) if math.isfinite(bound) else "" for bound in (setting.low, setting.high)
    )
    return f"{low} … {high}"


def _number(value: float) -> str:
    return f"{value:,.15g}".replace(",", " ")
