"""The recording of the first minutes: its tools on a real shell, and the files in docs/."""

from __future__ import annotations

import html
import os
import re
import socket
from pathlib import Path

import msgspec
import pytest

from tools.recording.__main__ import NAME, STEPS, TITLE
from tools.recording.cast import cast_of
from tools.recording.picture import COLORS, FOREGROUND, frames, svg_of
from tools.recording.terminal import COLUMNS, LINES, Output, Shell, Step, shortened, without

ROOT = Path(__file__).resolve().parents[2]
CAST, PICTURE = ROOT / "docs" / f"{NAME}.cast", ROOT / "docs" / f"{NAME}.svg"


def text_of(rows: list[tuple[tuple[int, str, str, str, bool], ...]]) -> list[str]:
    return ["".join(run[1] for run in row).rstrip() for row in rows]


def test_long_steps_are_shortened_and_typing_is_not() -> None:
    outputs = [Output(0.5, "a"), Output(1.0, "b"), Output(11.0, "c"), Output(21.0, "d")]
    shown = shortened(outputs, Step("ab", shown_s=2.0), 1.0, 100.0)
    assert [o.at_s for o in shown] == [100.5, 101.0, 102.0, 103.0]
    assert [o.at_s for o in shortened(outputs, Step("", shown_s=60.0), 1.0, 0.0)] == [
        *(0.5, 1.0, 11.0, 21.0)
    ]


def test_names_are_replaced_where_outputs_divide_them() -> None:
    outputs = [
        Output(0, "in /tmp/se"),
        Output(1, "cr"),
        Output(2, "et/x, /tmp/secret"),
        Output(3, "!"),
    ]
    shown = without(outputs, {"/tmp/secret": "~", "nothing": "-"})
    assert shown == [Output(0, "in ~"), Output(2, "/x, ~"), Output(3, "!")]


@pytest.mark.process
def test_a_shell_is_recorded_as_cast_and_picture(tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "PS1": "$ ", "TERM": "xterm-256color"}
    shell = Shell(tmp_path, environ)
    try:
        shell.run(Step("printf '\\033[31mred\\033[0m <&>\\n'"))
        program = "printf '\\033[?1049h\\033[Hwhole screen'; read; printf '\\033[?1049l'"
        shell.run(Step(program, re.compile("whole screen")))
        shell.run(Step(""))
    finally:
        shell.close()
    shown = list(frames(shell.outputs))
    colored = next(row for _, rows in shown for row in rows if len(row) > 1)[0]
    assert (colored[1], colored[2]) == ("red", COLORS["red"])
    assert any(text_of(rows)[0] == "whole screen" and not any(rows[1:]) for _, rows in shown)
    assert text_of(shown[-1][1])[1] == "red <&>", "the screen before is shown again"
    cast = [msgspec.json.decode(line) for line in cast_of(shown, TITLE).splitlines()]
    assert cast[0] == {"version": 2, "width": COLUMNS, "height": LINES, "title": TITLE}
    again = list(frames([Output(at_s, text) for at_s, _, text in cast[1:]]))
    assert [text_of(rows) for _, rows in again] == [text_of(rows) for _, rows in shown]
    picture = svg_of(shown, TITLE)
    assert f'fill="{COLORS["red"]}">red</text>' in picture and "&lt;&amp;&gt;" in picture
    assert "<script" not in picture and f'fill="{FOREGROUND}"' in picture


def test_the_readme_shows_the_recording() -> None:
    page = (ROOT / "README.md").read_text()
    assert f"]({PICTURE.relative_to(ROOT)})" in page and str(CAST.relative_to(ROOT)) in page
    assert PICTURE.stat().st_size < 500_000 and CAST.stat().st_size < 500_000


def test_the_recording_has_every_command_and_names_no_machine() -> None:
    shown = [msgspec.json.decode(line) for line in CAST.read_text().splitlines()]
    assert shown[0]["version"] == 2
    times = [at_s for at_s, _, _ in shown[1:]]
    assert times == sorted(times) and times[-1] < 120
    frames_text = "\n".join(
        re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "\n", text) for *_, text in shown[1:]
    )
    picture = html.unescape(PICTURE.read_text())
    for step in STEPS:
        assert all(part in frames_text for part in step.text.split()), step.text
    assert "inferd: internal error" not in frames_text and "Traceback" not in frames_text
    for text in (frames_text, picture):
        assert not re.search(r"/(home|root|work)/|/tmp/(?!inferd-demo)", text)
        assert socket.gethostname() not in text
