"""The files into which `/export` writes a conversation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...backends.errors import BackendError, InvalidArgument

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
    return "\n".join(part.get("text", "") for part in content)


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
