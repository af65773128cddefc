"""The checks of a model through a real daemon: sessions, swaps, adapters and a restart.

A reused state is right if the answer is the one that a session without reuse gives. The caches are
in F32 and flash attention is off, so that a greedy answer does not depend on the shape of batches.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from inferd import Client, Reply, Session
from inferd.backends.llama.loading.gguf_check import read_gguf
from tests.architectures.checks import adapted_shapes
from tests.tiny_lora import matrices, write_lora

__all__ = ("AFTER_A_RESTART", "CONFIG", "SERVED", "Served")

SLOTS, ANSWER_TOKENS = 3, 8
CONFIG = f"""
[daemon]
cores = 1
tuning = false
[defaults]
threads = 1
slots = {SLOTS}
ctx-size = 512
flash-attn = "off"
cache-type-k = "f32"
cache-type-v = "f32"
"""
OPTIONS = {"temp": 0, "n-predict": ANSWER_TOKENS, "ignore-eos": True, "n-probs": 1}
SMALL = {"ctx-size": 160, "ctx-shift": True, "n-predict": 200}
TEXT_SIZE = 150
"""Characters of a question, of which five are a token of the models' vocabulary."""
LOGPROB_NOISE_MAX = 1e-3
"""Difference in the logprob of a token by the shape of batches."""


def question(number: int) -> str:
    return "".join(random.Random(number).choices(string.ascii_lowercase, k=TEXT_SIZE))


def is_same(found: Reply, expected: Reply) -> bool:
    """Return whether two answers have the same tokens with nearly the same logprobs."""
    pairs = zip(logprobs(found), logprobs(expected), strict=True)
    return all(a == b and abs(x - y) < LOGPROB_NOISE_MAX for (a, x), (b, y) in pairs)


def logprobs(reply: Reply) -> list[tuple[int, float]]:
    return [(each["id"], each["logprob"]) for each in reply.metadata["completion_probabilities"]]


def assert_same(found: Reply, expected: Reply) -> None:
    assert is_same(found, expected), f"{logprobs(found)} is not {logprobs(expected)}"


class Served:
    """A model that a daemon serves by the name of its file, in *folder*, and another one."""

    def __init__(self, client: Client, name: str, other: str, folder: Path):
        self.client, self.name, self.other, self.folder = client, name, other, folder
        self._anew: dict[tuple[int, ...], Reply] = {}

    def anew(self, *numbers: int) -> Reply:
        """Return the answer to the last one of these questions, each computed without reuse."""
        if numbers not in self._anew:
            with self.session(options={"cache-prompt": False}) as session:
                self._anew[numbers] = [session.chat(question(n)) for n in numbers][-1]
        return self._anew[numbers]

    def session(self, **settings: Any) -> Session:
        """Return a session on raw text: most of the vocabularies do not read what they write."""
        options = OPTIONS | settings.pop("options", {})
        return self.client.session(self.name, raw=True, options=options, **settings)

    def ask(self, number: int, **options: Any) -> Reply:
        """Return the answer to a question in a session of its own."""
        with self.session(options=options) as session:
            return session.chat(question(number))

    def show(self) -> dict[str, Any]:
        return dict(self.client.show(self.name))

    @property
    def can_shift(self) -> bool:
        """Whether the loaded model can shift its context."""
        return bool((self.show()["info"] or {})["can_shift"])


def show(served: Served) -> None:
    """A model is described by its file before its load, and by llama.cpp once it is loaded."""
    found = served.show()
    assert found["file_error"] is None and found["file_info"]["architecture"]
    with served.session():
        loaded = served.show()
    assert loaded["memory"]["total"] > loaded["memory"]["weights"] > 0
    assert loaded["info"]["ctx_size"] > 0


def continue_a_session(served: Served) -> None:
    """A session's later turns reuse the KV state of the earlier ones. It is kept for a restart."""
    with served.session(session_id=served.name) as session:
        first, second = session.chat(question(1)), session.chat(question(2))
    assert_same(first, served.anew(1))
    assert_same(second, served.anew(1, 2))
    assert first.metadata["output_tokens"] == ANSWER_TOKENS
    assert second.metadata["cached_tokens"] >= first.metadata["input_tokens"]


def rewind_a_session(served: Served) -> None:
    """A turn is removed, and another one follows the turns before it."""
    with served.session() as session:
        session.chat(question(1))
        second = session.chat(question(2))
        session.rewind(1)
        assert_same(session.chat(question(3)), served.anew(1, 3))
        session.rewind(1)
        assert_same(session.chat(question(2)), second)


