"""What explains a session's last turn to its client: output 1, and the end of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ...scheduler.output.logprobs import described
from ..turn import Turn

if TYPE_CHECKING:
    from .session import Session

__all__ = ("metadata",)

DETACHED = "detached"
"""Stop reason of a turn that nobody was left to read."""


def metadata(session: Session, turn: Turn | None) -> dict[str, Any]:
    """Return what explains *turn*, the session's last: WasmEdge's four keys, then ours."""
    stats = turn.stats if turn is not None else None
    told = {} if stats is None else msgspec.structs.asdict(stats)
    told.pop("prompt_tokens", None)
    failed, by = _failure(turn)
    if turn is None and session.interrupted is not None:
        failed = DETACHED
    build_number, commit = session.vocabulary.build
    recomputed = session.past.now.recomputed
    now = session.vocabulary.fingerprint
    return {
        "input_tokens": len(session.prompt),
        "output_tokens": len(turn.tokens) if turn is not None else 0,
        "llama_build_number": build_number,
        "llama_commit": commit,
        "cached_tokens": 0,
        "queue_ms": 0.0,
        "ttft_ms": 0.0,
        "prompt_ms": 0.0,
        "predicted_ms": 0.0,
        "stop_reason": failed,
        "stop_detail": by,
        "shifts": 0,
        "shifted": False,
        **told,
        "recomputed_tokens": recomputed.tokens,
        "recomputed_why": recomputed.why,
        "seed": session.parameters.seed,
        "lora": {} if turn is None else session.lora,
        "model": session.model.name,
        "fingerprint": now if turn is None else turn.port.info.fingerprint,
        "session_id": session.session_id,
        "durable": session.recording.durable,
        "not_applied": session.parameters.not_applied,
        "adjusted": session.parameters.adjusted | ({} if turn is None else turn.comparisons.missed),
        "ignored": session.parameters.ignored,
        **_probabilities(turn),
    }


def _failure(turn: Turn | None) -> tuple[str | None, str]:
    """Return the name of the error that ended a turn, and who did, where that is said."""
    if turn is None or turn.error is None:
        return None, ""
    return turn.error.name, str(turn.error.data.get("by", ""))


def _probabilities(turn: Turn | None) -> dict[str, Any]:
    if turn is None or not turn.logprobs:
        return {}
    after_sampling = turn.spec.sampling.post_sampling_probs
    return {"completion_probabilities": described(turn.logprobs, after_sampling=after_sampling)}
