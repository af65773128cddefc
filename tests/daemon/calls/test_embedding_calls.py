"""Embeddings through a real daemon: the client, the wasi-nn calls, the command, faults, memory."""

from __future__ import annotations

import os
import signal
import threading
from array import array
from collections.abc import Iterator

import anyio
import psutil
import pytest

from inferd import AsyncClient, Client
from inferd.backends.echo.model import EMBEDDING_SIZE, echo_vectors
from inferd.backends.embedder import normalized
from inferd.backends.errors import (
    Busy,
    Cancelled,
    InvalidArgument,
    OutOfMemory,
    PromptTooLong,
    Timeout,
    TooLarge,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.ipc.messages import EMBED_TEXTS_MAX
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.echo import echo_model
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

CONFIG = "[defaults]\nctx-size = 4096\n"
CONFIG += echo_model("slow", step_ms=50) + echo_model("fragile", step_ms=5, abort_on="die now")
LONG = "x" * 4000


def memory(client: Client, name: str) -> dict[str, int]:
    return client.show(name)["memory"] or {}


def expected(text: str, kind: int = 2) -> list[float]:
    tokens = [258, *text.encode(), 257]
    rows = echo_vectors(tokens)
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return normalized(mean, kind).tolist()


# The client.


def test_texts_become_vectors_in_their_order(client: Client) -> None:
    texts = [f"text {n} " + "and on " * (n % 7) for n in range(100)]

    found = client.embed("echo", texts)

    assert len(found) == 100
    for vector, text in zip(found, texts, strict=True):
        assert vector == pytest.approx(expected(text), rel=1e-5)
    assert (found.size, found.pooling, found.model) == (EMBEDDING_SIZE, "mean", "echo")
    assert found.tokens == [len(text) + 2 for text in texts]


def test_one_text_pooling_and_norm(client: Client) -> None:
    [one] = client.embed("echo", "hello", normalize=1)
    assert one == pytest.approx(expected("hello", 1), rel=1e-5)
    [last] = client.embed("echo", ["hello"], pooling="last", normalize=-1)
    assert last == pytest.approx(echo_vectors([258, *b"hello", 257])[-1], rel=1e-5)


def test_without_pooling_there_is_a_vector_for_each_token(client: Client) -> None:
    found = client.embed("echo", ["hello", "you"], pooling="none")

    assert [len(rows) for rows in found.by_text] == [7, 5]
    assert len(found) == 12


def test_a_graph_serves_several_calls_and_nothing_is_left_behind(client: Client) -> None:
    graph = client.load_by_name("echo")
    assert client.embed(graph, "a") == client.embed(graph, "a")
    assert client.sessions() == []
    client.unload(graph)
    client.embed("echo", "b")
    [model] = [model for model in client.models() if model["name"] == "echo"]
    assert (model["leases"], model["tasks"]) == (0, 0)


@pytest.mark.asyncio
async def test_a_stream_continues_beside_embeddings(daemon: RunningDaemon) -> None:
    async with AsyncClient(daemon.socket) as client, client.session("slow", raw=True) as session:
        pieces, embedded_at = 0, -1

        async def embed() -> None:
            nonlocal embedded_at
            await client.embed("slow", ["y" * 300])
            embedded_at = pieces

        async with anyio.create_task_group() as group:
            text = ""
            async for piece in session.stream("a story of " + "w" * 60):
                if not pieces:
                    group.start_soon(embed)
                text, pieces = text + piece, pieces + 1
        assert text == "a story of " + "w" * 60
        assert 0 < embedded_at < pieces, "one waited for the end of the other"


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"pooling": "median"}, InvalidArgument),
        ({"pooling": "rank"}, UnsupportedOperation),
        ({"normalize": -2}, InvalidArgument),
        ({"normalize": 33}, InvalidArgument),
        ({"priority": "sooner"}, InvalidArgument),
        ({"texts": []}, InvalidArgument),
        ({"texts": ["a"] * (EMBED_TEXTS_MAX + 1)}, InvalidArgument),
        ({"texts": [LONG + "x" * 100]}, PromptTooLong),
        ({"texts": ["ok", LONG + "x" * 100, "ok"]}, PromptTooLong),
        ({"timeout_s": -1.0}, InvalidArgument),
        ({"graph": 12345}, InvalidArgument),
    ],
)
def test_invalid_values_are_refused(
    raw: RawClient, keys: dict[str, object], error: type[Exception]
) -> None:
    graph = raw.call("load_by_name", name="echo")["graph"]
    with pytest.raises(error):
        raw.call("embed", **{"graph": graph, "texts": ["a"], **keys})
    assert raw.call("embed", graph=graph, texts=["a"])["tokens"] == [3]


