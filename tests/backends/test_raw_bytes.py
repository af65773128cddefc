"""Bytes that are not UTF-8 in the text of messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.texts import bytes_of, is_utf8, mark_bytes, offset_of

_LIKE_A_MARK = "\U0010fe80".encode()


@given(st.lists(st.sampled_from([b"a", b"\xff", b"\x80", "é".encode(), _LIKE_A_MARK, b"\xf4"])))
def test_any_bytes_survive_as_text(parts: list[bytes]) -> None:
    data = b"".join(parts)
    text, marks = mark_bytes(data.decode("utf-8", "surrogateescape"))
    assert bytes_of(text) == data
    text.encode()  # JSON, msgpack and templates take it
    assert bool(marks) >= (not is_utf8(data))


def test_the_offset_is_that_in_the_bytes() -> None:
    text, marks = mark_bytes(b"\xc3\xa9\xff\xfe".decode("utf-8", "surrogateescape"))
    assert (marks, offset_of(text, 0xFF), offset_of(text, 0xFE)) == (2, 2, 3)
    assert offset_of(text, 0xFD) == -1
