"""Clients of the gateway on a real model, sixteen at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.gateways.nnrpc.driver import WasmEdge
from tests.models import short_smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
GUESTS = 16
CONFIG = "[models.smollm2]\nslots = 4\nctx-size = 512\n"
PROMPT = "The capital of France is"
OPTIONS = '{"n-predict":12,"temp":0}'
CALL_S_MAX = 240.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / "smollm2.gguf").symlink_to(short_smollm2())
    with running_daemon(CONFIG, models_dir=models) as running:
        yield running


def test_sixteen_clients_read_the_text_that_the_client_reads(path: str, client: Client) -> None:
    with client.session("smollm2", raw=True, options=json.loads(OPTIONS)) as session:
        expected = session.chat(PROMPT)
    with ExitStack() as stack:
        guests = [stack.enter_context(WasmEdge(path)) for _ in range(GUESTS)]
        calls = []
        for guest in guests:
            context = guest.context("smollm2", OPTIONS)
            assert guest.set_input(context, PROMPT.encode()) == 0
            calls.append(guest.begin("Compute", resource_handle=context, timeout=CALL_S_MAX))
        for guest, call in zip(guests, calls, strict=True):
            call.result()
            assert guest.output(0).decode() == expected
            assert guest.metadata(0)["output_tokens"] == 12
        guests[0].number("FiniSingle", resource_handle=0)
        assert guests[0].pull(0, 12).decode() == expected
        assert guests[0].compute_single(0) == 100


def test_embeddings_are_the_clients(path: str, client: Client) -> None:
    [expected] = client.embed("smollm2", [PROMPT])
    with WasmEdge(path) as guest:
        context = guest.context("smollm2", '{"embedding":true}')
        guest.set_input(context, PROMPT.encode())
        assert guest.compute(context) == 0
        found = json.loads(guest.output(context))["embedding"]
    assert found == pytest.approx(list(expected), abs=1e-3)
