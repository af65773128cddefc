"""Grammars that stop a model, and the time of a grammar that another user has used."""

from __future__ import annotations

import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.errors import Timeout, TooLarge
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


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    model = f"file = '{write_tiny('llama', tmp_path_factory.mktemp('tiny'))}'"
    with daemon_for_all(f"[models.shared]\n{model}\nslots = 2\nctx-size = 4096\n") as daemon:
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

        def share(first: int) -> float:
            """Return the time with a grammar that Ada has used, in proportion to a new one."""
            shares = []
            for number in range(first, first + 10, 2):
                cpu_s_of_turn(pid, ada, ours, number)
                known = cpu_s_of_turn(pid, bob, theirs, number)
                shares.append(known / cpu_s_of_turn(pid, bob, theirs, number + 1))
            return statistics.median(shares)

        # A second turn of Ada takes a fifth of the time. Noise may spoil two of three measurements.
        assert any(share(first) > 0.7 for first in (0, 10, 20))


def chained(count: int) -> str:
    """Return a Lark grammar whose rules refer to each other in a chain."""
    rules = "".join(f"a{i}: a{i + 1}\n" for i in range(count))
    return f'start: a0\n{rules}a{count}: "x"\n'


BOMBED: dict[str, tuple[dict[str, Any], str]] = {
    "a chain of rules": ({"lark": chained(3000)}, "stack_bytes_max"),
    "a row of alternatives": ({"lark": f"start: {' | '.join(f'/{i}x/' for i in range(3000))}"}, ""),
    "patterns": (
        {"lark": f"start: A\nA: {' & '.join(f'/.*a{i}.{{{i}}}b.*/' for i in range(24))}"},
        "",
    ),
}
"""Grammars past a limit, with the field of the error's data that names it, if it is always the
same: on a slow machine patterns reach the limit of CPU time before that of memory.
"""
HEAVY: dict[str, dict[str, Any]] = {
    "nested repetitions": {"lark": 'start: ((("a"{0,999}){0,999}){0,999}){0,99} "b"'},
    "a regex of nested repetitions": {"regex": "((((a|b){0,99}c){0,99}){0,99}){0,99}"},
    "a regex of many states": {"regex": "(a|b)*a(a|b){4000}(a|b)*a(a|b){4000}c"},
    "ambiguous rules": {"lark": 'start: start start start | "a" |'},
}
"""Grammars that take long in other libraries."""
GAP_S_MAX, ATTEMPTS, ALONE_S_MAX = 0.05, 8, 5.0
TOKENS_MAX = 1000
"""Tokens of one text of the neighbour, which fit into its context."""


def longest_gap_s(victim: RawClient, context: int, ends: Callable[[], object]) -> float:
    """Return the longest time of a token of *victim* until *ends* returns true."""
    longest, tokens = 0.0, 0
    while not ends():
        if tokens == TOKENS_MAX:  # on a busy machine a refusal takes long
            victim.call("fini_single", context=context)
            victim.call("reset", context=context)
            begin_text(victim, context)
            tokens = 0
        began = time.perf_counter()
        victim.call("compute_single", context=context)
        longest, tokens = max(longest, time.perf_counter() - began), tokens + 1
    return longest


def begin_text(client: RawClient, context: int) -> None:
    client.set_input(context, b"Once upon a time")
    client.compute_single(context)


def check_gaps(
    bob: RawClient, ada: RawClient, options: dict[str, Any], outcome: Callable[[int], None]
) -> None:
    """Check that Bob's tokens have no long gaps beside one of several turns of Ada. On a machine
    where other programs delay them, they may be thrice as long as without her turn.
    """
    attack = ada.context("shared")
    gaps: list[tuple[float, float]] = []
    while not gaps or gaps[-1][0] > max(GAP_S_MAX, 3 * gaps[-1][1]):
        assert len(gaps) < ATTEMPTS, gaps
        victim = bob.context("shared", '{"ignore-eos": true}')
        begin_text(bob, victim)
        turn = {"context": attack, "prompt": "Hi", "raw": True, "options": options}
        began = time.monotonic()
        request = ada.start_request("chat", **turn)
        gap = longest_gap_s(bob, victim, lambda: select.select([ada.socket], [], [], 0)[0])
        until = time.monotonic() + min(time.monotonic() - began, ALONE_S_MAX)
        outcome(request)
        ada.call("reset", context=attack)
        alone = 0.0
        if gap > GAP_S_MAX:
            alone = longest_gap_s(bob, victim, partial(_is_past, until))
        bob.call("fini_single", context=victim)
        gaps.append((gap, alone))


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


@pytest.mark.process
@pytest.mark.parametrize("name", BOMBED)
def test_a_bomb_is_too_large_and_delays_no_other_stream(roomy: RunningDaemon, name: str) -> None:
    options, limit = BOMBED[name]
    with client_of(roomy, ADA) as ada, client_of(roomy, BOB) as bob:

        def refused(request: int) -> None:
            with pytest.raises((TooLarge, Timeout)) as caught:  # it compiles at a low priority
                ada.wait_result(request)
            late = isinstance(caught.value, Timeout)
            assert caught.value.hint and (late or not limit or limit in caught.value.data)

        check_gaps(bob, ada, options, refused)
        ok = {"n-predict": 4, "regex": "a{3}"}
        answer = ada.call("chat", context=ada.context("shared"), prompt="Hi", raw=True, options=ok)
        assert answer["text"] == b"aaa", "the attacker's next turn works"


@pytest.mark.process
@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_grammar_delays_no_other_stream(roomy: RunningDaemon, name: str) -> None:
    options = HEAVY[name] | {"n-predict": 60}
    with client_of(roomy, ADA) as ada, client_of(roomy, BOB) as bob:

        def answered(request: int) -> None:
            with suppress(TooLarge):
                assert ada.wait_result(request)["metadata"]["output_tokens"]

        check_gaps(bob, ada, options, answered)
