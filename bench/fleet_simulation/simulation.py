"""The simulation: events in the order of time, from the arrival of a session to the end of its last
turn. When the run's time is over, no more turns arrive, and those under way end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inferd.gateways.fleet.routing.loads import NodeLoad

from .measures import Measures
from .node import ModelKind, Node
from .policies import Policy
from .traffic import Traffic
from .turns import Session, Turn

REPORT_S = 0.2
"""The interval of a node's reports."""
SETTLED_S = 0.05
"""A report lacks turns that began less than this time before it; see `own_turns`."""
REFRESH_S = 1.0
"""A node with turns that wait reports again after this time, if nothing has changed."""
NOTICE_S = 6.0
"""The time until the loss of a machine is noticed."""
RETRY_S = 1.0
"""The time after which a client sends a failed turn again."""


@dataclass(frozen=True)
class Scenario:
    """A fleet with its traffic; the first *warm_up_s* are not measured."""

    traffic: Traffic
    kinds: Mapping[str, ModelKind]
    memory_bytes: int
    seconds: float
    warm_up_s: float = 1200.0


class Simulation:
    """One run of a scenario with a policy."""

    def __init__(self, scenario: Scenario, policy: Callable[[Mapping[str, NodeLoad]], Policy]):
        self._scenario = scenario
        width = len(str(scenario.traffic.nodes))
        names = [f"node-{number:0{width}}" for number in range(scenario.traffic.nodes)]
        self.nodes = {n: Node(n, scenario.kinds, scenario.memory_bytes) for n in names}
        if sum(kind.need_bytes for kind in scenario.kinds.values()) <= scenario.memory_bytes:
            for node in self.nodes.values():
                node.preload()
        self._names = names
        self._phases = {name: at * 0.618 % 1 * REPORT_S for at, name in enumerate(names)}
        self._end_s = scenario.warm_up_s + scenario.seconds
        slots = max(kind.slots for kind in scenario.kinds.values())
        self.measures = Measures(names, slots, scenario.warm_up_s, self._end_s)
        self._policy = policy({name: node.report(0.0) for name, node in self.nodes.items()})
        self._policy.warm_up = self._warm_up
        self._heap: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._events = 0
        self._sessions = scenario.traffic.sessions(self._end_s)
        self._due: dict[str, float] = {}
        """By node, the time of its event in the heap that counts."""
        self._reports: dict[str, float] = {}
        """By node, the time of its next report."""

    def run(self) -> dict[str, Any]:
        """Return the figures of the run."""
        self._next_session(None, 0.0)
        for at, number in self._scenario.traffic.losses(self._end_s):
            self._at(at, self._lose, self._names[number])
        heap, now = self._heap, 0.0
        while heap:
            now, _, handle, subject = heapq.heappop(heap)
            handle(subject, now)
        loads = sum(node.loads for node in self.nodes.values())
        return {**self.measures.result(now), "model_loads": loads, "events": self._events}

    def _at(self, at: float, handle: Callable[[Any, float], None], subject: Any) -> None:
        self._events += 1
        heapq.heappush(self._heap, (at, self._events, handle, subject))

    # Sessions and turns.

    def _next_session(self, session: Session | None, now: float) -> None:
        if session is not None:
            self._arrive(Turn(session, 0, now), now)
        following = next(self._sessions, None)
        if following is not None:
            self._at(following[0], self._next_session, following[1])

    def _arrive(self, turn: Turn, now: float) -> None:
        session, before = turn.session, turn.session.node
        turn.node = session.node = self._policy.choose(turn, now)
        turn.attempts += 1
        if turn.node != before:
            self.nodes[turn.node].sessions += 1
            if before:
                self.nodes[before].sessions -= 1
        self.measures.note_placed(turn, before)
        self._policy.begin_turn(turn, now)
        node = self.nodes[turn.node]
        if not node.is_up:  # lost, and not noticed yet
            self._policy.end_turn(turn, now)
            self._at(now + NOTICE_S, self._arrive, turn)
            return
        node.add_turn(turn, now)
        self._after_change(node, now)

    def _after_change(self, node: Node, now: float) -> None:
        """Schedule what follows from a change of a node's turns."""
        due = node.due_at
        if due < math.inf and due != self._due.get(node.name):
            self._due[node.name] = due
            self._at(max(due, now), self._advance, (node, due))
        if self._policy.wants_reports and node.name not in self._reports:
            self._schedule_report(node, now)

    def _advance(self, subject: tuple[Node, float], now: float) -> None:
        node, due = subject
        if self._due.get(node.name) != due or not node.is_up:
            return
        del self._due[node.name]
        for turn in node.advance(now):
            self._end(turn, now)
        self.measures.note_busy(node.name, node.busy_slots, now)
        self._after_change(node, now)

    def _end(self, turn: Turn, now: float) -> None:
        self._policy.end_turn(turn, now)
        self.measures.note_ended(turn)
        session, number = turn.session, turn.number + 1
        if number == len(session.plans):
            self.nodes[session.node].sessions -= 1
            return
        at = now + session.plans[number].think_s
        if at <= self._end_s:
            self._at(at, self._arrive, Turn(session, number, at))

    def _warm_up(self, name: str, model: str, now: float) -> None:
        """Load a model on a node before a turn needs it there."""
        node = self.nodes[name]
        if node.warm_up(model, now):
            self._after_change(node, now)
            self._at(node.loaded[model].ready_at, self._note_loaded, node)

    def _note_loaded(self, node: Node, now: float) -> None:
        node.changed_at = now
        self._after_change(node, now)

    # Reports.

    def _schedule_report(self, node: Node, now: float) -> None:
        phase = self._phases[node.name]
        at = (math.floor((now - phase) / REPORT_S) + 1) * REPORT_S + phase
        if at <= now + 1e-6:  # this report's own time, rounded
            at += REPORT_S
        self._reports[node.name] = at
        self._at(at, self._report, node)

    def _report(self, node: Node, now: float) -> None:
        del self._reports[node.name]
        if not node.is_up:
            return
        self._policy.note_report(node.name, node.report(now), now)
        if node.changed_at > now - SETTLED_S:
            self._schedule_report(node, now)
        elif node.waiting_turns:
            self._reports[node.name] = now + REFRESH_S
            self._at(now + REFRESH_S, self._report, node)

    # Losses.

    def _lose(self, name: str, now: float) -> None:
        node = self.nodes[name]
        if not node.is_up or sum(other.is_up for other in self.nodes.values()) == 1:
            return
        for turn in node.lose():
            self._policy.end_turn(turn, now)
            self._at(now + NOTICE_S + RETRY_S, self._retry, turn)
        self._due.pop(name, None)
        self.measures.note_busy(name, 0, now)
        self._at(now + NOTICE_S, self._notice, node)
        self._at(now + self._scenario.traffic.loss_s, self._find, node)

    def _retry(self, turn: Turn, now: float) -> None:
        self._arrive(turn, now)

    def _notice(self, node: Node, now: float) -> None:
        self._policy.note_lost(node.name)

    def _find(self, node: Node, now: float) -> None:
        node.return_empty()
        self._policy.note_found(node.name, node.report(now))
