"""Images, sounds and projectors that are made to harm, sent to a daemon by one of its users.

Each item ends at most its own request. Another user's stream, the workers and the daemon go on,
nothing stays on disk, and nobody learns what others have sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from inferd import Client, InferdError
from inferd.backends.errors import (
    InvalidArgument,
    LoadFailed,
    NotFound,
    OutOfMemory,
    QuotaExceeded,
    TooLarge,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.attacks.media_files import File, mutated_files, png, special_files, valid_files
from tests.backends.llama.mutated_files import read
from tests.daemon.other_users import ADA, BOB, as_user, daemon_for_all
from tests.echo import echo_model
from tests.models import ONE_THREAD, short_smollm2
from tests.repetitions import FACTOR, repetitions
from tests.tiny_projector import write_pair, write_projector
from tests.waiting import wait_until

COUNT, SEED = repetitions(80), 45
SIZES = (0, 7, 0xFFFFFFFF, *(1, 0x7FFFFFFF) * (FACTOR > 1))
"""Numbers in the header of a projector that do not fit its tensors."""
REFUSALS = (InvalidArgument, TooLarge, UnsupportedOperation, WorkerCrashed)
"""The errors that an item may end with: it is not readable, or it has ended its encoder."""
RESIDENT_GROWTH_MAX = 256 << 20


def message(file: File, text: str = "What is it?") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": text},
        {"type": file.kind, "data": file.data},
    ]
    return [{"role": "user", "content": parts}]


def ask(client: Client, model: str, file: File) -> InferdError | None:
    """Ask about a file in a new session, and return the error if it was refused."""
    try:
        with client.session(model) as session:
            session.chat(message(file), options={"n-predict": 1})
    except InferdError as exc:
        return exc
    return None


def stored_files(daemon: RunningDaemon) -> list[Path]:
    """Return the contents in the media store."""
    return [path for path in (daemon.directory / "state" / "media").rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tables of two models, of which one reads images and the other sounds."""
    tables = []
    for kind, name in {"mlp": "eyes", "ultravox": "ears"}.items():
        folder = tmp_path_factory.mktemp(kind)
        model, projector = write_pair(kind, folder)
        tables.append(f'[models.{name}]\nfile = "{model}"\nmmproj = "{projector}"\n')
    return "".join(tables)


@pytest.fixture(scope="module")
def daemon(models: str) -> Iterator[RunningDaemon]:
    head = "[daemon]\nkeep-alive-s = -1\n"
    with running_daemon(head + models + echo_model("slow", step_ms=5)) as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.socket) as connected:
        yield connected


def model_of(file: File) -> str:
    return {"image": "eyes", "audio": "ears"}[file.kind]


def test_valid_files_are_read(client: Client) -> None:
    refused = {file.name: ask(client, model_of(file), file) for file in valid_files()}
    assert {name for name, error in refused.items() if error is not None} <= {"webp"}, refused


@pytest.mark.timeout(300)
def test_broken_files_end_only_their_own_requests(daemon: RunningDaemon, client: Client) -> None:
    """Mutated files, and files that claim or unpack to more than they are."""
    for model in ("eyes", "ears"):  # loaded
        client.load_by_name(model)
    process = psutil.Process(daemon.pid)
    workers = {model: client.show(model)["pid"] for model in ("eyes", "ears")}
    resident = process.memory_info().rss
    unexpected = {}
    with stream_beside(daemon) as pieces:
        for file in [*special_files(), *mutated_files(COUNT, SEED)]:
            error = ask(client, model_of(file), file)
            if error is not None and not isinstance(error, REFUSALS):
                unexpected[file.name] = error
            elif error is not None:
                assert error.hint, file.name
        assert pieces()
    assert not unexpected
    assert workers == {m: client.show(m)["pid"] for m in ("eyes", "ears")}
    assert "worker.died" not in daemon.log and "Traceback" not in daemon.log
    assert process.memory_info().rss < resident + RESIDENT_GROWTH_MAX
    for file in valid_files():
        if file.name in ("png", "wav"):
            assert ask(client, model_of(file), file) is None
    wait_until(lambda: not stored_files(daemon))


