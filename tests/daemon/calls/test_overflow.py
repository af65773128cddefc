"""Full conversations go on: `overflow` over a socket, on echo, a tiny model and SmolLM2."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd import Client, Session
from inferd.backends.errors import PromptTooLong
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.models import ONE_THREAD, fast_smollm2
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

CONFIG = echo_model("echo", **{"ctx-size": 512}) + echo_model("cut", overflow="truncate")
SMALL = {"ctx-size": 160, "temp": 0, "ignore-eos": True}
"""The tiny model has a token for each byte, and its template adds up to 12 to a message."""
SHIFT = {"ctx-shift": True}
Options = dict[str, Any]


def fact(number: int) -> str:
    return f"Please tell me fact number {number} about the sea."


def facts(session: Session, turns: int, **options: Any) -> list[dict[str, Any]]:
    """Return the metadata of this many turns."""
    return [dict(session.chat(fact(n), options=options).metadata) for n in range(turns)]


def dropped(messages: list[dict[str, Any]]) -> list[bool]:
    return [message.get("dropped", False) for message in messages]


@pytest.mark.parametrize(
    ("turns", "options"),
    [(200, {"overflow": "drop-turns"}), (100, SHIFT), (100, {"overflow": "truncate"})],
    ids=str,
)
def test_many_turns_on_echo_in_a_context_of_512_tokens(
    client: Client, turns: int, options: dict[str, Any]
) -> None:
    with client.session("echo", raw=True, session_id="long", options=options) as session:
        found = facts(session, turns, **{"n-predict": 20})
        [shown] = client.sessions(session_id="long")
    reasons = {each["stop_reason"] for each in found}
    if options == {"overflow": "truncate"}:
        reasons.discard("context_full")  # a prompt that just fits leaves little for its answer
    assert reasons <= {"length", "eos"}
    assert all(each["input_tokens"] < 512 for each in found)
    assert options == SHIFT or not any(each["shifts"] for each in found)
    drops = [each for each in found if each["dropped_tokens"]]
    assert len(drops) > turns / 20
    if options == {"overflow": "drop-turns"}:
        assert all(each["dropped_tokens"] >= 128 and each["dropped_turns"] for each in drops)
    assert shown["tokens"] <= 512
    client.delete_session(session_id="long")


@pytest.mark.model
@pytest.mark.parametrize(
    ("turns", "options"), [(120, {}), (60, SHIFT), (60, {"cache-reuse": 16})], ids=str
)
def test_many_turns_on_a_tiny_model(tiny: Client, turns: int, options: dict[str, Any]) -> None:
    own = {"ctx-size": 512, "temp": 0, "ignore-eos": True} | options
    with tiny.session("tiny", session_id="long", system="Be brief.", options=own) as session:
        found = facts(session, turns, **{"n-predict": 2})
        messages = session.history().messages
    assert all(each["input_tokens"] < 512 and each["output_tokens"] == 2 for each in found)
    drops = [each for each in found if each["dropped_tokens"]]
    assert turns / 10 < len(drops) < turns / 2
    if options != SHIFT:
        assert all(each["dropped_tokens"] >= 128 and each["dropped_turns"] for each in drops)
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert messages[1]["content"] == fact(0) and messages[1]["dropped"]
    assert messages[-2] == {"role": "user", "content": fact(turns - 1)}
    tiny.delete_session(session_id="long")


@pytest.mark.model
def test_a_small_context_with_ctx_shift_goes_on(tiny: Client) -> None:
    with tiny.session("tiny", options=SMALL | SHIFT) as session:
        found = facts(session, 12, **{"n-predict": 40})
        assert not any(dropped(session.history().messages)[-2:])
    assert sum(each["dropped_tokens"] > 0 for each in found) >= 4


@pytest.mark.model
def test_dropped_turns_stay_in_the_transcript(tiny: Client) -> None:
    with tiny.session("tiny", options=SMALL) as session:
        found = facts(session, 4, **{"n-predict": 30})
        history = session.history()
    last = next(n for n, each in reversed([*enumerate(found)]) if each["dropped_turns"])
    assert sum(dropped(history.messages)) == 2 * sum(each["dropped_turns"] for each in found)
    assert dropped(history.messages) == sorted(dropped(history.messages), reverse=True)
    assert len(history.messages) == 8 and history.turns == [0, 2, 4, 6]
    assert "old turns were dropped" in found[last]["recomputed_reason"]


@pytest.mark.model
def test_answers_after_a_drop_are_those_of_the_messages_that_stay(tiny: Client) -> None:
    greedy = {"temp": 0, "n-predict": 24}
    with tiny.session("tiny", options={"ctx-size": 320} | greedy) as session:
        metadata = [session.chat(fact(n)).metadata for n in range(6)]
        history = session.history().messages
        assert any(each["dropped_turns"] for each in metadata)
        read = [x for x in history if not x.get("dropped")]
        assert len(read) < len(history)
    with tiny.session("tiny", options=greedy) as fresh:
        again = fresh.chat(read[:-1], options={"cache-prompt": False})
        assert again.metadata["input_tokens"] == metadata[-1]["input_tokens"]
    assert str(again) == read[-1]["content"]


@pytest.mark.model
def test_a_system_message_and_a_newest_turn_that_do_not_fit_are_refused(tiny: Client) -> None:
    with tiny.session("tiny", system="s" * 60, options=SMALL | {"n-predict": 4}) as session:
        session.chat("first")
        before = session.history()
        for text in ("x" * 120, "x" * 7000):
            with pytest.raises(PromptTooLong) as caught:
                session.chat(text)
            assert "overflow" in caught.value.hint
        assert session.history().messages == before.messages
        session.chat("second")


@pytest.mark.model
def test_calls_of_wasi_nn_and_whole_chats_are_refused_by_default(
    client: Client, daemon: RunningDaemon, tiny: Client
) -> None:
    with RawClient(daemon.socket) as raw:
        context = raw.context()
        raw.set_input(context, b"x" * 5000)
        with pytest.raises(PromptTooLong):
            raw.call("compute", context=context)
        with pytest.raises(PromptTooLong):
            raw.call("prompt_compute", context=raw.context(), prompt="x" * 5000)
    chat = [{"role": role, "content": "x" * 30} for role in ("user", "assistant") * 10]
    chat.append({"role": "user", "content": "last"})
    with tiny.session("tiny", options=SMALL) as session:
        with pytest.raises(PromptTooLong):
            session.chat(chat)
        reply = session.chat(chat, options={"overflow": "drop-turns", "n-predict": 4})
        assert reply.metadata["dropped_turns"] == 9
    with tiny.session("refusing", options=SMALL | {"n-predict": 30}) as session:
        with pytest.raises(PromptTooLong):
            facts(session, 9)
        assert session.chat(fact(9), options=SHIFT).metadata["dropped_tokens"]


def test_a_models_setting_holds_until_a_call_says_otherwise(client: Client) -> None:
    with client.session("cut", raw=True, options=SMALL | {"n-predict": 10}) as session:
        assert session.chat("y" * 5000).metadata["dropped_tokens"] > 3900
        with pytest.raises(PromptTooLong):
            session.chat("y" * 500, options={"overflow": "error"})


@pytest.mark.parametrize("size", [200, 5000, 300_000])
@pytest.mark.parametrize("options", [SHIFT, {"overflow": "truncate"}], ids=str)
def test_a_single_prompt_that_is_too_long_keeps_its_start_and_its_end(
    client: Client, daemon: RunningDaemon, options: dict[str, Any], size: int
) -> None:
    """Also if it has more bytes than any context holds, which are not all tokenized."""
    text = f"start {'é' * (size // 2)} end"
    options = options | SMALL | {"n-keep": 6, "n-predict": 40}
    with client.session("echo", raw=True, options=options) as session:
        reply = session.chat(text)
        assert str(reply).startswith("start") and reply.metadata["dropped_tokens"] > 0
    with RawClient(daemon.socket) as raw:
        context = raw.context()
        raw.call("set_options", context=context, options=options | {"n-predict": 20})
        raw.set_input(context, text.encode())
        raw.call("compute", context=context)
        assert raw.output(context).startswith(b"start")
        assert raw.metadata(context)["input_tokens"] < 160


@pytest.mark.model
@pytest.mark.parametrize("options", [SHIFT, {"overflow": "truncate"}], ids=str)
@pytest.mark.parametrize("size", [3000, 20_000])
def test_a_chat_goes_on_after_a_message_that_no_context_holds(
    tiny: Client, options: dict[str, Any], size: int
) -> None:
    with tiny.session("tiny", options=SMALL | options | {"n-predict": 8}) as session:
        assert session.chat("z" * size).metadata["dropped_tokens"] > 2000
        found = facts(session, 3)
    assert all(each["input_tokens"] < 160 and each["output_tokens"] for each in found)


@pytest.mark.model
@pytest.mark.parametrize("options", [{}, SHIFT, {"overflow": "truncate"}], ids=str)
def test_a_long_chat_goes_on_with_a_model_of_another_vocabulary(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Its contexts do not hold the chat, nor its last answer alone."""
    large, small = write_tiny("calls", tmp_path), write_tiny("llama", tmp_path)
    config = f"[models.m]\nfile = '{large}'\nctx-size = 1024\n"
    config = f"{ONE_THREAD}{config}[models.small]\nfile = '{small}'\nctx-size = 256\n"
    with (
        running_daemon(config) as daemon,
        Client(daemon.socket) as client,
        client.session("m", options=options | {"temp": 0, "ignore-eos": True}) as session,
    ):
        session.chat("begin", options={"n-predict": 400})
        client.swap("m", "small")
        found = facts(session, 3, **{"n-predict": 4})
    assert found[0]["dropped_tokens"] and all(each["input_tokens"] < 256 for each in found)


