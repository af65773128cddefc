"""The synchronous client: from threads, in a running loop, over Ctrl-C and a fork."""

from __future__ import annotations

import asyncio
import inspect
import os
import pydoc
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal

import inferd
from inferd import (
    AsyncClient,
    AsyncSession,
    Busy,
    Client,
    ConnectionLost,
    NotFound,
    Options,
    Session,
    SessionBusy,
    ShuttingDown,
    Timeout,
    VersionMismatch,
)
from tests.ipc.fake_server import CANCELLED, METADATA, Exchange, FakeServer
from tests.processes import open_descriptors


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.path) as client:
        yield client


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.session("m") as session:
        yield session


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Client, AsyncClient), (Session, AsyncSession)], ids=["client", "session"]
)
def test_the_synchronous_object_has_every_public_name(ours: type, theirs: type) -> None:
    inside = {"aclose"}
    names = {n for n in dir(theirs) if not n.startswith("_")} - inside
    assert names <= set(dir(ours))


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Client, AsyncClient), (Session, AsyncSession)], ids=["client", "session"]
)
def test_a_synchronous_method_has_the_keywords_of_the_asynchronous_one(
    ours: type, theirs: type
) -> None:
    methods = dict(inspect.getmembers(ours, inspect.isfunction))
    shared = [name for name in methods if not name.startswith("_") and hasattr(theirs, name)]
    assert {"chat", "stream", "resume"} <= set(shared)
    for name in shared:
        found = inspect.signature(methods[name]).parameters
        assert found == inspect.signature(getattr(theirs, name)).parameters, name


@pytest.mark.parametrize("ours", [Client, Session])
@pytest.mark.parametrize(
    ("name", "result"), [("chat", "Any"), ("stream", "Stream"), ("resume", "Stream")]
)
def test_help_shows_the_keywords_of_a_turn_with_their_types(
    ours: type, name: str, result: str
) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(ours, name)))
    assert f"\n{name}(self, " in text
    assert "queue_timeout: 'float | None' = None" in text
    assert "priority: 'Priority | None' = None" in text
    assert f") -> '{result}'" in text


