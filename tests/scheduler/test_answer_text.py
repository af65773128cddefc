"""Released text: whole characters, nothing past a stop text, nothing lost."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from inferd.scheduler.stopping import STOP_TEXT, TextAssembler, incomplete_utf8

TEXTS = st.text(alphabet="abXY ü€😀", max_size=30)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


@given(TEXTS, st.lists(st.integers(0, 3)))
def test_all_text_is_released_however_it_is_split(text: str, sizes: list[int]) -> None:
    assembler = TextAssembler()
    released = [assembler.add_piece(p).text for p in cut(text.encode(), sizes)]
    for piece in released:
        piece.decode()  # a split character would fail here
    assert b"".join(released) + assembler.flush() == text.encode()


@example("XaX", [2], ["a", "XaX"])
@given(TEXTS, st.lists(st.integers(0, 3)), st.lists(st.text("abXYü€", min_size=1, max_size=4)))
def test_a_stop_text_ends_the_output_at_the_same_place_however_it_is_split(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    assembler = TextAssembler(stop=stops)
    out, met = b"", None
    for piece in cut(text.encode(), sizes):
        released = assembler.add_piece(piece)
        out += released.text
        met = met or released.ending
    out += assembler.flush()
    hits = [(at + len(s), at) for s in stops if (at := text.find(s)) >= 0]
    assert out.decode() == (text[: min(hits)[1]] if hits else text)
    assert (met is not None) == bool(hits)


def test_a_reverse_prompt_stays_in_the_output() -> None:
    assembler = TextAssembler(keep=["User:"])

    released = [assembler.add_piece(p) for p in (b"Hi ", b"Us", b"er", b": and more")]

    assert b"".join(r.text for r in released) == b"Hi User:"
    assert released[-1].ending == (STOP_TEXT, "User:", b"")
    assert assembler.add_piece(b"never shown").text == b""


def test_text_that_may_become_a_stop_text_is_withheld_until_decided() -> None:
    assembler = TextAssembler(stop=["###"])

    assert assembler.add_piece(b"a##").text == b"a"
    assert assembler.add_piece(b"b").text == b"##b"


def test_bytes_that_can_never_be_a_character_are_released() -> None:
    assert incomplete_utf8(b"\xff") == 0
    assert incomplete_utf8(b"a\xe2\x82") == 2
    assert incomplete_utf8(b"\x80\x80\x80\x80") == 0
    assert incomplete_utf8("€".encode()) == 0
