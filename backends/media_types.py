"""Types of image and sound files by their first bytes, and descriptions of other contents."""

from __future__ import annotations

import codecs
import re

from .errors import InvalidArgument
from .media import MediaKind

IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
SOUND_TYPES = ("audio/wav", "audio/mpeg", "audio/flac")
_READ_BY_KIND = {
    "image": ("an image", "PNG, JPEG, WebP, GIF or BMP"),
    "audio": ("a sound", "WAV, MP3 or FLAC"),
}
HEAD_BYTES = 512
"""The bytes by which a content is recognised."""
_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
    b"ID3": "audio/mpeg",
    b"fLaC": "audio/flac",
}
_RIFF_FORMS = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
"""Sizes of the header that follows the 14 bytes of a BMP file's own."""
_OTHERS = {
    b"%PDF": "a PDF document",
    b"PK\3\4": "a ZIP archive, or a document in one",
    b"PK\5\6": "an empty ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ\0": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"Rar!\x1a\7": "a RAR archive",
    b"II*\0": "a TIFF image",
    b"MM\0*": "a TIFF image",
    b"\0\0\1\0": "an icon file",
    b"8BPS": "a Photoshop file",
    b"\xff\x0a": "a JPEG XL image",
    b"\0\0\0\x0cJXL ": "a JPEG XL image",
    b"\0\0\0\x0cjP  ": "a JPEG 2000 image",
    b"OggS": "an Ogg file",
    b"\x1a\x45\xdf\xa3": "a Matroska or WebM file",
    b"FLV\1": "a Flash video",
    b"\0\0\1\xba": "an MPEG video",
    b"\0\0\1\xb3": "an MPEG video",
    b"FORM": "an AIFF sound",
    b".snd": "an AU sound",
    b"#!AMR": "an AMR sound",
    b"MThd": "a MIDI file",
    b"GGUF": "a GGUF file",
    b"\x7fELF": "a program",
    b"MZ": "a program",
    b"\0asm": "a WebAssembly module",
    b"SQLite format 3\0": "a database",
    b"\xff\xfe": "a text in UTF-16",
    b"\xfe\xff": "a text in UTF-16",
}
_TAR = 257, b"ustar"
_BRANDS = {
    **dict.fromkeys(
        (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"), "a HEIC image"
    ),
    **dict.fromkeys((b"avif", b"avis"), "an AVIF image"),
    b"M4A ": "an AAC sound",
    b"qt  ": "a QuickTime video",
}
_TEXTS = {
    b"data:": "the text of a data URL",
    b"http://": "the text of a URL",
    b"https://": "the text of a URL",
    b"file:": "the text of a URL",
    b"<!doctype html": "an HTML page",
    b"<html": "an HTML page",
    b"<?xml": "a text in XML",
    b"{\\rtf": "an RTF document",
}
_SVG = re.compile(rb"<svg[\s>/]")
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{64,}")


def media_type_of(data: bytes) -> str:
    """Return the media type of an image or a sound of a known kind; an empty text for others. The
    rest of the file may be damaged.
    """
    for beginning, media_type in _BEGINNINGS.items():
        if data.startswith(beginning):
            return media_type
    if data[:4] == b"RIFF":
        return _RIFF_FORMS.get(data[8:12], "")
    if data[:2] == b"BM" and int.from_bytes(data[14:18], "little") in _BMP_HEADERS:
        return "image/bmp"
    return "audio/mpeg" if _begins_mp3(data) else ""


def _begins_mp3(data: bytes) -> bool:
    """Return whether *data* begin with the header of a frame of MPEG layer III."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return False
    version, layer = data[1] >> 3 & 3, data[1] >> 1 & 3
    bitrate, rate = data[2] >> 4, data[2] >> 2 & 3
    return version != 1 and layer == 1 and 0 < bitrate < 15 and rate != 3


def describe_content(data: bytes) -> str:
    """Return a description of any content, such as "a PDF document"."""
    if not data:
        return "empty"
    if media_type := media_type_of(data):
        kind, _, form = media_type.partition("/")
        return f"{'an image' if kind == 'image' else 'a sound'} ({form.upper()})"
    for beginning, description in _OTHERS.items():
        if data.startswith(beginning):
            return description
    begin, magic = _TAR
    if data[begin : begin + len(magic)] == magic:
        return "a tar archive"
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "an MP4 file")
    if data[:4] == b"RIFF":
        return "an AVI file" if data[8:12] == b"AVI " else "a RIFF file of another kind"
    return _describe_text(data[:HEAD_BYTES])


def _describe_text(head: bytes) -> str:
    plain = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if plain.startswith(b"<") and _SVG.search(plain):
        return "an SVG drawing"
    for beginning, description in _TEXTS.items():
        if plain.startswith(beginning):
            return description
    if _BASE64.match(head):
        return "a text, perhaps base64"
    try:  # a character may be cut at the end
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return "of an unknown kind"
    is_text = text and all(c.isprintable() or c.isspace() for c in text)
    return "a text" if is_text else "of an unknown kind"


def check_content(data: bytes, kind: MediaKind) -> str:
    """Return the media type of a content of this *kind*.

    :raises InvalidArgument: it is something else; the message says what it is.
    """
    media_type = media_type_of(data)
    if media_type in (IMAGE_TYPES if kind == "image" else SOUND_TYPES):
        return media_type
    noun, forms = _READ_BY_KIND[kind]
    hint = f"send {forms}; convert other kinds first"
    if media_type:
        hint = f"send it as {'audio' if kind == 'image' else 'an image'}"
    raise InvalidArgument(
        f"this is not {noun}: it is {describe_content(data)}",
        hint=hint,
        data={"media_type": media_type},
    )


def damaged(data: bytes, reason: str) -> InvalidArgument:
    """Return the error of a content of a known kind that cannot be decoded, for this *reason*."""
    return InvalidArgument(
        f"this is {describe_content(data)}, and it is damaged: {reason}",
        hint="send the whole file, as its program wrote it",
        data={"media_type": media_type_of(data)},
    )