LAYERS: list[tuple[Options, Options, Options, tuple[str, bool]]] = [
    # [defaults], [models.NAME], session: overflow and ctx-shift in force
    ({"overflow": "shift"}, {"ctx-shift": False}, {}, ("auto", False)),
    ({"overflow": "shift"}, {"overflow": "drop-turns"}, {}, ("drop-turns", False)),
    ({"overflow": "shift"}, {}, {"ctx-shift": False}, ("auto", False)),
    ({"overflow": "error"}, {"ctx-shift": True}, {}, ("shift", True)),
    ({"overflow": "error"}, {"ctx-shift": False}, {}, ("error", False)),
    ({"ctx-shift": True}, {"overflow": "error"}, {}, ("error", False)),
    ({"ctx-shift": True}, {"ctx-shift": False}, {}, ("auto", False)),
    ({"ctx-shift": True}, {"overflow": "error"}, {"ctx-shift": True}, ("shift", True)),
    ({}, {"overflow": "drop-turns", "ctx-shift": True}, {}, ("drop-turns", True)),
    ({}, {"ctx-shift": True}, {"overflow": "truncate"}, ("truncate", False)),
]


def test_the_newer_one_of_overflow_and_ctx_shift_applies() -> None:
    for defaults, group in itertools.groupby(LAYERS, key=lambda row: row[0]):
        rows = list(group)
        lines = [f"{key} = {json.dumps(value)}" for key, value in defaults.items()]
        models = [echo_model(f"echo-{n}", **model) for n, (_, model, _, _) in enumerate(rows)]
        config = "\n".join(["[defaults]", *lines, *models])
        with running_daemon(config) as daemon, RawClient(daemon.socket) as raw:
            for number, (_, model, session, expected) in enumerate(rows):
                context = raw.context(f"echo-{number}")
                raw.call("set_options", context=context, options=session)
                values = {
                    p["name"]: p["value"]
                    for p in raw.call("parameters", context=context)["parameters"]
                }
                found = values["overflow"], values["ctx-shift"]
                assert found == expected, (defaults, model, session)


