"""SmolLM2 and Gemma through a real daemon: behaviour that only a real model can show."""

from __future__ import annotations

import json
import operator
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

import inferd
from inferd.backends.errors import InferdError, InvalidArgument, PromptTooLong
from inferd.ipc.names import Priority
from inferd.testing import RunningDaemon
from tests.models import ONE_THREAD, smollm2
from tests.raw import RawClient
from tests.small_gemma import small_gemma3

pytestmark = pytest.mark.model
GREEDY = {"temp": 0, "n-predict": 8}
CONFIG = f"""{ONE_THREAD}
ctx-size = 512
slots = 4
[models.smollm2]
file = "{smollm2()}"
flash-attn = "on"
[models.gemma3]
file = "{small_gemma3()}"
[models.by_smollm2]
file = "{smollm2()}"
flash-attn = "on"
similarity-model = "smollm2"
similarity-wait-ms = 60000
[models.by_gemma3]
file = "{smollm2()}"
flash-attn = "on"
similarity-model = "gemma3"
similarity-wait-ms = 60000
"""
"""With flash attention, the logits of up to 63 tokens do not depend on the batch they are in."""


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_streamed_text_equals_the_whole_text(client: inferd.Client, model: str) -> None:
    with client.session(model, raw=True, options=GREEDY) as session:
        streamed = "".join(session.stream("The quick brown fox"))
    with client.session(model, raw=True, options=GREEDY) as session:
        whole = session.chat("The quick brown fox")

    assert streamed
    assert streamed == str(whole)
    assert whole.metadata["output_tokens"] == 8


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_texts_of_similar_meaning_have_similar_embeddings(
    client: inferd.Client, model: str
) -> None:
    cat, kitten, bank = client.embed(
        model,
        [
            "The cat sleeps on the warm sofa.",
            "A kitten is asleep on the soft couch.",
            "The central bank raised its interest rates by half a percent.",
        ],
    )

    def likeness(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert likeness(cat, cat) == pytest.approx(1.0, abs=1e-5)
    assert likeness(cat, kitten) > likeness(cat, bank)


def test_a_blank_text_is_refused_by_its_index_before_any_is_embedded(client: inferd.Client) -> None:
    texts = ["some text"] * 70 + ["", "and more"]
    with pytest.raises(InvalidArgument, match="text 70: the text has no tokens") as caught:
        client.embed("smollm2", texts)
    assert caught.value.data == {"index": 70}


def test_a_chat_answers_by_the_models_template_and_computes_only_what_is_new(
    client: inferd.Client,
) -> None:
    with client.session("smollm2", system="You are a helpful assistant.", options=GREEDY) as s:
        first = s.chat("What is the capital of France?")
        second = s.chat("Say it again.")

    assert "Paris" in first
    assert first.metadata["cached_tokens"] == 0
    history = first.metadata["input_tokens"] + first.metadata["output_tokens"]
    assert second.metadata["cached_tokens"] >= history - 2, "the history was computed again"
    assert second.metadata["recomputed_tokens"] == 0, second.metadata["recomputed_reason"]


def test_a_repeated_prompt_is_not_computed_again(client: inferd.Client) -> None:
    with client.session("smollm2", raw=True, options=GREEDY) as session:
        first = session.chat("Once upon a time there was a king who had three daughters and")
        session.reset()
        second = session.chat("Once upon a time there was a king who had three daughters and")

    assert second.metadata["cached_tokens"] == first.metadata["input_tokens"] - 1
    assert str(first) == str(second)


def test_a_seed_fixes_a_sampled_text_and_another_seed_changes_it(client: inferd.Client) -> None:
    texts = []
    for seed in (7, 7, 8):
        options = {"temp": 1.5, "seed": seed, "n-predict": 12}
        with client.session("smollm2", raw=True, options=options) as session:
            reply = session.chat("Write anything at all:")
            texts.append(str(reply))
            assert reply.metadata["seed"] == seed

    assert texts[0] == texts[1] != texts[2]


def test_tokens_on_demand_equal_streamed_ones(daemon: RunningDaemon, client: inferd.Client) -> None:
    with client.session("smollm2", raw=True, options=GREEDY) as session:
        streamed = "".join(session.stream("The capital of Italy is"))
    pulled = b""
    with RawClient(daemon.socket) as raw:
        context = raw.context("smollm2", '{"temp":0,"n-predict":8}')
        raw.set_input(context, b"The capital of Italy is")
        for _ in range(8):
            pulled += raw.compute_single(context)
        with pytest.raises(inferd.EndOfSequence):
            raw.compute_single(context)

    assert pulled.decode() == streamed


def test_a_parameter_changed_between_tokens_holds_from_the_next_one(
    daemon: RunningDaemon,
) -> None:
    with RawClient(daemon.socket) as raw:
        context = raw.context("smollm2", '{"temp":0}')
        raw.set_input(context, b"One, two, three,")
        pieces = [raw.compute_single(context) for _ in range(4)]
        raw.set_input(context, b'{"n-predict":5}', index=1)
        pieces.append(raw.compute_single(context))
        with pytest.raises(inferd.EndOfSequence):
            raw.compute_single(context)

    assert len(pieces) == 5


def test_many_clients_share_one_model(daemon: RunningDaemon) -> None:
    def ask(number: int) -> str:
        with inferd.Client(daemon.socket) as client:
            priorities: list[Priority] = ["low", "normal", "high", "urgent"]
            priority = priorities[number % 4]
            options: dict[str, Any] = {"raw": True, "priority": priority, "options": GREEDY}
            with client.session("smollm2", **options) as session:
                return str(session.chat(f"Say the number {number}."))

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))

    assert all(answers)


