"""No frame occupies the daemon's loop for long, whatever it contains, in any field of any call."""

from __future__ import annotations

import os
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import InferdError
from inferd.backends.params import BY_NAME, PARAMETERS
from inferd.backends.params.chat_options import DEPTH_MAX
from inferd.backends.params.parameter_table import EFFORTS
from inferd.backends.shared_memory import sealed_memory
from inferd.ipc import messages as w
from inferd.wire.frames import FRAME_BYTES_MAX, NESTING_MAX
from tests.attacks.loop_meter import MeteredDaemon
from tests.daemon.other_users import ADA, client_of
from tests.machine_speed import memory_slowness, slowness
from tests.raw import RawClient

BLOCK_S_MAX = 0.02
"""The bound, on the reference machine of `slowness`."""
MARGIN = 3.0
TRIES = 3
"""A frame is sent up to this many times, and its shortest block counts: a busy machine makes some
blocks longer.
"""
SPACE = FRAME_BYTES_MAX - 2000
"""Bytes of a frame for the field under test."""
SKIPPED = {"drain", "deinit_backend"}
MISSPELT = "temperatur"


@pytest.fixture(scope="module")
def daemon() -> Iterator[MeteredDaemon]:
    wide = '[models.wide]\nbackend = "echo"\nctx-size = 2097152\n'
    with MeteredDaemon("[daemon]\nsocket-mode = '0666'\n" + wide) as running:
        os.chmod(running.directory, 0o711)
        yield running


@pytest.fixture
def attacker(daemon: MeteredDaemon) -> Iterator[RawClient]:
    with client_of(daemon, ADA) as client:
        client.call("models")
        daemon.read_longest_s()
        yield client


def check_block(
    daemon: MeteredDaemon, client: RawClient, name: str, send: Callable[[], object]
) -> None:
    """Check the longest block of *send*, which is called again if it was too long."""
    tries: list[tuple[float, float]] = []
    for _ in range(TRIES):
        send()
        client.call("init_backend")  # once it is answered, the block of the last reply has ended
        longest_s, slow = daemon.read_longest_s(), 1.0
        if longest_s >= BLOCK_S_MAX * MARGIN:
            slow = max(slowness(), memory_slowness())
        if longest_s < BLOCK_S_MAX * MARGIN * slow:
            return
        tries.append((longest_s, slow))
    raise AssertionError(f"{name} blocks the loop for longer than {BLOCK_S_MAX} s: {tries}")


def texts(count: int) -> list[str]:
    return ["a"] * count


def misspelt(count: int) -> dict[str, Any]:
    """Return keys that all resemble a known one."""
    return {f"{MISSPELT}{i:x}": i for i in range(count)}


def nested(depth: int, count: int) -> list[Any]:
    value: Any = {}
    for _ in range(depth):
        value = [value]
    return [value] * count


