"""OpenAI's responses: items, events, tools, and the response before as a session."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway
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
    config += echo_model("slow", step_ms=100)
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
        (CALL, len(CALL) - 20, [("function_call", "incomplete")]),
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
    tools: Any = [LOOK, {**MOVE, "parameters": {"type": "object", "properties": {}}}]
    named = [{"type": "function", "name": "move"}, {"type": "web_search"}]
    choice: Any = {"type": "allowed_tools", "mode": mode, "tools": named}
    done = api.responses.create(
        **{**GREEDY, "max_output_tokens": 100},
        input=QUESTION,
        tools=tools,
        tool_choice=choice,
    )
    assert done.tool_choice.model_dump(exclude_none=True) == choice
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
        ({"background": True, "store": False}, "store"),
        ({"conversation": "x"}, "conversation"),
        ({"truncation": "always"}, "truncation"),
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


def test_empty_instructions_are_none(api: openai.OpenAI) -> None:
    """Else an empty system message would come first, and be listed as an item of the input."""
    done = api.responses.create(**GREEDY, input=QUESTION, instructions="")
    plain = api.responses.create(**GREEDY, input=QUESTION)
    assert done.usage is not None and plain.usage is not None
    assert done.usage.input_tokens == plain.usage.input_tokens
    assert len(api.responses.input_items.list(done.id).data) == 1


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


def test_a_stored_response_is_returned_as_it_was(
    daemon: RunningDaemon, http: RunningGateway, api: openai.OpenAI
) -> None:
    requests: list[dict[str, Any]] = [
        {"input": "hello", "metadata": {"a": "b"}, "instructions": "Repeat.", "temperature": 0.5},
        {"input": f"so {CALL}", "tools": [LOOK], "tool_choice": "auto"},
        {"input": THOUGHT, "max_output_tokens": 20},
        {"input": "hi", "include": ["message.output_text.logprobs"], "service_tier": "flex"},
    ]
    for request in requests:
        for stream in (False, True):
            done: Any = api.responses.create(model="echo", stream=stream, **request)
            if stream:
                done = list(done)[-1].response
            read = api.responses.retrieve(done.id)
            for item in done.output:
                for part in item.content if item.type == "message" else ():
                    part.logprobs = []
            assert read == done and read.usage is not None
            assert api.responses.retrieve(done.id, include=["message.output_text.logprobs"]) == done
            with gateway(daemon) as other:  # the daemon has it
                assert web_get(other, done.id).json() == web_get(http, done.id).json()
            api.responses.delete(done.id)
            with pytest.raises(openai.NotFoundError):
                api.responses.retrieve(done.id)


def test_a_response_that_is_not_stored_or_not_there_is_not_found(api: openai.OpenAI) -> None:
    kept = api.responses.create(model="echo", input="a", store=False)
    for missing in (kept.id, f"resp_{'0' * 40}", "x", "input_tokens", "compact", "x" * 3000):
        calls: list[Any] = [api.responses.retrieve, api.responses.input_items.list]
        calls += [api.responses.cancel, api.responses.delete]
        for call in calls:
            with pytest.raises(openai.APIStatusError) as caught:
                call(missing)
            is_path = missing in ("input_tokens", "compact")
            wrong_method = is_path and call in (api.responses.retrieve, api.responses.delete)
            assert caught.value.status_code == (405 if wrong_method else 404)
            assert wrong_method or caught.value.param == "response_id"


def test_a_stored_response_cannot_be_streamed_or_cancelled(
    http: RunningGateway, api: openai.OpenAI
) -> None:
    done = api.responses.create(model="echo", input="a")
    with pytest.raises(openai.BadRequestError, match="in the background") as caught:
        api.responses.cancel(done.id)
    assert caught.value.code == "unsupported"
    for query, param in (("stream=true", "stream"), ("starting_after=1", "starting_after")):
        refused = web_get(http, f"{done.id}?{query}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert web_get(http, f"{done.id}?stream=false").json()["id"] == done.id
    assert web_get(http, f"{done.id}?nonsense=1").status_code == 400


def test_histories_are_not_compacted(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not compacted") as caught:
        api.responses.compact(model="echo", input="a")
    assert caught.value.code == "unsupported"


def test_a_response_of_another_caller_is_not_found(daemon: RunningDaemon, tmp_path: Path) -> None:
    keys, entries = [], ""
    for name in ("ada", "bob"):
        made = inferd("gateway", "--new-key", name)
        keys.append(made.stderr.split()[-1])
        entries += f'{made.stdout}user = ""\nlabel = "{name}"\n'
    (tmp_path / "keys.toml").write_text(entries)
    with gateway(daemon, "--keys", str(tmp_path / "keys.toml")) as running:
        ada, bob = (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) for key in keys
        )
        with ada, bob:
            done = ada.responses.create(model="echo", input="mine")
            assert ada.responses.retrieve(done.id).output_text == "mine"
            for call in (bob.responses.retrieve, bob.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    call(done.id)
            assert ada.responses.retrieve(done.id).output_text == "mine"


def test_the_items_of_an_input_are_listed(api: openai.OpenAI) -> None:
    first = api.responses.create(model="echo", input=CALL, tools=[LOOK], instructions="Look.")
    call: Any = first.output[0]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "a wall"}
    second = api.responses.create(
        model="echo", input=[result], tools=[LOOK], previous_response_id=first.id
    )
    listed = api.responses.input_items.list(second.id, order="asc")
    items: list[Any] = list(listed)
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert items[0].role == "user" and items[0].content[0].text == CALL
    assert (items[1].name, items[1].call_id) == ("look", call.call_id)
    assert (items[2].call_id, items[2].output) == (call.call_id, "a wall")
    assert [item.id for item in api.responses.input_items.list(second.id)] == [
        item.id for item in reversed(items)
    ]
    paged = api.responses.input_items.list(second.id, order="asc", limit=1)
    assert paged.has_more and [item.id for item in paged] == [item.id for item in items]
    rest = api.responses.input_items.list(second.id, order="asc", after=items[1].id)
    assert [item.id for item in rest] == [items[2].id]
    with pytest.raises(openai.NotFoundError):
        api.responses.input_items.list(second.id, after="x")
    with pytest.raises(openai.BadRequestError):
        api.responses.input_items.list(second.id, limit=101)
    again: Any = {"model": "echo", "input": [item.model_dump(exclude_none=True) for item in items]}
    assert api.responses.create(**again, tools=[LOOK]).output_text == "a wall"


def test_the_tokens_of_an_input_are_counted(api: openai.OpenAI) -> None:
    first = api.responses.create(**GREEDY, input=QUESTION, instructions="Be brief.")
    requests: list[dict[str, Any]] = [
        {"input": QUESTION},
        {"input": QUESTION, "instructions": "Be brief."},
        {"input": [{"role": "user", "content": QUESTION}], "tools": [LOOK]},
        {"input": "And of Italy?", "previous_response_id": first.id},
    ]
    for request in requests:
        counted = api.responses.input_tokens.count(model="smollm2", **request)
        done = api.responses.create(**GREEDY, **request)
        assert done.usage is not None and counted.object == "response.input_tokens"
        assert counted.input_tokens == done.usage.input_tokens
    before = api.responses.input_tokens.count(model="smollm2", previous_response_id=first.id)
    assert 0 < before.input_tokens < counted.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": f"resp_{'0' * 40}"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"tools": [{"type": "file_search"}]}, "tools.0"),
        ({"conversation": "x"}, "conversation"),
    ],
)
def test_a_wrong_field_of_a_count_is_named(
    api: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "echo", "input": "x"} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        api.post("/responses/input_tokens", body=body, cast_to=object)
    assert caught.value.param == param


def test_a_response_that_is_too_long_to_store_is_still_answered(api: openai.OpenAI) -> None:
    done = api.responses.create(
        model="echo", input="hello", instructions="x" * (300 << 10), max_output_tokens=5
    )
    assert done.output_text == "hello"
    with pytest.raises(openai.NotFoundError, match="is not stored whole"):
        api.responses.retrieve(done.id)


def test_a_response_under_way_cannot_be_read_before_its_end(api: openai.OpenAI) -> None:
    events = api.responses.create(model="slow", input="hello there", stream=True)
    created: Any = next(iter(events))
    with pytest.raises(openai.NotFoundError, match="is not stored whole"):
        api.responses.retrieve(created.response.id)
    last: Any = [*events][-1]
    assert api.responses.retrieve(created.response.id) == last.response


def test_responses_at_once_are_stored_each(api: openai.OpenAI) -> None:
    texts = [f"number {number}" for number in range(40)]
    with ThreadPoolExecutor(len(texts)) as pool:
        done = list(pool.map(lambda text: api.responses.create(model="echo", input=text), texts))
        read = list(pool.map(lambda each: api.responses.retrieve(each.id), done))
    assert read == done and [each.output_text for each in read] == texts


def web_get(running: RunningGateway, path: str) -> httpx.Response:
    return httpx.get(f"{running.url}/v1/responses/{path}", timeout=CALL_S_MAX)


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
