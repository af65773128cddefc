"""Images and sounds as the echo model reads them: any bytes are an image or a sound.

The size of an item depends only on the length of its content, and its embeddings are zeros. The
options cut contents into tiles, and break or delay the process that reads them.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InvalidArgument
from ..media import MediaKind
from ..media_process import ItemPiece, ProjectorFacts, TextPiece
from ..shared_memory import sealed_memory
from .options import EchoOptions, EchoVocabulary

ECHO_MEDIA_WIDTH = 4
"""The numbers of an embedding."""
ECHO_MEDIA_TOKENS_MAX = 4096
BYTES_PER_TOKEN = 64
REFUSED = b"refuse"
"""Contents that have these bytes are refused."""
ECHO_PROJECTOR = ProjectorFacts(
    kind="echo", images=True, sounds=True, width=ECHO_MEDIA_WIDTH, fingerprint="echo"
)


def read_echo_media(
    content: bytes, kind: MediaKind, tokens_max: int, options: EchoOptions
) -> list[TextPiece | ItemPiece]:
    """Return the pieces of a content: `media_tiles` items with a line break between them.

    :raises InvalidArgument: it has the bytes `REFUSED`.
    """
    if REFUSED in content:
        raise InvalidArgument(
            f"the content is not an {kind} but a text", hint="send any other bytes"
        )
    size = min(1 + len(content) // BYTES_PER_TOKEN, tokens_max or ECHO_MEDIA_TOKENS_MAX)
    size = min(size, ECHO_MEDIA_TOKENS_MAX)
    line_break = TextPiece(
        EchoVocabulary(options.vocabulary).tokenize(b"\n", special=False, bos=False)
    )
    pieces: list[TextPiece | ItemPiece] = [ItemPiece(size, size)]
    for _ in range(options.media_tiles - 1):
        pieces += [line_break, ItemPiece(size, size)]
    return pieces


class EncodedMedia(NamedTuple):
    """Embeddings in sealed memory, by item. The descriptors belong to the receiver."""

    descriptors: list[int]
    causal: list[bool]


def encode_echo_media(pieces: list[TextPiece | ItemPiece]) -> EncodedMedia:
    """Return the embeddings of the items in *pieces*: zeros."""
    items = [piece for piece in pieces if isinstance(piece, ItemPiece)]
    zeros = [sealed_memory([bytes(4 * ECHO_MEDIA_WIDTH * item.size)]) for item in items]
    return EncodedMedia(zeros, [item.causal for item in items])