def test_parameters_are_keywords_which_precede_the_options(
    client: Client, server: FakeServer
) -> None:
    options: Options = {"n-predict": 9, "temp": 0.5}
    with client.session("m", options={"seed": 1}, temp=0.2, n_predict=3) as session:
        assert server.calls[-1][1]["options"] == {"seed": 1, "temp": 0.2, "n-predict": 3}
        session.chat("hi", options=options, n_predict=4, lora=None)
        assert server.calls[-1][1]["options"] == {"n-predict": 4, "temp": 0.5, "lora": None}
        list(session.stream("hi", options={"n_predict": 9}, n_predict=4))
        assert server.calls[-1][1]["options"] == {"n-predict": 4}, "one spelling of each"
        session.set_options(top_k=2)
        assert server.calls[-1][1]["options"] == {"top-k": 2}
    client.chat(12, "hi", tools=[{"type": "function"}])
    assert server.calls[-1][1]["options"] == {"tools": [{"type": "function"}]}


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("n_predikt", r"'n_predikt'; did you mean 'n_predict'\? .* options=\{'n-predikt': …\}"),
        ("temperature", r"'temperature'.* options=\{'temperature': …\}"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_one(
    client: Client, session: Session, keyword: str, message: str
) -> None:
    keywords: dict[str, Any] = {keyword: 4}
    for refused in (
        lambda: session.chat("hi", **keywords),
        lambda: session.stream("hi", **keywords),
        lambda: session.set_options(**keywords),
        lambda: client.session("m", **keywords),
    ):
        with pytest.raises(TypeError, match=message):
            refused()


def test_calls_that_sample_nothing_take_no_parameters(client: Client, session: Session) -> None:
    keywords: dict[str, Any] = {"temp": 0}
    for refused in (
        lambda: client.embed("m", "text", **keywords),
        lambda: client.compute(12, **keywords),
        lambda: session.resume(**keywords),
    ):
        with pytest.raises(TypeError, match="'temp'"):
            refused()


def test_streams_chats_and_pulls(client: Client, server: FakeServer) -> None:
    fractions: list[float] = []
    with client.session("m", system="s", on_progress=fractions.append) as session:
        stream = session.stream("one two", options={"temp": 0})
        assert list(stream) == ["one ", "two ", "."]
        assert list(stream) == []
        assert (stream.tokens, stream.metadata, session.metadata) == ([0, 1], METADATA, METADATA)
        reply = session.chat("hi")
        assert (reply, reply.metadata) == ("hi", METADATA)
        pull = session.pull("a b")
        assert (list(pull), list(pull), pull.metadata) == (["a ", "b "], [], METADATA)
        assert (session.graph, session.context, session.model) == (11, 12, "m")
        session.set_options({"temp": 1})
        session.reset()
    assert fractions == [0.25, 0.5, 1.0]
    assert server.names()[-2:] == ["finalize_execution_context", "unload"]
    assert [model["name"] for model in client.models()] == ["fake"]
    assert list(client.stream(12, "x")) == ["x ", "."]


def test_branches_places_in_the_queue_and_rewinding(client: Client, server: FakeServer) -> None:
    places: list[int] = []
    with client.session("m") as session:
        thread = threading.get_ident()
        stream = session.stream(
            "one", on_queue=lambda p: places.extend((p.position, threading.get_ident()))
        )
        assert list(stream) == ["one ", "."]
        assert places == [2, thread, 1, thread]
        one, two = session.fork(2)
        with one:
            assert one.chat("x") == "x"
        assert two.chat("y", on_queue=lambda p: places.append(p.position)) == "y"
        assert places[4:] == [2, 1]
        assert session.rewind(1).tokens == 5
        session.delete()
    assert client.fork_session(12).contexts == [13]
    assert client.rewind(12, tokens=1).turns == 1
    assert client.delete_session(session_id="a")
    assert list(client.stream(12, "x", on_queue=lambda p: None)) == ["x ", "."]


def test_credit_bounds_the_pieces_queued_for_a_slow_thread(
    session: Session, server: FakeServer, portal: BlockingPortal
) -> None:
    stream = session.stream("word " * 200)
    assert next(stream) == "word "
    assert server.credits == []
    assert len(list(stream)) == 200
    assert 5 <= len(server.credits) <= 6 and set(server.credits) == {32}


def test_a_for_loop_left_early_cancels_the_turn_at_once(
    session: Session, server: FakeServer, portal: BlockingPortal
) -> None:
    for _ in session.stream("hold"):
        break
    portal.call(server.await_call, "cancel")
    assert session.chat("next") == "next"
    with pytest.raises(LookupError):
        for _ in session.stream("hold"):
            raise LookupError
    portal.call(server.await_call, "cancel", 2)
    for _ in session.pull("a b"):
        break
    portal.call(server.await_call, "fini_single")


def test_leaving_with_waits_until_the_turn_has_ended(session: Session, server: FakeServer) -> None:
    with session.stream("hold") as stream:
        assert next(stream) == "held "
    assert not server.busy
    assert stream.metadata == session.metadata == CANCELLED
    with session.pull("a b") as pull:
        assert next(pull) == "a "
    assert server.names()[-1] == "fini_single"


def test_a_stream_left_in_a_variable_is_cancelled_by_the_threads_next_call(
    session: Session, server: FakeServer
) -> None:
    stream = session.stream("hold")
    for _ in stream:
        break
    assert session.chat("next") == "next"
    assert server.names().count("cancel") == 1


def test_another_threads_turn_is_not_disturbed(
    session: Session, server: FakeServer, portal: BlockingPortal
) -> None:
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(session.chat, "hold", timeout=30)
        portal.call(server.await_call, "chat")
        with pytest.raises(SessionBusy):
            session.chat("mine")
        assert session.cancel()
        with pytest.raises(inferd.Cancelled):
            reading.result()


def test_ctrl_c_cancels_the_turn_and_leaves_the_client_usable(
    session: Session, server: FakeServer, portal: BlockingPortal
) -> None:
    def interrupt() -> None:
        portal.call(server.await_held_turn)
        os.kill(os.getpid(), signal.SIGINT)

    def consume(call: str) -> None:
        if call == "stream":
            list(session.stream("hold"))
        else:
            session.chat("hold")

    for number, call in enumerate(("stream", "chat"), 1):
        thread = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            consume(call)
        thread.join()
        portal.call(server.await_call, "cancel", number)
        assert session.chat("next") == "next"


def test_many_threads_share_a_client(client: Client) -> None:
    def talk(number: int) -> str:
        with client.session("m") as session:
            return "".join(session.stream(f"{number} " * 100))

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(talk, range(32)))
    assert texts == [f"{number} " * 100 + "." for number in range(32)]


def test_the_client_works_inside_a_running_loop(server: FakeServer) -> None:
    async def cell() -> list[str]:
        with Client(server.path) as client, client.session("m") as session:
            return list(session.stream("in a notebook"))

    assert asyncio.run(cell()) == ["in ", "a ", "notebook ", "."]


def test_the_client_connects_with_the_first_call_and_closes_once(server: FakeServer) -> None:
    client = Client(server.path)
    assert server.peers == []
    assert client.stats()["waiting"] == 0
    assert client.server.software == "fake"
    client.close()
    client.close()
    with pytest.raises(ConnectionLost, match="is closed"):
        client.stats()


def test_the_client_starts_no_thread(server: FakeServer) -> None:
    before = threading.active_count()
    with Client(server.path) as client, client.session("m") as session:
        assert session.chat("hi") == "hi"
        assert threading.active_count() <= before, "others may end meanwhile"


