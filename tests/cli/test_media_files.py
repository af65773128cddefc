"""Images and sounds on the command line and in a chat."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import InferdError, InvalidArgument
from inferd.cli.inference.chat_commands import completions, export_text, message_text
from inferd.cli.inference.media_files import (
    COMPLETIONS_MAX,
    completed_paths,
    media_files,
    naming_files,
    open_file,
    readers_hint,
    typed_path,
)
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd, inferd_process
from tests.echo import echo_model
from tests.pictures import png, wav

from .screen import shown_chat

CONFIG = (
    echo_model("eyes", media=True, ctx_size=65_536)
    + echo_model("blind")
    + "[daemon]\nmedia-bytes-max = 1000000\n"
)
PNG = png(2, 2)


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with a few files."""
    (tmp_path / "a picture.png").write_bytes(PNG)
    (tmp_path / "a tone.wav").write_bytes(wav(0.01))
    (tmp_path / "notes.txt").write_text("Not a picture.\n")
    (tmp_path / "empty").touch()
    (tmp_path / "album").mkdir()
    (tmp_path / "album" / "one.png").write_bytes(png(3, 3))
    (tmp_path / ".hidden.png").write_bytes(PNG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Files.


def test_a_file_is_opened_as_what_it_is(pictures: Path) -> None:
    files = media_files([Path("a picture.png"), Path("album/one.png")], [Path("a tone.wav")])
    assert [file.name for file in files] == ["a picture.png", "album/one.png", "a tone.wav"]
    assert [file.media.kind for file in files] == ["image", "image", "audio"]
    assert [file.media.alt for file in files] == ["a picture.png", "one.png", "a tone.wav"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.png", "none.png cannot be read: No such file or directory"),
        ("album", "album is a directory"),
        ("notes.txt", "notes.txt is not an image: it is a text"),
        ("empty", "empty is not an image: it is empty"),
        ("a tone.wav", "a tone.wav is not an image: it is a sound (WAV)"),
        ("/dev/null", "/dev/null is not an image: it is empty"),
    ],
)
def test_another_file_is_refused_with_its_name(pictures: Path, name: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        open_file(name, "image")
    assert caught.value.message_for_people == message
    assert caught.value.hint_for_people


def test_an_error_of_the_daemon_names_the_file(pictures: Path) -> None:
    files = media_files([Path("a picture.png"), Path("album/one.png")], None)
    for item, expected in ((1, "album/one.png: too many pixels"), (7, "too many pixels")):
        with pytest.raises(InferdError) as caught, naming_files(files):
            raise InvalidArgument("too many pixels", data={"item": item})
        assert caught.value.message == expected


def test_the_hint_names_models_that_read_images() -> None:
    models: list[dict[str, Any]] = [
        {"name": f"m{i}", "reads": ["text", "image"]} for i in range(7)
    ] + [{"name": "blind", "reads": ["text"]}, {"name": "old"}]
    assert readers_hint(models, "image").startswith("m0, m1, m2, m3, m4 and 2 more can read images")
    assert readers_hint(models, "audio").startswith("no installed model reads sounds; ")
    assert "mmproj" in readers_hint(models, "audio")


@pytest.mark.parametrize(
    ("argument", "path"),
    [
        ("a picture.png", "a picture.png"),
        ("'a picture.png'", "a picture.png"),
        ('"a picture.png"', "a picture.png"),
        (r"a\ picture.png", "a picture.png"),
        ("~/x.png", os.path.expanduser("~/x.png")),
        ("'~/x y.png'", os.path.expanduser("~/x y.png")),
        ("it's.png", "it's.png"),
        ("two words.png", "two words.png"),
    ],
)
def test_a_typed_or_dropped_path_is_read(pictures: Path, argument: str, path: str) -> None:
    assert typed_path(argument) == path


def test_paths_are_completed(pictures: Path) -> None:
    assert list(completed_paths("a")) == ["a picture.png", "a tone.wav", "album/"]
    assert list(completed_paths("album/")) == ["album/one.png"]
    assert list(completed_paths("'a p")) == ["'a picture.png"]
    assert list(completed_paths(f"{pictures}/no")) == [f"{pictures}/notes.txt"]
    assert list(completed_paths(".h")) == [".hidden.png"]
    assert ".hidden.png" not in list(completed_paths(""))
    assert list(completed_paths("none/")) == list(completed_paths("a\0/")) == []
    assert list(completions("/image a p")) == [("a picture.png", 3)]
    assert list(completions("/audio a t")) == [("a tone.wav", 3)]
    assert list(completions("/ima")) == [("/image ", 4)]


def test_completed_paths_are_bounded(pictures: Path) -> None:
    for number in range(COMPLETIONS_MAX + 5):
        (pictures / f"many-{number}").touch()
    assert len(list(completed_paths("many-"))) == COMPLETIONS_MAX


def test_an_exported_message_shows_the_place_of_an_image() -> None:
    content = [
        {"type": "text", "text": "What?"},
        {"type": "image", "sha256": "0" * 64, "alt": "a dot"},
        {"type": "audio", "sha256": "1" * 64},
    ]
    message = {"role": "user", "content": content}
    assert message_text(message) == "What?\n[image: a dot]\n[sound]"
    assert "[image: a dot]" in export_text(Path("x.md"), "eyes", [message])
    assert json.loads(export_text(Path("x.json"), "eyes", [message]))["messages"] == [message]


# Commands.


def test_run_sends_images_and_sounds(daemon: RunningDaemon, pictures: Path) -> None:
    files = ("--image", "a picture.png", "--image", "album/one.png", "--audio", "a tone.wav")
    result = inferd("run", "eyes", "What?", *files, "--json", socket=daemon.socket)
    assert result.exit_code == 0, result.output
    metadata = msgspec.json.decode(result.stdout.splitlines()[-1])["metadata"]
    assert metadata["media_tokens"] > 2
    result = inferd("run", "eyes", "What?", *files[:2], "--stats", socket=daemon.socket)
    assert (result.exit_code, result.stdout) == (0, "What?\n")
    assert " of images and sounds" in result.stderr


def test_run_reads_an_image_from_standard_input(daemon: RunningDaemon, pictures: Path) -> None:
    with (
        (pictures / "a picture.png").open("rb") as stdin,
        inferd_process(
            "run", "eyes", "What?", "--image", "-", socket=daemon.socket, stdin=stdin
        ) as process,
    ):
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (0, b"What?\n", b"")


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (("eyes", "x", "--image", "none.png"), 1, "none.png cannot be read"),
        (("eyes", "x", "--image", "album"), 1, "album is a directory"),
        (("eyes", "x", "--image", "notes.txt"), 1, "notes.txt is not an image: it is a text"),
        (("eyes", "x", "--image", "large.png"), 1, "large.png: this has 1000001 bytes"),
        (("blind", "x", "--image", "a picture.png"), 1, "blind reads no images"),
        (("eyes", "--image", "-"), 2, "PROMPT is missing"),
        (("eyes", "x", "--image", "-", "--audio", "-"), 2, "name '-' once"),
        (("eyes", "x", "--raw", "--image", "a picture.png"), 2, "--raw sends text alone"),
    ],
)
def test_what_cannot_be_sent_is_an_error_for_a_person(
    daemon: RunningDaemon, pictures: Path, arguments: tuple[str, ...], status: int, error: str
) -> None:
    (pictures / "large.png").write_bytes(PNG + b"\0" * (1_000_001 - len(PNG)))
    result = inferd("run", *arguments, socket=daemon.socket, text="")
    assert result.exit_code == status, result.output
    assert error in " ".join(result.stderr.replace("│", " ").split())
    if "blind" in arguments:
        assert "eyes can read images" in result.stderr and "mmproj" in result.stderr


