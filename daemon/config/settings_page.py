"""docs/settings.md: every setting with its default, its range, and when a change of it holds."""

from __future__ import annotations

from .access_settings import ACCESS_KEYS
from .declaration import Applies, Setting
from .settings import SETTINGS

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
    rules = (f"| `{key}` | {_range(s)} | {s.doc} |\n" for key, s in ACCESS_KEYS.items())
    return HEAD + settings + ACCESS_HEAD + "".join(rules)


def _row(name: str, setting: Setting) -> str:
    when = setting.applies
    holds = f"**{when}**" if when is Applies.RESTART else when
    cells = (f"`{name}`", _default(setting), _range(setting), setting.doc, holds)
    return f"| {' | '.join(cells)} |\n"


def _default(setting: Setting) -> str:
    default = setting.default
    if setting.default_doc:
        return setting.default_doc
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return _number(default) if isinstance(default, int | float) else f"`{default}`"


def _range(setting: Setting) -> str:
    schema = setting.json_schema()
    choices = setting.choices or schema.get("enum") or schema.get("items", {}).get("enum", ())
    if setting.kind is bool:
        choices = ("true", "false")
    if setting.low is None or setting.high is None:
        return ", ".join(f"`{choice}`" for choice in choices)
    return f"{_number(setting.low)} … {_number(setting.high)}"


def _number(value: float) -> str:
    return f"{value:,.15g}".replace(",", " ")
