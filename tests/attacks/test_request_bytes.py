"""Large requests of one user, hundreds at once: memory is bounded and returned, cancels work."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd.backends.errors import Busy, Cancelled
from inferd.ipc.messages import TENSOR_BYTES_MAX, Kind
from inferd.ipc.server.request_bytes import USER_BYTES_DEFAULT
from inferd.ipc.server.server import INCOMPLETE_BYTES_MAX
from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

CONNECTIONS, REQUESTS = 2, 70
"""Without a bound, they take twice the memory that is allowed."""
USER_BYTES = USER_BYTES_DEFAULT // 2
RETURNED_S, REMAINDER_BYTES = 30.0, 32 << 20
"""The time in which memory returns to the system, except fragments of the heap."""
TEXTS = [("the lighthouse keeper wrote to the sea " * 105)[:4090]] * 250
"""A frame of 1 MB, which the echo model embeds for seconds."""
LONG_TEXT = "the lighthouse keeper wrote to the sea " * 23_000
MESSAGES = [{"role": "user", "content": LONG_TEXT}]
BOUNDS = ("request-bytes-user-max", "tasks-waiting-user-max")
"""An admitted request has texts that wait for slots, which have a bound of their own."""
MODELS = echo_model("m", slots=4, ctx_size=8192) + echo_model("long", slots=4, ctx_size=1 << 20)


class Memory:
    """The resident memory of a daemon and its workers."""

    def __init__(self, daemon: RunningDaemon, user_bytes: int):
        process = psutil.Process(daemon.pid)
        self._user_bytes = user_bytes
        self._daemon, self._workers = process, process.children(recursive=True)
        self.before = self._resident(self._daemon)
        self._workers_before = {worker: self._resident(worker) for worker in self._workers}
        for process in (self._daemon, *self._workers):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins anew

    @staticmethod
    def _resident(process: psutil.Process) -> int:
        return int(process.memory_info().rss)

    @staticmethod
    def _peak(process: psutil.Process) -> int:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def check_growth(self, more_bytes: int = 0) -> None:
        """Check the largest resident memory since the beginning. The daemon has one user's requests
        in flight and incomplete frames; a worker has the texts of the requests, and their tokens.
        """
        growth_max = self._user_bytes + INCOMPLETE_BYTES_MAX // 2 + more_bytes
        grown = self._peak(self._daemon) - self.before
        assert grown < growth_max, f"the daemon grew by {grown >> 20} MiB"
        for worker, before in self._workers_before.items():
            grown = self._peak(worker) - before
            assert grown < 3 * self._user_bytes, f"a worker grew by {grown >> 20} MiB"

    def wait_returned(self) -> None:
        """Wait until the memory has returned to the system."""
        limit = self.before + REMAINDER_BYTES
        wait_until(lambda: self._resident(self._daemon) < limit, RETURNED_S)


@contextmanager
def attacked(user_bytes: int = USER_BYTES) -> Iterator[tuple[RunningDaemon, RawClient, Memory]]:
    """Run a daemon with loaded models, and yield it with another user's connection."""
    config = f"request-bytes-user-max = {user_bytes}\n{MODELS}"
    with daemon_for_all(config) as daemon, client_of(daemon, BOB) as bob:
        for model in ("m", "long"):
            graph = bob.call("load_by_name", name=model)["graph"]
            bob.call("embed", graph=graph, texts=["hello"])
        yield daemon, bob, Memory(daemon, user_bytes)


def send_all(
    client: RawClient, victim: RawClient, requests: int, call: str, **params: Any
) -> list[int]:
    """Send requests without reading answers; the victim's calls are answered meanwhile."""
    numbers = list[int]()
    for number in range(requests):
        numbers.append(client.start_request(call, **params))
        if number % 20 == 0:
            assert victim.call("models")
    return numbers


def read_refusals(client: RawClient, numbers: list[int]) -> list[int]:
    """Read the refusals that precede the answer to a cheap call; return the admitted requests."""
    cheap, admitted = client.start_request("models"), dict.fromkeys(numbers)
    while (message := client.read_message())[1] != cheap:
        assert message[0] == Kind.ERROR and message[2]["name"] == "Busy", message
        error = message[2]
        assert error["retryable"] and error["hint"]
        assert error["data"]["bound"] in BOUNDS
        del admitted[message[1]]
    assert message[0] == Kind.REPLY, f"a user at the bound makes cheap calls: {message}"
    return list(admitted)


def test_hundreds_of_large_embed_requests_take_bounded_memory_and_can_be_cancelled() -> None:
    with attacked() as (daemon, bob, memory), ExitStack() as stack:
        adas = [stack.enter_context(client_of(daemon, ADA)) for _ in range(CONNECTIONS)]
        in_flight = list[tuple[RawClient, int]]()
        for ada in adas:
            graph = ada.call("load_by_name", name="m")["graph"]
            sent = send_all(ada, bob, REQUESTS, "embed", graph=graph, texts=TEXTS)
            in_flight += [(ada, number) for number in read_refusals(ada, sent)]
        assert 4 <= len(in_flight) < 20, "the bound was reached"
        memory.check_growth()

        cancelled = 0
        for ada, number in in_flight:
            if ada.call("cancel", request=number)["cancelled"]:
                with pytest.raises(Cancelled):
                    ada.wait_result(number)
                cancelled += 1
        assert 2 * cancelled >= len(in_flight), "few have ended by themselves"
        assert bob.call("models")
        memory.wait_returned()
        memory.check_growth()


