"""Hot swap: another model takes over a name under running sessions.

What moves is the session, between turns. The new model is loaded beside the old one; from then on
turns begin on it, while those that run end where they began. A history moves as token ids where
both have the same vocabulary, else as text, and only then does the old model leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio
import structlog

from ..backends.errors import Busy, Cancelled, ShuttingDown
from ..scheduler.recorder import Act, Doing
from ..sessions import Session
from .config_models import ModelConfig
from .workers import Worker

if TYPE_CHECKING:
    from .models import Model
    from .registry import Registry

__all__ = ("Swaps",)

NOBODY = -2
"""The owner of a model that no client may name."""

_REST = Act(Doing.REST, (), 0.0)

log = structlog.get_logger()


class Swaps:
    """Does the swaps of a registry, one at a time for each model. *sessions* are all there are."""

    def __init__(self, registry: Registry, sessions: Iterable[Session], grace_s: float):
        self._registry, self._sessions, self._grace_s = registry, sessions, grace_s
        self._under_way: set[str] = set()

    async def swap(self, model: Model, config: ModelConfig) -> Worker:
        """Let the model of *config* take over the name of *model*; return its worker once new turns
        begin on it. The old one's turns end in the background, in `swap_grace_s` at most.

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

    async def _take_over(self, model: Model, config: ModelConfig) -> Worker:
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
        log.info(
            "model.swapped",
            model=model.name,
            fingerprint=worker.info.fingerprint,
            before="" if before is None else before.info.fingerprint,
        )
        if before is None:
            await self._drop(former)
            self._under_way.discard(model.name)
        else:
            model.formers.append(before)
            registry.start_soon(self._retire, model, former, before)
        return worker

    async def _retire(self, model: Model, former: Model, before: Worker) -> None:
        """Let the turns of the old worker end, take the histories along, and let it leave."""
        try:
            with anyio.move_on_after(self._grace_s):
                await self._finished(former, before)
            if before.tasks:
                self._move_turns(model, before)
            for session in [s for s in self._sessions if s.model.name == model.name]:
                await session.carry()
            await self._finished(former, before)  # who had its line begins there all the same
        finally:
            with anyio.CancelScope(shield=True):
                model.formers.remove(before)
                await self._drop(former)
                self._under_way.discard(model.name)

    async def _finished(self, former: Model, before: Worker) -> None:
        """Wait until the old worker, or another one that it needed, has no turns left."""
        while True:
            worker = former.worker or before
            if not worker.tasks and not len(former.recovery):
                return
            await worker.changed()

    def _move_turns(self, model: Model, before: Worker) -> None:
        """Move turns in their middle: those that the new worker has the vocabulary for."""
        after = model.worker
        if after is not None and _vocabulary(after) == _vocabulary(before):
            before.give_away(lambda readers: self._registry.adopt(model, readers, _REST))
        else:
            before.fail_tasks(
                Cancelled(
                    f"the turn ended with its model: {model.name!r} was swapped",
                    hint="go on with the next turn: the history is there",
                )
            )

    async def _drop(self, former: Model) -> None:
        await former.unload()
        self._registry.remove(former)


def _vocabulary(worker: Worker) -> str:
    ready = worker.loaded.is_set() and worker.error is None
    return worker.info.vocab_hash if ready else ""