def test_two_models_are_served_side_by_side(client: inferd.Client) -> None:
    with (
        client.session("smollm2", raw=True, options=GREEDY) as one,
        client.session("gemma3", raw=True, options=GREEDY) as other,
    ):
        assert one.chat("Hello, my name is")
        assert other.chat("Hello, my name is")
        names = {m["name"]: m["state"] for m in client.models()}

    assert names["smollm2"] == names["gemma3"] == "ready"


def test_a_model_is_loaded_from_an_open_descriptor_and_seen_by_its_user_only(
    daemon: RunningDaemon,
) -> None:
    fd = os.open(smollm2(), os.O_RDONLY)
    with RawClient(daemon.socket) as raw:
        graph = raw.call("load", [fd], fd=0, encoding="ggml", target="cpu")
        os.close(fd)
        context = raw.call("init_execution_context", graph=graph["graph"])["context"]
        raw.set_input(context, b'{"temp":0,"n-predict":4}', index=1)
        raw.set_input(context, b"The capital of France is")
        raw.call("compute", context=context)

        assert b"Paris" in raw.output(context)
        assert graph["model"] in [m["name"] for m in raw.call("models")["models"]]
        raw.call("unload", graph=graph["graph"])
        assert graph["model"] not in [m["name"] for m in raw.call("models")["models"]]


def test_a_truncated_model_is_refused_before_llama_cpp_sees_it(
    daemon: RunningDaemon, client: inferd.Client
) -> None:
    with open(smollm2(), "rb") as whole:
        (daemon.directory / "models" / "cut.gguf").write_bytes(whole.read(20_000_000))

    with pytest.raises(inferd.LoadFailed) as caught:
        client.load_by_name("cut")
    assert "cut.gguf" in caught.value.message


def test_special_tokens_show_in_wasi_calls_and_not_in_chats(
    daemon: RunningDaemon, client: inferd.Client
) -> None:
    prompt = "<|im_start|>user\nIs 2 even?<|im_end|>\n<|im_start|>assistant\n"
    with RawClient(daemon.socket) as raw:
        context = raw.context("smollm2", '{"temp":0,"n-predict":60}')
        raw.set_input(context, prompt.encode())
        raw.call("compute", context=context)
        shown = raw.output(context)
    with client.session("smollm2", raw=True, options={"temp": 0, "n-predict": 60}) as session:
        plain = session.chat(prompt)

    assert plain.metadata["stop_reason"] == "eos"
    assert shown == str(plain).encode() + b"<|im_end|>"


