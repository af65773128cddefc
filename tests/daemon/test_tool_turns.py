"""Turns with tool calls on models: every form of a chat template, and the KV state that is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

import inferd
from inferd.testing import RunningDaemon, running_daemon
from tests.models import ONE_THREAD, fast_smollm2, short_smollm2
from tests.raw import RawClient
from tests.repetitions import repetitions
from tests.tiny_gguf import CONTROL, write_tiny

pytestmark = pytest.mark.model
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
USER = "What is two and two?"
MESSAGES = """\
{%- if tools %}<|im_start|>system
Functions: {{ tools | map(attribute="function.name") | join(", ") }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}CALL{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
START{% endif %}
"""
"""A minimal template, which names the tools without their schemas: prompts are short, and the same
for strict and other tools. CALL is a call in the form of a model, START what begins each answer.
"""
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
JSON_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
FORMS = {
    "hermes": (f"<tool_call>\n{JSON_CALL}\n</tool_call>", "", HERMES),
    "mistral": (
        f"[TOOL_CALLS][{JSON_CALL}]", "", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    ),
    "mistral-args": (
        "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
        "",
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
    ),
    "llama": (
        JSON_CALL.replace("arguments", "parameters", 1) + "{# <|python_tag|> #}",
        "",
        '{"name": "add", "parameters": {"a": 1}}',
    ),
    "functionary": (
        ">>>{{ f.name }}\n{{ f.arguments }}{# >>>all #}", ">>>", 'add\n{"a":  1}'
    ),
    "function-tags": (
        "<function={{ f.name }}>{{ f.arguments | tojson }}</function>",
        "",
        '<function=add>{"a": 1}</function>',
    ),
}  # fmt: skip
"""By the form: a template's call, its START, and an answer."""
SHOWN = {"mistral": "derived", "plain": "json"}
"""Names in the metadata: in this template, unlike in Mistral's own, a list has one call."""
CALLS_TEMPLATE = """\
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]
{%- else %}{{ " " ~ m.content if not m.tool_calls }}
{%- for call in m.tool_calls or [] %}[TOOL_CALLS][{"name": "{{ call.function.name }}", "arguments":
{{- call.function.arguments | tojson }}, "id": "{{ call.id }}"}]{% endfor %}</s>{% endif %}
{%- endfor %}{# tools #}
"""


EACH = {"jump-forward": False}
"""Has each token computed; forced ones at the end of a turn would be left to the next turn."""


def grammar_of(answer: str) -> str:
    """Return the grammar of one text, which a model without training for tools would not write."""
    return f"root ::= {json.dumps(answer)}"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("tools")
    config = [ONE_THREAD, "ctx-size = 512", "slots = 1"]
    for form, (call, start, _) in FORMS.items():
        template = MESSAGES.replace("CALL", call).replace("START", start)
        (folder / f"{form}.jinja").write_text(template)
        for name, file in ((form, short_smollm2()), (f"whole-{form}", fast_smollm2())):
            config += [f"[models.{name}]", f'file = "{file}"']
            config += [f'chat-template-file = "{folder / form}.jinja"']
    config += ["[models.plain]", f'file = "{short_smollm2()}"']
    (folder / "calls.jinja").write_text(CALLS_TEMPLATE)
    config += ["[models.calls]", f'file = "{write_tiny("calls", folder)}"']
    config += [f'chat-template-file = "{folder}/calls.jinja"']
    with running_daemon("\n".join(config)) as running:
        yield running


def result_of(reply: inferd.Reply) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": str(call.values["a"] + 1)}
        for call in reply.tool_calls
    ]


def assert_kept(first: inferd.Reply, second: inferd.Reply) -> None:
    """All tokens of the first turn were in the KV state, except the last ones."""
    history = first.metadata["input_tokens"] + first.metadata["output_tokens"]
    assert second.metadata["recomputed_reason"] == ""
    assert second.metadata["recomputed_tokens"] == 0
    assert history - 3 <= second.metadata["cached_tokens"] <= history
    assert second.metadata["input_tokens"] > history


