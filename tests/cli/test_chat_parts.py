"""The parts of a chat that need no terminal: command lines, history file, blocks and exports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.backends.errors import BackendError, InvalidArgument
from inferd.cli.inference.answering import has_format
from inferd.cli.inference.chat_commands import (
    COMMANDS,
    COMMANDS_HELP,
    OTHER_WORDS,
    CommandLine,
    check_setting,
    completions,
    export_text,
    read_command,
    read_setting,
    unquoted,
    write_new_file,
)
from inferd.cli.inference.markdown_output import split_blocks
from inferd.cli.inference.typed_lines import (
    ENTRIES_MAX,
    ENTRY_CHARACTERS_MAX,
    FILE_BYTES_MAX,
    LineHistory,
    escape_entry,
    read_entry,
)

# Command lines.


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/help", CommandLine("/help")),
        ("  /HELP ", CommandLine("/help")),
        ("/bye", CommandLine("/exit")),
        ("/clear", CommandLine("/reset")),
        ("/set temp 0.5", CommandLine("/set", "temp 0.5")),
        ("/system Be  brief.", CommandLine("/system", "Be  brief.")),
        ("/export", CommandLine("/export", error="/export needs FILE")),
        ("/undo it", CommandLine("/undo", error="/undo takes no argument")),
        ("/udno", CommandLine("", error="there is no command /udno; did you mean '/undo'?")),
        ("/mode tiny", CommandLine("", error="there is no command /mode; did you mean '/model'?")),
        ("/xyzzy", CommandLine("", error="there is no command /xyzzy")),
        ("/xyzzy what is this", None),
        ("/usr/bin", None),
        ("/", None),
        ("what is /help", None),
        ("/help\nme", None),
        ("", None),
    ],
)
def test_a_line_is_a_command_an_error_or_a_question(line: str, command: CommandLine | None) -> None:
    assert read_command(line) == command


def test_every_command_is_in_the_help_and_every_other_word_means_one() -> None:
    assert [line.split()[0] for line in COMMANDS_HELP.splitlines()][: len(COMMANDS)] == [*COMMANDS]
    assert set(OTHER_WORDS.values()) <= set(COMMANDS)
    assert not set(OTHER_WORDS) & set(COMMANDS)


@pytest.mark.parametrize(
    ("argument", "setting"),
    [
        ("", ("", None)),
        ("temp", ("temp", None)),
        ("temp 0.5", ("temp", "0.5")),
        ("temp=0.5", ("temp", "0.5")),
        ("temp = 0.5", ("temp", "0.5")),
        ("stop a b = c", ("stop", "a b = c")),
        ("temp=", ("temp", None)),
    ],
)
def test_a_setting_is_a_name_and_a_value(argument: str, setting: tuple[str, str | None]) -> None:
    assert read_setting(argument) == setting


def test_only_parameters_of_requests_are_set_in_a_chat() -> None:
    assert check_setting("temp") == check_setting("no-such") == ""
    assert "ctx-size" in check_setting("ctx_size")


def test_commands_and_parameters_are_completed() -> None:
    assert list(completions("/se")) == [("/set ", 3)]
    assert list(completions("/h")) == [("/help", 2)]
    assert ("top-k", 5) in list(completions("/set top_k"))
    assert ("ctx-size", 3) not in list(completions("/set ctx"))
    for line in ("", "hello", "/set temp 0", "/system te"):
        assert list(completions(line)) == []


def test_quotes_around_an_argument_are_removed() -> None:
    assert [unquoted(t) for t in ('"a b"', "'a'", '""', '"', "a", "'a\"")] == [
        *("a b", "a", "", '"', "a", "'a\"")
    ]


def test_options_that_prescribe_a_format_are_recognised_by_any_spelling() -> None:
    assert has_format({"json_schema": "{}"}) and has_format({"regex": "a"})
    assert not has_format({"regex": "", "temp": 1, "no-such": "x"})


# The history file.


@given(st.text())
def test_an_entry_is_one_line_and_is_read_as_it_was(entry: str) -> None:
    line = escape_entry(entry)
    assert "\n" not in line and "\r" not in line
    assert read_entry(line) == entry


def test_the_file_is_private_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "inferd" / "history"
    history = LineHistory(path)
    text = "x" * (FILE_BYTES_MAX // 200)
    for number in range(300):
        history.add(f"{number} {text}\nsecond line")
        assert path.stat().st_size <= FILE_BYTES_MAX
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["history"]
    again = LineHistory(path).entries
    assert again[-1] == f"299 {text}\nsecond line" and 90 <= len(again) < 300
    history.add("x" * (ENTRY_CHARACTERS_MAX + 1))
    history.add("  ")
    history.add(again[-1])
    assert LineHistory(path).entries == again, "neither long, nor empty, nor twice"


def test_the_entries_in_memory_are_bounded(tmp_path: Path) -> None:
    history = LineHistory(None)
    for number in range(ENTRIES_MAX + 5):
        history.add(str(number))
    assert len(history.entries) == ENTRIES_MAX and history.entries[-1] == str(ENTRIES_MAX + 4)


@pytest.mark.parametrize("kind", ["garbage", "folder", "pipe", "link", "old"])
def test_any_file_in_its_place_keeps_nobody_from_chatting(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "history", tmp_path / "other"
    match kind:
        case "garbage":
            path.write_bytes(b"\xff\xfe\x00\\\n" * 1000)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            other.write_text("of another program\n")
            path.symlink_to(other)
        case "old":
            path.write_text("a line of readline\n")
    history = LineHistory(path)
    history.add("hello")
    assert history.entries[-1] == "hello"
    if kind == "link":
        assert other.read_text() == "of another program\n"
    if kind == "old":
        assert LineHistory(path).entries == ["a line of readline", "hello"]


# Markdown that arrives in pieces.

_PARTS = (
    *("a", "b ", " ", "    ", "\n", "\n\n", "-", "- ", "* ", "1. ", "# ", "```", "```\n", "~~~"),
    *("|", "|---|\n", "> ", "=", "===", "<p>", "`", "**", "\t", "\u2028", "é"),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(_PARTS), max_size=30).map("".join))
def test_blocks_that_were_printed_do_not_change_with_more_text(text: str) -> None:
    printed, rest = [], ""
    for character in text:
        rest += character
        blocks, rest = split_blocks(rest)
        printed += blocks
    blocks, end = split_blocks(text)
    assert (printed, rest.lstrip("\n")) == (blocks, end.lstrip("\n"))


def test_a_line_that_only_begins_like_a_block_ends_none() -> None:
    assert split_blocks("a\n```b") == ([], "a\n```b")
    assert split_blocks("a\n```b\n") == (["a"], "```b\n")
    assert split_blocks("a\n\nb") == (["a"], "b")


# Exports.

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "tool", "content": "# 3\n"},
]


def test_an_export_has_every_message() -> None:
    page = export_text(Path("a.MD"), "m", MESSAGES)
    assert page.startswith("# A conversation with m\n\n## System prompt\n\nBe brief.\n\n## You\n\n")
    assert "one\ntwo\n\n## Model\n\n```json\n" in page and page.endswith("## Tool\n\n# 3\n")
    assert '"name": "f"' in export_text(Path("a.json"), "m", MESSAGES)
    with pytest.raises(InvalidArgument, match=r"neither in \.md nor in \.json"):
        export_text(Path("a"), "m", MESSAGES)


def test_an_export_overwrites_nothing_and_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    write_new_file(path, "text\n")
    with pytest.raises(InvalidArgument, match="exists"):
        write_new_file(path, "other")
    assert path.read_text() == "text\n"
    dangling = tmp_path / "b.md"
    dangling.symlink_to(tmp_path / "none" / "b.md")
    with pytest.raises(InvalidArgument, match="exists"):
        write_new_file(dangling, "text")
    with pytest.raises(BackendError, match="cannot be written"):
        write_new_file(tmp_path / "none" / "a.md", "text")
    with pytest.raises(UnicodeEncodeError):
        write_new_file(tmp_path / "c.md", "\ud800")
    assert not (tmp_path / "c.md").exists()
