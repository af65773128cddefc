"""Attacks with work on the engine's thread: long texts, many texts, and slow samplers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from bench.attack.attack import COMPUTING, LOWER, Attack, Target, run_at_once
from bench.daemon import options
from inferd import Client, InferdError

LONG_TEXT = "The keeper of the lighthouse wrote 12 letters, and the sea took them. " * 8600
SHORT_TEXT = LONG_TEXT[:15_000]
SENDERS = 4
WIDE_CLASS = "root ::= [" + "".join(chr(0x4E00 + 2 * i) for i in range(15_000)) + "]+"
"""A grammar with a class of 15 000 single characters."""


def _send_texts(target: Target, text: str) -> None:
    while not target.is_over():
        try:
            with Client(target.socket) as client:
                graph = client.load_by_name(target.model)
                while not target.is_over():
                    client.tokenize(graph, text)
        except InferdError:
            time.sleep(0.1)


def send_long_texts(target: Target) -> None:
    """Tokenize a text of 600 kB again and again."""
    _send_texts(target, LONG_TEXT)


def send_short_texts(target: Target) -> None:
    """Tokenize texts of 15 kB on several connections."""
    run_at_once(target, [partial(_send_texts, text=SHORT_TEXT)] * SENDERS)


def _stream_with(**settings: object) -> Callable[[Target], None]:
    def attack(target: Target) -> None:
        while not target.is_over():
            try:
                with (
                    Client(target.socket) as client,
                    client.session(target.model, raw=True, priority=target.priority) as session,
                ):
                    for _ in session.stream("A story", options=options(256) | settings):
                        if target.is_over():
                            return
            except InferdError:
                time.sleep(0.1)

    return attack


ATTACKS = (
    Attack("long-texts", "tokenize of 600 kB in a loop", send_long_texts),
    Attack("short-texts", "tokenize of 15 kB on four connections", send_short_texts),
    Attack(
        "slow-grammar",
        "a grammar with a class of 15 000 characters",
        _stream_with(grammar=WIDE_CLASS),
        bounds=COMPUTING,
        bounds_lower=LOWER,
    ),
    Attack(
        "stop-texts",
        "10 000 stop texts",
        _stream_with(stop=[f"{i:06d}" for i in range(10_000)]),
        bounds=COMPUTING,
        bounds_lower=LOWER,
    ),
)
