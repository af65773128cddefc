"""Grammars that stop a model, and the time of a grammar that another user has used."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

BOMB_S_MAX = 2.0
NESTED = '((((("a"?){0,9}){0,9}){0,9}){0,9}){0,9}'
"""9⁵ letters, each of which may be missing: llama.cpp tries all ways to omit them."""
BOMBS = {"at its begin": f"root ::= {NESTED}\n", "later": f'root ::= "a" {NESTED}\n'}
SAMPLE = """
import sys
from inferd.backends import ModelSpec, SamplingParams, load_model
model = load_model(ModelSpec(name="t", path=sys.argv[1], slots=1, ctx_size=64), lambda _: True)
print("loaded", flush=True)
answer = model.tokenize(b"a", special=False, bos=False)[-1:]
model.sampler(SamplingParams(grammar=sys.argv[2]), [], answer)
"""
PROPERTIES, CHOICES = 200, 30


@pytest.mark.process
@pytest.mark.parametrize("grammar", BOMBS.values(), ids=BOMBS)
def test_a_grammar_of_few_bytes_does_not_stop_a_model(tmp_path: Path, grammar: str) -> None:
    assert len(grammar) < 300
    arguments = [sys.executable, "-c", SAMPLE, str(write_tiny("llama", tmp_path)), grammar]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"loaded\n"
        try:
            assert process.wait(BOMB_S_MAX) == 0
        finally:
            process.kill()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[RunningDaemon]:
    model = f"file = '{write_tiny('llama', tmp_path)}'"
    with daemon_for_all(f"[models.shared]\n{model}\nslots = 2\nctx-size = 256\n") as daemon:
        yield daemon


def schema(number: int) -> dict[str, object]:
    """Return one of many schemas of the same size, whose grammars take long to make."""
    names = [f"{number:03}{index:03}" for index in range(PROPERTIES)]
    value = {"enum": [f"{choice:03}" for choice in range(CHOICES)]}
    return {"type": "object", "properties": dict.fromkeys(names, value), "required": names}


def cpu_s_of_turn(worker_pid: int, client: RawClient, context: int, number: int) -> float:
    """Return the worker's CPU time for a turn of one token by a schema."""
    clock = ~worker_pid << 3 | 2  # `clock_getcpuclockid(3)`
    before = time.clock_gettime(clock)
    options = {"n-predict": 1, "json-schema": schema(number)}
    client.call("chat", context=context, prompt="Hi", raw=True, options=options)
    return time.clock_gettime(clock) - before


def test_the_time_of_a_turn_does_not_tell_which_grammars_others_used(
    shared: RunningDaemon,
) -> None:
    with client_of(shared, ADA) as ada, client_of(shared, BOB) as bob:
        ours, theirs = ada.context("shared"), bob.context("shared")
        pid = bob.call("show", name="shared")["models"][0]["pid"]
        known, unknown = [], []
        for number in range(0, 10, 2):
            cpu_s_of_turn(pid, ada, ours, number)
            known.append(cpu_s_of_turn(pid, bob, theirs, number))
            unknown.append(cpu_s_of_turn(pid, bob, theirs, number + 1))
        assert min(known) > 0.7 * min(unknown)
