"""Files that are named as models but hold something else."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec

from . import MAGIC
from .header import read_beginning

READ_BYTES = 1 << 16
"""The beginning of a file that is read: the keys `general.*` come first."""
_TYPES = {
    "adapter": "an adapter (LoRA): `inferd add-adapter` adds it to the model it was made for",
    "imatrix": "an importance matrix, for quantizing a model",
    "mmproj": "a projector for images or sound, which belongs to a language model",
}
_ARCHITECTURES = {
    "clip": _TYPES["mmproj"],
    "controlvector": "a control vector, which belongs to a language model",
}
_LFS_POINTER = b"version https://git-lfs.github.com/"


class OtherContent(msgspec.Struct, frozen=True):
    """The reason why a file is not a language model."""

    reason: str
    is_damaged: bool = True
    """False for a part of a model, such as a projector, which may lie beside it."""


def other_content(file: Path) -> OtherContent | None:
    """Return the reason why *file* is certainly not a language model, or None. Blocks."""
    try:
        status = os.stat(file)
    except OSError as exc:  # a load reports a denied access, or a file server that does not answer
        reason = dangling_reason(exc) if os.path.islink(file) else ""
        return OtherContent(reason) if reason else None
    if not stat.S_ISREG(status.st_mode):
        return OtherContent("it is not a regular file")
    if not status.st_size:
        return OtherContent("it is empty: its download or copy has failed")
    try:
        # O_NONBLOCK: opening a FIFO that has just replaced it would otherwise wait for its writer.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            beginning = os.pread(fd, READ_BYTES, 0)
        finally:
            os.close(fd)
    except OSError:
        return None  # a load reports it
    return _content(beginning)


def dangling_reason(error: OSError) -> str:
    """Return the reason why a link cannot be followed, or an empty text if that may be possible for
    others.
    """
    if error.errno == errno.ELOOP:
        return "it is a link that leads to itself"
    is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    return "it is a link to a missing file" if is_missing else ""


def _content(beginning: bytes) -> OtherContent | None:
    if beginning.startswith(_LFS_POINTER):
        return OtherContent("it is a pointer of Git LFS: `git lfs pull` gets the model")
    if not beginning.startswith(MAGIC):
        text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip()[:15].lower()
        is_page = text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml"))
        page = "a web page: download the file itself"
        return OtherContent(f"it is {page if is_page else 'not a GGUF file'}")
    values = read_beginning(beginning)
    kind = _TYPES.get(str(values.get("general.type"))) or _ARCHITECTURES.get(
        str(values.get("general.architecture"))
    )
    return None if kind is None else OtherContent(f"it is {kind}", is_damaged=False)
