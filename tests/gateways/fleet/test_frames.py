"""Frames whose handles are rewritten keep every other byte."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.errors import InvalidArgument, ProtocolError
from inferd.backends.fd_frames import frame_of
from inferd.gateways.fleet.frames import (
    count_descriptors,
    integer_in,
    is_given,
    is_part_of_answer,
    number_in,
    open_message,
    raw_of,
    request_frame,
    request_of,
    text_in,
    with_handle,
    with_mapped_handles,
)
from inferd.wire.frames import FrameReader

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
maps = st.dictionaries(st.text(max_size=10), values, max_size=6)
handles = st.integers(0, 2**64 - 1)


@given(maps, handles, handles, st.integers(-(2**63), 2**63 - 1))
def test_a_request_gets_another_handle_and_nothing_else_changes(
    params: dict[str, Any], before: int, after: int, number: int
) -> None:
    message = open_message(pack([1, number, "stream", {**params, "context": before}, "more"]))
    call, fields = request_of(message)
    assert integer_in(fields, "context") == before
    (body,) = FrameReader().read_frames(
        request_frame(message.number, call, with_handle(fields, "context", after))
    )
    assert unpack(body) == [1, number, "stream", {**params, "context": after}]


@given(maps, st.lists(handles, max_size=4), handles)
def test_a_result_gets_mapped_handles(
    result: dict[str, Any], contexts: list[int], graph: int
) -> None:
    result.pop("context", None)  # Hypothesis draws keys from literals of the loaded modules, too
    raw = msgspec.Raw(pack({**result, "contexts": contexts, "graph": graph}))
    fields = with_mapped_handles(raw, frozenset({"contexts", "graph", "context"}), lambda h: h ^ 1)
    expected = {**result, "contexts": [h ^ 1 for h in contexts], "graph": graph ^ 1}
    assert unpack(pack(fields)) == expected


@given(maps, handles)
def test_a_session_in_a_result_gets_its_context_mapped(result: dict[str, Any], own: int) -> None:
    for context, shown in ((own, own ^ 1), (None, None)):
        raw = msgspec.Raw(pack({**result, "session": {"context": context, "turns": 3}}))
        fields = with_mapped_handles(raw, frozenset({"session"}), lambda h: h ^ 1)
        assert unpack(pack(fields)) == {**result, "session": {"context": shown, "turns": 3}}


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(body: bytes) -> None:
    try:
        message = open_message(body)
        assert isinstance(message.kind, int)
        if message.kind == 1:
            request_of(message)
    except (ProtocolError, InvalidArgument):
        pass


@pytest.mark.parametrize(
    "message",
    [[], [1], [1, 2], [1, 2, "c"], [1, "2", "c", {}], ["1"], [4, 1.5, {}], {}, 7, [3] * 17],
)
def test_messages_of_another_shape_are_refused(message: Any) -> None:
    with pytest.raises(ProtocolError):
        open_message(pack(message))


def test_params_of_other_types_are_refused() -> None:
    others: tuple[Any, ...] = ([], "x", {1: 2})
    for params in others:
        with pytest.raises(InvalidArgument):
            request_of(open_message(pack([1, 2, "c", params])))
    fields = {"context": raw_of("7"), "name": raw_of(7), "none": raw_of(None)}
    for read, name in ((integer_in, "context"), (text_in, "name"), (integer_in, "missing")):
        with pytest.raises(InvalidArgument, match=name):
            read(fields, name)
    for value, found in ((7.0, 7), (7.5, None), (float("inf"), None), (True, None)):
        fields["context"] = raw_of(value)
        if found is not None:
            assert integer_in(fields, "context") == found
            continue
        with pytest.raises(InvalidArgument, match="context"):
            integer_in(fields, "context")
    assert (text_in(fields, "none"), text_in(fields, "missing")) == ("", "")
    assert not is_given(fields, "none") and is_given(fields, "name")


@pytest.mark.parametrize(
    ("event", "answers"),
    [
        ({"tokens": [1], "text": b"a"}, True),
        ({"position": 1, "waiting": 1, "starts_in_s": None}, False),
        ({"prompt_progress": {"total": 5, "cache": 0, "processed": 0, "time_ms": 0.0}}, False),
    ],
)
def test_places_in_the_queue_and_progress_of_a_prompt_are_no_part_of_an_answer(
    event: dict[str, Any], answers: bool
) -> None:
    assert is_part_of_answer(open_message(pack([4, 1, event]))) is answers


def test_a_body_becomes_a_frame() -> None:
    assert list(FrameReader().read_frames(frame_of(b"abc") + frame_of(b""))) == [b"abc", b""]


@pytest.mark.parametrize(
    "params",
    [
        {"fd": 0},
        {"tensor": {"fd": 3}},
        {"inputs": [["a", {}], ["b", {"fd": 0}]]},
        {"messages": [{"content": "fd"}, {"content": [{"type": "image", "data": {"fd": 0}}]}]},
    ],
)
def test_a_part_in_a_descriptor_is_found(params: dict[str, Any]) -> None:
    assert count_descriptors(msgspec.Raw(pack(params))) == 1


def test_parts_within_the_frame_need_no_descriptor() -> None:
    tensor = {"data": b"x", "dimensions": [1], "type": 2, "fd": -1}
    good: list[dict[str, Any]] = [{}, {"tensor": tensor}, {"inputs": [["a", tensor]]}]
    image = {"type": "image", "data": b"fd"}
    good += [{"messages": [{"content": content}]} for content in ("fd", [image], None)]
    for params in (*good, {"inputs": None}, {"messages": None}, {"messages": "of another type"}):
        assert count_descriptors(msgspec.Raw(pack(params))) == 0
    with pytest.raises(InvalidArgument):
        count_descriptors(msgspec.Raw(pack({"tensor": 7})))
    with pytest.raises(InvalidArgument):
        count_descriptors(msgspec.Raw(pack({"messages": [image, 7]})))


def test_a_number_among_params_is_read_in_any_form_and_is_0_without_one() -> None:
    fields = {"a": raw_of(0.0), "b": raw_of(60), "c": raw_of("x")}
    assert [number_in(fields, name) for name in ("a", "b", "none")] == [0.0, 60, 0.0]
    with pytest.raises(InvalidArgument, match="`c` is not a number"):
        number_in(fields, "c")
