"""The page docs/settings.md: each setting with its default, range and time of effect."""

from __future__ import annotations

from collections.abc import Mapping

from inferd.daemon.config.access_settings import ACCESS_KEYS
from inferd.daemon.config.declaration import Applies, Setting
from inferd.daemon.config.names import NAME_KEYS
from inferd.daemon.config.settings import SETTINGS

HEAD = """\
# Settings

`make docs` generates this page from the code. A setting is a key under `[daemon]` in the file, a
variable such as `INFERD_SESSIONS_MAX` in the environment, or `inferd serve --set sessions-max=200`.
The flag overrides the environment, and the environment overrides the file. The machine's service
sets `socket`, `models-dir` and `state-dir` in its environment, so its file cannot change them.

The last column shows when a change in the file takes effect after the file is read again
(`systemctl reload inferd`, SIGHUP). A change in `[models]` or `[defaults]` takes effect at a
model's next load, except for parameters of turns, such as `temp`, which take effect at once.

`inferd config check` prints the errors in the file. `inferd config show --origin` prints the values
in force and their sources. [config.schema.json](config.schema.json) is the JSON schema of the file
for editors; `inferd config schema` prints it.

| setting | default | from … to | meaning | takes effect |
|---|---|---|---|---|
"""
NAMES_HEAD = """
## Other names of models

A table `[models.NAME]` with the key `of` makes NAME another name of a model
([configuration.md](configuration.md#several-names-for-one-model)). Beside these keys it has
parameters of turns and `ctx-size`. A change takes effect at once; contexts that are open keep the
parameters with which they began.

| key | from … to | meaning |
|---|---|---|
"""
ACCESS_HEAD = """
## Access

The tables `[access.NAME]` of the file are access rules. A change takes effect at once.
[operations.md](operations.md#users) describes which rule applies to a user, and the rights of users
to whom none applies. All keys are optional.

| key | from … to | meaning |
|---|---|---|
"""


def page() -> str:
    """Return the page."""
    settings = "".join(_row(name, setting) for name, setting in SETTINGS.items())
    return HEAD + settings + NAMES_HEAD + _rows(NAME_KEYS) + ACCESS_HEAD + _rows(ACCESS_KEYS)


def _rows(keys: Mapping[str, Setting]) -> str:
    return "".join(f"| `{key}` | {_range(s)} | {s.doc} |\n" for key, s in keys.items())


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
