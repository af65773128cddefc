"""Hot swap: another model takes over a name while its sessions continue.

Sessions move between turns. A swap in mode *migrate* loads the new model beside the old one: new
turns begin on the new model, running turns end on the old one. If memory does not hold both, the
old model is *drained*: new turns are held back, running turns end, and the new model is loaded in
its place. Histories move as token ids if both models have the same vocabulary, else as text, which
the old model produces before it is unloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import anyio
import structlog

from ...backends import ENGINES, ModelInfo
from ...backends.errors import (
    Busy,
    Cancelled,
    InferdError,
    OutOfMemory,
    ShuttingDown,
    UnsupportedOperation,
)
from ...ipc.messages import SwapResult
from ...sessions import Session, TaskReader
from ..config.model_settings import ModelConfig
from ..workers.process_client import ProcessClient, WorkerTasks
from ..workers.recovery import fail_readers
from ..workers.worker import Worker
from .model import ManagedModel
from .registry import Registry

Mode = Literal["migrate", "drain"]

HIDDEN_UID = -2
"""The owner of a model that no client sees."""
MIGRATION_PASSES = 2
"""While the first pass migrates histories, a session that still has the old worker's client may
begin a turn there. After the pass no session has that client.
"""
SWAPS_WAITING_MAX = 8
"""Swaps of one name that wait for the previous one."""
RECOVERY_POLL_S = 0.1
"""The interval at which a swap checks whether the turns of a dead worker have another one."""

log = structlog.get_logger()


class Swaps:
    """The swaps of a registry, at most one per model at a time. *sessions* are all sessions;
    *note_ended* gets the mode and the duration of each swap.

    Owned by the daemon's event loop.
    """

    def __init__(
        self,
        registry: Registry,
        sessions: Iterable[Session],
        grace_s: float,
        note_ended: Callable[[str, float], None],
    ):
        self._registry, self._sessions, self._grace_s = registry, sessions, grace_s
        self._note_ended = note_ended

    async def swap(
        self,
        model: ManagedModel,
        config: ModelConfig,
        mode: Mode = "migrate",
        *,
        to: str = "",
        force: bool = False,
    ) -> SwapResult:
        """Load *config* under the name of *model*; return once new turns begin on it. *to* is the
        name or file from which *config* was taken, or empty if it is the model's own. The name's
        adapters stay, unless *config* has one of the same name.

        Turns of the old model end within `swap_grace_s`; in mode *migrate*, this happens in the
        background. If memory does not hold both models, the old one is drained whatever *mode* is.
        A swap waits until the old model of the name's previous swap is unloaded.

        :raises Busy: too many swaps of this name wait.
        :raises LoadFailed: the new model cannot be loaded; nothing has changed.
        :raises UnsupportedOperation: the new model generates no text, as sessions need it to, and
            *force* is not given; nothing has changed.
        """
        if model.swapping.statistics().tasks_waiting >= SWAPS_WAITING_MAX:
            raise Busy(
                f"{SWAPS_WAITING_MAX} swaps of {model.name!r} wait for the previous one",
                hint="try again once they have ended",
                data={"retry_after_s": 1.0},
            )
        await model.swapping.acquire()
        began = time.monotonic()
        try:
            async with model.changing:
                config = replace(
                    config,
                    adapters=model.config.adapters | config.adapters,
                    templates=model.config.templates,
                )
                swapped = await self._swap_config(model, config, mode, to, force=force)
        finally:
            if not model.predecessors:  # otherwise `_retire_predecessor` releases it
                model.swapping.release()
        self._note_ended(swapped.mode, time.monotonic() - began)
        return swapped

    async def _swap_config(
        self, model: ManagedModel, config: ModelConfig, mode: Mode, to: str, *, force: bool
    ) -> SwapResult:
        if mode == "migrate" or model.state != "ready":
            try:
                return await self._migrate(model, config, to, force=force)
            except OutOfMemory as exc:
                if model.state != "ready" or not self._fits_in_place(model, exc):
                    raise
        return await self._drain(model, config, to, force=force)

    def _fits_in_place(self, model: ManagedModel, refusal: OutOfMemory) -> bool:
        """Return whether the refused model may fit once *model* is unloaded."""
        held = self._registry.reservations.of_worker(model.worker)
        free = refusal.data["free_bytes"] + (0 if held is None else held.total)
        return bool(refusal.data["weights_bytes"] <= free)

    # Migration.

    async def _migrate(
        self, model: ManagedModel, config: ModelConfig, to: str, *, force: bool
    ) -> SwapResult:
        registry = self._registry
        # It holds the new model until `exchange_models`, and the old one from then on.
        predecessor = registry.catalog.add_model(f"{model.name} (swap)", config, HIDDEN_UID)
        predecessor.pinned = predecessor.never_shrinks = True
        try:
            worker = await predecessor.ready()
            self._check_sessions(model, model.config, config, worker.info, force=force)
            if model.worker is not None:
                await model.worker.loaded.wait()
            if registry.catalog.closing:
                raise ShuttingDown("the daemon is shutting down")
        except BaseException:
            await self._drop_model(predecessor)
            raise
        before = registry.loader.exchange_models(model, predecessor)
        predecessor.never_shrinks = False
        old = None if before is None else before.info
        swapped = self._record_swap(model, to, worker.info, old, "migrate")
        if before is None:
            await self._drop_model(predecessor)
        else:
            model.predecessors[before.info.vocab_hash] = predecessor
            same = before.info.vocab_hash == worker.info.vocab_hash
            registry.start_soon(self._retire_predecessor, model, predecessor, before, same)
        return swapped

    async def _retire_predecessor(
        self, model: ManagedModel, predecessor: ManagedModel, before: Worker, same_vocabulary: bool
    ) -> None:
        """Let the old model's turns end, migrate the histories, and unload the old model. After
        that the name can be swapped again, even if this fails.
        """
        move = partial(self._move_turns, model, same_vocabulary)
        try:
            if same_vocabulary:
                self._registry.loader.move_tasks(model, before.client.withdraw_tasks(waiting=True))
            for _ in range(MIGRATION_PASSES):
                move(await self._end_turns(predecessor, before.client.tasks))
                await self._migrate_sessions(model, also_text=not same_vocabulary)
        finally:
            try:
                with anyio.CancelScope(shield=True):
                    del model.predecessors[before.info.vocab_hash]
                    if predecessor.worker is not None:
                        predecessor.worker.client.successor = move
                    await self._drop_model(predecessor)
            finally:
                model.swapping.release()

    async def _drop_model(self, predecessor: ManagedModel) -> None:
        predecessor.dropped = True
        await predecessor.unload()
        self._registry.catalog.remove_model(predecessor)

    # Drain.

    async def _drain(
        self, model: ManagedModel, config: ModelConfig, to: str, *, force: bool
    ) -> SwapResult:
        """Drain the old model and load the new one in its place, or the old one if that fails."""
        worker = await model.ready()
        before, after = worker.info, worker.info
        unfinished: dict[int, TaskReader] = {}
        model.hold_turns()
        log.info("model.draining", model=model.name, tasks=len(worker.tasks))
        try:
            await self._drain_turns(model, worker, unfinished)
            after = await self._load_in_place(model, config, unfinished, force=force)
        finally:
            model.release_turns()
            self._move_turns(model, before.vocab_hash == after.vocab_hash, unfinished)
        return self._record_swap(model, to, after, before, "drain")

    async def _drain_turns(
        self, model: ManagedModel, worker: ProcessClient, unfinished: dict[int, TaskReader]
    ) -> None:
        """Let the turns of *model* end and migrate the histories. Turns that outlast the grace
        period are added to *unfinished*.
        """
        model.predecessors[worker.info.vocab_hash] = model
        try:
            for _ in range(MIGRATION_PASSES):
                unfinished |= await self._end_turns(model, worker.tasks)
                await self._migrate_sessions(model, also_text=True)
        finally:
            del model.predecessors[worker.info.vocab_hash]

    async def _load_in_place(
        self,
        model: ManagedModel,
        config: ModelConfig,
        unfinished: dict[int, TaskReader],
        *,
        force: bool,
    ) -> ModelInfo:
        """Unload *model* and load *config*, or if that fails the old configuration. Turns that
        reach the old worker meanwhile are added to *unfinished*.
        """
        before, model.config, model.replaced = model.config, config, True
        if model.worker is not None:
            model.worker.client.successor = unfinished.update
        try:
            await model.unload()
            info = (await model.load()).info
            self._check_sessions(model, before, config, info, force=force)
            return info
        except BaseException as exc:
            model.config = before
            with anyio.CancelScope(shield=True):
                await model.unload()
                if isinstance(exc, InferdError):
                    try:
                        await model.load()
                    except InferdError as error:  # the next turn tries again
                        log.error("model.reload_failed", model=model.name, cause=error.message)
            raise

    # Both modes.

    def _check_sessions(
        self,
        model: ManagedModel,
        before: ModelConfig,
        config: ModelConfig,
        new: ModelInfo,
        *,
        force: bool,
    ) -> None:
        """Raise `UnsupportedOperation` if the *new* model generates no text and sessions of *model*
        do, which had the configuration *before*, unless *force* is given.
        """
        if new.generates or force or ENGINES[before.backend].graphs:
            return
        of_model = [s for s in self._sessions if s.model.base == model.name]
        count = sum(not s.settings.parameters.standing("embedding") for s in of_model)
        if count:
            name = config.file.name if config.file is not None else new.description
            raise UnsupportedOperation(
                f"{name!r} generates no text, and open sessions of {model.name!r} generate"
                f" text: {count}",
                hint="swap to a model that generates text, close these sessions, or set `force`"
                " (`--force`)",
                data={"sessions": count},
            )

    async def _end_turns(self, model: ManagedModel, tasks: WorkerTasks) -> dict[int, TaskReader]:
        """Wait until the turns of *model* have ended, first those in *tasks*. Return the readers of
        those that outlast the grace period.
        """
        with anyio.move_on_after(self._grace_s):
            await _wait_for_turns(model, tasks)
        waiting = model.recovery.release_tasks()
        return waiting if model.worker is None else waiting | model.worker.client.withdraw_tasks()

    async def _migrate_sessions(self, model: ManagedModel, *, also_text: bool) -> None:
        """Wait for each session's call under way, after which the session no longer uses the old
        worker. With *also_text*, migrate histories that exist only as tokens.
        """
        done: set[Session] = set()
        while session := next(
            (s for s in self._sessions if s.model.base == model.name and s not in done), None
        ):
            done.add(session)
            try:
                await session.prepare_migration(also_text=also_text)
            except Exception as exc:  # the other sessions continue
                log.error("session.not_migrated", session=session.handle, cause=str(exc))

    def _move_turns(
        self, model: ManagedModel, same_vocabulary: bool, readers: Mapping[int, TaskReader]
    ) -> None:
        """Continue turns of the old model in the new one if token ids mean the same in both. Else
        the turns fail; those that had not begun may be retried.
        """
        if same_vocabulary:
            self._registry.loader.move_tasks(model, readers)
            return
        ended = Cancelled(
            f"the turn was ended: its model {model.name!r} was swapped",
            hint="continue with the next turn: the history is kept",
        )
        not_begun = Busy(
            f"{model.name!r} was swapped before the turn had begun",
            hint="send the request again: the history is kept",
            data={"retry_after_s": 0.0},
        )
        for number, reader in readers.items():
            fail_readers({number: reader}, ended if reader.begun else not_begun)

    def _record_swap(
        self, model: ManagedModel, to: str, after: ModelInfo, before: ModelInfo | None, mode: Mode
    ) -> SwapResult:
        """Store and log a swap."""
        now, previous = after.fingerprint, "" if before is None else before.fingerprint
        model.swapped_to = to
        if not to:
            model.configured = self._registry.catalog.configuration_of(model)
        self._registry.catalog.persist_settings(model)
        log.info(
            "model.swapped", model=model.name, to=to, fingerprint=now, before=previous, mode=mode
        )
        return SwapResult(fingerprint=now, previous_fingerprint=previous, mode=mode)


async def _wait_for_turns(model: ManagedModel, tasks: WorkerTasks) -> None:
    """Wait until *model* has no turns in *tasks* or a later worker, and none waits for a worker."""
    while True:
        current = tasks if model.worker is None else model.worker.client.tasks
        recovering = len(model.recovery) > 0
        if not current and not recovering:
            return
        with anyio.move_on_after(RECOVERY_POLL_S if recovering else None):
            await current.changed()
