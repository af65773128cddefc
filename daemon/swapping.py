"""Hot swap: another model takes over a name under running sessions.

What moves is the session, between turns. The new model is loaded beside the old one; from then on
turns begin on it, while those that run end where they began. A history moves as token ids where
both have the same vocabulary, else as text, and only then does the old model leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio
import structlog

from ..backends import ModelInfo
from ..backends.errors import Busy, Cancelled, ShuttingDown
from ..sessions import Session, TaskReader
from .config_models import ModelConfig
from .recovery import fail_readers
from .workers import Worker

if TYPE_CHECKING:
    from .models import Model
    from .registry import Registry

__all__ = ("Swapped", "Swaps")

NOBODY = -2
"""The owner of a model that no client may name."""
PASSES = 2
"""A turn whose session had the old worker's line may still begin there while the first histories
are taken along; after that nobody has it any more.
"""
RECOVERY_LOOK_S = 0.1
"""How often to look whether a worker is there again for the turns of one that died."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Swapped:
    """A swap that is done: the fingerprint now, and the one before (empty: nothing was loaded)."""

    fingerprint: str
    before: str


@dataclass(frozen=True)
class _Handover:
    """From *former*, whose worker was loaded as *before*, to *model*, which is *after* now."""

    former: Model
    model: Model
    before: ModelInfo
    after: ModelInfo

    @property
    def speaks_the_same(self) -> bool:
        """Tell whether both have the same vocabulary: token ids mean the same."""
        return self.before.vocab_hash == self.after.vocab_hash


class Swaps:
    """Does the swaps of a registry, one at a time for each model. *sessions* are all there are."""

    def __init__(self, registry: Registry, sessions: Iterable[Session], grace_s: float):
        self._registry, self._sessions, self._grace_s = registry, sessions, grace_s
        self._under_way: set[str] = set()

    async def swap(self, model: Model, config: ModelConfig) -> Swapped:
        """Let the model of *config* take over the name of *model*; return once new turns begin on
        it. The old one's turns end in the background, in `swap_grace_s` at most.

        :raises Busy: another swap of this name is under way.
        :raises LoadFailed: the new one cannot be loaded: nothing has changed.
        """
        if model.name in self._under_way:
            raise Busy(
                f"{model.name!r} is being swapped", hint="try again", data={"retry_after_s": 1.0}
            )
        self._under_way.add(model.name)
        try:
            return await self._take_over(model, config)
        except BaseException:
            self._under_way.discard(model.name)
            raise

    async def _take_over(self, model: Model, config: ModelConfig) -> Swapped:
        registry = self._registry
        former = registry.add(f"{model.name} (swap)", config, NOBODY)
        former.pinned = True
        try:
            worker = await former.ready()
            if model.worker is not None:
                await model.worker.loaded.wait()
            if registry.closing:
                raise ShuttingDown("the daemon is shutting down")
        except BaseException:
            await self._drop(former)
            raise
        before = registry.exchange(model, former)
        done = Swapped(worker.info.fingerprint, "" if before is None else before.info.fingerprint)
        log.info(
            "model.swapped", model=model.name, fingerprint=done.fingerprint, before=done.before
        )
        if before is None:
            await self._drop(former)
            self._under_way.discard(model.name)
        else:
            handover = _Handover(former, model, before.info, worker.info)
            model.formers[before.info.vocab_hash] = former
            registry.start_soon(self._retire, handover, before)
        return done

    async def _retire(self, handover: _Handover, before: Worker) -> None:
        """Let the turns of the old model end, take the histories along, and let it leave."""
        former, model = handover.former, handover.model
        try:
            if handover.speaks_the_same:
                self._registry.move(model, before.give_away(waiting=True))
            for _ in range(PASSES):
                with anyio.move_on_after(self._grace_s):
                    await _finished(former, before)
                self._pass_on(handover, _unfinished(former))
                await self._carry(handover)
        finally:
            with anyio.CancelScope(shield=True):
                del model.formers[handover.before.vocab_hash]
                if former.worker is not None:
                    former.worker.heir = partial(self._pass_on, handover)
                await self._drop(former)
                self._under_way.discard(model.name)

    async def _carry(self, handover: _Handover) -> None:
        """Take along the histories in the tokens of the old model. Each session's own work is
        waited for, so that none has the old worker's line afterwards.
        """
        done: set[Session] = set()
        while session := self._another(handover.model, done):
            done.add(session)
            try:
                await session.carry(also_text=not handover.speaks_the_same)
            except Exception as exc:  # the other sessions go on
                log.error("session.not_carried", session=session.handle, cause=str(exc))

    def _another(self, model: Model, done: set[Session]) -> Session | None:
        found = (s for s in self._sessions if s.model.name == model.name and s not in done)
        return next(found, None)

    def _pass_on(self, handover: _Handover, readers: Mapping[int, TaskReader]) -> None:
        """Let turns of the old model go on in the new one, if that has the vocabulary; else they
        end, and those that had not begun may be asked for again.
        """
        if handover.speaks_the_same:
            self._registry.move(handover.model, readers)
            return
        name = handover.model.name
        begun = {number: reader for number, reader in readers.items() if reader.begun}
        fail_readers(
            begun,
            Cancelled(
                f"the turn ended with its model: {name!r} was swapped",
                hint="go on with the next turn: the history is there",
            ),
        )
        fail_readers(
            {number: reader for number, reader in readers.items() if number not in begun},
            Busy(
                f"{name!r} was swapped before the turn had begun",
                hint="ask again: the history is there",
                data={"retry_after_s": 0.0},
            ),
        )

    async def _drop(self, former: Model) -> None:
        await former.unload()
        self._registry.remove(former)


async def _finished(former: Model, before: Worker) -> None:
    """Wait until the old worker, or another one that its turns needed, has no turns left."""
    while True:
        worker, recovering = former.worker or before, len(former.recovery) > 0
        if not worker.tasks and not recovering:
            return
        with anyio.move_on_after(RECOVERY_LOOK_S if recovering else None):
            await worker.changed()


def _unfinished(former: Model) -> dict[int, TaskReader]:
    """Take the turns that a model has, those that wait for its worker included."""
    waiting = former.recovery.release()
    return waiting if former.worker is None else waiting | former.worker.give_away()
