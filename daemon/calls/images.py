"""Images in the prompts of wasi-nn's calls, which the models here do not read."""

from __future__ import annotations

import re
import string

from ...backends.errors import UnsupportedOperation

PROMPT_BYTES_CHECKED = 4 << 20
DATA_URLS_CHECKED = 64
"""The rest of a prompt is text."""
TAG_BYTES_CHECKED = 1000
"""The bytes of a tag before its data."""
PAYLOAD_BYTES_CHECKED = 1024
"""The first bytes of an image."""
_MARK = b";base64,"
_TAG = re.compile(rb"<img\b[^<>]*\bsrc\s*=\s*([\"'])data:(image/[\w.+-]{1,64})$", re.IGNORECASE)
_BASE64 = f"{string.ascii_letters}{string.digits}+/={string.whitespace}".encode()


def check_no_image(prompt: bytes) -> None:
    """Refuse a prompt with an image in the form of WasmEdge's guests, which is
    `<img src="data:image/png;base64,…">`. A tag whose data is not base64 is text.

    :raises UnsupportedOperation: there is an image.
    """
    begin = 0
    for _ in range(DATA_URLS_CHECKED):
        mark = prompt.find(_MARK, begin, PROMPT_BYTES_CHECKED)
        if mark < 0:
            return
        begin = mark + len(_MARK)
        tag_begin = prompt.rfind(b"<", max(0, mark - TAG_BYTES_CHECKED), mark)
        tag = _TAG.match(prompt[tag_begin:mark]) if tag_begin >= 0 else None
        if tag is not None and _is_image(prompt[begin : begin + PAYLOAD_BYTES_CHECKED], tag[1]):
            kind = tag[2].decode()
            raise UnsupportedOperation(
                f"the prompt has an image ({kind}), and the model reads only text",
                hint="leave the image out; projectors for images are not supported",
                data={"media_type": kind},
            )


def _is_image(payload: bytes, quote: bytes) -> bool:
    """Return whether the first bytes of a data URL are base64 up to its closing *quote*."""
    data, closed, _ = payload.partition(quote)
    whole = closed or len(payload) == PAYLOAD_BYTES_CHECKED
    return bool(whole and data.strip() and not data.translate(None, _BASE64))
