"""Images of sessions in a real daemon: restarts, kills, models that cannot read them, deletion."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import (
    InferdError,
    InvalidArgument,
    NotFound,
    TooLarge,
    UnsupportedOperation,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.access.test_shared_states import connected
from tests.daemon.calls.test_copies import Follower
from tests.daemon.calls.test_moving_sessions import Daemons
from tests.daemon.other_users import BOB, daemon_for_all
from tests.echo import echo_model
from tests.pictures import png
from tests.tiny_projector import write_pair
from tests.waiting import wait_until

EYES = echo_model("eyes", slots=2, media=True)
PICTURE, OTHER = png(32, 32, text=b"a cat"), png(32, 32, text=b"a dog")
GREEDY: dict[str, Any] = {"temp": 0, "n-predict": 6}


def asked(*parts: str | bytes) -> list[dict[str, Any]]:
    """Return a message of a user with texts and images."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "data": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def media_files(daemon: RunningDaemon) -> list[bytes]:
    """Return the images in the state directory."""
    folder: Path = daemon.directory / "state" / "media"
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def media_bytes(daemon: RunningDaemon) -> int:
    """Return the bytes of the images in the state directory, while files may be deleted."""
    total = 0
    for folder, _, names in os.walk(daemon.directory / "state" / "media"):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(Path(folder) / name).st_size
    return total


