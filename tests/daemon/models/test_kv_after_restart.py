"""KV states outlive the daemon but not the deletion of their session: real files and processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferd import Client
from inferd.scheduler.engine.steps import END_TOKENS
from inferd.testing import RunningDaemon, running_daemon

STORY = "Once upon a time there was a king who had three sons and a golden bird. " * 8
MORE = "And then?"
MODELS = pytest.mark.parametrize("memory", ["plain", "window", "recurrent", "hybrid"])


def config(memory: str = "plain") -> str:
    return f'[models.m]\nbackend = "echo"\nslots = 2\n[models.m.echo]\nmemory = "{memory}"\n'


def kv_files(daemon: RunningDaemon) -> list[Path]:
    return [path for path in (daemon.directory / "state" / "kv").rglob("*") if path.is_file()]


def run_turn(daemon: RunningDaemon, prompt: str, session_id: str | None = None) -> tuple[int, int]:
    """Do one turn on the raw prompt; return how many tokens it had, and how many were cached."""
    with Client(daemon.socket) as client:
        graph = client.load_by_name("m")
        if session_id is None:
            context = client.init_execution_context(graph)
        else:
            context = client.init_execution_context_with_session_id(graph, session_id)
        client.set_input(context, 0, prompt.encode())
        client.compute(context)
        assert client.get_output(context, 0) == prompt.encode()
        metadata = json.loads(client.get_output(context, 1))
        return metadata["input_tokens"], metadata["cached_tokens"]


@MODELS
def test_a_conversation_goes_on_after_a_restart(memory: str) -> None:
    with running_daemon(config(memory)) as daemon:
        tokens, cached = run_turn(daemon, STORY, "diary")
        assert cached == 0
        daemon.stop()
        assert kv_files(daemon)
        daemon.start_again()

        _, cached = run_turn(daemon, STORY + MORE)

        end = END_TOKENS if memory == "window" else 1
        assert tokens - end <= cached <= tokens


def test_a_damaged_kv_file_is_computed_again() -> None:
    with running_daemon(config()) as daemon:
        run_turn(daemon, STORY, "diary")
        daemon.stop()
        for path in kv_files(daemon):
            damaged = bytearray(path.read_bytes())
            damaged[-1] ^= 1
            path.write_bytes(damaged)
        daemon.start_again()

        assert run_turn(daemon, STORY + MORE)[1] == 0


def test_a_deleted_session_leaves_no_file() -> None:
    with running_daemon(config()) as daemon:
        run_turn(daemon, STORY, "diary")
        run_turn(daemon, STORY.upper(), "other")
        daemon.stop()
        before = kv_files(daemon)
        daemon.start_again()
        with Client(daemon.socket) as client:
            client.delete_session(session_id="diary")

            after = kv_files(daemon)
            assert after and len(after) < len(before)
            client.delete_session(session_id="other")
            assert not kv_files(daemon)


def test_files_written_during_an_unload_are_counted_and_deleted() -> None:
    with running_daemon(config()) as daemon, Client(daemon.socket) as client:
        graph = client.load_by_name("m")
        context = client.init_execution_context_with_session_id(graph, "diary")
        client.set_input(context, 0, STORY.encode())
        client.compute(context)
        client.unload(graph)
        client.unload_model("m", force=True)
        assert kv_files(daemon)

        client.delete_session(session_id="diary")

        assert not kv_files(daemon)


def test_a_session_that_may_no_longer_be_stored_is_not() -> None:
    with running_daemon(config()) as daemon:
        with Client(daemon.socket) as client:
            graph = client.load_by_name("m")
            context = client.init_execution_context_with_session_id(graph, "diary")
            client.set_input(context, 0, STORY.encode())
            client.compute(context)
            client.init_execution_context_with_session_id(graph, "diary", persist=False)
        daemon.stop()
        assert not kv_files(daemon)


def test_a_session_that_may_not_be_stored_is_not() -> None:
    with running_daemon(config()) as daemon:
        with Client(daemon.socket) as client:
            graph = client.load_by_name("m")
            context = client.init_execution_context_with_session_id(graph, "quiet", persist=False)
            client.set_input(context, 0, STORY.encode())
            client.compute(context)
        daemon.stop()
        assert not kv_files(daemon)
