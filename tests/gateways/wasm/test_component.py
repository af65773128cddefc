"""The component world `wasi:nn`, with a component in text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wasmtime import Engine, Store, WasmtimeError
from wasmtime.component import Component, Linker

import inferd.wasm
from inferd import Client
from inferd.backends.errors import InvalidArgument
from inferd.gateways.wasm import component as component_module
from inferd.testing import RunningDaemon
from inferd.wasm import Preload, add_component_to_linker
from tests.durations import check_duration
from tests.echo import echo_model
from tests.pictures import png

CONFIG = (
    echo_model("slow", step_ms=20)
    + echo_model("small", **{"ctx-size": 48})
    + echo_model("deadly", abort_on="die")
    + echo_model("eyes", media=True)
)
DONE, TEXT_ERROR = 255, 254
"""The codes of a call without an error, and of one whose error is a text; others are WIT's."""
INVALID_ARGUMENT, INVALID_ENCODING, TOO_LARGE, NOT_FOUND = 0, 1, 5, 6
TEXT = (Path(__file__).parent / "guests" / "component.wat").read_text()


@pytest.fixture(scope="module")
def program() -> tuple[Engine, Component]:
    engine = Engine()
    return engine, Component(engine, TEXT)


class Guest:
    """An instance of the component, with the errors of its calls."""

    def __init__(self, program: tuple[Engine, Component], client: Client, **settings: Any):
        engine, component = program
        self.store = Store(engine)
        self.errors: list[tuple[str, Exception]] = []
        linker = Linker(engine)
        settings.setdefault("on_error", lambda name, error: self.errors.append((name, error)))
        self.guest = add_component_to_linker(linker, client, **settings)
        self.instance = linker.instantiate(self.store, component)

    def call(self, name: str, *arguments: Any) -> Any:
        function = self.instance.get_func(self.store, name)
        assert function is not None
        result = function(self.store, *arguments)
        function.post_return(self.store)
        return result

    def ask(
        self, model: str, prompt: bytes, options: object = None, *, tidy: bool = True
    ) -> tuple[int, bytes]:
        code, data = self.call("ask", model, prompt, json.dumps(options or {}).encode(), tidy)
        return code, data


@pytest.fixture
def guest(program: tuple[Engine, Component], client: Client) -> Iterator[Guest]:
    running = Guest(program, client)
    yield running
    running.guest.close()


def test_a_component_loads_by_name_sets_tensors_computes_and_reads(guest: Guest) -> None:
    assert guest.ask("echo", b"What is up?") == (DONE, b"What is up?")
    assert guest.ask("echo", bytes(range(256)), {"n-predict": 200}) == (DONE, bytes(range(200)))
    assert guest.ask("echo", b"hello", {"n-predict": -2, "ctx-size": 50}) == (DONE, b"hello")


def test_parameters_have_their_type_and_two_prompts_are_refused(guest: Guest) -> None:
    host = component_module.ComponentHost(guest.guest, None)
    graph = guest.guest.load_by_name(b"echo")
    context = (graph, guest.guest.init_execution_context(graph))
    [compute] = host.functions(component_module.CONTEXT).values()

    json = b'{"n-predict":2}'
    compute(context, [("config", ([15], "U8", json)), ("prompt", ([1], "FP32", b"hello"))])
    assert guest.guest.get_output(context[1], 0) == b"he"
    prompts = [("a", ([1], "U8", b"x")), ("metadata", ([1], "FP32", b"x"))]
    with pytest.raises(InvalidArgument, match="'a', 'metadata'"):
        compute(context, [*prompts, ("1", ([2], "U8", b"{}"))])


def test_a_model_that_computes_tensors_gets_them_as_they_are(guest: Guest) -> None:
    host = component_module.ComponentHost(guest.guest, None)
    graph = guest.guest.load_by_name(b"echo")
    context = (graph, guest.guest.init_execution_context(graph))
    [compute] = host.functions(component_module.CONTEXT).values()
    picture = ([1, 3, 224, 224], "FP32", bytes(4 * 3 * 224 * 224))
    inputs = [("before", picture), ("config", ([1], "I32", b"{}")), ("text", ([2], "U8", b"hi"))]

    def compute_all() -> None:
        for count in (0, 1, 3):
            outputs = compute(context, inputs[:count])
            held = host._held[component_module.TENSOR]
            assert [(name, held[tensor.rep]) for name, tensor in outputs] == inputs[:count]

    check_duration(1, compute_all)


