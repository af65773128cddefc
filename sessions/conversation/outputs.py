"""A session's output: the text or embedding of its last turn, and its metadata."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from ...backends.errors import InferdError, NotFound
from ...backends.library.engine_build import LLAMA_BUILD_NUMBER, LLAMA_COMMIT
from ...scheduler.messages import Embedded, TurnStats
from ...scheduler.output.logprobs import describe_logprobs, describe_prompt
from ..answers.parser import ToolCallParser
from ..answers.splitter import AnswerParts, AnswerSplitter, ReasoningSplitter, resume_splitting
from ..entries import Replay, TurnEnd, encode
from ..history.history import History
from ..table import SessionCall, step
from ..turn.turn import Turn
from .core import SessionCore

DETACHED = "detached"
"""Stop reason of a turn whose reader has disconnected."""
NO_STATS = TurnStats(stop_reason="")
PROBABILITIES, END_TOKEN, PROMPT_LOGPROBS = (
    "completion_probabilities",
    "end_token",
    "prompt_logprobs",
)
"""The keys of a turn's logprobs."""


class SessionOutputs:
    """The outputs of a session's last turn. Owned by its session."""

    def __init__(self, core: SessionCore):
        self._core = core

    def read_output(self, index: int) -> bytes:
        """Return output 0 (the text so far) or 1 (metadata JSON).

        :raises NotFound: there is no such output.
        """
        step(self._core.state, SessionCall.GET_OUTPUT)
        if index == 0:
            turn = self._visible_turn()
            if turn is not None and turn.embedding is not None:
                return embedding_json(turn.embedding)
            return b"" if turn is None else bytes(turn.text) + turn.end_piece
        if index == 1:
            return msgspec.json.encode(self.metadata())
        raise NotFound(f"there is no output {index}", hint="0 is the text, 1 the metadata")

    def read_single_output(self, index: int) -> bytes:
        """Return the text of the last token, or metadata as `read_output` does."""
        step(self._core.state, SessionCall.GET_OUTPUT)
        return self._core.conversation.last.piece if index == 0 else self.read_output(index)

    def _visible_turn(self) -> Turn | None:
        last = self._core.conversation.last
        return None if last.output_cleared else last.turn

    def turn_end(self, turn: Turn) -> TurnEnd:
        """Return the end of *turn*, which has ended."""
        metadata = self.metadata(turn, logprobs=False)  # they may be megabytes
        error = None if turn.error is None else turn.error.to_wire()
        return TurnEnd(metadata["stop_reason"], encode(metadata), error)

    def interrupted_metadata(self, turn: Turn) -> bytes:
        """Return the packed metadata of *turn*, whose reader has disconnected."""
        metadata = self.metadata(turn, logprobs=False)
        metadata.pop("error", None)
        return encode(metadata | {"stop_reason": DETACHED, "stop_detail": ""})

    def ended_turn(self) -> Replay | None:
        """Return the last turn, if its end can be read again after the session was attached."""
        resumable = self._core.conversation.history_state.resumable
        return resumable if resumable is not None and resumable.ended else None

    def new_splitter(self, options: Mapping[str, Any], turn: Turn) -> AnswerSplitter:
        """Return the splitter of the answer of *turn*, which has begun with *options*."""
        history = self._core.conversation.history_state.now
        on = self._core.settings.parameters.in_turn("reasoning-format", options) != "none"
        reasoning = ReasoningSplitter(on=on, opened=history.opens_reasoning)
        return AnswerSplitter(reasoning, self._parser(history, turn.seed, options))

    def _parser(
        self, history: History, seed: int, options: Mapping[str, Any]
    ) -> ToolCallParser | None:
        """Return the parser of a turn with *options*, if its reader gets calls apart from text."""
        parses = self._core.settings.parameters.in_turn("parse-tool-calls", options)
        return history.new_parser(seed) if parses else None

    def resume_splitter(self, received: AnswerParts, raw: bytes) -> tuple[bytes, AnswerSplitter]:
        """Return the resumable turn's text that its reader has, and the splitter of the rest. If
        the answer may have tool calls, *raw* is the text that the reader has.

        :raises InvalidArgument: the reader's parts differ.
        """
        history_state = self._core.conversation.history_state
        last = history_state.resumable
        if last is None:
            return received.text, AnswerSplitter(ReasoningSplitter(on=False))
        options, history = last.begin.options, history_state.before
        on = self._core.settings.parameters.in_turn("reasoning-format", options) != "none"
        opened = history.opens_reasoning
        parser = self._parser(history, last.seed, options)
        if parser is not None:
            splitter = AnswerSplitter(ReasoningSplitter(on=on, opened=opened), parser)
            text = raw or received.text
            splitter.split(text)
            return text, splitter
        text, reasoning = resume_splitting(last.text, received, on=on, opened=opened)
        return text, AnswerSplitter(reasoning)

    def note_failure(self, error: InferdError) -> None:
        """Keep the error of a call for a turn, until the next input or turn."""
        if not self._core.active:
            self._core.conversation.last.failure = error.to_wire()
            self._core.count_kept_bytes()

    def metadata(self, turn: Turn | None = None, *, logprobs: bool = True) -> dict[str, Any]:
        """Return the metadata of *turn* or the last turn: WasmEdge's four keys, then inferd's."""
        core, turn = self._core, turn or self._visible_turn()
        conversation, parameters = core.conversation, core.settings.parameters
        error = self._error_of(turn)
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
            "lora": {} if turn is None else core.settings.lora,
            "model": core.model.name,
            "fingerprint": current_fingerprint if turn is None else turn.client.info.fingerprint,
            "session_id": core.session_id,
            "durable": core.recording.durable,
            "not_applied": parameters.not_applied,
            "adjusted": _joined(parameters.reported, {} if turn is None else turn.adjusted),
            "ignored": parameters.reported_ignored,
            **(_probabilities(turn) if logprobs else {}),
        }

    def _error_of(self, turn: Turn | None) -> dict[str, Any]:
        """Return the key for the error that has ended *turn* or refused the last call, if any."""
        if turn is not None and turn.error is not None:
            return {"error": turn.error.to_wire()}
        last = self._core.conversation.last
        described = turn is None or turn is last.turn
        return {"error": last.failure} if last.failure and described else {}


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
