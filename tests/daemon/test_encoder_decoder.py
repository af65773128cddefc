"""Turns on a tiny encoder-decoder, over a socket: each prompt is encoded by itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferd import Client, InvalidArgument, PromptTooLong, UnsupportedOperation
from inferd.testing import RunningDaemon, running_daemon
from tests.gateways.http.driver import CALL_S_MAX, gateway
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(200)]
OPTIONS = """
ctx-size = 512
batch-size = 128
threads = 1
cache-type-k = "f32"
cache-type-v = "f32"
n-predict = 40
temp = 1
seed = 7
ignore-eos = true
"""
"""With an F32 cache the noise of batches changes no token. Greedy answers would hardly differ."""
TEXTS = [f"translate number {n} of the {'long ' * n}lines" for n in range(6)]


def configured(path: Path, slots: int = 3, **names: str) -> str:
    other = "".join(f"[models.{name}]\nfile = '{file}'\n{OPTIONS}" for name, file in names.items())
    return f"[models.t5]\nfile = '{path}'\nslots = {slots}\n{OPTIONS}{other}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("t5", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def daemon(path: Path) -> Iterator[RunningDaemon]:
    with running_daemon(configured(path)) as running:
        yield running


@pytest.fixture(scope="module")
def answers(daemon: RunningDaemon) -> dict[str, str]:
    """The answers to `TEXTS`, each computed alone."""
    with Client(daemon.socket) as client:
        return {text: str(client.chat("t5", text)) for text in TEXTS}


def test_turns_that_run_together_equal_single_ones(
    daemon: RunningDaemon, answers: dict[str, str]
) -> None:
    assert len(set(answers.values())) == len(TEXTS)
    with Client(daemon.socket) as client, ThreadPoolExecutor(len(TEXTS)) as pool:
        together = pool.map(lambda text: str(client.chat("t5", text)), TEXTS)
        assert dict(zip(TEXTS, together, strict=True)) == answers


def test_each_turn_of_a_session_is_encoded_by_itself(
    client: Client, answers: dict[str, str]
) -> None:
    with client.session("t5") as session:
        for text in (TEXTS[0], TEXTS[1], TEXTS[0]):
            turn = session.chat(text)
            assert str(turn) == answers[text]
            assert "earlier turns are not read" in turn.metadata["adjusted"]["chat-template"]
            assert turn.metadata["recomputed_tokens"] == turn.metadata["cached_tokens"] == 0
        assert [m["content"] for m in session.history().messages][::2] == [
            *(TEXTS[0], TEXTS[1], TEXTS[0])
        ]
    with client.session("t5", raw=True) as session:
        assert [str(session.chat(text)) for text in TEXTS[:3]] == [answers[t] for t in TEXTS[:3]]


def test_a_system_message_precedes_the_text_of_each_turn(
    client: Client, answers: dict[str, str]
) -> None:
    words = TEXTS[2].split(" ", 1)
    with client.session("t5", system=words[0]) as session:
        assert str(session.chat(words[1])) == answers[TEXTS[2]]
        assert str(session.chat(words[1])) == answers[TEXTS[2]]


def test_the_calls_of_wasi_nn(raw: RawClient, answers: dict[str, str]) -> None:
    graph = raw.call("load_by_name", name="t5")["graph"]
    context = raw.call("init_execution_context", graph=graph)["context"]
    options = json.dumps({"append": True}).encode()
    raw.call("set_input", context=context, index=1, tensor={"data": options})
    for text in TEXTS[:2]:
        raw.set_input(context, text.encode())
        raw.call("compute", context=context)
        output = raw.call("get_output", context=context, index=0)
        assert output["data"].decode() == answers[text]
        found = raw.call("get_output", context=context, index=1)["data"]
        assert "encodes each prompt by itself" in json.loads(found)["adjusted"]["append"]
    pulled = b""
    raw.set_input(context, TEXTS[3].encode())
    while len(pulled) < len(answers[TEXTS[3]]):
        pulled += raw.call("compute_single", context=context)["piece"]
    assert pulled.decode() == answers[TEXTS[3]]


def test_prompts_of_tokens_get_the_start_token(raw: RawClient, answers: dict[str, str]) -> None:
    graph = raw.call("load_by_name", name="t5")["graph"]
    context = raw.call("init_execution_context", graph=graph)["context"]
    text = TEXTS[4].encode()
    plain = raw.call("tokenize", graph=graph, text=text.decode(), bos=False)["tokens"]
    whole = raw.call("tokenize", graph=graph, text=text.decode(), bos=True)["tokens"]
    assert whole == [*plain, 1, 0]
    for tokens in (whole, whole[:-1]):
        done = raw.call("chat", context=context, prompt_tokens=tokens, raw=True)
        assert done["text"].decode() == answers[TEXTS[4]]


def test_prompts_that_the_encoder_cannot_read_are_refused(client: Client) -> None:
    with client.session("t5") as session:
        with pytest.raises(PromptTooLong, match="the encoder reads at most 128 at once"):
            session.chat("words and " * 30)
        with pytest.raises(UnsupportedOperation, match="no logprobs of its prompt"):
            session.chat("text", options={"prompt-logprobs": 1})
        assert len(str(session.chat("text", options={"ctx-size": 20}))) > 0
        assert session.metadata["stop_reason"] == "context_full"


def test_options_of_sampling_apply(client: Client, answers: dict[str, str]) -> None:
    text = TEXTS[1]
    sampled = {"temp": 1.5, "seed": 3, "top-k": 0, "top-p": 1.0}
    first, second = (str(client.chat("t5", text, options=sampled)) for _ in range(2))
    assert first == second != answers[text]
    constrained = client.chat("t5", text, options={"grammar": 'root ::= ("ja" | "no") "!"'})
    assert str(constrained) in ("ja!", "no!")
    found = client.chat("t5", text, options={"n-probs": 2, "n-predict": 3})
    assert found.metadata["output_tokens"] == 3
    stop = answers[text][5:7]
    assert str(client.chat("t5", text, options={"stop": [stop]})) == answers[text].split(stop)[0]


def test_branches_and_rewound_turns_continue(client: Client, answers: dict[str, str]) -> None:
    greedy = {"temp": 0}
    whole = str(client.chat("t5", TEXTS[2], options=greedy))
    with client.session("t5", raw=True, options=greedy) as session:
        session.chat(TEXTS[0])
        [branch] = session.fork()
        with branch:
            assert str(branch.chat(TEXTS[1], options={"temp": 1})) == answers[TEXTS[1]]
        assert str(session.chat(TEXTS[2])) == whole
        prompt = session.metadata["input_tokens"]
        session.rewind(tokens=prompt + 20)  # within the answer, which continues there
        rest = session.chat(options={"n-predict": 20})
        assert whole.endswith(str(rest)) and str(rest)
        session.rewind(tokens=prompt - 5)
        with pytest.raises(InvalidArgument, match="does not end with token 0"):
            session.chat()


def test_several_answers_to_one_prompt(client: Client) -> None:
    with client.session("t5", raw=True) as session:
        found = session.answers(TEXTS[1], n=4)
        assert len({str(answer) for answer in found}) == 4
        again = session.answers(TEXTS[1], n=4)
        assert [*map(str, again)] == [*map(str, found)]


def test_a_parked_turn_continues(path: Path, answers: dict[str, str]) -> None:
    config, parks = configured(path, slots=1), 0
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        for _ in range(5):  # it may have ended before the urgent one arrives
            with client.session("t5", priority="low") as session:
                stream = session.stream(TEXTS[0])
                text = next(stream)
                assert str(client.chat("t5", TEXTS[1], priority="urgent")) == answers[TEXTS[1]]
                text += "".join(stream)
                assert text == answers[TEXTS[0]]
                parks = session.metadata["parks"]
            if parks:
                break
        assert parks >= 1


@pytest.mark.parametrize("kept", ["long", None], ids=["session", "unnamed"])
def test_a_turn_survives_the_end_of_its_worker(path: Path, kept: str | None) -> None:
    # So many that the worker is killed while it computes them.
    options = {"n-predict": 400}
    killed: set[int] = set()

    def kill_worker(client: Client) -> None:
        # Between two workers, `show` has none (0). Pieces of the killed one may still be read then.
        worker = client.show("t5")["pid"]
        if worker and worker not in killed:
            os.kill(worker, signal.SIGKILL)
            killed.add(worker)

    with (
        running_daemon(configured(path)) as daemon,
        Client(daemon.socket) as client,
        Client(daemon.socket) as other,
    ):
        whole = str(client.chat("t5", TEXTS[5], options=options))
        with client.session("t5", session_id=kept) as session:
            pieces = []
            for piece in session.stream(TEXTS[5], options=options):
                pieces.append(piece)
                if len(pieces) in (1, 9, 200):
                    kill_worker(other)
            assert "".join(pieces) == whole
        assert killed
        wait_until(lambda: daemon.log.count("worker.died") == len(killed))


def test_a_stream_resumes_after_a_restart(path: Path, answers: dict[str, str]) -> None:
    with (
        running_daemon(configured(path)) as daemon,
        Client(daemon.socket) as client,
        client.session("t5", session_id="kept", resume=True) as session,
    ):
        pieces = []
        for piece in session.stream(TEXTS[5]):
            pieces.append(piece)
            if len(pieces) == 7:
                daemon.kill()
                daemon.start_again()
        assert "".join(pieces) == answers[TEXTS[5]]
        assert str(session.chat(TEXTS[0])) == answers[TEXTS[0]]


def test_sessions_move_between_kinds_of_models(
    path: Path, tmp_path: Path, answers: dict[str, str]
) -> None:
    """A decoder-only model reads the history, an encoder-decoder only the turn."""
    other = write_tiny("llama", tmp_path)
    config = configured(path, llama=str(other), other=str(other))
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with client.session("llama") as session:
            session.chat(TEXTS[0])
            client.swap("llama", "t5")
            assert str(session.chat(TEXTS[1])) == answers[TEXTS[1]]
        with client.session("t5") as session:
            assert str(session.chat(TEXTS[0])) == answers[TEXTS[0]]
            client.swap("t5", "other")
            read = session.chat(TEXTS[1]).metadata["input_tokens"]
            assert read > len(TEXTS[0]) + len(TEXTS[1])


def test_the_apis_of_the_gateway(daemon: RunningDaemon, answers: dict[str, str]) -> None:
    text = TEXTS[3]
    message = {"role": "user", "content": text}
    with gateway(daemon) as running, httpx.Client(base_url=running.url, timeout=CALL_S_MAX) as web:

        def post(where: str, **body: Any) -> dict[str, Any]:
            reply = web.post(where, json={"model": "t5", **body})
            found: dict[str, Any] = reply.json()
            assert reply.status_code == 200, found
            return found

        done = post("/v1/completions", prompt=text, max_tokens=40)
        assert done["choices"][0]["text"] == answers[text]
        both = post("/v1/completions", prompt=TEXTS[:2], max_tokens=40)["choices"]
        assert [choice["text"] for choice in both] == [answers[t] for t in TEXTS[:2]]
        done = post("/v1/chat/completions", messages=[message], max_tokens=40)
        assert done["choices"][0]["message"]["content"] == answers[text]
        earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        done = post("/v1/chat/completions", messages=[*earlier, message], max_tokens=40)
        assert done["choices"][0]["message"]["content"] == answers[text]
        reply = web.post("/v1/completions", json={"model": "t5", "prompt": "words " * 90})
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        reply = web.post("/v1/embeddings", json={"model": "t5", "input": "words"})
        assert reply.status_code in (400, 501), reply.json()


def test_embeddings_are_refused(client: Client) -> None:
    with pytest.raises(UnsupportedOperation, match="makes no embeddings"):
        client.embed("t5", ["text"])
