"""Shares over a fleet: the engines' order of users and the entry's exchange, with a clock of steps.

Each node computes a token in each of its slots at each step, for the user served least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from inferd.gateways.fleet.nodes.fair_share import ServedTotals
from inferd.scheduler.owner import Owner, OwnerClock

ADA, BOB, CID = 1, 2, 3
NAMES = {"@ada": ADA, "@bob": BOB, "@cid": CID}
USERS = {number: user for user, number in NAMES.items()}
OWNERS = {user: Owner(user) for user in USERS}
MODEL = "slow"
STEP_S = 0.02
SECONDS = round(1 / STEP_S)
"""Steps in a second."""
EXCHANGE_STEPS = 10
LEAD_MAX = 20_000


class Node:
    """An engine with slots, and the users that always have turns on it."""

    def __init__(self, slots: int, users: Iterable[int], quantum: int = 1):
        self.slots, self.users, self.quantum = slots, set[int](), quantum
        self.clock = OwnerClock()
        self.running = list[tuple[int, int]]()
        for user in users:
            self.begin(user)

    def begin(self, user: int) -> None:
        self.clock.add_owner(Owner(user), self.owners())
        self.users.add(user)

    def restart(self) -> None:
        """Begin anew, as a worker or a daemon that was started again."""
        users, self.users, self.clock = self.users, set(), OwnerClock()
        for user in users:
            self.begin(user)

    def owners(self) -> list[Owner]:
        return [OWNERS[user] for user in self.users]

    def compute_step(self) -> Counter[int]:
        computed = Counter[int]()
        kept = [(user, left - 1) for user, left in self.running if left and user in self.users]
        while self.users and len(kept) < self.slots:
            user = min(self.users, key=lambda u: self.clock.served(OWNERS[u]))
            kept.append((user, self.quantum - 1))
            self.clock.count_work(OWNERS[user], 1)
            computed[user] += 1
        for user, _ in kept[: len(kept) - computed.total()]:
            self.clock.count_work(OWNERS[user], 1)
            computed[user] += 1
        self.running = kept
        return computed


class Fleet:
    """Nodes with an entry, which may be lost."""

    def __init__(self, **nodes: Node):
        self.nodes, self.steps = nodes, 0
        self.totals: ServedTotals | None = None
        self.start_entry()

    def start_entry(self) -> None:
        self.totals = ServedTotals()
        for name in self.nodes:
            self.totals.begin_node(name)

    def exchange(self, totals: ServedTotals, name: str, node: Node) -> None:
        elsewhere = totals.take_elsewhere(name).get(MODEL, {})
        amounts = {NAMES[user]: tokens for user, tokens in elsewhere.items()}
        served = node.clock.exchange_users(amounts, node.owners(), LEAD_MAX)
        totals.note_totals(name, {MODEL: {USERS[user]: n for user, n in served.items()}})

    def run(self, seconds: float) -> Counter[int]:
        """Return the tokens computed for each user."""
        computed = Counter[int]()
        for _ in range(round(seconds * SECONDS)):
            self.steps += 1
            for name, node in self.nodes.items():
                computed.update(node.compute_step())
                if self.totals is not None and self.steps % EXCHANGE_STEPS == 0:
                    self.exchange(self.totals, name, node)
        return computed


def three_nodes(quantum: int = 1) -> Fleet:
    """Return a fleet on whose six slots Ada has turns everywhere, and Bob on the largest node."""
    return Fleet(
        a=Node(4, (ADA, BOB), quantum), b=Node(1, (ADA,), quantum), c=Node(1, (ADA,), quantum)
    )


def ratio(computed: Mapping[int, int]) -> float:
    """Return Ada's tokens for each token of Bob."""
    return computed[ADA] / computed[BOB]


def is_fair(computed: Mapping[int, int], within: float = 0.1) -> bool:
    return abs(ratio(computed) - 1) <= within


def test_without_exchange_turns_on_more_nodes_give_twice_as_much() -> None:
    fleet = three_nodes()
    fleet.totals = None
    assert ratio(fleet.run(60)) == 2


def test_a_user_on_three_nodes_gets_as_much_as_one_on_one_node() -> None:
    fleet = three_nodes()
    assert is_fair(fleet.run(60), 0.02)
    assert is_fair(fleet.run(60), 0.02)


