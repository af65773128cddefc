"""Images of guests: named by the key `image`, or set as tensors, and put into the prompts in the
form in which guests write images themselves.

A guest names an image by a path in one of its directories. No link on the way is followed, so no
path leads out of them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import stat
from collections.abc import Sequence
from typing import NamedTuple

from ...backends.errors import InvalidArgument, PermissionDenied, TooLarge
from ...backends.media_types import IMAGE_TYPES, check_content, media_type_of
from ...ipc.messages import TENSOR_BYTES_MAX

TEXT_BYTES = 64 << 10
IMAGE_BYTES_MAX = (TENSOR_BYTES_MAX - TEXT_BYTES) // 4 * 3
"""The most bytes of the images of a prompt: in base64, they fit into a tensor beside a text."""
IMAGES_MAX = 64
"""The most images that a context has as tensors."""
FIRST_IMAGE_INDEX = 2
"""0 is the prompt, 1 are parameters. An image at any other index is an image for the prompt."""
_PLACEHOLDER = re.compile(rb"<image>|\{WASMEDGE_IMAGE\}")


def is_image(data: bytes) -> bool:
    """Return whether data is an image of a kind that models read."""
    return media_type_of(data) in IMAGE_TYPES


def take_image(config: bytes) -> tuple[bytes, str | None]:
    """Return parameters without the key `image`, and its value if it is there."""
    try:
        found = json.loads(config)
    except ValueError:
        return config, None
    if not isinstance(found, dict) or not isinstance(found.get("image"), str):
        return config, None
    path = found.pop("image")
    return json.dumps(found).encode(), path


def has_placeholder(prompt: bytes) -> bool:
    """Return whether a prompt has a place for an image."""
    return _PLACEHOLDER.search(prompt) is not None


def with_images(prompt: bytes, images: Sequence[bytes]) -> bytes:
    """Return a prompt with the *images* at its places. One image is put into all of them.

    :raises InvalidArgument: an image is of an unknown kind, or there are not as many places as
        images.
    :raises TooLarge: the images have too many bytes.
    """
    places = len(_PLACEHOLDER.findall(prompt))
    if places == 0 or len(images) not in (1, places):
        raise InvalidArgument(
            f"the prompt has {places} places for {len(images)} images",
            hint="write <image> where each image belongs",
        )
    size = sum(map(len, images)) * (places if len(images) == 1 else 1)
    if size > IMAGE_BYTES_MAX:
        raise TooLarge(
            f"the images of the prompt have {size} bytes, more than {IMAGE_BYTES_MAX}",
            hint="scale them down, or send them as JPEG",
            data={"bytes": size, "bytes_max": IMAGE_BYTES_MAX},
        )
    tags = [_tag(number, image) for number, image in enumerate(images)]
    following = iter(tags if len(tags) == places else tags * places)
    return _PLACEHOLDER.sub(lambda _: next(following), prompt)


def _tag(number: int, image: bytes) -> bytes:
    try:
        kind = check_content(image, "image")
    except InvalidArgument as exc:
        exc.data["item"] = number
        raise
    return b'<img src="data:%b;base64,%b">' % (kind.encode(), base64.b64encode(image))


class ImageDirectory(NamedTuple):
    """A directory in which a guest may name images: the guest's name of it, and its path."""

    name: str
    path: str


def read_image(directories: Sequence[ImageDirectory], path: str) -> bytes:
    """Return the bytes of an image file that a guest names. This blocks.

    :raises PermissionDenied: it is in none of the guest's *directories*, or a link leads to it.
    :raises InvalidArgument: there is no such file, or it is not a regular file.
    :raises TooLarge: it has too many bytes.
    """
    directory, parts = _find_directory(directories, path)
    try:
        fd = _open_beneath(directory, parts)
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(
            f"the image {path!r} does not exist", hint="check its name, and the guest's directories"
        ) from None
    except OSError as exc:
        raise PermissionDenied(
            f"the image {path!r} cannot be read: {exc.strerror}",
            hint="links are not followed; name the file itself",
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidArgument(f"the image {path!r} is not a file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(IMAGE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > IMAGE_BYTES_MAX:
        raise TooLarge(
            f"the image {path!r} has more than {IMAGE_BYTES_MAX} bytes",
            hint="scale it down, or save it as JPEG",
            data={"bytes_max": IMAGE_BYTES_MAX},
        )
    return data


def _find_directory(directories: Sequence[ImageDirectory], path: str) -> tuple[str, list[str]]:
    """Return the directory with the longest name that holds *path*, and the rest of the path."""
    parts = _parts(path)
    found = [
        (directory.path, parts[len(names) :])
        for directory in directories
        if os.path.isabs(directory.name) == os.path.isabs(path)
        and (names := _parts(directory.name)) == parts[: len(names)]
    ]
    if not found or not parts or ".." in parts or "\0" in path:
        raise PermissionDenied(
            f"the guest may not read {path!r}",
            hint="give it the image's directory: --dir of `inferd wasm run`, --image-dir of"
            " `inferd nnrpc`",
        )
    return min(found, key=lambda item: len(item[1]))


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _open_beneath(directory: str, parts: Sequence[str]) -> int:
    """Open the file at *parts* below a directory for reading, without following any link."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for number, part in enumerate(parts, 1):
        last = number == len(parts)
        kind = os.O_RDONLY | os.O_NONBLOCK if last else os.O_PATH | os.O_DIRECTORY
        try:
            inner = os.open(part, kind | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd
