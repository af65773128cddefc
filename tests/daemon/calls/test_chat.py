"""Chats over a real socket: templates and their arguments, tools, separate reasoning."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import inferd
from inferd.backends.errors import InvalidArgument, LoadFailed, TooLarge
from inferd.backends.texts import bytes_of
from inferd.cli.inference.answering import stats_text
from inferd.daemon.calls.arguments import RAW_BYTES_MAX, TEXT_PART_BYTES, decode_text
from inferd.ipc.chat_messages import (
    MESSAGES_MAX,
    ROLES,
    TOOL_CALLS_MAX,
    checked_messages,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd as command
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "now", "arguments": {}}}
TEMPLATE = """\
{%- if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}
{%- for m in messages %}<{{ m.role[0] }}>{{ m.content if loop.last or not forgets else 'x' }}
{%- for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %}|{% endfor %}
{%- if add_generation_prompt %}<a>{{ '<think>' if thinks }}{% endif %}
"""
STRICT = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}
"""
THOUGHT = "<think>hm, é</think>\nyes"
GREEDY = {"temp": 0, "n-predict": 4}
SPLIT = {"reasoning-format": "deepseek"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("chat")
    write_tiny("llama", folder)
    write_tiny("bare", folder)
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "strict.jinja").write_text(STRICT)
    (folder / "bad.jinja").write_text("one\n{% if %}")
    config = """
[defaults]
ctx-size = 512
chat-template = "everybody's"
[models.tiny]
file = "tiny-llama.gguf"
chat-template-file = "template.jinja"
[models.other]
file = "tiny-llama.gguf"
[models.strict]
file = "tiny-llama.gguf"
chat-template-file = "strict.jinja"
[models.bare]
file = "tiny-bare.gguf"
chat-template = ""
[models.bad]
file = "tiny-llama.gguf"
chat-template-file = "bad.jinja"
"""
    with running_daemon(config, models_dir=folder) as running:
        yield running


# Messages


def test_a_message_that_calls_tools_needs_no_content() -> None:
    called: dict[str, Any] = {"role": "assistant", "tool_calls": [CALL]}
    given = [*USER, called, {"role": "tool", "content": "1"}]
    assert checked_messages(given) == [
        *USER,
        {"role": "assistant", "tool_calls": [CALL], "content": ""},
        {"role": "tool", "content": "1"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "", "content": "x"},
        {"role": "User", "content": "x"},
        {"role": "critic", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "tool_calls": CALL},
        {"role": "assistant", "tool_calls": [1]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]},
        {"role": "assistant", "tool_calls": [CALL] * (TOOL_CALLS_MAX + 1)},
    ],
    ids=lambda m: json.dumps(m)[:60],
)
def test_a_message_of_another_shape_is_refused_with_its_place(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"^messages\.1\.(role|content|tool_calls)") as caught:
        checked_messages([*USER, message])
    assert caught.value.hint
    assert caught.value.message.startswith(f"{caught.value.data['param']}: ")


def test_messages_are_bounded() -> None:
    assert checked_messages(USER * MESSAGES_MAX)
    for messages in ([], USER * (MESSAGES_MAX + 1)):
        with pytest.raises(InvalidArgument):
            checked_messages(messages)
    assert checked_messages([{"role": "assistant", "tool_calls": [CALL] * TOOL_CALLS_MAX}])
    assert [checked_messages([{"role": role, "content": ""}]) for role in ROLES]


def test_parts_of_text_are_one_content(client: inferd.Client) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    with client.session("echo") as session:
        assert session.chat([{"role": "user", "content": parts}]) == "one\ntwo"
    graph = client.load_by_name("tiny")
    assert client.apply_template(graph, [{"role": "user", "content": parts}]) == "<u>one\ntwo|<a>"


def test_one_turn_of_a_model_takes_one_line(client: inferd.Client) -> None:
    reply = client.chat("echo", "hi", options={"n-predict": 9}, priority="high")
    assert (reply, reply.metadata["session_id"]) == ("hi", None)
    assert client.sessions() == []
    with pytest.raises(inferd.ModelNotFound):
        client.chat("echo2", "hi")


