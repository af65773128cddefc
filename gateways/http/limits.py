"""Bounds of the gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ...backends.errors import InvalidArgument
from ...wire.frames import FRAME_BYTES_MAX

REQUESTS_PER_CONNECTION_MAX = 240
"""Requests of one connection to the daemon, which allows 256; the others are for cancelling."""
WAITING_PAUSE_S = 10.0
"""The pause between two comments while a turn waits and its place does not change."""
CHECK_AFTER_S = 0.1
"""The time after which a turn without a session is checked by the gateway, because its model is
being loaded. A loaded model's session opens in less.
"""
PLACE_PAUSE_S = 0.5
"""The least pause between two reports of a stream's place in the queue, which changes often beside
many streams.
"""
PLACES_PER_S_MAX = 50
"""The reports of all streams together in a second. Beyond as many streams as this allows, the pause
grows with their number, up to `WAITING_PAUSE_S`, because reports take the processor's time from
those that compute.
"""
HEADER_BYTES_MAX = 64 << 10
BODY_BYTES_MAX = FRAME_BYTES_MAX
"""The most bytes of a request, on paths that the next table does not have. The daemon gets the
request in one frame.
"""
TEXTS_BYTES_MAX = 8 << 20
MEDIA_BYTES_MAX = 64 << 20
TENSORS_BYTES_MAX = 64 << 20
"""The bytes of a request with tensors, and those of the tensors that it names in shared memory."""
TENSOR_PATHS = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer")
BODY_BYTES_MAX_BY_PATH: Mapping[str, int] = {
    **dict.fromkeys(
        (
            *("/v1/completions", "/v1/embeddings", "/api/embed"),
            *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"),
        ),
        TEXTS_BYTES_MAX,
    ),
    **dict.fromkeys(
        (
            *("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/apply-template"),
            *("/v1/responses", "/v1/responses/input_tokens"),
            *("/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate"),
        ),
        MEDIA_BYTES_MAX,
    ),
}
"""The same on paths with lists of texts, of which the daemon gets several frames, and on paths with
images and sounds, which it gets beside the frame.
"""
BODIES_BYTES_MAX = 256 << 20
"""The bytes of all requests at once that are longer than `BODY_BYTES_MAX`. Further ones wait."""
VALUES_MAX = 200_000
"""The commas and brackets of such a request. They bound its values, each of which takes time on the
event loop, and many times its bytes of memory.
"""
DROPPED_BYTES_MAX = 128 << 20
"""The most that is read and dropped of a request after the response to it."""
CLOSE_S_MAX = 5.0
RESTART_S_MAX = 30.0
"""The time for which a request waits for a daemon that restarts."""


CLIENTS_WITHOUT_REQUEST = 424
"""By default, connections of clients beyond the requests at once."""
FILES_RESERVED = 128
"""Open files besides the connections of clients: the program's own, and its connections to the
daemon.
"""


def clients_max_of(
    wanted: int | None, requests_max: int, files_max: int, regions_max: int = 0
) -> int:
    """Return the most connections of clients: those that are *wanted*, or by default more than
    requests, as far as the limit of open files allows beside those of regions of shared memory.

    :raises InvalidArgument: the limit does not allow those that are wanted.
    """
    reserved = FILES_RESERVED + regions_max
    allowed = max(1, files_max - reserved)
    if wanted is None:
        return min(requests_max + CLIENTS_WITHOUT_REQUEST, allowed)
    if wanted > allowed:
        raise InvalidArgument(
            f"{wanted} connections of clients need {wanted + reserved} open files; the limit"
            f" is {files_max}",
            hint="raise the limit (ulimit -n, or LimitNOFILE of systemd), or choose a lower"
            " --clients-max",
        )
    return wanted


class UnknownFields(StrEnum):
    """The treatment of requests with fields that their path does not know."""

    IGNORE = "ignore"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds for all callers together, and for each request."""

    requests_max: int = 600
    """Requests at once; a further one gets 503."""
    streams_max: int = 256
    """Streams of events at once; a further one gets 503."""
    clients_max: int = 1024
    """Connections of clients; `ClientPlaces` divides them."""
    connections_max: int = 16
    """Connections to the daemon."""
    body_bytes_max: int = max(BODY_BYTES_MAX, *BODY_BYTES_MAX_BY_PATH.values())
    """The most bytes of a request on any path; see `body_bytes_max_of`."""
    bodies_bytes_max: int = BODIES_BYTES_MAX
    receive_s_max: float = 30.0
    """The time in which a request must arrive, and a client must read a part of its answer."""
    queue_s_max: float = 300.0
    """The time that a request waits for a session's place and for its turn."""
    turn_s_max: float = 600.0
    """The time of a request from its arrival to the end of its answer."""
    hold_s: float = 0.02
    """The time that a stream's headers are held, so that an early error has its own status."""
    stop_s_max: float = 10.0
    """The time that requests have to end after SIGTERM."""

    def body_bytes_max_of(self, path: str) -> int:
        """Return the most bytes of a request's body on a path."""
        return min(self.body_bytes_max, _path_bytes_max(path))

    @staticmethod
    def allows_media(path: str) -> bool:
        """Return whether the requests of a path may have images and sounds."""
        return BODY_BYTES_MAX_BY_PATH.get(path) == MEDIA_BYTES_MAX

    def lowers_body_bytes_of(self, path: str) -> bool:
        """Return whether a path would allow longer bodies with a larger `body_bytes_max`."""
        return self.body_bytes_max < _path_bytes_max(path)


def _path_bytes_max(path: str) -> int:
    if TENSOR_PATHS.fullmatch(path):
        return TENSORS_BYTES_MAX
    return BODY_BYTES_MAX_BY_PATH.get(path, BODY_BYTES_MAX)
