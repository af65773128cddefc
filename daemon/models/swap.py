"""Hot swap: another model takes over a name under running sessions.

What moves is the session, between turns. To *migrate*, the new model is loaded beside the old one;
from then on turns begin on it, while those that run end where they began. Where memory does not
hold both, the old one is *drained*: new turns are held back, those that run end, it leaves, and the
new one is loaded in its place. A history moves as token ids where both have the same vocabulary,
else as text, which is asked of the old model before it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import anyio
import structlog

from ...backends import ModelInfo
from ...backends.errors import Busy, Cancelled, InferdError, OutOfMemory, ShuttingDown
from ...sessions import Session, TaskReader
from ..config.model_settings import ModelConfig
from ..workers.process_client import ProcessClient
from ..workers.recovery import fail_readers
from ..workers.tasks import WorkerTasks
from ..workers.worker import Worker
from .adapter_specs import inherit_adapters
from .model import ManagedModel
from .registry import Registry

Mode = Literal["migrate", "drain"]

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
    """A swap that is done: the fingerprint now, the one before (empty: nothing was loaded), and
    how it was done.
    """

    fingerprint: str
    before: str
    mode: Mode


@dataclass(frozen=True)
class _Handover:
    """*model* was loaded as *before*, and is *after* now."""

    model: ManagedModel
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

    async def swap(
        self, model: ManagedModel, config: ModelConfig, mode: Mode = "migrate"
    ) -> Swapped:
        """Let the model of *config* take over the name of *model*; return once new turns begin on
        it. The old one's turns end in `swap_grace_s` at most, where it can be in the background.
        Where memory does not hold both, it is drained whatever *mode* says.

        :raises Busy: another swap of this name is under way.
        :raises LoadFailed: the new one cannot be loaded: nothing has changed.
        """
        if model.name in self._under_way:
            raise Busy(
                f"{model.name!r} is being swapped", hint="try again", data={"retry_after_s": 1.0}
            )
        self._under_way.add(model.name)
        try:
            async with model.changing:
                return await self._migrate_or_drain(
                    model, inherit_adapters(config, model.config), mode
                )
        except BaseException:
            self._under_way.discard(model.name)
            raise

    async def _migrate_or_drain(
        self, model: ManagedModel, config: ModelConfig, mode: Mode
    ) -> Swapped:
        if mode == "migrate" or model.state != "ready":
            try:
                return await self._take_over(model, config)
            except OutOfMemory as exc:
                if model.state != "ready" or not self._would_fit(model, exc):
                    raise
        return await self._replace(model, config)

    def _would_fit(self, model: ManagedModel, refusal: OutOfMemory) -> bool:
        """Tell whether it is worth while to let *model* leave for what was refused."""
        held = self._registry.reserved_for(model.worker)
        room = refusal.data["free_bytes"] + (0 if held is None else held.total)
        return bool(refusal.data["weights_bytes"] <= room)

    async def _take_over(self, model: ManagedModel, config: ModelConfig) -> Swapped:
        registry = self._registry
        predecessor = registry.catalog.add_model(f"{model.name} (swap)", config, NOBODY)
        predecessor.pinned = predecessor.never_shrinks = True
        try:
            worker = await predecessor.ready()
            if model.worker is not None:
                await model.worker.loaded.wait()
            if registry.closing:
                raise ShuttingDown("the daemon is shutting down")
        except BaseException:
            await self._drop(predecessor)
            raise
        before = registry.launcher.exchange_models(model, predecessor)
        predecessor.never_shrinks = False
        done = self._done(model, worker.info, None if before is None else before.info, "migrate")
        if before is None:
            await self._drop(predecessor)
            self._under_way.discard(model.name)
        else:
            handover = _Handover(model, before.info, worker.info)
            model.predecessors[before.info.vocab_hash] = predecessor
            registry.start_soon(self._retire, handover, predecessor, before)
        return done

    async def _retire(self, handover: _Handover, predecessor: ManagedModel, before: Worker) -> None:
        """Let the old model leave; however that goes, the name can be swapped again then."""
        try:
            await self._see_off(handover, predecessor, before)
        finally:
            self._under_way.discard(handover.model.name)

    async def _see_off(
        self, handover: _Handover, predecessor: ManagedModel, before: Worker
    ) -> None:
        """Let the turns of the old model end, take the histories along, and let it leave."""
        model = handover.model
        try:
            if handover.speaks_the_same:
                self._registry.move_tasks(model, before.client.withdraw_tasks(waiting=True))
            for _ in range(PASSES):
                self._pass_on(handover, await self._rest_of(predecessor, before.client.tasks))
                await self._carry(model, also_text=not handover.speaks_the_same)
        finally:
            with anyio.CancelScope(shield=True):
                del model.predecessors[handover.before.vocab_hash]
                if predecessor.worker is not None:
                    predecessor.worker.client.successor = partial(self._pass_on, handover)
                await self._drop(predecessor)

    async def _replace(self, model: ManagedModel, config: ModelConfig) -> Swapped:
        """Drain the old model, and load the new one in its place; if that fails, the old one."""
        worker = await model.ready()
        before, after = worker.info, worker.info
        left: dict[int, TaskReader] = {}
        model.hold_turns()
        log.info("model.draining", model=model.name, tasks=len(worker.tasks))
        try:
            await self._empty(model, worker, left)
            after = await self._exchange(model, config, left)
        finally:
            model.release_turns()
            self._pass_on(_Handover(model, before, after), left)
            self._under_way.discard(model.name)
        return self._done(model, after, before, "drain")

    async def _empty(
        self, model: ManagedModel, worker: ProcessClient, left: dict[int, TaskReader]
    ) -> None:
        """Let the turns of *model* end, but for those *left* after the grace, and take the
        histories along.
        """
        model.predecessors[worker.info.vocab_hash] = model
        try:
            for _ in range(PASSES):
                left |= await self._rest_of(model, worker.tasks)
                await self._carry(model, also_text=True)
        finally:
            del model.predecessors[worker.info.vocab_hash]

    async def _exchange(
        self, model: ManagedModel, config: ModelConfig, left: dict[int, TaskReader]
    ) -> ModelInfo:
        """Unload *model*, and load it as *config* says; if that fails, as it was before. Turns that
        come to its old worker after all are *left*, too.
        """
        before, model.config, model.replaced = model.config, config, True
        if model.worker is not None:
            model.worker.client.successor = left.update
        try:
            await model.unload()
            return (await model.load()).info
        except BaseException as exc:
            model.config = before
            with anyio.CancelScope(shield=True):
                await model.unload()
                if isinstance(exc, InferdError):
                    await self._bring_back(model)
            raise

    async def _bring_back(self, model: ManagedModel) -> None:
        try:
            await model.load()
        except InferdError as exc:  # the next turn tries again
            log.error("model.reload_failed", model=model.name, cause=exc.message)

    async def _rest_of(self, model: ManagedModel, tasks: WorkerTasks) -> dict[int, TaskReader]:
        """Let the turns of *model*, among its *tasks*, end; take those that outlast the grace."""
        with anyio.move_on_after(self._grace_s):
            await _finished(model, tasks)
        return _unfinished(model)

    async def _carry(self, model: ManagedModel, *, also_text: bool) -> None:
        """Wait for each session's own work, so that none has the old worker's line afterwards; with
        *also_text*, take the histories along that are in its tokens.
        """
        done: set[Session] = set()
        while session := self._another(model, done):
            done.add(session)
            try:
                await session.link.prepare_migration(also_text=also_text)
            except Exception as exc:  # the other sessions go on
                log.error("session.not_migrated", session=session.handle, cause=str(exc))

    def _another(self, model: ManagedModel, done: set[Session]) -> Session | None:
        found = (s for s in self._sessions if s.model.name == model.name and s not in done)
        return next(found, None)

    def _pass_on(self, handover: _Handover, readers: Mapping[int, TaskReader]) -> None:
        """Let turns of the old model go on in the new one, if that has the vocabulary; else they
        end, and those that had not begun may be asked for again.
        """
        if handover.speaks_the_same:
            self._registry.move_tasks(handover.model, readers)
            return
        name = handover.model.name
        begun = {number: reader for number, reader in readers.items() if reader.begun}
        fail_readers(
            begun,
            Cancelled(
                f"the turn ended with its model: {name!r} was swapped",
                hint="send the next turn: the history is kept",
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

    def _done(
        self, model: ManagedModel, after: ModelInfo, before: ModelInfo | None, mode: Mode
    ) -> Swapped:
        """Write down what the name means now."""
        done = Swapped(after.fingerprint, "" if before is None else before.fingerprint, mode)
        self._registry.persist_settings(model)
        log.info(
            "model.swapped",
            model=model.name,
            fingerprint=done.fingerprint,
            before=done.before,
            mode=mode,
        )
        return done

    async def _drop(self, predecessor: ManagedModel) -> None:
        predecessor.dropped = True
        await predecessor.unload()
        self._registry.catalog.remove_model(predecessor)


async def _finished(predecessor: ManagedModel, before: WorkerTasks) -> None:
    """Wait until the old worker, or another one that its turns needed, has no turns left."""
    while True:
        tasks = before if predecessor.worker is None else predecessor.worker.client.tasks
        recovering = len(predecessor.recovery) > 0
        if not tasks and not recovering:
            return
        with anyio.move_on_after(RECOVERY_LOOK_S if recovering else None):
            await tasks.changed()


def _unfinished(predecessor: ManagedModel) -> dict[int, TaskReader]:
    """Take the turns that a model has, those that wait for its worker included."""
    waiting = predecessor.recovery.release_tasks()
    return (
        waiting
        if predecessor.worker is None
        else waiting | predecessor.worker.client.withdraw_tasks()
    )
