"""Images and sounds in a history: their stored form in messages, the marks that stand for them in
the texts that a chat template renders, and the items among the history's tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ...backends.errors import (
    InferdError,
    InvalidArgument,
    NotFound,
    TooLarge,
    UnsupportedOperation,
)
from ...backends.media import (
    MarkedMedia,
    MediaContent,
    MediaItem,
    MediaTokens,
    is_media,
    items_of,
    media_parts,
)
from ...scheduler.messages import pack_tokens
from ..worker_client import TextClient

NOTES = {"audio": "sound"}
"""The words for types in texts that stand for parts, where they differ from the types."""
TOKEN_CHARACTERS = 4
"""The characters of a text that a token of an image counts for, where chats are compared by their
lengths.
"""
_NONCE_BYTES = 12
_UNREADABLE = (UnsupportedOperation, InvalidArgument, TooLarge, NotFound)
"""Errors of a content that stay until the model changes."""
Message = Mapping[str, Any]
Prompt = bytes | Sequence[bytes | Mapping[str, Any]]
"""A raw prompt: a text, or texts and the stored forms of images and sounds between them."""


def is_text(message: Message) -> bool:
    """Return whether the content of a message is a text, without images and sounds."""
    return isinstance(message.get("content"), str)


def content_of(part: Message) -> MediaContent:
    """Return the content of a part in the stored form."""
    return MediaContent(bytes.fromhex(part["sha256"]), part["type"], part.get("tokens_max", 0))


def contents_of(messages: Iterable[Message]) -> frozenset[bytes]:
    """Return the hashes of the contents of messages."""
    return frozenset(bytes.fromhex(part["sha256"]) for part in media_parts(messages))


def new_nonce() -> str:
    """Return a part of marks that no text contains by chance or on purpose."""
    return secrets.token_hex(_NONCE_BYTES)


def mark_of(nonce: str, index: int) -> str:
    """Return the mark of an image or sound, number *index* of those that are rendered."""
    return f"<|media-{nonce}-{index}|>"


def note_on(kind: str) -> str:
    """Return the text that stands for a part that the model cannot read."""
    return f"[{NOTES.get(kind, kind)}]"


class Readings:
    """The tokens of images and sounds, as a model reads them. Those of a history that it cannot
    read have none; *unread* is the reason, or empty.
    """

    def __init__(
        self, tokens: Mapping[MediaContent, MediaTokens] | None = None, unread: str = ""
    ) -> None:
        self._tokens = dict(tokens or {})
        self.unread = unread

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def of(self, part: Message) -> MediaTokens | None:
        """Return the tokens of a part, or None if the model cannot read it."""
        return self._tokens.get(content_of(part))

    @property
    def items(self) -> list[MediaItem]:
        """The items of all of them."""
        return [item for tokens in self._tokens.values() for item in tokens.items]

    def size_of(self, content: object) -> int:
        """Return the length of a message's content, where chats are compared by their lengths."""
        if not isinstance(content, list):
            return len(str(content))
        return sum(map(self._part_size, content))

    def _part_size(self, part: Message) -> int:
        if not is_media(part):
            return len(str(part.get("text", "")))
        found = self.of(part)
        return len(note_on(part["type"])) if found is None else TOKEN_CHARACTERS * len(found.tokens)


NO_READINGS = Readings()


async def read_media(
    client: TextClient,
    old: Iterable[Message],
    new: Iterable[Message] = (),
    *,
    refuses_unread: bool = False,
) -> Readings:
    """Return the tokens of the images and sounds of a history's messages and of *new* ones. Those
    of the history that the model cannot read become texts, unless *refuses_unread*.

    :raises InferdError: one cannot be read. `data.item` is its index in the *new* messages, if it
        is one of these.
    """
    added = [content_of(part) for part in media_parts(new)]
    # The history may have a content several times, and the new messages may have it again.
    known = list(dict.fromkeys(content_of(part) for part in media_parts(old)))
    if not added and not known:
        return NO_READINGS
    found = dict(zip(added, await client.read_media(added), strict=True)) if added else {}
    missing = [content for content in known if content not in found]
    try:
        if missing:
            found |= zip(missing, await client.read_media(missing), strict=True)
    except _UNREADABLE as exc:
        if refuses_unread:
            raise _refused(exc) from exc
        return await _read_each(client, missing, found)
    except InferdError as exc:
        exc.data.pop("item", None)
        raise
    return Readings(found)


async def _read_each(
    client: TextClient, missing: Sequence[MediaContent], found: dict[MediaContent, MediaTokens]
) -> Readings:
    """Return the tokens of those contents that can be read."""
    reasons = dict[str, None]()
    for content in missing:
        try:
            [found[content]] = await client.read_media([content])
        except _UNREADABLE as exc:
            reasons[exc.message] = None
        except InferdError as exc:
            exc.data.pop("item", None)
            raise
    count = sum(content not in found for content in missing)
    shown = f"{count} of the history's images and sounds are texts: {next(iter(reasons), '')}"
    return Readings(found, shown if reasons else "")


def _refused(exc: InferdError) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"the model cannot read the images and sounds of the history: {exc.message}",
        hint="reset or rewind the session, or let `media-on-swap` be `note`",
    )


class MarkedMessages(NamedTuple):
    """Messages whose contents are texts with marks, and the images and sounds for these."""

    messages: list[dict[str, Any]]
    media: list[MarkedMedia]


