"""The twelve functions as a guest sees them: results, handles, buffers, numbers of errors."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from inferd import BackendError, Client, ContextFull, PromptTooLong
from inferd.gateways.wasm import Preload
from tests.durations import check_duration
from tests.gateways.wasm.driver import OUTSIDE, SIGNATURES, Driver
from tests.tiny_gguf import write_tiny

NEVER = 4711


# Turns.


def test_a_guest_loads_sets_input_computes_and_reads(client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context()
        assert guest.output(context) == b"" and guest.metadata(context)["input_tokens"] == 0
        assert guest.set_input(context, b"What is up?") == 0
        assert guest.metadata(context)["input_tokens"] == 13
        assert guest.call("compute", context) == 0
        assert guest.output(context) == b"What is up?"
        assert guest.metadata(context)["stop_reason"] == "eos"


def test_of_a_long_list_of_dimensions_only_the_first_are_copied(client: Client) -> None:
    with Driver(client, pages=512) as guest:
        context, text = guest.context(), guest.put(b"hi")
        record = guest.put(struct.pack("<IIIII", 0, guest.size // 4, 0, text, 2))
        tracemalloc.start()
        try:
            assert guest.call("set_input", context, 0, record) == 0
            assert tracemalloc.get_traced_memory()[1] < guest.size // 8
        finally:
            tracemalloc.stop()
        record = guest.put(struct.pack("<IIIII", 0, guest.size // 4 + 1, 0, text, 2))
        assert guest.call("set_input", context, 0, record) == 1


def test_a_guest_computes_tensors_of_numbers(client: Client) -> None:
    picture, shape = os.urandom(4 * 3 * 224 * 224), (1, 3, 224, 224)
    with Driver(client, pages=256) as guest:
        context = guest.context()

        def compute() -> None:
            assert guest.call("set_input", context, 0, guest.tensor(picture, 1, shape)) == 0
            assert guest.call("set_input", context, 1, guest.tensor(bytes(8), 4, (2,))) == 0
            assert guest.call("compute", context) == 0
            assert guest.output(context, size=len(picture)) == picture
            assert guest.output(context, 1) == bytes(8)

        check_duration(1, compute)
        assert guest.call("get_output", context, 2, guest.put(b""), 0, guest.put(bytes(4))) == 8
        assert guest.set_input(context, b"What is up?") == guest.call("compute", context) == 0
        assert guest.output(context) == b"What is up?"


def test_computed_tensors_can_be_read_after_unload(client: Client) -> None:
    with Driver(client) as guest:
        graph = guest.load(config={"stream-stdout": True})
        context = guest.init(graph)
        assert guest.call("set_input", context, 0, guest.tensor(b"12345678", 4, (2,))) == 0
        assert guest.call("set_input", context, 1, guest.tensor(b"abcdefgh", 4, (2,))) == 0
        assert guest.call("set_input", context, 2, guest.tensor(b"ABCDEFGH", 4, (2,))) == 0
        assert guest.call("compute", context) == guest.call("unload", graph) == 0
        outputs = [guest.output(context, index) for index in range(3)]
        assert outputs == [b"12345678", b"abcdefgh", b"ABCDEFGH"]
        assert guest.call("get_output", context, 3, guest.put(b""), 0, guest.put(bytes(4))) == 8


def test_tokens_are_pulled_until_100(client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context()
        guest.set_input(context, b"abc")
        pieces = []
        while (number := guest.call("compute_single", context)) == 0:
            pieces.append(guest.output(context, single=True))
            assert guest.output(context) == b"".join(pieces)
        assert (number, pieces) == (100, [b"a", b"b", b"c"])
        assert guest.output(context) == b"abc" and guest.output(context, single=True) == b""
        assert guest.metadata(context)["output_tokens"] == 4
        assert guest.pull(context, 1) == b"a", "the next turn begins with the same prompt"
        assert guest.call("fini_single", context) == 0
        assert guest.output(context) == b"" == guest.output(context, single=True)
        assert guest.metadata(context)["input_tokens"] == 5
        assert guest.pull(context, 2) == b"ab"


def test_a_turn_that_the_guest_does_not_know_does_not_make_set_input_fail(client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context()
        guest.set_input(context, b"one")
        [session] = client.sessions()
        assert client.compute_single(session["context"] or 0) == b"o"
        assert guest.set_input(context, b"two") == 0 and guest.errors == []
        assert guest.pull(context, 3) == b"two"


@pytest.mark.parametrize("call", ["set_input", "compute"])
def test_a_call_during_a_pulled_turn_ends_that_turn(call: str, client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context()
        guest.set_input(context, b"one")
        assert guest.pull(context, 1) == b"o"
        if call == "set_input":
            assert guest.set_input(context, b"two") == 0
            assert guest.output(context) == b"" and guest.pull(context, 3) == b"two"
        else:
            assert guest.call("compute", context) == 0
            assert guest.output(context) == b"one"


def test_parameters_hold_for_their_context_and_are_validated(client: Client) -> None:
    with Driver(client) as guest:
        first, second = guest.context(), guest.context()
        assert guest.set_input(first, {"n-predict": 2, "llama3": False}) == 0
        for context in (first, second):
            guest.set_input(context, b"hello")
            assert guest.call("compute", context) == 0
        assert (guest.output(first), guest.output(second)) == (b"he", b"hello")
        assert guest.metadata(first)["ignored"] == ["llama3"]
        assert guest.set_input(first, {"temp": "hot"}) == 1
        assert guest.set_input(first, {"temp": -1, "strict": True}) == 1
        assert guest.call("set_input", first, 1, guest.tensor(b"{no json")) == 2


def test_values_of_other_runtimes_are_adjusted(client: Client) -> None:
    with Driver(client) as guest:
        graph = load(guest, [b"echo", b'{"n-predict":-2,"seed":-1234,"pooling-type":1}'])
        assert graph == 0, guest.errors
        context = guest.init(graph)
        assert guest.set_input(context, {"temp": -1}) == 0
        guest.set_input(context, b"hello")
        assert guest.call("compute", context) == 0 and guest.output(context) == b"hello"
        assert set(guest.metadata(context)["adjusted"]) == {"n-predict", "pooling", "seed", "temp"}


def test_a_prompt_may_be_any_bytes(client: Client) -> None:
    data = bytes(range(256))
    with Driver(client) as guest:
        context = guest.context()
        assert guest.set_input(context, data) == 0
        assert guest.call("compute", context) == 0 and guest.output(context) == data
        assert guest.pull(context, 256) == data


def test_contexts_take_turns_without_sharing_state(client: Client) -> None:
    with Driver(client) as guest:
        graph = guest.load()
        one, two = guest.init(graph), guest.init(graph)
        guest.set_input(one, b"abcd")
        guest.set_input(two, b"wxyz")
        pieces = [guest.pull(context, 1) for _ in range(4) for context in (one, two)]
        assert b"".join(pieces) == b"awbxcydz"


def test_a_full_context_is_101_and_its_text_can_be_read(client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context(config={"ctx-size": 9})
        guest.set_input(context, b"hello")
        assert guest.call("compute", context) == 101
        assert guest.output(context) == b"he"
        assert [guest.call("compute_single", context) for _ in range(3)] == [0, 0, 101]
        guest.set_input(context, {"stream-stdout": True})
        assert guest.call("compute", context) == 101 and guest.output(context) == b"he"
        guest.set_input(context, b"much too long for it")
        assert guest.call("compute", context) == 102


def test_embeddings_are_json(client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context(config={"embedding": True, "stream-stdout": True})
        vectors = []
        for text in (b"one", b"another"):
            guest.set_input(context, text)
            assert guest.call("compute", context) == 0
            found = json.loads(guest.output(context))
            assert found["n_embedding"] == len(found["embedding"]) >= 5
            vectors.append(found["embedding"])
        assert vectors[0] != vectors[1]


@pytest.mark.parametrize("place", ["config", "metadata"])
def test_stream_stdout_writes_the_answer_piece_by_piece(place: str, client: Client) -> None:
    written: list[bytes] = []
    wish: dict[str, object] = {"stream-stdout": True}
    with Driver(client, write_text=written.append) as guest:
        context = guest.context(config=wish if place == "config" else None)
        guest.set_input(context, "grüß dich".encode())
        if place == "metadata":
            assert guest.call("compute", context) == 0 and written == []
            guest.set_input(context, wish)
        assert guest.call("compute", context) == 0
        assert b"".join(written).decode() == "grüß dich" and len(written) > 1
        assert guest.output(context).decode() == "grüß dich"
        assert guest.metadata(context)["ignored"] == []
        written.clear()
        guest.set_input(context, {"stream-stdout": False})
        assert guest.call("compute", context) == 0 and written == []
        assert guest.metadata(context)["ignored"] == []


@pytest.mark.parametrize(
    ("config", "ignored"),
    [
        ({"stream_stdout": False, "enable-log": True}, ["enable-log"]),
        ({"stream-stdout": "yes"}, ["stream-stdout"]),
        ({"stream-stdout": True, "strict": False, "n_print": 1}, ["n_print"]),
    ],
)
def test_a_key_that_the_host_follows_is_not_ignored(
    config: dict[str, object], ignored: list[str], client: Client
) -> None:
    with Driver(client, write_text=lambda text: None) as guest:
        context = guest.context(config=config)
        assert guest.metadata(context)["ignored"] == ignored
        guest.set_input(context, b"text")
        assert guest.call("compute", context) == 0
        assert guest.metadata(context)["ignored"] == ignored
        guest.set_input(context, config)
        assert guest.metadata(context)["ignored"] == ignored


# Errors.


@pytest.mark.parametrize("call", ["compute", "compute_single"])
@pytest.mark.parametrize("printed", [False, True])
def test_a_failed_turn_is_described_at_index_1(call: str, printed: bool, client: Client) -> None:
    config = {"ctx-size": 16, "stream-stdout": printed}
    with Driver(client, write_text=lambda text: None) as guest:
        context = guest.context(config=config)
        guest.set_input(context, b"much too long for it")
        assert guest.call(call, context) == 102
        [(_, error)] = guest.errors
        assert isinstance(error, PromptTooLong)
        for single in (False, True):
            metadata = json.loads(guest.output(context, 1, single=single))
            assert metadata["error"] == error.to_wire()
            assert metadata["stop_reason"] == "PromptTooLong"
            assert metadata["stop_detail"] == error.message
        guest.set_input(context, b"short")
        assert "error" not in guest.metadata(context)
        assert guest.call(call, context) == 0 and "error" not in guest.metadata(context)


@pytest.mark.parametrize("printed", [False, True])
def test_a_full_context_is_described_at_index_1(printed: bool, client: Client) -> None:
    with Driver(client, write_text=lambda text: None) as guest:
        context = guest.context(config={"ctx-size": 9, "stream-stdout": printed})
        guest.set_input(context, b"grand")
        assert guest.call("compute", context) == 101
        metadata = guest.metadata(context)
        error = metadata["error"]
        assert (metadata["stop_reason"], error["name"]) == ("context_full", "ContextFull")
        assert error["message"] and error["hint"]


def test_the_end_of_a_pulled_turn_is_no_error_at_index_1(client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context()
        guest.set_input(context, b"a")
        guest.pull(context, 1)
        assert guest.call("compute_single", context) == 100
        assert "error" not in guest.metadata(context)


def test_a_failed_turn_is_described_after_its_graph_was_unloaded(client: Client) -> None:
    with Driver(client) as guest:
        graph = guest.load(config={"ctx-size": 9})
        context = guest.init(graph)
        guest.set_input(context, b"much too long")
        assert guest.call("compute", context) == 102
        assert guest.call("unload", graph) == 0
        assert guest.metadata(context)["error"]["name"] == "PromptTooLong"


def test_an_output_that_cannot_be_written_fails_the_turn(client: Client) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    before = os.dup(1)
    os.dup2(full, 1)
    try:
        with Driver(client) as guest:
            context = guest.context(config={"stream-stdout": True})
            guest.set_input(context, b"hello")
            assert guest.call("compute", context) != 0
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(full)
    assert "standard output cannot be written" in str(guest.errors[0][1])


# Graphs and handles.


def test_handles_count_from_0_and_are_not_used_again(client: Client) -> None:
    with Driver(client) as guest:
        for number in range(3):
            graph = guest.load()
            assert (graph, guest.init(graph)) == (number, number)
            assert guest.call("unload", graph) == 0
        assert len(client.sessions()) == 0, "the daemon has no context of an unloaded graph"


def test_each_load_is_a_graph_of_its_own(client: Client) -> None:
    with Driver(client) as guest:
        by_name = [guest.load(), guest.load(), guest.load(config={}), guest.load(config={})]
        for builders in ([b"echo"], [b"preload:echo"], [b"echo", b"{}"]):
            assert load(guest, builders) == 0
        assert by_name == [0, 1, 2, 3] and guest.load() == 7
        assert [m["leases"] for m in client.models() if m["name"] == "echo"] == [8]
        kept = guest.init(1)
        guest.set_input(kept, b"hello")
        assert guest.call("unload", 0) == 0 and guest.call("unload", 0) == 1
        assert guest.call("compute", kept) == 0 and guest.output(kept) == b"hello"
        assert guest.init(1) == 1 and guest.load() == 8
        assert guest.call("init_execution_context", 0, guest.put(bytes(4))) == 1


def test_an_image_in_a_prompt_is_refused(client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context()
        assert guest.set_input(context, b'<img src="data:image/png;base64,AAAA">') == 1
        assert guest.set_input(context, b'<img src="data:image/png;base64,...">') == 0


@pytest.mark.parametrize("preloads", [{}, {"echo": Preload("echo")}], ids=["all", "preloaded"])
@pytest.mark.parametrize("builders", [[b"echo"], [b"preload:echo"], [b"echo", b"{}"]])
def test_each_load_of_a_model_has_its_own_target(
    builders: list[bytes], preloads: dict[str, Preload], client: Client
) -> None:
    with Driver(client, preloads=preloads) as guest:
        targets = (0, 1, 2, 3, 4, 5)
        assert [load(guest, builders, target=t) for t in targets] == [0, 0, 6, 0, 6, 1]
        unmet = [guest.metadata(guest.init(graph))["not_applied"] for graph in range(3)]
        assert unmet == [{}, {"n-gpu-layers": 0}, {}], "only the second asks for a GPU"


def test_the_device_of_a_preload_holds_for_all_targets_that_exist(client: Client) -> None:
    with Driver(client, preloads={"echo": Preload("echo", "cpu")}) as guest:
        targets = (0, 1, 2, 3, 4, 5)
        assert [load(guest, [b"echo"], target=t) for t in targets] == [0, 0, 6, 0, 6, 1]
        for graph in range(3):
            assert guest.metadata(guest.init(graph))["not_applied"] == {}


def test_after_unload_contexts_can_only_be_read(client: Client) -> None:
    with Driver(client) as guest:
        graph = guest.load()
        done, pulled, fresh = (guest.init(graph) for _ in range(3))
        for context in (done, pulled):
            guest.set_input(context, b"hello")
        assert guest.call("compute", done) == 0
        guest.pull(pulled, 2)
        assert guest.call("unload", graph) == 0
        assert guest.call("init_execution_context", graph, guest.put(bytes(4))) == 1
        assert [guest.output(c) for c in (done, pulled, fresh)] == [b"hello", b"he", b""]
        assert guest.output(pulled, single=True) == b"e"
        assert guest.metadata(pulled)["input_tokens"] == 7
        assert "llama_commit" in guest.metadata(fresh)
        for call in ("compute", "compute_single"):
            assert guest.call(call, done) == 1
        assert guest.set_input(done, b"x") == 1 and guest.set_input(done, {}) == 1
        assert guest.call("fini_single", pulled) == 0 and guest.output(pulled) == b""
        for number in (0, 1):
            assert guest.call("finalize_execution_context", done) == number


@pytest.mark.parametrize("name", [n for n in SIGNATURES if not n.startswith("load")])
@pytest.mark.parametrize("handle", [NEVER, 0xFFFF_FFFF])
def test_an_unknown_handle_is_1(name: str, handle: int, client: Client) -> None:
    with Driver(client) as guest:
        tail = [guest.tensor(b"x")] * (SIGNATURES[name] - 1)
        if name == "set_input":
            tail[0] = 0
        elif name.startswith("get_output"):
            tail[1:3] = [guest.put(bytes(64)), 64]
        assert guest.call(name, handle, *tail) == 1
        kind = "graph" if name in ("unload", "init_execution_context") else "context"
        assert f"{kind} {handle} does not exist" in str(guest.errors)


def test_contexts_are_bounded_and_detached_ones_make_place(client: Client) -> None:
    with Driver(client, contexts_max=3) as guest:
        graph, other = guest.load(), guest.load(config={})
        oldest, *_ = [guest.init(graph) for _ in range(3)]
        out = guest.put(bytes(4))
        assert guest.call("init_execution_context", graph, out) == 4
        guest.call("unload", graph)
        assert guest.init(other) == 3
        assert guest.call("fini_single", oldest) == 1 and guest.call("fini_single", 1) == 0


def test_closing_a_guest_closes_its_contexts(client: Client) -> None:
    with Driver(client) as guest:
        guest.context()
        assert len(client.sessions()) == 1
    assert client.sessions() == []
    assert [model["leases"] for model in client.models()] == [0]


# Models.


@pytest.mark.parametrize("builder", [b"echo", b"preload:echo", b"preload:echo\0"])
@pytest.mark.parametrize("encoding", [5, 6])
@pytest.mark.parametrize("target", [0, 1, 3])
def test_load_takes_a_models_name(
    builder: bytes, encoding: int, target: int, client: Client
) -> None:
    with Driver(client) as guest:
        assert load(guest, [builder, b'{"n-predict":2}'], encoding, target) == 0
        context = guest.init(0)
        guest.set_input(context, b"hello")
        guest.call("compute", context)
        assert guest.output(context) == b"he"


def load(guest: Driver, builders: list[bytes], encoding: int = 6, target: int = 3) -> int:
    records = b"".join(
        guest.put(data).to_bytes(4, "little") + len(data).to_bytes(4, "little") for data in builders
    )
    return guest.call(
        "load", guest.put(records), len(builders), encoding, target, guest.put(bytes(4))
    )


@pytest.mark.parametrize(
    ("builders", "encoding", "target", "number"),
    [
        ([b"echo"], 0, 3, 2),
        ([b"echo"], 7, 3, 2),
        ([b"echo"], 6, 2, 6),
        ([b"echo"], 6, 4, 6),
        ([b"preload:echo", b"{}"], 5, 4, 6),
        ([b"nothing"], 6, 4, 6),
        ([b"GGUF, and the rest of a model"], 6, 4, 6),
        ([b"echo"], 7, 4, 2),
        ([b"echo"], 3, 3, 2),
        ([b"echo"], 6, 5, 1),
        ([b"echo"], 6, 0xFFFF_FFFF, 1),
        ([], 6, 3, 1),
        ([b"x"] * 17, 6, 3, 1),
        ([b"echo", b"{no json"], 6, 3, 2),
        ([b"echo", b"\xff"], 6, 3, 2),
        ([b"echo", b'{"temp":"hot"}'], 6, 3, 1),
        ([b"\xff"], 6, 3, 1),
        ([b"nothing"], 6, 3, 103),
    ],
)
def test_load_refuses(
    builders: list[bytes], encoding: int, target: int, number: int, client: Client
) -> None:
    with Driver(client) as guest:
        assert load(guest, builders, encoding, target) == number
        assert guest.load() == 0, "the refused call used no handle"


def test_load_takes_a_models_bytes_unless_models_are_named(client: Client, tmp_path: Path) -> None:
    model = write_tiny("llama", tmp_path).read_bytes()
    pages = len(model) // 65536 + 4
    with Driver(client, pages=pages) as guest:
        assert load(guest, [model]) == 0
        context = guest.init(0)
        guest.set_input(context, {"n-predict": 2})
        guest.set_input(context, b"a")
        assert guest.call("compute", context) == 0
        assert guest.metadata(context)["output_tokens"] == 2
    with Driver(client, pages=pages, preloads={"default": Preload("echo")}) as guest:
        assert load(guest, [model]) == 6


def test_preloads_are_the_only_models(client: Client, tmp_path: Path) -> None:
    file = write_tiny("llama", tmp_path)
    preloads = {
        "default": Preload("echo"),
        "cpu": Preload("echo", "cpu"),
        "file": Preload(str(file), is_file=True),
        "missing": Preload("nothing"),
        "missing file": Preload("/nonexistent.gguf", is_file=True),
    }
    with Driver(client, preloads=preloads) as guest:
        for name in ("default", "cpu", "file"):
            graph = guest.load(name, {"n-predict": 1})
            context = guest.init(graph)
            guest.set_input(context, b"hello")
            assert guest.call("compute", context) == 0
            assert guest.metadata(context)["model"].startswith(
                "descriptor" if name == "file" else "echo"
            )
        for name, number in (("echo", 8), ("missing", 103), ("missing file", 103)):
            assert guest.call("load_by_name", guest.put(name.encode()), len(name), 1024) == number
        assert load(guest, [b"preload:default"]) == 0


@pytest.mark.parametrize(
    ("dialect", "encodings", "missing", "too_long"),
    [("wasmedge", {5, 6}, 103, 102), ("wamr", {5, 6}, 103, 102), ("witx", {5}, 8, 7)],
)
def test_dialects_differ_in_encodings_and_errors(
    dialect: Any, encodings: set[int], missing: int, too_long: int, client: Client
) -> None:
    with Driver(client, dialect=dialect) as guest:
        accepted = {number for number in range(16) if load(guest, [b"echo"], number) == 0}
        assert accepted == encodings
        assert guest.call("load_by_name", guest.put(b"nothing"), 7, 1024) == missing
        context = guest.context(config={"ctx-size": 9})
        guest.set_input(context, b"much too long for it")
        assert guest.call("compute", context) == too_long


def test_a_guest_and_its_host_read_the_size_of_a_context_as_an_int(client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context(config={"ctx-size": 16.0})
        assert guest.set_input(context, {"ctx-size": 100_000.0}) == 0
        assert b'"not_applied":{"ctx-size":16}' in guest.output(context, 1)
        for text, number in ((b"x" * 40, 102), (b"0123456789", 101)):
            guest.set_input(context, text)
            assert guest.call("compute", context) == number
            error = guest.errors[-1][1]
            assert isinstance(error, ContextFull | PromptTooLong)
            assert type(error.data["ctx_size"]) is int and error.data["ctx_size"] == 16


# Buffers and pointers.


@pytest.mark.parametrize("name", ["get_output", "get_output_single"])
def test_a_buffer_that_is_too_small_gets_the_size_and_no_byte(name: str, client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context()
        guest.set_input(context, b"hello")
        guest.call("compute", context)
        index = 0 if name == "get_output" else 1
        needed = len(guest.output(context, index))
        buffer, written = guest.put(bytes(needed + 1)), guest.put(bytes(4))
        for size in (0, needed - 1):
            assert guest.call(name, context, index, buffer, size, written) == 7
            assert guest.number_at(written) == needed
            assert guest.read(buffer, needed) == bytes(needed)
        assert guest.call(name, context, index, buffer, needed, written) == 0
        assert guest.read(buffer, needed + 1) == guest.output(context, index) + b"\0"
        assert guest.call(name, context, 2, buffer, needed, written) == 8


def test_unchecked_output_is_for_size_0_alone(client: Client) -> None:
    with Driver(client, unchecked_output=True) as guest:
        context = guest.context()
        guest.set_input(context, b"hello")
        guest.call("compute", context)
        buffer, written = guest.put(bytes(8)), guest.put(bytes(4))
        assert guest.call("get_output", context, 0, buffer, 4, written) == 7
        assert guest.call("get_output", context, 0, buffer, 0, written) == 0
        assert guest.read(buffer, 8) == b"hello\0\0\0"
        assert guest.call("get_output", context, 0, guest.size - 4, 0, written) == 1


POINTERS = {
    "load": (0, 4),
    "load_by_name": (0, 2),
    "load_by_name_with_config": (0, 2, 4),
    "init_execution_context": (1,),
    "set_input": (2,),
    "get_output": (2, 4),
    "get_output_single": (2, 4),
}
SIZES = {
    "load": (1,),
    "load_by_name": (1,),
    "load_by_name_with_config": (1, 3),
    "get_output": (3,),
    "get_output_single": (3,),
}
ANY_ARGUMENT = [(name, position) for name, size in SIGNATURES.items() for position in range(size)]
WASMEDGE_ERRORS = {*range(9), 100, 101, 102, 103}


def arguments_of(guest: Driver, name: str, graph: int, context: int) -> list[int]:
    """Return arguments with which the call succeeds."""
    text, out = guest.put(b"echo"), guest.put(bytes(4))
    builders = guest.put(text.to_bytes(4, "little") + (4).to_bytes(4, "little"))
    right = {
        "load": [builders, 1, 6, 3, out],
        "load_by_name": [text, 4, out],
        "load_by_name_with_config": [text, 4, guest.put(b"{  }"), 4, out],
        "init_execution_context": [graph, out],
        "set_input": [context, 0, guest.tensor(b"x")],
        "get_output": [context, 0, guest.put(bytes(64)), 64, out],
        "get_output_single": [context, 0, guest.put(bytes(64)), 64, out],
        "unload": [graph],
    }
    return right.get(name, [context])


@pytest.mark.parametrize(("name", "position"), ANY_ARGUMENT)
def test_a_wrong_argument_is_an_error_and_does_nothing(
    name: str, position: int, client: Client
) -> None:
    """The last bytes of the memory, its end, addresses outside, and those that overflow. A null
    pointer is a right address in WebAssembly.
    """
    with Driver(client) as guest:
        graph = guest.load("echo", {"n-predict": 9})
        context = guest.init(graph)
        guest.set_input(context, b"hello")
        right = arguments_of(guest, name, graph, context)
        held = used_by(client)
        for value in (guest.size - 3, guest.size - 1, guest.size, 1 << 31, OUTSIDE, 0xFFFF_FFFF):
            arguments = list(right)
            arguments[position] = value
            number = guest.call(name, *arguments)
            is_size = position in SIZES.get(name, ()) and value >= guest.size
            if is_size or position in POINTERS.get(name, ()):
                assert number == 1, hex(value)
            assert number in WASMEDGE_ERRORS
        assert used_by(client) == held
        assert guest.call(name, *right) == 0
        if name.startswith("load"):
            assert guest.number_at(right[-1]) == graph + 1, "the wrong calls used no handle"


@pytest.mark.parametrize(("name", "position"), ANY_ARGUMENT)
def test_a_null_pointer_and_0_are_values_like_others(
    name: str, position: int, client: Client
) -> None:
    with Driver(client) as guest:
        context = guest.context()
        right = arguments_of(guest, name, 0, context)
        right[position] = 0
        assert guest.call(name, *right) in WASMEDGE_ERRORS
        other = guest.context()
        guest.set_input(other, b"hello")
        assert guest.call("compute", other) == 0 and guest.output(other) == b"hello"


def used_by(client: Client) -> tuple[int, int]:
    """Return the number of sessions and leases in the daemon."""
    return len(client.sessions()), sum(model["leases"] for model in client.models())


@pytest.mark.parametrize("field", ["dimensions", "dimensions_len", "data", "data_len"])
def test_a_wrong_pointer_within_a_tensor_is_1(field: str, client: Client) -> None:
    position = {"dimensions": 0, "dimensions_len": 1, "data": 3, "data_len": 4}[field]
    with Driver(client) as guest:
        context = guest.context()
        tensor = guest.tensor(b"hello")
        guest.memory.write(guest.store, OUTSIDE.to_bytes(4, "little"), tensor + 4 * position)
        assert guest.call("set_input", context, 0, tensor) == 1
        assert guest.metadata(context)["input_tokens"] == 0


def test_a_wrong_pointer_within_a_builder_is_1(client: Client) -> None:
    with Driver(client) as guest:
        for pointer, size in ((OUTSIDE, 4), (1024, OUTSIDE)):
            record = pointer.to_bytes(4, "little") + size.to_bytes(4, "little")
            assert guest.call("load", guest.put(record), 1, 6, 3, guest.put(bytes(4))) == 1


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5, 0x0102_0303])
@pytest.mark.parametrize("dimensions", [(), (1,), (5,), (1, 5)])
def test_any_type_and_dimensions_of_a_tensor_are_taken(
    kind: int, dimensions: tuple[int, ...], client: Client
) -> None:
    with Driver(client) as guest:
        context = guest.context()
        tensor = guest.tensor(b"hello", kind, dimensions)
        assert guest.call("set_input", context, 0, tensor) == 0
        assert guest.call("compute", context) == 0
        assert guest.output(context) == b"hello"


def test_a_guest_without_memory_traps(client: Client) -> None:
    guest = Driver(client, exports_memory=False)
    with pytest.raises(BackendError, match="exports no memory"):
        guest.call("compute", 0)