def test_answers_fit_a_schema_given_as_an_object_or_as_its_text(
    client: inferd.Client, daemon: RunningDaemon
) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "ok": {"type": "boolean"}},
        "required": ["city", "ok"],
    }
    with client.session("smollm2", options=GREEDY | {"n-predict": 60}) as session:
        said = session.chat("What is the capital of Italy?", options={"json-schema": schema})
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(said))
        session.reset()
        free = session.chat("What is the capital of Italy?", options={"n-predict": 4})
        assert not free.startswith("{"), "the schema was for one turn"
    with RawClient(daemon.socket) as raw:
        context = raw.context("smollm2")
        options = {"json_schema": json.dumps(schema), "temp": 0, "n-predict": 60}
        raw.set_input(context, json.dumps(options).encode(), index=1)
        raw.set_input(context, b"What is the capital of Italy?")
        raw.call("compute", context=context)
        text = raw.output(context).removesuffix(b"<|im_end|>").removesuffix(b"<|endoftext|>")
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = {
    "structures": [{"begin": "<call>", "schema": CITY, "end": "</call>"}],
    "triggers": ["<call"],
}


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": "(Yes|No), [a-z ]{3,9}[.]"}, "(Yes|No), [a-z ]{3,9}[.]"),
        (
            {"lark": 'start: item{2}\nitem: "- " /[A-Za-z ]{2,6}/ "\\n"'},
            "(- [A-Za-z ]{2,6}\n){2}",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}},
            '{"city": .*}',
        ),
    ],
    ids=["regex", "lark", "response_format"],
)
def test_answers_have_the_format_of_the_turn(
    client: inferd.Client, model: str, options: dict[str, Any], pattern: str
) -> None:
    common = {"n-predict": 60, "temp": 1.0, "seed": 3, **options}
    with client.session(model, raw=True) as session:
        for answer in session.answers("Is Rome in Italy?", n=2, options=common):
            assert re.fullmatch(pattern, answer), answer
        assert re.fullmatch(pattern, session.chat("Is Oslo in Norway?", options=common))
        [fork] = session.fork()
        assert re.fullmatch(pattern, fork.chat("And Paris?", options=common))


def test_a_mark_in_free_text_forces_the_rest_of_a_call(daemon: RunningDaemon) -> None:
    bias = [["<", 9.0], ["call", 4.0]]
    options = {"structural-tag": CALL, "n-predict": 40, "temp": 0, "logit-bias": bias}
    with RawClient(daemon.socket) as raw:
        context = raw.context("smollm2")
        raw.set_input(context, json.dumps(options).encode(), index=1)
        raw.set_input(context, b"Repeat: <call> <call> <call>")
        raw.call("compute", context=context)
        text = raw.output(context).decode()
    calls = re.findall("<call(.*?)(?:</call>|$)", text, re.S)
    assert calls, text
    assert all(c == '>{"city": "Rome"}' or c == '>{"city": "Oslo"}' for c in calls[:-1])


def test_a_schema_that_cannot_be_kept_is_refused_with_its_path(client: inferd.Client) -> None:
    schema = {"properties": {"a": {"uniqueItems": True, "type": "array"}}}
    with client.session("smollm2") as session:
        with pytest.raises(InvalidArgument, match="uniqueItems: it is not supported") as caught:
            session.chat("x", options={"json-schema": schema})
        assert caught.value.data == {"path": "#/properties/a/uniqueItems"} and caught.value.hint
        with pytest.raises(InvalidArgument, match="json-schema: grammar is set too"):
            session.chat("x", options={"json-schema": schema, "grammar": "root ::= [a]"})