@contextmanager
def stream_beside(daemon: RunningDaemon) -> Iterator[Any]:
    """Stream in another connection, turn after turn, and yield the function that waits for more of
    its pieces.
    """
    stopped, arrived, errors = Event(), Event(), []

    def stream() -> None:
        try:
            with Client(daemon.socket) as client:
                while not stopped.is_set():
                    with client.session("slow", raw=True) as session:
                        for _ in session.stream("and so on " * 50):
                            arrived.set()
                            if stopped.is_set():
                                break
        except InferdError as exc:
            errors.append(exc)

    def more() -> bool:
        arrived.clear()
        return arrived.wait(30)

    thread = Thread(target=stream)
    thread.start()
    try:
        yield more
    finally:
        stopped.set()
        thread.join()
    assert not errors


def test_an_image_is_refused_with_its_number_and_what_it_is(client: Client) -> None:
    good, bad = valid_files()[0], File("pdf", "image", b"%PDF-1.7\n" + bytes(100))
    parts = [{"type": "image", "data": file.data} for file in (good, bad)]
    with client.session("eyes") as session, pytest.raises(InvalidArgument, match="PDF") as caught:
        session.chat([{"role": "user", "content": parts}], options={"n-predict": 1})
    assert caught.value.data["item"] == 1 and caught.value.hint


# Projectors.


@pytest.mark.timeout(300)
def test_a_hostile_projector_ends_only_its_own_load(models: str, tmp_path: Path) -> None:
    model, projector = write_pair("mlp", tmp_path)
    tables, names = [models], []
    for number, data in enumerate(hostile_projectors(projector)):
        path = tmp_path / f"hostile-{number}.gguf"
        path.write_bytes(data)
        names.append(f"hostile-{number}")
        tables.append(f'[models.{names[-1]}]\nfile = "{model}"\nmmproj = "{path}"\n')
    picture = valid_files()[0]
    with running_daemon("".join(tables)) as daemon, Client(daemon.socket) as client:
        assert ask(client, "eyes", picture) is None
        for name in names:
            error = ask(client, name, picture)
            assert isinstance(error, (LoadFailed, OutOfMemory, *REFUSALS, type(None))), name
            assert not client.show("eyes").get("error")
        assert ask(client, "eyes", picture) is None
        assert "Traceback" not in daemon.log


