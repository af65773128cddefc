"""Reranking: Cohere's clients, and requests of Jina, Text Embeddings Inference and llama-server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import pytest

from inferd import Client
from inferd.backends.echo.model import echo_vectors
from inferd.daemon.calls.texts import sigmoid
from inferd.gateways.http.reranking import DOCUMENTS_MAX, PATHS
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

QUERY = "Organic skincare products for sensitive skin"
DOCUMENTS = [
    "Eco-friendly kitchenware for modern homes",
    "Natural organic skincare range for sensitive skin",
    "Tech gadgets for smart homes: 2024 edition",
    "Yoga mats made from recycled materials",
]
CONFIG = echo_model("rank", ranks=True, ctx_size=1024) + echo_model("echo")
CONFIG += echo_model("slow", ranks=True, step_ms=50, ctx_size=1024)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG) as running:
        yield running


def raw_score(text: str, query: str = QUERY) -> float:
    """Return the score of the echo model; see its `rank_parts`."""
    return echo_vectors([258, *query.encode(), 10, 257, *text.encode()])[-1][0]


BEST = sorted(range(4), key=lambda index: -raw_score(DOCUMENTS[index]))
TOKENS = sum(len(QUERY) + 3 + len(text) for text in DOCUMENTS)


def scores(found: Any, name: str = "relevance_score") -> list[tuple[int, float]]:
    return [(one["index"], one[name]) for one in found]


RAW: Any = [(index, pytest.approx(raw_score(DOCUMENTS[index]), rel=1e-5)) for index in BEST]
EXPECTED: Any = [
    (index, pytest.approx(sigmoid(raw_score(DOCUMENTS[index])), rel=1e-5)) for index in BEST
]


# Cohere's clients.


def test_coheres_client_of_version_2(http: RunningGateway) -> None:
    with cohere.ClientV2(api_key="none", base_url=http.url) as client:
        found = client.rerank(model="rank", query=QUERY, documents=DOCUMENTS, top_n=3)

    assert [(r.index, r.relevance_score) for r in found.results] == EXPECTED[:3]
    assert found.id and found.id.startswith("rerank-")
    assert found.meta and found.meta.tokens and found.meta.tokens.input_tokens == TOKENS
    assert found.meta.cached_tokens == 3 * (len(QUERY) + 3)
    assert found.meta.warnings is None


def test_coheres_client_of_version_1_sends_objects_and_gets_documents(http: RunningGateway) -> None:
    objects = [{"text": text} for text in DOCUMENTS]
    with cohere.Client(api_key="none", base_url=http.url) as client:
        found = client.rerank(model="rank", query=QUERY, documents=objects, return_documents=True)

    assert [(r.index, r.relevance_score) for r in found.results] == EXPECTED
    assert [r.document and r.document.text for r in found.results] == [DOCUMENTS[i] for i in BEST]


def test_a_long_document_of_cohere_is_truncated_with_a_warning(http: RunningGateway) -> None:
    with cohere.ClientV2(api_key="none", base_url=http.url) as client:
        documents = ["short", "x" * 2000]
        found = client.rerank(
            model="rank", query=QUERY, documents=documents, max_tokens_per_doc=4096
        )
    assert found.meta
    assert found.meta.warnings == ["the end of these documents was left out: 1"]
    cut = "x" * (1024 - len(QUERY) - 3)
    assert {r.index: r.relevance_score for r in found.results} == pytest.approx(
        {0: sigmoid(raw_score("short")), 1: sigmoid(raw_score(cut))}
    )


def test_errors_are_those_of_coheres_client(http: RunningGateway) -> None:
    with cohere.ClientV2(api_key="none", base_url=http.url) as client:
        with pytest.raises(cohere.errors.NotFoundError) as missing:
            client.rerank(model="missing", query=QUERY, documents=DOCUMENTS)
        with pytest.raises(cohere.errors.BadRequestError) as other:
            client.rerank(model="echo", query=QUERY, documents=DOCUMENTS)
    assert "missing" in missing.value.body["message"]
    assert "ranks no documents" in other.value.body["message"]


# Requests as other programs send them.

JINA = {  # https://api.jina.ai/redoc, with another model
    "model": "rank",
    "query": QUERY,
    "top_n": 3,
    "documents": DOCUMENTS,
    "return_documents": True,
}
TEI = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": False, "return_text": False}
"""https://huggingface.github.io/text-embeddings-inference, whose server has one model."""