def test_shares_hold_with_quanta() -> None:
    fleet = three_nodes(quantum=64)
    assert is_fair(fleet.run(60), 0.05)
    assert is_fair(fleet.run(60), 0.05)


def test_three_users_on_overlapping_nodes() -> None:
    fleet = Fleet(a=Node(4, (ADA, BOB)), b=Node(2, (ADA, CID)), c=Node(3, (CID, ADA)))
    fleet.run(5)
    computed = fleet.run(60)
    assert all(abs(computed[user] / 9000 - 1) < 0.1 for user in (ADA, BOB, CID)), computed


def test_a_user_served_enough_elsewhere_leaves_the_node_to_the_other() -> None:
    """Each has one node for itself: nothing is left to make Bob's part as large as Ada's."""
    fleet = Fleet(a=Node(2, (ADA, BOB)), b=Node(2, (ADA,)), c=Node(2, (ADA,)))
    fleet.run(2)
    assert ratio(fleet.run(60)) > 1.95


def test_only_recent_tokens_count_once_a_user_has_one_node_left() -> None:
    fleet = Fleet(a=Node(2, (ADA, BOB)), b=Node(2, (ADA,)), c=Node(2, (ADA,)))
    fleet.run(300)
    for name in "bc":
        fleet.nodes[name].users.clear()
    waited = 0
    while not fleet.run(1)[ADA]:
        waited += 1
    assert waited * 2 * SECONDS <= LEAD_MAX, "Ada was ahead by 30 000"
    fleet.run(60)
    assert is_fair(fleet.run(60))


def test_an_idle_user_saves_no_credit() -> None:
    """Neither Bob, who begins where nobody is, nor Cid, who was idle before."""
    a = Node(4, (ADA, CID))
    fleet = Fleet(a=a, b=Node(1, (ADA,)), c=Node(1, ()))
    fleet.run(5)
    a.users.clear()
    fleet.run(200)
    fleet.nodes["c"].begin(CID)
    fleet.run(2)
    a.begin(BOB)
    a.begin(ADA)
    assert is_fair(fleet.run(10))


def test_a_user_that_returns_to_a_node_begins_level_though_served_elsewhere() -> None:
    fleet = Fleet(a=Node(4, (ADA, BOB)), b=Node(1, (ADA,)), c=Node(1, (ADA,)))
    fleet.run(10)
    fleet.nodes["a"].users.discard(BOB)
    fleet.run(200)
    fleet.nodes["a"].begin(BOB)
    fleet.run(1)
    assert is_fair(fleet.run(10))


def test_a_user_that_computes_nothing_does_not_end_the_shares_of_others() -> None:
    """A lower class waits; its user was served least, and would have all others look ahead."""
    fleet = three_nodes()
    waiting = fleet.nodes["a"]
    waiting.clock.add_owner(Owner(CID), [])
    owners = waiting.owners
    waiting.owners = lambda: [*owners(), Owner(CID)]  # type: ignore[method-assign]
    fleet.run(120)
    assert is_fair(fleet.run(60), 0.05)


def test_the_restart_of_a_node_moves_no_share() -> None:
    fleet = three_nodes()
    fleet.run(120)
    for name, node in fleet.nodes.items():
        assert fleet.totals is not None
        node.restart()
        fleet.totals.begin_node(name)
        fleet.run(0.5)
        assert is_fair(fleet.run(10)), name


def test_the_restart_of_a_worker_moves_no_share() -> None:
    fleet = three_nodes()
    fleet.run(120)
    for name, node in fleet.nodes.items():
        node.restart()
        fleet.run(0.5)
        assert is_fair(fleet.run(10)), name


def test_the_restart_of_the_entry_moves_no_share() -> None:
    fleet = three_nodes()
    fleet.run(120)
    fleet.totals = None
    assert ratio(fleet.run(10)) <= 2, "each node goes on by itself"
    fleet.start_entry()
    fleet.run(0.5)
    assert is_fair(fleet.run(10))


def test_the_loss_of_a_node_and_its_return_move_no_share() -> None:
    fleet = three_nodes()
    fleet.run(120)
    lost = fleet.nodes.pop("c")
    fleet.run(0.5)
    assert is_fair(fleet.run(10))
    assert fleet.totals is not None
    lost.restart()
    fleet.nodes["c"] = lost
    fleet.totals.begin_node("c")
    fleet.run(0.5)
    assert is_fair(fleet.run(10))