def test_a_text_to_embed_is_not_shortened(client: Client, daemon: RunningDaemon) -> None:
    for size in (600, 5000):
        with RawClient(daemon.socket) as raw:
            context = raw.context()
            options = {"embedding": True, "overflow": "shift"}
            raw.call("set_options", context=context, options=options)
            raw.set_input(context, b"x" * size)
            with pytest.raises(PromptTooLong, match=str(size)):
                raw.call("compute", context=context)


@pytest.mark.model
def test_run_inference_goes_on_with_wasi_nn_backends_defaults(
    tiny_daemon: RunningDaemon,
) -> None:
    with RawClient(tiny_daemon.socket) as raw:
        raw.call("init_backend", config="{}")
        context, found = raw.context("tiny", '{"ctx_size": 160, "n_predict": 20}'), []
        for number in range(30):
            tensor = {"data": fact(number).encode()}
            found.append(raw.call("run_inference", context=context, tensor=tensor)["metadata"])
    assert all(each["input_tokens"] < 160 for each in found)
    assert sum(each["dropped_tokens"] > 0 for each in found) > 5


def test_n_keep_above_the_context_is_adjusted_and_reported(client: Client) -> None:
    for n_keep in (1000, 157, 200):
        options = SMALL | SHIFT | {"n-keep": n_keep, "n-predict": 4}
        with client.session("echo", raw=True, options=options) as session:
            metadata = session.chat("z" * 300).metadata
            assert "n-keep" in metadata["adjusted"], n_keep
            assert metadata["input_tokens"] < 160
            assert metadata["dropped_tokens"] >= 300 - metadata["input_tokens"]
    with client.session("echo", raw=True, options=SMALL | {"n-keep": 156}) as session:
        assert "n-keep" not in session.chat("z").metadata["adjusted"]


