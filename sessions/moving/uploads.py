"""Sessions that other daemons send: their parts until they are complete."""

from __future__ import annotations

from collections import OrderedDict

from ...backends.errors import InvalidArgument, TooLarge

UPLOADS_MAX = 8
"""Uploads at once: beyond that, the one that was continued least recently is dropped."""
UPLOAD_BYTES_MAX = 32 << 20


class Uploads:
    """Incomplete uploads by their transfer. Owned by the daemon's event loop."""

    def __init__(self) -> None:
        self._parts: OrderedDict[str, bytearray] = OrderedDict()

    def add_part(self, transfer: str, offset: int, data: bytes, size: int) -> bytes | None:
        """Add the next part of a session of *size* bytes; return the session once it is complete.
        A part at 0 begins again.

        :raises InvalidArgument: it is not the next part.
        :raises TooLarge: the session is too large.
        """
        if size > UPLOAD_BYTES_MAX:
            raise TooLarge(
                f"an exported session of {size} bytes; the limit is {UPLOAD_BYTES_MAX}",
                data={"bytes": size, "bytes_max": UPLOAD_BYTES_MAX},
            )
        have = self._parts.pop(transfer, bytearray()) if offset else bytearray()
        if offset != len(have) or offset + len(data) > size or not data:
            raise InvalidArgument(
                f"a part of {len(data)} bytes at {offset}, after {len(have)} of {size} bytes",
                hint="send the parts in order, from 0 on",
            )
        have += data
        if len(have) == size:
            return bytes(have)
        self._parts[transfer] = have
        if len(self._parts) > UPLOADS_MAX:
            self._parts.popitem(last=False)
        return None
