"""Attacks on the places of open sessions: streams that hold all of them and are never read."""

from __future__ import annotations

import time

from bench.attack.attack import COMPUTING, Attack, Target
from inferd import InferdError
from tests.raw import Closed, RawClient

PROMPT = "Write a long story about a lighthouse keeper and the sea."
ENDLESS = {"n-predict": -1, "ignore-eos": True}
PAUSE_S = 0.05


def leave_streams_unread(target: Target) -> None:
    """Hold as many sessions as possible, of the lowest class, each with an endless stream that has
    credit for one event; replace those that end.
    """
    while not target.is_over():
        try:
            with RawClient(target.socket) as client:
                _hold_contexts(target, client)
        except (InferdError, OSError, Closed):
            time.sleep(PAUSE_S)


def _hold_contexts(target: Target, client: RawClient) -> None:
    graph = client.call("load_by_name", name=target.model)["graph"]
    while not target.is_over():
        try:
            found = client.call("init_execution_context", graph=graph, priority="low")
        except InferdError:  # all places are taken
            time.sleep(PAUSE_S)
            continue
        client.start_request(
            "stream", context=found["context"], prompt=PROMPT, credit=1, options=ENDLESS
        )


ATTACKS = (
    Attack("unread-streams", "Endless streams of the lowest class in all places, never read",
           leave_streams_unread, ("share", "calls", "places"), COMPUTING, modes=("equal",)),
)  # fmt: skip
