"""`/v1/completions`: the fields of its requests, and its answers."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ....backends.errors import InferdError, InvalidArgument
from ....ipc.client import Infill, Piece, QueueEvent
from ....ipc.names import Priority
from ..callers import Caller
from ..exchange import Exchange, collect_turns, stream_turn
from ..exchange.streaming import EVENT_STREAM
from ..fields import (
    OTHER_SERVERS,
    PRIORITY_FIELD,
    FieldTable,
    field_error,
    honoured,
    ignored,
    refused,
)
from ..turns import Answer, TurnProgress, TurnRequest
from .chat import DONE, bias_pairs, check_prompt_logprobs, priority_of, waiting_comment
from .chat_fields import (
    PROGRESS,
    PROMPT_LOGPROBS_FIELD,
    SAMPLING,
    STRUCTURED_OUTPUTS,
    THINKING,
    PromptLogprobs,
    ServiceTier,
    StreamOptions,
)
from .forms import (
    CompletionLogprobs,
    Timings,
    add_usage,
    error_body,
    joined,
    prompt_logprobs,
    usage_of,
    with_fields,
)

PROMPTS_MAX = 16
ANSWERS_MAX = 64
"""Answers of one request. Each is a session while it runs, and the daemon has 100 sessions."""
TOKENS_DEFAULT = 16
"""OpenAI's default, because programs rely on short completions."""


class CompletionRequest(Struct, kw_only=True):
    """The fields that the gateway's own code reads; the others are parameters."""

    model: str
    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    max_tokens: int = TOKENS_DEFAULT
    suffix: str = ""
    echo: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    logit_bias: dict[str, float] = {}
    service_tier: ServiceTier = "auto"
    priority: Priority | None = None


COMPLETIONS = FieldTable(
    "/v1/completions",
    [
        honoured("model"),
        honoured(
            "prompt",
            f"a text or token ids of the model, or up to {PROMPTS_MAX} of either; it is used"
            " unchanged, without a chat template",
            sets="prompt_tokens",
        ),
        honoured("stream"),
        honoured("stream_options", "`include_usage`"),
        honoured("n", f"up to 16, and {ANSWERS_MAX} with all prompts; each has the next seed"),
        honoured("max_tokens", "16 if absent, as with OpenAI", sets="n-predict"),
        honoured("echo", "the text begins with the prompt, and so do the `logprobs`"),
        honoured("logprobs", "up to 5"),
        PROMPT_LOGPROBS_FIELD,
        honoured("logit_bias", sets="logit-bias"),
        honoured("service_tier", "as in a chat"),
        *SAMPLING,
        *STRUCTURED_OUTPUTS,
        *PROGRESS,
        PRIORITY_FIELD,
        honoured(
            "suffix",
            "the text behind the answer, of a model that fills in text between two others",
            "",
        ),
        refused("best_of", "use n, and choose", 1),
        refused("add_special_tokens", "the daemon adds them as the model needs", True),
        *(ignored(field.name, "the prompt has no chat template") for field in THINKING),
        ignored("user", "the key names the user"),
    ],
    kind=CompletionRequest,
    parameters=True,
    others=OTHER_SERVERS,
)


_encode = msgspec.json.encode


async def answer_completion(exchange: Exchange) -> None:
    """Answer a completion of one or several prompts, whole or streamed."""
    request, options = exchange.read_fields(COMPLETIONS)
    frame = _Frame(request)
    try:
        turns = frame.turns(options, exchange.caller)
        await frame.read_echoes(exchange)
        if request.stream:
            await stream_turn(exchange, turns, _Stream(frame))
        else:
            by_prompt = await collect_turns(exchange, turns)
            await exchange.send_json(frame.whole(by_prompt))
    except InferdError as exc:
        if "missing" in exc.data:  # tokens to fill in the middle
            exc.data.setdefault("param", "suffix")
        raise COMPLETIONS.name_field(exc) from None


