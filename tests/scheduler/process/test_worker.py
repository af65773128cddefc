"""The exchange before a load: nothing is loaded before daemon and worker agree on the shape."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from inferd.backends import Chunk, MemoryNeed, ModelSpec, Shape
from inferd.backends.echo.model import EchoModel
from inferd.scheduler import messages as m
from inferd.scheduler.build import EXIT_OTHER_BUILD, build_id
from inferd.scheduler.record import create_record
from inferd.scheduler.worker import SocketLink, run_worker
from inferd.wire.frames import pack_frame

SPEC = ModelSpec(name="e", backend="echo", slots=2, options={"weight_bytes": 9, "token_bytes": 2})


class Daemon:
    """The daemon's end of the socket pair."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(60)
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(list[m.Report])
        self._reports: list[m.Report] = []

    def send(self, *commands: m.Command) -> None:
        self._sock.sendall(pack_frame(commands))

    def report(self) -> m.Report:
        while not self._reports:
            size = int.from_bytes(self._exactly(4), "little")
            self._reports = self._decoder.decode(self._exactly(size))
        return self._reports.pop(0)

    def _exactly(self, size: int) -> bytes:
        data = self._sock.recv(size, socket.MSG_WAITALL)
        assert len(data) == size
        return data


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A worker process and its daemon; the worker must exit by itself before the test ends."""
    ours, theirs = socket.socketpair()
    record = create_record()
    arguments = [build_id(), str(theirs.fileno()), str(os.getpid()), str(record)]
    process = subprocess.Popen(
        [sys.executable, "-m", "inferd.scheduler.worker", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(), record),
    )
    theirs.close()
    os.close(record)
    with ours:
        try:
            yield Daemon(ours)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def test_a_model_is_loaded_in_the_shape_that_was_estimated_last(daemon: Daemon) -> None:
    daemon.send(m.LoadModel(SPEC, {}))
    assert daemon.report() == m.MemoryEstimate(
        Shape(2, 4096, 512), MemoryNeed(weights=9, context=2 * 2 * 4096)
    )
    small = Shape(1, 100, 16)
    daemon.send(m.EstimateMemory(small))
    assert daemon.report() == m.MemoryEstimate(small, MemoryNeed(weights=9, context=200))
    daemon.send(m.Proceed())
    assert daemon.report() == m.Progress(1.0)
    loaded = daemon.report()
    assert isinstance(loaded, m.Loaded)
    assert (loaded.info.slots, loaded.info.ctx_size, loaded.info.batch_size) == (1, 100, 16)
    daemon.send(m.Quit())


def test_a_worker_that_tests_itself_computes_a_token_before_it_is_loaded(daemon: Daemon) -> None:
    fails = msgspec.structs.replace(SPEC, options={"fail_at_step": 1})
    daemon.send(m.LoadModel(fails, {"careful_s": 1.0}), m.Proceed())
    assert isinstance(daemon.report(), m.MemoryEstimate)
    assert daemon.report() == m.Progress(1.0)
    failed = daemon.report()
    assert isinstance(failed, m.ModelNotLoaded) and "step 1 failed" in failed.error["message"]


def test_the_token_of_a_load_is_computed_with_the_threads_assigned_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[int] = []
    step = EchoModel.step

    def record_threads(model: EchoModel, chunks: Sequence[Chunk]) -> None:
        used.append(model.threads)
        step(model, chunks)

    monkeypatch.setattr(EchoModel, "step", record_threads)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=run_worker, args=(SocketLink(theirs),))
    thread.start()
    with ours, theirs:
        daemon = Daemon(ours)
        daemon.send(m.LoadModel(SPEC, {"careful_s": 1.0}), m.SetThreads(5))
        assert isinstance(daemon.report(), m.MemoryEstimate)
        daemon.send(m.SetThreads(3), m.Proceed())
        while not isinstance(daemon.report(), m.Loaded):
            pass
        assert used == [3]
        daemon.send(m.Quit())
        thread.join(60)
        assert not thread.is_alive()


def test_a_cancelled_load_ends_even_behind_other_commands(daemon: Daemon) -> None:
    daemon.send(m.LoadModel(SPEC, {}), m.Quit())
    failed = daemon.report()
    assert isinstance(failed, m.ModelNotLoaded) and failed.error["name"] == "Cancelled"


def test_a_load_can_be_cancelled_after_its_estimate(daemon: Daemon) -> None:
    daemon.send(m.LoadModel(SPEC, {}))
    assert isinstance(daemon.report(), m.MemoryEstimate)
    daemon.send(m.Quit())
    failed = daemon.report()
    assert isinstance(failed, m.ModelNotLoaded) and failed.error["name"] == "Cancelled"


def test_a_failed_load_is_reported_without_an_estimate(daemon: Daemon) -> None:
    daemon.send(m.LoadModel(ModelSpec(name="m", path="/nowhere.gguf"), {}))
    failed = daemon.report()
    assert isinstance(failed, m.ModelNotLoaded) and failed.error["name"] == "LoadFailed"


def test_a_worker_of_another_build_exits_without_a_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = ["another-build", str(theirs.fileno()), str(os.getpid()), "0"]
        process = subprocess.run(
            [sys.executable, "-m", "inferd.scheduler.worker", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            timeout=60,
        )
        theirs.close()
        assert process.returncode == EXIT_OTHER_BUILD
        assert ours.recv(1) == b""


class Unstarted(threading.Thread):
    """A thread of a process that may have no more."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("has_files", [True, False])
def test_a_worker_that_gets_no_threads_refuses_the_load(
    has_files: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=run_worker, args=(SocketLink(theirs),))
    thread.start()
    monkeypatch.setattr("inferd.scheduler.call_thread.threading.Thread", Unstarted)
    with ours, theirs:
        daemon = Daemon(ours)
        daemon.send(m.LoadModel(SPEC, {}, str(tmp_path) if has_files else ""))
        assert isinstance(daemon.report(), m.MemoryEstimate)
        daemon.send(m.Proceed())
        while isinstance(failed := daemon.report(), m.Progress):
            pass
        assert isinstance(failed, m.ModelNotLoaded)
        assert failed.error["name"] == "RuntimeError" and "can't start" in failed.error["message"]
        thread.join(60)
        assert not thread.is_alive()


def test_a_worker_of_the_echo_model_imports_the_engine_of_grammars_at_the_first_grammar() -> None:
    """Its imports would take half of the time of the worker's start."""
    code = """if True:
        import sys, inferd.scheduler.worker
        from inferd.backends import ModelSpec, SamplingParams, estimate_memory, load_model
        spec = ModelSpec(name="echo", backend="echo", ctx_size=64)
        estimate_memory(spec).close()
        model = load_model(spec, lambda _: True)
        heavy = "numpy", "llguidance", "llama_cpp", "subprocess"
        print([name for name in heavy if name in sys.modules])
        model.compile_grammar(SamplingParams(json_schema="{}"), 0)
        print([name for name in heavy if name in sys.modules])
        model.close()
    """
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.splitlines() == ["[]", "['llguidance', 'subprocess']"]


def test_the_program_that_tries_grammars_does_not_import_numpy() -> None:
    """It would nearly double the time that the first grammar waits for the program's start."""
    code = "import sys, inferd.backends.grammars.trial_program; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
