"""Images and sounds in calls, through a real socket, with an echo model that reads them."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from inferd import AsyncClient, Audio, Client, Image
from inferd.backends.errors import (
    InferdError,
    InvalidArgument,
    NotFound,
    TooLarge,
    UnsupportedOperation,
)
from inferd.ipc.chat_messages import MEDIA_PARTS_MAX
from inferd.ipc.messages import PART_BYTES
from inferd.testing import RunningDaemon
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.echo import echo_model
from tests.pictures import png, wav
from tests.raw import RawClient
from tests.waiting import wait_until

ITEM_BYTES_MAX = 2 << 20
CONFIG = (
    f"[daemon]\nmedia-bytes-max = {ITEM_BYTES_MAX}\n"
    + echo_model("eyes", media=True, slots=4, ctx_size=65_536)
    + echo_model("blind", slots=4)
)
PNG = png(2, 2)
TEXT = {"type": "text", "text": "What is this?"}


def image(data: Any = PNG, **fields: Any) -> dict[str, Any]:
    return {"type": "image", "data": data, **fields}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@contextmanager
def file_of(data: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("image")
    try:
        os.write(descriptor, data)
        yield descriptor
    finally:
        os.close(descriptor)


def stored_files(daemon: RunningDaemon) -> list[Path]:
    """Return the files of all media stores below the daemon's directory."""
    found = [path for path in Path(daemon.directory).rglob("media/*/*") if path.is_file()]
    return sorted(found)


# Turns.


def test_a_turn_answers_an_image(client: Client) -> None:
    with client.session("eyes") as session:
        reply = session.chat(["What is this?", Image(PNG, alt="a dot"), Audio(wav(0.01))])
        assert "What is this?" in reply
        assert reply.metadata["media_tokens"] > 0
        question, answer = session.history().messages
        assert answer["role"] == "assistant"
        text, first, second = question["content"]
        assert text == TEXT
        assert first == {
            "type": "image",
            "sha256": hashlib.sha256(PNG).hexdigest(),
            "bytes": len(PNG),
            "media_type": "image/png",
            "tokens_max": 0,
            "alt": "a dot",
        }
        assert (second["type"], second["media_type"]) == ("audio", "audio/wav")
        assert session.chat("And now?") == "And now?"
        assert session.history().messages[0] == question


@pytest.mark.asyncio
async def test_the_asynchronous_client_streams_an_answer_to_a_large_image(
    daemon: RunningDaemon,
) -> None:
    large = png(1, 1, padding=ITEM_BYTES_MAX - 1000)
    async with (
        AsyncClient(daemon.socket) as client,
        client.session("eyes", session_id="large", resume=True) as session,
    ):
        async with session.stream([Image(large), "What?"]) as stream:
            text = "".join([piece async for piece in stream])
        assert "What?" in text
        assert (await session.media(hashlib.sha256(large).hexdigest())).data == large
        answers = await session.answers([Image(large), "Again?"], n=2)
        assert [answer.error for answer in answers] == [None, None]
        await session.delete()


