"""Guests on a real model, sixteen at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from inferd import Client, InvalidArgument
from inferd.testing import RunningDaemon, running_daemon
from tests.gateways.wasm.driver import Driver
from tests.gateways.wasm.serving import ServingGuest, serving_guests
from tests.models import ONE_THREAD, smollm2
from tests.waiting import wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
GUESTS = 16
TOKENS = 24
CONFIG = f"{ONE_THREAD}[models.smollm2]\nslots = 2\nctx-size = 512\n"
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
    tokens: dict[int, int] = {}

    def read_answer(number: int, guest: ServingGuest) -> None:
        _, metadata = guest.read_answer()
        ended.append(number)
        tokens[number] = metadata["output_tokens"]

    config = {"n-predict": TOKENS, "temp": 0, "ignore-eos": True}
    priorities = ["high"] + ["normal"] * (GUESTS - 1)
    with serving_guests(daemon.socket, "smollm2", config, priorities) as guests:

        def start(number: int) -> threading.Thread:
            guests[number].send_prompt(f"{PROMPT} {number}")
            thread = threading.Thread(target=read_answer, args=(number, guests[number]))
            thread.start()
            return thread

        threads = [start(number) for number in range(1, GUESTS)]
        wait_until(lambda: len(client.queue()) + len(ended) >= GUESTS - 1)
        before = len(ended)
        assert before < GUESTS // 2, "most of them wait"
        threads.append(start(0))
        for thread in threads:
            thread.join()
        [model] = [m for m in client.models() if m["state"] == "ready"]
    assert model["name"] == "smollm2"
    assert tokens == dict.fromkeys(range(GUESTS), TOKENS)
    assert ended.index(0) - before <= 2, ended


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


def test_a_guest_whose_schema_has_items_and_no_type_gets_an_array(
    daemon: RunningDaemon, client: Client
) -> None:
    """As with llama.cpp in WasmEdge; by the standard alone, any object would do."""
    properties = {"id": {"type": "integer", "maximum": 99}, "name": {"enum": ["pen", "cup"]}}
    items = {"type": "object", "properties": properties, "required": ["id", "name"]}
    schema = json.dumps({"items": items, "minItems": 2, "maxItems": 3})
    with Driver(client) as guest:
        context = guest.context("smollm2", {"json-schema": schema, "temp": 0.1})
        guest.set_input(context, b"Some products:")
        assert guest.call("compute", context) == 0
        products, _ = json.JSONDecoder().raw_decode(guest.output(context).decode())
    assert isinstance(products, list) and 2 <= len(products) <= 3
    assert {"id", "name"} <= products[0].keys()


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


def test_a_byte_without_a_token_is_refused_with_its_offset(
    daemon: RunningDaemon, client: Client
) -> None:
    text = "é ".encode() + b"\xe9\xf5 \xe9"  # SmolLM2 has a token for 0xe9, and none for 0xf5
    with Driver(client) as guest:
        context = guest.context("smollm2")
        assert guest.set_input(context, text.replace(b"\xf5", b"")) == 0
        assert guest.set_input(context, text) == 1
        [session] = client.sessions()
        with pytest.raises(InvalidArgument, match="byte 0xf5 at 4,") as caught:
            client.run_inference(session["context"] or 0, text)
        assert isinstance(refused := guest.errors[-1][1], InvalidArgument)
        assert caught.value.data == refused.data == {"byte": 4, "value": 0xF5}