def test_a_chat_sends_a_file_with_the_next_question(daemon: RunningDaemon, pictures: Path) -> None:
    lines = ["/image a picture.png", "/audio 'a tone.wav'", "/image", "What?", "/image", "Then?"]
    result = inferd("chat", "eyes", "--json", socket=daemon.socket, text="\n".join(lines))
    assert result.exit_code == 0, result.output
    documents = [msgspec.json.decode(line) for line in result.stdout.splitlines()]
    turns = [one["metadata"] for one in documents if "metadata" in one]
    assert turns[0]["media_tokens"] > 0
    assert len(turns) == 2
    assert result.stderr.splitlines() == [
        "with the next question: a picture.png",
        "with the next question: a picture.png, a tone.wav",
        "with the next question: a picture.png, a tone.wav",
        "nothing is sent with the question",
    ]


def test_a_chat_keeps_the_other_files_of_a_refused_question(
    daemon: RunningDaemon, pictures: Path
) -> None:
    (pictures / "large.png").write_bytes(PNG + b"\0" * 1_000_000)
    lines = ["/image a picture.png", "/image large.png", "What?", "/image", "/detach", "/image"]
    result = inferd("chat", "eyes", socket=daemon.socket, text="\n".join(lines))
    assert result.exit_code == 0 and result.stdout == ""
    shown = result.stderr.splitlines()
    assert shown[2].startswith("inferd: large.png: this has ")
    assert shown[4:] == [
        "with the next question: a picture.png",
        *("nothing is sent with the question",) * 2,
    ]


def test_a_question_with_an_image_is_answered_again(daemon: RunningDaemon, pictures: Path) -> None:
    lines = ["/image a picture.png", "What?", "/regenerate", "/undo"]
    result = inferd("chat", "eyes", "--json", socket=daemon.socket, text="\n".join(lines))
    assert result.exit_code == 0, result.output
    documents = [msgspec.json.decode(line) for line in result.stdout.splitlines()]
    first, again = [one["metadata"] for one in documents if "metadata" in one]
    assert first["media_tokens"] == again["media_tokens"] > 0
    assert first["input_tokens"] == again["input_tokens"]
    assert result.stderr.splitlines()[-1] == "undone: [image: a picture.png] What?"


def test_a_chat_on_a_terminal_completes_a_path(daemon: RunningDaemon, pictures: Path) -> None:
    with shown_chat("eyes", socket=daemon.socket, state=pictures / "state") as screen:
        screen.type("/image a p\t")
        screen.until("/image a picture.png")
        screen.enter()
        screen.until("with the next question: a picture.png")
        screen.until_prompt()
        screen.enter("/exit")
        assert screen.until_end() == 0


def test_the_process_substitution_of_a_shell_is_read(daemon: RunningDaemon, pictures: Path) -> None:
    read, write = os.pipe()
    os.write(write, PNG)
    os.close(write)
    try:
        with inferd_process(
            "run", "eyes", "What?", "--image", f"/dev/fd/{read}", socket=daemon.socket,
            pass_fds=(read,), stdin=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            stdout, stderr = process.communicate(timeout=60)
    finally:
        os.close(read)
    assert (process.returncode, stdout, stderr) == (0, b"What?\n", b"")
