"""Images in prompts of wasi-nn's calls: found, read if the model has a projector, and else refused,
while text about images is text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.daemon.calls.prompt_images import (
    DATA_URLS_CHECKED,
    ENCODED_BYTES_MIN,
    LOOP_BYTES_MAX,
    TAG_BYTES_CHECKED,
    PromptImage,
    decode_image,
    split_images,
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
    f'<img src="data:image/png;base64,{PNG} is not closed, and <p class="x"> follows',
    "",
]


def images_in(prompt: str) -> list[PromptImage]:
    return [piece for piece in split_images(prompt.encode()) if isinstance(piece, PromptImage)]


@pytest.mark.parametrize("prompt", IMAGES)
def test_an_image_is_found(prompt: str) -> None:
    assert all(image.media_type.startswith("image/") for image in images_in(prompt))
    assert len(images_in(prompt)) == (2 if "gif" in prompt else 1)


@pytest.mark.parametrize("prompt", TEXTS)
def test_a_text_about_images_is_a_text(prompt: str) -> None:
    assert split_images(prompt.encode()) == ([prompt.encode()] if prompt else [])


def test_texts_and_images_keep_their_order() -> None:
    tag = '<img src="data:image/png;base64,AAAA">'
    found = split_images(f"a{tag}b{tag}{tag}c".encode())
    image = PromptImage("image/png", b"AAAA")
    assert found == [b"a", image, b"b", image, image, b"c"]
    assert split_images(tag.encode()) == [image]


def test_an_image_that_is_not_base64_is_refused_with_its_number() -> None:
    with pytest.raises(InvalidArgument, match="not base64") as caught:
        decode_image(3, PromptImage("image/png", b"AAAAA"))
    assert caught.value.data["item"] == 3
    assert decode_image(0, PromptImage("image/png", b"\nAAAA\nAAAA\n")) == bytes(6)


@pytest.mark.parametrize("wrong", ["-", "_", ".", "%2B", "\N{SNOWMAN}", "data:image/png;base64,"])
def test_an_image_with_other_characters_is_refused_and_not_read_as_a_text(wrong: str) -> None:
    (image,) = images_in(f'a<img src="data:image/png;base64,{PNG}{wrong}{PNG}">b')
    with pytest.raises(InvalidArgument, match="not base64: it has the character") as caught:
        decode_image(2, image)
    assert caught.value.data["item"] == 2 and "+ and /" in caught.value.hint


def test_data_that_is_too_short_for_an_image_is_an_abbreviation() -> None:
    def tag(size: int) -> str:
        return f'<img src="data:image/png;base64,{"A" * (size - 3)}...">'

    assert not images_in(tag(ENCODED_BYTES_MIN - 1))
    assert images_in(tag(ENCODED_BYTES_MIN))


def test_the_search_for_images_is_bounded() -> None:
    assert not images_in(";base64," * DATA_URLS_CHECKED + GUEST)
    assert images_in(";base64," * (DATA_URLS_CHECKED - 1) + GUEST)
    assert images_in("x" * 10 * LOOP_BYTES_MAX + GUEST)
    attributes = 'a="b" ' * (TAG_BYTES_CHECKED // 6)
    assert not images_in(f'<img {attributes} src="data:image/png;base64,{PNG}">')
    assert not images_in(f'<img src="data:image/png;base64,{PNG}" {attributes * 2}>')
    assert len(images_in(GUEST * 100)) == DATA_URLS_CHECKED


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
        with pytest.raises(InvalidArgument, match="image/") as caught:
            entry(client, context, prompt)
        assert caught.value.number == 1
    assert entry(client, context, TEXTS[4]) == TEXTS[4]


def test_named_tensors_are_checked_unless_the_model_echoes_them(client: RawClient) -> None:
    inputs = [["prompt", {"data": GUEST.encode(), "type": 3}]]
    context = client.context("tiny", config='{"n-predict":1}')
    with pytest.raises(InvalidArgument):
        client.call("compute", context=context, inputs=inputs)
    inputs[0][1] = {"data": TEXTS[4].encode(), "type": 3}
    client.call("compute", context=context, inputs=inputs)
    assert client.metadata(context)["output_tokens"] == 1
    inputs[0][1] = {"data": GUEST.encode(), "type": 3}
    echoed = client.call("compute", context=client.context(), inputs=inputs)["outputs"]
    assert echoed[0][1]["data"] == GUEST.encode()
