"""The policies that are compared: inferd's entry, and simpler ways to choose a node for a turn."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeAlias

from inferd.gateways.fleet.entry.new_contexts import SESSION_GAIN_BYTES_MIN
from inferd.gateways.fleet.routing.choice import (
    BYTES_OF_TOKEN,
    FleetLoad,
    RouteRequest,
    choose_node,
    node_to_warm_up,
)
from inferd.gateways.fleet.routing.homes import (
    HOMES_MAX,
    RECENT_MAX,
    Block,
    NodeTable,
    PromptTable,
    prompt_blocks,
)
from inferd.gateways.fleet.routing.loads import (
    AGE_S_MAX,
    NONE,
    ByClass,
    NodeLoad,
    OwnTurns,
    TurnKind,
)

from .turns import Session, Turn

POINTS = 64
"""Points of each node on the ring of consistent hashing."""


WarmUp: TypeAlias = Callable[[str, str, float], object]
"""Called with a node, a model and the time."""


class Policy(Protocol):
    """Chooses the node of each turn. All calls come from the simulation, in the order of time."""

    wants_reports: bool
    warm_up: WarmUp
    """Has a node load a model before a turn needs it there; set by the simulation."""

    def choose(self, turn: Turn, now: float) -> str:
        """Return the node of a turn, among those that can be reached."""

    def begin_turn(self, turn: Turn, now: float) -> None:
        """Record that a turn was sent to its node."""

    def end_turn(self, turn: Turn, now: float) -> None:
        """Record that a turn has ended or failed."""

    def note_report(self, node: str, load: NodeLoad, now: float) -> None:
        """Record a node's report."""

    def note_lost(self, node: str) -> None:
        """Record that a node can no longer be reached."""

    def note_found(self, node: str, load: NodeLoad) -> None:
        """Record that a node can be reached again."""


class InferdPolicy:
    """The entry. Sessions stay on their node. `choose_node` places new ones by the nodes' reports
    and by the entry's own turns since then. With the first prompt it places a session again if
    another node has computed much more of its beginning, as `new_contexts` does.

    A session whose node is lost is opened again elsewhere, from a copy of its history.
    """

    wants_reports = True
    warm_up: WarmUp

    def __init__(self, loads: Mapping[str, NodeLoad]):
        self._loads = dict(loads)
        self._homes = NodeTable[int](HOMES_MAX)
        self._recent = NodeTable[tuple[int, str]](RECENT_MAX)
        self._prompts = PromptTable()
        self._turns = {node: OwnTurns() for node in loads}
        self._unsettled: dict[str, float] = {}
        """The nodes with own turns that their last report lacks, with the last such turn's time."""

    def choose(self, turn: Turn, now: float) -> str:
        session = turn.session
        home = self._homes.find(session.number)
        if home is not None and home not in self._loads:
            home = None
        if home is not None:
            return home
        owner = session.user, session.model
        fleet = FleetLoad(self._loads, (), self._opened(now))
        request = RouteRequest(session.model, session.priority, recent=self._recent.find(owner))
        node = choose_node(request, fleet)
        blocks = _blocks_of(turn)
        covered = self._prompts.covered_bytes(blocks)
        needed = covered.get(node, 0) + SESSION_GAIN_BYTES_MIN
        if max(covered.values(), default=0) >= needed:
            request = replace(request, recent=node, covered_bytes=covered)
            better = choose_node(request, fleet)
            node = better if covered.get(better, 0) >= needed else node
        self._prompts.note_prompt(blocks, node)
        target = node_to_warm_up(session.model, node, fleet)
        if target is not None:
            self.warm_up(target, session.model, now)
        self._homes.put(session.number, node)
        self._recent.put(owner, node)
        return node

    def _opened(self, now: float) -> dict[tuple[str, str], ByClass]:
        opened: dict[tuple[str, str], ByClass] = {}
        for node in self._unsettled:
            for model, counts in self._turns[node].since_report(now).items():
                if counts != NONE:
                    opened[node, model] = counts
        return opened

    def begin_turn(self, turn: Turn, now: float) -> None:
        self._turns[turn.node].begin_turn(turn, _kind_of(turn.session), now)
        self._unsettled[turn.node] = now

    def end_turn(self, turn: Turn, now: float) -> None:
        self._turns[turn.node].end_turn(turn, now)
        self._unsettled[turn.node] = now

    def note_report(self, node: str, load: NodeLoad, now: float) -> None:
        self._loads[node] = load
        self._turns[node].note_report(load, now)
        if self._unsettled.get(node, now) <= now - AGE_S_MAX:
            del self._unsettled[node]

    def note_lost(self, node: str) -> None:
        self._loads.pop(node, None)
        self._prompts.forget_node(node)
        self._turns[node] = OwnTurns()
        self._unsettled.pop(node, None)

    def note_found(self, node: str, load: NodeLoad) -> None:
        self._loads[node] = load