def hostile_projectors(file: Path) -> Iterator[bytes]:
    """Yield variants of a projector: cut off, and with sizes that do not fit its tensors."""
    data = file.read_bytes()
    yield from (b"", data[:20], data[: len(data) // 2], b"GGUF" + b"\xff" * 100)
    header = read(file)
    for key in (
        *("clip.vision.image_size", "clip.vision.patch_size", "clip.vision.embedding_length"),
        *("clip.vision.block_count", "clip.vision.attention.head_count"),
        "clip.vision.projection_dim",
    ):
        for number in SIZES:
            value = number.to_bytes(4, "little")
            yield header.with_entry(key, header.entry(key).kind, value).to_bytes()


# Texts.

MARKERS = (
    "<__media__>", "<image>", "{WASMEDGE_IMAGE}", "<|media-0-0|>", "<|media-abcdefgh-0|>",
    "<|image_pad|>", "<start_of_image>",
)  # fmt: skip


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_in_a_text_is_text(marker: str, client: Client) -> None:
    with client.session("eyes") as session:
        session.chat(f"a{marker}b", options={"n-predict": 1})
        plain = session.metadata
        assert "media_tokens" not in plain
    with client.session("eyes") as session:
        session.chat(message(valid_files()[0], ""), options={"n-predict": 1})
        image = session.metadata
    with client.session("eyes") as session:
        session.chat(message(valid_files()[0], f"a{marker}b"), options={"n-predict": 1})
        both = session.metadata
    assert both["media_tokens"] == image["media_tokens"] > 0
    assert both["input_tokens"] - image["input_tokens"] == len(f"a{marker}b")


def test_a_mark_of_the_history_cannot_be_repeated(client: Client) -> None:
    """The mark is in no result, so a client would have to guess its random part."""
    with client.session("eyes", session_id="marks") as session:
        session.chat(message(valid_files()[0]), options={"n-predict": 1})
        graph = client.load_by_name("eyes")
        texts = [
            str(session.history()),
            str(client.apply_template(graph, message(valid_files()[0]))),
        ]
        assert not any("<|media-" in text for text in texts)
        client.delete_session(session_id="marks")


# Other users.


def test_another_users_image_is_never_seen(models: str) -> None:
    """Bob sends what Ada has sent, and learns nothing: no hash opens it, nothing is cached."""
    picture = valid_files()[0]
    with daemon_for_all(models) as daemon, ExitStack() as stack:
        ada, bob = (stack.enter_context(connect(daemon, user)) for user in (ADA, BOB))
        hers = stack.enter_context(ada.session("eyes", session_id="hers"))
        hers.chat(message(picture), options={"n-predict": 1})
        first = hers.metadata
        [part] = [p for p in hers.history().messages[0]["content"] if p["type"] == "image"]
        assert ada.session_media(part["sha256"], session_id="hers").data == picture.data

        his = stack.enter_context(bob.session("eyes", session_id="his"))
        answers = set()
        for digest in (part["sha256"], "00" * 32):
            with pytest.raises(NotFound) as caught:
                bob.session_media(digest, session_id="his")
            answers.add(str(caught.value).replace(digest, "…"))
        assert len(answers) == 1, "hers is answered as one that never was"
        stolen = {k: v for k, v in part.items() if k != "data"}
        with pytest.raises(InvalidArgument):
            his.chat([{"role": "user", "content": [stolen]}])
        his.chat(message(picture), options={"n-predict": 1})
        seen = his.metadata
        for name in ("media_tokens", "media_cached", "cached_tokens", "input_tokens"):
            assert dict(seen)[name] == dict(first)[name]
        assert seen["media_cached"] == 0 == seen["cached_tokens"]
        his.reset()
        his.chat(message(picture), options={"n-predict": 1})
        assert his.metadata["media_cached"] == 1, "his own image is known"


def connect(daemon: RunningDaemon, user: int) -> Client:
    with as_user(user):
        client = Client(daemon.socket)
        client.open()
    return client


TOKENS, TRIES, SHARE = 150, 3, 0.4
SMOLLM2_WIDTH = 576


@pytest.mark.model
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_stream_keeps_its_part_beside_a_flood_of_images(tmp_path: Path) -> None:
    # On a smaller model, what the daemon and the clients compute would count more than the shares.
    model, projector = short_smollm2(), write_projector("mlp", tmp_path, SMOLLM2_WIDTH)
    table = f'[models.m]\nfile = "{model}"\nmmproj = "{projector}"\nslots = 4\n'
    with daemon_for_all(table + ONE_THREAD) as daemon:
        pace(daemon)
        shares = (share_kept(daemon) for _ in range(TRIES))
        assert any(share >= SHARE for share in shares)


def share_kept(daemon: RunningDaemon) -> float:
    alone = pace(daemon)
    with flood_of_images(daemon):
        pace(daemon)
        return pace(daemon) / alone


def pace(daemon: RunningDaemon) -> float:
    """Return the tokens per second of a stream."""
    options = {"n-predict": TOKENS, "ignore-eos": True, "speculation": "off"}
    with connect(daemon, ADA) as client, client.session("m", raw=True) as session:
        began = time.monotonic()
        count = sum(1 for _ in session.stream(f"{began} a tale", options=options))
        return count / (time.monotonic() - began)


@contextmanager
def flood_of_images(daemon: RunningDaemon) -> Iterator[None]:
    """Send new images as another user over several connections, without a pause."""
    stopped, begun = Event(), Event()

    def send(client: Client, number: int) -> None:
        sent = 0
        while not stopped.is_set():
            sent += 1
            rows = (b"\0" + f"{number} {sent} ".encode().ljust(3 * 64, b"x")) * 64
            with client.session("m") as session:
                try:
                    picture = File("", "image", png(64, 64, rows))
                    session.chat(message(picture), options={"n-predict": 4})
                except (QuotaExceeded, InferdError):
                    if not stopped.is_set():
                        raise
            begun.set()

    with ExitStack() as stack:
        clients = [stack.enter_context(connect(daemon, BOB)) for _ in range(4)]
        threads = [Thread(target=send, args=(c, n)) for n, c in enumerate(clients)]
        for thread in threads:
            thread.start()
        try:
            assert begun.wait(30)
            yield
        finally:
            stopped.set()
            for thread in threads:
                thread.join()