def test_the_memory_of_a_vanished_clients_requests_returns() -> None:
    with attacked(USER_BYTES_DEFAULT) as (daemon, bob, memory):
        with client_of(daemon, ADA) as ada:
            graph = ada.call("load_by_name", name="m")["graph"]
            send_all(ada, bob, REQUESTS, "embed", graph=graph, texts=TEXTS)
        memory.wait_returned()
        memory.check_growth()


def answers_to(
    client: RawClient, victim: RawClient, requests: int, call: str, **params: Any
) -> Counter[str]:
    """Send requests and read all answers, while the victim's calls are answered; return the number
    of replies, and of refusals by their bounds.
    """
    answers = Counter[str]()

    def read_answers() -> None:
        for _ in range(requests):
            message = client.read_message()
            is_reply = message[0] == Kind.REPLY
            answers[
                "reply" if is_reply else message[2]["data"].get("bound", message[2]["name"])
            ] += 1

    client.socket.settimeout(60)
    reading = threading.Thread(target=read_answers)
    reading.start()
    send_all(client, victim, requests, call, **params)
    while reading.is_alive():
        assert victim.call("models")
        reading.join(0.1)
    return answers


def test_the_vectors_of_many_requests_count() -> None:
    with attacked(USER_BYTES // 2) as (daemon, bob, memory), client_of(daemon, ADA) as ada:
        graph = ada.call("load_by_name", name="m")["graph"]
        vectors = {"texts": [TEXTS[0]] * 15, "pooling": "none"}
        answers = answers_to(ada, bob, 12, "embed", graph=graph, **vectors)
        # Without the bound all are answered: their results fit into the memory of other tests.
        assert answers.keys() == {"reply", BOUNDS[0]}, answers
        memory.check_growth()
        memory.wait_returned()


@pytest.mark.parametrize(
    ("call", "model", "requests", "params"),
    [
        ("tokenize", "long", REQUESTS, {"text": LONG_TEXT}),
        ("apply_template", "long", REQUESTS, {"messages": MESSAGES}),
        ("detokenize", "long", REQUESTS, {"tokens": [101] * 65_000}),
    ],
    ids=["tokenize", "apply_template", "detokenize"],
)
def test_many_requests_take_bounded_memory(
    call: str, model: str, requests: int, params: dict[str, Any]
) -> None:
    with attacked() as (daemon, bob, memory), client_of(daemon, ADA) as ada:
        graph = ada.call("load_by_name", name=model)["graph"]
        answers = answers_to(ada, bob, requests, call, graph=graph, **params)
        assert answers["reply"] >= 4 and answers.keys() <= {"reply", *BOUNDS}, answers
        memory.check_growth()
        memory.wait_returned()


def test_texts_in_descriptors_count_too() -> None:
    with attacked(USER_BYTES_DEFAULT) as (daemon, bob, memory), client_of(daemon, ADA) as ada:
        ada.socket.settimeout(60)
        contexts = [ada.context("long") for _ in range(40)]
        tensor = {"fd": 0, "dimensions": [1], "type": 3, "data": b""}
        with tempfile.TemporaryFile() as file:
            file.write(bytes(TENSOR_BYTES_MAX).replace(b"\0", b"x"))
            file.flush()
            sent = [
                ada.start_request("set_input", [file.fileno()], context=c, index=0, tensor=tensor)
                for c in contexts
            ]
        answers = Counter[str]()
        for number in sent:
            assert bob.call("models")
            try:
                ada.wait_result(number)
            except Busy as exc:
                assert exc.data["bound"] == "request-bytes-user-max"
                answers["Busy"] += 1
            else:
                answers["set"] += 1
        assert answers["set"] >= 3 and answers["Busy"], answers  # so many are allowed at once
        memory.check_growth(USER_BYTES_DEFAULT)  # the texts are copied once more
        memory.wait_returned()


@pytest.mark.parametrize(
    ("call", "params"),
    [("tokenize", {"text": LONG_TEXT}), ("apply_template", {"messages": MESSAGES})],
    ids=["tokenize", "apply_template"],
)
def test_large_requests_that_are_cancelled_at_once_do_not_pile_up(
    call: str, params: dict[str, Any]
) -> None:
    with attacked() as (daemon, bob, memory), client_of(daemon, ADA) as ada:
        graph = ada.call("load_by_name", name="long")["graph"]
        for number in range(REQUESTS):
            sent = ada.start_request(call, graph=graph, **params)
            ada.call("cancel", request=sent)
            if number % 20 == 0:
                assert bob.call("models")
        memory.check_growth()
        memory.wait_returned()


def test_eight_large_requests_at_once_succeed() -> None:
    with attacked(USER_BYTES_DEFAULT) as (daemon, _, _), client_of(daemon, ADA) as ada:
        ada.socket.settimeout(60)
        graph = ada.call("load_by_name", name="long")["graph"]
        tokenized = [ada.start_request("tokenize", graph=graph, text=LONG_TEXT) for _ in range(8)]
        assert all(len(ada.wait_result(n)["tokens"]) >= len(LONG_TEXT) for n in tokenized)

        graph = ada.call("load_by_name", name="m")["graph"]
        texts = TEXTS[:4]
        sent = [ada.start_request("embed", graph=graph, texts=texts) for _ in range(8)]
        assert all(len(ada.wait_result(number)["embeddings"]) == len(texts) for number in sent)