# Templates


def test_a_template_gets_the_calls_arguments_and_its_tokens_are_counted(
    client: inferd.Client,
) -> None:
    graph = client.load_by_name("tiny")
    text = client.apply_template(graph, USER)
    assert text == "<u>Hi|<a>"
    assert text.tokens == len(client.tokenize(graph, str(text), special=True, bos=True))
    assert client.apply_template(graph, USER, add_generation_prompt=False) == "<u>Hi|"
    assert client.apply_template(graph, USER, tools=[TOOL]) == "[now]<u>Hi|<a>"
    assert client.apply_template(graph, USER, arguments={"thinks": True}) == "<u>Hi|<a><think>"
    calls: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": [CALL]}]
    assert client.apply_template(graph, [*USER, *calls]) == "<u>Hi|<a>(now)|<a>"


def test_a_graphs_values_hold_where_the_call_has_none(client: inferd.Client) -> None:
    config = {"tools": [TOOL], "chat-template-kwargs": {"thinks": True}}
    graph = client.load_by_name_with_config("tiny", config)
    assert client.apply_template(graph, USER) == "[now]<u>Hi|<a><think>"


def test_reserved_template_arguments_are_refused(client: inferd.Client) -> None:
    graph = client.load_by_name("tiny")
    with pytest.raises(InvalidArgument, match=r"field `function`"):
        client.apply_template(graph, USER, tools=[{"type": "function"}])
    with pytest.raises(InvalidArgument, match="is always set"):
        client.apply_template(graph, USER, arguments={"messages": 1})


def test_an_invalid_configured_template_fails_the_load(
    client: inferd.Client,
) -> None:
    with pytest.raises(LoadFailed, match=r"bad\.jinja, line 2"):
        client.load_by_name("bad")


def test_a_models_own_template_precedes_the_default(client: inferd.Client) -> None:
    assert client.apply_template(client.load_by_name("other"), USER) == "everybody's"
    assert client.apply_template(client.load_by_name("tiny"), USER) == "<u>Hi|<a>"


def test_a_clients_template_is_not_the_operators(client: inferd.Client) -> None:
    graph = client.load_by_name_with_config("tiny", {"chat-template": "mine"})
    assert "chat-template" in graph.not_applied
    assert client.apply_template(graph, USER) == "<u>Hi|<a>"


def test_tools_of_the_session_and_of_the_turn_reach_the_prompt(client: inferd.Client) -> None:
    plain = {"temp": 0, "n-predict": 1}
    sizes = {}
    for name, own, turn in (
        ("none", {}, {}),
        ("session", {"tools": [TOOL]}, {}),
        ("turn", {}, {"tools": [TOOL]}),
        ("neither", {"tools": [TOOL]}, {"tools": []}),
    ):
        with client.session("tiny", options=plain | own) as session:
            sizes[name] = session.chat(USER, options=turn).metadata["input_tokens"]

    assert sizes["session"] == sizes["turn"] == sizes["none"] + len("[now]")
    assert sizes["neither"] == sizes["none"]


def test_tools_that_are_not_in_the_prompt_are_reported(client: inferd.Client) -> None:
    def adjusted(model: str, *, raw: bool = False) -> str:
        with client.session(model, options=GREEDY | {"tools": [TOOL]}) as session:
            found = session.chat("Hi", raw=raw).metadata["adjusted"].get("tools", "")
            (shown,) = (p["adjusted"] for p in session.parameters() if p["name"] == "tools")
            assert shown == found
            session.set_options({"tools": []})
            assert "tools" not in session.chat("Hi", raw=raw).metadata["adjusted"]
        return str(found)

    assert adjusted("tiny") == ""
    assert adjusted("other") == "the model's chat template does not use tools"
    assert adjusted("echo") == "the model echo has no chat template"
    assert adjusted("tiny", raw=True) == "raw text has no tools: send messages"


