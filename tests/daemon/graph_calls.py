"""Tensors, contexts and damaged files of graphs, for tests of all engines through the daemon."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

from inferd import Client, InferdError, Tensor
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd

DAMAGED_FILES = 30


def floats(*values: float, dimensions: list[int] | None = None) -> Tensor:
    """Return a tensor of fp32, by default with one row."""
    return _tensor("f", "fp32", values, [1, len(values)] if dimensions is None else dimensions)


def integers(*values: int, dimensions: list[int] | None = None) -> Tensor:
    return _tensor("i", "i32", values, [len(values)] if dimensions is None else dimensions)


def longs(*values: int, dimensions: list[int] | None = None) -> Tensor:
    return _tensor("q", "i64", values, [len(values)] if dimensions is None else dimensions)


def _tensor(code: str, kind: str, values: Sequence[float], dimensions: list[int]) -> Tensor:
    data = struct.pack(f"{len(values)}{code}", *values)
    return Tensor(data=data, dimensions=dimensions, type=kind)


def context_on(client: Client, model: str) -> int:
    """Load *model*, and return a context on it."""
    return client.init_execution_context(client.load(model))


def state_of(client: Client, model: str) -> dict[str, Any]:
    """Return the reply of `show`."""
    return dict(client.show(model))


def affine_of(client: Client, graph: int) -> bytes:
    """Return the output of a *graph* of `affine` for the rows (1, 2) and (10, 20)."""
    context = client.init_execution_context(graph)
    outputs = client.compute(context, {"b": floats(10, 20), "a": floats(1, 2)}).outputs
    assert [name for name, _ in outputs] == ["y"] and outputs[0][1].dimensions == [1, 2]
    return outputs[0][1].data


AFFINE = floats(12, 24).data
"""The right output of `affine_of`."""


def damaged(data: bytes, number: int, rng: random.Random, least: int = 0) -> bytes:
    """Return *data* with some changed bytes, and every third time also cut, behind *least*."""
    changed = bytearray(data)
    if number % 3 == 0:
        del changed[rng.randrange(least, len(changed)) :]
    for _ in range(1 + number % 7):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def check_damaged_files(client: Client, names: Sequence[str]) -> None:
    """Check that files with these *names* are loaded or refused with typed errors, and that the
    graph "whole", that of `affine`, is served all the while.
    """
    context = context_on(client, "whole")
    pid, refused = state_of(client, "whole")["pid"], 0
    for name in names:
        try:
            client.unload(client.load(name))
        except InferdError as exc:
            refused += 1
            assert exc.message.isprintable()
    assert 0 < refused <= len(names)
    assert client.compute(context, {"a": floats(1, 2), "b": floats(0, 0)}).outputs
    assert state_of(client, "whole")["pid"] == pid


def check_shown(daemon: RunningDaemon, client: Client, model: str, backend: str) -> dict[str, Any]:
    """Check what `show` and `ps` print of a *model* with the graph of `affine`, whose dimensions
    have no names; return the reply.
    """
    client.load(model)
    shown = state_of(client, model)
    assert (shown["backend"], shown["state"], shown["reads"]) == (backend, "ready", [])
    assert shown["file_error"] is None and shown["memory"]["weights"] > 0
    assert shown["info"]["inputs"][0] == {"name": "a", "type": "fp32", "shape": ["", 2]}
    assert "Inputs\n  a   fp32 [?, 2]\n" in inferd("show", model, socket=daemon.socket).stdout
    printed = inferd("ps", socket=daemon.socket).stdout
    assert "fp32 [?, 2], fp32 [?, 2] → fp32 [?, 2]" in printed
    return shown
