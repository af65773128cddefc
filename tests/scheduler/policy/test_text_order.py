"""The order of requests for texts."""

from __future__ import annotations

from inferd.scheduler.owner import Owner, Priority, Requester
from inferd.scheduler.policy.order import AGEING_S, TextOrder

ADA, BOB = Requester(Owner(1)), Requester(Owner(2))


def order_of(order: TextOrder[str], seconds: float = 0.01) -> list[str]:
    """Answer all requests, each in *seconds*, and return them in their order."""
    answered = []
    while (requester := order.next_requester()) is not None:
        answered.append(order.remove_first(requester))
        order.count_work(requester.owner, seconds)
    return answered


def test_owners_alternate_however_many_requests_one_has() -> None:
    order: TextOrder[str] = TextOrder()
    for number in range(100):
        order.add_request(ADA, f"ada {number}")
    for number in range(3):
        order.add_request(BOB, f"bob {number}")
    answered = order_of(order)
    assert [text for text in answered if text.startswith("ada")] == [f"ada {i}" for i in range(100)]
    assert [answered.index(f"bob {i}") for i in range(3)] == [1, 3, 5]


def test_a_higher_class_precedes() -> None:
    order: TextOrder[str] = TextOrder()
    order.add_request(ADA, "normal")
    order.add_request(Requester(Owner(1), Priority.LOW), "low")
    order.add_request(Requester(Owner(2), Priority.HIGH), "high")
    assert order_of(order) == ["high", "normal", "low"]


def test_a_waiting_request_rises_with_the_work_for_others() -> None:
    order: TextOrder[str] = TextOrder()
    order.add_request(Requester(Owner(1), Priority.LOW), "low")
    answered, seconds = 0, 0.0
    while True:
        order.add_request(Requester(Owner(2), Priority.URGENT), "urgent")
        requester = order.next_requester()
        assert requester is not None
        if order.remove_first(requester) == "low":
            break
        order.count_work(Owner(2), 0.1)
        answered, seconds = answered + 1, seconds + 0.1
    assert seconds <= 3 * AGEING_S + 0.2


def test_an_owner_who_returns_has_no_credit_from_idle_times() -> None:
    order: TextOrder[str] = TextOrder()
    order.add_request(ADA, "first")
    order.count_work(Owner(1), 100.0)
    order.add_request(BOB, "second")
    order.add_request(BOB, "third")
    assert order_of(order, 1.0)[0] == "first"


def test_only_those_that_may_be_answered_are() -> None:
    order: TextOrder[str] = TextOrder()
    order.add_request(ADA, "ada")
    assert order.next_requester(lambda requester: requester != ADA) is None
    order.add_request(BOB, "bob")
    assert order.next_requester(lambda requester: requester != ADA) == BOB
    assert (len(order), order.users) == (2, {1, 2})


def test_removed_requests_are_answered_no_more() -> None:
    order: TextOrder[str] = TextOrder()
    for requester, text in ((ADA, "a"), (ADA, "dropped"), (ADA, "b"), (BOB, "dropped")):
        order.add_request(requester, text)
    order.remove_requests(lambda text: text == "dropped")
    assert len(order) == 2 and order.users == {ADA.owner.user}
    assert order_of(order) == ["a", "b"]