def test_a_context_of_prompts_keeps_the_history(guest: Guest, client: Client) -> None:
    assert guest.call("converse", "echo", "What is up?", " grüß dich", False) == (
        DONE, " grüß dich".encode(),
    )  # fmt: skip
    assert guest.call("converse", "echo", "", "alone", False) == (DONE, b"alone")
    tokens = sorted(session["tokens"] for session in client.sessions())
    # Two tokens at the beginning; of each turn prompt and answer in bytes, and an end.
    assert tokens == [2 + (0 + 1) + (2 * 5 + 1), 2 + (2 * 11 + 1) + (2 * 12 + 1)]


def test_a_dropped_context_of_prompts_is_closed_with_its_graph(
    guest: Guest, client: Client
) -> None:
    assert guest.call("converse", "echo", "one", "two", True) == (DONE, b"two")
    assert client.sessions() == [] and sum(m["leases"] for m in client.models()) == 0


@pytest.mark.parametrize(
    ("model", "first", "second", "error"),
    [
        ("small", "much too long for it, also without any history", "", "PromptTooLong"),
        ("small", "not too long alone", "but so with the first", "PromptTooLong"),
        ("deadly", "live", "die", "WorkerCrashed"),
    ],
)
def test_errors_of_a_context_of_prompts_are_texts(
    model: str, first: str, second: str, error: str, guest: Guest
) -> None:
    code, text = guest.call("converse", model, first, second, False)
    found = json.loads(text)
    assert (code, found["name"]) == (TEXT_ERROR, error) and found["message"] and found["hint"]
    assert [name for name, _ in guest.errors] == ["[method]context.compute"]


def test_a_graph_whose_context_of_prompts_is_refused_is_unloaded(
    program: tuple[Engine, Component], client: Client
) -> None:
    guest = Guest(program, client, contexts_max=0)
    code, text = guest.call("converse", "echo", "one", "two", False)
    assert (code, json.loads(text)["name"]) == (TEXT_ERROR, "Busy")
    assert sum(m["leases"] for m in client.models()) == 0
    guest.guest.close()
    assert guest.call("converse", "nothing", "", "", False)[0] == NOT_FOUND


def test_a_full_context_is_no_error(guest: Guest) -> None:
    code, output = guest.ask("echo", b"x" * 2500)
    assert code == DONE and 0 < len(output) < 2500


def test_dropped_resources_are_closed(guest: Guest, client: Client) -> None:
    guest.ask("echo", b"hello")
    assert client.sessions() == [] and sum(m["leases"] for m in client.models()) == 0
    assert next(m["state"] for m in client.models() if m["name"] == "echo") == "ready"


def test_resources_that_a_component_leaves_are_closed_with_its_guest(
    program: tuple[Engine, Component], client: Client
) -> None:
    guest = Guest(program, client)
    for _ in range(2):
        assert guest.ask("echo", b"hello", tidy=False)[0] == DONE
    assert len(client.sessions()) == 2
    guest.guest.close()
    assert client.sessions() == [] and sum(m["leases"] for m in client.models()) == 0


def test_errors_have_codes_and_texts(guest: Guest, client: Client) -> None:
    code, text = guest.ask("nothing", b"x")
    error = json.loads(text)
    assert code == NOT_FOUND and error["name"] == "ModelNotFound" and error["number"] == 103
    assert error["message"].startswith("there is no model 'nothing'") and error["hint"]
    code, text = guest.ask("echo", b"x", {"temp": "hot"})
    assert code == INVALID_ARGUMENT
    assert "temp: 'hot' is not a number" in json.loads(text)["message"]
    code, text = guest.ask("echo", b"much too long", {"ctx-size": 9})
    assert code == TOO_LARGE and json.loads(text)["data"] == {"prompt_tokens": 15, "ctx_size": 9}
    assert [name for name, _ in guest.errors] == [
        "load-by-name", *["[method]graph-execution-context.compute"] * 2,
    ]  # fmt: skip
    assert guest.ask("echo", b"hello") == (DONE, b"hello")


