"""Images and sounds that programs send: their sources, and what travels in descriptors."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd import Audio, Image
from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.ipc import messages as w
from inferd.ipc.chat_messages import ALT_CHARACTERS_MAX, MEDIA_PARTS_MAX, MEDIA_TOKENS_MAX
from inferd.ipc.client.connection.driver import run_blocking
from inferd.ipc.media_parts import INLINE_BYTES_MAX, PASSED_MAX, in_descriptors
from inferd.ipc.payloads import Payload, pack_message, turn_input
from inferd.wire.frames import FRAME_BYTES_MAX
from tests.pictures import png
from tests.processes import open_descriptors

PNG = png(2, 2)


def content_of(media: Image | Audio) -> bytes:
    content = media.open()
    if content.descriptor < 0:
        assert content.size == len(content.data)
        return content.data
    try:
        data = os.pread(content.descriptor, content.size + 1, 0)
    finally:
        os.close(content.descriptor)
    assert content.size == len(data)
    return data


def test_an_image_is_a_path_or_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    sources: tuple[Any, ...] = (*(path, str(path), PNG, bytearray(PNG), memoryview(PNG)),)
    for source in sources:
        assert content_of(Image(source)) == PNG == content_of(Audio(source))
    assert repr(Image(path)) == f"Image({str(path)!r})"
    assert repr(Image(PNG)) == "Image(<bytes>)"


def test_the_bytes_of_a_program_are_those_at_the_time_of_the_call() -> None:
    data = bytearray(PNG)
    image = Image(data)
    data[:] = b"x" * len(data)
    assert content_of(image) == PNG


def test_an_image_comes_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    def write() -> None:
        (tmp_path / "fifo").write_bytes(PNG)

    thread = threading.Thread(target=write)
    thread.start()
    assert content_of(Image(tmp_path / "fifo")) == PNG
    thread.join()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none.png", "cannot be read: No such file"),
        (".", "is a directory"),
        ("none/\0", "is not a path"),
        ("x" * 5000, "cannot be read: File name too long"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        Image(f"{tmp_path}/{name}").open()


def test_wrong_arguments_are_refused_at_once() -> None:
    wrong: tuple[Callable[[], object], ...] = (
        lambda: Image(5),  # type: ignore[arg-type]
        lambda: Image(None),  # type: ignore[arg-type]
        lambda: Audio([1]),  # type: ignore[arg-type]
        lambda: Image(PNG, detail="most"),  # type: ignore[arg-type]
        lambda: Image(PNG, tokens_max=-1),
        lambda: Image(PNG, tokens_max=MEDIA_TOKENS_MAX + 1),
        lambda: Image(PNG, alt="x" * (ALT_CHARACTERS_MAX + 1)),
        lambda: Audio(PNG, alt=5),  # type: ignore[arg-type]
    )
    for make in wrong:
        with pytest.raises(InvalidArgument):
            make()


def test_an_image_of_pillow_is_sent_as_png_turned_as_its_exif_says() -> None:
    pillow = pytest.importorskip("PIL.Image")
    sideways = pillow.new("RGB", (3, 1), (255, 0, 0))
    exif = pillow.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    sideways.save(file, "JPEG", exif=exif)
    data = content_of(Image(pillow.open(file)))
    assert pillow.open(io.BytesIO(data)).size == (1, 3)
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "F", "I", "HSV"):
        read = pillow.open(io.BytesIO(content_of(Image(pillow.new(mode, (2, 3))))))
        assert (read.format, read.size) == ("PNG", (2, 3))


# Prompts.


def test_a_prompt_of_texts_and_images_is_one_message() -> None:
    image, sound = Image(PNG), Audio(PNG)
    assert turn_input(["What?", image, sound]) == {
        "messages": [{"role": "user", "content": ["What?", image, sound]}]
    }
    assert turn_input(image) == {"messages": [{"role": "user", "content": [image]}]}
    messages = [{"role": "user", "content": ["What?", image]}]
    assert turn_input(messages) == {"messages": messages}
    for wrong in (["a", "b"], [image, 5], [image, messages[0]], [image, b"x"]):
        with pytest.raises(InvalidArgument, match="is not a prompt"):
            turn_input(wrong)  # type: ignore[arg-type]


class Sent:
    """The params of a turn as they are sent, with what its descriptors contain."""

    def __init__(self, *content: Any, prompt: str = ""):
        async def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
            return function(*arguments)

        message = {"role": "user", "content": [prompt, *content]}
        given = w.StreamParams(context=1, messages=[message])
        payload = Payload(run_in_thread)
        with closing(payload):
            params = run_blocking(payload.pack_messages(given))
            self.contents = [os.pread(fd, 1 << 26, 0) for fd in payload.descriptors]
            self.opened = [*payload.descriptors, *payload._opened]
        assert params.messages is not None
        assert given.messages == [message], "the program's messages are unchanged"
        self.parts: list[dict[str, Any]] = params.messages[0]["content"][1:]
        self.frame_bytes = len(pack_message((1, 1, "stream", params))) - 4


def test_small_images_are_within_the_frame_and_large_ones_in_descriptors(tmp_path: Path) -> None:
    large = png(1, 1, padding=INLINE_BYTES_MAX)
    (tmp_path / "large.png").write_bytes(large)
    (tmp_path / "small.png").write_bytes(PNG)
    sent = Sent(
        Image(PNG, detail="low", alt="a dot"),
        Image(large, tokens_max=70),
        Image(tmp_path / "large.png"),
        Image(tmp_path / "small.png"),
        Audio(PNG, alt="a tone"),
        {"type": "image", "data": large, "media_type": "image/png"},
        {"type": "image", "data": memoryview(PNG)},
    )
    assert sent.parts == [
        {"type": "image", "data": PNG, "detail": "low", "alt": "a dot"},
        {"type": "image", "data": {"fd": 0}, "tokens_max": 70},
        {"type": "image", "data": {"fd": 1}},
        {"type": "image", "data": PNG},
        {"type": "audio", "data": PNG, "alt": "a tone"},
        {"type": "image", "data": {"fd": 2}, "media_type": "image/png"},
        {"type": "image", "data": PNG},
    ]
    assert sent.contents == [large, large, large]


def test_descriptors_are_closed_after_the_frame_was_sent(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(png(1, 1, padding=INLINE_BYTES_MAX))
    (tmp_path / "small.png").write_bytes(PNG)
    paths = [Image(tmp_path / name) for name in ("large.png", "small.png")]
    before = open_descriptors()
    sent = Sent(*paths)
    assert len(sent.opened) == 2
    with pytest.raises(InvalidArgument) as caught:
        Sent(*paths, Image(tmp_path / "none.png"))
    assert caught.value.data == {"item": 2}
    assert open_descriptors() == before


def test_a_long_text_beside_images_leaves_them_less_of_the_frame() -> None:
    images = [png(1, 1, padding=INLINE_BYTES_MAX // 2)] * 12
    sent = Sent(*map(Image, images), prompt="x" * (FRAME_BYTES_MAX - 200_000))
    assert sent.frame_bytes <= FRAME_BYTES_MAX
    assert 0 < len(sent.contents) < 12
    assert Sent(*map(Image, images)).contents == []


def test_more_images_than_a_request_takes_are_refused() -> None:
    assert len(Sent(*[Image(PNG)] * MEDIA_PARTS_MAX).parts) == MEDIA_PARTS_MAX
    with pytest.raises(TooLarge, match=f"at most {MEDIA_PARTS_MAX}"):
        Sent(*[Image(PNG)] * (MEDIA_PARTS_MAX + 1))


def test_large_images_beyond_the_descriptors_of_a_request_are_refused() -> None:
    large = [png(1, 1, padding=INLINE_BYTES_MAX * 2)] * (PASSED_MAX + 20)
    with pytest.raises(TooLarge, match="largest"):
        Sent(*map(Image, large))
    assert len(Sent(*map(Image, large[: PASSED_MAX + 4])).contents) == PASSED_MAX


@given(
    st.lists(st.integers(0, 2 * INLINE_BYTES_MAX), max_size=MEDIA_PARTS_MAX),
    st.integers(0, FRAME_BYTES_MAX),
)
def test_what_is_not_in_descriptors_fits_into_the_frame(sizes: list[int], left: int) -> None:
    largest = sum(sorted(sizes)[: max(0, len(sizes) - PASSED_MAX)])
    if largest > left:
        with pytest.raises(TooLarge):
            in_descriptors(sizes, left)
        return
    chosen = in_descriptors(sizes, left)
    rest = [size for index, size in enumerate(sizes) if index not in chosen]
    assert len(chosen) <= PASSED_MAX
    assert sum(rest) <= left
    assert len(chosen) == PASSED_MAX or all(size <= INLINE_BYTES_MAX for size in rest)


def test_the_client_loads_no_library_for_images() -> None:
    code = "import sys, inferd; inferd.Image(b'x').open(); print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
