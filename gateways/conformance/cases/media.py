"""Cases of images and sounds in messages. Those that are read need the model `echo-media` of the
fixture (docs/protocol.md), and are skipped on servers without it.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from ..page import LIMITS
from ..peer import Map, check
from ..suite import Server, case, expect
from .tensors import descriptor

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
"""An image of one pixel."""
TEXT = {"type": "text", "text": "What is this?"}


def image(data: Any = PNG, **fields: Any) -> Map:
    """Return the part of a message with an image."""
    return {"type": "image", "data": data, **fields}


def asked(context: int, *parts: Any) -> Map:
    """Return the params of a turn that answers a message with these parts."""
    return {"context": context, "messages": [{"role": "user", "content": list(parts)}]}


@case("Images and sounds")
def an_image_needs_a_model_that_reads_it(server: Server) -> None:
    """A model without a projector refuses images with UnsupportedOperation; data has the item."""
    connection, context = server.connected()
    refused = connection.refusal("chat", **asked(context, image(), TEXT))
    expect(refused, "UnsupportedOperation")
    check(refused.data.get("item") == 0, f"data is {refused.data!r}")
    again = connection.call("chat", context=context, prompt="still works")
    check(again["text"] == b"still works", "the refused message is in the history")


@case("Images and sounds")
def another_content_is_refused_with_its_item(server: Server) -> None:
    """A content of another kind is InvalidArgument; data has the item and its place."""
    connection, context = server.connected()
    for content in (b"%PDF-1.7", b"no image at all", b""):
        params = asked(context, image(), TEXT, image(content))
        for call in ("chat", "stream", "answers"):
            refused = connection.refusal(call, **params)
            expect(refused, "InvalidArgument")
            place = {"item": 1, "param": "messages.0.content.2"}
            check(place.items() <= refused.data.items(), f"data is {refused.data!r}")


@case("Images and sounds")
def a_part_of_another_shape_is_refused(server: Server) -> None:
    """Parts have a type, and images and sounds data; others are InvalidArgument."""
    connection, context = server.connected()
    parts: list[Any] = [
        {"type": "image"},
        {"type": "audio", "data": "text"},
        {"type": "image", "data": {"fd": -1}},
        {"type": "image", "sha256": "0" * 64},
        {"type": "video", "data": PNG},
        image(tokens_max=-1),
        image(detail="most"),
        image(alt="x" * (LIMITS["ALT_CHARACTERS_MAX"] + 1)),
    ]
    for part in parts:
        refused = connection.refusal("chat", **asked(context, TEXT, part))
        expect(refused, "InvalidArgument")
        place = str(refused.data.get("param"))
        check(place.startswith("messages.0.content.1"), f"{part!r:.60}: data is {refused.data!r}")


@case("Images and sounds")
def images_of_a_request_are_bounded(server: Server) -> None:
    """A request has at most `MEDIA_PARTS_MAX` images and sounds; more are TooLarge."""
    connection, context = server.connected()
    most = LIMITS["MEDIA_PARTS_MAX"]
    expect(connection.refusal("chat", **asked(context, *[image()] * (most + 1))), "TooLarge")
    context = server.context(connection, model=server.fixture("echo-media"))
    connection.call("chat", **asked(context, *[image()] * most))


@case("Images and sounds")
def an_image_in_a_descriptor_must_be_a_file(server: Server) -> None:
    """A part in a descriptor that is not a regular file is InvalidArgument, without a wait."""
    connection, context = server.connected()
    read, write = os.pipe()
    try:
        params = asked(context, image({"fd": 0}))
        expect(connection.refusal("chat", [read], **params), "InvalidArgument")
    finally:
        os.close(read)
        os.close(write)
    refused = connection.refusal("chat", **asked(context, image({"fd": 0})))
    expect(refused, "InvalidArgument")


@case("Images and sounds")
def an_image_is_read_and_kept(server: Server) -> None:
    """The history has an image by its hash, and `session_media` returns its bytes."""
    connection, context = server.connected(model=server.fixture("echo-media"))
    result = connection.call("chat", **asked(context, image(alt="a dot"), TEXT))
    check(result["metadata"]["media_tokens"] > 0, "the image has no tokens")
    content = connection.call("history", context=context)["messages"][0]["content"]
    sha256 = hashlib.sha256(PNG).hexdigest()
    expected = {"type": "image", "sha256": sha256, "bytes": len(PNG), "media_type": "image/png"}
    found = content[0] if isinstance(content, list) else content
    check(isinstance(found, dict), f"the first part is {found!r:.100}")
    check((expected | {"alt": "a dot"}).items() <= found.items(), f"the part is {found!r:.200}")
    part = connection.call("session_media", context=context, sha256=sha256)
    check(part["data"] == PNG, "session_media returned other bytes")
    check(part["size"] == len(PNG), f"its size is {part['size']}")
    end = connection.call("session_media", context=context, sha256=sha256, offset=len(PNG))
    check(end["data"] == b"", "there are bytes behind the end")
    expect(connection.refusal("session_media", context=context, sha256="0" * 64), "NotFound")


@case("Images and sounds")
def images_take_descriptors_in_their_order(server: Server) -> None:
    """Parts of messages take descriptors in their order."""
    connection, context = server.connected(model=server.fixture("echo-media"))
    contents = [PNG + bytes([i]) for i in range(3)]
    with descriptor(contents[0]) as first, descriptor(contents[2]) as third:
        parts = [image({"fd": 0}), image(contents[1]), image({"fd": 0})]
        connection.call("chat", [first, third], **asked(context, *parts, TEXT))
    content = connection.call("history", context=context)["messages"][0]["content"]
    hashes = [part.get("sha256") for part in content if part["type"] == "image"]
    check(
        hashes == [hashlib.sha256(data).hexdigest() for data in contents],
        "the images were exchanged",
    )


@case("`apply_template`")
def a_template_counts_the_tokens_of_images(server: Server) -> None:
    """`apply_template` counts the tokens of images, and shows a mark for each."""
    connection = server.connect()
    graph = server.graph(connection, model=server.fixture("echo-media"))
    tokens = [
        connection.call(
            "apply_template", graph=graph, messages=[{"role": "user", "content": content}]
        )
        for content in ([TEXT], [image(), TEXT])
    ]
    check(tokens[1]["tokens"] > tokens[0]["tokens"], "the image has no tokens")
    check(tokens[1]["text"].count(b"<__media__>") == 1, f"the text is {tokens[1]['text']!r}")