def test_a_call_may_have_the_maximum_of_texts(raw: RawClient) -> None:
    graph = raw.call("load_by_name", name="echo")["graph"]
    found = raw.call("embed", graph=graph, texts=["a"] * EMBED_TEXTS_MAX)
    assert len(found["embeddings"]) == EMBED_TEXTS_MAX
    numbers = array("f")
    numbers.frombytes(found["embeddings"][-1])
    assert numbers.tolist() == pytest.approx(expected("a"), rel=1e-5)


def test_a_result_larger_than_a_frame_is_refused_with_its_size(raw: RawClient) -> None:
    graph = raw.call("load_by_name", name="echo")["graph"]
    texts = ["x" * 4000] * 40  # 256 kB of vectors each
    with pytest.raises(TooLarge) as caught:
        raw.call("embed", graph=graph, texts=texts, pooling="none")
    assert caught.value.data["result_bytes_max"] < caught.value.data["bytes"]


def await_tasks(raw: RawClient, count: int) -> None:
    wait_until(lambda: len(raw.call("queue")["tasks"]) >= count)


def test_a_call_can_be_cancelled_and_times_out(raw: RawClient, client: Client) -> None:
    graph = raw.call("load_by_name", name="slow")["graph"]
    raw.call("embed", graph=graph, texts=["warm"])
    number = raw.start_request("embed", graph=graph, texts=[LONG] * 20)
    wait_until(lambda: raw.call("queue")["tasks"])
    raw.call("cancel", request=number)
    with pytest.raises(Cancelled):
        raw.wait_result(number)
    with pytest.raises(Timeout):
        client.embed("slow", [LONG] * 20, timeout=0.2)
    wait_until(lambda: not client.queue())
    assert [m["tasks"] for m in client.models() if m["name"] == "slow"] == [0]


def test_texts_are_in_the_queue_and_one_can_be_cancelled_there(raw: RawClient) -> None:
    graph = raw.call("load_by_name", name="slow")["graph"]
    number = raw.start_request("embed", graph=graph, texts=[LONG] * 3, priority="low")
    await_tasks(raw, 3)
    tasks = raw.call("queue")["tasks"]
    assert {t["priority"] for t in tasks} == {"low"}
    assert {t["prompt_tokens"] for t in tasks} == {4002}
    assert raw.call("cancel", context=tasks[-1]["context"])["cancelled"]
    with pytest.raises(Cancelled):
        raw.wait_result(number)
    wait_until(lambda: not raw.call("queue")["tasks"])


def test_texts_are_bounded_as_other_turns_are() -> None:
    config = "[daemon]\ntasks-waiting-max = 4\n" + echo_model("m", slots=1, step_ms=20)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        found = client.embed("m", ["x" * 200 for _ in range(10)])
        assert len(found) == 10, "a call has no more texts waiting than it may"
        with RawClient(daemon.socket) as raw:
            graph = raw.call("load_by_name", name="m")["graph"]
            contexts = [raw.call("init_execution_context", graph=graph) for _ in range(6)]
            for number, opened in enumerate(contexts):
                raw.set_input(opened["context"], b"y" * 300)
                raw.start_request("compute", context=opened["context"])
                await_tasks(raw, min(number + 1, 5))
            with pytest.raises(Busy) as caught:
                raw.call("embed", graph=graph, texts=["a"])
            assert caught.value.data["retry_after_s"] > 0


# The wasi-nn calls.


def test_a_guest_switches_embeddings_on_and_off(raw: RawClient) -> None:
    context = raw.context()
    raw.set_input(context, b'{"embedding":true}', index=1)
    raw.set_input(context, b"hello")
    raw.call("compute", context=context)

    import msgspec

    found = msgspec.json.decode(raw.output(context))
    assert found["n_embedding"] == EMBEDDING_SIZE
    assert found["embedding"] == pytest.approx(expected("hello"), rel=1e-5)
    assert raw.metadata(context)["input_tokens"] == 7
    raw.set_input(context, b'{"embedding":false}', index=1)
    raw.call("compute", context=context)
    assert raw.output(context) == b"hello"


def test_a_graph_that_embeds_refuses_to_generate(raw: RawClient) -> None:
    context = raw.context(config='{"embedding":true,"pooling":"last","embd-normalize":-1}')
    with pytest.raises(UnsupportedOperation):
        raw.call("chat", context=context, prompt="hello")
    raw.call("compute", context=context, inputs=[["prompt", {"data": b"hello"}]])
    assert b'"n_embedding":16' in raw.output(context)


