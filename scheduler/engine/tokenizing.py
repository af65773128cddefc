"""Requests to tokenize and detokenize, answered between the engine's steps in bounded time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from ...backends import InferdError, Model
from ...backends.errors import OutOfMemory, PromptTooLong
from .. import messages as m
from ..recording.recorder import ActivityKind, Recorder

TOKENIZE_S = 0.02
"""Time for tokenizing per step: 1 M characters take 0.3–0.6 s, which no stream should wait for."""

Request = m.Tokenize | m.Detokenize | m.ChatPrompt


def appended_text(text: str, history: str, answer: str = "") -> str | None:
    """Return the part of *text* after *history*, which ends with *answer*; None if *text* does not
    begin with it. White space around the answer may differ: templates trim it.
    """
    if not history:
        return None
    before = history.removesuffix(answer)
    for answered in (history[len(before) :], answer.rstrip(), answer.lstrip(), answer.strip()):
        if text.startswith(before + answered):
            return text[len(before) + len(answered) :]
    return None


class TokenizeQueue:
    """Answers tokenizing requests in their order; owned by the engine.

    `tasks_expected` counts the tokenized prompts whose tasks follow at once.
    """

    def __init__(self, model: Model, recorder: Recorder):
        self._model, self._recorder = model, recorder
        self.tasks_expected = 0
        self.requests: deque[Request] = deque()
        self._bytes_max = model.info.ctx_size * model.info.token_bytes_max

    def answer_requests(self) -> Iterator[m.Report]:
        """Answer at least one request, and more until the time of one step is used up."""
        end = time.monotonic() + TOKENIZE_S
        while self.requests:
            request = self.requests.popleft()
            self._recorder.record_activity(ActivityKind.PROMPT, [request.id])
            try:
                answer = self._answer(request)
                if not isinstance(request, m.Detokenize) and request.turn:
                    self.tasks_expected += 1
                yield m.CommandResult(request.id, answer)
            except InferdError as exc:
                yield m.Refused(request.id, exc.to_wire())
            except MemoryError:  # another time there may be enough
                error = OutOfMemory(
                    "there is too little memory to tokenize the text",
                    hint="unload models or end other programs and try again, or send less text",
                )
                yield m.Refused(request.id, error.to_wire())
            if time.monotonic() >= end:
                return

    def _answer(self, request: Request) -> object:
        if isinstance(request, m.Tokenize):
            return m.pack_tokens(self._tokenize(request.text, request.special, request.bos))
        if isinstance(request, m.Detokenize):
            return b"".join(map(self._model.piece, m.unpack_tokens(request.tokens)))
        text = self._model.render(request.messages, request.rendering)
        appended = appended_text(text, request.history, request.answer)
        if appended is not None:
            return text, m.pack_tokens(self._tokenize(appended.encode(), True, False)), True
        return text, m.pack_tokens(self._tokenize(text.encode(), True, True)), False

    def _tokenize(self, text: bytes, special: bool, bos: bool) -> list[int]:
        if len(text) > self._bytes_max:
            raise PromptTooLong(
                f"the prompt has {len(text)} bytes; a context of {self._model.info.ctx_size}"
                f" tokens holds at most {self._bytes_max}",
                data={"prompt_bytes": len(text), "prompt_bytes_max": self._bytes_max},
            )
        return self._model.tokenize(text, special=special, bos=bos)