def mark_messages(
    messages: Sequence[dict[str, Any]], nonce: str, readings: Readings
) -> MarkedMessages:
    """Return messages with marks in place of images and sounds. The texts of a message are joined
    by line breaks, except beside a mark, as llama-server does it (`common/chat.cpp`).
    """
    media: list[MarkedMedia] = []

    def mark(part: Message) -> str:
        tokens = readings.of(part)
        if tokens is None:
            return note_on(part["type"])
        media.append(MarkedMedia(mark_of(nonce, len(media)), pack_tokens(tokens.tokens)))
        return media[-1].mark

    marked = [
        {**message, "content": joined(content, mark)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]
    return MarkedMessages(marked, media)


def joined(parts: Iterable[Message], shown: Callable[[Message], str]) -> str:
    """Return the parts of a message as a text; *shown* is that of an image or sound."""
    text, after_media = "", False
    for part in parts:
        if is_media(part):
            text, after_media = text + shown(part), True
            continue
        text += "\n" if text and not after_media else ""
        text, after_media = text + str(part.get("text", "")), False
    return text


async def with_media(
    client: TextClient, messages: Sequence[dict[str, Any]], nonce: str = ""
) -> MarkedMessages:
    """Return messages with marks in place of their images and sounds, which the model reads. An
    empty *nonce* is replaced by a new one.

    :raises InferdError: one cannot be read; see `TextClient.read_media`.
    """
    readings = await read_media(client, (), messages)
    return mark_messages(messages, nonce or new_nonce(), readings)


class MarkedPrompt(NamedTuple):
    """A raw prompt as a text with marks, with the images and sounds for these and their items."""

    text: bytes
    media: list[MarkedMedia]
    items: list[MediaItem]


def prompt_contents(prompt: Prompt) -> list[MediaContent]:
    """Return the images and sounds in a raw prompt."""
    if isinstance(prompt, bytes):
        return []
    return [content_of(part) for part in prompt if not isinstance(part, bytes)]


def prompt_bytes(prompt: Prompt) -> int:
    """Return the length of the texts of a raw prompt."""
    if isinstance(prompt, bytes):
        return len(prompt)
    return sum(len(part) for part in prompt if isinstance(part, bytes))


async def mark_prompt(client: TextClient, prompt: Prompt) -> MarkedPrompt:
    """Return a raw prompt with marks in place of its images and sounds, which the model reads.

    :raises InferdError: one cannot be read; see `TextClient.read_media`.
    """
    contents = prompt_contents(prompt)
    if isinstance(prompt, bytes) or not contents:
        return MarkedPrompt(
            prompt if isinstance(prompt, bytes) else b"".join(_texts(prompt)), [], []
        )
    read, nonce, text = await client.read_media(contents), new_nonce(), b""
    media: list[MarkedMedia] = []
    for part in prompt:
        if isinstance(part, bytes):
            text += part
            continue
        mark = mark_of(nonce, len(media))
        media.append(MarkedMedia(mark, pack_tokens(read[len(media)].tokens)))
        text += mark.encode()
    return MarkedPrompt(text, media, [item for tokens in read for item in tokens.items])


def _texts(prompt: Iterable[bytes | Message]) -> Iterator[bytes]:
    return (part for part in prompt if isinstance(part, bytes))


ITEM_BYTES = 600
"""Memory of a known item."""
_KEY_ENTRIES = 8
"""The first entries of an item, which have 240 bits of its digest, and its size identify it."""
_Key = tuple[int, ...]


class KnownItems:
    """Items by their entries. A value."""

    def __init__(self, items: Iterable[MediaItem] = ()):
        """Know these items.

        :raises InvalidArgument: two of them are so short that their entries are the same.
        """
        self._items: dict[_Key, MediaItem] = {}
        for item in items:
            if self._items.setdefault(_key_of(item), item).digest != item.digest:
                raise InvalidArgument(
                    "a media item cannot be distinguished from another one",
                    hint="send it in another size",
                )

    def __len__(self) -> int:
        return len(self._items)

    @property
    def all(self) -> tuple[MediaItem, ...]:
        """The items, each once."""
        return tuple(self._items.values())

    @property
    def contents(self) -> frozenset[bytes]:
        """The hashes of the contents to which the items belong."""
        return frozenset(item.content.sha256 for item in self._items.values())

    def items_in(self, tokens: Sequence[int]) -> tuple[MediaItem, ...]:
        """Return the items in *tokens*, in their order."""
        if not self._items:
            return ()
        return tuple(
            self._items[size, *tokens[begin : begin + min(size, _KEY_ENTRIES)]]
            for begin, size in items_of(tokens)
        )

    def with_items(self, items: Iterable[MediaItem], tokens: Sequence[int]) -> KnownItems:
        """Return these items and others, as far as they are in *tokens*.

        :raises InvalidArgument: two of them are so short that their entries are the same.
        """
        return KnownItems(KnownItems((*self.all, *items)).items_in(tokens))


NO_ITEMS = KnownItems()


def _key_of(item: MediaItem) -> _Key:
    size = min(item.size, _KEY_ENTRIES)
    first = msgspec.structs.replace(item, size=size)  # its entries do not depend on the size
    return item.size, *first.entries()