class _Frame:
    """The parts that all objects of one completion share."""

    def __init__(self, request: CompletionRequest):
        self.request = request
        self.timings = Timings(
            per_token=request.timings_per_token, progress=request.return_progress
        )
        self.prompts = _prompts_of(request)
        self.scored: dict[int, list[dict[str, Any]]] = {}
        """By answer of a stream, the logprobs of its prompt."""
        self._echoes = [""] * len(self.prompts)
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
        check_prompt_logprobs(request.prompt_logprobs, stream=request.stream)
        if request.n * len(self.prompts) > ANSWERS_MAX:
            answers = f"{len(self.prompts)} prompts with {request.n} answers each"
            raise field_error("n", f"n: {answers} are more than {ANSWERS_MAX} answers")
        if request.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise field_error("suffix", "suffix: the prompt before it is a text, not token ids")
        options = {**options, "n-predict": request.max_tokens}
        if request.logprobs is not None:
            options["n-probs"] = max(1, request.logprobs)
        scored = [request.prompt_logprobs, request.logprobs if request.echo else None]
        if (top := max((n for n in scored if n is not None), default=None)) is not None:
            options["prompt-logprobs"] = top
        if request.logit_bias:
            options["logit-bias"] = bias_pairs(request.logit_bias)
        return [
            TurnRequest(
                model=request.model,
                prompt=Infill(prefix=prompt, suffix=request.suffix)
                if request.suffix and isinstance(prompt, str)
                else prompt,
                raw=True,
                options=options,
                answers=request.n,
                progress=request.stream and (request.return_progress or request.timings_per_token),
                priority=priority_of(request.priority, request.service_tier, caller),
                on_prompt=partial(self._note_scored, number * request.n),
            )
            for number, prompt in enumerate(self.prompts)
        ]

    def _note_scored(self, first: int, answer: int, scored: list[dict[str, Any]]) -> None:
        self.scored[first + answer] = scored

    async def read_echoes(self, exchange: Exchange) -> None:
        """Read the texts of the prompts that are echoed, which may be given as token ids.

        :raises InvalidArgument: an id is not in the model's vocabulary.
        """
        if not self.request.echo:
            return
        ids = [prompt for prompt in self.prompts if not isinstance(prompt, str)]
        texts = iter(await self._detokenize(exchange, ids) if ids else ())
        self._echoes = [
            prompt if isinstance(prompt, str) else next(texts) for prompt in self.prompts
        ]

    async def _detokenize(self, exchange: Exchange, prompts: list[list[int]]) -> list[str]:
        try:
            return await exchange.turns.detokenize(exchange.caller, self.request.model, prompts)
        except InvalidArgument as exc:
            exc.data.setdefault("param", "prompt")
            raise

    def echo_of(self, answer: int) -> str:
        """Return the text of the prompt of an answer, if it is echoed."""
        return self._echoes[answer // self.request.n]

    def whole(self, by_prompt: list[list[Answer]]) -> dict[str, Any]:
        """Return the whole completion."""
        answers = [answer for answers in by_prompt for answer in answers]
        return {
            **self.common,
            "system_fingerprint": answers[0].metadata.get("fingerprint"),
            "choices": [
                self._choice(number, answer, by_prompt[number // self.request.n][0])
                for number, answer in enumerate(answers)
            ],
            "usage": add_usage([usage_of(answers) for answers in by_prompt]),
            **self.timings.of_end(answers[0]),
        }

    def _choice(self, number: int, answer: Answer, first: Answer) -> dict[str, Any]:
        """Return an answer's choice; *first* is the first answer to the same prompt."""
        request, prompt, logprobs = self.request, self.echo_of(number), None
        scored = first.metadata.get("prompt_logprobs", [])
        if request.logprobs is not None:
            form = CompletionLogprobs(request.logprobs)
            parts = [form.add_prompt(scored, prompt)] if request.echo else []
            parts.append(form.add(answer.probabilities))
            if request.echo:
                parts.append(form.add(end_of(answer)))
            logprobs = joined(parts)
        choice: dict[str, Any] = {
            "index": number,
            "text": prompt + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            **answer.adjusted,
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scored, request.prompt_logprobs)
        return choice


def _prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a request, each a text or token ids.

    :raises InvalidArgument: they are of several forms, or too many.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    tokens = [each for each in prompt if isinstance(each, int)]
    if len(tokens) == len(prompt):
        return [tokens]
    found = [each for each in prompt if not isinstance(each, int)]
    if tokens or len({type(each) for each in found}) > 1:
        raise field_error(
            "prompt", "prompt: a list has texts, token ids or lists of token ids, not several kinds"
        )
    if [] in found:
        raise field_error("prompt", "prompt: a list of token ids is empty")
    if len(found) > PROMPTS_MAX:
        raise field_error("prompt", f"prompt: {len(found)} are more than {PROMPTS_MAX} prompts")
    return found


def end_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the probabilities of the token that ended an answer and is not part of it, if any.
    Evaluations take the last entry of an echo for the one token that they let the model generate.
    """
    end = answer.metadata.get("end_token")
    return [] if end is None else [end]


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
            CompletionLogprobs(self._request.logprobs or 0) for _ in range(self._answers)
        ]
        self._unechoed = set(range(self._answers)) if self._request.echo else set[int]()
        """The answers whose prompts are still to be echoed."""
        self._ended: dict[int, Answer] = {}

    def begin(self) -> bytes:
        """Return nothing: each answer begins with its own echo."""
        return b""

    def _echo(self, answer: int) -> bytes:
        """Return the prompt of an answer, if it is still to be echoed."""
        if answer not in self._unechoed:
            return b""
        self._unechoed.discard(answer)
        prompt, logprobs = self._frame.echo_of(answer), None
        if self._request.logprobs is not None:
            scored = self._frame.scored.pop(answer, [])
            logprobs = self._logprobs[answer].add_prompt(scored, prompt)
        return self._choice(answer, prompt, logprobs)

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
        echo = self._echo(answer) if self._unechoed else b""
        if not (probabilities or more):
            return echo + self._text_heads[answer] + _encode(str(piece)) + self._text_tail
        return echo + self._chunk(answer, str(piece), probabilities, more=more)

    def end(self, answer: int, end: Answer) -> bytes:
        """Return the last chunk of an answer."""
        self._ended[answer] = end
        more = self._timings.of_end(end)
        probabilities, echo = end.probabilities, self._echo(answer)
        if self._request.echo and self._request.logprobs is not None:
            probabilities = [*probabilities, *end_of(end)]
        return echo + self._chunk(answer, "", probabilities, end, more=more)

    def _chunk(
        self,
        answer: int,
        text: str,
        probabilities: list[dict[str, Any]] | None = None,
        end: Answer | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        logprobs = self._logprobs[answer].add(probabilities) if probabilities else None
        return self._choice(answer, text, logprobs, end, more)

    def _choice(
        self,
        answer: int,
        text: str,
        logprobs: dict[str, Any] | None,
        end: Answer | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": answer,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if end is None else end.finish_reason,
            **({} if end is None else end.adjusted),
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