def kinds(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Return the types of the parts of the first message."""
    return [part["type"] for part in messages[0]["content"]]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(EYES) as running:
        yield running


def test_an_image_outlives_kills_and_ends_with_its_session(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client, client.session("eyes", session_id="diary") as session:
        first = session.chat(asked("What is", PICTURE, "?"), options={"n-predict": 2})
        assert first.metadata["media_tokens"] > 0
        with client.session("eyes") as other:
            other.chat(asked(OTHER), options={"n-predict": 2})
            assert media_files(daemon) == sorted([PICTURE, OTHER])
            daemon.kill()
    daemon.start_again()

    with Client(daemon.socket) as client:
        assert media_files(daemon) == [PICTURE], "that of the session without an id is gone"
        messages = client.history(session_id="diary").messages
        assert kinds(messages) == ["text", "image", "text"]
        with client.session("eyes", session_id="diary") as session:
            again = session.chat(asked("And now?", PICTURE), options={"n-predict": 2})
            assert again.metadata["media_tokens"] == first.metadata["media_tokens"]
            with client.session("eyes", session_id="other") as other:
                other.chat(asked(PICTURE), options={"n-predict": 2})
            assert client.delete_session(session_id="diary")
            assert media_files(daemon) == [PICTURE], "the other session has it, too"
            assert client.delete_session(session_id="other")
            assert media_files(daemon) == []


def test_an_interrupted_turn_with_an_image_is_resumed_after_a_kill() -> None:
    with running_daemon(echo_model("eyes", slots=2, media=True, step_ms=20)) as daemon:
        with Client(daemon.socket) as client, client.session("eyes", session_id="d") as session:
            stream = session.stream(asked("a long question about it " * 8, PICTURE))
            next(iter(stream))
            daemon.kill()
            with pytest.raises(InferdError):
                list(stream)
        daemon.start_again()

        with Client(daemon.socket) as client, client.session("eyes", session_id="d") as session:
            resumed = session.resume()
            assert "".join(resumed)
            assert media_files(daemon) == [PICTURE]
            assert kinds(client.history(session_id="d").messages) == ["text", "image"]
        with Client(daemon.socket) as client:
            client.delete_session(session_id="d")
            assert media_files(daemon) == []


@pytest.mark.parametrize("on_swap", ["note", "refuse"])
def test_a_model_that_cannot_read_them_gets_texts_or_refuses(on_swap: str) -> None:
    config = f'[daemon]\nmedia-on-swap = "{on_swap}"\n' + EYES + echo_model("blind")
    with (
        running_daemon(config) as daemon,
        Client(daemon.socket) as client,
        client.session("eyes", session_id="diary") as session,
    ):
        session.chat(asked("What?", PICTURE), options={"n-predict": 2})
        client.swap("eyes", "blind")
        if on_swap == "refuse":
            with pytest.raises(UnsupportedOperation, match="cannot read the images"):
                session.chat("And?", options={"n-predict": 2})
        else:
            reply = session.chat("And?", options={"n-predict": 2})
            assert reply.metadata["adjusted"]["media"].startswith("1 of the history's images")
            assert "media_tokens" not in reply.metadata
        assert kinds(client.history(session_id="diary").messages) == ["text", "image"]
        assert media_files(daemon) == [PICTURE]


def test_a_worker_that_dies_gets_the_images_of_its_turns_again(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client, client.session("eyes", session_id="diary") as session:
        before = session.chat(asked("What is this", PICTURE), options={"n-predict": 2})
        pid = client.show("eyes")["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: client.show("eyes").get("pid") != pid)

        after = session.chat(asked("And?", PICTURE), options={"n-predict": 2})

        assert after.metadata["media_tokens"] == before.metadata["media_tokens"]
        assert client.delete_session(session_id="diary")
        assert media_files(daemon) == []


def test_a_session_moves_to_another_daemon_with_its_image() -> None:
    with (
        running_daemon(EYES) as here,
        running_daemon(EYES) as there,
        ExitStack() as stack,
    ):
        daemons = Daemons(stack, here, there)
        with Client(here.socket) as client, client.session("eyes", session_id="diary") as session:
            session.chat(asked("What is this", PICTURE), options={"n-predict": 2})

        daemons.move()

        assert media_files(there) == [PICTURE]
        wait_until(lambda: not media_bytes(here))
        assert kinds(daemons.target.history(session_id="diary").messages) == ["text", "image"]
        assert daemons.target.delete_session(session_id="diary")
        assert media_files(there) == []


@cache
def large() -> list[bytes]:
    """Return images that one message and one frame do not take; made at their first use."""
    return [png(32, 32, padding=11 << 20, text=b"%d" % number) for number in range(3)]


ROOMY = echo_model("eyes", slots=2, media=True, **{"ctx-size": 100_000})
PARTS = 40
"""Parts of an export after which its first image has arrived, and its last one has not begun."""


def write_large_diary(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client, client.session("eyes", session_id="diary") as session:
        for picture in large():
            session.chat(asked("What is this", picture), options={"n-predict": 1})


def begin_copy(daemons: Daemons, parts: int = PARTS) -> tuple[int, int]:
    """Copy the first parts of the session `diary`; return the next offset and the size."""
    offset, size = 0, 1
    for _ in range(parts):
        part = daemons.source.export_session("diary", "t1", peer="there", offset=offset)
        taken = daemons.target.import_session(
            "diary", "t1", part.data, part.size, peer="here", offset=offset
        )
        offset, size = offset + len(part.data), taken.size
    return offset, size


@pytest.fixture
def two_daemons() -> Iterator[Daemons]:
    """Daemons, the first of which has a dormant session with 33 MiB of images."""
    with running_daemon(ROOMY) as here, running_daemon(ROOMY) as there, ExitStack() as stack:
        write_large_diary(here)
        yield Daemons(stack, here, there)


def test_a_session_with_more_images_than_one_upload_moves(two_daemons: Daemons) -> None:
    two_daemons.move()
    assert media_files(two_daemons.there) == sorted(large())
    wait_until(lambda: not media_bytes(two_daemons.here))
    messages = two_daemons.target.history(session_id="diary").messages
    assert [kinds([one]) for one in messages if one["role"] == "user"] == [["text", "image"]] * 3
    with two_daemons.target.session("eyes", session_id="diary") as session:
        reply = session.chat(asked("And", large()[0]), options={"n-predict": 1})
        assert reply.metadata["media_tokens"] > 0


def test_images_of_a_session_that_does_not_arrive_are_deleted(two_daemons: Daemons) -> None:
    for end in ("drop", "connection", "again", "kill"):
        offset, size = begin_copy(two_daemons)
        assert offset < size and len(media_files(two_daemons.there)) == 2
        if end == "drop":
            two_daemons.target.end_transfer("t1", "drop")
        elif end == "connection":
            two_daemons.target.close()
        elif end == "again":
            with pytest.raises(InvalidArgument, match="after"):
                two_daemons.target.import_session("diary", "t1", b"part", size, offset=offset + 1)
            begin_copy(two_daemons, 1)
            wait_until(lambda: media_bytes(two_daemons.there) <= len(large()[0]))
            two_daemons.target.end_transfer("t1", "drop")
        else:
            two_daemons.there.kill()
            two_daemons.there.start_again()
        wait_until(lambda: not media_bytes(two_daemons.there))
        assert media_files(two_daemons.here) == sorted(large()), "the session has not left"
        two_daemons.source.end_transfer("t1", "keep")
        two_daemons.connect()
    two_daemons.move()
    assert media_files(two_daemons.there) == sorted(large())


def test_a_daemon_that_is_lost_during_an_export_has_the_session_and_its_images(
    two_daemons: Daemons,
) -> None:
    begin_copy(two_daemons)
    two_daemons.here.kill()
    two_daemons.here.start_again()
    assert media_files(two_daemons.here) == sorted(large())
    two_daemons.target.end_transfer("t1", "drop")
    two_daemons.connect()
    two_daemons.move()
    assert media_files(two_daemons.there) == sorted(large())
    wait_until(lambda: not media_bytes(two_daemons.here))


def test_a_daemon_refuses_a_session_whose_images_exceed_its_bounds() -> None:
    bound = f"[daemon]\nmedia-session-bytes-max = {12 << 20}\n"
    with (
        running_daemon(ROOMY) as here,
        running_daemon(bound + ROOMY) as there,
        ExitStack() as stack,
    ):
        write_large_diary(here)
        daemons = Daemons(stack, here, there)
        with pytest.raises(TooLarge) as refused:
            begin_copy(daemons, 1)
        assert refused.value.data["media_session_bytes_max"] == 12 << 20
        assert media_files(there) == [] and media_files(here) == sorted(large())


def test_another_user_begins_with_a_shared_state_that_has_an_image() -> None:
    rule = f'[access.readers]\nusers = [{BOB}]\nstates = ["root/cat"]\n'
    with daemon_for_all(rule + EYES) as daemon:
        with Client(daemon.socket) as mine, mine.session("eyes") as session:
            session.chat(asked("What is this", PICTURE), options={"n-predict": 2})
            session.save_state("cat")
        assert media_files(daemon) == [PICTURE]
        with connected(daemon, BOB) as bob, bob.session("eyes", from_state="root/cat") as session:
            assert kinds(session.history().messages) == ["text", "image"]
            assert media_files(daemon) == [PICTURE, PICTURE], "each user has their own"
            session.chat(asked("And this?", OTHER), options={"n-predict": 2})
            assert len(media_files(daemon)) == 3
        with Client(daemon.socket) as mine:
            assert media_files(daemon) == [PICTURE]
            assert mine.delete_state("cat")
            assert media_files(daemon) == []


@pytest.mark.parametrize("kind", ["mlp", "gemma3", "idefics3", "qwen2vl_merger"])
def test_answers_about_an_image_are_the_same_after_rewinds_branches_and_kills(
    kind: str, tmp_path: Path
) -> None:
    model, projector = write_pair(kind, tmp_path)
    config = f'[models.m]\nfile = "{model}"\nmmproj = "{projector}"\nctx-size = 512\nslots = 2\n'
    picture = png(48, 32, (200, 60, 20))
    with running_daemon(config + "threads = 1\n") as daemon:
        with Client(daemon.socket) as client, client.session("m", options=GREEDY) as session:
            asked_first = session.chat(asked("What is", picture, "?"))
            items = asked_first.metadata["media_tokens"]
            expected = str(session.chat("And?"))
        with Client(daemon.socket) as client:
            session = client.session("m", session_id="diary", options=GREEDY).open()
            first = session.chat(asked("What is", picture, "?"))
            assert str(first) == str(asked_first)
            [branch] = session.fork()
            assert str(branch.chat("And?")) == expected
            assert str(session.chat("And?")) == expected
            session.rewind(1)
            assert str(session.chat("And?")) == expected
            session.rewind(1)
            daemon.kill()
        daemon.start_again()
        with Client(daemon.socket) as client:
            session = client.session("m", session_id="diary", options=GREEDY).open()
            reply = session.chat("And?")
            assert str(reply) == expected
            assert reply.metadata["media_tokens"] == items
            tokens = first.metadata["input_tokens"]
            left = session.rewind(tokens=tokens - 4).tokens
            assert 0 < left <= tokens - 4
            assert client.delete_session(session_id="diary")
            assert media_files(daemon) == []


def test_a_copy_on_another_daemon_gets_the_image_with_the_whole_session() -> None:
    with running_daemon(EYES) as here, running_daemon(EYES) as there, ExitStack() as stack:
        follower = Follower(stack, here, there)
        follower.open("eyes")
        question = asked("What is this", PICTURE)
        follower.client.call("chat", context=follower.context, messages=question)
        changes = [change for _, change in follower.take()]

        with pytest.raises(NotFound, match="are not here"):  # its entry then reads the whole
            for change in changes:
                follower.store(change)
        with Client(here.socket) as home:
            whole = home.read_copy("diary")
        follower.store({"stream": whole.stream, "number": whole.number, "data": whole.data})
        here.kill()
        follower.keep(whole.stream)

        assert media_files(there) == [PICTURE]
        messages = follower.target.history(session_id="diary").messages
        assert kinds(messages) == ["text", "image"]
        with follower.target.session("eyes", session_id="diary") as session:
            [part] = [p for p in messages[0]["content"] if p["type"] == "image"]
            assert session.media(part["sha256"]).data == PICTURE
            session.delete()
        assert media_files(there) == []


def test_a_damaged_journal_deletes_no_image_that_it_may_have_named(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client, client.session("eyes", session_id="diary") as session:
        session.chat(asked("What is this", PICTURE), options={"n-predict": 2})
    daemon.stop()
    journal = daemon.directory / "state" / "sessions.db"
    journal.write_bytes(b"not a journal")
    daemon.start_again()

    assert media_files(daemon) == [PICTURE], "the journal was set aside, and may be repaired"
    daemon.stop()
    daemon.start_again()
    assert media_files(daemon) == []
