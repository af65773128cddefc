"""Guests that send images as WasmEdge's do: by the key `image`, in base64, as tensors."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd import Client
from inferd.gateways.guests import ImageDirectory
from inferd.gateways.guests.images import IMAGE_BYTES_MAX
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd_process
from tests.echo import echo_model
from tests.gateways.wasm.driver import Driver
from tests.gateways.wasm.guests import c_guest
from tests.pictures import png

CONFIG = echo_model("eyes", media=True) + echo_model("blind")
PNG, OTHER = png(8, 8), png(16, 16, padding=1000)
TAG = f'<img src="data:image/png;base64,{base64.b64encode(PNG).decode()}">'
END_S_MAX = 60.0


@pytest.fixture
def guest(client: Client, tmp_path: Path) -> Iterator[Driver]:
    (tmp_path / "a.png").write_bytes(PNG)
    directories = [ImageDirectory(".", str(tmp_path))]
    with Driver(client, image_directories=directories, pages=8) as driver:
        yield driver


def tokens_of(guest: Driver, context: int) -> int:
    return int(guest.metadata(context)["input_tokens"])


def test_an_image_in_base64_is_read_at_its_place(guest: Driver) -> None:
    context = guest.context("eyes", {"n-predict": 4})
    assert guest.set_input(context, b"ab") == 0
    plain = tokens_of(guest, context)
    assert guest.set_input(context, f"a{TAG}b".encode()) == 0
    assert tokens_of(guest, context) > plain
    assert guest.call("compute", context) == 0, guest.errors
    metadata = guest.metadata(context)
    assert metadata["media_tokens"] == metadata["input_tokens"] - plain
    assert guest.output(context)


def test_the_three_ways_are_the_same_prompt(guest: Driver) -> None:
    in_text = guest.context("eyes")
    guest.set_input(in_text, f"a{TAG}b".encode())
    named = guest.context("eyes", {"image": "a.png"})
    assert guest.set_input(named, b"a<image>b") == 0, guest.errors
    as_tensor = guest.context("eyes")
    assert guest.set_input(as_tensor, PNG, index=2) == 0
    assert guest.set_input(as_tensor, b"a{WASMEDGE_IMAGE}b") == 0
    later = guest.context("eyes")
    assert guest.set_input(later, {"image": "a.png"}) == 0
    assert guest.set_input(later, b"a<image>b") == 0
    assert len({tokens_of(guest, c) for c in (in_text, named, as_tensor, later)}) == 1


def test_several_images_are_tensors_in_the_order_of_their_indices(guest: Driver) -> None:
    context = guest.context("eyes")
    assert guest.set_input(context, OTHER, index=3) == 0 == guest.set_input(context, PNG, index=2)
    assert guest.set_input(context, b"one <image> place") == 1
    assert guest.set_input(context, b"<image> and <image>") == 0
    assert guest.call("compute", context) == 0, guest.errors
    assert guest.metadata(context)["media_tokens"] > 2


def test_tokens_are_pulled_after_an_image(guest: Driver) -> None:
    context = guest.context("eyes", {"n-predict": 2})
    guest.set_input(context, f"{TAG}hello".encode())
    guest.pull(context, 2)
    assert guest.call("compute_single", context) == 100


def test_without_a_projector_images_are_refused_with_the_number_of_wasmedge(guest: Driver) -> None:
    context = guest.context("blind", {"image": "a.png"})
    assert guest.set_input(context, f"a{TAG}b".encode()) == 1
    assert guest.set_input(context, b"a<image>b") == 1
    assert guest.set_input(context, b"a text") == 1, "no place for the image"
    assert guest.set_input(context, {"image": ""}) == 0 == guest.set_input(context, b"a text")


@pytest.mark.parametrize(("path", "number"), [("nowhere.png", 1), ("../a.png", 6), ("/a.png", 6)])
def test_a_path_without_a_file_or_outside_of_the_guests_directories_is_refused(
    path: str, number: int, guest: Driver
) -> None:
    context = guest.context("eyes", {"image": path})
    assert guest.set_input(context, b"<image>") == number, guest.errors


def test_a_file_that_is_no_image_is_refused(guest: Driver, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"%PDF-1.7 and more")
    context = guest.context("eyes", {"image": "a.png"})
    assert guest.set_input(context, b"<image>") == 1
    assert "PDF" in str(guest.errors[-1][1])


def test_the_largest_image_fits_into_a_tensor_with_its_prompt(
    guest: Driver, tmp_path: Path
) -> None:
    context = guest.context("eyes", {"image": "a.png"})
    for size, number in ((IMAGE_BYTES_MAX, 0), (IMAGE_BYTES_MAX + 1, 7)):
        with (tmp_path / "a.png").open("r+b") as file:
            file.truncate(size)
        assert guest.set_input(context, b"<image>" + b"x" * 60_000) == number, guest.errors


# Programs, which make the calls of WasmEdge's llava, llava-base64-stream, gemma-3 and qwen2vl.


def finished(
    daemon: RunningDaemon, folder: Path, *arguments: str, lines: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    options = ["--dir", f".:{folder}", "--dir", f"/data:{folder}:readonly"]
    options += ["--env", "image=a.png"] * (arguments[0] != "base64")
    process = inferd_process(
        *("wasm", "run", *options, str(c_guest()), "--", *arguments),
        socket=daemon.socket, stdin=subprocess.PIPE,
    )  # fmt: skip
    with process:
        text = "".join(f"{line}\n" for line in lines).encode()
        output, errors = process.communicate(text, timeout=END_S_MAX)
    return process.returncode, output.decode(), errors.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "a.base64").write_bytes(base64.b64encode(PNG))
    return tmp_path


def test_a_guest_asks_about_an_image_turn_by_turn(daemon: RunningDaemon, folder: Path) -> None:
    status, output, errors = finished(daemon, folder, "llava", "eyes", lines=("What?", "And?"))
    assert (status, errors) == (0, "")
    assert output.count("Answer: ") == 2


def test_a_guest_pulls_answers_about_an_image_in_base64(
    daemon: RunningDaemon, folder: Path
) -> None:
    arguments = ("base64", "eyes", "/data/a.base64")
    status, output, errors = finished(daemon, folder, *arguments, lines=("What?", "And?"))
    assert (status, errors) == (0, "")
    assert output.count("ASSISTANT: ") >= 2


@pytest.mark.parametrize(
    "prompt",
    [
        "<start_of_turn>user\n<start_of_image><image><end_of_image>Describe<end_of_turn>\n",
        "<|im_start|>user\n<|vision_start|><image><|vision_end|>Describe<|im_end|>\n",
    ],
)
def test_a_guest_answers_a_prompt_with_an_image(
    prompt: str, daemon: RunningDaemon, folder: Path
) -> None:
    status, output, errors = finished(daemon, folder, "describe", "eyes", prompt)
    assert (status, errors) == (0, "")
    read, written = map(int, output.splitlines()[-1].split())
    assert read > len(prompt) - len("<image>") and written > 0


def test_a_guest_for_images_gets_the_number_of_a_model_without_a_projector(
    daemon: RunningDaemon, folder: Path
) -> None:
    status, _, errors = finished(daemon, folder, "describe", "blind", "a <image>")
    assert status == 10 + 1 and "projector" in errors


def test_the_reason_why_an_image_is_too_large_is_printed(
    daemon: RunningDaemon, folder: Path
) -> None:
    with (folder / "a.png").open("r+b") as file:
        file.truncate(IMAGE_BYTES_MAX + 1)
    status, _, errors = finished(daemon, folder, "describe", "eyes", "a <image>")
    assert status == 10 + 7
    assert f"more than {IMAGE_BYTES_MAX} bytes" in errors and "scale it down" in errors


def test_a_failed_turn_with_an_image_is_described(guest: Driver) -> None:
    context = guest.context("eyes", {"ctx-size": 16})
    assert guest.set_input(context, OTHER, index=2) == 0
    assert guest.set_input(context, b"<image> what is it?") == 0
    assert guest.call("compute", context) == 102
    assert json.loads(guest.output(context, 1))["stop_reason"] == "PromptTooLong"
