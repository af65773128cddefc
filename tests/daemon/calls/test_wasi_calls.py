"""The wasi-nn calls over a real socket to a real daemon on the echo model, as WasmEdge has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

import inferd
from inferd.backends.errors import (
    ContextFull,
    EndOfSequence,
    InvalidArgument,
    InvalidEncoding,
    ModelNotFound,
    PromptTooLong,
    SessionBusy,
    TooLarge,
    UnsupportedOperation,
)
from inferd.backends.library import LLAMA_COMMIT
from inferd.daemon.calls.tensors import CONFIGURATION_NAMES
from inferd.testing import RunningDaemon
from tests.raw import RawClient

NEVER = 0xDEAD_BEEF


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as raw:
        yield raw


# Loading.


def test_a_guest_loads_sets_input_computes_and_reads(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b"What is up?")
    client.call("compute", context=context)

    assert client.output(context) == b"What is up?"


@pytest.mark.parametrize("builder", [b"echo", b"preload:echo\0"])
@pytest.mark.parametrize("encoding", ["ggml", 6])
@pytest.mark.parametrize("target", ["cpu", "gpu", "auto", 0, 3])
def test_load_takes_a_name_in_every_form(
    client: RawClient, builder: bytes, encoding: object, target: object
) -> None:
    result = client.call("load", builders=[builder], encoding=encoding, target=target)

    assert result["model"] == "echo"


@pytest.mark.parametrize("encoding", ["openvino", "onnx", "whisper", 0, 1, 4, 99, "nonsense"])
def test_other_encodings_are_refused_by_their_name(client: RawClient, encoding: object) -> None:
    with pytest.raises(InvalidEncoding) as caught:
        client.call("load", builders=[b"echo"], encoding=encoding, target=0)

    assert "ggml" in caught.value.hint


@pytest.mark.parametrize("target", ["tpu", "npu", "NPU", 2, 4])
def test_missing_targets_are_unsupported(client: RawClient, target: object) -> None:
    with pytest.raises(UnsupportedOperation):
        client.call("load", builders=[b"echo"], encoding="ggml", target=target)


@pytest.mark.parametrize("target", [5, -1, 1 << 40, "gpus", "", True, 1.5, None])
def test_targets_that_no_runtime_has_are_invalid(client: RawClient, target: object) -> None:
    with pytest.raises(InvalidArgument):
        client.call("load", builders=[b"echo"], encoding="ggml", target=target)


def test_bad_metadata_in_the_second_builder_is_an_invalid_encoding(client: RawClient) -> None:
    with pytest.raises(InvalidEncoding):
        client.call("load", builders=[b"echo", b"{no json"], encoding="ggml", target=0)


def test_an_unknown_model_is_not_found_and_the_nearest_is_named(client: RawClient) -> None:
    with pytest.raises(ModelNotFound) as caught:
        client.call("load_by_name", name="ecko")

    assert caught.value.number == 103
    assert "'echo'" in caught.value.hint


@pytest.mark.parametrize("name", ["echo.gguf", "echo-00002-of-00003.gguf"])
def test_a_name_with_the_ending_of_its_file_finds_the_model(client: RawClient, name: str) -> None:
    assert client.call("load_by_name", name=name)["model"] == "echo"
    assert client.call("load", builders=[f"preload:{name}".encode()])["model"] == "echo"
    [described] = client.call("show", name=name)["models"]
    assert described["name"] == "echo"
    for unknown in ("echo.gguf.gguf", ".gguf", "echoes.GGUF"):
        with pytest.raises(ModelNotFound, match=unknown):
            client.call("load_by_name", name=unknown)


def test_unknown_keys_are_ignored_and_named_and_strict_refuses_them(client: RawClient) -> None:
    result = client.call(
        "load_by_name_with_config", name="echo", config='{"llama3":false,"enable-log":false}'
    )

    assert sorted(result["ignored"]) == ["enable-log", "llama3"]
    with pytest.raises(InvalidArgument) as caught:
        client.call("load_by_name_with_config", name="echo", config='{"strict":true,"n-predikt":1}')
    assert "n-predict" in caught.value.message


@pytest.mark.parametrize("key", ["image", "tts"])
def test_a_key_that_would_make_the_answer_wrong_is_unsupported(client: RawClient, key: str) -> None:
    text = f'{{"{key}":"x.bin"}}'
    with pytest.raises(UnsupportedOperation):
        client.call("load_by_name_with_config", name="echo", config=text)
    context = client.context(config=f'{{"{key}":""}}')
    with pytest.raises(UnsupportedOperation):
        client.set_input(context, text.encode(), index=1)


def test_a_projector_for_a_model_without_one_is_refused(client: RawClient) -> None:
    with pytest.raises(InvalidArgument, match="'echo' has no projector") as caught:
        client.call("load_by_name_with_config", name="echo", config='{"mmproj":"x.gguf"}')
    assert "mmproj" in caught.value.hint and caught.value.data["requested"] == "x.gguf"
    context = client.context(config='{"mmproj":""}')
    with pytest.raises(InvalidArgument, match="'echo' has no projector"):
        client.set_input(context, b'{"mmproj":"x.gguf"}', index=1)
    client.set_input(context, b'{"mmproj":"none"}', index=1)
    assert client.metadata(context)["not_applied"] == {}


def test_all_bad_values_are_reported_together(client: RawClient) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.call(
            "load_by_name_with_config", name="echo", config='{"temp":"","top-p":[],"seed":"x"}'
        )

    assert len(caught.value.data["errors"]) == 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"grammar":"root ::= [a]","json-schema":"{}"}', "json-schema: grammar is set too"),
        ('{"stop-patterns":["a$"]}', "[$] cannot be decided"),
        ('{"samplers":["infill"]}', "infill needs top-k"),
    ],
)
def test_values_that_contradict_each_other_are_refused_at_load(
    client: RawClient, config: str, words: str
) -> None:
    for call, params in (
        ("load_by_name_with_config", {"name": "echo", "config": config}),
        ("load", {"builders": [b"echo", config.encode()], "encoding": "ggml", "target": "auto"}),
    ):
        with pytest.raises(InvalidArgument, match=words):
            client.call(call, **params)
    context = client.context()
    with pytest.raises(InvalidArgument, match=words):
        client.set_input(context, config.encode(), index=1)


def test_values_out_of_range_are_adjusted_and_reported(client: RawClient) -> None:
    graph = client.call(
        "load_by_name_with_config", name="echo", config='{"n-predict":-2,"temp":-1,"slots":0}'
    )
    assert set(graph["adjusted"]) == {"n-predict", "temp", "slots"}
    context = client.call("init_execution_context", graph=graph["graph"])["context"]
    assert client.metadata(context)["adjusted"] == graph["adjusted"]
    client.set_input(context, b'{"temp":0.5,"seed":-7}', index=1)
    found = client.metadata(context)["adjusted"]
    assert set(found) == {"n-predict", "seed", "slots"}
    client.set_input(context, b"hello")
    client.call("compute", context=context)

    assert client.output(context) == b"hello"
    assert client.metadata(context)["adjusted"] == found
    assert client.metadata(context)["seed"] == (1 << 32) - 7
    client.call("set_options", context=context, options={"seed": 1})
    client.call("compute", context=context)
    assert set(client.metadata(context)["adjusted"]) == {"n-predict", "slots"}


def test_values_out_of_range_are_refused_in_options_and_where_strict_is_set(
    client: RawClient,
) -> None:
    context = client.context()
    with pytest.raises(InvalidArgument, match="n-predict: -2 is outside"):
        client.set_input(context, b'{"n-predict":-2,"strict":true}', index=1)
    with pytest.raises(InvalidArgument, match="n-predict: -2 is outside"):
        client.call("set_options", context=context, options={"n-predict": -2})
    assert client.metadata(context)["adjusted"] == {}


def test_run_inference_adjusts_the_values_of_its_configuration(client: RawClient) -> None:
    context = client.context()
    result = client.call(
        "run_inference", context=context, tensor={"data": b"hello"}, config='{"n-predict":-2}'
    )
    assert result["text"] == b"hello" and set(result["metadata"]["adjusted"]) == {"n-predict"}


def test_a_second_configuration_gets_a_graph_of_its_own(client: RawClient) -> None:
    one = client.call("load_by_name_with_config", name="echo", config='{"n-predict":2}')
    other = client.call("load_by_name_with_config", name="echo", config="")
    texts = []
    for graph in (one["graph"], other["graph"]):
        context = client.call("init_execution_context", graph=graph)["context"]
        client.set_input(context, b"hello")
        client.call("compute", context=context)
        texts.append(client.output(context))

    assert texts == [b"he", b"hello"]
    assert one["graph"] != other["graph"]


@pytest.mark.parametrize(
    ("call", "params"),
    [
        ("load", {"builders": [b"echo"], "encoding": "ggml", "target": "cpu"}),
        ("load_by_name", {"name": "echo"}),
        ("load_by_name_with_config", {"name": "echo", "config": "{}"}),
    ],
)
def test_each_load_is_a_graph_of_its_own(
    call: str, params: dict[str, object], client: RawClient
) -> None:
    first, second = (client.call(call, **params)["graph"] for _ in range(2))
    context = client.call("init_execution_context", graph=second)["context"]
    client.set_input(context, b"hello")
    client.call("unload", graph=first)

    client.call("compute", context=context)
    client.call("init_execution_context", graph=second)

    assert first != second and client.output(context) == b"hello"


def test_model_level_keys_that_differ_are_reported_and_a_smaller_context_holds(
    client: RawClient,
) -> None:
    result = client.call(
        "load_by_name_with_config", name="echo", config='{"ctx-size":20,"batch-size":64}'
    )
    context = client.call("init_execution_context", graph=result["graph"])["context"]
    client.set_input(context, b"0123456789")

    assert result["ctx_size"] == 20
    assert result["not_applied"] == {"batch-size": 512}
    with pytest.raises(ContextFull):
        client.call("compute", context=context)
    assert client.output(context) == b"01234567", "the output before the end can be read"
    assert client.metadata(context)["not_applied"] == {"batch-size": 512}


def test_a_larger_context_than_the_workers_is_reported_as_reduced(client: RawClient) -> None:
    client.context()

    result = client.call("load_by_name_with_config", name="echo", config='{"ctx-size":100000}')

    assert result["ctx_size"] == result["not_applied"]["ctx-size"] == 4096


def test_a_smaller_context_of_set_input_holds_for_its_context(client: RawClient) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]
    first, second = (
        client.call("init_execution_context", graph=graph)["context"] for _ in range(2)
    )
    client.set_input(first, b'{"ctx-size":12}', index=1)
    for context, error in ((first, ContextFull), (second, None)):
        client.set_input(context, b"hello world"[:8])
        with pytest.raises(error) if error else nullcontext():
            client.call("compute", context=context)
        assert "ctx-size" not in client.metadata(context)["not_applied"]
    client.set_input(first, b"a prompt of twenty letters")
    with pytest.raises(PromptTooLong) as caught:
        client.call("compute", context=first)
    assert caught.value.data["ctx_size"] == 12
    for size, not_applied in ((4096, None), (0, None), (100_000, 4096)):
        client.set_input(first, b'{"ctx-size":%d}' % size, index=1)
        client.call("compute", context=first)
        assert client.metadata(first)["not_applied"].get("ctx-size") == not_applied


def test_a_smaller_batch_of_set_input_holds_for_its_context(client: RawClient) -> None:
    context = client.context()
    for size, applied in ((64, True), (512, True), (1024, False), (32, True)):
        client.set_input(context, b'{"batch-size":%d}' % size, index=1)
        client.set_input(context, b"x" * 100)
        client.call("compute", context=context)
        assert client.output(context) == b"x" * 100
        assert ("batch-size" not in client.metadata(context)["not_applied"]) == applied


# Handles.


@pytest.mark.parametrize(
    ("call", "params"),
    [
        ("init_execution_context", {"graph": NEVER}),
        ("unload", {"graph": NEVER}),
        ("set_input", {"context": NEVER, "index": 0, "tensor": {}}),
        ("compute", {"context": NEVER}),
        ("compute_single", {"context": NEVER}),
        ("get_output", {"context": NEVER}),
        ("get_output_single", {"context": NEVER}),
        ("fini_single", {"context": NEVER}),
        ("finalize_execution_context", {"context": NEVER}),
    ],
)
def test_an_unknown_handle_is_an_invalid_argument(
    client: RawClient, call: str, params: dict[str, object]
) -> None:
    with pytest.raises(InvalidArgument):
        client.call(call, **params)


def test_the_second_finalize_and_the_second_unload_are_errors(client: RawClient) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]
    context = client.call("init_execution_context", graph=graph)["context"]
    client.call("finalize_execution_context", context=context)
    client.call("unload", graph=graph)

    with pytest.raises(InvalidArgument):
        client.call("finalize_execution_context", context=context)
    with pytest.raises(InvalidArgument):
        client.call("unload", graph=graph)


def test_another_connections_handle_is_treated_as_unknown(
    daemon: RunningDaemon, client: RawClient
) -> None:
    context = client.context()
    with RawClient(daemon.socket) as other:
        with pytest.raises(InvalidArgument) as foreign:
            other.output(context)
        with pytest.raises(InvalidArgument) as unknown:
            other.output(NEVER)

    assert foreign.value.hint == unknown.value.hint
    assert foreign.value.message.replace(str(context), "N") == unknown.value.message.replace(
        str(NEVER), "N"
    )


# Outputs.


def test_a_fresh_context_has_no_bytes_and_valid_metadata(client: RawClient) -> None:
    context = client.context()

    assert client.output(context) == b""
    assert client.call("get_output_single", context=context)["data"] == b""
    metadata = client.metadata(context)
    assert (metadata["input_tokens"], metadata["output_tokens"]) == (0, 0)
    assert metadata["llama_build_number"] == client.server_hello[1].get("llama_build_number", 0)
    assert metadata["llama_commit"] == LLAMA_COMMIT == client.server_hello[1]["llama_commit"]


def test_input_tokens_stand_right_after_set_input_and_twice_alike(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b"hello")
    first = client.metadata(context)["input_tokens"]
    client.set_input(context, b"hello")

    assert first == client.metadata(context)["input_tokens"] == 7


def test_a_buffer_too_small_gets_the_size_and_no_byte(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b"hello")
    client.call("compute", context=context)

    with pytest.raises(TooLarge) as caught:
        client.output(context, size_max=4)
    assert caught.value.data == {"needed": 5, "size_max": 4}
    assert client.output(context, size_max=5) == b"hello"


def test_any_tensor_type_and_dims_are_taken_for_a_prompt(client: RawClient) -> None:
    context = client.context()
    for kind in (0, 1, 2, 3, 4, 5, "u8", "fp32", "i64"):
        for dimensions in ([1], [5], [], [1, 5]):
            client.set_input(context, b"hello", type=kind, dimensions=dimensions)
            client.call("compute", context=context)
            assert client.output(context) == b"hello"


# Single tokens.


def test_single_tokens_come_one_by_one_until_end_of_sequence(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b"abc")

    assert [client.compute_single(context) for _ in range(3)] == [b"a", b"b", b"c"]
    with pytest.raises(EndOfSequence) as caught:
        client.call("compute_single", context=context)
    assert caught.value.number == 100
    assert client.output(context) == b"abc"
    assert client.metadata(context)["stop_reason"] == "eos"


def test_after_the_end_the_next_compute_single_starts_the_prompt_anew(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b"a")
    client.compute_single(context)
    with pytest.raises(EndOfSequence):
        client.call("compute_single", context=context)

    assert client.compute_single(context) == b"a"


@pytest.mark.parametrize(
    ("config", "text", "reason"),
    [
        ('{"n-predict":3}', b"hel", "length"),
        ('{"stop":"lo"}', b"hel", "stop"),
        ('{"reverse-prompt":"lo"}', b"hello", "stop"),
        ('{"stop_patterns":"l+o"}', b"he", "pattern"),
        ('{"stopping":{"token_conditions":[{"token_id":108}]}}', b"he", "token"),
    ],
)
def test_bounds_hold_in_single_mode_too_and_the_reason_stands_in_the_metadata(
    client: RawClient, config: str, text: bytes, reason: str
) -> None:
    context = client.context(config=config)
    client.set_input(context, b"hello, world")
    output = b""
    with pytest.raises(EndOfSequence):
        for _ in range(20):
            output += client.compute_single(context)

    assert output == text
    assert client.metadata(context)["stop_reason"] == reason


def test_a_full_context_is_101_in_single_mode(client: RawClient) -> None:
    context = client.context(config='{"ctx-size":9}')
    client.set_input(context, b"hello")
    output = b""
    with pytest.raises(ContextFull) as caught:
        while True:
            output += client.compute_single(context)

    assert caught.value.number == 101
    assert caught.value.data == {"ctx_size": 9}
    assert output == b"he"


def test_fini_single_clears_the_output_and_keeps_the_input(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b"abc")
    client.compute_single(context)
    client.call("fini_single", context=context)

    assert client.output(context) == b""
    assert client.metadata(context)["input_tokens"] == 5
    assert client.compute_single(context) == b"a"


def test_contexts_of_one_graph_are_independent(client: RawClient) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]
    one, other = (client.call("init_execution_context", graph=graph)["context"] for _ in range(2))
    client.set_input(one, b'{"n-predict":2}', index=1)
    client.set_input(one, b"abcd")
    client.set_input(other, b"wxyz")
    pieces = [(client.compute_single(one), client.compute_single(other)) for _ in range(2)]

    assert pieces == [(b"a", b"w"), (b"b", b"x")]
    with pytest.raises(EndOfSequence):
        client.compute_single(one)
    assert client.compute_single(other) == b"y"


def test_parameters_hold_from_the_next_turn_of_their_context(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b'{"n_predict":1,"llama3":true}', index=1)
    client.set_input(context, b"hello")
    client.call("compute", context=context)

    assert client.output(context) == b"h"
    assert client.metadata(context)["ignored"] == ["llama3"]
    with pytest.raises(InvalidEncoding):
        client.set_input(context, b"{bad", index=1)


def test_input_while_a_turn_runs_is_refused_as_busy(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b"abc")
    client.compute_single(context)

    with pytest.raises(SessionBusy):
        client.set_input(context, b"other")


# Unloading.


def test_after_unload_outputs_can_be_drained_and_nothing_else_works(client: RawClient) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]
    contexts = [client.call("init_execution_context", graph=graph)["context"] for _ in range(2)]
    for context in contexts:
        client.set_input(context, b"hello")
        client.call("compute", context=context)
    client.call("unload", graph=graph)

    for context in contexts:
        assert client.output(context) == b"hello"
        client.call("fini_single", context=context)
        with pytest.raises(InvalidArgument):
            client.set_input(context, b"more")
        with pytest.raises(InvalidArgument):
            client.call("compute_single", context=context)
        client.call("finalize_execution_context", context=context)
    with pytest.raises(InvalidArgument):
        client.call("init_execution_context", graph=graph)


def test_a_model_without_leases_is_unloaded_before_unload_returns(client: RawClient) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]
    (model,) = client.call("show", name="echo")["models"]
    assert model["state"] == "ready"

    client.call("unload", graph=graph)

    (model,) = client.call("show", name="echo")["models"]
    assert model["state"] == "cold"
    assert model["pid"] == 0


def test_one_client_unloads_in_a_loop_and_anothers_stream_does_not_change(
    daemon: RunningDaemon, client: RawClient
) -> None:
    text = "not one token changes " * 40
    context = client.context()
    number = client.start_request("stream", context=context, prompt=text, raw=True, credit=1000)
    with RawClient(daemon.socket) as other:
        for _ in range(30):
            graph = other.call("load_by_name", name="echo")["graph"]
            other.call("unload", graph=graph)
    client.wait_result(number)

    assert client.streamed_text == text


# The newer forms.


def test_named_metadata_is_read_and_returned(client: RawClient) -> None:
    context = client.context()
    result = client.call(
        "compute",
        context=context,
        inputs=[["metadata", {"data": b'{"n-predict":2}'}], ["prompt", {"data": b"hello"}]],
    )

    assert [name for name, _ in result["outputs"]] == ["metadata", "prompt"]
    assert result["outputs"][1][1]["data"] == b"he"
    assert result["metadata"]["stop_reason"] == "length"


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_the_echo_model_returns_every_tensor_as_it_was(client: RawClient, count: int) -> None:
    spellings = ("FP32", "fp32", 1, "I64", 5, "u8", 3, "bf-16")
    inputs: list[tuple[str, dict[str, object]]] = [
        (
            f"tensor {n}",
            {
                "data": bytes((n + i) % 256 for i in range(n % 9)),
                "dimensions": [n % 9, 1],
                "type": spellings[n % len(spellings)],
            },
        )
        for n in range(count)
    ]
    context = client.context()

    result = client.call("compute", context=context, inputs=inputs)

    plain: dict[str, object] = {"data": b"", "dimensions": [], "type": "u8", "fd": -1}
    outputs = [(name, plain | tensor) for name, tensor in result.get("outputs", [])]
    assert outputs == [(name, plain | tensor) for name, tensor in inputs]


def test_the_snippet_of_phase_three_runs(daemon: RunningDaemon) -> None:
    with inferd.Client(daemon.socket) as client:
        context = client.init_execution_context(client.load("echo"))
        tensor = inferd.Tensor(data=bytes(range(8)), dimensions=[2], type="FP32")
        for number in range(2):
            if number:
                outputs = client.compute(context, {"a": tensor, "b": "text"}).outputs
            else:
                outputs = client.compute(context, [("a", tensor), ("b", "text")]).outputs
            assert outputs[0] == ("a", tensor)
            assert (outputs[1][0], outputs[1][1].data) == ("b", b"text")
        assert client.compute(context, outputs).outputs == outputs
        assert client.compute(context, {}).outputs == client.compute(context, []).outputs == []
        assert client.load(b"preload:echo").model == "echo"


@pytest.mark.parametrize("name", CONFIGURATION_NAMES)
def test_a_tensor_is_configuration_only_by_its_name_and_type(client: RawClient, name: str) -> None:
    context = client.context()
    numbers = {"data": b'{"n-predict":2}', "dimensions": [3, 5], "type": "i32"}
    result = client.call("compute", context=context, inputs=[[name, numbers]])
    assert result["outputs"] == [[name, numbers]]
    json = {"data": b'{"n-predict":2}', "type": 3}
    client.call("compute", context=context, inputs=[[name, json], ["prompt", numbers]])
    assert client.output(context) == b'{"'


def test_the_prompt_interface_answers_text_with_text(client: RawClient) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]
    context = client.call("prompt_init", graph=graph)["context"]

    assert client.call("prompt_compute", context=context, prompt="hello")["text"] == "hello"
    assert client.call("prompt_compute", context=context, prompt="more")["text"] == "more"
    assert client.metadata(context)["cached_tokens"] > 7, "the history was computed again"


def test_run_inference_is_one_turn_with_parameters_of_its_own(client: RawClient) -> None:
    assert client.call("init_backend", config='{"max_sessions":5}')["ignored"] == ["max_sessions"]
    graph = client.call("load_by_name", name="echo")["graph"]
    context = client.call(
        "init_execution_context_with_session_id", graph=graph, session_id="alice"
    )["context"]
    result = client.call(
        "run_inference",
        context=context,
        index=0,
        tensor={"data": b"hello\0"},
        config='{"max_tokens":3,"nonsense":1}',
    )

    assert result["text"] == b"hel"
    assert result["metadata"]["ignored"] == ["nonsense"]
    assert result["metadata"]["session_id"] == "alice"
    again = client.call("init_execution_context_with_session_id", graph=graph, session_id="alice")
    assert again == {"context": context, "attached": True}
    client.call("close_execution_context", context=context)
    client.call("deinit_backend")
    with pytest.raises(InvalidArgument):
        client.call("init_execution_context", graph=graph)


def test_a_prompt_too_long_is_102_with_both_numbers(client: RawClient) -> None:
    context = client.context(config='{"ctx-size":16}')
    client.set_input(context, b"x" * 20)
    assert client.metadata(context)["input_tokens"] == 22

    with pytest.raises(PromptTooLong) as caught:
        client.call("compute", context=context)
    assert caught.value.number == 102
    assert caught.value.data == {"prompt_tokens": 22, "ctx_size": 16}


LONG = b"x" * 100_000
"""More bytes than any context of the echo model holds."""


@pytest.mark.parametrize("config", ["{}", '{"ctx-size":16}'])
def test_the_turn_reports_a_prompt_that_no_context_holds(client: RawClient, config: str) -> None:
    context = client.context(config=config)
    client.set_input(context, LONG)
    least = client.metadata(context)["input_tokens"]
    for call in ("compute", "compute_single"):
        with pytest.raises(PromptTooLong) as caught:
            client.call(call, context=context)
        ctx_size = caught.value.data["ctx_size"]
        assert caught.value.data == {
            "prompt_tokens": least, "ctx_size": ctx_size, "prompt_bytes": len(LONG),
        }  # fmt: skip
        assert 4096 < least <= len(LONG) and ctx_size in (16, 4096)
    with pytest.raises(PromptTooLong):
        client.call("prompt_compute", context=context, prompt="more of it")
    client.set_input(context, b"short")
    assert client.metadata(context)["input_tokens"] == len("short") + 2
    client.call("compute", context=context)
    assert client.output(context) == b"short"


def test_a_branch_and_appended_text_keep_a_prompt_that_no_context_holds(client: RawClient) -> None:
    context = client.context()
    client.set_input(context, b"begin")
    client.set_input(context, json.dumps({"append": True}).encode(), index=1)
    client.set_input(context, LONG)
    client.set_input(context, b"end")
    [branch] = client.call("fork_session", context=context)["contexts"]
    for handle in (context, branch):
        with pytest.raises(PromptTooLong) as caught:
            client.call("compute", context=handle)
        assert caught.value.data["prompt_bytes"] == len(LONG) + len("end")
        assert caught.value.data["prompt_tokens"] == client.metadata(handle)["input_tokens"]
    client.call("reset", context=context)
    client.set_input(context, b"anew")
    client.call("compute", context=context)
    assert client.output(context) == b"anew"


def test_a_session_with_an_id_can_be_kept_when_its_context_is_closed(client: RawClient) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]
    opened = {"graph": graph, "session_id": "kept"}
    context = client.call("init_execution_context_with_session_id", **opened)["context"]
    client.set_input(context, b"hello")
    client.call("finalize_execution_context", context=context, keep=True)
    again = client.call("init_execution_context_with_session_id", **opened)
    client.call("compute", context=again["context"])

    assert again["attached"]
    assert again["context"] != context
    assert client.output(again["context"]) == b"hello"
    client.call("finalize_execution_context", context=again["context"])
    third = client.call("init_execution_context_with_session_id", **opened)
    assert "attached" not in third, "a false one is left out"


def test_a_model_may_be_kept_by_unload(client: RawClient) -> None:
    graph = client.call("load_by_name", name="echo")["graph"]
    client.call("unload", graph=graph, keep=True)

    (model,) = client.call("show", name="echo")["models"]
    assert model["state"] == "ready"
    assert model["leases"] == 0


def test_requests_that_are_sent_at_once_keep_their_order(raw: RawClient) -> None:
    graph = raw.call("load_by_name", name="echo")["graph"]
    for number in range(5):
        context = raw.call("init_execution_context", graph=graph)["context"]
        text = f"text {number}".encode()
        tensor = {"data": text, "dimensions": [len(text)], "type": "u8"}
        first = raw.start_request("set_input", context=context, index=0, tensor=tensor)
        second = raw.start_request("compute", context=context)
        assert raw.wait_result(first) == {}
        raw.wait_result(second)
        assert raw.output(context) == text