def test_a_model_without_a_template_chats_and_says_so(client: inferd.Client) -> None:
    with client.session("bare", options=GREEDY) as session:
        answer = session.chat("Hi")
        assert "`role: text`" in answer.metadata["adjusted"]["chat-template"]
        (shown,) = (p for p in session.parameters() if p["name"] == "chat-template")
        assert shown["adjusted"] == answer.metadata["adjusted"]["chat-template"]
        again = session.chat("Hi again")
        assert again.metadata["recomputed_tokens"] <= len(answer)
        assert "chat-template" not in session.chat("Hi", raw=True).metadata["adjusted"]
    graph = client.load_by_name("bare")
    assert client.apply_template(graph, USER) == "user: Hi\nassistant:"


def test_a_template_without_system_messages_gets_their_text_in_the_users(
    client: inferd.Client, daemon: RunningDaemon
) -> None:
    with client.session("strict", options=GREEDY) as session:
        assert "chat-template" not in session.chat("Hi").metadata["adjusted"]
    with client.session("strict", options=GREEDY, system="Be brief.") as session:
        answer = session.chat("Hi")
        assert "refuses system messages" in answer.metadata["adjusted"]["chat-template"]
    graph = client.load_by_name("strict")
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    assert client.apply_template(graph, messages) == "<u>Be brief.\n\nHi<a>"
    info = client.show("strict")["info"]
    assert info is not None and "refuses system messages" in info["chat_notes"]["system"]
    shown = command("show", "strict", socket=daemon.socket).stdout
    assert "refuses system messages" in shown


def test_the_description_of_a_graph_has_the_special_tokens(client: inferd.Client) -> None:
    tokens = client.load("tiny").special_tokens
    assert tokens["bos"] == {"id": 1, "text": "<s>"} and "eot" not in tokens
    info = client.show("tiny")["info"]
    assert info is not None and info["special_tokens"] == tokens
    assert client.load("echo").special_tokens == {}


def test_a_language_model_takes_one_prompt_of_named_tensors(client: inferd.Client) -> None:
    context = client.init_execution_context(client.load("tiny"))
    settings = ("config", '{"n-predict":2}')
    done = client.compute(context, [settings, ("prompt", "Hi")])
    assert [name for name, _ in done.outputs] == ["output"]
    assert done.metadata["output_tokens"] == 2
    numbers = inferd.Tensor(data=b"1", type="fp32")
    with pytest.raises(InvalidArgument, match="'prompt', 'config'") as caught:
        client.compute(context, [("prompt", "Hi"), ("config", numbers), settings])
    assert caught.value.data["prompts"] == ["prompt", "config"]


def test_echo_checks_what_it_does_not_follow(client: inferd.Client) -> None:
    for options in ({"grammar": "nonsense"}, {"json-schema": {"type": "nonsense"}}):
        with pytest.raises(InvalidArgument):
            client.chat("echo", "x", options=options)
    for options in ({"grammar": 'root ::= "y"'}, {"json-schema": {"type": "object"}}):
        reply = client.chat("echo", "x", options=options)
        (name,) = options
        assert (reply, list(reply.metadata["adjusted"])) == ("x", [name])


RAW = b"a\xff\xfe\xc3\xa9 \xf4\x8f\xb9\xbf cut \xc3"


def test_bytes_that_are_not_utf8_reach_the_model_by_every_call(client: inferd.Client) -> None:
    graph = client.load_by_name("tiny")
    one, other = (client.init_execution_context(graph) for _ in range(2))
    text = client.apply_template(graph, [{"role": "user", "content": "RAW"}])
    client.set_input(one, 0, text.encode().replace(b"RAW", RAW))
    client.set_input(one, 1, json.dumps(GREEDY))
    client.compute(one)
    by_set_input = json.loads(client.get_output(one, 1))
    by_inference = client.run_inference(other, RAW, config=GREEDY).metadata
    assert by_set_input["input_tokens"] == by_inference["input_tokens"]
    assert by_inference["cached_tokens"] >= by_inference["input_tokens"] - 1, "the same tokens"
    assert client.run_inference(other, "é", config=GREEDY).metadata["recomputed_tokens"] == 0