@pytest.mark.parametrize("form", FORMS)
def test_a_call_and_its_result_compute_only_what_is_new(client: inferd.Client, form: str) -> None:
    answer = FORMS[form][2]
    options = {"tools": TOOLS, "temp": 0, "n-predict": 40} | EACH
    with client.session(form, options=options) as session:
        first = session.chat(USER, options={"grammar": grammar_of(answer)})
        [call] = first.tool_calls
        assert (str(first), call.name, call.values) == ("", "add", {"a": 1})
        assert first.metadata["tool_format"] == SHOWN.get(form, form)
        second = session.chat(result_of(first), options={"grammar": grammar_of(answer)})
        assert_kept(first, second)
        assert second.tool_calls[0].id != call.id
        assert_kept(second, session.chat(result_of(second), options={"n-predict": 4}))


def test_the_name_of_a_control_token_reaches_the_parser(client: inferd.Client) -> None:
    """The template adds an id to the call: the tokens stay nevertheless."""
    rest = '[{"name":"add","arguments":{"a":1}}]'
    options = {"tools": TOOLS, "grammar": f"root ::= <[{CONTROL}]> {json.dumps(rest)}"} | EACH
    with client.session("calls", options=options) as session:
        first = session.chat("hi")
        stream = session.stream(result_of(first))
        text = "".join(stream)
        assert stream.tool_calls[0].values == {"a": 1} and text == ""
        assert stream.raw_text == f"[TOOL_CALLS]{rest}"
        assert_kept(first, inferd.Reply("", stream.metadata))
        session.set_options({"tools": []})
        plain = session.chat("hi")
    assert first.tool_calls[0].values == {"a": 1} and str(first) == ""
    assert (str(plain), plain.tool_calls) == (rest, []), "without tools its name is hidden"


def test_a_parked_turn_has_the_same_calls(daemon: RunningDaemon, client: inferd.Client) -> None:
    options = {"tools": TOOLS, "temp": 0, "seed": 1, "grammar": grammar_of(HERMES)} | EACH
    prompt = "What is three and three?"
    with client.session("hermes", options=options) as session:
        expected = session.chat(prompt)
    with RawClient(daemon.socket) as raw:
        context = raw.context("hermes", json.dumps(options))
        turn = raw.start_request("stream", context=context, prompt=prompt, credit=2)
        while not any("tokens" in event[2] for event in raw.events):
            raw.events.append(raw.read_message())
        other = client.chat("hermes", prompt, options=options)  # takes the only slot
        raw.write([5, turn, 100])
        done = raw.wait_result(turn)
        second = raw.call("chat", context=context, messages=result_of(expected))
    calls: dict[str, str] = {}
    for part in (p for e in (*raw.events, [4, turn, done]) for p in e[2].get("tool_calls", ())):
        key = part.get("id") or next(reversed(calls))
        calls[key] = calls.get(key, "") + part.get("arguments", "")
    assert done["metadata"]["parks"] >= 1
    assert calls == {call.id: call.arguments for call in expected.tool_calls}
    assert other.tool_calls == expected.tool_calls
    assert_kept(expected, inferd.Reply("", second["metadata"]))


NARROW: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "kind": {"enum": ["x", "y"]}},
    "required": ["a", "kind"],
    "additionalProperties": False,
}


def example(form: str, number: int) -> list[dict[str, Any]]:
    """Return a question with its call, the result and the answer."""
    arguments = {"a": number}
    text = form == "functionary"  # its template writes them as they are
    function = {"name": "add", "arguments": json.dumps(arguments) if text else arguments}
    call = {"id": f"example{number:02}", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"What is {number} and {number}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": str(2 * number)},
        {"role": "assistant", "content": str(2 * number)},
    ]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "llama"])
