"""Kinds of files are recognised by their first bytes, and other contents are described."""

from __future__ import annotations

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.media import MediaKind
from inferd.backends.media_types import check_content, describe_content, media_type_of
from tests.pictures import bmp, png, wav

RIFF = b"RIFF\x10\0\0\0"
KNOWN = {
    "image/png": png(3, 2),
    "image/jpeg": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "image/webp": RIFF + b"WEBPVP8 ",
    "image/gif": b"GIF89a\1\0\1\0",
    "image/bmp": bmp(2, 2),
    "audio/wav": wav(0.01),
    "audio/mpeg": b"\xff\xfb\x90\x64",
    "audio/flac": b"fLaC\0",
}
OTHERS = {
    b"PK\3\4": "a ZIP archive, or a document in one",
    bytes(257) + b"ustar": "a tar archive",
    b"\x1f\x8b\x08": "a gzip archive",
    b"II*\0": "a TIFF image",
    b"\0\0\1\0": "an icon file",
    b"\x1a\x45\xdf\xa3webm": "a Matroska or WebM file",
    b"GGUF\3": "a GGUF file",
    b"\0\0\0\x18ftypqt  \0": "a QuickTime video",
    b"\0\0\0\x18ftypM4A \0": "an AAC sound",
    b"<?xml version='1.0'?><feed/>": "a text in XML",
    b"\xef\xbb\xbf <html><body>": "an HTML page",
    "text".encode("utf-16"): "a text in UTF-16",
    b"\xff\xfd\x90\x64": "of an unknown kind",
    b"": "empty",
    b"%PDF-1.7": "a PDF document",
    b"\0\0\0\x18ftypheic\0": "a HEIC image",
    b"\0\0\0\x18ftypavif": "an AVIF image",
    b"\0\0\0\x18ftypisom": "an MP4 file",
    b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg">': "an SVG drawing",
    b"<!DOCTYPE html><html>": "an HTML page",
    b"data:image/png;base64,iVBOR": "the text of a data URL",
    b"https://example.com/a.png": "the text of a URL",
    b"iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk" * 2: ("a text, perhaps base64"),
    "Not a picture, but a naïve text.\n".encode(): "a text",
    ("a" + "é" * 600).encode(): "a text",
    RIFF + b"AVI LIST": "an AVI file",
    RIFF + b"JUNK": "a RIFF file of another kind",
    b"OggS\0": "an Ogg file",
    b"BM is a text, not an image": "a text",
    b"\xff\xe1": "of an unknown kind",
    b"\0\1\2\3": "of an unknown kind",
}


@pytest.mark.parametrize("media_type", KNOWN)
def test_a_file_of_a_known_kind_is_recognised(media_type: str) -> None:
    data = KNOWN[media_type]
    kind: MediaKind = "image" if media_type.startswith("image/") else "audio"
    assert media_type_of(data) == check_content(data, kind) == media_type
    other: MediaKind = "audio" if kind == "image" else "image"
    with pytest.raises(InvalidArgument, match="this is not") as caught:
        check_content(data, other)
    assert caught.value.data["media_type"] == media_type
    assert caught.value.hint == ("send it as audio" if kind == "audio" else "send it as an image")
    assert media_type.partition("/")[2].upper() in caught.value.message


@pytest.mark.parametrize("data", OTHERS, ids=list(OTHERS.values()))
def test_another_content_is_refused_with_what_it_is(data: bytes) -> None:
    assert media_type_of(data) == ""
    assert describe_content(data) == OTHERS[data]
    with pytest.raises(InvalidArgument, match="not an image: it is " + OTHERS[data]) as caught:
        check_content(data, "image")
    assert "PNG, JPEG, WebP, GIF or BMP" in caught.value.hint


def test_every_beginning_of_a_file_can_be_described() -> None:
    for data in KNOWN.values():
        for size in range(len(data[:64])):
            assert describe_content(data[:size])
