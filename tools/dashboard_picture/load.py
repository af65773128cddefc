"""The load of the picture: programs that share real models, pause and overload the daemon.

They run turns for a few minutes; one burst exceeds the bounds of the queue and of open sessions.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import inferd
from inferd.ipc.names import Priority

__all__ = ("CONFIG", "GRAPH", "LOAD_S", "MODELS", "at_work", "link_models")

MODELS = {"smollm2": "smollm2-135m-instruct.gguf", "gemma3": "gemma-3-270m.gguf"}
CONFIG = """\
[daemon]
sessions-max = 18
idle-yield-ms = 2000
tasks-waiting-max = 10
keep-alive-s = 20
idle-timeout-ms = 8000
quantum-tokens = 64
[defaults]
slots = 3
ctx-size = 1024
"""
LOAD_S = 255.0
DIES_AT_S = 150.0
"""The time at which a worker is killed, as by the kernel when memory is short."""
REFUSED_REST_S = 2.0
IDLE_SESSIONS_EVERY_S = 40.0
GRAPH = "magika"
"""A graph that finds the types of files; the package of this name has its file."""
GRAPH_CALLERS = 6
GRAPH_WORKS_S, GRAPH_RESTS_S = 12.0, 18.0
HELD_MAX, HELD_EVERY_S = 12, 4.0
"""Buffers and kept tensors of a program at most, and the pause between two."""
JOB_EVERY_S = 25.0
BROKEN = "broken"
"""A model whose file is damaged, so that calls that request it fail."""


@dataclass(frozen=True)
class Program:
    """A program that repeats a conversation with pauses."""

    name: str
    priority: Priority
    prompts: tuple[str, ...]
    tokens: int
    rest_s: float = 0.5
    at_s: tuple[float, float] = (0.0, LOAD_S)
    """Start and end of its work."""
    model: str = "smollm2"
    forks: int = 0
    """Number of branches that continue each conversation from its last question."""
    shifts: bool = False

    def run(self, socket: str, over: threading.Event) -> None:
        """Run conversations until *over* is set; retry refused turns."""
        begins, ends = (time.monotonic() + at for at in self.at_s)
        over.wait(begins - time.monotonic())
        number = 0
        while not over.is_set() and time.monotonic() < ends:
            number += 1
            try:
                self._converse(socket, f"{self.name}-{number}", over)
            except inferd.InferdError:
                over.wait(REFUSED_REST_S)

    def _converse(self, socket: str, session_id: str, over: threading.Event) -> None:
        """Run one prompt after the other; between them the session is dormant."""
        for prompt in self.prompts:
            options = {
                "n-predict": self.tokens,
                "ctx-shift": self.shifts,
                "ignore-eos": self.shifts,
            }
            with inferd.Client(socket, label=self.name) as client:
                session = client.session(
                    self.model, session_id=session_id, priority=self.priority, options=options,
                    queue_timeout=LOAD_S, raw=self.model == "gemma3",
                )  # fmt: skip
                with session:
                    if not _read(session, prompt, over):
                        return
                    if prompt == self.prompts[-1]:
                        for branch in session.fork(self.forks) if self.forks else ():
                            _read(branch, prompt, over)
                        session.delete()
            if over.wait(self.rest_s):
                return


def _read(session: inferd.Session, prompt: str, over: threading.Event) -> bool:
    """Read an answer to its end; return whether it was complete."""
    return not any(over.is_set() for _ in session.stream(prompt))


STORY = "Write a long story about a lighthouse and its keeper, with many details."
HELLO = "Say in one sentence: what is smoke?"
LETTER = ("Write a short letter to a friend.", "Make it friendlier.", "Now shorten it to one line.")
CODE = ("Explain what a daemon is.", "Give me an example.", "How does it end?")
PRESS = "The history of the printing press:"
ARCHIVE_AT_S = ((55.0, 85.0), (175.0, 205.0))
PROGRAMS = (
    Program("digest", "low", (STORY,), 240),
    Program("tags", "low", ("Write a long list of animals.", "Go on."), 160),
    Program("novel", "low", (STORY,), 1400, at_s=(40, LOAD_S), shifts=True),
    Program("editor", "normal", CODE, 70),
    Program("notes", "normal", CODE[::-1], 60, rest_s=2.0),
    Program("ideas", "normal", ("Name a colour.", "Another one."), 24, rest_s=6.0, forks=2),
    Program("mail", "high", LETTER, 48, rest_s=3.0),
    Program("alarm", "urgent", (HELLO,), 20, rest_s=5.0),
    Program("nightly", "normal", (HELLO,), 20, at_s=(90.0, 120.0), model=BROKEN),
    *(
        Program(f"archive-{n}", "normal", (PRESS,), 90, 1.0, ARCHIVE_AT_S[n % 2], "gemma3")
        for n in range(4)
    ),
    *(Program(f"crowd-{n}", "normal", (HELLO,), 60, at_s=(110.0, 130.0)) for n in range(16)),
)  # fmt: skip


@contextmanager
def at_work(socket: str, daemon_pid: int) -> Iterator[None]:
    """Run all programs during the body."""
    over = threading.Event()
    with ThreadPoolExecutor(len(PROGRAMS) + 4 + GRAPH_CALLERS) as pool:
        started = [pool.submit(program.run, socket, over) for program in PROGRAMS]
        started.append(pool.submit(_kill_a_worker, daemon_pid, over))
        started.append(pool.submit(_leave_sessions_idle, socket, over))
        started.append(pool.submit(_hold_tensors, socket, over))
        started.append(pool.submit(_submit_jobs, socket, over))
        started += [pool.submit(_identify_files, socket, over) for _ in range(GRAPH_CALLERS)]
        try:
            yield
        finally:
            over.set()
    for program in started:
        program.result()


def _kill_a_worker(daemon_pid: int, over: threading.Event) -> None:
    if over.wait(DIES_AT_S):
        return
    with suppress(ProcessLookupError, IndexError):
        os.kill(psutil.Process(daemon_pid).children()[0].pid, signal.SIGKILL)


def _leave_sessions_idle(socket: str, over: threading.Event) -> None:
    """Open a session now and then, and let it expire."""
    with inferd.Client(socket) as client:
        graph = client.load_by_name("smollm2")
        while not over.wait(IDLE_SESSIONS_EVERY_S):
            client.init_execution_context(graph, queue_timeout=LOAD_S)


def _identify_files(socket: str, over: threading.Event) -> None:
    """Run the graph without a pause for some seconds, and then rest."""
    files = [[number] * 2048 for number in (32, 256)]
    while not over.is_set():
        ends = time.monotonic() + GRAPH_WORKS_S
        with (
            suppress(inferd.InferdError),
            inferd.Client(socket, label="files") as client,
            client.graph(GRAPH) as graph,
        ):
            while not over.is_set() and time.monotonic() < ends:
                graph.run_tensors({"bytes": files})
        over.wait(GRAPH_RESTS_S)


def _hold_tensors(socket: str, over: threading.Event) -> None:
    """Keep outputs in the daemon, and share buffers with the graph, more and more of both."""
    while not over.is_set():
        with (
            suppress(inferd.InferdError),
            inferd.Client(socket, label="tensors") as client,
            client.graph(GRAPH) as graph,
        ):
            names, held = [one.name for one in graph.outputs], list[object]()
            for number in range(1, HELD_MAX + 1):
                buffer = client.buffer(number << 20)
                view = buffer.view([2, 2048], "i32")
                outputs = graph.run_tensors({"bytes": view}, keep=names)
                held += [buffer, *outputs.values()]
                if over.wait(HELD_EVERY_S):
                    return
        over.wait(HELD_EVERY_S)


def _submit_jobs(socket: str, over: threading.Event) -> None:
    """Submit a job now and then; cancel every third one, and let some requests fail."""
    for number in itertools.count(1):
        with suppress(inferd.InferdError), inferd.Client(socket, label="batch") as client:
            job = client.jobs.submit([*_requests("smollm2", 12), *_requests("missing", 2)])
            if over.wait(JOB_EVERY_S):
                return
            if number % 3 == 0:
                client.jobs.cancel(job["id"])
        if over.wait(1.0):
            return


def _requests(model: str, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        body = {"model": model, "prompt": HELLO, "max_tokens": 16}
        yield {"custom_id": f"{model}-{number}", "url": "/v1/completions", "body": body}


def link_models(folder: Path, models: Path) -> None:
    """Link the models under the names that the programs use, and write a damaged one."""
    (folder / f"{BROKEN}.gguf").write_bytes(b"GGUF and nothing else")
    spec = importlib.util.find_spec(GRAPH)  # without an import of all that it needs
    assert spec is not None and spec.origin is not None, f"install the package {GRAPH}"
    [graph] = Path(spec.origin).parent.glob("models/standard_v3_*/model.onnx")
    (folder / f"{GRAPH}.onnx").symlink_to(graph)
    for name, file in MODELS.items():
        (folder / f"{name}.gguf").symlink_to(models / file)
