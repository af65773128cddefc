"""`inferd chat` on a terminal with a screen: pastes, sizes, signals, Markdown, and its commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inferd.ipc.client import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd, inferd_process
from tests.echo import echo_model
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

from .screen import Screen, shown_chat

CONFIG = "[daemon]\nshutdown_grace_s = 0.1\n"
CONFIG += echo_model("m", **{"ctx-size": 200_000}) + echo_model("slow", step_ms=30)
POEM = "# Spring\n\nIt has **two** lines,\nand a list:\n\n- one\n- two"
POEM_SHOWN = ["Spring", "It has two lines, and a list:", " • one", " • two"]
ANSWER_BEGINS = "\nbegin and so"
"""The question begins after the prompt."""
LONG = "begin " + "and so on " * 12 + "end"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_tiny("llama", models).rename(models / "tiny.gguf")
    with running_daemon(CONFIG, models_dir=models) as daemon:
        yield daemon


@pytest.fixture
def socket(daemon: RunningDaemon) -> str:
    return daemon.socket


def contents(socket: str, session_id: str) -> list[str]:
    """Return the texts of a session's messages."""
    with Client(socket) as client:
        return [m["content"] for m in client.history(session_id=session_id).messages]


def answer_of(screen: Screen, question: str) -> list[str]:
    """Type a question, and return the lines of its answer."""
    before = len(screen.lines)
    screen.enter(question)
    screen.until_prompt()
    return screen.lines[before:-1]


# The prompt.


def test_a_paste_of_several_lines_is_one_question(socket: str, tmp_path: Path) -> None:
    with shown_chat("m", "--session", "paste", socket=socket, state=tmp_path) as screen:
        screen.paste(POEM)
        screen.until("... - two")
        assert contents(socket, "paste") == [], "nothing is sent before Enter"
        screen.enter()
        screen.until_prompt()
        assert screen.lines[-5:] == [*POEM_SHOWN, ">>>"]
        screen.type("\x04")
        assert screen.until_end() == 0
    assert contents(socket, "paste") == [POEM, POEM]


def test_a_paste_of_100_kb_arrives_whole(socket: str, tmp_path: Path) -> None:
    text = "\n".join(f"line {n} {'word ' * 18}end" for n in range(1000))
    assert len(text) > 100_000
    options = ("--session", "big", "--n-predict", "6")
    with shown_chat("m", *options, socket=socket, state=tmp_path) as screen:
        screen.paste(text)
        screen.until("line 999")
        screen.enter()
        screen.until_prompt()
        screen.enter("/exit")
        assert screen.until_end() == 0
    assert contents(socket, "big") == [text, "line 0"]
    assert (tmp_path / "inferd" / f"chat-history-{os.getuid()}").read_text() == "/exit\n"


def test_text_that_is_typed_and_pasted_during_an_answer_waits_for_the_prompt(
    socket: str, tmp_path: Path
) -> None:
    with shown_chat("slow", "--session", "ahead", socket=socket, state=tmp_path) as screen:
        screen.enter(LONG)
        screen.until(ANSWER_BEGINS)
        screen.paste("typed\nahead")
        screen.until("... ahead")
        assert screen.lines[-3].endswith("and so on end"), "it is not in the answer"
        screen.enter()
        screen.until_prompt()
        screen.type("\x04")
        assert screen.until_end() == 0
    assert contents(socket, "ahead") == [LONG, LONG, "typed\nahead", "typed\nahead"]


def test_wide_characters_emoji_and_text_from_right_to_left_are_shown(
    socket: str, tmp_path: Path
) -> None:
    text = "日本語のテキスト 😀 שלום עולם é"
    with shown_chat("m", "--session", "wide", socket=socket, state=tmp_path) as screen:
        screen.type(text)
        screen.type("x\x7f")  # it is edited by whole characters
        [shown] = answer_of(screen, "")
        assert shown.replace(" ", "") == text.replace(" ", "").replace("e\u0301", "é")
    assert contents(socket, "wide") == [text, text]


