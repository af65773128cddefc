"""Cases from the vectors: frames with mistakes, each with its expected outcome."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..page import VECTORS, binary
from ..peer import HELLO, Failure, SentRequest, check
from ..suite import Server, add_case, expect

REQUEST_ID = 1
"""The id of the request in a vector whose outcome is a reply or an error."""


def check_vector(vector: dict[str, Any], server: Server) -> None:
    """Send a vector's frames, and check the outcome that it names."""
    connection = server.connect(raw=True)
    connection.read_hello()
    if vector["hello"]:
        connection.send([HELLO, {"protocol": [1, 0]}])
    connection.requests[REQUEST_ID] = SentRequest()
    for hex_frame in vector["frames"]:
        connection.send_bytes(bytes.fromhex(hex_frame))
    match vector["outcome"]:
        case {"goodbye": name}:
            expect(connection.goodbye(), name)
        case {"error": name}:
            expect(connection.refused(REQUEST_ID), name)
            connection.call("queue")  # the connection goes on
        case {"reply": result}:
            reply = connection.wait(REQUEST_ID)
            found = {key: reply.get(key) for key in result}
            check(found == binary(result), f"the reply is {reply!r:.200}")
        case other:
            raise Failure(f"the vectors have an outcome {other!r} that this suite does not know")


for _vector in VECTORS["malformed"]:
    add_case(
        "malformed." + _vector["name"].replace(" ", "_"),
        "Messages",
        f"Frames with a mistake have the outcome of the vectors: {_vector['name']}.",
        partial(check_vector, _vector),
    )
