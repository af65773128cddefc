"""The pace of one user's stream beside floods of ordinary work of another user, on a real model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread

import pytest

from inferd import Client, InferdError
from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, as_user, daemon_for_all
from tests.models import ONE_THREAD, short_smollm2

pytestmark = [pytest.mark.model, pytest.mark.alone, pytest.mark.timeout(300)]

TOKENS, FIRST_TOKENS, TRIES = 200, 50, 3
SHARE = 0.4
"""Least part of the pace alone: half of it, less what the other program takes from the cores."""
CONNECTIONS = 4


def words(count: int) -> str:
    return " ".join(f"w{random.randrange(10**6)}" for _ in range(count))


def embed(client: Client, stopped: Event) -> None:
    client.embed("m", [words(30) for _ in range(4)])


def prompt(client: Client, stopped: Event) -> None:
    with client.session("m", raw=True) as session:
        session.chat(words(60), options={"n-predict": 1})


def stream(client: Client, stopped: Event) -> None:
    options = {"n-predict": 500, "ignore-eos": True}
    with client.session("m", raw=True) as session:
        for _ in session.stream(words(10), options=options):
            if stopped.is_set():
                return


Work = Callable[[Client, Event], None]


@contextmanager
def flood(daemon: RunningDaemon, works: list[Work]) -> Iterator[None]:
    """Do these kinds of work as another user, each over several connections, without a pause."""
    stopped, begun = Event(), Event()

    def work_on(client: Client, work: Work) -> None:
        while not stopped.is_set():
            try:
                work(client, stopped)
            except InferdError:
                if stopped.is_set():
                    return
                raise
            begun.set()

    with ExitStack() as stack:
        with as_user(BOB):
            clients = [
                (stack.enter_context(Client(daemon.socket)), work)
                for work in works
                for _ in range(CONNECTIONS)
            ]
        threads = [Thread(target=work_on, args=pair) for pair in clients]
        for thread in threads:
            thread.start()
        try:
            if works != [stream]:
                assert begun.wait(30)
            yield
        finally:
            stopped.set()
            for thread in threads:
                thread.join()


def pace(daemon: RunningDaemon, tokens: int = TOKENS) -> float:
    """Return the tokens per second of a stream, its begin included. Drafts would make it faster
    while it is alone, and are left out under load.
    """
    options = {"n-predict": tokens, "ignore-eos": True, "speculation": "off"}
    with as_user(ADA):
        client = Client(daemon.socket)
    with client, client.session("m", raw=True) as session:
        began = time.monotonic()
        count = sum(1 for _ in session.stream(words(10), options=options))
        return count / (time.monotonic() - began)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    model = f'[models.m]\nfile = "{short_smollm2()}"\nslots = 4\nctx-size = 8192\n'
    with daemon_for_all(model + ONE_THREAD) as running:
        pace(running, FIRST_TOKENS)  # the model is loaded, and the cost of steps is known
        yield running


def share_kept(daemon: RunningDaemon, works: list[Work]) -> float:
    """Return the pace of a stream beside a flood, in proportion to its pace alone just before."""
    alone = pace(daemon)
    with flood(daemon, works):
        pace(daemon, FIRST_TOKENS)  # the cost of shared steps is known
        return pace(daemon) / alone


@pytest.mark.parametrize(
    "works",
    [[embed], [prompt], [embed, prompt, stream]],
    ids=["embeddings", "prompts", "together"],
)
def test_a_stream_keeps_its_part_of_its_pace_beside_a_flood(
    works: list[Work], daemon: RunningDaemon
) -> None:
    assert any(share_kept(daemon, works) >= SHARE for _ in range(TRIES))
