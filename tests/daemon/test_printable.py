"""Text that is safe to print: control characters are escaped, and JSON keeps its meaning."""

from __future__ import annotations

import io
import json
import sys

import pytest

from inferd.cli.output import write, write_answer, write_json
from inferd.daemon.printable import escape_controls

WILD = "a\x1b]0;title\x07\x7f\x9b\r\u202eb\u2066\u200f\u2028"


@pytest.mark.parametrize("number", [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F)])
def test_each_control_character_is_escaped(number: int) -> None:
    expected = chr(number) if chr(number) in "\t\n" else f"\\u{number:04x}"
    assert escape_controls(f"a{chr(number)}b") == f"a{expected}b"


def test_all_other_text_is_unchanged() -> None:
    text = "Ünïcödé 漢字 שלום 👩‍🚀 \\ 'quotes'\tand\n lines"
    assert escape_controls(text) == text


def test_a_file_name_that_is_not_utf_8_can_be_printed() -> None:
    assert escape_controls("model-\udcff.gguf").encode() == rb"model-\udcff.gguf"


def test_messages_are_escaped_and_json_and_answers_keep_their_meaning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    write_json({"id": WILD})
    assert escape_controls(written.getvalue()) == written.getvalue()
    assert json.loads(written.getvalue()) == {"id": WILD}

    write(WILD)
    assert WILD not in written.getvalue()
    write_answer(WILD)
    assert written.getvalue().endswith(WILD + "\n")


def test_a_terminal_shows_an_answer_without_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(written, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", written)
    write_answer("a\x1b]0;title\x07\tb\r\x9bc\n", end="")
    assert written.getvalue() == "a]0;title\tbc\n"