def test_jinas_request(web: httpx.Client) -> None:
    found = web.post("/v1/rerank", json=JINA).json()

    assert found["model"] == "rank" and found["object"] == "list"
    assert EXPECTED[:3] == scores(found["results"])
    assert [one["document"]["text"] for one in found["results"]] == [
        DOCUMENTS[index] for index in BEST[:3]
    ]
    assert found["usage"] == {"prompt_tokens": TOKENS, "total_tokens": TOKENS}


def test_a_request_of_text_embeddings_inference(web: httpx.Client) -> None:
    answer = web.post("/rerank", json={**TEI, "model": "rank"})

    assert scores(answer.json(), "score") == EXPECTED
    assert all(set(one) == {"index", "score"} for one in answer.json())
    assert answer.headers["x-compute-tokens"] == str(TOKENS)
    more = {"raw_scores": True, "return_text": True, "truncate": True}
    texts = [*DOCUMENTS, "x" * 2000]
    found = web.post("/rerank", json={**TEI, "model": "rank", **more, "texts": texts}).json()
    whole = [one for one in found if one["index"] < 4]
    assert scores(whole, "score") == RAW
    assert all(one["text"] == texts[one["index"]] for one in found)
    assert [one["index"] for one in found if one.get("truncated")] == [4]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_each_form(web: httpx.Client, path: str) -> None:
    body = {"model": "rank", "query": QUERY}
    found = web.post(path, json={**body, "documents": DOCUMENTS, "raw_scores": True}).json()
    assert scores(found["results"]) == RAW
    assert not any("document" in one for one in found["results"])
    listed = web.post(path, json={**body, "texts": DOCUMENTS, "top_n": 2}).json()
    assert EXPECTED[:2] == scores(listed, "score")


# Refusals and bounds.


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * (DOCUMENTS_MAX + 1)}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": [1]}, "documents.0"),
        ({"documents": ["a", {"title": "b"}]}, "documents.1"),
        ({"documents": "a"}, "documents"),
        ({"texts": ["a"]}, "texts"),
        ({"query": None}, "query"),
        ({"query": 1}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"truncate": False, "documents": ["a", "x" * 2000]}, "documents.1"),
        ({"truncation": False, "documents": ["x" * 2000]}, "documents.0"),
        ({"documents": None, "texts": ["a", "x" * 2000]}, "texts.1"),
        ({"truncation_direction": "Left"}, "truncation_direction"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"model": ""}, "model"),
        ({"priority": "urgent"}, "priority"),
    ],
)
def test_a_wrong_request_is_refused_by_its_field(
    web: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = web.post("/v1/rerank", json={**JINA, **fields})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["param"] == param, answer.json()
    assert answer.json()["message"] == answer.json()["error"]["message"]


def test_fields_without_effect_are_named(web: httpx.Client) -> None:
    fields = {"max_tokens_per_doc": 10, "rank_fields": ["text"], "priority": 5}
    answer = web.post("/v2/rerank", json={**JINA, **fields})
    assert answer.status_code == 200
    assert answer.headers["inferd-ignored"] == "max_tokens_per_doc"


def test_as_many_documents_as_allowed(web: httpx.Client) -> None:
    texts = [f"document {n}" for n in range(DOCUMENTS_MAX)]
    found = web.post("/v1/rerank", json={**JINA, "documents": texts, "top_n": DOCUMENTS_MAX})
    assert sorted(one["index"] for one in found.json()["results"]) == list(range(DOCUMENTS_MAX))


def test_a_client_that_disconnects_leaves_no_documents(
    http: RunningGateway, daemon: RunningDaemon
) -> None:
    body = {**JINA, "model": "slow", "documents": ["x" * 900] * 20}
    with Client(daemon.socket) as client:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{http.url}/v1/rerank", json=body, timeout=httpx.Timeout(60, read=0.5))
        wait_until(lambda: not client.queue())
        assert client.sessions() == []


def test_without_a_name_the_only_model_is_used(tmp_path: Path, web: httpx.Client) -> None:
    write_tiny("bert-rank", tmp_path)
    with (
        running_daemon(models_dir=tmp_path) as daemon,
        gateway(daemon) as http,
        Client(daemon.socket) as client,
    ):
        found = httpx.post(f"{http.url}/rerank", json=TEI, timeout=60).json()
        ranking = client.rerank("tiny-bert-rank", QUERY, DOCUMENTS)
    expected: Any = [(one.index, pytest.approx(one.score, rel=1e-5)) for one in ranking]
    assert scores(found, "score") == expected
    several = web.post("/rerank", json=TEI)
    assert (several.status_code, several.json()["error"]["param"]) == (400, "model")
