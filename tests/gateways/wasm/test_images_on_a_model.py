"""Guests that send images to real models with projectors, in the prompts of WasmEdge's examples."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd_process
from tests.gateways.wasm.guests import c_guest
from tests.media_samples import png
from tests.models import ONE_THREAD
from tests.tiny_gguf import write_tiny
from tests.tiny_projector import write_pair, write_projector

pytestmark = pytest.mark.model

END_S_MAX = 120.0
# Greedy answers of models with random weights repeat one token, whatever the image.
SAMPLING = "temp = 0.8\nseed = 7\nctx-size = 2048\nslots = 1\n"
GEMMA3 = "<start_of_turn>user\n<start_of_image><image><end_of_image>What?<end_of_turn>\n"
GEMMA4 = "<|turn>user\n<image>\nWhat?<turn|>\n<|turn>model\n"
QWEN = "<|im_start|>user\n<|vision_start|><image><|vision_end|>What?<|im_end|>\n"
PROMPTS = {
    "llava": ("mlp", "USER:{WASMEDGE_IMAGE}\nWhat?\nASSISTANT:"),
    "gemma3": ("gemma3", GEMMA3),
    "gemma4": ("gemma4", f"{GEMMA4}It is red.<turn|>\n{GEMMA4}"),
    "qwen2vl": ("qwen2vl_merger", QWEN),
}
"""For each example, the kind of its projector and its prompt. The image has a place in each turn of
gemma-4's.
"""


def write_models(kind: str, models: Path) -> Path:
    """Write a model and its projector, and return the model's path."""
    if kind == "gemma4":
        write_projector("mlp", models)
        return write_tiny("gemma4", models)
    return write_pair(kind, models)[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for name, (kind, _) in PROMPTS.items():
        folder = models / name
        folder.mkdir()
        write_models(kind, folder).rename(folder / "model.gguf")
        projector = next(folder.glob("mmproj-*.gguf"))
        projector.rename(folder / f"{name}-vision-encoder.gguf")  # as Qwen2-VL's is named
    return models


@pytest.fixture(scope="module")
def daemon(models: Path) -> Iterator[RunningDaemon]:
    tables = [f'[models.{name}]\nfile = "{name}/model.gguf"\n{SAMPLING}' for name in PROMPTS]
    with running_daemon(ONE_THREAD + "".join(tables), models_dir=models) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guest")
    for seed, name in enumerate(("a", "b")):
        data = png(64, 64, seed=seed)
        (folder / f"{name}.png").write_bytes(data)
        (folder / f"{name}.base64").write_bytes(base64.b64encode(data))
    return folder


def run_guest(
    daemon: RunningDaemon,
    folder: Path,
    mmproj: str,
    *arguments: str,
    image: str = "",
    preload: str = "",
    text: str = "",
) -> tuple[int, bytes, str]:
    """Run the guest; return its status, its output and its errors."""
    options = ["--dir", f".:{folder}", "--env", f"mmproj={mmproj}"]
    options += ["--env", f"image={image}"] if image else []
    options += ["--nn-preload", f"default:GGML:AUTO:{preload}"] if preload else []
    process = inferd_process(
        *("wasm", "run", *options, str(c_guest()), "--", *arguments),
        socket=daemon.socket, stdin=subprocess.PIPE,
    )  # fmt: skip
    with process:
        output, errors = process.communicate(text.encode(), timeout=END_S_MAX)
    return process.returncode, output, errors.decode()


@pytest.mark.parametrize("name", PROMPTS)
def test_the_answer_is_about_the_image(name: str, daemon: RunningDaemon, folder: Path) -> None:
    def answer(image: str) -> bytes:
        arguments = ("describe", name, PROMPTS[name][1])
        mmproj = f"{name}-vision-encoder.gguf"
        status, output, errors = run_guest(daemon, folder, mmproj, *arguments, image=image)
        assert (errors, status) == ("", 0)
        return output

    assert answer("a.png") == answer("a.png") != answer("b.png")


def test_pulled_answers_of_two_turns_are_about_the_image(
    daemon: RunningDaemon, folder: Path
) -> None:
    def answer(image: str) -> bytes:
        arguments = ("base64", "llava", f"{image}.base64")
        mmproj = "llava-vision-encoder.gguf"
        status, output, errors = run_guest(daemon, folder, mmproj, *arguments, text="What?\nAnd?\n")
        assert (errors, status) == ("", 0) and output.count(b"ASSISTANT: ") >= 2
        return output

    assert answer("a") == answer("a") != answer("b")


def test_a_model_passed_as_a_file_has_no_projector_and_the_hint_says_what_to_do(
    daemon: RunningDaemon, folder: Path, models: Path
) -> None:
    status, _, errors = run_guest(
        daemon, folder, "llava-vision-encoder.gguf", "describe", "default", "a <image>",
        image="a.png", preload=str(models / "llava" / "model.gguf"),
    )  # fmt: skip
    assert status == 10 + 1
    assert "passed as a file has no projector" in errors and "by its name" in errors
