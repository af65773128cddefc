"""The text with which a request's prompt begins."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.gateways.fleet.frames import Fields, raw_of
from inferd.gateways.fleet.routing.homes import is_setup, prompt_text, setup_text
from inferd.ipc.messages import CALLS


def fields(**values: Any) -> Fields:
    return {name: raw_of(value) for name, value in values.items()}


TENSOR = {"data": b"a prompt", "dimensions": [8], "type": "u8"}
CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(
    ("call", "params"),
    [
        ("chat", {"prompt": "a prompt"}),
        ("stream", {"prompt": "a prompt", "messages": None, "options": {"seed": 1}}),
        ("answers", {"prompt": "a prompt"}),
        ("prompt_compute", {"prompt": "a prompt"}),
        ("run_inference", {"tensor": TENSOR}),
        ("set_input", {"index": 0, "tensor": TENSOR}),
        ("compute", {"inputs": [["prompt", TENSOR]]}),
    ],
)
def test_every_call_with_a_prompt_is_read(call: str, params: dict[str, Any]) -> None:
    assert prompt_text(CALLS[call], fields(context=1, **params)) == b"a prompt"


def test_a_longer_history_begins_like_the_shorter_one() -> None:
    shorter = prompt_text(CALLS["chat"], fields(messages=CHAT[:1]))
    longer = prompt_text(CALLS["chat"], fields(messages=CHAT * 10))
    assert shorter and longer.startswith(shorter)


def test_tools_come_before_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = prompt_text(CALLS["chat"], fields(messages=CHAT, options={"tools": tools, "seed": 1}))
    assert text.startswith(bytes(raw_of(tools)))
    assert text == prompt_text(
        CALLS["stream"], fields(messages=CHAT, options={"seed": 2, "tools": tools})
    )
    assert setup_text(fields(options={"tools": tools})) == bytes(raw_of(tools))
    assert setup_text(fields(system="Be brief.")) == b"Be brief."


@pytest.mark.parametrize(
    ("call", "params"),
    [
        ("chat", {"messages": 7}),
        ("chat", {"prompt": b"\xff"}),
        ("chat", {"options": [1]}),
        ("set_input", {"tensor": "text"}),
        ("compute", {"inputs": [1]}),
        ("compute", {}),
        ("compute", {"inputs": None}),
        ("set_input", {"index": 0, "tensor": {"fd": 0}}),
        ("history", {"prompt": "a prompt"}),
    ],
)
def test_a_request_that_cannot_be_read_has_no_prompt(call: str, params: dict[str, Any]) -> None:
    assert prompt_text(CALLS[call], fields(**params)) == b""


def test_calls_that_prepare_a_context_are_known() -> None:
    assert is_setup(CALLS["reset"], {}) and is_setup(CALLS["set_options"], {})
    assert is_setup(CALLS["set_input"], fields(index=1)) and not is_setup(
        CALLS["set_input"], fields(index=0)
    )
    assert not is_setup(CALLS["chat"], {})
    assert setup_text(fields(options=7)) == b""
