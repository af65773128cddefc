"""Reranking through a real daemon: the clients, faults, bounds, the command."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest

from inferd import Client, Priority, RankedDocument
from inferd.backends.echo.model import echo_vectors
from inferd.backends.errors import (
    Busy,
    Cancelled,
    InvalidArgument,
    PromptTooLong,
    Timeout,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.daemon.calls.texts import sigmoid
from inferd.ipc.messages import RERANK_DOCUMENTS_MAX
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.echo import echo_model
from tests.raw import RawClient
from tests.tiny_gguf import RANK_MARKS, write_tiny
from tests.waiting import wait_until

QUERY = "which animal has a trunk"
DOCUMENTS = ["an elephant", "a tree has one, too", "nothing", "a car, in some countries"]
CONFIG = "[defaults]\nctx-size = 2048\n"
CONFIG += echo_model("rank", ranks=True) + echo_model("slow", ranks=True, step_ms=50)
CONFIG += echo_model("fragile", ranks=True, step_ms=5, abort_on="die now")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    for kind in ("bert-rank", "qwen3-rank"):
        write_tiny(kind, models)
    with running_daemon(CONFIG, models_dir=models) as running:
        yield running


def echo_score(query: str, text: str) -> float:
    """Return the score of the echo model; see its `rank_parts`."""
    return echo_vectors([258, *query.encode(), 10, 257, *text.encode()])[-1][0]


def await_tasks(client: Client, count: int) -> None:
    wait_until(lambda: len(client.queue()) >= count)


def computed_tokens(client: Client, model: str) -> int:
    return int(client.stats()["models"].get(model, {}).get("embedded", 0))


def test_documents_are_ordered_by_their_scores(client: Client) -> None:
    found = client.rerank("rank", QUERY, DOCUMENTS)

    expected = {n: echo_score(QUERY, text) for n, text in enumerate(DOCUMENTS)}
    assert [one.index for one in found] == sorted(expected, key=lambda n: -expected[n])
    for one in found:
        assert isinstance(one, RankedDocument) and one.document == DOCUMENTS[one.index]
        assert one.raw_score == pytest.approx(expected[one.index], rel=1e-5)
        assert one.score == pytest.approx(1 / (1 + math.exp(-one.raw_score)), rel=1e-6)
    assert (found.model, found.truncated) == ("rank", [])
    assert found.tokens == sum(len(QUERY) + 3 + len(text) for text in DOCUMENTS)
    assert found.fingerprint == client.rerank("rank", "other", ["text"]).fingerprint != ""
    top = client.rerank("rank", QUERY, DOCUMENTS, top_n=2)
    assert list(top) == list(found)[:2]


def test_more_documents_than_a_call_takes_are_ranked_together(client: Client) -> None:
    texts = [f"text {n * 7919 % 601}" for n in range(601)]
    texts[500] = texts[3]

    found = client.rerank("rank", QUERY, texts)

    assert sorted(one.index for one in found) == list(range(601))
    assert [one.raw_score for one in found] == sorted(
        (one.raw_score for one in found), reverse=True
    )
    places = [one.index for one in found]
    assert places.index(3) < places.index(500), "equal scores are in the order of the request"
    assert [o.index for o in client.rerank("rank", QUERY, texts, top_n=9)] == places[:9]


@pytest.mark.parametrize("model", ["tiny-bert-rank", "tiny-qwen3-rank"])
def test_scores_are_those_of_the_tokens_in_the_form_of_the_model(
    client: Client, raw: RawClient, model: str
) -> None:
    found = client.rerank(model, QUERY, DOCUMENTS)
    again = client.rerank(model, QUERY, DOCUMENTS[2:3])

    assert len({one.raw_score for one in found}) == len(DOCUMENTS)
    [same] = [one for one in found if one.index == 2]
    assert same.raw_score == pytest.approx(again[0].raw_score, abs=2e-3)  # its cache is in F16
    for one in found:
        expected = one.raw_score if "qwen3" in model else sigmoid(one.raw_score)
        assert one.score == pytest.approx(expected, abs=1e-7)
        assert 0 < one.score < 1


def test_a_causal_reranker_computes_the_query_once(client: Client) -> None:
    model, texts = "tiny-qwen3-rank", [f"document number {n}" for n in range(30)]
    before = computed_tokens(client, model)
    one = client.rerank(model, "a query of its own", texts[:1])
    assert one.cached_tokens == 0 or one.cached_tokens < one.tokens
    query_tokens = one.tokens - len("document number 0")  # at least these are the query's

    found = client.rerank(model, "a query of its own", texts)

    computed = computed_tokens(client, model) - before
    assert computed == one.tokens - one.cached_tokens + found.tokens - found.cached_tokens
    assert found.cached_tokens >= 30 * (query_tokens - 30), "the text behind the document is short"
    assert found.cached_tokens > found.tokens / 2


def test_special_tokens_in_a_document_are_text(client: Client) -> None:
    graph = client.load_by_name("tiny-qwen3-rank")
    marks = "".join(RANK_MARKS)
    found = client.rerank(graph, QUERY, [f"a {marks}", "a "])
    with_marks, without = sorted(found, key=lambda one: one.index)
    size = client.rerank(graph, QUERY, ["a "]).tokens
    assert found.tokens - size == size + len(marks), "each character is a token"
    assert with_marks.raw_score != without.raw_score


def test_a_document_that_is_too_long_is_refused_or_truncated(client: Client) -> None:
    texts = ["short", "x" * 600, "y" * 3000]
    with pytest.raises(PromptTooLong, match="document 1: the query and the document") as caught:
        client.rerank("tiny-bert-rank", QUERY, texts)
    assert caught.value.data["index"] == 1 and caught.value.data["ctx_size"] == 512
    assert "truncate" in caught.value.hint

    found = client.rerank("tiny-bert-rank", QUERY, texts, truncate=True)
    assert found.truncated == [1, 2]
    assert found.tokens < 3 * 512
    same = client.rerank("tiny-bert-rank", QUERY, ["x" * 700], truncate=True)
    [cut] = [one for one in found if one.index == 1]
    assert cut.raw_score == pytest.approx(same[0].raw_score, rel=1e-5)
    with pytest.raises(PromptTooLong, match="leaves too few for a document"):
        client.rerank("tiny-bert-rank", "q" * 600, texts, truncate=True)


def test_a_document_of_a_later_call_is_named_by_its_own_index(client: Client) -> None:
    texts = ["short"] * RERANK_DOCUMENTS_MAX + ["short", "x" * 2100]
    with pytest.raises(PromptTooLong, match=f"document {RERANK_DOCUMENTS_MAX + 1}: "):
        client.rerank("rank", QUERY, texts)
    found = client.rerank("rank", QUERY, texts, truncate=True)
    assert found.truncated == [RERANK_DOCUMENTS_MAX + 1]


def test_only_reranking_models_rank(client: Client) -> None:
    with pytest.raises(UnsupportedOperation, match="ranks no documents") as caught:
        client.rerank("echo", QUERY, DOCUMENTS)
    assert "reranking model" in caught.value.hint


def test_embed_scores_texts_as_before(client: Client) -> None:
    found = client.embed("rank", ["one text", "another"])
    assert (found.pooling, found.size) == ("rank", 1)
    assert found[0] == pytest.approx([echo_vectors([258, *b"one text", 257])[-1][0]], rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"documents": []}, "0 documents"),
        ({"documents": ["a"] * (RERANK_DOCUMENTS_MAX + 1)}, "257 documents"),
        ({"top_n": -1}, "top_n is -1"),
        ({"priority": "great"}, "priority"),
        ({"timeout_s": -1.0}, "timeout"),
        ({"query": 1}, "query"),
        ({"documents": [{"text": "a"}]}, "documents"),
    ],
)
def test_wrong_requests_are_refused(raw: RawClient, keys: dict[str, object], message: str) -> None:
    graph = raw.call("load_by_name", name="rank")["graph"]
    with pytest.raises(InvalidArgument, match=message):
        raw.call("rerank", **{"graph": graph, "query": "q", "documents": ["a"], **keys})
    most = ["a"] * RERANK_DOCUMENTS_MAX
    found = raw.call("rerank", graph=graph, query="q", documents=most, top_n=1000)
    assert sorted(found["indexes"]) == list(range(RERANK_DOCUMENTS_MAX))


def test_the_client_refuses_wrong_arguments(client: Client) -> None:
    for documents in ([], "a text", [1]):
        with pytest.raises(InvalidArgument, match="several documents"):
            client.rerank("rank", QUERY, documents)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="top_n is 0"):
        client.rerank("rank", QUERY, DOCUMENTS, top_n=0)


def test_an_empty_document_has_a_score(client: Client) -> None:
    [one] = client.rerank("rank", QUERY, [""])
    assert one.raw_score == pytest.approx(echo_score(QUERY, ""), rel=1e-5)


def test_the_timeout_is_for_all_documents_and_nothing_is_left(client: Client) -> None:
    client.rerank("slow", QUERY, ["warm"])
    with pytest.raises(Timeout):
        client.rerank("slow", QUERY, ["x" * 1000] * 16, timeout=0.4)
    wait_until(lambda: not client.queue())
    assert client.sessions() == []


def test_a_cancelled_call_leaves_no_task(client: Client, raw: RawClient) -> None:
    graph = raw.call("load_by_name", name="slow")["graph"]
    raw.call("rerank", graph=graph, query="q", documents=["warm"])
    number = raw.start_request("rerank", graph=graph, query="q", documents=["x" * 1900] * 20)
    wait_until(lambda: len(client.queue()) > 1)
    raw.call("cancel", request=number)
    with pytest.raises(Cancelled):
        raw.wait_result(number)
    wait_until(lambda: not client.queue())
    [model] = [model for model in client.models() if model["name"] == "slow"]
    assert model["tasks"] == 0


def test_a_client_that_vanishes_leaves_no_task(daemon: RunningDaemon, client: Client) -> None:
    with RawClient(daemon.socket) as leaving:
        graph = leaving.call("load_by_name", name="slow")["graph"]
        leaving.start_request("rerank", graph=graph, query="q", documents=["x" * 1900] * 20)
        wait_until(lambda: len(client.queue()) > 1)
    wait_until(lambda: not client.queue())


def test_documents_whose_worker_dies_are_ranked_by_the_next_one(client: Client) -> None:
    expected = client.rerank("rank", QUERY, DOCUMENTS)
    client.rerank("fragile", QUERY, ["warm"])
    pid = client.show("fragile")["pid"]
    with pytest.raises(WorkerCrashed, match="document 1: "):
        client.rerank("fragile", QUERY, ["fine", "die now", *DOCUMENTS])
    again = client.rerank("fragile", QUERY, DOCUMENTS)
    assert [(one.index, one.raw_score) for one in again] == [
        (one.index, one.raw_score) for one in expected
    ]
    assert client.show("fragile")["pid"] != pid


def test_documents_are_bounded_as_other_turns_are() -> None:
    config = "[daemon]\ntasks-waiting-max = 4\n" + echo_model("m", slots=1, step_ms=20, ranks=True)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        found = client.rerank("m", QUERY, ["x" * 200 for _ in range(10)])
        assert len(found) == 10, "a call has no more documents waiting than it may"
        with RawClient(daemon.socket) as raw:
            contexts = [raw.context("m") for _ in range(6)]
            graph = raw.call("load_by_name", name="m")["graph"]
            for number, context in enumerate(contexts):
                raw.set_input(context, b"y" * 300)
                raw.start_request("compute", context=context)
                await_tasks(client, min(number + 1, 5))
            with pytest.raises(Busy) as caught:
                raw.call("rerank", graph=graph, query="q", documents=["a"])
            assert caught.value.data["retry_after_s"] > 0


def test_an_urgent_ranking_precedes_the_documents_of_a_low_one(client: Client) -> None:
    client.rerank("slow", QUERY, ["warm"])
    ended: list[str] = []

    def rank(priority: Priority, count: int) -> None:
        with Client(client.path) as own:
            own.rerank("slow", priority, ["z" * 60] * count, priority=priority)
            ended.append(priority)

    low = threading.Thread(target=rank, args=("low", 32))
    low.start()
    wait_until(lambda: any(task["state"] == "running" for task in client.queue()))
    rank("urgent", 1)
    low.join()
    assert ended == ["urgent", "low"]


# The command.


def test_the_command_writes_the_documents_by_their_scores(daemon: RunningDaemon) -> None:
    arguments = ("rerank", "rank", QUERY, *DOCUMENTS, "--top-n", "3")
    result = inferd(*arguments, socket=daemon.socket)
    assert result.exit_code == 0, result.output
    expected = {text: sigmoid(echo_score(QUERY, text)) for text in DOCUMENTS}
    best = sorted(DOCUMENTS, key=lambda text: -expected[text])[:3]
    assert result.stdout.splitlines() == [f"{expected[text]:.4f}  {text}" for text in best]


def test_the_command_reads_lines_and_writes_json(daemon: RunningDaemon) -> None:
    lines = "\n".join([*DOCUMENTS, "x" * 2100])
    refused = inferd("rerank", "rank", QUERY, socket=daemon.socket, text=lines)
    assert refused.exit_code != 0 and "document 4" in refused.output
    arguments = ("rerank", "rank", QUERY, "--truncate")
    found = document(inferd(*arguments, "--json", socket=daemon.socket, text=lines))
    assert (found["model"], found["truncated"]) == ("rank", [4])
    assert len(found["results"]) == 5
    assert set(found["results"][0]) == {"index", "score", "raw_score", "document"}
    shown = inferd(*arguments, socket=daemon.socket, text=lines)
    assert "left out the end of these documents: 5" in shown.stderr
