"""Malformed and unusual frames, and their outcome on the other side."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from inferd.backends.errors import Busy, PermissionDenied, QuotaExceeded
from inferd.wire.frames import FRAME_BYTES_MAX, NESTING_MAX, REPLY_BYTES_MAX, pack_frame

from .exchange import INSTANCE, daemon_hello

__all__ = ("ignored", "malformed", "malformed_daemon", "refused")

TOO_COLD = '{"temp":-1,"strict":true}'


def framed(body: bytes) -> bytes:
    """Return *body* with its length prefix."""
    return struct.pack("<I", len(body)) + body


def case(
    name: str, frames: list[Any], outcome: dict[str, Any], *, hello: bool = True
) -> dict[str, Any]:
    """Return one malformed case; its frames are messages or raw bytes."""
    raw = [f if isinstance(f, bytes) else pack_frame(f) for f in frames]
    return {"name": name, "hello": hello, "frames": [f.hex() for f in raw], "outcome": outcome}


def nested(depth: int) -> bytes:
    """Return a request with a nesting of *depth*."""
    arrays = b"\x91" * (depth - 2)
    return framed(b"\x94\x01\x01\xa5queue\x81\xa1x" + arrays + b"\x00")


def error(name: str) -> dict[str, Any]:
    """Return the outcome of a request that is refused."""
    return {"error": name}


def goodbye(name: str) -> dict[str, Any]:
    """Return the outcome of a connection that is ended."""
    return {"goodbye": name}


def malformed() -> list[dict[str, Any]]:
    """Return cases that end the connection."""
    protocol, queue = goodbye("ProtocolError"), [1, 1, "queue", {}]
    return [
        case(
            "a frame longer than the limit",
            [struct.pack("<I", FRAME_BYTES_MAX + 1)],
            goodbye("TooLarge"),
        ),
        case("an empty frame", [framed(b"")], protocol),
        case("not an array", [framed(b"\x81\xa1a\x01")], protocol),
        case("an array without items", [framed(b"\x90")], protocol),
        case("an array cut short", [framed(b"\x94\x01\x01\xa5que")], protocol),
        case("bytes after the array", [framed(b"\x94\x01\x01\xa5queue\x80\x00")], protocol),
        case("a kind that is not an integer", [["1", 1, "queue", {}]], protocol),
        case("an unknown kind", [[9, 1]], protocol),
        case("a kind that only the daemon sends", [[2, 1, {}]], protocol),
        case("a second hello", [[0, {"protocol": [1, 0]}]], protocol),
        case("a request without params", [[1, 1, "queue"]], protocol),
        case("an id that is not an integer", [[1, "one", "queue", {}]], protocol),
        case("credit for an id that is not an integer", [[5, "one", 1]], protocol),
        case("no hello first", [queue], protocol, hello=False),
        case("a hello without a version", [[0, {"software": "x"}]], protocol, hello=False),
        case(
            "another major version",
            [[0, {"protocol": [2, 0]}]],
            goodbye("VersionMismatch"),
            hello=False,
        ),
    ]


def refused() -> list[dict[str, Any]]:
    """Return cases in which a request is refused and the connection continues."""
    argument = error("InvalidArgument")
    missing = (INSTANCE << 32) - 1
    strange = framed(
        b"\x94\x01\x01\xabset_options\x82\xa7context\x01\xa7options\x81\xa1a\x81\x81\x01\x02\x03"
    )
    return [
        case("nested one too deep", [nested(NESTING_MAX + 1)], argument),
        case("an unknown call", [[1, 1, "make_tea", {}]], error("UnsupportedOperation")),
        case("a call that is not a text", [[1, 1, 7, {}]], argument),
        case("params that are not a map", [[1, 1, "queue", []]], argument),
        case("a field missing", [[1, 1, "show", {}]], argument),
        case("a field of the wrong type", [[1, 1, "show", {"name": 7}]], argument),
        case(
            "a text that is not UTF-8",
            [framed(b"\x94\x01\x01\xa4show\x81\xa4name\xa2\xff\xfe")],
            argument,
        ),
        case("a map with a map for a key", [strange], argument),
        case("a handle that never was", [[1, 1, "compute", {"context": missing}]], argument),
        case("a graph that never was", [[1, 1, "unload", {"graph": missing}]], argument),
        case("a descriptor that was not passed", [[1, 1, "load", {"fd": 0}]], argument),
        case("cancel without a target", [[1, 1, "cancel", {}]], argument),
        case("delete_session without a target", [[1, 1, "delete_session", {}]], argument),
        case("a way back without a goal", [[1, 1, "rewind", {"context": missing}]], argument),
        case("no builder", [[1, 1, "load", {}]], argument),
        case(
            "a builder too long for a name",
            [[1, 1, "load", {"builders": [b"G" * 4096]}]],
            error("TooLarge"),
        ),
        case(
            "an encoding that is not run here",
            [[1, 1, "load", {"builders": [b"echo"], "encoding": "onnx"}]],
            error("InvalidEncoding"),
        ),
        case(
            "an encoding by its number",
            [[1, 1, "load", {"builders": [b"echo"], "encoding": 0}]],
            error("InvalidEncoding"),
        ),
        case(
            "a target that is not there",
            [[1, 1, "load", {"builders": [b"echo"], "target": "tpu"}]],
            error("UnsupportedOperation"),
        ),
        case(
            "an unknown model", [[1, 1, "load_by_name", {"name": "nobody"}]], error("ModelNotFound")
        ),
        case(
            "a configuration that is not JSON",
            [[1, 1, "load_by_name_with_config", {"name": "echo", "config": "{"}]],
            error("InvalidEncoding"),
        ),
        case(
            "a parameter out of its range",
            [[1, 1, "load_by_name_with_config", {"name": "echo", "config": TOO_COLD}]],
            argument,
        ),
    ]


def ignored() -> list[dict[str, Any]]:
    """Return cases that are ignored."""
    nothing: dict[str, Any] = {"reply": {"tasks": []}}
    queue = [1, 1, "queue", {}]
    return [
        case("an unknown field is ignored", [[1, 1, "queue", {"colour": "green"}]], nothing),
        case("more items than a request has are ignored", [[1, 1, "queue", {}, "more"]], nothing),
        case("credit for a request that is over is ignored", [[5, 77, 1], queue], nothing),
        case(
            "another minor version is welcome",
            [[0, {"protocol": [1, 9], "new": True}], queue],
            nothing,
            hello=False,
        ),
    ]


def malformed_daemon() -> list[dict[str, Any]]:
    """Return frames that a client must handle, of newer, refusing and broken daemons."""
    reply = [2, 1, {"tasks": []}]
    full = Busy("256 connections are open", data={"retry_after_s": 1.0}).to_wire()
    new = {"name": "OutOfCheese", "number": 250, "message": "+++", "hint": "", "data": {}}
    spent = QuotaExceeded(
        "you have used 70 tokens; the limit is 60 a minute",
        data={"bound": "access.r.tokens-per-minute", "retry_after_s": 11.0},
    ).to_wire()
    nothing = PermissionDenied("user 1000 may do nothing here").to_wire()
    hello = msgspec.to_builtins(daemon_hello())
    return [
        case("a goodbye instead of the reply", [[6, full]], error("Busy")),
        case("an error of a name that is not known", [[3, 1, new]], error("Unknown")),
        case("a bound of the user's own", [[3, 1, spent]], error("QuotaExceeded")),
        case(
            "a frame longer than the limit",
            [struct.pack("<I", REPLY_BYTES_MAX + 1)],
            error("TooLarge"),
        ),
        case("not an array", [framed(b"\x81\xa1a\x01")], error("ProtocolError")),
        case("a reply that is not a map", [[2, 1, 7]], error("ProtocolError")),
        case("an unknown kind is ignored", [[9, "news"], reply], {"reply": {"tasks": []}}),
        case(
            "unknown fields are ignored",
            [[2, 1, {"tasks": [], "more": 1}]],
            {"reply": {"tasks": []}},
        ),
        case(
            "an event of a request that is over is ignored",
            [[4, 77, {}], reply],
            {"reply": {"tasks": []}},
        ),
        case(
            "another major version",
            [[0, hello | {"protocol": [2, 0]}]],
            error("VersionMismatch"),
            hello=False,
        ),
        case("a full daemon", [[0, hello], [6, full]], error("Busy"), hello=False),
        case("a stranger", [[0, hello], [6, nothing]], error("PermissionDenied"), hello=False),
    ]
