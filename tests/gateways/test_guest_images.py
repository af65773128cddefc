"""Images that guests name or set: their places in prompts, and the paths that may name them."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from inferd.backends.errors import InvalidArgument, PermissionDenied, TooLarge
from inferd.daemon.calls.prompt_images import PromptImage, decode_image, split_images
from inferd.gateways.guests import ImageDirectory, images, read_image
from inferd.gateways.guests.images import take_image, with_images
from tests.pictures import bmp, png

PNG, BMP = png(4, 4), bmp(4, 4)


def test_images_are_put_at_their_places_in_the_form_that_the_daemon_reads() -> None:
    found = split_images(with_images(b"a <image> b {WASMEDGE_IMAGE} c", [PNG, BMP]))
    assert [piece for piece in found if isinstance(piece, bytes)] == [b"a ", b" b ", b" c"]
    parts = [piece for piece in found if isinstance(piece, PromptImage)]
    assert [part.media_type for part in parts] == ["image/png", "image/bmp"]
    assert [decode_image(0, part) for part in parts] == [PNG, BMP]


def test_one_image_is_put_into_all_places() -> None:
    found = split_images(with_images(b"<image><image>", [PNG]))
    assert [type(piece) for piece in found] == [PromptImage, PromptImage]


@pytest.mark.parametrize("prompt", [b"no place", b"<image> one place"])
def test_as_many_images_as_places_are_needed(prompt: bytes) -> None:
    with pytest.raises(InvalidArgument, match="places for 2 images"):
        with_images(prompt, [PNG, BMP])


def test_an_image_of_an_unknown_kind_is_refused_with_its_number() -> None:
    with pytest.raises(InvalidArgument, match="PDF") as caught:
        with_images(b"<image><image>", [PNG, b"%PDF-1.7"])
    assert caught.value.data["item"] == 1


def test_the_images_of_a_prompt_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "IMAGE_BYTES_MAX", 2 * len(PNG))
    assert with_images(b"<image><image>", [PNG])
    with pytest.raises(TooLarge) as caught:
        with_images(b"<image><image><image>", [PNG])
    assert caught.value.data["bytes"] == 3 * len(PNG)


def test_the_path_of_an_image_is_taken_out_of_parameters() -> None:
    assert take_image(b'{"image": "a.png", "temp": 0}') == (b'{"temp": 0}', "a.png")
    for config in (b"", b"{", b"[]", b'{"temp":0}', b'{"image": 7}', b'"image"'):
        assert take_image(config) == (config, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.png").write_bytes(BMP)
    given = tmp_path / "given"
    (given / "inner").mkdir(parents=True)
    (given / "a.png").write_bytes(PNG)
    (given / "inner" / "b.png").write_bytes(BMP)
    (given / "link.png").symlink_to("a.png")
    (given / "out").symlink_to("..")
    os.mkfifo(given / "fifo")
    return given


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (".", "a.png"), (".", "./a.png"), (".", ".//a.png"), ("/data", "/data/a.png"),
        ("/data/", "/data/./a.png"), ("data", "data/a.png"),
    ],
)  # fmt: skip
def test_an_image_is_read_in_a_directory_of_the_guest(name: str, path: str, folder: Path) -> None:
    assert read_image([ImageDirectory(name, str(folder))], path) == PNG


def test_the_directory_with_the_longest_name_holds_a_path(folder: Path) -> None:
    directories = [ImageDirectory("/d", str(folder)), ImageDirectory("/d/x", f"{folder}/inner")]
    assert read_image(directories, "/d/x/b.png") == BMP


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "..", "../secret.png", "inner/../../secret.png", "out/secret.png", "link.png",
        "/etc/passwd", "a.png\0", "inner/../a.png",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_directory(path: str, folder: Path) -> None:
    refusal = "may not read|does not exist|cannot be read"
    with pytest.raises((PermissionDenied, InvalidArgument), match=refusal) as caught:
        read_image([ImageDirectory(".", str(folder))], path)
    assert caught.value.hint


def test_without_directories_nothing_is_read(folder: Path) -> None:
    with pytest.raises(PermissionDenied, match="may not read"):
        read_image([], "a.png")


def test_a_file_that_is_no_image_file_is_refused_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [ImageDirectory(".", str(folder))]
    for path in ("nowhere.png", "a.png/b.png"):
        with pytest.raises(InvalidArgument, match="does not exist"):
            read_image(directories, path)
    for path in ("fifo", "inner"):  # a FIFO without a writer does not block
        with pytest.raises(InvalidArgument, match="not a file"):
            read_image(directories, path)
    monkeypatch.setattr(images, "IMAGE_BYTES_MAX", len(PNG) - 1)
    with pytest.raises(TooLarge):
        read_image(directories, "a.png")


def test_a_tag_holds_the_whole_file() -> None:
    assert base64.b64encode(PNG) in with_images(b"<image>", [PNG])
