"""The nine methods as WasmEdge's client sees them: results, handles, numbers of errors."""

from __future__ import annotations

import grpc
import pytest

from inferd import Client, TooLarge
from inferd.gateways.nnrpc.service import fitting
from tests.durations import check_duration
from tests.echo import echo_model
from tests.gateways.nnrpc.driver import METHODS, RpcError, WasmEdge
from tests.waiting import wait_until

CONFIG = echo_model("slow", step_ms=20)
NEVER = 4711
SLOW_TEXT = b"and so on " * 100


def test_a_client_loads_sets_input_computes_and_reads(guest: WasmEdge) -> None:
    context = guest.context()
    assert guest.output(context) == b"" and guest.metadata(context)["input_tokens"] == 0
    assert guest.set_input(context, b'{"n-predict":5}', 1) == 0
    assert guest.set_input(context, b"What is up?") == 0
    assert guest.metadata(context)["input_tokens"] == 13
    assert guest.compute(context) == 0
    assert guest.output(context) == b"What "
    assert guest.metadata(context)["output_tokens"] == 5


def test_a_client_computes_tensors_of_numbers(guest: WasmEdge) -> None:
    context, picture = guest.context(), bytes(range(256)) * 2352

    def compute() -> None:
        assert guest.set_input(context, picture, 0, 1, (1, 3, 224, 224)) == 0
        assert guest.set_input(context, bytes(8), 1, 4, (2,)) == 0 == guest.compute(context)
        found = guest.call("GetOutput", resource_handle=context, index=0, output_max_size=1 << 20)
        assert found.data == picture and guest.output(context, 1) == bytes(8)

    check_duration(1, compute)


def test_an_image_in_a_prompt_is_refused(guest: WasmEdge) -> None:
    context = guest.context()
    assert guest.set_input(context, b'<img src="data:image/png;base64,AAAA">') == 1
    assert guest.set_input(context, b'<img src="data:image/png;base64,...">') == 0


def test_stream_stdout_is_ignored_without_an_output_to_print_to(guest: WasmEdge) -> None:
    context = guest.context(config='{"stream-stdout":true}')
    assert guest.metadata(context)["ignored"] == ["stream-stdout"]


def test_tokens_are_pulled_until_100(guest: WasmEdge) -> None:
    context = guest.context(config="{}")
    guest.set_input(context, b"abc")
    assert guest.pull(context, 3) == b"abc" and guest.compute_single(context) == 100
    assert guest.output(context) == b"abc" and guest.output(context, single=True) == b""
    assert guest.pull(context, 1) == b"a", "the next turn begins with the same prompt"
    assert guest.number("FiniSingle", resource_handle=context) == 0
    assert guest.output(context) == b""
    guest.pull(context, 1)
    assert guest.set_input(context, b"two") == 0, "a new prompt ends the turn"
    assert guest.pull(context, 3) == b"two"


def test_each_load_is_a_graph_of_its_own(guest: WasmEdge) -> None:
    graphs = [guest.load(config='{"n-predict":2}'), guest.load(config='{"n-predict":2}')]
    graphs += [guest.load(), guest.load()]
    begun = [guest.begin("LoadByName", name="slow") for _ in range(4)]
    graphs += sorted(call.result().graph_handle for call in begun)
    assert graphs == list(range(8))
    for graph in graphs[:2]:
        context = guest.init(graph)
        guest.set_input(context, b"hello")
        guest.compute(context)
        assert guest.output(context) == b"he"


@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_handle_or_name_is_an_error_with_a_number(name: str, guest: WasmEdge) -> None:
    key = "name" if name.startswith("Load") else "resource_handle"
    with pytest.raises(RpcError) as caught:
        guest.call(name, **{key: "unknown" if key == "name" else NEVER})
    assert caught.value.status == "UNKNOWN"
    assert caught.value.number == (103 if key == "name" else 1)
    assert caught.value.text.startswith(f'failed to call "{name}", errno={caught.value.number}: ')
    guest.load()
    assert guest.number("InitExecutionContext", resource_handle=1) == 1