def test_typed_lines_are_searched_in_the_next_chat(socket: str, tmp_path: Path) -> None:
    with shown_chat("m", socket=socket, state=tmp_path) as screen:
        answer_of(screen, "the first needle")
        answer_of(screen, "another line")
        screen.type("\x04")
        assert screen.until_end() == 0
    with shown_chat("m", socket=socket, state=tmp_path) as screen:
        screen.type("\x12need")
        screen.until("the first needle")
        screen.type("\r")  # it ends the search
        screen.until(">>> the first needle")
        screen.enter()
        screen.until(lambda s: s.lines[-2:] == ["the first needle", ">>>"])


def test_tab_completes_commands_and_parameters(socket: str, tmp_path: Path) -> None:
    with shown_chat("m", socket=socket, state=tmp_path) as screen:
        screen.type("/regen\t")
        screen.until("/regenerate")
        screen.type("\x15/se\trepeat-pen\t")
        screen.until("/set repeat-penalty")


# Signals and sizes.


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(socket: str, tmp_path: Path) -> None:
    with shown_chat("slow", socket=socket, state=tmp_path) as screen:
        screen.enter(LONG)
        screen.until(ANSWER_BEGINS)
        screen.type("\x03")
        screen.until("stopped")
        screen.until_prompt()
        screen.type("half a line")
        screen.interrupt_prompt()
        screen.until("Ctrl-D ends the chat")
        screen.until_prompt()
        assert answer_of(screen, "next") == ["next"]
        screen.type("\x04")
        assert screen.until_end() == 0


def test_ctrl_backslash_ends_the_reasoning_of_an_answer(socket: str, tmp_path: Path) -> None:
    thought = "<think>" + "and so on " * 20 + "</think>and the answer"
    options = ("--session", "thought", "--no-markdown")
    with shown_chat("slow", *options, socket=socket, state=tmp_path) as screen:
        screen.enter(thought)
        screen.until("\n<think>and so")
        screen.type("\x1c")
        screen.until_prompt()
        assert answer_of(screen, "next") == ["next"]
        screen.type("\x1c")  # at the prompt it does nothing
        screen.type("\x04")
        assert screen.until_end() == 0
    answer = contents(socket, "thought")[1]
    size = answer.index("</think>")
    assert size < 200, "the thought was not ended"
    assert answer == thought[:size] + "</think>" + thought[size + len("</think>") :]


def test_a_closed_terminal_ends_the_chat_and_its_turn(socket: str, tmp_path: Path) -> None:
    with (
        shown_chat("slow", socket=socket, state=tmp_path) as screen,
        Client(socket) as client,
    ):
        screen.enter(LONG)
        screen.until(ANSWER_BEGINS)
        [task] = client.queue()
        status = screen.hang_up()
        assert status in (1, 129), "by the output that failed, or by the signal"
        wait_until(lambda: not client.queue())
        ids = [session["session_id"] for session in client.sessions(dormant=True)]
        assert task["session_id"] not in ids


def test_an_answer_is_wrapped_at_the_size_that_the_terminal_has_at_its_end(
    socket: str, tmp_path: Path
) -> None:
    with shown_chat("slow", socket=socket, state=tmp_path) as screen:
        screen.enter(LONG)
        screen.until(ANSWER_BEGINS)
        screen.resize(30, 40)
        screen.until(lambda s: s.lines[-1:] == [">>>"] and "end" in s.lines[-2])
        assert " ".join(screen.lines[-5:-1]).endswith(LONG[-100:])
        assert max(map(len, screen.lines[-4:])) <= 40


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_an_answer_in_markdown_continues_after_a_loss_below_one_line(
    end: str, tmp_path: Path
) -> None:
    with (
        running_daemon(CONFIG) as daemon,
        shown_chat("slow", socket=daemon.socket, state=tmp_path, columns=200) as screen,
    ):
        screen.paste(f"**first**\n\n{LONG}")
        screen.enter()
        screen.until("first\nbegin and so")
        daemon.kill() if end == "kill" else daemon.stop()
        screen.until("waiting up to 60 s")
        daemon.start_again()
        screen.until_prompt()
        answer = screen.lines[screen.lines.index("first") :]
        notes = [n for n, line in enumerate(answer) if "waiting up to" in line]
        assert len(notes) == 1, answer
        assert answer[-3:] == [answer[notes[0]], LONG, ">>>"], "the paragraph is below the line"