@pytest.mark.model
def test_a_branch_and_a_rewind_across_a_drop(tiny: Client) -> None:
    options = SMALL | {"ctx-size": 320, "n-predict": 30}
    with tiny.session("tiny", options=options) as session:
        facts(session, 6)
        marked = dropped(session.history().messages)
        assert any(marked)
        [branch] = session.fork()
        with branch:
            assert branch.history().messages == session.history().messages
            branch.rewind(5)
            assert dropped(branch.history().messages) == [False, False]
            assert branch.chat("again").metadata["dropped_turns"] == 0
            assert [x["content"] for x in branch.history().messages][::2] == [fact(0), "again"]
        session.rewind(1)
        assert dropped(session.history().messages) == marked[:-2]
        session.chat(fact(5))
        assert len(session.history().messages) == 12
        assert session.chat(fact(6)).metadata["input_tokens"] < 320


@pytest.mark.model
def test_a_kill_across_a_drop_loses_nothing(tiny_config: str) -> None:
    options = SMALL | {"n-predict": 30}
    with running_daemon(tiny_config) as daemon:
        with (
            Client(daemon.socket) as client,
            client.session("tiny", session_id="diary", options=options) as session,
        ):
            facts(session, 4)
            before = session.history()
            assert any(dropped(before.messages))
        daemon.kill()
        daemon.start_again()
        with (
            Client(daemon.socket) as client,
            client.session("tiny", session_id="diary") as session,
        ):
            assert session.attached
            assert session.history().messages == before.messages
            assert session.history().turns == before.turns
            found = facts(session, 3)
            assert any(each["dropped_turns"] for each in found)
            assert len(session.history().messages) == 14


@pytest.mark.model
@pytest.mark.parametrize("options", [{}, SHIFT, {"overflow": "truncate"}], ids=str)
def test_a_turn_that_is_killed_after_a_drop_is_resumed(
    tiny_config: str, options: dict[str, Any]
) -> None:
    """The history that was shortened for the turn is in the journal before the turn begins."""
    with running_daemon(tiny_config) as daemon, Client(daemon.socket) as client:

        def stream_last(name: str, *, kill: bool) -> tuple[str, list[int]]:
            own = SMALL | options
            with client.session("tiny", session_id=name, options=own, resume=True) as session:
                facts(session, 2, **{"n-predict": 12})
                stream = session.stream(fact(2), options={"n-predict": 40})
                said = "".join(itertools.islice(stream, 5))
                if kill:
                    daemon.kill()
                    daemon.start_again()
                said += "".join(stream)
                assert stream.metadata["dropped_tokens"]
                assert not stream.metadata["shifts"], "a resumed answer would be another one"
                return said, list(stream.tokens)

        assert stream_last("whole", kill=False) == stream_last("killed", kill=True)
        messages = [client.history(session_id=name).messages for name in ("whole", "killed")]
        assert messages[0] == messages[1]


@pytest.mark.model
def test_a_quota_of_memory_deletes_dropped_messages_first(tiny_config: str) -> None:
    config = "[daemon]\nsession-bytes-user-max = 40000\n" + tiny_config
    with (
        running_daemon(config) as daemon,
        Client(daemon.socket) as client,
        client.session("tiny", options=SMALL | {"n-predict": 4}) as session,
    ):
        facts(session, 100)
        assert 2 <= len(session.history().messages) < 100


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    models = (
        f"[models.tiny]\nfile = '{path}'\n[models.refusing]\nfile = '{path}'\noverflow = 'error'\n"
    )
    return f"{ONE_THREAD}ctx-size = 1024\n{models}"


@pytest.fixture(scope="module")
def tiny_daemon(tiny_config: str) -> Iterator[RunningDaemon]:
    with running_daemon(tiny_config) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def tiny(tiny_daemon: RunningDaemon) -> Iterator[Client]:
    with Client(tiny_daemon.socket) as client:
        yield client


@pytest.mark.model
def test_a_long_chat_goes_on_on_smollm2(tmp_path: Path) -> None:
    config = f"{ONE_THREAD}[models.smollm2]\nfile = '{fast_smollm2()}'\nctx-size = 256\n"
    with (
        running_daemon(config) as daemon,
        Client(daemon.socket) as client,
        client.session("smollm2", system="Be brief.") as session,
    ):
        # Sampled at random, some answers are such that this small model goes on repeating them.
        found = facts(session, 14, **{"n-predict": 4, "temp": 0})
        assert sum(each["dropped_turns"] > 0 for each in found) > 1
        last = {"temp": 0, "n-predict": 12}
        assert "Paris" in session.chat("What is the capital of France?", options=last)
