"""The output of a session's last turn in the form that clients get: metadata, parts, embeddings."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...backends.errors import ErrorFields
from ...backends.library import LLAMA_BUILD_NUMBER, LLAMA_COMMIT
from ...scheduler.logprobs import describe_logprobs, describe_prompt
from ...scheduler.messages import Embedded, TurnStats
from ...wire.metadata import Metadata
from ..answers.splitter import AnswerParts, AnswerSplitter, resume_splitting
from ..history.history import History
from ..history.state import HistoryState
from ..turn.options import Parameters
from ..turn.turn import Turn
from .state import Conversation, SessionSettings

DETACHED = "detached"
"""Stop reason of a turn whose reader has disconnected."""
NO_STATS = TurnStats(stop_reason="")


def describe_turn(
    conversation: Conversation,
    settings: SessionSettings,
    turn: Turn | None,
    *,
    model: str,
    session_id: str | None,
    durable: bool | None,
    logprobs: bool,
) -> Metadata:
    """Return the metadata of *turn*, or of a conversation without one."""
    parameters, history = settings.parameters, conversation.history_state.now
    stats = NO_STATS if turn is None else turn.stats_so_far()
    overlong, fingerprint = conversation.last.overlong, conversation.vocabulary.fingerprint
    metadata = Metadata(
        input_tokens=len(conversation.prompt) + (overlong.tokens if overlong else 0),
        output_tokens=stats.output_tokens,
        llama_build_number=LLAMA_BUILD_NUMBER,
        llama_commit=LLAMA_COMMIT,
        cached_tokens=stats.cached_tokens,
        queue_ms=stats.queue_ms,
        ttft_ms=stats.ttft_ms,
        prompt_ms=stats.prompt_ms,
        predicted_ms=stats.predicted_ms,
        stop_reason=stats.stop_reason,
        stop_detail=stats.stop_detail,
        error=_error_of(conversation, turn) or UNSET,
        shifts=stats.shifts,
        shifted=stats.shifted,
        tool_format=history.tool_use.form_name,
        recomputed_tokens=history.recomputed.tokens,
        recomputed_reason=history.recomputed.why,
        dropped_tokens=history.dropped.tokens,
        dropped_turns=history.dropped.turns,
        parks=stats.parks if turn is not None and turn.ended.is_set() else UNSET,
        forced_tokens=stats.forced_tokens,
        drafted_tokens=stats.drafted_tokens,
        accepted_tokens=stats.accepted_tokens,
        seed=parameters.seed,
        lora={} if turn is None else settings.lora,
        model=model,
        fingerprint=fingerprint if turn is None else turn.client.info.fingerprint,
        session_id=session_id,
        durable=durable,
        not_applied=parameters.not_applied,
        adjusted=_joined(parameters.reported, {} if turn is None else turn.adjusted),
        ignored=parameters.reported_ignored,
    )
    if turn is not None and turn.stats is not None:
        metadata.reasoning_tokens = turn.stats.reasoning_tokens
    else:
        metadata.shifted = conversation.shifted
        _set_stop(metadata, metadata.error)
    if turn is None:
        _add_stored(metadata, conversation)
        return metadata
    metadata.dropped_tokens += sum(discard for _, discard in turn.shifts)
    if media := turn.spec.media:
        metadata.media_tokens = sum(item.size for item in media)
        metadata.media_cached = max(0, len(media) - turn.items_encoded)
        metadata.encode_s = turn.encode_s
    if logprobs:
        _add_logprobs(metadata, turn)
    return metadata


def _error_of(conversation: Conversation, turn: Turn | None) -> ErrorFields | None:
    """Return the error that has ended *turn* or refused the last call, if any."""
    if turn is not None and turn.error is not None:
        return turn.error.to_wire()
    last = conversation.last
    return last.failure if turn is None or turn is last.turn else None


def _set_stop(metadata: Metadata, error: ErrorFields | UnsetType) -> None:
    """Set the stop reason of a turn without statistics: its *error*, or nothing."""
    metadata.stop_reason, metadata.stop_detail = None, ""
    if error is not UNSET:
        by = error["data"].get("by")
        metadata.stop_reason, metadata.stop_detail = error["name"], str(by or error["message"])


def _add_stored(metadata: Metadata, conversation: Conversation) -> None:
    """Add the stored metadata, or the stored progress, of the last turn of a session that was
    reopened. Versions that lacked a key have not stored it.
    """
    last, failure = conversation.history_state.resumable, metadata.error
    if last is None:
        return
    if (stored := last.metadata) is not None:
        for name in stored.keys() & Metadata.__struct_fields__:
            setattr(metadata, name, stored[name])
        metadata.error = failure or metadata.error
    elif not last.ended:
        metadata.stop_reason, metadata.stop_detail = DETACHED, ""
        metadata.input_tokens += len(last.prompt) - len(conversation.prompt)
        metadata.output_tokens = len(last.tokens)


def new_splitter(
    history: History, seed: int, parameters: Parameters, options: Mapping[str, Any]
) -> AnswerSplitter:
    """Return the splitter of the answer to *history*, of a turn with this *seed* and *options*."""
    splitter = AnswerSplitter(
        history.new_parser(
            seed,
            reasoning=parameters.in_turn("reasoning-format", options) != "none",
            finds_calls=parameters.in_turn("parse-tool-calls", options),
        )
    )
    if history.continued:
        splitter.begin(history.continued.encode())
    return splitter


def resume_splitter(
    history_state: HistoryState, parameters: Parameters, received: AnswerParts, raw: bytes
) -> tuple[bytes, AnswerSplitter]:
    """Return the resumable turn's text that its reader has, and the splitter of the rest.
    *raw* is the text that the reader has, as the model wrote it, if its events had that.

    :raises InvalidArgument: the reader's parts differ.
    """
    last, history = history_state.resumable, history_state.before
    if last is None:
        return received.text, AnswerSplitter()

    def new() -> AnswerSplitter:
        return new_splitter(history, last.seed, parameters, last.begin.options)

    splitter = new()
    if splitter.keeps_raw_text:
        text = raw or received.text
        splitter.split(text)
        return text, splitter
    if splitter.is_text:
        return received.text, splitter
    return resume_splitting(last.text, received, new)


def _joined(reasons: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons of both maps by name; two reasons for a name follow each other."""
    return {
        **reasons,
        **{n: "; ".join(filter(None, (reasons.get(n), w))) for n, w in others.items()},
    }


def _add_logprobs(metadata: Metadata, turn: Turn) -> None:
    after_sampling = turn.spec.sampling.post_sampling_probs
    if turn.logprobs:
        metadata.completion_probabilities = describe_logprobs(
            turn.logprobs, after_sampling=after_sampling
        )
    if turn.end_logprobs:
        [metadata.end_token] = describe_logprobs(turn.end_logprobs, after_sampling=after_sampling)
    if turn.prompt_logprobs:
        metadata.prompt_logprobs = describe_prompt(turn.prompt_logprobs)


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
