"""Named states: the histories and parameters of sessions at one time, which never change."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import anyio
import msgspec
import structlog

from ..backends.errors import (
    BackendError,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    SessionBusy,
    WorkerCrashed,
)
from ..scheduler.kv.store import name_of_state
from ..scheduler.messages import SharedKv, count_tokens
from ..scheduler.owner import Owner
from .admission.bounds import KeptBytes
from .conversation.session import Session
from .entries import SessionFacts, StoredSession, decode_history, encode
from .history.history import History
from .identity import check_id
from .journal.journal import Journal, Recording
from .lifetimes.deletion import Delete, nothing
from .media_store import NO_DIRECTORY, MediaStore
from .memory import memory_bytes
from .table import SessionCall, step
from .turn.options import TurnOptions
from .worker_client import WorkerClient

STATE_BYTES = 4096
"""Memory of a named state besides its history and parameters."""


class StateFacts(SessionFacts, frozen=True, kw_only=True):
    """The stored values of a named state besides its history. *defaults* are those that its session
    was opened with, without its model's. *adapters* are the keys by which its KV state is found;
    *created_at* is a date of the system's clock.
    """

    adapters: tuple[str, ...] = ()
    created_at: float = 0.0


@dataclass(frozen=True, eq=False)
class NamedState:
    """One named state, a value. *packed* is its history, an encoded `HistoryEntry`."""

    owner: Owner
    name: str
    facts: StateFacts
    packed: bytes

    @classmethod
    def of_session(cls, session: Session, name: str, created_at: float) -> NamedState:
        """Return the state of a session whose last turn, if any, has computed its prompt."""
        # Sessions from the state compute their tokens anew if a context shift had dropped some,
        # because the KV states of shifted contexts serve one session only.
        entry = session.conversation.history_state.now.entry()
        values, origins = msgspec.structs.asdict(session.facts), session.settings.parameters.origins
        values["note"] = b""
        values["defaults"] = {k: v for k, v in values["defaults"].items() if k not in origins}
        facts = StateFacts(**values, adapters=session.settings.adapters, created_at=created_at)
        packed = encode(msgspec.structs.replace(entry, shifted=False))
        return cls(session.owner, name, facts, packed)

    @classmethod
    def from_stored(cls, stored: StoredSession) -> NamedState:
        assert isinstance(stored.facts, StateFacts), "the journal of named states has their facts"
        return cls(stored.owner, stored.session_id, stored.facts, stored.past)

    @property
    def kv_name(self) -> str:
        return name_of_state(self.owner.label, self.name)

    @property
    def tokens(self) -> list[int]:
        return self.new_history().prompt

    def shared_with(self, owner: Owner) -> SharedKv | None:
        """Return its KV state for a session of another user, or None for the same user."""
        if owner.user == self.owner.user:
            return None
        packed = decode_history(self.packed).tokens
        return SharedKv.of_tokens(self.owner.user, self.kv_name, packed)

    @cached_property
    def size(self) -> int:
        return count_tokens(decode_history(self.packed).tokens)

    @cached_property
    def kept_bytes(self) -> int:
        return (
            STATE_BYTES + len(self.packed) + memory_bytes(self.facts.options, self.facts.defaults)
        )

    def defaults_on(
        self, requested: Mapping[str, Any], origins: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the defaults of a session on a graph with the options *requested*. The state's
        defaults replace the model's, which have *origins*; the graph's own replace both.
        """
        own = {name: value for name, value in requested.items() if name not in origins}
        return dict(requested) | self.facts.defaults | own

    def new_history(self) -> History:
        return History.from_entry(decode_history(self.packed))


COMPUTE_ONLY = TurnOptions(options={"n-predict": 0})
"""The turn that computes the KV state of a history, and generates nothing."""
_ATTEMPTS = 2
"""Times that a KV state is computed to be saved, if another turn takes it over meanwhile."""
log = structlog.get_logger(logger_name="sessions")
StateKey = tuple[Owner, str]


@dataclass(frozen=True)
class StateLimits:
    """The bounds of the states of all users, and of one user."""

    states_max: int = 1000
    states_user_max: int = 100
    bytes_max: int = 64 << 20


