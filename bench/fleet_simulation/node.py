"""A node: its engines, the memory that they share, and its reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from inferd.daemon.residency.plan import EvictionCandidate, choose_victims
from inferd.gateways.fleet.link import REPORT_S
from inferd.gateways.fleet.relay.load import (
    TokenTimeLearner,
    as_counts,
    prompt_token_s,
    tokens_left,
)
from inferd.gateways.fleet.routing.loads import NONE, ModelLoad, NodeLoad
from inferd.scheduler.policy.cost import StepCost
from inferd.scheduler.task import Task

from .engine import SimulatedEngine
from .states import SessionStates
from .turns import Turn

RESIDENCY_S = 20.0
"""The default of `residency-s`: a busy model that others wait for admits turns for this time."""
SESSIONS_MAX = 1000
REPORTS_LEARNED = 10
"""More reports at equal intervals do not change the learned time of a token."""


@dataclass(frozen=True)
class ModelKind:
    """A model as all nodes have it."""

    name: str
    cost: StepCost
    slots: int
    need_bytes: int
    load_s: float
    token_bytes: int
    kv_bytes: int
    """The memory for KV states."""


class LoadedModel:
    """A model that is loaded, or being loaded until *ready_at*."""

    def __init__(self, kind: ModelKind, engine: SimulatedEngine, ready_at: float):
        self.kind, self.engine, self.ready_at = kind, engine, ready_at
        self.used_at = ready_at


class Node:
    """One node with memory of *memory_bytes*. `due_at` is when `advance` is to be called next."""

    def __init__(self, name: str, kinds: Mapping[str, ModelKind], memory_bytes: int):
        self.name, self._kinds, self._memory_bytes = name, kinds, memory_bytes
        self.is_up = True
        self.instance = 1
        self.busy_slots = 0
        self.changed_at = 0.0
        self.sessions = 0
        """Sessions whose last turn was here, and that go on."""
        self.loads = 0
        """Loads of models since the start."""
        self.loaded: dict[str, LoadedModel] = {}
        self._reported: dict[str, ModelLoad] = {}
        """By model, its part of the last report; models whose turns have changed since have none.
        """
        self._waiting: dict[str, list[Turn]] = {}
        """By model, the turns that wait for a load."""
        self._prompt_times = {name: _prompt_token_s(kind) for name, kind in kinds.items()}
        self._times = TokenTimeLearner()
        self._observed: dict[str, tuple[float, int, bool]] = {}
        """By model, its last report after a change: the time, the tokens, and whether it had work.
        """

    def preload(self) -> None:
        """Have all models in memory at the begin of the simulation."""
        for name in self._kinds:
            self._load(name, -RESIDENCY_S)

    @property
    def due_at(self) -> float:
        """The time at which something is to happen next."""
        due = math.inf
        for model in self.loaded.values():
            if model.engine.due_at < due:
                due = model.engine.due_at
            if self._waiting and self.changed_at < model.ready_at < due:
                due = model.ready_at
        if self._waiting:
            due = min(due, self.changed_at + 1.0)  # models that became idle, ended residencies
        return due

    @property
    def waiting_turns(self) -> bool:
        """Whether turns wait for a slot or for a load."""
        return bool(self._waiting) or any(m.engine.queue for m in self.loaded.values())

    def add_turn(self, turn: Turn, now: float) -> None:
        """Take a turn, which waits where its model is not loaded or has to give way."""
        self.changed_at = now
        name = turn.session.model
        self._reported.pop(name, None)
        model = self.loaded.get(name)
        if model is None or model.ready_at > now or self._gives_way(model, now):
            self._waiting.setdefault(name, []).append(turn)
            self._load_waiting(now)
        else:
            self._admit(model, turn, now)

    def advance(self, now: float) -> list[Turn]:
        """Do what is due; return the turns that ended."""
        self.changed_at = now
        ended: list[Turn] = []
        was_busy = self._busy_engines()
        for name, model in self.loaded.items():
            if model.engine.due_at <= now:
                ended += model.engine.advance(now)
                model.used_at = now
                self._reported.pop(name, None)
        if self._waiting:
            self._load_waiting(now)
            self._admit_waiting(now)
        if self._busy_engines() != was_busy:
            for model in self.loaded.values():
                if model.engine.due_at > now:
                    model.engine.interrupt(now)
        self._count_busy()
        return ended

    def warm_up(self, name: str, now: float) -> bool:
        """Load a model that no turn waits for; return whether that was possible."""
        kind = self._kinds[name]
        if not self.is_up or name in self.loaded or kind.need_bytes > self._free_bytes():
            return False
        self.changed_at = now
        self.loads += 1
        self._load(name, now + kind.load_s)
        return True

    def lose(self) -> list[Turn]:
        """Lose all that the node has; return the turns that were on it."""
        turns = [turn for queue in self._waiting.values() for turn in queue]
        for model in self.loaded.values():
            turns += model.engine.fail_all()
        self.loaded, self._waiting, self.is_up, self.busy_slots = {}, {}, False, 0
        self._times, self._observed = TokenTimeLearner(), {}
        self.forget_report()
        return turns

    def return_empty(self) -> None:
        """Begin again after a loss."""
        self.is_up, self.instance = True, self.instance + 1

    def _admit(self, model: LoadedModel, turn: Turn, now: float) -> None:
        model.used_at = now
        model.engine.add_turn(turn, now)

    def _busy_engines(self) -> int:
        busy = 0
        for model in self.loaded.values():
            if model.engine.running:
                busy += 1
        return busy

    def _slowness(self) -> float:
        """Return the factor by which engines that compute at a time slow each other down."""
        return float(max(1, self._busy_engines()))

    def _count_busy(self) -> None:
        self.busy_slots = 0
        for model in self.loaded.values():
            self.busy_slots += len(model.engine.running)

    def _free_bytes(self) -> int:
        return self._memory_bytes - sum(m.kind.need_bytes for m in self.loaded.values())

    def _gives_way(self, model: LoadedModel, now: float) -> bool:
        """Return whether a load waits for the memory of a model whose residency has ended."""
        others = any(name not in self.loaded for name in self._waiting)
        return others and now >= model.ready_at + RESIDENCY_S and model is self._oldest()

    def _oldest(self) -> LoadedModel:
        return min(self.loaded.values(), key=lambda m: m.ready_at)

    def _load_waiting(self, now: float) -> None:
        """Load the models that turns wait for, in the place of idle ones."""
        for name in tuple(self._waiting):
            if name in self.loaded:
                continue
            kind = self._kinds[name]
            missing = kind.need_bytes - self._free_bytes()
            if missing > 0:
                idle = [m for m in self.loaded.values() if self._is_idle(m, now)]
                victims = choose_victims([_candidate(m, now) for m in idle], missing)
                if victims is None:
                    continue
                for victim in victims:
                    del self.loaded[victim.name]
                    self._reported.pop(victim.name, None)
            self.loads += 1
            self._load(name, now + kind.load_s)

    def _load(self, name: str, ready_at: float) -> None:
        kind = self._kinds[name]
        states = SessionStates(kind.kv_bytes, kind.token_bytes, kind.cost.recompute_s)
        engine = SimulatedEngine(kind.slots, kind.cost, states, self._slowness)
        self.loaded[name] = LoadedModel(kind, engine, ready_at)
        self._reported.pop(name, None)

    def _is_idle(self, model: LoadedModel, now: float) -> bool:
        waits = model.kind.name in self._waiting and not self._gives_way(model, now)
        return model.ready_at <= now and not model.engine.has_work and not waits

    def _admit_waiting(self, now: float) -> None:
        for name in tuple(self._waiting):
            model = self.loaded.get(name)
            if model is not None and model.ready_at <= now and not self._gives_way(model, now):
                self._reported.pop(name, None)
                for turn in self._waiting.pop(name):
                    self._admit(model, turn, now)

    def report(self, now: float) -> NodeLoad:
        """Return the load as the node's relay reports it. For models without a change since the
        last report, it has the parts of that report.
        """
        evictable = used = 0
        for model in self.loaded.values():
            used += model.kind.need_bytes
            if not model.engine.has_work:
                evictable += model.kind.need_bytes
        return NodeLoad(
            instance=self.instance,
            sessions=self.sessions,
            sessions_max=SESSIONS_MAX,
            free_bytes=self._memory_bytes - used,
            evictable_bytes=evictable,
            models={
                name: self._reported.get(name) or self._model_load(kind, now)
                for name, kind in self._kinds.items()
            },
        )

    def forget_report(self) -> None:
        """Make all parts of the next report anew."""
        self._reported.clear()

    def _model_load(self, kind: ModelKind, now: float) -> ModelLoad:
        model, waiting = self.loaded.get(kind.name), self._waiting.get(kind.name, ())
        running, running_tokens = [*NONE], [*NONE]
        queued, queued_tokens = [*NONE], [*NONE]
        for turn in waiting:
            queued[turn.session.priority] += 1
            prompt = turn.session.history + turn.plan.new_tokens
            queued_tokens[turn.session.priority] += tokens_left(
                {"computed_tokens": 0, "output_tokens": 0, "prompt_tokens": prompt}
            )
        if model is not None:
            engine = model.engine
            for task in engine.running:
                at = engine.effective_class(task)
                running[at] += 1
                running_tokens[at] += _task_tokens_left(task)
            for task in engine.queue:
                at = engine.effective_class(task)
                queued[at] += 1
                queued_tokens[at] += _task_tokens_left(task)
            self._learn_token_time(kind.name, engine, now)
        is_ready = model is not None and model.ready_at <= now
        left_s = 0.0 if model is None else max(0.0, model.ready_at - now)
        load = ModelLoad(
            loaded=is_ready,
            loading=model is not None and not is_ready,
            slots=kind.slots,
            running=as_counts(running),
            waiting=as_counts(queued),
            running_tokens=as_counts(running_tokens),
            waiting_tokens=as_counts(queued_tokens),
            token_s=self._times.token_s(kind.name),
            prompt_token_s=self._prompt_times[kind.name],
            load_s=kind.load_s if model is None else left_s,
            need_bytes=kind.need_bytes if model is None else None,
        )
        if is_ready or model is None:  # the time that is left of a load changes by itself
            self._reported[kind.name] = load
        return load

    def _learn_token_time(self, name: str, engine: SimulatedEngine, now: float) -> None:
        """Learn from a run of steps what the reports during it would have taught; the last ones
        count.
        """
        since, before, worked = self._observed.get(name, (now, engine.tokens, False))
        tokens, works = engine.tokens - before, bool(engine.running)
        if not tokens and works == worked and name in self._observed:
            return
        self._observed[name] = now, engine.tokens, works
        count = min(REPORTS_LEARNED, math.ceil((now - since) / REPORT_S)) or 1
        for at in range(1, count + 1):
            time_s, done = since + (now - since) * at / count, before + tokens * at // count
            self._times.observe(name, time_s, done, has_work=works if at == count else worked)


def _prompt_token_s(kind: ModelKind) -> float | None:
    known = kind.cost.coefficients()
    return prompt_token_s({"step_cost": known._asdict()} if known is not None else {})


def _candidate(model: LoadedModel, now: float) -> EvictionCandidate:
    kind = model.kind
    return EvictionCandidate(
        kind.name, kind.need_bytes, kind.load_s, now - model.used_at, loaded_at=model.ready_at
    )


def _task_tokens_left(task: Task) -> int:
    written = max(0, task.generated)
    return tokens_left(
        {
            "computed_tokens": task.computed,
            "output_tokens": written,
            "prompt_tokens": task.prompt_size,
        }
    )
