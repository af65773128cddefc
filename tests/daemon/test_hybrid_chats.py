"""Chats on a hybrid model: what is computed again after edits, old answers that the template
shortens, and a restart.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.tiny_gguf import write_tiny

QUESTIONS = [f"Question number {number} has some tokens of its own. " * 2 for number in range(4)]
GREEDY = {"temp": 0, "n-predict": 12}
SLACK = 30
"""Tokens before an answer, and of borders too close to another to have a checkpoint."""


@pytest.fixture
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    file = write_tiny("lfm2-chatml", tmp_path_factory.mktemp("models"))
    config = f'[defaults]\nthreads = 1\n[models.m]\nfile = "{file}"\nctx-size = 2048\nslots = 2\n'
    with running_daemon(config) as running:
        yield running


def test_answers_that_the_template_shortens_are_computed_again_and_nothing_else(
    daemon: RunningDaemon,
) -> None:
    with Client(daemon.socket) as client, client.session("m", options=GREEDY) as session:
        before = 0
        for question in QUESTIONS:
            metadata = session.chat(question).metadata
            assert metadata["cached_tokens"] >= before - SLACK
            before = metadata["input_tokens"]


def test_an_edit_of_an_older_message_computes_little_also_after_a_restart(
    daemon: RunningDaemon,
) -> None:
    with (
        Client(daemon.socket) as client,
        client.session("m", session_id="diary", options=GREEDY) as session,
    ):
        for question in QUESTIONS:
            session.chat(question)
        back = session.rewind(turns=2)
        assert back.tokens - back.cached_tokens <= SLACK
        assert session.chat("Another question.").metadata["cached_tokens"] >= back.cached_tokens
        statistics = client.stats()["models"]["m"]
        assert 0 < statistics["kv_ram_checkpoints"] <= 32
        assert 0 < statistics["kv_ram_checkpoint_bytes"] < statistics["kv_ram_bytes"]
        assert statistics["checkpoint_bytes"] > 0
    daemon.stop()
    daemon.start_again()

    with (
        Client(daemon.socket) as client,
        client.session("m", session_id="diary", options=GREEDY) as session,
    ):
        back = session.rewind(turns=2)
        metadata = session.chat("Yet another question.").metadata

    assert metadata["cached_tokens"] >= back.tokens - SLACK


def test_a_chat_that_is_sent_as_a_whole_finds_the_border_of_its_edited_message(
    daemon: RunningDaemon,
) -> None:
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": QUESTIONS[i // 2]} for i in range(7)]
    with Client(daemon.socket) as client:
        with client.session("m", options=GREEDY) as session:
            session.chat(chat)
        with client.session("m", options=GREEDY) as session:
            edited = [*chat[:4], {"role": "user", "content": "Another question."}]
            metadata = session.chat(edited).metadata

    new = len("user\nAnother question.\nassistant\n") + 2
    assert metadata["cached_tokens"] >= metadata["input_tokens"] - new - SLACK