# Encoders.


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    models = tmp_path_factory.mktemp("models")
    for kind in ("bert", "bert-rank"):
        write_tiny(kind, models)
    with running_daemon(models_dir=models) as running, Client(running.socket) as connected:
        yield connected


def test_an_encoder_embeds_many_texts(encoders: Client) -> None:
    texts = [f"text {n} " + "and on " * (n % 40) for n in range(40)]
    found = encoders.embed("tiny-bert", texts)
    [alone] = encoders.embed("tiny-bert", texts[7])
    assert found[7] == pytest.approx(alone, abs=1e-5)
    assert len({tuple(vector) for vector in found}) == 40


def test_an_encoder_refuses_to_generate_and_refuses_texts_that_it_cannot_embed(
    encoders: Client,
) -> None:
    with encoders.session("tiny-bert", raw=True) as session:
        with pytest.raises(UnsupportedOperation, match="does not generate text") as caught:
            session.chat("hello")
        assert "embed" in caught.value.hint
    with pytest.raises(PromptTooLong) as too_long:
        encoders.embed("tiny-bert", "x" * 600)
    assert too_long.value.data["ctx_size"] == 512
    assert "batch-size" in too_long.value.hint


def test_all_texts_are_checked_before_the_first_is_embedded(encoders: Client) -> None:
    before = embedded_tokens(encoders, "tiny-bert")
    with pytest.raises(PromptTooLong) as caught:
        encoders.embed("tiny-bert", ["some text"] * 40 + ["x" * 600])
    assert caught.value.data["index"] == 40
    assert embedded_tokens(encoders, "tiny-bert") == before


@pytest.mark.parametrize("pooling", ["", "none"])
def test_a_refused_text_is_named_by_its_index(encoders: Client, pooling: str) -> None:
    with pytest.raises(PromptTooLong, match="text 2: the text has") as caught:
        encoders.embed("tiny-bert", ["one", "two", "x" * 600], pooling=pooling)
    assert caught.value.data["index"] == 2
    assert "truncate" in caught.value.hint


def embedded_tokens(client: Client, model: str) -> int:
    return int(client.stats()["models"].get(model, {}).get("embedded", 0))


# Truncated texts.


def test_a_truncated_text_loses_its_end_and_keeps_the_tokens_of_the_model(
    encoders: Client,
) -> None:
    most = 513 - encoders.embed("tiny-bert", "x").tokens[0]
    texts = ["one", "x" * 600, "two", "y" * 100_000]
    found = encoders.embed("tiny-bert", texts, truncate=True)
    whole = encoders.embed("tiny-bert", ["one", "x" * most, "two", "y" * most])
    assert (found.truncated, whole.truncated) == ([1, 3], [])
    assert found.tokens == whole.tokens and found.tokens[1] == found.tokens[3] == 512
    for vector, same in zip(found, whole, strict=True):
        assert vector == pytest.approx(same, abs=1e-5)


def test_only_texts_that_are_too_long_are_truncated(client: Client) -> None:
    texts = ["x" * 4094, "x" * 4095, "é" * 3000, "short"]
    found = client.embed("echo", texts, truncate=True)
    assert found.truncated == [1, 2]
    assert found.tokens == [4096, 4096, 4096, 7]
    assert found[1] == pytest.approx(expected("x" * 4094), rel=1e-5)
    assert found[2] == pytest.approx(expected("é" * 2047), rel=1e-5)
    assert found[3] == pytest.approx(expected("short"), rel=1e-5)


def test_truncated_texts_of_later_calls_have_their_own_indexes(client: Client) -> None:
    long = "z" * 100
    found = client.embed("echo", [*["a"] * 100, long, long], config={"ctx-size": 32}, truncate=True)
    assert found.truncated == [100, 101]
    assert found[100] == found[101] == pytest.approx(expected("z" * 30), rel=1e-5)
    unpooled = client.embed("echo", ["a", LONG * 2], pooling="none", truncate=True)
    assert unpooled.truncated == [1] and [len(rows) for rows in unpooled.by_text] == [3, 4096]


def test_a_call_truncates_texts_beyond_the_first_ones(raw: RawClient) -> None:
    graph = raw.call("load_by_name", name="echo")["graph"]
    texts = ["a"] * 20 + ["b" * 5000]
    with pytest.raises(PromptTooLong):
        raw.call("embed", graph=graph, texts=texts)
    found = raw.call("embed", graph=graph, texts=texts, truncate=True)
    assert (found["truncated"], found["tokens"][20]) == ([20], 4096)
    with pytest.raises(UnsupportedOperation):
        raw.call("embed", graph=graph, texts=texts, pooling="rank", truncate=True)