def test_a_file_is_sent_without_reading_it_in_the_program(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(png(3, 3, padding=200_000))
    with client.session("eyes") as session:
        session.chat(["What?", Image(path)])
        [part] = [p for p in session.history().messages[0]["content"] if p["type"] == "image"]
        assert part["bytes"] == path.stat().st_size
        path.unlink()
        assert session.media(part["sha256"]).media_type == "image/png"


def test_the_bounds_on_tokens_of_an_image_are_stored_with_it(client: Client) -> None:
    images = [
        Image(PNG),
        Image(PNG, tokens_max=70),
        Image(PNG, detail="low"),
        Image(PNG, detail="high"),
    ]
    with client.session("eyes") as session:
        session.chat([*images, "What?"], image_tokens_max=512)
        parts = session.history().messages[0]["content"][:4]
        assert [part["tokens_max"] for part in parts] == [512, 70, 256, 512]


def test_a_template_renders_a_mark_for_an_image_and_counts_its_tokens(client: Client) -> None:
    graph = client.load_by_name("eyes")
    plain = client.apply_template(graph, user(TEXT))
    rendered = client.apply_template(graph, [{"role": "user", "content": [Image(PNG), TEXT]}])
    assert rendered == plain.replace(TEXT["text"], f"<__media__>{TEXT['text']}")
    assert rendered.tokens > plain.tokens
    again = client.apply_template(graph, [{"role": "user", "content": [Image(PNG), TEXT]}])
    assert (again, again.tokens) == (rendered, rendered.tokens)


def test_contents_are_deleted_with_their_session(client: Client, daemon: RunningDaemon) -> None:
    wait_until(lambda: not stored_files(daemon))
    with client.session("eyes") as session:
        session.chat(["What?", Image(PNG)])
        assert [path.name for path in stored_files(daemon)] == [hashlib.sha256(PNG).hexdigest()]
        client.apply_template(session.graph, user(image(png(9, 9)), TEXT))
        wait_until(lambda: len(stored_files(daemon)) == 1)  # a template keeps nothing
    wait_until(lambda: not stored_files(daemon))


# Refusals.


def refused(
    raw: RawClient, context: int, *parts: Any, fds: tuple[int, ...] = (), call: str = "chat"
) -> InferdError:
    """Return the error of a turn that is refused, and check that nothing remains of it."""
    before = raw.call("history", context=context)["messages"]
    with pytest.raises(InferdError) as caught:
        raw.call(call, fds, context=context, messages=user(*parts))
    assert raw.call("history", context=context)["messages"] == before
    return caught.value


@pytest.mark.parametrize("call", ["chat", "stream", "answers"])
def test_a_model_without_a_projector_refuses_images(raw: RawClient, call: str) -> None:
    context = raw.context("blind")
    error = refused(raw, context, TEXT, image(), call=call)
    assert isinstance(error, UnsupportedOperation)
    assert error.data["item"] == 0 and error.data["param"] == "messages.0.content.1"
    assert raw.call("chat", context=context, prompt="still works")["text"] == b"still works"


def test_a_content_of_another_kind_is_refused_with_its_item(raw: RawClient) -> None:
    context = raw.context("eyes")
    for content in (b"%PDF-1.7", b"", b"text", wav(0.01)):
        error = refused(raw, context, image(), TEXT, image(content))
        assert isinstance(error, InvalidArgument), error
        assert error.data["item"] == 1 and error.data["param"] == "messages.0.content.2"
        assert error.message.startswith("this is not an image: it is ")


def test_an_item_may_have_as_many_bytes_as_the_bound(raw: RawClient) -> None:
    context = raw.context("eyes")
    most = PNG + b"\0" * (ITEM_BYTES_MAX - len(PNG))
    with file_of(most) as fits, file_of(most + b"\0") as above:
        raw.call("chat", (fits,), context=context, messages=user(image({"fd": 0})))
        error = refused(raw, context, image({"fd": 0}), fds=(above,))
    assert isinstance(error, TooLarge)
    assert error.data["media_bytes_max"] == ITEM_BYTES_MAX
    assert error.data["item"] == 0


def test_what_is_no_file_is_refused_at_once(raw: RawClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    context = raw.context("eyes")
    paths = (tmp_path / "fifo", Path("/dev/zero"), tmp_path)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            error = refused(raw, context, image(), image({"fd": 0}), fds=(descriptor,))
        finally:
            os.close(descriptor)
        assert isinstance(error, InvalidArgument) and error.data["item"] == 1
    assert isinstance(refused(raw, context, image({"fd": 0})), InvalidArgument)


def test_a_request_has_as_many_images_as_the_bound(raw: RawClient) -> None:
    context = raw.context("eyes")
    error = refused(raw, context, *[image()] * (MEDIA_PARTS_MAX + 1))
    assert isinstance(error, TooLarge) and error.data["item"] == MEDIA_PARTS_MAX
    result = raw.call("chat", context=context, messages=user(*[image()] * MEDIA_PARTS_MAX))
    assert result["metadata"]["media_tokens"] >= MEDIA_PARTS_MAX


def test_a_stored_part_is_no_reference_to_the_content(raw: RawClient) -> None:
    context = raw.context("eyes")
    raw.call("chat", context=context, messages=user(image(), TEXT))
    part = raw.call("history", context=context)["messages"][0]["content"][0]
    error = refused(raw, context, part)
    assert isinstance(error, InvalidArgument) and "session_media" in error.hint


# Many clients, and clients that vanish.


@pytest.mark.asyncio
async def test_a_hundred_clients_send_images_at_once(daemon: RunningDaemon) -> None:
    answered: list[int] = []

    async def ask(number: int) -> None:
        content = png(1, 1, text=b"%03d" % number, padding=(number % 4) * 50_000)
        async with AsyncClient(daemon.socket, retries=20) as client:
            reply = await client.chat("eyes", [f"This is {number}.", Image(content)])
            assert f"This is {number}." in reply
            answered.append(number)

    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(ask, number)
    assert sorted(answered) == list(range(100))
    await anyio.to_thread.run_sync(wait_until, lambda: not stored_files(daemon))


def test_nothing_is_left_of_a_client_that_vanishes_while_it_sends(
    daemon: RunningDaemon, client: Client
) -> None:
    wait_until(lambda: not stored_files(daemon))
    for sent in (0.1, 0.9, 1.0):
        with RawClient(daemon.socket) as raw, file_of(png(1, 1, padding=100_000)) as fd:
            context = raw.context("eyes")
            parts = [image(png(1, 1, padding=500_000)), image({"fd": 0})]
            params = {"context": context, "messages": user(*parts)}
            body = msgspec.msgpack.encode([1, 99, "chat", params])
            frame = struct.pack("<I", len(body)) + body
            size = int(sent * len(frame))
            raw.socket.settimeout(60)
            done = socket.send_fds(raw.socket, [frame[:size]], [fd])
            raw.socket.sendall(frame[done:size])
    wait_until(lambda: not client.sessions())
    wait_until(lambda: not stored_files(daemon))
    assert "What?" in client.chat("eyes", ["What?", Image(PNG)])


def test_a_descriptor_is_closed_once_it_was_read(daemon: RunningDaemon, raw: RawClient) -> None:
    def passed_files() -> int:
        """Return how many of the test's files the daemon has open."""
        links: list[str] = []
        for descriptor in Path(f"/proc/{daemon.pid}/fd").iterdir():
            with suppress(OSError):  # it was closed meanwhile
                links.append(os.readlink(descriptor))
        return sum("memfd:image" in link for link in links)

    context = raw.context("eyes")
    with ExitStack() as stack:
        fds = tuple(stack.enter_context(file_of(png(1, i + 1))) for i in range(16))
        parts = [image({"fd": 0}) for _ in fds]
        raw.call("chat", fds, context=context, messages=user(*parts))
    wait_until(lambda: not passed_files())


# Reading the contents back.


def test_a_content_is_read_back_in_parts_by_its_owner_alone(raw: RawClient) -> None:
    content = png(1, 1, padding=PART_BYTES + 1000)
    sha256 = hashlib.sha256(content).hexdigest()
    context = raw.context("eyes")
    with file_of(content) as fd:
        raw.call("chat", (fd,), context=context, messages=user(image({"fd": 0})))
    parts = []
    for offset in (0, PART_BYTES, len(content), len(content) + 5):
        result = raw.call("session_media", context=context, sha256=sha256, offset=offset)
        assert (result["size"], result["media_type"]) == (len(content), "image/png")
        parts.append(result["data"])
    assert parts == [content[:PART_BYTES], content[PART_BYTES:], b"", b""]
    other = raw.context("eyes")
    for wrong in (
        {"context": other, "sha256": sha256},
        {"context": context, "sha256": "0" * 64},
        {"context": context, "sha256": sha256.upper()},
        {"context": context, "sha256": "../../../etc/passwd"},
        {"session_id": "none", "sha256": sha256},
    ):
        with pytest.raises(NotFound):
            raw.call("session_media", **wrong)
    for wrong in (
        {"sha256": sha256},
        {"context": context, "session_id": "x", "sha256": sha256},
        {"context": context, "sha256": sha256, "offset": -1},
    ):
        with pytest.raises(InvalidArgument):
            raw.call("session_media", **wrong)


def test_a_content_is_read_back_from_a_dormant_session(client: Client) -> None:
    with client.session("eyes", session_id="pictures") as session:
        session.chat(["What?", Image(PNG)])
    sha256 = hashlib.sha256(PNG).hexdigest()
    assert client.session_media(sha256, session_id="pictures").data == PNG
    assert client.delete_session(session_id="pictures")
    with pytest.raises(NotFound):
        client.session_media(sha256, session_id="pictures")


def test_another_user_cannot_read_a_content_by_its_hash() -> None:
    sha256 = hashlib.sha256(PNG).hexdigest()
    with (
        daemon_for_all(echo_model("eyes", media=True)) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        errors = []
        for stored in (False, True):
            if stored:
                messages = user(image(), TEXT)
                ada.call("chat", context=ada.context("eyes"), messages=messages)
            with pytest.raises(NotFound) as caught:
                bob.call("session_media", context=bob.context("eyes"), sha256=sha256)
            errors.append(caught.value.to_wire())
        assert errors[0] == errors[1]
