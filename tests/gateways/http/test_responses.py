"""OpenAI's responses: items, events, tools, and the response before as a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.models import ONE_THREAD, short_smollm2

CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}}
MOVE: Any = {"type": "function", "name": "move"}
ALLOWED: dict[str, Any] = {"type": "allowed_tools", "mode": "required", "tools": [LOOK]}
MCP_PLACE = "tool_choice.tools.0"
pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
MODELS = "[models.smollm2]\nslots = 4\nctx-size = 1024\n"
GREEDY: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_output_tokens": 24}
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / "smollm2.gguf").symlink_to(short_smollm2())
    config = ONE_THREAD + MODELS + echo_model("echo", tool_format="hermes")
    with running_daemon(config, models_dir=models) as running:
        yield running


def test_a_response_has_its_items_and_its_usage(api: openai.OpenAI) -> None:
    done = api.responses.create(model="echo", input="hello", metadata={"a": "b"})
    assert (done.output_text, done.status, done.metadata) == ("hello", "completed", {"a": "b"})
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == (7, 6)
    cut = api.responses.create(model="echo", input="hello", max_output_tokens=2)
    assert (cut.output_text, cut.status) == ("he", "incomplete")
    assert [item.status for item in cut.output if item.type == "message"] == ["incomplete"]
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


THOUGHT = "<think>because</think>hello"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "tokens", "items"),
    [
        ("hello", 2, [("message", "incomplete")]),
        ("hello", 100, [("message", "completed")]),
        (THOUGHT, 10, [("reasoning", "incomplete")]),
        (THOUGHT, len(THOUGHT) - 2, [("reasoning", "completed"), ("message", "incomplete")]),
        (CALL, len(CALL) - 20, [("message", "incomplete")]),
        (CALL, len(CALL), [("function_call", "completed")]),
        (f"so {CALL}", len(CALL) + 3, [("message", "completed"), ("function_call", "completed")]),
    ],
)
def test_the_item_that_was_cut_is_incomplete(
    api: openai.OpenAI, text: str, tokens: int, items: list[tuple[str, str]], stream: bool
) -> None:
    done: Any = api.responses.create(
        model="echo", input=text, tools=[LOOK], max_output_tokens=tokens, stream=stream
    )
    if stream:
        *events, last = done
        done = last.response
        shown = [each.item for each in events if each.type == "response.output_item.done"]
        assert [each.status for each in shown] == [status for _, status in items]
    assert [(each.type, each.status) for each in done.output] == items
    assert done.status == ("completed" if tokens == 100 else "incomplete")


def test_the_events_of_a_stream_make_the_response(api: openai.OpenAI) -> None:
    kinds, numbers, text = [], [], ""
    for event in api.responses.create(model="echo", input="hello", stream=True):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.completed":
            assert event.response.output_text == text == "hello"
    assert numbers == list(range(len(numbers)))
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_the_clients_own_stream_reads_it(api: openai.OpenAI) -> None:
    with api.responses.stream(model="echo", input=f"so {CALL}", tools=[LOOK]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    call: Any = final.output[1]
    assert (call.name, call.arguments) == ("look", '{"at": 1}')


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_functions_are_called(api: openai.OpenAI, mode: str) -> None:
    named = [{"type": "function", "name": "move"}, {"type": "web_search"}]
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": named}
    done = api.responses.create(
        **{**GREEDY, "max_output_tokens": 100},
        input=QUESTION,
        tools=[LOOK, {**MOVE, "parameters": {"type": "object", "properties": {}}}],
        tool_choice=choice,
    )
    assert done.tool_choice.model_dump(exclude_none=True) == choice  # type: ignore[union-attr]
    names = [item.name for item in done.output if item.type == "function_call"]
    assert set(names) == ({"move"} if mode == "required" else set())


def test_nothing_but_a_search_of_the_web_is_no_tool(api: openai.OpenAI) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    done = api.responses.create(model="echo", input=CALL, tools=[LOOK], tool_choice=choice)
    assert [item.type for item in done.output] == ["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_functions_may_have_a_namespace(api: openai.OpenAI, stream: bool) -> None:
    """As those of Codex, which also offers a search of the web and sends data of its own."""
    space = {"type": "namespace", "name": "eyes", "description": "Look.", "tools": [LOOK]}
    tools: list[Any] = [{"type": "web_search", "external_web_access": False}, space]
    done: Any = api.responses.create(
        model="echo", input=CALL, tools=tools, stream=stream, extra_body={"client_metadata": {}}
    )
    if stream:
        done = next(event for event in done if event.type == "response.completed").response
    [call] = done.output
    assert (call.name, call.namespace, call.arguments) == ("look", "eyes", '{"at": 1}')


def test_items_are_messages(api: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "nothing"},
    ]
    assert api.responses.create(model="echo", input=items).output_text == "nothing"
    again = api.responses.create(**GREEDY, instructions="Be brief.", input=items[1:])
    assert again.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0",
        ),
        ({"input": [{"role": "critic", "content": "x"}]}, "input.0.role"),
        ({"tools": [{"type": "file_search"}]}, "tools.0"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": "y"}]}, "tools.0.tools"),
        ({"tools": [{"type": "namespace", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"tools": [LOOK], "tool_choice": {**ALLOWED, "mode": "none"}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {**ALLOWED, "tools": []}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {**ALLOWED, "tools": [{"type": "mcp"}]}}, MCP_PLACE),
        ({"tools": [LOOK], "tool_choice": {**ALLOWED, "tools": [MOVE]}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"previous_response_id": f"resp_{'0' * 40}"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_a_refusal_names_the_field(
    api: openai.OpenAI, client: Client, fields: dict[str, Any], param: str
) -> None:
    before = len(client.sessions(dormant=True))
    with pytest.raises(openai.BadRequestError) as caught:
        api.post("/responses", body={"model": "echo", "input": "x"} | fields, cast_to=object)
    assert caught.value.param == param
    assert len(client.sessions(dormant=True)) == before


def test_a_response_continues_the_one_before(api: openai.OpenAI) -> None:
    instructions = "You are brief."
    first = api.responses.create(**GREEDY, input=QUESTION, instructions=instructions)
    branches = [
        api.responses.create(
            **GREEDY, input=text, previous_response_id=first.id, instructions=given
        )
        for text, given in (("And of Italy?", instructions), ("And of Spain?", None))
    ]
    assert first.usage is not None
    for branch in branches:
        assert branch.usage is not None and branch.previous_response_id == first.id
        before = first.usage.input_tokens + first.usage.output_tokens - 1
        assert branch.usage.input_tokens > before
        assert branch.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    third = api.responses.create(**GREEDY, input="Why?", previous_response_id=branches[0].id)
    assert third.usage is not None and branches[0].usage is not None
    assert third.usage.input_tokens > branches[0].usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(
            **GREEDY, input="x", previous_response_id=first.id, instructions="Be long."
        )
    assert caught.value.param == "instructions"


def test_the_result_of_a_call_continues_a_response(api: openai.OpenAI) -> None:
    first = api.responses.create(model="echo", input=CALL, tools=[LOOK])
    [call] = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "a wall"}
    second = api.responses.create(
        model="echo", input=[result], tools=[LOOK], previous_response_id=first.id
    )
    assert second.output_text == "a wall"


def test_only_stored_responses_leave_a_session(api: openai.OpenAI, client: Client) -> None:
    def sessions() -> set[Any]:
        return {each["session_id"] for each in client.sessions(dormant=True)}

    before = sessions()
    kept = api.responses.create(model="echo", input="a")
    assert sessions() - before == {kept.id}
    for stream in (False, True):
        done: Any = api.responses.create(
            model="echo", input="b", store=False, stream=stream, previous_response_id=kept.id
        )
        if stream:
            list(done)
    assert sessions() - before == {kept.id}
    api.responses.delete(kept.id)
    assert sessions() == before
    for missing in (kept.id, "x", "x" * 3000):
        with pytest.raises(openai.NotFoundError) as caught:
            api.responses.delete(missing)
        assert caught.value.param == "response_id"


def test_an_answer_follows_its_schema(api: openai.OpenAI) -> None:
    form: Any = {
        "type": "json_schema",
        "name": "size",
        "schema": {"enum": ["small", "large"]},
        "strict": True,
    }
    done = api.responses.create(**GREEDY, input=QUESTION, text={"format": form})
    assert done.output_text in ('"small"', '"large"')


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_included(api: openai.OpenAI, stream: bool) -> None:
    include: Any = ["message.output_text.logprobs"]
    done: Any = api.responses.create(model="echo", input="hi", include=include, stream=stream)
    if stream:
        done = next(event for event in done if event.type == "response.completed").response
    assert [each.token for each in done.output[0].content[0].logprobs] == ["h", "i"]