# Markdown.


def test_markdown_is_rendered_only_on_a_terminal_with_colors(socket: str, tmp_path: Path) -> None:
    with shown_chat("m", socket=socket, state=tmp_path) as screen:
        assert answer_of(screen, "so **bold**") == ["so bold"]
        assert b"\x1b[1mbold" in screen.raw
    for no_color, more in (("1", ()), ("", ("--no-markdown",))):
        with shown_chat("m", *more, socket=socket, state=tmp_path, NO_COLOR=no_color) as screen:
            assert answer_of(screen, "so **bold**") == ["so **bold**"]
    with inferd_process("run", "m", POEM, socket=socket, stdin=None) as process:
        assert process.communicate(timeout=60)[0].decode() == f"{POEM}\n", "a pipe"


def test_an_answer_in_a_prescribed_format_is_not_markdown(socket: str, tmp_path: Path) -> None:
    with shown_chat("m", "-o", "regex=.*", socket=socket, state=tmp_path) as screen:
        assert answer_of(screen, "so **bold**") == ["so **bold**"]
        answer_of(screen, '/set regex ""')
        assert answer_of(screen, "so **bold**") == ["so bold"]


def test_an_answer_higher_than_the_terminal_is_whole(socket: str, tmp_path: Path) -> None:
    code = "```\n" + "\n".join(f"row {n}" for n in range(60)) + "\n```"
    with shown_chat("m", socket=socket, state=tmp_path, lines=10) as screen:
        screen.paste(code)
        screen.until("... ```")
        screen.enter()
        screen.until_prompt()
        rows = [line.strip() for line in screen.lines if line.startswith(" row")]
        assert rows == [f"row {n}" for n in range(60)]


def test_control_characters_of_an_answer_are_not_executed(socket: str, tmp_path: Path) -> None:
    text = "a\x1b]0;title\x07b &#27;[31m &#x9b;5m \x9b5m c [link](http://x/&#27;[31m) \x1b[2Jd"
    with shown_chat("m", socket=socket, state=tmp_path) as screen:
        screen.paste(text)
        screen.enter()
        screen.until_prompt()
        answer = screen.raw.split(b"\r\n", 1)[1]
        for sequence in (b"\x1b]0", b"\x07", b"\x1b[31m", b"\xc2\x9b", b"\x1b[2Jd", b"\x1b]8"):
            assert sequence not in answer, sequence
        assert "a]0;titleb" in screen.text


# The commands of a chat.


def test_undo_and_regenerate_change_the_session_itself(socket: str, tmp_path: Path) -> None:
    options = ("-o", "n-predict=8", "-o", "temp=1.5", "--session", "real")
    with shown_chat("tiny", *options, socket=socket, state=tmp_path) as screen:
        assert answer_of(screen, "/undo")[0].startswith("inferd: the conversation has no question")
        answer_of(screen, "first")
        answer_of(screen, "second")
        before = contents(socket, "real")
        answer_of(screen, "/regenerate")
        after = contents(socket, "real")
        assert (before[:3], len(before)) == (after[:3], len(after)) and before != after
        assert answer_of(screen, "/undo") == ["undone: second"]
        assert contents(socket, "real") == before[:2]


def test_a_question_whose_new_answer_is_refused_can_be_answered_again(
    socket: str, tmp_path: Path
) -> None:
    with shown_chat("m", "--session", "refused", socket=socket, state=tmp_path) as screen:
        answer_of(screen, "hello")
        answer_of(screen, "/set grammar root::=(")
        assert answer_of(screen, "/regenerate")[0].startswith("inferd: ")
        assert contents(socket, "refused") == []
        answer_of(screen, '/set grammar ""')
        assert answer_of(screen, "/regenerate") == ["hello"]
    assert contents(socket, "refused") == ["hello", "hello"]


