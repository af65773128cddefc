"""A task as the daemon hands it over: one turn to compute, perhaps begun in another worker."""

from __future__ import annotations

import msgspec

from ...backends import EmbedSpec, SamplingParams
from ...backends.params import StoppingParams
from ..priority import Priority

__all__ = ("Progressed", "TaskSpec")


class Progressed(msgspec.Struct, frozen=True, kw_only=True):
    """How far a turn had come in a worker that is gone: another one goes on from here.

    The answer has *output_tokens* so far, context shifts took *dropped* tokens out of the task's;
    its reader was told *text_bytes* and waits for *asked* more tokens (pull). Seconds count from
    when the turn was queued; *admitted_s* and *first_token_s* are None if that did not happen.
    """

    output_tokens: int = 0
    text_bytes: int = 0
    answer: bytes = b""
    """The answer's tokens, packed, where a shift dropped some of the task's."""
    surprisals: bytes = b""
    """Their surprisals, packed, where those count."""
    asked: int = 0
    dropped: int = 0
    shifts: int = 0
    age_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to compute.

    `tokens` is the whole history, packed; `owner` shares the machine fairly and scopes KV reuse.
    A push task generates while it has `credit` (events its reader can take; -1: no limit); a pull
    task generates one token per `Pull`. `n_predict` -1 is what is left of the context.
    """

    id: int
    owner: int
    tokens: bytes
    sampling: SamplingParams
    priority: Priority = Priority.NORMAL
    pull: bool = False
    credit: int = -1
    n_predict: int = -1
    ctx_size: int = 0
    """A context smaller than the worker's; 0: the worker's."""
    stop: tuple[str, ...] = ()
    reverse_prompt: tuple[str, ...] = ()
    stopping: StoppingParams = StoppingParams()
    """The other ends; they hold for the whole turn."""
    special: bool = False
    """Show special tokens' names in the text, as WasmEdge does."""
    queue_timeout_s: float = 0.0
    total_timeout_s: float = 0.0
    session: str = ""
    """The session's name among its owner's: states that serve it alone are found by it, and
    `Forget` forgets by it."""
    persist: bool = False
    """Its KV state may be written to disk."""
    adapters: tuple[str, ...] = ()
    """Their keys (`backends.adapters`), sorted: tasks with different ones share neither a batch nor
    KV state."""
    ctx_shift: bool = False
    n_keep: int = 0
    n_discard: int = 0
    cache_reuse: int = 0
    no_cache: bool = False
    """The prompt is computed anew, whatever KV state is there."""
    embed: EmbedSpec | None = None
    """Make an embedding of the tokens and say nothing: it is told in `Embedded`."""
    watch: bool = False
    """Tell the place in the queue when it changes (`Position`)."""
    progressed: Progressed | None = None
    """Set where another worker had begun the turn."""
    request: str = ""
    """Which request of a client it is, as the log names it."""
