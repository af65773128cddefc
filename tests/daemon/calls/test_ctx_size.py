"""`ctx_size` in the data of errors and in results is an int, over a socket."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.backends.echo.options import ECHO_CTX_SIZE
from inferd.backends.errors import (
    ContextFull,
    EndOfSequence,
    InferdError,
    OutOfMemory,
    PromptTooLong,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

ROOT = Path(__file__).resolve().parents[3]
MANY = 1 << 40
CONFIG = "[daemon]\nmemory-bytes = 1_000_000_000\n" + echo_model("huge", weight_bytes=MANY)
CONFIG += echo_model("echo") + echo_model("rank", ranks=True)
CTX_SIZE = 16
BYTES = b"x" * 100_000
"""More than any context of the echo model holds: its tokens are never counted, and the error of a
turn with this prompt has the size of the model's contexts.
"""
TURNS: dict[str, Callable[[RawClient, int, bytes], object]] = {
    "compute": lambda client, context, text: _after_input(client, "compute", context, text),
    "compute_single": lambda client, context, text: _pulled(client, context, text),
    "chat": lambda client, context, text: client.call(
        "chat", context=context, prompt=text.decode()
    ),
    "stream": lambda client, context, text: client.call(
        "stream", context=context, prompt=text.decode(), raw=True
    ),
    "prompt_compute": lambda client, context, text: client.call(
        "prompt_compute", context=context, prompt=text.decode()
    ),
    "run_inference": lambda client, context, text: client.call(
        "run_inference", context=context, tensor={"data": text}, config=""
    ),
}


def _after_input(client: RawClient, call: str, context: int, text: bytes) -> None:
    client.set_input(context, text)
    client.call(call, context=context)


def _pulled(client: RawClient, context: int, text: bytes) -> None:
    client.set_input(context, text)
    while True:
        client.compute_single(context)


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as raw:
        yield raw


def check(error: InferdError, ctx_size: int = CTX_SIZE) -> None:
    found = error.data["ctx_size"]
    assert type(found) is int and found == ctx_size
    for name in ("prompt_tokens", "prompt_bytes"):
        assert type(error.data.get(name, 0)) is int


@pytest.mark.parametrize("size", [CTX_SIZE, float(CTX_SIZE)])
@pytest.mark.parametrize("at_load", [True, False])
@pytest.mark.parametrize("text", [b"x" * 40, BYTES], ids=["tokens", "bytes"])
@pytest.mark.parametrize("call", TURNS)
def test_a_prompt_that_is_too_long(
    client: RawClient, call: str, text: bytes, at_load: bool, size: float
) -> None:
    config = json.dumps({"ctx-size": size})
    context = client.context(config=config if at_load else "")
    if not at_load:
        client.set_input(context, config.encode(), index=1)
    with pytest.raises(PromptTooLong) as caught:
        TURNS[call](client, context, text)
    counted = text != BYTES or call in ("compute", "compute_single")
    check(caught.value, CTX_SIZE if counted else ECHO_CTX_SIZE)


@pytest.mark.parametrize("call", ["compute", "compute_single"])
def test_a_context_that_is_full(client: RawClient, call: str) -> None:
    context = client.context(config=json.dumps({"ctx-size": float(CTX_SIZE)}))
    with pytest.raises(ContextFull) as caught:
        TURNS[call](client, context, b"0123456789")
    check(caught.value)


def test_a_text_that_is_too_long_to_embed(client: RawClient) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]
    for text in ("x" * 5000, BYTES.decode()):
        with pytest.raises(PromptTooLong) as caught:
            client.call("embed", graph=graph, texts=[text])
        check(caught.value, ECHO_CTX_SIZE)
    context = client.context(config=json.dumps({"embedding": True, "ctx-size": CTX_SIZE}))
    with pytest.raises(PromptTooLong) as caught:
        TURNS["compute"](client, context, b"x" * 40)
    check(caught.value)


def test_a_query_that_leaves_no_place_for_a_document(client: RawClient) -> None:
    graph = client.call("load_by_name", name="rank")["graph"]
    query = "q" * ECHO_CTX_SIZE
    for truncate in (False, True):
        with pytest.raises(PromptTooLong) as caught:
            client.call("rerank", graph=graph, query=query, documents=["x"], truncate=truncate)
        check(caught.value, ECHO_CTX_SIZE)


def test_a_model_that_does_not_fit(client: RawClient) -> None:
    with pytest.raises(OutOfMemory) as caught:
        client.call("load_by_name_with_config", name="huge", config='{"ctx-size":512.0}')
    assert type(caught.value.data["ctx_size"]) is int


def test_a_load_that_fails(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    config = f"[daemon]\nmemory-bytes = {10**15}\n[models.tiny-llama]\nctx-size = 4_000_000.0\n"
    with running_daemon(config, models_dir=tmp_path) as daemon, RawClient(daemon.socket) as client:
        resource.prlimit(daemon.pid, resource.RLIMIT_AS, (4 << 30, 4 << 30))  # of workers, too
        with pytest.raises(OutOfMemory) as caught:
            client.call("load_by_name", name="tiny-llama")
        check(caught.value, 4_000_000)


def _sizes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each context size in a result."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(key, str) and key.replace("-", "_").startswith("ctx_size"):
            yield key, item
        elif isinstance(item, dict | list):
            yield from _sizes(item)


def test_results_have_ints(client: RawClient) -> None:
    config = json.dumps({"ctx-size": 512.0})
    graph = client.call("load_by_name_with_config", name="echo", config=config)
    context = client.call("init_execution_context", graph=graph["graph"])["context"]
    client.set_input(context, b'{"ctx-size": 100000.0}', index=1)
    values = client.call("parameters", context=context)["parameters"]
    [in_force] = [p["value"] for p in values if p["name"] == "ctx-size"]
    larger = client.call("load_by_name_with_config", name="echo", config='{"ctx-size":1e6}')
    results = [
        graph,
        larger,
        client.metadata(context),
        client.call("models"),
        client.call("show", name="echo"),
        {"ctx-size": in_force},
    ]
    for result in results:
        sizes = dict(_sizes(result))
        assert sizes and all(type(size) is int for size in sizes.values()), sizes


def test_the_python_client_has_ints(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client:
        graph = client.load_by_name_with_config("echo", {"ctx-size": float(CTX_SIZE)})
        assert type(graph.ctx_size) is int
        for text, error in (("x" * 40, PromptTooLong), ("0123456789", ContextFull)):
            context = client.init_execution_context(graph)
            client.set_input(context, 0, text)
            with pytest.raises((error, EndOfSequence)) as caught:
                client.compute(context)
            check(caught.value)


def test_the_tests_above_cover_every_error_with_a_size() -> None:
    parts = ("backends", "daemon", "gateways", "ipc", "scheduler", "sessions", "wire")
    pattern = re.compile(r'(?:data=|sizes = )\{[^}]*"ctx_size"|\| \(\{"ctx_size"')
    found = {
        str(path.relative_to(ROOT)): len(pattern.findall(path.read_text()))
        for part in parts
        for path in (ROOT / part).rglob("*.py")
    }
    assert {path: number for path, number in found.items() if number} == {
        "daemon/residency/plan.py": 2,
        "gateways/http/turns/precheck.py": 1,
        "scheduler/embeddings.py": 1,
        "scheduler/engine/commands.py": 2,
        "scheduler/engine/tokenizing.py": 1,
        "scheduler/rank_text.py": 1,
        "sessions/conversation/state.py": 1,
        "sessions/turn/turn.py": 1,
    }
