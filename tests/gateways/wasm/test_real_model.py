"""Guests on a real model, sixteen at once."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd_process
from tests.gateways.wasm.driver import Driver
from tests.gateways.wasm.guests import c_guest
from tests.models import smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
GUESTS = 16
RUN_S_MAX = 300.0
CONFIG = "[models.smollm2]\nslots = 2\nctx-size = 512\n"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / "smollm2.gguf").symlink_to(smollm2())
    with running_daemon(CONFIG, models_dir=models) as running:
        yield running


def test_sixteen_guests_share_one_model_and_the_urgent_one_is_served_first(
    daemon: RunningDaemon, client: Client
) -> None:
    ended: list[int] = []
    texts: dict[int, str] = {}

    def wait_for(number: int, process: subprocess.Popen[bytes]) -> None:
        output, errors = process.communicate(timeout=RUN_S_MAX)
        ended.append(number)
        text = output.decode(errors="replace")  # the last token may end within a character
        texts[number] = f"{process.returncode} {errors.decode()}{text}"

    with ExitStack() as stack:

        def start(number: int, priority: str, tokens: int) -> threading.Thread:
            config = f'{{"n-predict":{tokens},"temp":0,"ignore-eos":true}}'
            process = inferd_process(
                *("wasm", "run", "--priority", priority, str(c_guest()), "--"),
                *("stream", "smollm2", f"{PROMPT} {number}", config),
                socket=daemon.socket,
            )
            stack.callback(process.kill)
            thread = threading.Thread(target=wait_for, args=(number, process))
            thread.start()
            return thread

        threads = [start(number, "normal", 100) for number in range(GUESTS - 1)]
        while len(client.queue()) + len(ended) < GUESTS - 1:
            pass
        before = len(ended)
        threads.append(start(GUESTS - 1, "high", 8))
        for thread in threads:
            thread.join()
        [model] = [m for m in client.models() if m["state"] == "ready"]
    assert model["name"] == "smollm2"
    assert {text.split()[0] for text in texts.values()} == {"0"}, texts
    assert {text.split()[-1] for number, text in texts.items() if number < GUESTS - 1} == {"100"}
    assert ended.index(GUESTS - 1) - before <= 2, ended
    assert client.sessions() == [] and client.queue() == []


def test_a_guest_reads_the_text_that_the_client_reads(
    daemon: RunningDaemon, client: Client
) -> None:
    options = {"n-predict": 12, "temp": 0}
    with client.session("smollm2", raw=True, options=options) as session:
        expected = session.chat(PROMPT)
    with Driver(client) as guest:
        context = guest.context("smollm2", options)
        guest.set_input(context, PROMPT.encode())
        assert guest.call("compute", context) == 0
        assert guest.output(context).decode() == expected
        pulled = b""
        while (number := guest.call("compute_single", context)) == 0:
            pulled += guest.output(context, single=True)
        assert (number, pulled.decode()) == (100, expected)


def test_a_pulled_turn_continues_over_a_restart(daemon: RunningDaemon, client: Client) -> None:
    options = {"n-predict": 12, "temp": 0}
    with Driver(client) as guest:
        context = guest.context("smollm2", options)
        guest.set_input(context, PROMPT.encode())
        guest.call("compute", context)
        expected = guest.output(context)
        guest.call("fini_single", context)
        before = guest.pull(context, 5)
        daemon.kill()
        daemon.start_again()
        after = guest.pull(context, 7)
        assert before + after == expected == guest.output(context)


def test_embeddings_of_a_guest_are_the_clients(daemon: RunningDaemon, client: Client) -> None:
    [expected] = client.embed("smollm2", [PROMPT])
    with Driver(client, pages=8) as guest:
        context = guest.context("smollm2", {"embedding": True})
        guest.set_input(context, PROMPT.encode())
        assert guest.call("compute", context) == 0
        found = json.loads(guest.output(context))["embedding"]
    assert found == pytest.approx(list(expected), abs=1e-3)