def test_a_reranker_scores(encoders: Client) -> None:
    found = encoders.embed("tiny-bert-rank", ["one text", "another"])
    assert (found.pooling, found.size, len(found)) == ("rank", 1, 2)
    with pytest.raises(UnsupportedOperation):
        encoders.embed("tiny-bert-rank", "one text", pooling="mean")


# The command.


def test_the_command_writes_a_line_for_each_vector(daemon: RunningDaemon) -> None:
    result = inferd("embed", "echo", "one", "another", socket=daemon.socket)
    assert result.exit_code == 0, result.output
    lines = [[float(x) for x in line.split()] for line in result.stdout.splitlines()]
    assert lines[0] == pytest.approx(expected("one"), rel=1e-5)
    assert lines[1] == pytest.approx(expected("another"), rel=1e-5)


def test_the_command_reads_lines_and_writes_json(daemon: RunningDaemon) -> None:
    arguments = ("embed", "echo", "--json", "--pooling", "mean", "--normalize", "1")
    found = document(inferd(*arguments, socket=daemon.socket, text="one\nanother\n"))
    assert (found["model"], found["pooling"], found["size"]) == ("echo", "mean", EMBEDDING_SIZE)
    assert found["tokens"] == [5, 9]
    assert found["truncated"] == []
    assert found["embeddings"][1] == pytest.approx(expected("another", 1), rel=1e-5)


def test_the_command_truncates_texts_and_says_so(daemon: RunningDaemon) -> None:
    arguments = ("embed", "echo", "short", "x" * 5000)
    refused = inferd(*arguments, socket=daemon.socket)
    assert refused.exit_code != 0 and "text 1: the text has" in refused.output
    shown = inferd(*arguments, "--truncate", socket=daemon.socket)
    assert len(shown.stdout.splitlines()) == 2
    assert "left out the end of these texts: 2" in shown.stderr


# Faults.


def test_texts_whose_worker_dies_are_computed_again(daemon: RunningDaemon) -> None:
    texts = [f"{n} " + "z" * 1000 for n in range(6)]
    found = []
    with Client(daemon.socket) as client, RawClient(daemon.socket) as raw:
        thread = threading.Thread(target=lambda: found.append(client.embed("fragile", texts)))
        thread.start()
        wait_until(lambda: any(t["state"] == "running" for t in raw.call("queue")["tasks"]))
        [model] = [m for m in raw.call("models")["models"] if m["name"] == "fragile"]
        os.kill(model["pid"], signal.SIGKILL)
        thread.join(60)
        recovered = raw.call("stats")["stats"]["recovered"]
    assert recovered > 0
    [vectors] = found
    for vector, text in zip(vectors, texts, strict=True):
        assert vector == pytest.approx(expected(text), rel=1e-5)


def test_a_text_that_crashes_the_worker_is_refused_and_the_others_are_embedded(
    daemon: RunningDaemon,
) -> None:
    with Client(daemon.socket) as client, Client(daemon.socket) as other:
        errors = []

        def send_deadly_text() -> None:
            try:
                client.embed("fragile", "die now")
            except WorkerCrashed as exc:
                errors.append(exc)

        thread = threading.Thread(target=send_deadly_text)
        thread.start()
        found = other.embed("fragile", ["w" * 2000] * 3)
        thread.join(60)
    assert [error.data["cause"] for error in errors] == ["input"]
    assert found[0] == pytest.approx(expected("w" * 2000), rel=1e-5)


# Memory.


def model_of(name: str, weights: int, embedding: int) -> str:
    return echo_model(name, weight_bytes=weights, embedding_bytes=embedding)


def test_memory_for_embeddings_is_counted_from_their_first_use_on() -> None:
    config = "[daemon]\nmemory-bytes = 1000\n" + model_of("a", 300, 500) + model_of("b", 400, 0)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with client.session("a") as session:
            session.chat("hello")
        assert memory(client, "a")["total"] == 300
        assert memory(client, "a")["embedding"] == 500
        client.embed("a", "hello")
        assert memory(client, "a")["total"] == 800

        with client.session("b") as session:
            assert session.chat("hello") == "hello"
        states = {m["name"]: m["state"] for m in client.models()}
        assert (states["a"], states["b"]) == ("cold", "ready"), "both were in memory"

        client.embed("a", "hello")
        states = {m["name"]: m["state"] for m in client.models()}
        assert (states["a"], states["b"]) == ("ready", "cold")
        assert memory(client, "a")["total"] == 800, "the next load counts it at once"


