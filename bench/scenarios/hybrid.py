"""Scenario of a chat on a hybrid model: next turns, a repeated one, and an edited older one."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench import daemon, gateway, llama_server, texts
from bench import streams as s
from bench.clients import HttpClient
from bench.hybrid_model import write_hybrid
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import GATEWAY, LLAMA_SERVER, Scenario, Side, Started, Work

SLOTS, CTX_SIZE = 4, 4096
TURNS, EDITED_TURN = 6, 3
QUESTION_WORDS, ANSWER_WORDS = 200, 60
NEXT, AGAIN, EDITED, BACK = "next turn", "again", "edited turn", "back"

Messages = list[dict[str, str]]


class ChatClient(HttpClient):
    """Sends whole chats to `/v1/chat/completions`, as stateless programs do, for one token each."""

    def __init__(self, port: int, model: str, key: str = ""):
        headers = "Content-Type: application/json\r\n"
        super().__init__(
            port, "/v1/chat/completions", headers + f"Authorization: Bearer {key}\r\n" * bool(key)
        )
        self._model = model

    async def send_chat(self, messages: Messages, label: str) -> Stream:
        """Send a chat; return its turn, whose only piece has arrived with the response."""
        body = {"model": self._model, "messages": messages, "max_tokens": 1, "temperature": 0}
        requested_s = time.perf_counter()
        reader = await self.post(body)
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")]
        answer = json.loads(await reader.readexactly(int(lengths[0].split(b":")[1])))
        arrived_s = time.perf_counter()
        self.close()
        usage: dict[str, Any] = answer.get("usage", {})
        return Stream(
            requested_s=requested_s,
            arrivals_s=(arrived_s,),
            tokens=int(usage.get("completion_tokens", 0)),
            tokens_requested=1,
            label=label,
            input_tokens=int(usage.get("prompt_tokens", 0)),
            cached_tokens=int(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)),
            error="" if usage else str(answer.get("error", "no answer")),
        )


async def drive(client: ChatClient, work: Work) -> list[Stream]:
    """Hold a chat, request its last answer again, edit an older question, and go on as before."""
    rng = work.rng()
    words = (20, 6) if work.small else (QUESTION_WORDS, ANSWER_WORDS)
    chat: Messages = [{"role": "system", "content": f"{work.mark} is the number of this chat."}]
    streams = []
    for _ in range(TURNS):
        chat.append(_user(texts.story(rng, words[0])))
        streams.append(await client.send_chat(chat, NEXT))
        chat.append({"role": "assistant", "content": texts.story(rng, words[1])})
    edited = [*chat[: 2 * EDITED_TURN - 1], _user(texts.story(rng, words[0]))]
    back = [*chat, _user(texts.story(rng, words[0]))]
    for messages, label in ((chat[:-1], AGAIN), (edited, EDITED), (back, BACK)):
        streams.append(await client.send_chat(messages, label))
    return streams


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the times until an answer begins, and the tokens that had to be computed for it."""
    s.check_complete(streams)
    first, *others = streams
    s.check_cold([first])
    by_label = s.by_label(others)
    found = {}
    for label, name in ((NEXT, "next"), (AGAIN, "again"), (EDITED, "edited"), (BACK, "back")):
        turns = by_label[label]
        found[f"{name}_s"] = s.ttft_median_s(turns)
        found[f"{name}_tokens"] = max(t.input_tokens - t.cached_tokens for t in turns)
    return found


@asynccontextmanager
async def _model_file() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="inferd-bench-") as folder:
        yield write_hybrid(Path(folder))


async def _side(client: ChatClient, work: Work) -> list[Stream]:
    return await drive(client, work)


async def start(stack: AsyncExitStack) -> Started:
    """Start llama-server with its default caches, and a daemon with a gateway before it."""
    file = await stack.enter_async_context(_model_file())
    reference = await stack.enter_async_context(llama_server.running(SLOTS, CTX_SIZE, model=file))
    text = daemon.configuration(SLOTS, CTX_SIZE, {"models-dir": str(file.parent)})
    server = await stack.enter_async_context(daemon.running(text))
    await server.keep_loaded(stack, file.stem)
    http = await stack.enter_async_context(gateway.running(server))
    sides: dict[str, Side] = {
        LLAMA_SERVER: partial(_side, ChatClient(reference.port, file.stem)),
        GATEWAY: partial(_side, ChatClient(http.port, file.stem, http.key)),
    }
    return Started(sides, {"model": f"{file.stem}, random weights"})


SCENARIO = Scenario(
    name="hybrid",
    title="A chat on a hybrid model",
    about=f"""\
The model has the shape of LFM2-350M: of its 16 layers ten are recurrent, so that a computed prompt
can be used again only from checkpoints. Its weights are random, and its answers are one token long.
A program holds a chat of {TURNS} turns, questions of {QUESTION_WORDS} words and given answers of
{ANSWER_WORDS}, and sends the whole chat each time. Then it requests the last answer again, sends
another question in place of number {EDITED_TURN}, and returns to the whole chat with a new
question. The times are those of whole requests. The counts are the tokens computed, in the worst
of these requests. {SLOTS} slots of {CTX_SIZE} tokens.""",
    figures=(
        Figure("next_s", "next turn, median, s", 3),
        Figure("next_tokens", "tokens", 0),
        Figure("again_s", "last answer again, s", 3),
        Figure("again_tokens", "tokens", 0),
        Figure("edited_s", "edited turn, s", 3),
        Figure("edited_tokens", "tokens", 0),
        Figure("back_s", "back, s", 3),
        Figure("back_tokens", "tokens", 0),
    ),
    targets=(
        Target("next_s", GATEWAY, LLAMA_SERVER, most=1.1),
        Target("again_s", GATEWAY, LLAMA_SERVER, most=1.0),
        Target("edited_s", GATEWAY, LLAMA_SERVER, most=1.0),
        Target("back_s", GATEWAY, LLAMA_SERVER, most=1.0),
    ),
    start=start,
    measure=measure,
    pictures=(),
)
