"""Text to tokens and back, between the engine's steps and never for long at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from ...backends import InferdError, Model
from ...backends.errors import OutOfMemory, PromptTooLong
from .. import messages as m
from ..recording.recorder import Doing, Recorder

TOKENIZE_S = 0.02
"""Time for tokenizing per step: 1 M characters take 0.3–0.6 s, which no stream should wait for."""

Request = m.Tokenize | m.Detokenize | m.ChatPrompt


def rest_of(text: str, said: str, answer: str = "") -> str | None:
    """Return what *text* adds to *said*, which ends with *answer*; None if it does not begin so.

    White space around the answer does not count: templates trim it, and what was drawn stands.
    """
    if not said:
        return None
    before = said.removesuffix(answer)
    for answered in (said[len(before) :], answer.rstrip(), answer.lstrip(), answer.strip()):
        if text.startswith(before + answered):
            return text[len(before) + len(answered) :]
    return None


class TokenizeQueue:
    """Answers tokenizing requests in their order; owned by the engine.

    `coming` counts the prompts that were told and whose tasks follow at once.
    """

    def __init__(self, model: Model, recorder: Recorder):
        self._model = model
        self._recorder = recorder
        self.coming = 0
        self._requests: deque[Request] = deque()
        self._bytes_max = model.info.ctx_size * model.info.token_bytes_max

    @property
    def busy(self) -> bool:
        """Whether requests are left."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests.append(request)

    def work(self) -> Iterator[m.Report]:
        """Answer requests until the time of one step is used up; at least one."""
        end = time.monotonic() + TOKENIZE_S
        while self._requests:
            request = self._requests.popleft()
            self._recorder.note(Doing.PROMPT, [request.id])
            try:
                answer = self._answer(request)
                if not isinstance(request, m.Detokenize) and request.turn:
                    self.coming += 1
                yield m.Answer(request.id, answer)
            except InferdError as exc:
                yield m.Refused(request.id, exc.to_wire())
            except MemoryError:
                yield m.Refused(request.id, _no_memory().to_wire())
            if time.monotonic() >= end:
                return

    def _answer(self, request: Request) -> object:
        if isinstance(request, m.Tokenize):
            return m.pack_tokens(self._tokenize(request.text, request.special, request.bos))
        if isinstance(request, m.Detokenize):
            return b"".join(map(self._model.piece, m.unpack_tokens(request.tokens)))
        return self._chat(request)

    def _tokenize(self, text: bytes, special: bool, bos: bool) -> list[int]:
        if len(text) > self._bytes_max:
            raise PromptTooLong(
                f"the prompt has {len(text)} bytes; a context of {self._model.info.ctx_size}"
                f" tokens takes {self._bytes_max} at the very most",
                data={"prompt_bytes": len(text), "prompt_bytes_max": self._bytes_max},
            )
        return self._model.tokenize(text, special=special, bos=bos)

    def _chat(self, request: m.ChatPrompt) -> tuple[str, bytes, bool]:
        text = self._model.render(request.messages, request.rendering)
        rest = rest_of(text, request.said, request.answer)
        if rest is not None:
            return text, m.pack_tokens(self._tokenize(rest.encode(), True, False)), True
        return text, m.pack_tokens(self._tokenize(text.encode(), True, True)), False


def _no_memory() -> OutOfMemory:
    """Return the error of a text that is too much for now: another time it may not be."""
    return OutOfMemory(
        "there is too little memory to make tokens of the text",
        hint="let other programs end or models be unloaded and try again, or send less text",
    )