class _WithoutReports:
    """The part of a policy that needs no reports: the nodes that can be reached."""

    wants_reports = False
    warm_up: WarmUp

    def __init__(self, loads: Mapping[str, NodeLoad]):
        self.nodes = list(loads)

    def begin_turn(self, turn: Turn, now: float) -> None:
        pass

    def end_turn(self, turn: Turn, now: float) -> None:
        pass

    def note_report(self, node: str, load: NodeLoad, now: float) -> None:
        pass

    def note_lost(self, node: str) -> None:
        self.nodes.remove(node)

    def note_found(self, node: str, load: NodeLoad) -> None:
        bisect.insort(self.nodes, node)


class TwoChoices(_WithoutReports):
    """The power of two choices: of two random nodes the one with fewer turns under way, which the
    balancer knows exactly. If *sticky*, only a session's first turn is placed so, and the session
    stays there.
    """

    def __init__(self, loads: Mapping[str, NodeLoad], *, sticky: bool):
        super().__init__(loads)
        self._turns = dict.fromkeys(loads, 0)
        self._sticky, self._rng = sticky, random.Random("choices")
        self._up = set(loads)

    def choose(self, turn: Turn, now: float) -> str:
        node = turn.session.node
        if self._sticky and node in self._up:
            return node
        count = len(self.nodes)
        one, other = (self.nodes[int(self._rng.random() * count)] for _ in range(2))
        return one if self._turns[one] <= self._turns[other] else other

    def begin_turn(self, turn: Turn, now: float) -> None:
        self._turns[turn.node] += 1

    def end_turn(self, turn: Turn, now: float) -> None:
        self._turns[turn.node] -= 1

    def note_lost(self, node: str) -> None:
        super().note_lost(node)
        self._up.discard(node)

    def note_found(self, node: str, load: NodeLoad) -> None:
        super().note_found(node, load)
        self._up.add(node)


class HashRing(_WithoutReports):
    """Consistent hashing of the key that *key_of* returns for a session."""

    def __init__(self, loads: Mapping[str, NodeLoad], key_of: Callable[[Session], str]):
        super().__init__(loads)
        self._key_of = key_of
        points = [(_hash(f"{node} {at}"), node) for node in loads for at in range(POINTS)]
        self._points = sorted(points)
        self._up = set(loads)

    def choose(self, turn: Turn, now: float) -> str:
        at = bisect.bisect(self._points, (_hash(self._key_of(turn.session)), ""))
        while True:
            node = self._points[at % len(self._points)][1]
            if node in self._up:
                return node
            at += 1

    def note_lost(self, node: str) -> None:
        super().note_lost(node)
        self._up.discard(node)

    def note_found(self, node: str, load: NodeLoad) -> None:
        super().note_found(node, load)
        self._up.add(node)


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())


def _blocks_of(turn: Turn) -> list[Block]:
    """Return the blocks of a session's first prompt, or of the next one if its node was lost. The
    prompt begins with the shared tokens of the user.
    """
    session = turn.session
    shared = _text(f"user {session.user} ", session.shared_tokens)
    own = _text(f"session {session.number} {turn.number} ", turn.plan.new_tokens)
    return prompt_blocks(f"{session.user}\0{session.model}", shared + own)


def _text(part: str, tokens: int) -> bytes:
    size = tokens * BYTES_OF_TOKEN
    return (part.encode() * (size // len(part) + 1))[:size]


def _kind_of(session: Session) -> TurnKind:
    return TurnKind(session.model, session.priority)


def _session_key(session: Session) -> str:
    return f"session {session.number}"


def _owner_key(session: Session) -> str:
    return f"owner {session.user} {session.model}"


POLICIES: Mapping[str, Callable[[Mapping[str, NodeLoad]], Policy]] = {
    "inferd": InferdPolicy,
    "two choices per session": lambda loads: TwoChoices(loads, sticky=True),
    "two choices per turn": lambda loads: TwoChoices(loads, sticky=False),
    "hash of the session": lambda loads: HashRing(loads, _session_key),
    "hash of user and model": lambda loads: HashRing(loads, _owner_key),
}
