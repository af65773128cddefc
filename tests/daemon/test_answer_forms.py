"""The form of answers from a chat template or the configuration to the turns of a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import pytest

import inferd
from inferd.testing import RunningDaemon, running_daemon
from tests.models import ONE_THREAD, short_smollm2

pytestmark = pytest.mark.model
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
TEMPLATE = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<why>{{ m.reasoning_content }}</why>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<run>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}<key>{{ key }}</key><value>
{{- value if value is string else value | tojson }}</value>{% endfor %}</run>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking | default(true) %}<why>{% endif %}{% endif %}{# tools #}
"""
ANSWER = "<run>add<key>a</key><value>1</value><key>b</key><value>2</value></run>"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("forms")
    (folder / "own.jinja").write_text(TEMPLATE)
    file = f'file = "{short_smollm2()}"'
    config = [ONE_THREAD, "ctx-size = 512", "slots = 1"]
    config += ["[models.derived]", file, f'chat-template-file = "{folder}/own.jinja"']
    config += ["[models.set]", file, "[models.set.tool-format]"]
    config += ['calls = [{ begin = "<do>", end = "</do>", arguments_key = "with" }]']
    config += ["[models.name]", 'of = "derived"', "[models.name.tool-format]"]
    config += ['calls = [{ begin = "<do>", end = "</do>", arguments_key = "with" }]']
    config += ["[models.known]", 'of = "set"', 'tool-format = "hermes"']
    config += ["[models.shared]", 'of = "set"']
    with running_daemon("\n".join(config)) as running:
        yield running


def forced(answer: str, thought: str = "") -> dict[str, object]:
    """Return the options of a turn with this answer, behind a *thought* if it reasons."""
    options: dict[str, object] = {"grammar": f"root ::= {json.dumps(answer)}"}
    options |= {"reasoning-format": "deepseek", "reasoning-budget": 0}
    options["reasoning-budget-message"] = thought
    return {"tools": TOOLS, "temp": 0, "jump-forward": False, **options}


def test_marks_of_the_template_alone_give_reasoning_and_calls(client: inferd.Client) -> None:
    with client.session("derived") as session:
        first = session.chat("One and two?", options=forced(ANSWER, "So."))
        [call] = first.tool_calls
        assert (str(first), first.reasoning) == ("", "So.")
        assert (call.name, call.values) == ("add", {"a": 1, "b": "2"})
        assert first.metadata["tool_format"] == "derived"
        result = [{"role": "tool", "tool_call_id": call.id, "content": "3"}]
        second = session.chat(result, options=forced("Three.", "Yes."))
        assert (str(second), second.reasoning) == ("Three.", "Yes.")
        assert second.metadata["recomputed_tokens"] == 0, "the template writes the call as it was"


def test_a_required_call_has_the_derived_form(client: inferd.Client) -> None:
    options = {"tools": TOOLS, "tool-choice": "required", "temp": 0, "n-predict": 200}
    options["chat-template-kwargs"] = {"enable_thinking": False}
    for model in ("derived", "set"):
        with client.session(model) as session:
            reply = session.chat("Add.", options=options)
        assert str(reply) == "" and [call.name for call in reply.tool_calls] == ["add"], model
        if reply.metadata["stop_reason"] != "length":  # else a part of a text
            jsonschema.validate(reply.tool_calls[0].values, SCHEMA)


def test_a_form_of_the_configuration_is_read(client: inferd.Client) -> None:
    with client.session("set") as session:
        reply = session.chat("Go.", options=forced('Ok.<do>{"name": "add", "with": {}}</do>'))
    assert (str(reply), [call.name for call in reply.tool_calls]) == ("Ok.", ["add"])


def test_names_of_one_model_have_forms_of_their_own(client: inferd.Client) -> None:
    marked = 'Ok.<do>{"name": "add", "with": {}}</do>'
    hermes = 'Ok.<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    turns = [("name", marked), ("shared", marked), ("set", marked), ("known", hermes)]
    for model, answer in (*turns, ("derived", ANSWER)):
        with client.session(model) as session:
            reply = session.chat("Go.", options=forced(answer))
        assert [call.name for call in reply.tool_calls] == ["add"], model
        assert reply.metadata["tool_format"] == ("hermes" if model == "known" else "derived")
    for model, answer in (("known", marked), ("set", hermes)):
        with client.session(model) as session:
            assert [*session.chat("Go.", options=forced(answer)).tool_calls] == [], model
    pids = {model["name"]: model["pid"] for model in client.models() if model["pid"]}
    assert pids["name"] == pids["derived"] != pids["set"] == pids["known"] == pids["shared"]