class NamedStates:
    """Owned by the daemon's event loop. Only its owner changes or deletes a state. A state is in
    *journal* before it is reported as saved. The session that computes a KV state to be saved is in
    *one_turn_sessions* meanwhile. *find_client* returns the worker of a loaded model by name and
    user, and *delete_files* deletes KV files by owner and the engine's name of the state.
    """

    def __init__(
        self,
        journal: Journal,
        kept_bytes: KeptBytes,
        new_handle: Callable[[], int],
        one_turn_sessions: set[Session],
        find_client: Callable[[str, int], WorkerClient | None],
        delete_files: Delete = nothing,
        limits: StateLimits | None = None,
        media: MediaStore | None = None,
    ):
        self._media = MediaStore(NO_DIRECTORY) if media is None else media
        self.limits = limits or StateLimits()
        self._journal, self._kept_bytes = journal, kept_bytes
        self._new_handle, self._one_turn_sessions = new_handle, one_turn_sessions
        self._find_client, self._delete_files = find_client, delete_files
        self._states: dict[StateKey, NamedState] = {}
        self._changing: set[StateKey] = set()
        """States that are being saved or deleted."""

    def __iter__(self) -> Iterator[NamedState]:
        return iter(list(self._states.values()))

    def __len__(self) -> int:
        return len(self._states)

    @property
    def bytes(self) -> int:
        return sum(state.kept_bytes for state in self._states.values())

    def restore_states(self, found: Sequence[StoredSession]) -> None:
        for stored in found:
            self._publish(NamedState.from_stored(stored), found=True)

    def find_state(
        self, owner: Owner, name: str, shared: Mapping[str, StateKey] | None = None
    ) -> NamedState:
        """Return an owner's state, or else one of another user that is *shared* by this name.

        :raises NotFound: there is none of this name, or no access rule shares it.
        :raises InvalidArgument: the name is too long.
        """
        key = (owner, name)
        if key not in self._states and shared is not None:
            key = shared.get(name, key)
        state = self._states.get(key)
        if state is None:
            check_id(name, "a state's name")
            raise NotFound(
                f"there is no state {name!r}",
                hint="save it by save_state; `inferd states` lists yours and those shared with you",
            )
        return state

    def get(self, key: StateKey) -> NamedState | None:
        return self._states.get(key)

    # Saving.

    async def save_state(
        self, session: Session, name: str, *, replace: bool = False
    ) -> tuple[NamedState, int]:
        """Save the present state of *session*. Return it, and the number of its tokens whose KV
        state is on disk.

        :raises InvalidArgument: the name is in use or cannot be one, or the history is empty.
        :raises SessionBusy: the state is being saved or deleted already, or a turn is under way.
        :raises PromptTooLong: no context holds the session's input.
        :raises QuotaExceeded: a bound is reached.
        :raises BackendError: it cannot be written.
        """
        key = session.owner, name
        with self._change(key):
            before = self._states.get(key)
            if before is not None and not replace:
                raise InvalidArgument(
                    f"there is a state {name!r} already",
                    hint="use another name, delete it, or save with replace",
                )
            _check_history(session)
            with self._snapshot_of(session) as snapshot:
                await _compute(snapshot)
                state = NamedState.of_session(snapshot, name, time.time())
                self._check_bounds(state, before)
                await self._write(state, before)
                log.info("state.saved", state=name, model=state.facts.model, tokens=state.size)
                if before is not None:
                    await self._delete_kv(before)
                return state, await self._save_kv(state, snapshot)

    @contextmanager
    def _snapshot_of(self, session: Session) -> Iterator[Session]:
        """Yield a branch of a session, which nobody else uses."""
        snapshot = session.branch(self._new_handle(), None)
        self._one_turn_sessions.add(snapshot)
        try:
            yield snapshot
        finally:
            self._one_turn_sessions.discard(snapshot)
            snapshot.release_contents()

    def _check_bounds(self, state: NamedState, before: NamedState | None) -> None:
        limits, owner = self.limits, state.owner
        more = state.kept_bytes - (0 if before is None else before.kept_bytes)
        counts = Counter(user.user for user, _ in self._states)
        new = before is None
        for bound, count, limit in (
            ("states-user-max", counts[owner.user] + new, limits.states_user_max),
            ("states-max", len(self) + new, limits.states_max),
            ("states-bytes-max", self.bytes + more, limits.bytes_max),
        ):
            if count > limit:
                raise QuotaExceeded(
                    f"{bound} is {limit}; with this state, {count} would be needed",
                    hint="delete states that are no longer needed: `inferd states` lists yours",
                    data={"bound": bound},
                    retryable=False,
                )
        self._kept_bytes.check_growth(owner, more)

    async def _write(self, state: NamedState, before: NamedState | None) -> None:
        """Publish a state and write it; if the write fails, restore the state *before*."""
        key = state.owner, state.name
        recording = self._publish(state)
        recording.history_changed()
        with anyio.CancelScope(shield=True):  # what follows must be done for each outcome
            await recording.wait_written()
        if recording.durable:
            if before is not None:
                self._media.release(before)
            return
        self._media.release(state)
        cause = self._journal.cause or "the journal is of a newer version"
        self._journal.withdraw(recording)
        self._remove(key)
        if before is not None:
            self._publish(before).history_changed()  # written once that works again
        else:
            with suppress(BackendError):
                await self._journal.erase_session(*key)
        raise BackendError(
            f"the state cannot be written: {cause}",
            hint="free space on the disk of state-dir, or let the daemon's user write there",
        )

    def _publish(self, state: NamedState, *, found: bool = False) -> Recording:
        key = state.owner, state.name
        self._remove(key)
        self._states[key] = state
        self._kept_bytes.add_holder(state, state.owner, state.kept_bytes)
        self._media.hold(state, state.owner.user, state.facts.media)
        return self._journal.open_recording(state, key, found=found)

    def _remove(self, key: StateKey) -> NamedState | None:
        state = self._states.pop(key, None)
        if state is not None:
            self._kept_bytes.remove_holder(state)
        return state

    async def _save_kv(self, state: NamedState, snapshot: Session) -> int:
        """Write the KV state of a state to disk; return the number of its tokens there."""
        tokens, saved = state.tokens, 0
        with suppress(WorkerCrashed):  # the next session from the state computes it
            for attempt in range(_ATTEMPTS if tokens else 0):
                if attempt:
                    await _compute(snapshot)
                client = await snapshot.model.ready()
                saved = await client.save_named_state(
                    state.owner, state.kv_name, state.facts.adapters, tokens
                )
                if saved:
                    break
        return saved

    # Use and deletion.

    def prepare_kv(self, state: NamedState, user: int) -> None:
        """Request that the KV state of a state is in memory, for a session of *user* that was just
        opened from it.
        """
        client, tokens = self._find_client(state.facts.model, user), state.tokens
        if client is None or not tokens:
            return
        values = (state.owner, state.kv_name, state.facts.adapters, tokens)
        if user == state.owner.user:
            client.prepare_named_state(*values)
        else:
            client.share_named_state(*values, user)

    async def delete_state(self, owner: Owner, name: str) -> bool:
        """Delete an owner's state with its KV state, before this returns; return whether there was
        one. Sessions that were opened from it stay.

        :raises SessionBusy: it is being saved or deleted already.
        :raises BackendError: its row or its KV files cannot be deleted.
        """
        key = owner, name
        with self._change(key):
            state = self._remove(key)
            if state is None:
                return False
            log.info("state.deleted", state=name)
            try:
                await self._journal.erase_session(owner, name)
            finally:
                self._media.release(state)
                await self._delete_kv(state)
            await self._media.delete_unused(owner.user)
            return True

    async def _delete_kv(self, state: NamedState) -> None:
        client = self._find_client(state.facts.model, state.owner.user)
        if client is not None:
            with suppress(WorkerCrashed):  # its memory is freed already
                await client.delete_session_states(state.owner, state.kv_name)
        await self._delete_files(state.owner, state.kv_name)

    @contextmanager
    def _change(self, key: StateKey) -> Iterator[None]:
        """Reserve a name, so that no other call changes its state.

        :raises InvalidArgument: the name is empty or too long.
        :raises SessionBusy: another call changes the state.
        """
        check_id(key[1], "a state's name")
        if key in self._changing:
            raise SessionBusy(f"state {key[1]!r} is being saved or deleted", hint="try again soon")
        self._changing.add(key)
        try:
            yield
        finally:
            self._changing.discard(key)


def _check_history(session: Session) -> None:
    """Check that a session is at rest and has a history.

    :raises SessionBusy: a turn is under way.
    :raises PromptTooLong: no context holds its input.
    :raises InvalidArgument: the history is empty.
    """
    step(session.state, SessionCall.FORK)
    conversation = session.conversation
    if conversation.last.overlong is not None:
        raise conversation.last.overlong.error(len(conversation.prompt))
    if not conversation.size and not conversation.messages:
        raise InvalidArgument(
            "the context has no history to save", hint="send a prompt, or set a system prompt first"
        )


async def _compute(snapshot: Session) -> None:
    """Compute the KV state of a history, as far as it is not in memory or on disk."""
    if snapshot.conversation.prompt:
        await snapshot.finish_turn(await snapshot.start_turn(COMPUTE_ONLY))
