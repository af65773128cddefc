"""The commands within a chat: their table, the lines that name them, their arguments, and the files
into which `/export` writes a conversation.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...backends.errors import BackendError, InvalidArgument
from ...backends.params import BY_SPELLING, PARAMETERS, nearest
from .media_files import completed_paths

WORD_CHARACTERS_MAX = 100


class ChatCommand(NamedTuple):
    """A command: the name of its argument (in brackets if it may be absent), and its effect."""

    argument: str
    effect: str


COMMANDS = {
    "/set": ChatCommand("[NAME [VALUE]]", "set a parameter, such as temp 0.5, or print it"),
    "/system": ChatCommand("[TEXT]", "begin again with this system prompt, or print it"),
    "/image": ChatCommand("[FILE]", "send an image with the next question, or list what is sent"),
    "/audio": ChatCommand("[FILE]", "send a sound with the next question, or list what is sent"),
    "/detach": ChatCommand("", "send no images and sounds with the next question"),
    "/model": ChatCommand("[NAME]", "begin again with another model, or list the models"),
    "/undo": ChatCommand("", "remove the last question and its answer"),
    "/regenerate": ChatCommand("", "answer the last question again"),
    "/export": ChatCommand("FILE", "write the conversation to FILE.md or FILE.json"),
    "/reset": ChatCommand("", "clear the conversation"),
    "/exit": ChatCommand("", "end the chat; so does Ctrl-D"),
    "/help": ChatCommand("", "print this list"),
}
OTHER_WORDS = {
    **dict.fromkeys(("/bye", "/quit", "/q"), "/exit"),
    **dict.fromkeys(("/clear", "/new"), "/reset"),
    **dict.fromkeys(("/retry", "/regen"), "/regenerate"),
    **dict.fromkeys(("/save", "/write"), "/export"),
    **dict.fromkeys(("/img", "/picture", "/attach"), "/image"),
    **dict.fromkeys(("/sound", "/voice"), "/audio"),
    **{"/?": "/help", "/option": "/set"},
}
"""Words of other chats, with the commands that they mean."""
_WORD = re.compile(r"/[A-Za-z?][\w-]*")
_END_REASONING = "Ctrl-\\"
_WIDTH = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items()) + 2
COMMANDS_HELP = "\n".join(
    [
        *(
            f"{f'{name} {command.argument}':{_WIDTH}}{command.effect}"
            for name, command in COMMANDS.items()
        ),
        f"{'Ctrl-C':{_WIDTH}}stop an answer",
        f"{_END_REASONING:{_WIDTH}}end the reasoning: the answer begins now",
        f"{'Ctrl-R':{_WIDTH}}search in the typed lines; Alt-Enter begins a new line",
    ]
)


class CommandLine(NamedTuple):
    """A line that names a command, or an `error` about one that it does not name."""

    name: str
    argument: str = ""
    error: str = ""


def read_command(line: str) -> CommandLine | None:
    """Return the command of a line, or None if the line is a question.

    An unknown word with more words after it is a question unless it is nearly a command.
    """
    text = line.strip()
    word, _, argument = text.partition(" ")
    if "\n" in text or not _WORD.fullmatch(word):
        return None
    name, argument = OTHER_WORDS.get(word.lower(), word.lower()), argument.strip()
    if name not in COMMANDS:
        close = nearest(word, COMMANDS)
        if argument and not close:
            return None
        error = f"there is no command {word[:WORD_CHARACTERS_MAX]}"
        return CommandLine("", error=f"{error}; {close}" if close else error)
    expected = COMMANDS[name].argument
    if argument and not expected:
        return CommandLine(name, error=f"{name} takes no argument")
    if not argument and expected and not expected.startswith("["):
        return CommandLine(name, error=f"{name} needs {expected}")
    return CommandLine(name, argument)


def read_setting(argument: str) -> tuple[str, str | None]:
    """Return the name and the value of `/set`: `NAME`, `NAME VALUE` or `NAME=VALUE`."""
    name, value = (*re.split(r"\s*=\s*|\s+", argument, maxsplit=1), None)[:2]
    return str(name), value or None


def unquoted(text: str) -> str:
    """Return a text without the quotes around it."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def check_setting(name: str) -> str:
    """Return the reason why `/set` cannot set a parameter, or an empty text."""
    parameter = BY_SPELLING.get(name.replace("_", "-"))
    if parameter is not None and parameter.level == "model":
        return (
            f"{parameter.name} is set when a model is loaded: inferd chat MODEL"
            f" -o {parameter.name}=VALUE"
        )
    return ""


def completions(line: str) -> Iterator[tuple[str, int]]:
    """Yield the words that may stand at the end of a typed *line*, with the length of the part that
    they replace: commands, parameters after `/set`, and paths after `/image` and `/audio`.
    """
    word, space, rest = line.lstrip().partition(" ")
    if not space:
        for name, command in COMMANDS.items():
            if word and name.startswith(word):
                yield f"{name}{' ' * bool(command.argument)}", len(word)
    elif word == "/set" and " " not in rest.lstrip():
        part = rest.lstrip().replace("_", "-")
        names = (p.name for p in PARAMETERS if p.level != "model")
        yield from ((name, len(part)) for name in names if name.startswith(part))
    elif word in ("/image", "/audio"):
        part = rest.lstrip()
        yield from ((path, len(part)) for path in completed_paths(part))


Message = Mapping[str, Any]
MARKDOWN_SUFFIXES = (".md", ".markdown")
_SPEAKERS = {"user": "You", "assistant": "Model", "system": "System prompt", "tool": "Tool"}


def export_text(path: Path, model: str, messages: Sequence[Message]) -> str:
    """Return the text of the file at *path*, in the format of its suffix.

    :raises InvalidArgument: the suffix is another one.
    """
    suffix = path.suffix.lower()
    if suffix == ".json":
        document = {"model": model, "messages": list(messages)}
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    if suffix in MARKDOWN_SUFFIXES:
        parts = [f"# A conversation with {model}", *map(_markdown, messages)]
        return "\n\n".join(parts) + "\n"
    raise InvalidArgument(
        f"{path.name!r} ends neither in .md nor in .json",
        hint="name the format by the file's suffix",
    )


def _markdown(message: Message) -> str:
    speaker = _SPEAKERS.get(message["role"], message["role"])
    calls = message.get("tool_calls")
    parts = [f"## {speaker}", message_text(message).strip("\n")]
    if calls:
        code = msgspec.json.format(msgspec.json.encode(calls), indent=2).decode()
        parts.append(f"```json\n{code}\n```")
    return "\n\n".join(part for part in parts if part)


def message_text(message: Message) -> str:
    """Return a message's text; a list of parts is joined as the daemon joins it."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(map(_part_text, content))


def _part_text(part: Mapping[str, Any]) -> str:
    """Return the text of a part, or in place of an image or a sound its description."""
    if part.get("type", "text") == "text":
        return str(part.get("text", ""))
    noun = "image" if part["type"] == "image" else "sound"
    return f"[{noun}: {part['alt']}]" if part.get("alt") else f"[{noun}]"


def write_new_file(path: Path, text: str) -> None:
    """Write a file that is not there yet.

    :raises InvalidArgument: it is there.
    :raises BackendError: it cannot be written; nothing is left of it.
    """
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
    except FileExistsError:
        raise InvalidArgument(
            f"{path} exists, and is not overwritten", hint="name another file, or remove this one"
        ) from None
    except OSError as exc:
        raise BackendError(
            f"{path} cannot be written: {exc.strerror}", hint="name a file in another folder"
        ) from None