def test_a_strict_call_that_the_model_chooses_fits_the_schema(
    client: inferd.Client, form: str
) -> None:
    """The model follows the examples; their arguments do not fit. (A call in the form `llama` has
    no mark that could start a grammar.)
    """
    examples = [message for number in (1, 2) for message in example(form, number)]
    prompt = [*examples, {"role": "user", "content": "What is 4 and 4?"}]
    for strict in (True, False):
        function = {"name": "add", "parameters": NARROW, "strict": strict}
        options = {"tools": [{"type": "function", "function": function}], "temp": 0}
        said = client.chat(f"whole-{form}", prompt, options=options | {"n-predict": 60})
        call = said.tool_calls[0]
        assert call.name == "add" and call.values["a"] == 4
        assert jsonschema.Draft202012Validator(NARROW).is_valid(call.values) == strict
        assert bool(said.metadata["forced_tokens"]) == strict


@pytest.mark.parametrize("form", FORMS)
def test_only_an_allowed_function_is_called(client: inferd.Client, form: str) -> None:
    """The examples call `add`; only `sub` is allowed. (The forms `llama` and `functionary` have no
    mark that all calls share: a call of another function stays text.)
    """
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
    examples = [message for number in (1, 2) for message in example(form, number)]
    prompt = [*examples, {"role": "user", "content": "What is 4 and 4?"}]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools[1:]}}
        options = {"tools": tools, "tool_choice": choice, "temp": 0, "n-predict": 60}
        said = client.chat(f"whole-{form}", prompt, options=options)
        names = {call.name for call in said.tool_calls}
        as_text = mode == "auto" and form in ("llama", "functionary")
        assert names == (set() if as_text else {"sub"})
        assert ("add" in str(said)) == as_text
    free = client.chat(f"whole-{form}", prompt, options=options | {"tool_choice": "auto"})
    assert {call.name for call in free.tool_calls} == {"add"}


@pytest.mark.parametrize("form", [*FORMS, "plain"])
def test_a_required_call_fits_the_schema(client: inferd.Client, form: str) -> None:
    schema = NARROW
    other = {"type": "function", "function": {"name": "sub", "parameters": schema}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}, other]
    named = {"type": "function", "function": {"name": "sub"}}
    options = {"tools": tools, "n-predict": 60, "temp": 0.8, "parallel-tool-calls": False}
    for seed, choice in enumerate(("required", named) * repetitions(1)):
        turn = {"tool_choice": choice, "seed": seed}
        with client.session(form, options=options) as session:
            first = session.chat("What is five minus three?", options=turn)
            [call] = first.tool_calls
            jsonschema.validate(call.values, schema)
            assert call.name in (("add", "sub") if choice == "required" else ("sub",))
            second = session.chat(result_of(first), options={"tool_choice": "none", "n-predict": 8})
        assert first.metadata["tool_format"] == SHOWN.get(form, form)
        assert first.metadata["adjusted"].get("tool-choice") is None
        assert (second.tool_calls, second.metadata["tool_format"]) == ([], "none")
        assert second.metadata["recomputed_tokens"] == 0


def test_a_call_is_kept_over_a_restart_and_its_result_finds_its_state(
    daemon: RunningDaemon,
) -> None:
    """The last test: the others would load their models again."""
    options = {"tools": TOOLS, "temp": 0, "grammar": grammar_of(HERMES)} | EACH
    with (
        inferd.Client(daemon.socket) as client,
        client.session("hermes", session_id="restarted", options=options) as session,
    ):
        first = session.chat("What is four and four?")
    assert daemon.stop() == 0
    daemon.start_again()
    with (
        inferd.Client(daemon.socket) as client,
        client.session("hermes", session_id="restarted") as session,
    ):
        second = session.chat(result_of(first))
    assert_kept(first, second)
    assert second.tool_calls[0].id != first.tool_calls[0].id