@pytest.mark.parametrize(
    ("builder", "encoding", "target", "code"),
    [
        (b"echo", 5, 0, DONE),
        (b"preload:echo", 6, 1, DONE),
        (b"echo", 0, 0, INVALID_ENCODING),
        (b"echo", 5, 2, 4),
        (b"nothing", 5, 0, NOT_FOUND),
        (b"\xff", 5, 0, INVALID_ARGUMENT),
    ],
)
def test_load_takes_a_models_name(
    builder: bytes, encoding: int, target: int, code: int, guest: Guest
) -> None:
    found, text = guest.call("load", builder, encoding, target)
    assert found == code, text


def test_preloads_are_the_only_models(program: tuple[Engine, Component], client: Client) -> None:
    guest = Guest(program, client, preloads={"default": Preload("echo")})
    assert guest.ask("default", b"hello") == (DONE, b"hello")
    assert guest.ask("echo", b"hello")[0] == NOT_FOUND
    guest.guest.close()


@pytest.mark.parametrize(("bound", "value"), [("RESOURCES_MAX", 8), ("TENSORS_BYTES_MAX", 8 << 10)])
def test_resources_of_a_component_are_bounded(
    bound: str, value: int, guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component_module, bound, value)
    guest.call("hoard", 8)
    with pytest.raises(WasmtimeError, match="drop resources that are no longer needed"):
        guest.call("hoard", 1)


def test_the_deadline_of_a_component_ends_its_call(
    program: tuple[Engine, Component], client: Client
) -> None:
    guest = Guest(program, client, timeout=0.5)
    with pytest.raises(WasmtimeError, match=r"ran longer than 0\.5 s"):
        guest.ask("slow", b"and so on " * 100)
    client.close()


def test_a_component_does_not_notice_a_restart(
    guest: Guest, daemon: RunningDaemon, client: Client
) -> None:
    assert guest.ask("echo", b"before") == (DONE, b"before")
    daemon.kill()
    daemon.start_again()
    assert guest.ask("echo", b"after") == (DONE, b"after")


def test_a_context_of_prompts_keeps_its_history_over_a_restart(
    guest: Guest, daemon: RunningDaemon
) -> None:
    host = guest.guest
    graph, tokens = host.load_by_name(b"echo"), []
    for restarts in (False, True):
        context = host.init_execution_context(graph)
        assert host.prompt_compute(context, "before") == "before"
        if restarts:
            daemon.kill()
            daemon.start_again()
        assert host.prompt_compute(context, "after") == "after"
        tokens.append(json.loads(host.get_output(context, 1))["input_tokens"])
    assert tokens[0] == tokens[1] > len("before" * 2 + "after")


def test_the_package_has_the_name_of_the_documentation() -> None:
    assert inferd.wasm.add_to_linker.__module__ == "inferd.gateways.wasm.host_functions"
    assert set(inferd.wasm.__all__) == set(inferd.gateways.wasm.__all__)


def test_an_image_among_the_inputs_belongs_to_the_prompt(guest: Guest) -> None:
    host = component_module.ComponentHost(guest.guest, None)
    graph = guest.guest.load_by_name(b"eyes")
    context = (graph, guest.guest.init_execution_context(graph))
    [compute] = host.functions(component_module.CONTEXT).values()

    picture, config = png(8, 8), ("config", ([15], "U8", b'{"n-predict":2}'))
    image = ("any name", ([len(picture)], "U8", picture))
    prompt = ("prompt", ([1], "U8", b"a<image>b"))
    compute(context, [config, image, prompt])
    assert json.loads(guest.guest.get_output(context[1], 1))["media_tokens"] > 0
    with pytest.raises(InvalidArgument, match="places for 2 images"):
        compute(context, [config, image, image, prompt])
    compute(context, [config, ("prompt", ([1], "U8", b"text"))])
    assert "media_tokens" not in json.loads(guest.guest.get_output(context[1], 1))