def test_no_daemon_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    before = len(open_descriptors())
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="no daemon answers"), Client(tmp_path / "absent"):
            pass
    assert len(open_descriptors()) == before


def test_a_silent_daemon_and_one_of_another_version_are_errors(server: FakeServer) -> None:
    before = len(open_descriptors())
    assert server.hello is not None
    server.hello["protocol"] = [2, 1]
    with pytest.raises(VersionMismatch, match=r"speaks version 2\.1 of the protocol, this"):
        Client(server.path).open()
    server.hello = None
    silent = Client(server.path, connect_timeout=0.05)
    with pytest.raises(ConnectionLost, match=r"did not answer within 0\.05 s"):
        silent.open()
    assert not silent.connected
    assert len(open_descriptors()) <= before + 2, "at most the server's ends"


def test_a_full_backlog_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        with pytest.raises(ConnectionLost, match=r"did not answer within 0\.05 s"):
            Client(path, connect_timeout=0.05).open()


def test_a_goodbye_ends_the_call_with_its_reason_and_is_final(
    client: Client, server: FakeServer, portal: BlockingPortal
) -> None:
    async def leave(exchange: Exchange) -> dict[str, Any]:
        await exchange.peer.send([6, ShuttingDown("the daemon is shutting down").to_wire()])
        return {}

    server.answers["chat"] = leave
    with pytest.raises(ShuttingDown):
        client.chat(12, "x")
    assert not client.connected
    with pytest.raises(ConnectionLost, match="has closed the connection: the daemon is shutting"):
        client.stats()


def test_a_goodbye_while_the_client_is_idle_is_noticed_before_the_next_call(
    client: Client, server: FakeServer, portal: BlockingPortal
) -> None:
    goodbye = [6, ShuttingDown("the daemon is shutting down").to_wire()]
    portal.call(server.peers[0].send, goodbye)
    with pytest.raises(ConnectionLost):
        client.stats()
    assert server.calls == []


def test_errors_timeouts_and_retries_are_the_asynchronous_ones(server: FakeServer) -> None:
    with Client(server.path, retries=2) as client, client.session("m") as session:
        assert next(session.stream("refuse 2 times")) == "refuse "
        with pytest.raises(Busy):
            list(session.stream("refuse 9 times"))
        with pytest.raises(Timeout) as caught:
            list(session.stream("hold", timeout=0.02))
        assert caught.value.data == {"timeout": "total"} and not caught.value.retryable
        with pytest.raises(Timeout):
            session.chat("hold", timeout=0.02)
        assert session.chat("next") == "next"


def test_a_failed_enter_leaves_nothing_behind(client: Client, server: FakeServer) -> None:
    async def refuse(_: Any) -> dict[str, Any]:
        raise NotFound("no")

    server.answers["init_execution_context"] = refuse
    with pytest.raises(NotFound), client.session("m"):
        pass
    assert server.names()[-1] == "unload"


def test_a_lost_connection_ends_a_stream_in_another_thread(
    session: Session, server: FakeServer, portal: BlockingPortal
) -> None:
    stream = session.stream("hold")
    assert next(stream) == "held "
    portal.call(server.peers[0].stream.aclose)
    with pytest.raises(ConnectionLost):
        next(stream)


def test_closing_the_client_ends_a_stream_in_another_thread(server: FakeServer) -> None:
    client = Client(server.path)
    session = client.session("m").__enter__()
    stream = session.stream("hold")
    assert next(stream) == "held "
    client.close()
    with pytest.raises(ConnectionLost, match="closed"):
        next(stream)
    with pytest.raises(ConnectionLost, match="closed"):
        session.chat("x")


def test_after_a_fork_every_call_says_to_make_a_new_client(
    session: Session, client: Client
) -> None:
    stream = session.stream("hold")
    next(stream)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if child == 0:
        try:
            os.write(write, _outcomes_in_child(client, session, stream).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.splitlines() == ["make a new Client in the child process"] * 3 + ["closed"]
    stream.close()
    assert session.chat("the parent goes on") == "the parent goes on"


def _outcomes_in_child(client: Client, session: Session, stream: Any) -> str:
    said = []
    for call in (client.stats, lambda: session.chat("x"), lambda: next(session.stream("x"))):
        try:
            call()
            said.append("no error")
        except ConnectionLost as exc:
            said.append(exc.hint)
    stream.close()
    session.__exit__(None, None, None)
    client.close()
    return "\n".join([*said, "closed"])


def test_importing_inferd_loads_no_engine_and_no_command_line() -> None:
    code = """
import sys, inferd
light = set(sys.modules)
assert "anyio" not in light and "msgspec" not in light
for name in inferd.__all__: assert getattr(inferd, name) is not None, name
heavy = {"numpy", "llama_cpp", "structlog", "psutil", "typer", "rich", "trio"} & set(sys.modules)
assert not heavy, heavy
assert set(inferd.__all__) <= set(dir(inferd))
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = inferd.nothing  # type: ignore[attr-defined]
