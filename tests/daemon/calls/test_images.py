"""Images in prompts of wasi-nn's calls: refused as images, while text about images is text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from inferd.backends.errors import UnsupportedOperation
from inferd.daemon.calls.arguments import (
    DATA_URLS_CHECKED,
    PAYLOAD_BYTES_CHECKED,
    PROMPT_BYTES_CHECKED,
    TAG_BYTES_CHECKED,
    check_no_image,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
GUEST = f'USER:<img src="data:image/png;base64,{PNG}">\nWhat is in it?\nASSISTANT:'
IMAGES = [
    GUEST,
    '<img src="data:image/jpeg;base64,/9j/4AAQ">',
    '<img src="data:image/png;base64,AAAA"> then <img src="data:image/gif;base64,R0lGODlh">',
    '<img alt="a" width=3 src="data:image/webp;base64,UklGRg==" />',
    "<IMG SRC = 'data:image/svg+xml;base64,PHN2Zz4='>",
    '<img src="data:image/png;base64,\nAAAA\nAAAA\n">',
    '<img src="data:image/png;base64,' + "A" * PAYLOAD_BYTES_CHECKED,
    '<img src="data:image/png;base64,…"> is text, <img src="data:image/png;base64,AAAA"> is not',
]
TEXTS = [
    "What is an image, and what does <img> do?",
    '<img src="photo.png">',
    '<img src="data:image/png;base64,">',
    '<img src="data:image/png;base64,…">',
    '<img src="data:image/png;base64,iVBORw0KGgo...">',
    'Write <img src="data:image/png;base64,{data}"> into the page.',
    f"data:image/png;base64,{PNG}",
    f'[picture](data:image/png;base64,{PNG} "a link")',
    f'<a href="data:image/png;base64,{PNG}">',
    f'<img alt="no"><p title="data:image/png;base64,{PNG}">',
    '<img src="data:text/plain;base64,aGVsbG8=">',
    '<img src="data:image/png,AAAA">',
    '<img src="data:image/png;base64,AAAA',
    "",
]


@pytest.mark.parametrize("prompt", IMAGES)
def test_an_image_is_found(prompt: str) -> None:
    with pytest.raises(UnsupportedOperation, match="the prompt has an image") as caught:
        check_no_image(prompt.encode())
    assert caught.value.data["media_type"].startswith("image/")


@pytest.mark.parametrize("prompt", TEXTS)
def test_a_text_about_images_is_a_text(prompt: str) -> None:
    check_no_image(prompt.encode())


def test_the_search_for_images_is_bounded() -> None:
    check_no_image(b";base64," * DATA_URLS_CHECKED + GUEST.encode())
    with pytest.raises(UnsupportedOperation):
        check_no_image(b";base64," * (DATA_URLS_CHECKED - 1) + GUEST.encode())
    with pytest.raises(UnsupportedOperation):
        check_no_image(b"x" * (PROMPT_BYTES_CHECKED - len(GUEST)) + GUEST.encode())
    check_no_image(b"x" * PROMPT_BYTES_CHECKED + GUEST.encode())
    attributes = 'a="b" ' * (TAG_BYTES_CHECKED // 6)
    check_no_image(f'<img {attributes} src="data:image/png;base64,{PNG}">'.encode())


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    model = write_tiny("llama", tmp_path_factory.mktemp("models"))
    with running_daemon(f'[models.tiny]\nfile = "{model}"\n') as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as raw:
        yield raw


def set_input(client: RawClient, context: int, prompt: str) -> str:
    client.set_input(context, prompt.encode())
    client.call("compute", context=context)
    return client.output(context).decode()


def prompt_compute(client: RawClient, context: int, prompt: str) -> str:
    return str(client.call("prompt_compute", context=context, prompt=prompt)["text"])


def run_inference(client: RawClient, context: int, prompt: str) -> str:
    tensor = {"data": prompt.encode()}
    return bytes(client.call("run_inference", context=context, tensor=tensor)["text"]).decode()


@pytest.mark.parametrize("entry", [set_input, prompt_compute, run_inference])
def test_a_call_refuses_an_image_and_answers_a_text(
    entry: Callable[[RawClient, int, str], str], client: RawClient
) -> None:
    context = client.context()
    for prompt in (GUEST, IMAGES[1]):
        with pytest.raises(UnsupportedOperation, match="image/") as caught:
            entry(client, context, prompt)
        assert caught.value.number == 6
    assert entry(client, context, TEXTS[4]) == TEXTS[4]


def test_named_tensors_are_checked_unless_the_model_echoes_them(client: RawClient) -> None:
    inputs = [["prompt", {"data": GUEST.encode(), "type": 3}]]
    context = client.context("tiny", config='{"n-predict":1}')
    with pytest.raises(UnsupportedOperation):
        client.call("compute", context=context, inputs=inputs)
    inputs[0][1] = {"data": TEXTS[4].encode(), "type": 3}
    client.call("compute", context=context, inputs=inputs)
    assert client.metadata(context)["output_tokens"] == 1
    inputs[0][1] = {"data": GUEST.encode(), "type": 3}
    echoed = client.call("compute", context=client.context(), inputs=inputs)["outputs"]
    assert echoed[0][1]["data"] == GUEST.encode()
