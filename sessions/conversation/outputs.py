"""The output of a session's last turn in the form that clients get: metadata, parts, embeddings."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from ...backends.library.engine_build import LLAMA_BUILD_NUMBER, LLAMA_COMMIT
from ...scheduler.messages import Embedded, TurnStats
from ...scheduler.output.logprobs import describe_logprobs, describe_prompt
from ..answers.parser import ToolCallParser
from ..answers.splitter import AnswerParts, AnswerSplitter, ReasoningSplitter, resume_splitting
from ..history.history import History
from ..history.state import HistoryState
from ..turn.options import Parameters
from ..turn.turn import Turn
from .state import Conversation, SessionSettings

DETACHED = "detached"
"""Stop reason of a turn whose reader has disconnected."""
NO_STATS = TurnStats(stop_reason="")
PROBABILITIES, END_TOKEN, PROMPT_LOGPROBS = (
    "completion_probabilities",
    "end_token",
    "prompt_logprobs",
)
"""The keys of a turn's logprobs."""


def describe_turn(
    conversation: Conversation,
    settings: SessionSettings,
    turn: Turn | None,
    *,
    model: str,
    session_id: str | None,
    durable: bool | None,
    logprobs: bool,
) -> dict[str, Any]:
    """Return the metadata of *turn*, or of a conversation without one: WasmEdge's four keys, then
    inferd's. Those of an ended turn that was stored are returned as they were.
    """
    parameters, error = settings.parameters, _error_of(conversation, turn)
    resumable = conversation.history_state.resumable if turn is None else None
    if resumable is not None and (stored := resumable.metadata) is not None:
        return stored | error
    counters = msgspec.structs.asdict(NO_STATS if turn is None else turn.stats_so_far())
    counters.pop("prompt_tokens")
    if turn is None or not turn.ended.is_set():
        counters.pop("parks")
    if turn is None or turn.stats is None:
        counters["shifted"] = conversation.shifted
        failure = error.get("error", {})
        counters["stop_reason"] = failure.get("name")
        by = failure.get("data", {}).get("by")
        counters["stop_detail"] = str(by or failure.get("message", ""))
    input_tokens = len(conversation.prompt)
    if resumable is not None and not resumable.ended:
        counters["stop_reason"], counters["stop_detail"] = DETACHED, ""
        input_tokens, counters["output_tokens"] = len(resumable.prompt), len(resumable.tokens)
    history = conversation.history_state.now
    recomputed, dropped = history.recomputed, history.dropped
    shifted_out = 0 if turn is None else sum(discard for _, discard in turn.shifts)
    current_fingerprint = conversation.vocabulary.fingerprint
    overlong = conversation.last.overlong
    return {
        "input_tokens": input_tokens + (overlong.tokens if overlong else 0),
        "output_tokens": counters.pop("output_tokens"),
        "llama_build_number": LLAMA_BUILD_NUMBER,
        "llama_commit": LLAMA_COMMIT,
        **counters,
        **error,
        "tool_format": history.tool_use.form.value,
        "recomputed_tokens": recomputed.tokens,
        "recomputed_reason": recomputed.why,
        "dropped_tokens": dropped.tokens + shifted_out,
        "dropped_turns": dropped.turns,
        "seed": parameters.seed,
        "lora": {} if turn is None else settings.lora,
        "model": model,
        "fingerprint": current_fingerprint if turn is None else turn.client.info.fingerprint,
        "session_id": session_id,
        "durable": durable,
        "not_applied": parameters.not_applied,
        "adjusted": _joined(parameters.reported, {} if turn is None else turn.adjusted),
        "ignored": parameters.reported_ignored,
        **(_probabilities(turn) if logprobs else {}),
    }


def _error_of(conversation: Conversation, turn: Turn | None) -> dict[str, Any]:
    """Return the key for the error that has ended *turn* or refused the last call, if any."""
    if turn is not None and turn.error is not None:
        return {"error": turn.error.to_wire()}
    last = conversation.last
    described = turn is None or turn is last.turn
    return {"error": last.failure} if last.failure and described else {}


def new_splitter(
    history: History, seed: int, parameters: Parameters, options: Mapping[str, Any]
) -> AnswerSplitter:
    """Return the splitter of the answer to *history*, of a turn with this *seed* and *options*."""
    on = parameters.in_turn("reasoning-format", options) != "none"
    reasoning = ReasoningSplitter(on=on, opened=history.opens_reasoning)
    return AnswerSplitter(reasoning, _parser(history, seed, parameters, options))


def _parser(
    history: History, seed: int, parameters: Parameters, options: Mapping[str, Any]
) -> ToolCallParser | None:
    """Return the parser of a turn with *options*, if its reader gets calls apart from text."""
    return history.new_parser(seed) if parameters.in_turn("parse-tool-calls", options) else None


def resume_splitter(
    history_state: HistoryState, parameters: Parameters, received: AnswerParts, raw: bytes
) -> tuple[bytes, AnswerSplitter]:
    """Return the resumable turn's text that its reader has, and the splitter of the rest. If the
    answer may have tool calls, *raw* is the text that the reader has.

    :raises InvalidArgument: the reader's parts differ.
    """
    last, history = history_state.resumable, history_state.before
    if last is None:
        return received.text, AnswerSplitter(ReasoningSplitter(on=False))
    options = last.begin.options
    on, opened = parameters.in_turn("reasoning-format", options) != "none", history.opens_reasoning
    parser = _parser(history, last.seed, parameters, options)
    if parser is not None:
        splitter = AnswerSplitter(ReasoningSplitter(on=on, opened=opened), parser)
        text = raw or received.text
        splitter.split(text)
        return text, splitter
    text, reasoning = resume_splitting(last.text, received, on=on, opened=opened)
    return text, AnswerSplitter(reasoning)


def _joined(reasons: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons of both maps by name; two reasons for a name follow each other."""
    return {
        **reasons,
        **{n: "; ".join(filter(None, (reasons.get(n), w))) for n, w in others.items()},
    }


def _probabilities(turn: Turn | None) -> dict[str, Any]:
    if turn is None:
        return {}
    after_sampling = turn.spec.sampling.post_sampling_probs
    found: dict[str, Any] = {}
    if turn.logprobs:
        found[PROBABILITIES] = describe_logprobs(turn.logprobs, after_sampling=after_sampling)
    if turn.end_logprobs:
        [found[END_TOKEN]] = describe_logprobs(turn.end_logprobs, after_sampling=after_sampling)
    if turn.prompt_logprobs:
        found[PROMPT_LOGPROBS] = describe_prompt(turn.prompt_logprobs)
    return found


def embedding_json(embedded: Embedded) -> bytes:
    """Return `{"n_embedding": …, "embedding": […]}`, WasmEdge's output 0; without pooling, the list
    has one vector for each token.
    """
    numbers = array("f")
    numbers.frombytes(embedded.vectors)
    # A float32 has nine significant digits; as a double it would print up to 17.
    vector: list[Any] = [float(f"{x:.9g}") for x in numbers]
    if embedded.pooling == "none":
        size = embedded.size
        vector = [vector[i : i + size] for i in range(0, len(vector), size)]
    return msgspec.json.encode({"n_embedding": embedded.size, "embedding": vector})
