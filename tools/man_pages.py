"""The manual pages, docs/man, generated from the commands.

Only the names, texts and flags of the commands are used, not typer's formatting of help, so the
pages do not depend on its version.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import typer

from inferd import __version__
from inferd.cli.app import ENVIRONMENT, STATUSES, app

COMPLETION = """\
`inferd --install-completion` installs completion of commands, models, sessions and parameters; it
works after the next start of the shell. `inferd --show-completion` prints the script instead."""
FILES = {
    "~/.config/inferd/config.toml": "the configuration of a user's own daemon",
    "/etc/inferd/config.toml": "the configuration of the machine's daemon",
    "$XDG_RUNTIME_DIR/inferd/inferd.sock": "the socket of a user's own daemon",
    "/run/inferd/inferd.sock": "the socket of the machine's daemon",
    "~/.local/state/inferd/chat-history-UID": "the lines that a user has typed in inferd chat",
    "/tmp/inferd-UID/inferd.sock": "the socket of a user's own daemon without a runtime folder",
}
_ESCAPES = str.maketrans({
    "\\": r"\e", "-": r"\-", "'": r"\(aq", "^": r"\(ha", "~": r"\(ti", "…": "...", "–": r"\(en",
    "×": r"\(mu", "−": r"\-",
})  # fmt: skip


def man_pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    root = group_of_all_commands()
    pages = {"inferd": _page("inferd", root, _main_sections(root))}
    for names, command in _commands(root):
        pages["-".join(names)] = _page(" ".join(names), command, _sections(command))
    return {f"{name}.1": text for name, text in pages.items()}


def group_of_all_commands() -> Any:
    """Return the group of the command line, with all its commands imported."""
    group: Any = typer.main.get_group(app)
    group.import_all()
    return group


def _commands(group: Any, before: tuple[str, ...] = ("inferd",)) -> Iterator[tuple[Any, Any]]:
    """Yield each command below *group*, subgroups included, with its words."""
    for name, command in group.commands.items():
        yield (*before, name), command
        if hasattr(command, "commands"):
            yield from _commands(command, (*before, name))


def _page(name: str, command: Any, sections: Mapping[str, str]) -> str:
    title = name.replace(" ", "-")
    lines = [
        f'.TH {_escaped(title.upper())} 1 "" "inferd {__version__}" "inferd manual"',
        ".nh\n.ad l",  # do not hyphenate commands
        f".SH NAME\n{_escaped(title)} \\- {_text(_summary(command))}",
        f".SH SYNOPSIS\n{_synopsis(name, command)}",
        *(f".SH {head}\n{text}" for head, text in sections.items() if text),
    ]
    return "\n".join(lines) + "\n"


def _main_sections(root: Any) -> dict[str, str]:
    commands = {" ".join(names[1:]): _summary(command) for names, command in _commands(root)}
    return {
        "DESCRIPTION": _paragraphs(_help(root)),
        "COMMANDS": _list(commands, bold=True),
        "OPTIONS": _options(root),
        "COMPLETION": _paragraphs(COMPLETION),
        **_common(),
        "SEE ALSO": _also(f"inferd-{name.replace(' ', '-')}" for name in commands),
    }


def _sections(command: Any) -> dict[str, str]:
    below = getattr(command, "commands", {})
    return {
        "DESCRIPTION": _paragraphs(_help(command)),
        "COMMANDS": _list({name: _summary(c) for name, c in below.items()}, bold=True),
        "ARGUMENTS": _arguments(command),
        "OPTIONS": _options(command),
        **_common(),
        "SEE ALSO": _also(["inferd"]),
    }


def _common() -> dict[str, str]:
    return {
        "EXIT STATUS": _list({str(status): text for status, text in STATUSES.items()}, bold=True),
        "ENVIRONMENT": _list(ENVIRONMENT, bold=True),
        "FILES": _list(FILES, bold=False),
    }


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help or "")


def _summary(command: Any) -> str:
    """Return the first sentence, for the section NAME."""
    text = " ".join(_help(command).split("\n\n")[0].split()).rstrip(".")
    text = text.removeprefix("Inferd ")
    return text[:1].lower() + text[1:]


def _synopsis(name: str, command: Any) -> str:
    words = [f"\\fB{_escaped(name)}\\fR", *(["[\\fIOPTIONS\\fR]"] if command.params else [])]
    for parameter in _of_kind(command, "argument"):
        word = f"\\fI{_escaped(_metavar(parameter))}\\fR"
        words.append(word if parameter.required else f"[{word}]")
    if hasattr(command, "commands"):
        words.append("\\fICOMMAND\\fR ...")
    return " ".join(words)


def _of_kind(command: Any, kind: str) -> list[Any]:
    return [p for p in command.params if p.param_type_name == kind and not p.hidden]


def _metavar(parameter: Any) -> str:
    named = parameter.metavar or (
        parameter.name.upper() if parameter.param_type_name == "argument" else ""
    )
    assert named, f"{parameter.opts}: the metavar is missing"
    return str(named) + ("..." if parameter.nargs == -1 and not named.endswith("...") else "")


def _arguments(command: Any) -> str:
    found = {_metavar(p): p.help or "" for p in _of_kind(command, "argument")}
    return _list(found, bold=False)


def _options(command: Any) -> str:
    found = {_spelled(p): _help_of(p) for p in _of_kind(command, "option")}
    return "\n".join(f".TP\n{flags}\n{_text(text)}" for flags, text in found.items())


def _spelled(option: Any) -> str:
    flags = [*sorted(option.opts, key=len), *option.secondary_opts]
    value = "" if option.is_flag else f" \\fI{_escaped(_metavar(option))}\\fR"
    return ", ".join(f"\\fB{_escaped(flag)}\\fR" for flag in flags) + value


def _help_of(option: Any) -> str:
    assert option.help, f"{option.opts}: the help text is missing"
    default = option.default
    if isinstance(option.show_default, str):
        return f"{option.help} Default: {option.show_default}."
    if option.is_flag or not option.show_default or default in (None, "") or callable(default):
        return str(option.help)
    return f"{option.help} Default: {getattr(default, 'value', default)}."


def _list(items: Mapping[str, str], *, bold: bool) -> str:
    font = "B" if bold else "I"
    return "\n".join(
        f".TP\n\\f{font}{_escaped(name)}\\fR\n{_text(text)}" for name, text in items.items()
    )


def _also(names: Iterable[str]) -> str:
    return ",\n".join(f"\\fB{_escaped(name)}\\fR(1)" for name in names)


def _paragraphs(text: str) -> str:
    return "\n.PP\n".join(_text(part) for part in re.split(r"\n{2,}", text))


def _text(text: str) -> str:
    """Return a paragraph, in which text in backquotes is bold."""
    parts = _escaped(" ".join(text.split())).split("`")
    joined = "".join(f"\\fB{p}\\fR" if i % 2 else p for i, p in enumerate(parts))
    return joined if not joined.startswith(".") else f"\\&{joined}"


def _escaped(text: str) -> str:
    plain = text.translate(_ESCAPES)
    return "".join(c if ord(c) < 128 else f"\\[u{ord(c):04X}]" for c in plain)
