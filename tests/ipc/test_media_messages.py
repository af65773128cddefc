"""The shape of images and sounds in messages, and the descriptors that they refer to."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.ipc.chat_messages import (
    ALT_CHARACTERS_MAX,
    LOW_DETAIL_TOKENS,
    MEDIA_PARTS_MAX,
    MEDIA_TOKENS_MAX,
    PassedData,
    checked_messages,
    media_parts,
    passed_data,
    tokens_max_of,
)

TEXT = {"type": "text", "text": "What is this?"}


def image(data: Any = b"x", **fields: Any) -> dict[str, Any]:
    return {"type": "image", "data": data, **fields}


def user(*parts: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(parts)}]


def test_messages_of_text_alone_become_a_text_as_before() -> None:
    assert checked_messages(user(TEXT, TEXT)) == [
        {"role": "user", "content": "What is this?\nWhat is this?"}
    ]


def test_images_and_sounds_are_counted_over_all_messages_with_their_places() -> None:
    sound = {"type": "audio", "data": b"y"}
    messages = [
        *user(TEXT, image(), sound),
        {"role": "assistant", "content": "A dot."},
        *user(image(b"z"), role="tool"),
    ]
    checked = checked_messages(messages)
    assert checked == messages
    found = [(part.item, part.place, part.message, part.position) for part in media_parts(checked)]
    assert found == [
        (0, "messages.0.content.1", 0, 1),
        (1, "messages.0.content.2", 0, 2),
        (2, "messages.2.content.0", 2, 0),
    ]
    assert [part.fields["type"] for part in media_parts(checked)] == ["image", "audio", "image"]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image"}, ""),
        (image("text"), ""),
        (image(None), ""),
        (image({"fd": 3}), ""),
        (image({"fd": -1}), ""),
        (image([1]), ""),
        ({"type": "image", "sha256": "0" * 64}, ""),
        (image(tokens_max=-1), ".tokens_max"),
        (image(tokens_max=MEDIA_TOKENS_MAX + 1), ".tokens_max"),
        (image(tokens_max=True), ".tokens_max"),
        (image(tokens_max="1"), ".tokens_max"),
        (image(detail="most"), ".detail"),
        (image(detail=["low"]), ".detail"),
        (image(alt="x" * (ALT_CHARACTERS_MAX + 1)), ".alt"),
        (image(alt=5), ".alt"),
        (image(media_type=b"image/png"), ".media_type"),
    ],
    ids=lambda value: json.dumps(value, default=str)[:60],
)
def test_a_part_of_another_shape_is_refused_with_its_item(part: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked_messages(user(image(), TEXT, part))
    assert caught.value.data == {"item": 1, "param": f"messages.0.content.2{field}"}
    assert caught.value.message.startswith(f"messages.0.content.2{field}: ")
    assert caught.value.hint


@pytest.mark.parametrize(
    "part", ["text", 5, None, {}, {"type": "video", "data": b"x"}, {"type": "text"}, {"type": []}]
)
def test_a_part_of_no_known_kind_is_refused_with_its_place(part: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked_messages(user(TEXT, part))
    assert caught.value.data == {"param": "messages.0.content.1"}


def test_an_answer_has_no_images() -> None:
    with pytest.raises(InvalidArgument, match="the role 'assistant' has no images") as caught:
        checked_messages([*user(TEXT), *user(image(), role="assistant")])
    assert caught.value.data == {"item": 0, "param": "messages.1.content.0"}


def test_the_images_of_a_request_are_bounded() -> None:
    most = user(*[image()] * (MEDIA_PARTS_MAX // 2)) * 2
    assert len(list(media_parts(checked_messages(most)))) == MEDIA_PARTS_MAX
    with pytest.raises(TooLarge) as caught:
        checked_messages([*most, *user(image())])
    assert caught.value.data["media_parts_max"] == MEDIA_PARTS_MAX
    assert caught.value.data["item"] == MEDIA_PARTS_MAX


def test_each_bound_of_a_part_is_accepted() -> None:
    part = image(
        tokens_max=MEDIA_TOKENS_MAX, detail="high", alt="é" * ALT_CHARACTERS_MAX, media_type="x"
    )
    assert checked_messages(user(part, image(tokens_max=0, detail=None, alt=None)))


@pytest.mark.parametrize(
    ("fields", "tokens_max"),
    [
        ({}, 0),
        ({"detail": "high"}, 0),
        ({"detail": "auto", "tokens_max": 70}, 70),
        ({"detail": "low"}, LOW_DETAIL_TOKENS),
        ({"detail": "low", "tokens_max": 64}, 64),
        ({"detail": "low", "tokens_max": 4096}, LOW_DETAIL_TOKENS),
    ],
)
def test_a_low_detail_is_a_bound_on_tokens(fields: dict[str, Any], tokens_max: int) -> None:
    assert tokens_max_of(image(**fields)) == tokens_max


def test_data_in_descriptors_is_found_in_its_order() -> None:
    messages = [
        *user(TEXT, image({"fd": 5}), image(b"x")),
        {"role": "assistant", "content": "A dot."},
        *user({"type": "audio", "data": {"fd": 0}}),
    ]
    found = passed_data(messages)
    assert found == [PassedData(5), PassedData(0)]
    for fd, data in enumerate(found, 70):
        data.fd = fd
    parts = [part.fields["data"] for part in media_parts(checked_messages(messages))]
    assert parts == [PassedData(70), b"x", PassedData(71)]


def test_a_number_that_a_client_wrote_is_never_used_as_a_descriptor() -> None:
    for fd in (-1, 1.5, "1", True, None, [1]):
        messages = user(image({"fd": fd}))
        assert passed_data(messages) == []
        with pytest.raises(InvalidArgument):
            checked_messages(messages)
    unseen = msgspec.msgpack.decode(msgspec.msgpack.encode(user(image(PassedData(1)))))
    assert unseen == user(image({"fd": 1}))
    with pytest.raises(InvalidArgument):  # without `passed_data`, which the server calls
        checked_messages(unseen)


@pytest.mark.parametrize("messages", [[], [5], [{}], [{"content": 1}], user(5, "x", None)])
def test_messages_of_any_shape_are_searched_for_descriptors(messages: list[Any]) -> None:
    assert passed_data(messages) == []