def test_idle_models_are_evicted_for_embeddings() -> None:
    config = "[daemon]\nmemory-bytes = 1000\n" + model_of("a", 300, 500) + model_of("b", 400, 0)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        graph = client.load_by_name("a")
        with client.session("b") as session:
            session.chat("hello")
        assert {client.show(n)["state"] for n in "ab"} == {"ready"}

        client.embed(graph, "hello")

        assert (client.show("a")["state"], client.show("b")["state"]) == ("ready", "cold")


def test_too_little_memory_for_embeddings_is_refused_with_both_numbers() -> None:
    config = "[daemon]\nmemory-bytes = 1000\n" + model_of("a", 300, 800)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with pytest.raises(OutOfMemory) as caught:
            client.embed("a", "hello")
        assert caught.value.data == {"needed_bytes": 800, "free_bytes": 700}
        with client.session("a") as session:
            assert session.chat("hello") == "hello"


def model_with_tokens(name: str, embedding: int, parameters: str = "", **options: int) -> str:
    """Return the configuration of a model that takes 300 bytes, and one for each token."""
    echo = {"weight_bytes": 300, "token_bytes": 1, "embedding_bytes": embedding, **options}
    lines = "".join(f"{key} = {value}\n" for key, value in echo.items())
    return f'[models.{name}]\nbackend = "echo"\n{parameters}[models.{name}.echo]\n{lines}'


def test_a_tight_budget_shrinks_slots_and_context_for_embeddings() -> None:
    """The text of 4 slots would fit in 2 slots of 4096 tokens, and with embeddings in less."""
    config = "[daemon]\nmemory-bytes = 9000\n" + model_with_tokens("a", 4000)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with client.session("a") as session:
            assert session.chat("hello") == "hello"
            assert memory(client, "a")["total"] == 300 + 2 * 4096
            [found] = client.embed("a", "hello")
            assert len(found) == EMBEDDING_SIZE
            assert memory(client, "a")["total"] == 300 + 4096 + 4000
            assert session.chat("again") == "again", "its history is computed again"
        assert client.show("a")["slots"] == 1
        assert "model.fitted" in daemon.log


def test_a_cold_model_is_fitted_to_embeddings_in_the_budget() -> None:
    config = "[daemon]\nmemory-bytes = 3000\n" + model_with_tokens("a", 1500)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        found = client.embed("a", ["hello", "world"] * 20)
        assert len(found) == 40
        assert memory(client, "a")["total"] == 300 + 1024 + 1500
        assert client.show("a")["slots"] == 1
        assert daemon.log.count("model.loaded") == 2
        client.embed("a", "hello")
        assert daemon.log.count("model.loaded") == 2


@pytest.mark.parametrize("fixed", ["", "slots = 4\nctx-size = 512\nbatch-size = 128\n"])
def test_embeddings_that_fit_in_no_shape_leave_the_model_as_it_is(fixed: str) -> None:
    config = "[daemon]\nmemory-bytes = 3000\n" + model_with_tokens("a", 2900, fixed)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with client.session("a") as session:
            assert session.chat("hello") == "hello"
            before = memory(client, "a")["total"]
            for _ in range(3):
                with pytest.raises(OutOfMemory) as caught:
                    client.embed("a", "hello")
                assert caught.value.data["needed_bytes"] == 2900
            assert memory(client, "a")["total"] == before
            assert session.chat("again") == "again"
        assert daemon.log.count("model.loaded") == (1 if fixed else 2), "it is tried only once"


def test_a_model_that_computes_for_others_is_not_loaded_again_for_embeddings() -> None:
    config = "[daemon]\nmemory-bytes = 3000\n" + model_with_tokens("a", 1500, step_ms=5)
    with (
        running_daemon(config) as daemon,
        Client(daemon.socket) as client,
        Client(daemon.socket) as other,
        client.session("a") as session,
    ):
        stream = session.stream("a long text " * 100)
        next(stream)
        with pytest.raises(OutOfMemory):
            other.embed("a", "hello")
        assert "".join(stream) != ""
        assert daemon.log.count("model.loaded") == 1
        assert len(other.embed("a", "hello")) == 1, "once it has ended"


def test_a_replacement_worker_has_the_memory_for_embeddings_reserved_too() -> None:
    config = "[daemon]\nmemory-bytes = 1000\n" + model_of("a", 300, 500)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        client.embed("a", "hello")
        psutil.Process(client.show("a")["pid"]).kill()
        wait_until(lambda: client.show("a")["state"] == "cold")
        client.embed("a", "hello")
        assert memory(client, "a")["total"] == 800
