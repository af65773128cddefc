"""Bodies of forms with a file (`multipart/form-data`, RFC 7578), read part by part in bounded
memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...backends.errors import InvalidArgument

HEAD_BYTES_MAX = 16 << 10
FIELD_BYTES_MAX = 64 << 10
"""Bytes of a field that is not the file."""
FIELDS_MAX = 64
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"\r\n]*)"', re.IGNORECASE)
_FILE_NAME = re.compile(rb'[;\s]filename="([^"\r\n]*)"', re.IGNORECASE)


class FilePart(NamedTuple):
    """A part of the file's content."""

    data: bytes


def _error(cause: str) -> InvalidArgument:
    return InvalidArgument(
        f"the body is not a form with a file: {cause}",
        hint="send multipart/form-data with the fields `purpose` and `file`",
    )


class FormReader:
    """Splits the body of a form. `fields` has those that are texts, and `file_name` the file's."""

    def __init__(self, content_type: str, file_field: str = "file"):
        found = _BOUNDARY.search(content_type)
        if not content_type.lower().startswith("multipart/form-data") or found is None:
            raise _error(f"its content type is {content_type[:100]!r}")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        self.ended = False
        self._file_field = file_field.encode()
        self._mark = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
        self._buffer = bytearray(b"\r\n")  # so that the first boundary is as the others
        self._name: bytes | None = None
        """The name of the part under way; None before the first one."""
        self._text = bytearray()

    def add(self, data: bytes) -> Iterator[FilePart]:
        """Add bytes of the body, and yield the parts of the file that they complete.

        :raises InvalidArgument: the body is not a form, or a field is too long.
        """
        self._buffer += data
        while not self.ended:
            at = self._buffer.find(self._mark)
            if at < 0:
                ready = len(self._buffer) - len(self._mark) + 1
                if ready > 0:
                    yield from self._take(ready)
                return
            after = at + len(self._mark)
            end = self._buffer.find(b"\r\n\r\n", after)
            if self._buffer[after : after + 2] == b"--":
                yield from self._take(at)
                self._end_part()
                self.ended = True
                self._buffer.clear()
                return
            if end < 0:
                if len(self._buffer) - after > HEAD_BYTES_MAX:
                    raise _error("the head of a part is too long")
                if at:
                    yield from self._take(at)
                return
            yield from self._take(at)
            after, end = after - at, end - at
            self._end_part()
            self._begin_part(bytes(self._buffer[after:end]))
            del self._buffer[: end + 4]

    def _take(self, size: int) -> Iterator[FilePart]:
        """Take bytes of the part under way from the buffer."""
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        if self._name is None:
            return  # a preamble
        if self._name == self._file_field:
            if data:
                yield FilePart(data)
            return
        self._text += data
        if len(self._text) > FIELD_BYTES_MAX:
            raise _error(f"a field has more than {FIELD_BYTES_MAX} bytes")

    def _begin_part(self, head: bytes) -> None:
        lines = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disp")]
        found = _NAME.search(lines[0]) if lines else None
        if found is None:
            raise _error("a part has no name")
        self._name, self._text = found[1], bytearray()
        if self._name == self._file_field:
            if self.file_name is not None:
                raise _error("it has two files")
            name = _FILE_NAME.search(lines[0])
            self.file_name = "" if name is None else name[1].decode(errors="replace")
        elif len(self.fields) >= FIELDS_MAX:
            raise _error(f"it has more than {FIELDS_MAX} fields")

    def _end_part(self) -> None:
        if self._name is not None and self._name != self._file_field:
            name = self._name.decode(errors="replace")
            self.fields[name] = self._text.decode(errors="replace")
        self._name = None

    def check_end(self) -> None:
        """Check that the body is whole.

        :raises InvalidArgument: it is not, or has no file.
        """
        if not self.ended:
            raise _error("it ends before its last boundary")
        if self.file_name is None:
            raise _error("it has no file")