def fork_a_session(served: Served) -> None:
    """Branches continue differently from the same turns."""
    with served.session() as session:
        session.chat(question(1))
        branches = session.fork(2)
        for number, branch in enumerate(branches, 3):
            assert_same(branch.chat(question(number)), served.anew(1, number))
        assert_same(session.chat(question(2)), served.anew(1, 2))


def serve_sessions_at_once(served: Served) -> None:
    """Sessions that compute together get the answers that each gets alone."""
    numbers = range(5, 5 + SLOTS)
    with ThreadPoolExecutor(SLOTS) as threads:
        found = list(threads.map(served.ask, numbers))
    for number, reply in zip(numbers, found, strict=True):
        assert_same(reply, served.anew(number))


def serve_more_sessions_than_slots(served: Served) -> None:
    """The states of sessions without a slot are kept in memory."""
    numbers = range(10, 10 + SLOTS + 2)
    sessions = [served.session().open() for _ in numbers]
    try:
        first = [s.chat(question(n)) for s, n in zip(sessions, numbers, strict=True)]
        second = [s.chat(question(2)) for s in sessions]
    finally:
        for session in sessions:
            session.close()
    for before, reply in zip(first, second, strict=True):
        assert reply.metadata["cached_tokens"] >= before.metadata["input_tokens"]
    assert_same(second[0], served.anew(10, 2))


def answer_past_the_context(served: Served) -> None:
    """A long answer shifts the context, or ends when it is full."""
    with served.session(options=SMALL) as session:
        metadata = session.chat(question(1)).metadata
        can_shift = served.can_shift
    assert metadata["stop_reason"] == ("length" if can_shift else "context_full")
    assert (metadata["shifts"] > 0) == can_shift


def embed_texts(served: Served) -> None:
    """Several texts get the vectors that each gets alone."""
    texts = [question(number) for number in range(20, 24)]
    found = served.client.embed(served.name, texts)
    for text, vector in zip(texts, found, strict=True):
        [alone] = served.client.embed(served.name, text)
        assert max(abs(a - b) for a, b in zip(vector, alone, strict=True)) < 1e-3


def choose_an_adapter(served: Served) -> None:
    """An adapter is added to the loaded model, chosen by a turn, and removed."""
    with (served.folder / f"{served.name}.gguf").open("rb") as file:
        header = read_gguf(file.fileno(), served.name)
    path = served.folder / f"{served.name}-style.lora"
    architecture = str(header.values["general.architecture"])
    tensors = matrices(adapted_shapes(header), strength=3.0)
    write_lora(path, tensors, architecture=architecture)
    plain = served.anew(1)
    served.client.add_adapter(served.name, "style", path.name)
    adapted = served.ask(1, lora={"style": 1.0})
    assert adapted.metadata["lora"] == {"style": 1.0}
    assert not is_same(adapted, plain), "the adapter has no effect"
    assert_same(served.ask(1), plain)
    served.client.remove_adapter(served.name, "style")


def swap_the_model(served: Served) -> None:
    """A session continues on another architecture, and on its own again."""
    client = served.client
    with served.session() as session:
        first = session.chat(question(1))
        client.swap(served.name, served.other)
        other = session.chat(question(2))
        client.swap(served.name, served.name)
        again = session.chat(question(3))
    assert other.metadata["fingerprint"] != first.metadata["fingerprint"]
    assert again.metadata["fingerprint"] == first.metadata["fingerprint"]
    replies = (first, other, again)
    assert all(reply.metadata["output_tokens"] == ANSWER_TOKENS for reply in replies)


def continue_after_a_restart(served: Served) -> None:
    """The session that was kept continues from its KV state on disk."""
    with served.session(session_id=served.name) as session:
        reply = session.chat(question(3))
    assert_same(reply, served.anew(1, 2, 3))
    assert reply.metadata["cached_tokens"] > TEXT_SIZE // 5


SERVED: dict[str, Callable[[Served], None]] = {
    "show": show,
    "session": continue_a_session,
    "session rewind": rewind_a_session,
    "session fork": fork_a_session,
    "sessions at once": serve_sessions_at_once,
    "more sessions than slots": serve_more_sessions_than_slots,
    "long answer": answer_past_the_context,
    "embed": embed_texts,
    "lora": choose_an_adapter,
    "swap": swap_the_model,
}
"""The checks by their names on the page."""
AFTER_A_RESTART: dict[str, Callable[[Served], None]] = {"daemon restart": continue_after_a_restart}
"""Those that the daemon's next process has to pass."""
