"""Attacks with bytes that the daemon keeps between calls: options and messages of sessions."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

from bench.attack.attack import COMPUTING, LOWER, Attack, Bounds, Target
from inferd import Client, InferdError

LONG = "x" * 900_000
"""A text that fits into a frame of 1 MiB, as `TEXTS` does."""
TEXTS = [f"{number:0900}" for number in range(1000)]
TURNS = 24

KEPT = Bounds(mb_more_max=200, mb_left_max=200)
"""Bounds with `session-bytes-user-max` of 128 MiB, which stays with the user's sessions."""


def keep_options(target: Target) -> None:
    """Make dormant sessions with long options, each with another id."""
    with Client(target.socket) as client:
        for number in itertools.count():
            if target.is_over():
                return
            with (
                contextlib.suppress(InferdError),
                client.session(target.model, session_id=f"kept-{number}", raw=True) as session,
            ):
                session.set_options({"stop": TEXTS})


def keep_messages(target: Target) -> None:
    """Chat in one session after another, with an extra key in each message."""
    message = {"role": "user", "content": "hello", "extra": LONG}
    with Client(target.socket) as client, contextlib.ExitStack() as stack:
        while not target.is_over():
            with contextlib.suppress(InferdError):
                session = stack.enter_context(
                    client.session(target.model, priority=target.priority)
                )
                for _ in range(TURNS):
                    if target.is_over():
                        return
                    session.chat([message], options={"n-predict": 1})


ATTACKS = (
    Attack("kept-options", "dormant sessions with 0.9 MB of options each", keep_options,
           ("memory",), KEPT),
    Attack("kept-messages", "messages with 0.9 MB in an extra key", keep_messages,
           ("memory",), replace(KEPT, share_least=COMPUTING.share_least),
           replace(KEPT, share_least=LOWER.share_least, gap_s_max=LOWER.gap_s_max)),
)  # fmt: skip
