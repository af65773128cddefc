"""Frames as an entry reads and writes them: opened as far as needed, and otherwise passed as bytes.

Values inside params and results stay undecoded (`msgspec.Raw`): an entry rewrites their handles,
and copies everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from ...backends.errors import InvalidArgument, ProtocolError, UnsupportedOperation
from ...backends.params import as_whole
from ...ipc.chat_messages import passed_data
from ...ipc.messages import Kind
from ...ipc.messages.calls import SESSION
from ...wire.frames import pack_frame

MESSAGE_ITEMS_MAX = 16
"""Items of a message's array, as in the daemon."""
Fields: TypeAlias = dict[str, msgspec.Raw]
T = TypeVar("T")
HandleMap: TypeAlias = Callable[[int], int]
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_BEFORE_ANSWER = frozenset({"position", "prompt_progress"})
"""Fields of events that precede an answer."""
_Items = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MESSAGE_ITEMS_MAX)]
_items = msgspec.msgpack.Decoder(_Items)
_fields = msgspec.msgpack.Decoder(Fields)
_integer = msgspec.msgpack.Decoder(int)
_number = msgspec.msgpack.Decoder(int | float)
_integers = msgspec.msgpack.Decoder(list[int])
_text = msgspec.msgpack.Decoder(str)
_map = msgspec.msgpack.Decoder(dict[str, Any])
_encode = msgspec.msgpack.Encoder().encode


class OpenFrame(NamedTuple):
    """A message: its kind, its items, and its bytes without the length."""

    kind: int
    items: list[msgspec.Raw]
    body: bytes

    @property
    def number(self) -> int:
        """The id of its request."""
        return _integer.decode(self.items[1])

    @property
    def credit(self) -> int:
        """The credit that it grants.

        :raises ProtocolError: it is not a number.
        """
        try:
            return _integer.decode(self.items[2])
        except UNREADABLE as exc:
            raise ProtocolError(f"a grant of credit cannot be read: {exc}") from None


def open_message(body: bytes) -> OpenFrame:
    """Return a message.

    :raises ProtocolError: it is not a message.
    """
    try:
        items = _items.decode(body)
        message = OpenFrame(_integer.decode(items[0]), items, body)
        if message.kind not in (Kind.HELLO, Kind.GOODBYE):
            _ = message.number
        if len(items) < (4 if message.kind == Kind.REQUEST else 2):
            raise ProtocolError(f"a message of kind {message.kind} with {len(items)} items")
    except IndexError:
        raise ProtocolError("a message without its items") from None
    except UNREADABLE as exc:
        raise ProtocolError(f"a frame is not a msgpack array of the protocol: {exc}") from None
    return message


def request_of(message: OpenFrame) -> tuple[str, Fields]:
    """Return the call of a request, and its params.

    :raises InvalidArgument: the call is not a text, or the params are not a map.
    """
    try:
        return _text.decode(message.items[2]), _fields.decode(message.items[3])
    except UNREADABLE as exc:
        raise InvalidArgument(f"the params do not match the call: {exc}") from None


def fields_of(raw: msgspec.Raw) -> Fields:
    """Return a map with undecoded values.

    :raises ProtocolError: it is not a map.
    """
    try:
        return _fields.decode(raw)
    except UNREADABLE as exc:
        raise ProtocolError(f"a node sent something other than a map: {exc}") from None


def is_part_of_answer(event: OpenFrame) -> bool:
    """Return whether an event has a part of an answer; others have a turn's place in the queue or
    the progress of its prompt.
    """
    return not fields_of(event.items[2]).keys() & _BEFORE_ANSWER


def values_of(raw: msgspec.Raw) -> dict[str, Any]:
    """Return a map, decoded.

    :raises ProtocolError: it is not a map.
    """
    try:
        return _map.decode(raw)
    except UNREADABLE as exc:
        raise ProtocolError(f"a node sent something other than a map: {exc}") from None


def decoded(fields: Fields, kind: type[T]) -> T:
    """Return all params of a call.

    :raises msgspec.ValidationError: they do not match the call.
    """
    return msgspec.convert({n: msgspec.msgpack.decode(raw) for n, raw in fields.items()}, kind)


def integer_in(fields: Fields, name: str) -> int:
    """Return an integer among params, which may be sent as a float.

    :raises InvalidArgument: it is missing, or has another type.
    """
    if name not in fields:
        raise InvalidArgument(f"the params lack the field `{name}`")
    try:
        number = as_whole(_number.decode(fields[name]))
    except UNREADABLE:
        number = None
    if not isinstance(number, int):
        raise InvalidArgument(f"`{name}` is not an int")
    return number