def test_a_long_text_is_decoded_in_parts() -> None:
    before = b"x" * (TEXT_PART_BYTES - 1)
    assert asyncio.run(decode_text(before + "é".encode())) == before.decode() + "é"
    assert asyncio.run(decode_text(b"")) == ""
    for end in (b"\xc3", b"\xc3x", b"\xc3\xa9\xff"):
        assert bytes_of(asyncio.run(decode_text(before + end))) == before + end


def test_the_number_of_bytes_that_are_not_utf8_is_limited() -> None:
    raw = b"\xff" * RAW_BYTES_MAX
    assert bytes_of(asyncio.run(decode_text(raw))) == raw
    with pytest.raises(TooLarge, match="are not UTF-8"):
        asyncio.run(decode_text(raw + b"\xff"))


def test_a_conversation_by_roles_computes_only_what_is_new(client: inferd.Client) -> None:
    with client.session("tiny", options=GREEDY) as session:
        first = session.chat([{"role": "system", "content": "s"}, *USER])
        second = session.chat([{"role": "tool", "content": "1"}, *USER])

    history = first.metadata["input_tokens"] + first.metadata["output_tokens"]
    assert second.metadata["recomputed_tokens"] == 0
    assert second.metadata["recomputed_reason"] == ""
    assert second.metadata["cached_tokens"] >= history - 2


def test_tokens_that_a_template_invalidates_are_reported(client: inferd.Client) -> None:
    options = GREEDY | {"chat-template-kwargs": {"forgets": True}}
    with client.session("tiny", options=options) as session:
        session.chat(USER)
        second = session.chat(USER)
        session.set_options({"chat-template-kwargs": {}})
        third = session.chat(USER)

    assert second.metadata["recomputed_tokens"] > 0
    assert "the chat template changes earlier text" in second.metadata["recomputed_reason"]
    assert third.metadata["recomputed_reason"].startswith("tools or chat-template-kwargs")


def test_metrics_of_a_turn_have_the_tokens_computed_again() -> None:
    turn = {"input_tokens": 9, "cached_tokens": 2}
    assert "9 tokens (2 cached)," in stats_text(turn)
    again = turn | {"recomputed_tokens": 5, "recomputed_reason": "tools changed"}
    expected = "(2 cached; 5 of the history recomputed: tools changed),"
    assert expected in stats_text(again)


def test_the_command_shows_the_prompt(
    daemon: RunningDaemon, client: inferd.Client, tmp_path: Path
) -> None:
    messages, tools = tmp_path / "messages.json", tmp_path / "tools.json"
    messages.write_text(json.dumps(USER))
    tools.write_text(json.dumps([TOOL]))
    shown = command(
        *("template", "tiny", "ho", "--system", "s", "--messages", str(messages)),
        *("--tools", str(tools), "--argument", "thinks=true", "--json"),
        socket=daemon.socket,
    )
    assert json.loads(shown.stdout)["text"] == "[now]<s>s|<u>Hi|<u>ho|<a><think>"
    plain = command("template", "tiny", "Hi", "--no-answer", socket=daemon.socket)
    text = client.apply_template(client.load_by_name("tiny"), USER, add_generation_prompt=False)
    assert (plain.stdout, plain.stderr) == ("<u>Hi|\n", f"{text.tokens} tokens\n")