def test_set_changes_and_prints_parameters(socket: str, tmp_path: Path) -> None:
    with shown_chat("m", socket=socket, state=tmp_path) as screen:
        assert "no parameter is set" in answer_of(screen, "/set")[0]
        assert answer_of(screen, "/set n-predict 3") == ["n-predict is 3"]
        assert answer_of(screen, "abcdef") == ["abc"]
        assert answer_of(screen, "/set") == ["n-predict = 3 (session)"]
        assert answer_of(screen, "/set top_k")[0].startswith("top-k = ")
        assert "did you mean 'temp'?" in answer_of(screen, "/set tempp 1")[0]
        assert "set when a model is loaded" in answer_of(screen, "/set ctx-size 100")[0]


def test_system_begins_again_with_another_prompt(socket: str, tmp_path: Path) -> None:
    with shown_chat("m", "--session", "sys", socket=socket, state=tmp_path) as screen:
        assert answer_of(screen, "/system") == ["no system prompt"]
        answer_of(screen, "hello")
        answer_of(screen, '/system "Be brief."')
        assert contents(socket, "sys") == ["Be brief."]
        assert answer_of(screen, "/system") == ["Be brief."]
        answer_of(screen, "hello")
        answer_of(screen, "/reset")
        assert contents(socket, "sys") == ["Be brief."]


def test_model_begins_again_with_another_model_or_stays(socket: str, tmp_path: Path) -> None:
    with shown_chat("m", "--session", "kept", socket=socket, state=tmp_path) as screen:
        answer_of(screen, "/set n-predict 3")
        answer_of(screen, "hello")
        assert "there is no model" in answer_of(screen, "/model slower")[0]
        assert answer_of(screen, "abcdef") == ["abc"], "the conversation goes on"
        assert "a new conversation with slow begins" in answer_of(screen, "/model slow")[-1]
        assert answer_of(screen, "/model") == ["slow (this chat)", "tiny"]
        assert answer_of(screen, "other") == ["oth"], "parameters stay"
        with Client(socket) as client:
            [temporary] = [s for s in client.sessions() if s["model"] == "slow"]
        screen.type("\x04")
        assert screen.until_end() == 0
    assert contents(socket, "kept") == ["hello", "hel", "abcdef", "abc"]
    with Client(socket) as client:
        ids = [s["session_id"] for s in client.sessions(dormant=True)]
    assert temporary["session_id"] not in ids and "kept" in ids


def test_export_writes_markdown_or_json_and_overwrites_nothing(socket: str, tmp_path: Path) -> None:
    with shown_chat("m", socket=socket, state=tmp_path) as screen:
        answer_of(screen, "hello")
        document, page = tmp_path / "a.json", tmp_path / "a page.md"
        assert str(document) in "".join(answer_of(screen, f"/export {document}"))
        answer_of(screen, f"/export '{page}'")
        assert "exists, and is not" in "".join(answer_of(screen, f"/export {document}"))
        assert "neither in .md nor" in answer_of(screen, "/export a.txt")[0]
        assert "cannot be written" in "".join(answer_of(screen, "/export /proc/none/a.md"))
        assert "needs FILE" in answer_of(screen, "/export")[0]
    messages = [{"role": role, "content": "hello"} for role in ("user", "assistant")]
    assert msgspec.json.decode(document.read_bytes()) == {"model": "m", "messages": messages}
    assert page.read_text() == "# A conversation with m\n\n## You\n\nhello\n\n## Model\n\nhello\n"


def test_commands_work_without_a_terminal_too(socket: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.md"
    text = f"one\ntwo\n/undo\n/regenerate\n/export {file}\n/undo now\n/exit\n"
    result = inferd("chat", "m", socket=socket, text=text)
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\none\n")
    assert "undone: two\n" in result.stderr and "/undo takes no argument" in result.stderr
    assert "one" in file.read_text() and "two" not in file.read_text()
