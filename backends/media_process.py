"""The messages between the daemon and a model's encoder process, which reads images and sounds.

The process has the model's projector and vocabulary, and none of its weights. It answers one
request at a time, each in a frame of msgpack (`fd_frames.py`). Both sides are of one build, so the
structs are arrays without names. A content is a descriptor beside the frame; embeddings are sealed
memory beside the answer.
"""

from __future__ import annotations

import msgspec

from .errors import ErrorFields
from .media import MediaKind
from .model_spec import ModelSpec

CONTENT_ITEMS_MAX = 64
"""The items of one content; an image is cut into at most so many tiles."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class OpenProjector(_Message):
    """Open the projector of a model: the first request. Answered with `ProjectorOpened` or
    `Refused`. It computes with *threads* threads, and refuses contents past the bounds.

    Without *buffer_bytes*, which an earlier opening has measured, they are measured again.
    """

    spec: ModelSpec
    threads: int = 1
    buffer_bytes: int = 0
    pixels_max: int = 64_000_000
    seconds_max: float = 600.0


class ReadContent(_Message):
    """Decode a content and cut it into items, without encoding them. Answered with `ContentRead`
    or `Refused`. An image is scaled so that it has at most *tokens_max* tokens, if that is not 0.
    """

    kind: MediaKind
    tokens_max: int = 0


class EncodeContent(_Message):
    """Compute the embeddings of all items of a content. Answered with `ContentEncoded`, which has
    a descriptor beside it for each item, or with `Refused`.
    """

    kind: MediaKind
    tokens_max: int = 0


class UseThreads(_Message):
    """Compute with *threads* threads from the next request on. Not answered."""

    threads: int


class ProjectorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A projector: what it reads, and what it adds to a model's memory."""

    kind: str
    """Its type by llama.cpp's name, such as `gemma3`, `qwen2vl_merger` or `ultravox`."""
    images: bool
    sounds: bool
    width: int
    """The numbers of an embedding."""
    mrope: bool = False
    sample_rate: int = 0
    """Of the sounds that it reads, in Hz; 0 if it reads none."""
    image_tokens_max: int = 0
    """The tokens of a very large image, without a bound of its own; 0 if it reads no images."""
    fingerprint: str = ""
    """A hash of its file and of the settings that change its embeddings, in hex."""
    weights_bytes: int = 0
    buffer_bytes: int = 0
    """The peak of the memory in which it computes."""


class ProjectorOpened(_Message):
    """The projector is ready."""

    facts: ProjectorFacts


class TextPiece(_Message):
    """Tokens of text that the projector puts beside the items of a content."""

    tokens: list[int]


class ItemPiece(_Message):
    """An item of a content: its entries, and the positions that they take."""

    size: int
    positions: int
    causal: bool = True
    """Whether its entries see only those before them."""


class ContentRead(_Message):
    """The pieces of a content, in their order."""

    pieces: list[TextPiece | ItemPiece]


class ContentEncoded(_Message):
    """The embeddings of a content are in the descriptors beside the frame, one for each item, in
    the form that `scheduler.messages.MediaReady` describes.
    """

    causal: list[bool]
    seconds: float


class Refused(_Message):
    """A request was refused."""

    error: ErrorFields


Request = OpenProjector | ReadContent | EncodeContent | UseThreads
Reply = ProjectorOpened | ContentRead | ContentEncoded | Refused
