"""A task as the daemon submits it: one turn to compute, new or resumed from another worker."""

from __future__ import annotations

import hashlib

import msgspec

from ...backends import EmbedSpec, SamplingParams
from ...backends.media import MediaItem
from ...backends.params import StoppingParams
from ..owner import Owner
from ..priority import Priority
from .base import PACKED_TOKEN_BYTES, count_tokens


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a turn in a worker that has exited, from which another worker continues.

    The answer has *output_tokens* so far; context shifts took *dropped* tokens out of the task's.
    The reader has received *text_bytes* and, if it pulls, waits for *tokens_requested* more.
    At its first slot, *cached_tokens* of its prompt needed no computing. Seconds count from when
    the turn was queued. *started_s* and *first_token_s* are None if these moments have not come.
    """

    output_tokens: int = 0
    text_bytes: int = 0
    answer: bytes = b""
    """The answer's packed tokens, if a shift dropped some of the task's tokens."""
    surprisals: bytes = b""
    """The packed surprisals of the answer's tokens, if the turn needs them."""
    tokens_requested: int = 0
    prompt_logprobs: int = 0
    """The number of the prompt's first tokens whose logprobs were reported."""
    dropped: int = 0
    shifts: int = 0
    forced_tokens: int = 0
    cached_tokens: int = 0
    age_s: float = 0.0
    started_s: float | None = None
    first_token_s: float | None = None


class SharedKv(msgspec.Struct, frozen=True):
    """The KV state of another user's named state, which an access rule shares. It is that of the
    first *size* tokens of a prompt, if these have its *digest*. *name* is the engine's name of the
    state.
    """

    user: int
    name: str
    size: int
    digest: bytes

    @classmethod
    def of_tokens(cls, user: int, name: str, packed: bytes) -> SharedKv:
        """Return the KV state of the packed tokens of a named state."""
        return cls(user, name, count_tokens(packed), _digest(packed))

    def begins(self, packed: bytes) -> bool:
        """Return whether packed tokens begin with those of the state. Other tokens must not be
        looked up among the KV states of its user, because that would show what these contain.
        """
        size = self.size * PACKED_TOKEN_BYTES
        return len(packed) >= size and _digest(packed[:size]) == self.digest


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to compute.

    `tokens` is the whole history, packed. `owner` is the unit of fairness, and its user scopes KV
    reuse. A push task generates while it has `credit` (events that its reader can take; -1 means no
    limit); a pull task generates one token per `PullToken`. An `n_predict` of -1 means the rest of
    the context.
    """

    id: int
    owner: Owner
    account: int = -1
    """The gateway's user, if the owner is one of the gateway's own users; they share a part of the
    time. -1: the owner's user is a user of the system.
    """
    tokens: bytes
    media: tuple[MediaItem, ...] = ()
    """The images and sounds among the tokens, in their order."""
    sampling: SamplingParams
    priority: Priority = Priority.NORMAL
    pull: bool = False
    credit: int = -1
    n_predict: int = -1
    ctx_size: int = 0
    """A context smaller than the worker's; 0 stands for the worker's."""
    batch_size: int = 0
    """The most prompt tokens that it computes in a step; 0 sets no bound of its own."""
    stop: tuple[str, ...] = ()
    reverse_prompt: tuple[str, ...] = ()
    stopping: StoppingParams = StoppingParams()
    """The other stop conditions; they hold for the whole turn."""
    special: bool = False
    """Show special tokens' names in the text, as WasmEdge does."""
    shown_tokens: tuple[str, ...] = ()
    """Names of special tokens that are shown in any case; these mark tool calls."""
    queue_timeout_s: float = 0.0
    total_timeout_s: float = 0.0
    session: str = ""
    """The session's name, unique for its owner, by which states of this session are found and
    deleted.
    """
    persist: bool = False
    """Its KV state may be written to disk."""
    adapters: tuple[str, ...] = ()
    """Sorted adapter keys. Tasks with different adapters share neither a batch nor KV state."""
    ctx_shift: bool = False
    n_keep: int = 0
    n_discard: int = 0
    cache_reuse: int = 0
    shared_kv: SharedKv | None = None
    """The KV state of another user with which the tokens begin."""
    no_cache: bool = False
    """Compute the whole prompt and use no KV state."""
    prompt_logprobs: int | None = None
    """Report the logprobs of the prompt's tokens, each with this many top tokens."""
    embed: EmbedSpec | None = None
    """Return an embedding of the tokens (`Embedded`) instead of generating text."""
    watch: bool = False
    """Report the place in the queue when it changes (`Position`)."""
    watch_prompt: bool = False
    """Report the progress of the prompt after each step (`PromptProgress`)."""
    resume_point: ResumePoint | None = None
    """The progress of a turn resumed from another worker."""
    trial_tokens: int = 0
    """This many of its tokens are computed in steps of their own, as a worker has died in a step
    with it.
    """
    request: str = ""
    """The log's name for the client's request."""