def number_in(fields: Fields, name: str) -> float:
    """Return a number among params, or 0 without one.

    :raises InvalidArgument: it has another type.
    """
    if name not in fields:
        return 0.0
    try:
        return _number.decode(fields[name])
    except UNREADABLE:
        raise InvalidArgument(f"`{name}` is not a number") from None


def integers_in(fields: Fields, name: str) -> list[int]:
    """Return a list of integers in a result; an empty one if it is missing."""
    return _integers.decode(fields[name]) if name in fields else []


def text_in(fields: Fields, name: str) -> str:
    """Return a text among params; empty if it is missing or nil.

    :raises InvalidArgument: it has another type.
    """
    raw = fields.get(name)
    if raw is None or bytes(raw) == b"\xc0":
        return ""
    try:
        return _text.decode(raw)
    except UNREADABLE:
        raise InvalidArgument(f"`{name}` is not a str") from None


def is_given(fields: Fields, name: str) -> bool:
    """Return whether a param is there and is not nil."""
    raw = fields.get(name)
    return raw is not None and bytes(raw) != b"\xc0"


def with_handle(fields: Fields, name: str, handle: int) -> Fields:
    """Return params with another handle."""
    return {**fields, name: raw_of(handle)}


def with_mapped_handles(raw: msgspec.Raw, names: frozenset[str], mapped: HandleMap) -> Fields:
    """Return a result or event with the handles in the fields *names* mapped."""
    fields = fields_of(raw)
    for name in names & fields.keys():
        if name == SESSION:
            session = fields_of(fields[name])
            within = frozenset(("context",)) if is_given(session, "context") else frozenset()
            fields[name] = raw_of(with_mapped_handles(fields[name], within, mapped))
        elif name == "contexts":
            fields[name] = raw_of([mapped(handle) for handle in _integers.decode(fields[name])])
        else:
            fields[name] = raw_of(mapped(_integer.decode(fields[name])))
    return fields


def raw_of(value: Any) -> msgspec.Raw:
    """Return a value in its encoded form."""
    return msgspec.Raw(_encode(value))


def request_frame(number: int, call: str, params: Mapping[str, Any]) -> bytes:
    """Return a request as a frame."""
    return pack_frame([int(Kind.REQUEST), number, call, params])


class _Part(msgspec.Struct):
    fd: int = -1
    buffer: int = 0


class _TensorParams(_Part):
    weights: _Part | None = None
    tensor: _Part | None = None
    inputs: list[tuple[str, _Part]] | None = None
    messages: msgspec.Raw = msgspec.Raw()


_params = msgspec.msgpack.Decoder(_TensorParams)
_messages = msgspec.msgpack.Decoder(list[dict[str, Any]])


def count_descriptors(params: msgspec.Raw) -> int:
    """Return how many parts of params are in descriptors.

    :raises InvalidArgument: the params have other types.
    """
    try:
        found = _params.decode(params)
        # Few messages have such a part, and decoding all messages takes long.
        has_parts = b"fd" in bytes(found.messages)
        media = passed_data(_messages.decode(found.messages)) if has_parts else ()
    except UNREADABLE as exc:
        raise InvalidArgument(f"the params do not match the call: {exc}") from None
    parts = (
        found,
        found.weights,
        found.tensor,
        *(tensor for _, tensor in found.inputs or ()),
        *media,
    )
    return sum(part is not None and part.fd >= 0 for part in parts)


_named_parts = msgspec.msgpack.Decoder(list[tuple[str, _Part]])
_places = msgspec.msgpack.Decoder(list[msgspec.Raw])


def names_buffers(fields: Fields) -> bool:
    """Return whether inputs are in buffers, or outputs are written to some.

    :raises InvalidArgument: the params have other types.
    """
    try:
        if is_given(fields, "outputs") and _places.decode(fields["outputs"]):
            return True
        inputs = _named_parts.decode(fields["inputs"]) if is_given(fields, "inputs") else []
    except UNREADABLE as exc:
        raise InvalidArgument(f"the params do not match the call: {exc}") from None
    return any(part.buffer for _, part in inputs)


def part_refused() -> UnsupportedOperation:
    """Return the error for an image or a sound in a descriptor, in a call without a context."""
    return UnsupportedOperation(
        "this fleet takes descriptors only in calls on a context",
        hint="send smaller images within the frame, or make the call at a node",
    )


def model_refused() -> UnsupportedOperation:
    """Return the error for a model in a descriptor."""
    return UnsupportedOperation(
        "this fleet loads no model from a descriptor: its file does not reach the nodes",
        hint="put the model into the models directory of each node, and load it by its name; or run"
        " a node on the entry's machine, and set its `descriptors` in fleet.toml",
    )