def test_calls_in_a_wrong_order_are_errors(guest: WasmEdge) -> None:
    context = guest.context()
    assert guest.compute(context) == 1, "there is no prompt"
    assert guest.compute_single(context) == 1
    assert guest.number("FiniSingle", resource_handle=context) == 0
    assert guest.number("GetOutput", resource_handle=context, index=2) == 8
    assert guest.set_input(context, b"{no json", 1) == 2
    assert guest.set_input(context, b"hello") == 0 == guest.compute(context)
    assert guest.number("LoadByNameWithConfig", name="echo", config="{no json") == 2


def test_full_contexts_and_long_prompts_have_their_numbers(guest: WasmEdge) -> None:
    context = guest.context(config='{"ctx-size":9}')
    guest.set_input(context, b"grand")
    assert guest.compute(context) == 101
    assert guest.output(context) == b"gr"
    assert guest.metadata(context)["error"]["name"] == "ContextFull"
    long = guest.set_input(context, b"much too long") or guest.compute(context)
    assert long == 102
    metadata = guest.metadata(context)
    assert metadata["stop_reason"] == metadata["error"]["name"] == "PromptTooLong"
    assert metadata["stop_detail"] == metadata["error"]["message"] and metadata["error"]["hint"]
    assert metadata["error"]["data"] == {"prompt_tokens": 15, "ctx_size": 9}


def test_an_output_larger_than_the_buffer_is_7(guest: WasmEdge) -> None:
    context = guest.context()
    guest.set_input(context, b"hello")
    guest.compute(context)
    read = {"resource_handle": context, "index": 0}
    assert guest.call("GetOutput", output_max_size=5, **read).data == b"hello"
    with pytest.raises(RpcError, match="an output of 5 bytes does not fit") as caught:
        guest.call("GetOutput", output_max_size=4, **read)
    assert (caught.value.number, caught.value.needed) == (7, 5)


def test_an_old_client_has_a_buffer_of_64_kib() -> None:
    assert len(fitting(bytes(65536), 0)) == 65536
    assert len(fitting(bytes(65537), 65537)) == 65537
    for size_max in (0, 65536):
        with pytest.raises(TooLarge):
            fitting(bytes(65537), size_max)


def test_contexts_of_one_client_compute_side_by_side(guest: WasmEdge) -> None:
    graph = guest.load("slow")
    slow, quick = guest.init(graph), guest.init(graph)
    guest.set_input(slow, SLOW_TEXT)
    guest.set_input(quick, b"ab")
    long = guest.begin("Compute", resource_handle=slow)
    assert guest.compute(quick) == 0 and guest.output(quick) == b"ab"
    assert not long.done()
    long.cancel()


def test_a_deadline_ends_the_turn(guest: WasmEdge, client: Client) -> None:
    context = guest.context("slow")
    guest.set_input(context, SLOW_TEXT)
    with pytest.raises(RpcError) as caught:
        guest.call("Compute", resource_handle=context, timeout=2.0)
    assert caught.value.status == "DEADLINE_EXCEEDED"
    wait_until(lambda: not client.queue())
    assert 0 < len(guest.output(context)) < len(SLOW_TEXT), "the output so far can be read"
    assert guest.set_input(context, b"ab") == 0 == guest.compute(context)
    assert guest.output(context) == b"ab"


@pytest.mark.parametrize("call", ["Compute", "ComputeSingle"])
def test_a_cancelled_call_leaves_a_context_that_can_be_used(
    call: str, guest: WasmEdge, client: Client
) -> None:
    context = guest.context("slow")
    guest.set_input(context, SLOW_TEXT)
    begun = guest.begin(call, resource_handle=context)
    wait_until(client.queue)
    begun.cancel()
    assert guest.set_input(context, b"ab") == 0 == guest.compute(context)
    assert guest.output(context) == b"ab"


def test_unknown_methods_are_unimplemented(guest: WasmEdge) -> None:
    method = guest.channel.unary_unary("/wasi_ephemeral_nn.Graph/Load")
    with pytest.raises(grpc.RpcError) as caught:
        method(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("request_bytes", [b"\xff", b"\x0a\x02\xff\xff"], ids=["field", "utf-8"])
def test_requests_that_cannot_be_read_are_1(request_bytes: bytes, guest: WasmEdge) -> None:
    method = guest.channel.unary_unary("/wasi_ephemeral_nn.Graph/LoadByName")
    with pytest.raises(grpc.RpcError) as caught:
        method(request_bytes)
    assert RpcError(caught.value).number == 1
