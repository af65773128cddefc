"""Scenario of an image that arrives beside streams, alone, and again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from bench import media_servers, texts
from bench import streams as s
from bench.clients import MEDIA_MARKER, Client, Request, send_at, send_in_turn
from bench.media_servers import CASES, CAUSAL, NON_CAUSAL, Connect
from bench.pictures import png
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import INFERD, LLAMA_SERVER, Scenario, Side, Started, Work

STREAMS, STREAM_TOKENS = 3, 640
CTX_SIZE = 2048
TOKENS = 8
ARRIVES_S = 3.0
SETTLED_S = 0.5
"""The time of a stream from which its pace counts: its prompt has been computed."""
ALONE, AGAIN, ELSEWHERE, BESIDE = "alone", "again", "elsewhere", "beside"


def request_about(work: Work, image: bytes, label: str, before: str = "") -> Request:
    """Return a question about an image, with a text *before* it."""
    text = f"{work.mark} {before}Look at this picture: {MEDIA_MARKER} What does it show?"
    return Request(text, TOKENS, label, image=image)


def alone_requests(work: Work, image: bytes) -> list[Request]:
    """Return questions about one image, one after the other: the first one, the same again, and one
    with the image behind another text, so that only its embeddings are known.
    """
    return [
        request_about(work, image, ALONE),
        request_about(work, image, AGAIN),
        request_about(work, image, ELSEWHERE, "Something else. "),
    ]


def stream_requests(work: Work, rng: random.Random) -> list[Request]:
    """Return the streams' requests."""
    tokens = 200 if work.small else STREAM_TOKENS
    return [
        Request(f"{work.mark} {texts.paragraph(rng, name)}", tokens, name)
        for name in texts.names(rng, STREAMS)
    ]


async def _first_turn(connect: Connect, slot: int, request: Request) -> Stream:
    """Send a request as the first one of a conversation."""
    async with connect(slot) as client:
        [stream] = await send_in_turn(client, [request])
    return stream


async def drive(connect: Connect, work: Work) -> list[Stream]:
    """Send a question about an image alone; then start the streams, and send one about another."""
    rng = work.rng()
    images = [png(random.Random(f"{work.serial} {number}")) for number in range(2)]
    found = [await _first_turn(connect, STREAMS, r) for r in alone_requests(work, images[0])]
    requests = [*stream_requests(work, rng), request_about(work, images[1], BESIDE)]
    async with AsyncExitStack() as stack:
        clients: list[Client] = [
            await stack.enter_async_context(connect(slot)) for slot in range(len(requests))
        ]
        return found + await send_at(clients, requests, [*[0.0] * STREAMS, ARRIVES_S])


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the times to the first token of the answers about images, and the streams' worst gap
    and pace meanwhile. A server that reports no time of encoding does it between two steps.
    """
    s.check_complete(streams)
    named = {stream.label: stream for stream in streams}
    alone, again, elsewhere, beside = (named[n] for n in (ALONE, AGAIN, ELSEWHERE, BESIDE))
    others = [stream for stream in streams if stream not in (alone, again, elsewhere, beside)]
    early = [stream.label for stream in others if stream.ended_s < beside.first_s]
    assert not early, f"{early} ended before the image's first token: nothing to measure"
    gap_s = s.gap_worst_s(others, beside.requested_s, beside.first_s)
    settled_s = max(stream.first_s for stream in others) + SETTLED_S
    before = rate(others, settled_s, beside.requested_s)
    encoded_s = beside.requested_s + beside.encode_s if beside.encode_s else beside.first_s
    return {
        "gap_worst_s": gap_s,
        "gap_beyond_step_s": max(0.0, gap_s - elsewhere.ttft_s),
        "pace": rate(others, beside.requested_s, encoded_s) / before,
        "pace_to_first": rate(others, beside.requested_s, beside.first_s) / before,
        "alone_ttft_s": alone.ttft_s,
        "beside_ttft_s": beside.ttft_s,
        "elsewhere_ttft_s": elsewhere.ttft_s,
        "again_part": again.ttft_s / alone.ttft_s,
    }


def rate(streams: Sequence[Stream], begin_s: float, end_s: float) -> float:
    """Return the streams' pieces per second in a time."""
    count = sum(begin_s < at <= end_s for stream in streams for at in stream.arrivals_s)
    return count / (end_s - begin_s)


async def start(stack: AsyncExitStack) -> Started:
    """Start a llama-server for each projector, and a daemon with both."""
    slots, projectors = STREAMS + 1, media_servers.write_projectors()
    references = {
        case: await media_servers.start_reference(stack, projector, slots, CTX_SIZE)
        for case, projector in projectors.items()
    }
    own = await media_servers.start_daemon(stack, projectors, slots, CTX_SIZE)
    return Started({LLAMA_SERVER: _side(references), INFERD: _side(own)}, {})


def _side(connects: Mapping[int, Connect]) -> Side:
    async def side(work: Work) -> list[Stream]:
        return await drive(connects[work.case], work)

    return side


SCENARIO = Scenario(
    name="media",
    title="An image beside streams",
    about=f"""\
A question about an image of 512 × 512 pixels is answered alone, then again; then the image stands
behind another text, so that only its embeddings are known. After that {STREAMS} streams of
{STREAM_TOKENS} tokens run, and {ARRIVES_S:g} s later a question about another image arrives. Gap
and paces are those of the streams from its arrival, as parts of the pace before: one until it is
encoded, which llama-server does between two steps, the other until its first token. Case {CAUSAL}
is a projector with causal images, case {NON_CAUSAL} one of gemma3, whose images are computed in one
step that no stream shares; **gap beyond the step** is without the time of an image with known
embeddings. The projectors have the shape of real ones, about 100 M parameters, and random weights;
the model is gemma-3-270m. {STREAMS + 1} slots of {CTX_SIZE} tokens. Neither side drafts tokens, as
that would change the pace before.""",
    figures=(
        Figure("gap_worst_s", "streams: worst gap, s", 3),
        Figure("gap_beyond_step_s", "gap beyond the step, s", 3),
        Figure("pace", "pace: encoding", 2),
        Figure("pace_to_first", "pace: to first token", 2),
        Figure("alone_ttft_s", "image alone: first token, s"),
        Figure("beside_ttft_s", "image beside: first token, s"),
        Figure("elsewhere_ttft_s", "known embeddings: first token, s", 3),
        Figure("again_part", "again: part of the first time", 3),
    ),
    targets=(
        Target("gap_worst_s", LLAMA_SERVER, least=2.5, case=CAUSAL),
        Target("gap_worst_s", INFERD, most=0.25, case=CAUSAL),
        Target("gap_beyond_step_s", INFERD, most=0.1, case=NON_CAUSAL),
        *(Target("pace", INFERD, least=0.45, case=case) for case in CASES),
        *(Target("beside_ttft_s", INFERD, LLAMA_SERVER, most=2.3, case=case) for case in CASES),
        *(Target("alone_ttft_s", INFERD, LLAMA_SERVER, most=1.1, case=case) for case in CASES),
        *(Target("again_part", INFERD, most=0.1, case=case) for case in CASES),
    ),
    start=start,
    measure=measure,
    cases=CASES,
    case_heading="case",
    picture_case=CAUSAL,
)