@pytest.mark.parametrize("text", [None, "{", '{"a":1}', "[1]"])
def test_the_command_reports_errors_in_a_file(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "messages.json"
    if text is not None:
        file.write_text(text)
    refused = command("template", "tiny", "--messages", str(file))
    assert refused.exit_code == 2 and "messages.json" in refused.stderr


# Reasoning


def test_reasoning_is_separate_in_streams_and_whole_answers(client: inferd.Client) -> None:
    with client.session("echo", options=SPLIT) as session:
        stream = session.stream(THOUGHT)
        pieces = [p for p in stream if isinstance(p, inferd.Piece)]
        whole = session.chat(THOUGHT)

    assert "".join(pieces) == str(whole) == "\nyes"
    assert "".join(p.reasoning for p in pieces) == stream.reasoning == whole.reasoning == "hm, é"
    assert all(p or p.reasoning for p in pieces)


def test_the_command_writes_reasoning_beside_the_answer(daemon: RunningDaemon) -> None:
    words = ("run", "echo", THOUGHT, "-o", "reasoning-format=deepseek")
    plain = command(*words, socket=daemon.socket)
    assert (plain.stdout, plain.stderr) == ("\nyes\n", "hm, é")
    lines = [
        json.loads(x)
        for x in command(*words, "--json", socket=daemon.socket).stdout.split("\n")
        if x
    ]
    assert "".join(x.get("reasoning", "") for x in lines) == "hm, é"
    assert "".join(x.get("text", "") for x in lines) == "\nyes"


def test_reasoning_that_is_never_closed_is_all_reasoning(client: inferd.Client) -> None:
    with client.session("echo", options=SPLIT) as session:
        stream = session.stream("<think>hm </thi")
        assert "".join(stream) == ""
        assert stream.reasoning == "hm </thi"


def test_without_the_format_an_answer_is_unchanged(client: inferd.Client) -> None:
    with client.session("echo") as session:
        reply = session.chat(THOUGHT)
        answer = session.chat(THOUGHT, options=SPLIT)
    assert (str(reply), reply.reasoning) == (THOUGHT, "")
    assert (str(answer), answer.reasoning) == ("\nyes", "hm, é")


def test_an_answer_to_a_prompt_that_opened_the_block_begins_inside_it(
    client: inferd.Client,
) -> None:
    options = GREEDY | SPLIT | {"chat-template-kwargs": {"thinks": True}}
    with client.session("tiny", options=options) as session:
        reply = session.chat(USER)
    assert reply == "" and reply.reasoning


def test_a_guest_of_wasi_nn_backend_gets_reasoning_separately_too(client: inferd.Client) -> None:
    context = client.init_execution_context(client.load_by_name("echo"))
    reply = client.run_inference(context, THOUGHT, config=SPLIT)
    assert (str(reply), reply.reasoning) == ("\nyes", "hm, é")


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("read", [3, 11, 12, 15, 18, 22, 25])
def test_a_turn_is_resumed_from_the_parts_that_were_read(
    daemon: RunningDaemon, read: int, ended: bool
) -> None:
    """The connection ends after some events; the reader resumes from them, also if the turn has
    ended.
    """
    with RawClient(daemon.socket) as raw:
        graph = raw.call("load_by_name", name="echo")["graph"]
        named = {"graph": graph, "session_id": f"thought-{read}-{ended}"}
        context = raw.call("init_execution_context_with_session_id", **named)["context"]
        credit = 100 if ended else read
        turn = raw.start_request(
            "stream", context=context, prompt=THOUGHT, credit=credit, options=SPLIT
        )
        has: dict[str, Any] = {"tokens": [], "text": b"", "reasoning": b""}
        for _ in range(read):
            event = raw.read_message()[2]
            has = {key: value + event.get(key, type(value)()) for key, value in has.items()}
        if ended:
            raw.wait_result(turn)
    with RawClient(daemon.socket) as raw:
        graph = raw.call("load_by_name", name="echo")["graph"]
        named["graph"] = graph
        context = raw.call("init_execution_context_with_session_id", **named)["context"]
        raw.start_request("resume", context=context, **has)
        text, reasoning = has["text"], has["reasoning"]
        while (frame := raw.read_message())[0] == 4:
            text += frame[2].get("text", b"")
            reasoning += frame[2].get("reasoning", b"")
    assert frame[0] == 2, frame
    text += frame[2].get("text", b"")
    reasoning += frame[2].get("reasoning", b"")
    assert (text.decode(), reasoning.decode()) == ("\nyes", "hm, é")
