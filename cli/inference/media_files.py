"""Images and sounds that a user names on the command line or in a chat."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...backends.errors import InferdError, TooLarge, UnsupportedOperation

if TYPE_CHECKING:
    from ...backends.media import MediaKind
    from ...ipc.client import Audio, Image

STANDARD_INPUT = "-"
COMPLETIONS_MAX = 200
"""Files that are offered to complete a path."""
ENTRIES_MAX = 10_000
"""Entries of a folder that are read for that."""
_NOUNS = {"image": "images", "audio": "sounds"}

ImageFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="Send an image with the prompt; '-' reads it from standard input. May be repeated.",
        show_default=False,
    ),
]
SoundFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--audio",
        metavar="FILE",
        help="Send a sound with the prompt; '-' reads it from standard input. May be repeated.",
        show_default=False,
    ),
]


class MediaFile(NamedTuple):
    """An image or a sound, with the name by which the user knows it."""

    name: str
    media: Image | Audio


def media_files(images: Sequence[Path] | None, sounds: Sequence[Path] | None) -> list[MediaFile]:
    """Return the images and then the sounds of these paths.

    :raises InvalidArgument: one cannot be read, or is another kind of file.
    """
    paths: list[tuple[Path, MediaKind]] = [(path, "image") for path in images or ()]
    paths += [(path, "audio") for path in sounds or ()]
    if sum(str(path) == STANDARD_INPUT for path, _ in paths) > 1:
        raise typer.BadParameter("standard input is one image or one sound: name '-' once")
    return [open_file(str(path), kind) for path, kind in paths]


def reads_standard_input(*paths: Sequence[Path] | None) -> bool:
    """Return whether one of the files is standard input."""
    return any(str(path) == STANDARD_INPUT for group in paths for path in group or ())


def open_file(path: str, kind: MediaKind) -> MediaFile:
    """Return the image or sound at *path*; `-` is standard input.

    :raises InvalidArgument: it cannot be read, or is another kind of file.
    """
    from ...backends.media_types import HEAD_BYTES, check_content
    from ...ipc.client import Audio, Image
    from ...ipc.media_parts import open_path

    name = "standard input" if path == STANDARD_INPUT else path
    source: str | bytes = path
    if path == STANDARD_INPUT:
        source = head = _read_input()
    else:
        content = open_path(path)
        if content.descriptor >= 0:
            try:
                head = os.pread(content.descriptor, HEAD_BYTES, 0)
            finally:
                os.close(content.descriptor)
        else:
            source = head = content.data
    try:
        check_content(head, kind)
    except InferdError as exc:
        exc.message = exc.message.replace("this is", f"{name} is", 1)
        raise
    media = Image(source, alt=_alt(path)) if kind == "image" else Audio(source, alt=_alt(path))
    return MediaFile(name, media)


def _alt(path: str) -> str:
    """Return the name of a file, which pages and exports show in place of its content."""
    name = "" if path == STANDARD_INPUT else os.path.basename(path)
    return "".join(c for c in name if c.isprintable())


def _read_input() -> bytes:
    from ...ipc.media_parts import CONTENT_BYTES_MAX

    data = sys.stdin.buffer.read(CONTENT_BYTES_MAX + 1)
    if len(data) > CONTENT_BYTES_MAX:
        raise TooLarge(
            f"standard input has more than {CONTENT_BYTES_MAX} bytes", hint="send a smaller file"
        )
    return data


@contextmanager
def naming_files(files: Sequence[MediaFile]) -> Iterator[None]:
    """Name the file in an error of the daemon that concerns one of *files*."""
    try:
        yield
    except InferdError as exc:
        item = exc.data.get("item")
        if isinstance(item, int) and 0 <= item < len(files):
            exc.message = f"{files[item].name}: {exc.message}"
        raise


def check_reads(socket: Path | None, model: str, files: Sequence[MediaFile]) -> None:
    """Check that a model reads the kinds of *files*, before it is loaded for them. A model that the
    daemon does not list by this name is checked by its first turn.

    :raises UnsupportedOperation: it does not; the hint names models that do.
    """
    if not files:
        return
    from ..one_shot import OneShotClient

    with OneShotClient(socket) as client:
        models = client.models()
    found = next((m for m in models if m["name"] == model), None)
    for file in files:
        kind = file.media.kind
        if found is not None and kind not in found.get("reads", [kind]):
            raise UnsupportedOperation(
                f"{model} reads no {_NOUNS[kind]}", hint=readers_hint(models, kind)
            )


def readers_hint(models: Sequence[dict[str, Any]], kind: str) -> str:
    """Return which of the daemon's models read images or sounds, and how to get one that does."""
    readers = [m["name"] for m in models if kind in m.get("reads", ())]
    get_one = (
        "a model reads them with its projector: put its mmproj-*.gguf beside the model's file, or"
        ' set `[models.NAME] mmproj = "…"`'
    )
    if not readers:
        return f"no installed model reads {_NOUNS[kind]}; {get_one}"
    more = f" and {len(readers) - 5} more" if len(readers) > 5 else ""
    return f"{', '.join(readers[:5])}{more} can read {_NOUNS[kind]}; {get_one}"


def typed_path(argument: str) -> str:
    """Return the path that a user has typed or dropped into the terminal, which may have put it in
    quotes or escaped its spaces.
    """
    plain = argument.strip()
    if os.path.lexists(os.path.expanduser(plain)):
        return os.path.expanduser(plain)
    with suppress(ValueError):  # a quote without its end belongs to the name
        words = shlex.split(plain)
        if len(words) == 1:
            return os.path.expanduser(words[0])
    return os.path.expanduser(plain)


def completed_paths(part: str) -> Iterator[str]:
    """Yield the paths that begin with *part*, as they are typed; folders end with a slash."""
    quote = part[:1] if part[:1] in ("'", '"') else ""
    typed = part[len(quote) :]
    folder, _, beginning = typed.rpartition("/")
    folder += "/" * ("/" in typed)
    found: list[str] = []
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            for _, entry in zip(range(ENTRIES_MAX), entries, strict=False):
                if entry.name.startswith(beginning or ".") == bool(beginning) and (
                    entry.name.isprintable()
                ):
                    found.append(f"{entry.name}{'/' * entry.is_dir()}")
    except (OSError, ValueError):  # ValueError: a zero byte
        return
    for name in sorted(found)[:COMPLETIONS_MAX]:
        yield f"{quote}{folder}{name}"
