"""`/v1/completions`."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from ....backends.errors import InferdError
from ....ipc.client import Piece, QueueEvent
from ..callers.caller import Caller
from ..exchange import Exchange, collect_turns, stream_turn
from ..exchange.streaming import EVENT_STREAM
from ..fields.table import field_error
from ..turns import Answer, TurnProgress, TurnRequest
from .chat import DONE, bias_pairs, priority_of, waiting_comment
from .completion_fields import ANSWERS_MAX, COMPLETIONS, CompletionRequest
from .errors import error_body
from .logprobs import CompletionLogprobs
from .timings import Timings, with_fields
from .usage import add_usage, usage_of

_encode = msgspec.json.encode


async def answer_completion(exchange: Exchange) -> None:
    """Answer a completion of one or several prompts, whole or streamed."""
    request, options = exchange.read_fields(COMPLETIONS)
    frame = _Frame(request)
    try:
        turns = frame.turns(options, exchange.caller)
        if request.stream:
            await stream_turn(exchange, turns, _Stream(frame))
        else:
            by_prompt = await collect_turns(exchange, turns)
            await exchange.send_json(frame.whole(by_prompt))
    except InferdError as exc:
        raise COMPLETIONS.name_field(exc) from None


class _Frame:
    """The parts that all objects of one completion share."""

    def __init__(self, request: CompletionRequest):
        self.request = request
        self.timings = Timings(
            per_token=request.timings_per_token, progress=request.return_progress
        )
        prompt = request.prompt
        self.prompts = [prompt] if isinstance(prompt, str) else prompt
        self.common: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def turns(self, options: dict[str, Any], caller: Caller) -> list[TurnRequest]:
        """Return a turn for each prompt.

        :raises InvalidArgument: a field has a wrong value.
        """
        request = self.request
        if request.n * len(self.prompts) > ANSWERS_MAX:
            answers = f"{len(self.prompts)} prompts with {request.n} answers each"
            raise field_error("n", f"n: {answers} are more than {ANSWERS_MAX} answers")
        options = {**options, "n-predict": request.max_tokens}
        if request.logprobs is not None:
            options["n-probs"] = max(1, request.logprobs)
        if request.logit_bias:
            options["logit-bias"] = bias_pairs(request.logit_bias)
        return [
            TurnRequest(
                model=request.model,
                prompt=prompt,
                raw=True,
                options=options,
                answers=request.n,
                progress=request.stream and (request.return_progress or request.timings_per_token),
                priority=priority_of(request.priority, request.service_tier, caller),
            )
            for prompt in self.prompts
        ]

    def prompt_of(self, answer: int) -> str:
        """Return the prompt of an answer."""
        return self.prompts[answer // self.request.n]

    def whole(self, by_prompt: list[list[Answer]]) -> dict[str, Any]:
        """Return the whole completion."""
        answers = [answer for answers in by_prompt for answer in answers]
        return {
            **self.common,
            "system_fingerprint": answers[0].metadata.get("fingerprint"),
            "choices": [self._choice(number, answer) for number, answer in enumerate(answers)],
            "usage": add_usage([usage_of(answers) for answers in by_prompt]),
            **self.timings.of_end(answers[0]),
        }

    def _choice(self, number: int, answer: Answer) -> dict[str, Any]:
        text = answer.text
        logprobs = None
        prompt = self.prompt_of(number) if self.request.echo else ""
        if self.request.logprobs is not None:
            form = CompletionLogprobs(self.request.logprobs, offset=len(prompt))
            logprobs = form.add(answer.probabilities)
        return {
            "index": number,
            "text": prompt + text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
        }


class _Stream:
    """A completion as chunks."""

    content_type = EVENT_STREAM
    shows_waiting = True

    def __init__(self, frame: _Frame):
        self._frame, self._request, self._timings = frame, frame.request, frame.timings
        self._usage = frame.request.stream_options.include_usage
        self._head = b"data: " + _encode(frame.common)[:-1] + b',"choices":['
        self._tail = b"]" + (b',"usage":null' if self._usage else b"") + b"}\n\n"
        self._answers = frame.request.n * len(frame.prompts)
        # Most pieces have no logprobs, and differ from each other in their text alone.
        self._text_heads = [
            self._head + b'{"index":%d,"text":' % number for number in range(self._answers)
        ]
        self._text_tail = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._logprobs = [
            CompletionLogprobs(
                self._request.logprobs or 0,
                offset=len(frame.prompt_of(number)) if self._request.echo else 0,
            )
            for number in range(self._answers)
        ]
        self._ended: dict[int, Answer] = {}

    def begin(self) -> bytes:
        """Return the prompts, if they are echoed."""
        if not self._request.echo:
            return b""
        prompts = (self._frame.prompt_of(number) for number in range(self._answers))
        return b"".join(self._chunk(number, text) for number, text in enumerate(prompts))

    def waiting(self, place: QueueEvent | None) -> bytes:
        """Return a comment with the place in the queue."""
        return waiting_comment(place)

    def progress(self, answer: int, progress: TurnProgress) -> bytes:
        """Return the chunk of a prompt's progress, if it is wanted."""
        more = self._timings.of_prompt(answer, progress)
        return self._chunk(answer, "", more=more) if more else b""

    def piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> bytes:
        """Return the chunk of a piece."""
        more = self._timings.of_piece(answer)
        if not (probabilities or more):
            return self._text_heads[answer] + _encode(str(piece)) + self._text_tail
        return self._chunk(answer, str(piece), probabilities, more=more)

    def end(self, answer: int, end: Answer) -> bytes:
        """Return the last chunk of an answer."""
        self._ended[answer] = end
        more = self._timings.of_end(end)
        return self._chunk(answer, "", end.probabilities, end.finish_reason, more=more)

    def _chunk(
        self,
        answer: int,
        text: str,
        probabilities: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        logprobs = self._logprobs[answer].add(probabilities) if probabilities else None
        choice = {
            "index": answer,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._head + _encode(choice) + with_fields(self._tail, more or {})

    def error(self, error: InferdError, status: int) -> bytes:
        """Return an error, which OpenAI's clients raise."""
        return b"data: " + _encode(error_body(COMPLETIONS.name_field(error), status)) + b"\n\n"

    def finish(self) -> bytes:
        """Return the usage, if it is wanted, and the end of the stream."""
        if not self._usage:
            return DONE
        n = self._request.n
        by_prompt = [
            [self._ended[number] for number in range(first, first + n)]
            for first in range(0, self._answers, n)
        ]
        usage = add_usage([usage_of(answers) for answers in by_prompt])
        fields = {"usage": usage, **self._timings.of_end(self._ended[0])}
        return self._head + with_fields(b"]}\n\n", fields) + DONE