@pytest.fixture(scope="module")
def unrefused(daemon: RunningDaemon) -> str:
    """Return the second answer of a session in which no turn was refused."""
    with inferd.Client(daemon.socket) as client, client.session("smollm2", options=GREEDY) as other:
        other.chat("What is the capital of France?")
        return str(other.chat("And of Italy?"))


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("x", {"json-schema": {"uniqueItems": True, "type": "array"}}, InvalidArgument),
        ("x", {"grammar": "root ::= ["}, InvalidArgument),
        ("x", {"stop-tokens": [10**6]}, InvalidArgument),
        ("word " * 2000, {}, PromptTooLong),
    ],
    ids=["json-schema", "grammar", "stop-tokens", "length"],
)
def test_a_refused_turn_leaves_nothing_of_its_message(
    client: inferd.Client,
    unrefused: str,
    prompt: str,
    options: dict[str, Any],
    error: type[InferdError],
) -> None:
    with client.session("smollm2", options=GREEDY) as session:
        session.chat("What is the capital of France?")
        [before] = client.sessions()
        for _ in range(2):
            with pytest.raises(error):
                session.chat(prompt, options=options)
            [after] = client.sessions()
            assert (after["tokens"], after["turns"]) == (before["tokens"], before["turns"])
        assert session.chat("And of Italy?") == unrefused


GREETING = "Say hello."
POLITE: dict[str, Any] = {
    "system": "Be nice.",
    "options": {"temp": 0, "n-predict": 24, "cache-prompt": False},
}


@pytest.fixture(scope="module")
def greeting(daemon: RunningDaemon) -> str:
    """Return an answer of some sentences."""
    with inferd.Client(daemon.socket) as client, client.session("smollm2", **POLITE) as session:
        return str(session.chat(GREETING))


@pytest.mark.parametrize("comparer", ["smollm2", "gemma3"])
def test_a_turn_ends_with_the_sentence_that_means_the_given_text(
    client: inferd.Client, greeting: str, comparer: str
) -> None:
    """A sentence of a greedy answer is found again by the same model's embeddings and another's."""
    client.load_by_name(comparer)
    with client.session(f"by_{comparer}", **POLITE) as session:
        assert session.chat(GREETING) == greeting
        sentences = re.findall(r"\S.*?[.!?](?=\s)", greeting, re.DOTALL)
        assert len(sentences) > 1
        given, first, second = client.embed(comparer, [sentences[1], *sentences[:2]])
        far, near = (sum(map(operator.mul, given, said)) for said in (first, second))
        assert far < near - 0.01
        session.reset()
        met = {"stop-similarity": sentences[1], "stop-similarity-threshold": (far + near) / 2}
        reply = session.chat(GREETING, options=met)
    assert greeting[: greeting.index(sentences[1])] + sentences[1] == str(reply)
    assert reply.metadata["stop_reason"] == "similarity"
    assert float(reply.metadata["stop_detail"]) == pytest.approx(near, abs=2e-3)
    assert reply.metadata["adjusted"] == {}


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_forced_tokens_are_counted_and_the_same_on_demand_as_in_a_stream(
    daemon: RunningDaemon, client: inferd.Client, model: str
) -> None:
    names = ("name_of_the_capital", "has_a_famous_cathedral", "is_on_the_mediterranean")
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": list(names),
        "additionalProperties": False,
    }
    options = {"temp": 0, "n-predict": 100, "json-schema": json.dumps(schema)}
    # Examples make each value certain: near ties may end otherwise in steps of other sizes.
    prompt = f"{json.dumps(dict.fromkeys(names, True))}\n" * 3
    with client.session(model, raw=True, options=options) as session:
        stream = session.stream(prompt)
        events = list(stream)
        metadata = stream.metadata
    assert list(json.loads("".join(events))) == list(names)
    assert metadata["forced_tokens"] >= 15
    assert len(events) < metadata["output_tokens"] - metadata["forced_tokens"] + 2
    pulled, ended = b"", False
    with RawClient(daemon.socket) as raw:
        context = raw.context(model, json.dumps(options))
        raw.set_input(context, prompt.encode())
        while not ended:
            try:
                pulled += raw.compute_single(context)
            except inferd.EndOfSequence:
                ended = True
    assert pulled.decode().startswith("".join(events))