STRINGS: dict[str, Any] = {
    "long text": "a" * SPACE,
    "wide text": "\u65e5" * (SPACE // 3),
    "commas": "1," * (SPACE // 2),
    "brackets": "[" * SPACE,
    "JSON objects": "[" + "{}," * (SPACE // 3 - 2) + "{}]",
    "JSON keys": "{" + ",".join(f'"{MISSPELT}{i:x}":0' for i in range(SPACE // 20)) + "}",
    "JSON digits": '{"temp":' + "1" * (SPACE - 20) + "}",
    "JSON fraction": '{"temp":0.' + "1" * (SPACE - 20) + "}",
    "escapes": '{"stop":"' + "\\u0001" * (SPACE // 6 - 4) + '"}',
}
LISTS: dict[str, Any] = {
    "small numbers": [1] * SPACE,
    "large numbers": [1 << 30] * (SPACE // 5),
    "texts": texts(SPACE // 2),
    "few texts": texts(20_000),
    "bytes": [b""] * (SPACE // 2),
    "maps": [{}] * SPACE,
    "few maps": [{"role": "user", "content": "a"}] * 1000,
    "deep": nested(NESTING_MAX - 4, 500),
    "broken runs": [*[1] * 255, "a"] * 4000,
}
MAPS: dict[str, Any] = {
    "keys": {f"{i:05x}": 0 for i in range(SPACE // 7)},
    "misspelt": misspelt(29_000),
    "few misspelt": misspelt(200),
    "long keys": {"k" * 1000 + str(i): i for i in range(250)},
    "sections": {"sampling": misspelt(15_000)},
    "maps": {"a": [{}] * 31_000},
    "texts": {"stop": texts(31_000)},
    "deep": {"a": nested(NESTING_MAX - 4, 500)},
}


def shapes_of(kind: Any) -> dict[str, Any]:
    """Return the worst values for a field of type *kind*."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return shapes_of(arguments[0])
    if kind is str:
        return STRINGS
    if kind is bytes:
        return {name: text.encode() for name, text in STRINGS.items() if name != "wide text"}
    if kind is w.Tensor:
        return {name: {"data": text.encode()} for name, text in STRINGS.items()} | {
            "dimensions": {"dimensions": [1] * SPACE}
        }
    if origin is dict:
        return MAPS
    if origin is list:
        return LISTS
    found: dict[str, Any] = {}
    for argument in arguments:
        found |= shapes_of(argument)
    return found


def fields() -> list[tuple[str, str]]:
    """Return each call with each field that can be large."""
    return [
        (call, field.name)
        for call, messages in w.CALLS.items()
        if call not in SKIPPED
        for field in msgspec.structs.fields(messages.params)
        if shapes_of(field.type)
    ]


@pytest.fixture
def handles(attacker: RawClient) -> dict[str, Any]:
    graph = attacker.call("load_by_name", name="echo")["graph"]
    context = attacker.call("init_execution_context", graph=graph)["context"]
    attacker.set_input(context, b"hello")
    return {
        "graph": graph,
        "context": context,
        "name": "echo",
        "index": 0,
        "tensor": {"data": b"hello"},
        "session_id": "s",
        "tokens": [1],
        "messages": [{"role": "user", "content": "hello"}],
        "text": "hello",
        "texts": ["hello"],
        "turns": 1,
    }


@pytest.mark.parametrize(("call", "field"), fields(), ids=lambda part: part)
def test_no_value_of_a_field_blocks_the_loop(
    daemon: MeteredDaemon, attacker: RawClient, handles: dict[str, Any], call: str, field: str
) -> None:
    params = w.CALLS[call].params
    known = {f.name for f in msgspec.structs.fields(params)}
    base = {name: value for name, value in handles.items() if name in known}
    kind = next(f.type for f in msgspec.structs.fields(params) if f.name == field)
    for name, value in shapes_of(kind).items():
        send = partial(refuse, attacker, call, **(base | {field: value}))
        check_block(daemon, attacker, f"{call} {field} {name}", send)


PATTERNS = [
    *(
        f"{i}" + "(" + "|".join(f"{chr(97 + j % 26)}{j}" for j in range(100)) + ")"
        for i in range(8)
    ),
    *(f"{i}(?:){{2900}}" for i in range(8)),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP = nested(NESTING_MAX - 6, 500)
VALUES: dict[str, list[Any]] = {
    "int": ["1" * SPACE, [1] * SPACE],
    "float": ["1" * SPACE, misspelt(29_000)],
    "bool": [texts(31_000)],
    "text": ["(" * 65_000, "()" * 32_000, "a" * SPACE, "[" * 65_000],
    "texts": [texts(10_000), texts(31_000), ["a" * 1000] * 1000],
    "samplers": ["k" * SPACE, ["penalties"] * 10_000, ["penaltiez"] * 31_000, "penaltiez," * 90],
    "biases": [
        [[i, 1.0] for i in range(2500)],
        {f"{i}": 1 for i in range(2500)},
        [[]] * 31_000,
    ],
    "shares": ["1," * (SPACE // 2), [1] * SPACE],
    "tokens": [[1] * 10_000, [1] * SPACE],
    "triggers": [
        ["a" * 400] * 512,
        [{"type": "pattern", "value": text} for text in PATTERNS],
        [[]] * 31_000,
    ],
    "schema": [{"enum": ["a"] * 16_000}, "[" * 60_000, {"a": DEEP}],
    "structural-tag": [
        {"structures": [{"begin": "<f>", "end": "</f>"}] * 8000, "triggers": ["<f"]},
        {"structures": [{"begin": "<f>", "end": "x" * SPACE}], "triggers": ["<f"]},
        {"structures": [{"begin": "<f>", "end": "", "schema": DEEP}], "triggers": ["<f"]},
        {"structures": [{"begin": "z", "end": ""}] * 128, "triggers": ["y"] * 100_000},
        "[" * 60_000,
    ],
    "answer-form": [
        "a" * SPACE,
        {"calls": [{"begin": "<a>"}] * 15_000},
        {"opens": ["<a>"] * 31_000},
        {"reasoning": [{"begin": "<a>", "end": "x" * SPACE}]},
        {"calls": DEEP},
        misspelt(15_000),
    ],
    "tool-choice": ["a" * SPACE, misspelt(15_000), {"type": "function", "function": DEEP}],
    "choice": ["a" * SPACE, [1] * SPACE],
    "tools": [
        [TOOL] * 128,
        [TOOL] * 3000,
        "[" * SPACE,
        "[{}," * 60_000,
        nested(NESTING_MAX - 6, 500),
    ],
    "arguments": [
        {f"a{i}": nested(DEPTH_MAX - 3, 8) for i in range(64)},
        misspelt(15_000),
        "{}" * 30_000,
    ],
    "efforts": [misspelt(15_000), {"low": "1" * SPACE}, dict.fromkeys(EFFORTS, 1 << 62)],
    "scales": [misspelt(15_000), ["a"] * 31_000, [["a", 1]] * 12_000],
}
WITH_RULES = ("stop", "stop-patterns", "stop-tokens", "grammar", "dry-sequence-breakers")
"""Parameters with further checks than the last one of their kind."""
SPELLINGS = 8


def spellings(name: str) -> list[str]:
    """Return *name* in several cases: keys of one parameter."""
    return [name[:i].upper() + name[i:] for i in range(min(SPELLINGS, len(name)))]


@pytest.mark.parametrize("call", ["set_options", "chat", "set_input", "load_by_name_with_config"])
def test_no_parameter_blocks_the_loop(
    daemon: MeteredDaemon, attacker: RawClient, handles: dict[str, Any], call: str
) -> None:
    kinds = {parameter.kind: parameter for parameter in PARAMETERS}
    for parameter in (*kinds.values(), *(BY_NAME[name] for name in WITH_RULES)):
        more = [PATTERNS[:8], PATTERNS[8:]] if parameter.name == "stop-patterns" else []
        for number, value in enumerate(VALUES[parameter.kind] + more):
            for names in ([parameter.name], spellings(parameter.name)):
                options = dict.fromkeys(names, value)
                send = partial(send_options, attacker, handles, call, options)
                name = f"{call} {parameter.name} {number} {len(names)}"
                check_block(daemon, attacker, name, send)


def send_options(
    client: RawClient, handles: dict[str, Any], call: str, options: dict[str, Any]
) -> None:
    """Send *options* in a call, unless they exceed a frame; they may be refused."""
    context = handles["context"]
    if call in ("set_options", "chat"):
        if len(msgspec.msgpack.encode(options)) < SPACE:
            more = {"prompt": "a"} if call == "chat" else {}
            refuse(client, call, context=context, options=options, **more)
        return
    text = msgspec.json.encode(options)
    if call == "set_input":
        send_data(client, call, text, context=context, index=1)
    elif len(text) < SPACE:
        refuse(client, call, name="echo", config=text.decode())


def send_data(client: RawClient, call: str, data: bytes, **params: Any) -> None:
    """Send *data* as a tensor in a file descriptor."""
    fd = sealed_memory([data])
    try:
        refuse(client, call, [fd], tensor={"fd": 0}, **params)
    finally:
        os.close(fd)


def refuse(client: RawClient, call: str, fds: list[int] | None = None, /, **params: Any) -> None:
    try:
        client.call(call, fds or (), **params)
    except InferdError as exc:
        assert len(exc.message) < 20_000


@pytest.fixture
def wide(attacker: RawClient) -> dict[str, int]:
    """A graph and a context of a model that holds the longest prompts."""
    graph = attacker.call("load_by_name", name="wide")["graph"]
    return {
        "graph": graph,
        "context": attacker.call("init_execution_context", graph=graph)["context"],
    }


def test_no_long_text_blocks_the_loop(
    daemon: MeteredDaemon, attacker: RawClient, wide: dict[str, int]
) -> None:
    graph, context = wide["graph"], wide["context"]
    text, tokens = "a" * SPACE, [97] * w.DETOKENIZE_TOKENS_MAX

    def tokenize() -> None:
        assert len(attacker.call("tokenize", graph=graph, text=text)["tokens"]) == SPACE

    def detokenize() -> None:
        assert len(attacker.call("detokenize", graph=graph, tokens=tokens)["text"]) == len(tokens)

    check_block(daemon, attacker, "tokenize", tokenize)
    check_block(daemon, attacker, "detokenize", detokenize)
    for data in (b"a" * w.TENSOR_BYTES_MAX, b"\xff" * w.TENSOR_BYTES_MAX):
        for call in ("set_input", "run_inference"):
            send = partial(send_data, attacker, call, data, context=context, index=0)
            check_block(daemon, attacker, f"{call} {data[:1]!r}", send)
