"""Calls on the daemon itself: its sessions, queue, statistics and log levels, and draining."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import structlog

from ...backends.errors import InferdError, InvalidArgument, TooLarge, WorkerCrashed
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...scheduler import Owner, Priority
from ...scheduler.messages import QueueEntry
from ...scheduler.waiting import ENCODING
from ...sessions import (
    CopiedSession,
    DepartedSession,
    Session,
    Transfer,
    UsageQuery,
    check_search,
    matches,
)
from ...sessions.usage.rows import COLUMNS, HOUR_S, Group, Sum
from ..config.forms import parse_log_levels
from ..core import Daemon, key_of
from ..logs.setup import logs
from ..metrics.collector import metric_values
from ..models.model import ManagedModel
from ..residency.residency import ResidencyRequest
from ..workers.worker import Worker

log = structlog.get_logger()
STATISTICS_TIMEOUT_S = 1.0
USAGE_GROUPS_MAX = 10_000
USAGE_S_MAX = 10 * 366 * 86_400.0


async def sessions(daemon: Daemon, request: Request) -> w.SessionsResult:
    """List the sessions of the caller's label, or with `all` of all users; dormant ones last. With
    a `session_id`, list only those with this id.
    """
    p: w.SessionsParams = request.params
    found = [*daemon.sessions.live, *(daemon.sessions.dormant if p.dormant else ())]
    visible = [s for s in found if p.all or request.owner.includes(s.owner)]
    named = [s for s in visible if p.session_id in (None, s.session_id)]
    if p.search:
        check_search(p.search)
        own = [s for s in named if request.owner.includes(s.owner)]
        named = [s for s in own if matches(p.search, s.settings.title, s.opening)]
    listed = [describe_session(daemon, s) for s in named]
    for info, session in zip(listed, named, strict=True):
        if not request.owner.includes(session.owner):
            info.title = ""
    if p.all and p.dormant and not p.search:
        listed += _describe_moving(daemon) + _describe_copies(daemon)
    dormant = daemon.sessions.dormant
    return w.SessionsResult(
        sessions=listed,
        dormant_sessions=dormant.bounded,
        dormant_sessions_max=dormant.limits.sessions_max,
        dormant_s_max=dormant.limits.seconds_max,
    )


def _describe_moving(daemon: Daemon) -> list[w.SessionInfo]:
    """Return the sessions that arrive, and the records of those that have departed."""
    moving = daemon.sessions.moving
    arriving = [describe_session(daemon, session) for session in moving.arriving]
    for info in arriving:
        info.state = "arriving"
    return arriving + [_describe_stored(daemon, record, "departed") for record in moving.departed]


def _describe_copies(daemon: Daemon) -> list[w.SessionInfo]:
    """Return the copies of sessions of other daemons."""
    return [_describe_stored(daemon, copy, "copy") for copy in daemon.sessions.copies]


def _describe_stored(
    daemon: Daemon, found: DepartedSession | CopiedSession, state: str
) -> w.SessionInfo:
    """Return the description of a session of which only stored values are here."""
    return w.SessionInfo(
        context=None,
        uid=found.owner.user,
        user=_user_name(daemon, found.owner),
        label=found.owner.label,
        session_id=found.session_id,
        model=found.facts.model,
        state=state,
        priority=found.facts.priority,
        tokens=found.facts.tokens,
        persisted=True,
        turns=found.facts.turns,
        title="",
        kept=found.facts.kept,
        expires_s=None,
        interrupted=False,
        idle_s=0.0,
        has_place=False,
        on_behalf_of=found.facts.on_behalf_of,
        transfer=_describe_transfer(found.facts.transfer),
    )


def _describe_transfer(transfer: Transfer | None) -> dict[str, Any] | None:
    return None if transfer is None else {"id": transfer.id, "peer": transfer.peer}


def _user_name(daemon: Daemon, owner: Owner) -> str:
    return daemon.connections.access.own_user_names.name_of(owner.user)


def describe_session(daemon: Daemon, session: Session) -> w.SessionInfo:
    """Return the description of a session."""
    dormant = session.state == "dormant"
    return w.SessionInfo(
        context=None if dormant else session.handle,
        uid=session.owner.user,
        user=_user_name(daemon, session.owner),
        label=session.owner.label,
        session_id=session.session_id,
        model=session.model.name,
        state=session.state.value,
        priority=session.settings.priority.label,
        tokens=session.conversation.size,
        persisted=session.recording.durable,
        turns=session.turns_begun,
        title=session.title,
        kept=session.settings.kept,
        expires_s=daemon.sessions.dormant.expiry_of(session, time.monotonic()),
        interrupted=session.conversation.history_state.interrupted,
        idle_s=0.0 if session.active else max(0.0, time.monotonic() - session.used_at),
        has_place=not dormant and not daemon.sessions.live.has_yielded(session),
        on_behalf_of=session.settings.on_behalf_of,
        transfer=_describe_transfer(session.transfer),
    )


async def queue(daemon: Daemon, request: Request) -> w.QueueResult:
    """List running and waiting turns by model in queue order: those of the caller's
    label, or with `all` of all users. The positions are missing if a worker does not answer within
    a second.
    """

    def is_visible(session: Session) -> bool:
        return bool(request.params.all) or request.owner.includes(session.owner)

    entries: dict[int, QueueEntry] = {}
    # Turns that begin while the workers are queried are not in their answers.
    turns = [s for s in daemon.all_sessions() if s.active and is_visible(s)]
    async with anyio.create_task_group() as group:
        for worker in daemon.registry.catalog.ready_workers():
            group.start_soon(_query_queue, worker, entries)
    tasks = [_describe_turn(daemon, s, entries) for s in turns if s.active]
    tasks.sort(key=lambda t: (t.model, t.position is None, t.position, t.task))
    waiting = [pair for pair in _turns_waiting_for_models(daemon) if is_visible(pair[1].subject)]
    return w.QueueResult(tasks=[*tasks, *(_describe_waiting(daemon, *pair) for pair in waiting)])


def _turns_waiting_for_models(daemon: Daemon) -> list[tuple[ManagedModel, ResidencyRequest]]:
    return [pair for pair in daemon.registry.loader.waiting_requests if pair[1].is_turn]


def _describe_waiting(daemon: Daemon, model: ManagedModel, waiting: ResidencyRequest) -> w.TaskInfo:
    """Return the description of a turn that waits for its model."""
    now = time.monotonic()
    found = _task_info(daemon, waiting.subject, waiting.priority, now - waiting.since)
    found.state = "waiting"
    effective = waiting.effective_priority(now, model.residency.residency_s)
    found.effective_priority = effective.label
    return found


def _task_info(daemon: Daemon, session: Session, priority: Priority, age_s: float) -> w.TaskInfo:
    """Return the description of a turn without the values that its engine reports."""
    return w.TaskInfo(
        task=None,
        uid=session.owner.user,
        user=_user_name(daemon, session.owner),
        label=session.owner.label,
        context=session.handle,
        session_id=session.session_id,
        model=session.model.name,
        state=session.state.value,
        priority=priority.label,
        effective_priority=None,
        position=None,
        starts_in_s=None,
        prompt_tokens=len(session.conversation.prompt),
        computed_tokens=None,
        output_tokens=0,
        age_s=max(0.0, age_s),
    )


async def _query_queue(worker: Worker, entries: dict[int, QueueEntry]) -> None:
    with anyio.move_on_after(STATISTICS_TIMEOUT_S), contextlib.suppress(WorkerCrashed):
        entries |= {entry.task_id: entry for entry in await worker.client.queue()}


def _describe_turn(
    daemon: Daemon, session: Session, entries: Mapping[int, QueueEntry]
) -> w.TaskInfo:
    assert session.turn is not None, "an active session has a turn"
    spec = session.turn.spec
    found = _task_info(daemon, session, spec.priority, time.monotonic() - session.turn_at)
    found.task, found.output_tokens = spec.id, len(session.turn.tokens)
    if (entry := entries.get(spec.id)) is not None:
        found.effective_priority = entry.effective_priority.label
        found.position, found.starts_in_s = entry.position, entry.starts_in_s
        found.computed_tokens = entry.computed_tokens
        if entry.state == ENCODING:
            found.state = ENCODING
    return found


async def usage(daemon: Daemon, request: Request) -> w.UsageResult:
    """Return the sums of usage: those of the caller's label and key, or with `all` of all users."""
    p: w.UsageParams = request.params
    owner, key = request.owner, request.connection.key
    if not 0 < p.since_s <= USAGE_S_MAX:
        raise InvalidArgument(f"since_s is not between 0 and {USAGE_S_MAX:.0f} seconds")
    query = UsageQuery(
        by=_columns(p.by),
        since=int((time.time() - p.since_s) // HOUR_S),
        user=None if p.all else owner.user,
        label=None if p.all or not owner.label else owner.label,
        key=None if p.all or not key else key,
    )
    await daemon.journal.wait_usage()
    sums = await daemon.journal.read_usage(query, USAGE_GROUPS_MAX)
    if len(sums) > USAGE_GROUPS_MAX:
        raise TooLarge(
            f"the usage has more than {USAGE_GROUPS_MAX} groups",
            hint="group by fewer columns, or request a shorter time",
            data={"groups_max": USAGE_GROUPS_MAX},
        )
    rows = [_describe_usage(group, found) for group, found in sums.items()]
    names = [{"hour": "start", "day": "start", "user": "uid"}.get(name, name) for name in query.by]
    rows.sort(key=lambda row: [getattr(row, name) for name in names])
    since = float(query.since * HOUR_S)
    return w.UsageResult(usage=rows, since=since, limits=[] if p.all else _limits(daemon, request))


def _limits(daemon: Daemon, request: Request) -> list[dict[str, Any]]:
    user, key, key_limits = key_of(request)
    limits = daemon.ledger.bounds.quota_of(user).usage
    return [
        {"bound": state.name, "used": state.used, "limit": state.limit, "ends_at": state.end}
        for state in daemon.usage.limit_states(user, limits, key, key_limits)
    ]


def _columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns to group by.

    :raises InvalidArgument: one is not known, or given twice.
    """
    for name in names:
        if name not in COLUMNS:
            raise InvalidArgument(
                f"usage has no column {name[:50]!r}", hint=f"group by {', '.join(COLUMNS)}"
            )
    if len({*names}) < len(names) or {"hour", "day"} <= {*names}:
        raise InvalidArgument(
            "a column is given twice", hint="name each column once, and either hour or day"
        )
    return tuple(names)


def _describe_usage(group: Group, found: Sum) -> w.UsageInfo:
    amounts = found.amounts
    return w.UsageInfo(
        start=None if group.start is None else float(group.start * HOUR_S),
        uid=group.user,
        user=None if group.user is None else found.name,
        label=group.label,
        key=group.key,
        model=group.model,
        requests=amounts.requests,
        refused=amounts.refused,
        prompt_tokens=amounts.prompt_tokens,
        cached_tokens=amounts.cached_tokens,
        generated_tokens=amounts.generated_tokens,
        drafted_tokens=amounts.drafted_tokens,
        compute_s=amounts.compute_us / 1e6,
    )


def _memory_for_loads(daemon: Daemon) -> dict[str, int]:
    """Return the memory that loads may take, or no fields if the system does not report it."""
    registry = daemon.registry
    try:
        free = registry.reservations.free_bytes()
    except OSError:
        return {}
    return {"load_free_bytes": free, "load_evictable_bytes": registry.loader.evictable_bytes()}


async def stats(daemon: Daemon, request: Request) -> w.StatsResult:
    """Return the statistics, without those of workers that do not answer within a second."""
    workers: dict[str, Any] = {}
    async with anyio.create_task_group() as group:
        for model in daemon.registry.catalog.visible_to(request.owner.user):
            group.start_soon(_query_statistics, model, workers)
    values = await metric_values(daemon)
    states = [s.state.value for s in daemon.all_sessions()]
    return w.StatsResult(
        stats=w.Stats(
            uptime_s=time.monotonic() - daemon.started,
            pid=os.getpid(),
            instance=daemon.instance,
            draining=daemon.draining,
            socket_activated=daemon.socket_activated,
            connections=len(daemon.server.places.holders),
            sessions=daemon.sessions.live.places_taken,
            sessions_max=daemon.config.sessions_max,
            sessions_yielded=daemon.sessions.dormant.yielded,
            sessions_waiting=len(daemon.sessions.places),
            sessions_dormant=len(daemon.sessions.dormant),
            sessions_expired=daemon.sessions.expired,
            journal=daemon.journal.status,
            components=daemon.components.describe(),
            metrics_address=daemon.metrics_at(),
            log=logs.describe(),
            pending_restart=daemon.pending_restart,
            waiting=states.count("waiting") + len(_turns_waiting_for_models(daemon)),
            running=states.count("running"),
            parked=states.count("parked"),
            refused=daemon.ledger.refused,
            recovered=daemon.registry.catalog.recovered,
            retry_after_ratio=daemon.ledger.accuracy.counts_by_bound(),
            cores=daemon.config.cores,
            memory=daemon.memory.status | _memory_for_loads(daemon),
            models=workers,
            metrics=values,
        )
    )


async def _query_statistics(model: ManagedModel, workers: dict[str, Any]) -> None:
    worker = model.worker
    if worker is None or not worker.loaded.is_set() or worker.error is not None:
        return
    # A worker that has just died has no counters.
    with anyio.move_on_after(STATISTICS_TIMEOUT_S), contextlib.suppress(InferdError):
        workers[model.name] = await worker.client.statistics()


async def metrics(daemon: Daemon, request: Request) -> w.MetricsResult:
    """Return all metrics in Prometheus's text format, even if they are served elsewhere too."""
    return w.MetricsResult(text=(await daemon.metrics_text()).decode())


async def log_level(daemon: Daemon, request: Request) -> w.LogLevelResult:
    """Set log levels, and return those in force."""
    try:
        levels = parse_log_levels(request.params.levels)
    except ValueError as exc:
        raise InvalidArgument(f"log levels: {exc}", hint="such as scheduler=debug") from None
    if levels:
        logs.set_levels(levels)
        daemon.apply_log_levels()
        log.info("log.levels", levels=logs.levels)
    return w.LogLevelResult(levels=logs.levels)


async def drain(daemon: Daemon, request: Request) -> w.DrainResult:
    """Refuse new work and wait for running turns; with `stop`, only request that the daemon stop,
    which drains it first.
    """
    if request.params.node or request.params.undo:
        raise InvalidArgument(
            "this is a daemon, and not a fleet with nodes",
            hint="name the socket of `inferd fleet serve`",
        )
    if request.params.stop:
        daemon.stopping.set()
        return w.DrainResult()
    await daemon.drain(daemon.config.shutdown_grace_s)
    return w.DrainResult()
