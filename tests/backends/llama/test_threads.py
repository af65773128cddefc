"""The compute threads of steps."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as lib

from inferd.backends import Chunk
from inferd.backends.llama import threads
from inferd.backends.llama.threads import ComputeThreads
from tests.backends.tiny import Bare, load_tiny, tokens_of
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Bare]:
    made = Bare(write_tiny("llama", tmp_path))
    yield made
    made.close()


def others() -> set[str]:
    """Return the threads of this process."""
    return set(os.listdir("/proc/self/task"))


def cpu_ns(thread: str) -> int:
    """Return the CPU time of a thread in nanoseconds."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])


def test_the_parameters_have_the_layout_of_llama_cpp() -> None:
    params = threads._Params()
    ctypes.memset(ctypes.byref(params), 0xFF, ctypes.sizeof(params))
    threads._defaults(ctypes.byref(params), 7)
    assert not any(params.cpumask)
    defaults = (params.n_threads, params.prio, params.poll, params.strict_cpu, params.paused)
    assert defaults == (7, 0, 50, False, False)


def test_the_engine_is_built_without_threads_of_another_kind() -> None:
    assert b"OPENMP" not in lib.llama_print_system_info()


@pytest.mark.parametrize("embeds", [False, True])
def test_threads_begin_and_end_with_their_number(tmp_path: Path, embeds: bool) -> None:
    before = others()
    model, tokens = load_tiny("llama", tmp_path), tokens_of(1, 40)
    for thread in threading.enumerate():
        if thread.name == "grammar vocabulary":
            thread.join()
    embedder = model.embedder() if embeds else None

    def step() -> bytes:
        if embedder is None:
            model.trim(0, 0)
            model.step([Chunk(0, tokens, 0, True)])
            return model.logits(0).tobytes()
        embedder.start_text(0, "last")
        embedder.step([Chunk(0, tokens, 0, True)])
        return embedder.take_embedding(0, -1)

    model.set_threads(1)
    first = step()
    # The kernel removes a joined thread a little later; threads of other tests may end, too.
    wait_until(lambda: not others() - before)
    for counts in ([2], [3], [4, 1, 2], [0]):
        for count in counts:
            model.set_threads(count)
        assert step() == first
        wait_until(lambda n=counts[-1]: len(others() - before) == max(n, 1) - 1)  # type: ignore[misc]
    model.set_threads(4)
    model.close()
    model.close()
    wait_until(lambda: not others() - before)


def test_they_sleep_between_steps(bare: Bare) -> None:
    before = others()
    pool = ComputeThreads(bare.context)
    pool.set_count(2)
    pool.attach_pool()
    bare.decode(0, tokens_of(1, 40))
    [thread] = others() - before
    stat = Path(f"/proc/self/task/{thread}/stat")
    wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "S")
    spent = cpu_ns(thread)
    assert spent > 0
    time.sleep(0.05)
    assert cpu_ns(thread) == spent
    pool.close()
