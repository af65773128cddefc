"""Images of clients of WasmEdge's RPC: in base64, by the key `image`, as tensors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.nnrpc.driver import WasmEdge, gateway
from tests.pictures import png

CONFIG = echo_model("eyes", media=True)
PNG = png(8, 8)
TAG = b'<img src="data:image/png;base64,' + base64.b64encode(PNG) + b'">'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    (folder / "a.png").write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def path(daemon: RunningDaemon, folder: Path) -> Iterator[str]:
    with gateway(daemon, "--image-dir", str(folder)) as (socket, _):
        yield socket


@pytest.fixture
def guest(path: str) -> Iterator[WasmEdge]:
    with WasmEdge(path) as connected:
        yield connected


def test_the_three_ways_are_the_same_prompt(guest: WasmEdge, folder: Path) -> None:
    in_text, as_tensor = guest.context("eyes"), guest.context("eyes")
    relative = guest.context("eyes", config='{"image": "a.png"}')
    absolute = guest.context("eyes", config=f'{{"image": "{folder}/a.png"}}')
    assert guest.set_input(in_text, b"a" + TAG + b"b") == 0
    assert guest.set_input(as_tensor, PNG, 2) == 0
    for context in (as_tensor, relative, absolute):
        assert guest.set_input(context, b"a<image>b") == 0
    contexts = (in_text, as_tensor, relative, absolute)
    assert len({guest.metadata(context)["input_tokens"] for context in contexts}) == 1
    for context in contexts:
        assert guest.compute(context) == 0
    assert len({guest.output(context) for context in contexts}) == 1
    assert guest.metadata(in_text)["media_tokens"] > 0


def test_other_paths_are_refused(guest: WasmEdge) -> None:
    for name, number in {"/etc/passwd": 6, "../a.png": 6, "b.png": 1}.items():
        context = guest.context("eyes", config=f'{{"image": "{name}"}}')
        assert guest.set_input(context, b"<image>") == number
    context = guest.context("eyes")
    assert guest.set_input(context, b'{"image": "a.png"}', 1) == 0
    assert guest.set_input(context, b"<image>") == 0


def test_without_a_directory_no_image_is_named(daemon: RunningDaemon, tmp_path: Path) -> None:
    with (
        gateway(daemon, listen=str(tmp_path / "nn.sock")) as (socket, _),
        WasmEdge(socket) as guest,
    ):
        context = guest.context("eyes", config='{"image": "/etc/passwd"}')
        assert guest.set_input(context, b"<image>") == 6
