"""Hostile ends of channels to the process of a graph: other users are served all the while, in the
same process, whose memory and descriptors stay bounded.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from bench.attack.lingering import LingeringSockets
from inferd.backends.errors import Busy, InferdError, InvalidArgument, QuotaExceeded
from inferd.daemon.channels import USER_MAX
from inferd.scheduler.channels import BYTES_MAX, CHANNEL_BYTES_MAX, REQUESTS_MAX
from inferd.testing import RunningDaemon
from inferd.wire.frames import FRAME_BYTES_MAX, pack_frame
from tests.daemon.graph_calls import floats, longs
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.onnx_graphs import affine, write_graphs, zeros
from tests.raw import RawClient
from tests.raw_channel import RawChannel, message_of, open_graph, pass_socket
from tests.waiting import wait_until

ROWS = {"a": floats(1, 2), "b": floats(10, 20)}
SEED = 20261202
LINGER_S = 30
SERVED_S_MAX = LINGER_S / 2
"""The longest wait of another user for a small computation, on a busy machine."""
MEMORY_BYTES = 128 << 20
"""The most memory besides the bounded bytes: that of the allocator, and of parsed messages."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(models, {"affine": affine(), "zeros": zeros()})
    config = "".join(
        f"[models.{name}]\nfile = {json.dumps(str(models / f'{name}.onnx'))}\nthreads = 1\n"
        for name in ("affine", "zeros")
    )
    with daemon_for_all(config) as running:
        yield running


@pytest.fixture
def attacker(daemon: RunningDaemon) -> Iterator[RawClient]:
    with client_of(daemon, ADA) as client:
        yield client


def process_of(client: RawClient, name: str = "affine") -> psutil.Process:
    [found] = client.call("show", name=name)["models"]
    return psutil.Process(int(found["pid"]))


def files_of(process: psutil.Process) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


@contextmanager
def others_served(daemon: RunningDaemon, name: str = "affine") -> Iterator[psutil.Process]:
    """Check that another user is served during the body, by the daemon and in a channel, in one
    process, which has no more descriptors afterwards, nor has the daemon. Yield the process.
    """
    over, failures, served = threading.Event(), list[BaseException](), [0]
    tensors = ROWS if name == "affine" else {"n": longs(4)}
    with client_of(daemon, BOB) as bob:
        graph = open_graph(bob, name)
        context = bob.call("init_execution_context", graph=graph)["context"]
        inputs = [[key, message_of(tensor)] for key, tensor in tensors.items()]
        bob.call("compute", context=context, inputs=inputs)
        process = process_of(bob, name)
        with RawChannel(bob, graph, timeout_s=SERVED_S_MAX) as channel:
            bob.socket.settimeout(SERVED_S_MAX)
            channel.compute(tensors)
            files = files_of(process), files_of(psutil.Process(daemon.pid))

            def compute() -> None:
                try:
                    while not served[0] or not over.is_set():
                        assert channel.compute(tensors)
                        assert bob.call("compute", context=context, inputs=inputs)["outputs"]
                        served[0] += 1
                except BaseException as exc:
                    failures.append(exc)

            thread = threading.Thread(target=compute)
            thread.start()
            try:
                yield process
            finally:
                over.set()
                thread.join()
            assert failures == [] and served[0]
            assert channel.compute(tensors)
            assert process_of(bob, name).pid == process.pid
            wait_until(
                lambda: (
                    files_of(process) <= files[0]
                    and files_of(psutil.Process(daemon.pid)) <= files[1]
                )
            )


def new_end(client: RawClient, graph: int) -> socket.socket:
    """Open a channel, and return the client's end."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            pass_socket(client, graph, theirs)
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    return ours


def opened_end(client: RawClient, graph: int) -> socket.socket:
    """Open a channel as soon as the bounds allow it."""

    def try_open() -> socket.socket | None:
        try:
            return new_end(client, graph)
        except (Busy, QuotaExceeded):
            return None

    return wait_until(try_open)


def send_some(sock: socket.socket, data: bytes) -> int:
    """Send what the socket accepts now; return how much that was."""
    sent = 0
    with suppress(OSError):
        while sent < len(data):
            sent += sock.send(data[sent:])
    return sent


def computation(number: int, data: bytes = ROWS["a"].data) -> bytes:
    inputs = [["a", message_of(ROWS["a"]) | {"data": data}], ["b", message_of(ROWS["b"])]]
    return pack_frame([1, number, "compute", {"inputs": inputs}])


def test_random_bytes_and_changed_frames_harm_nobody_else(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    rng, graph = random.Random(SEED), open_graph(attacker, "affine")
    with others_served(daemon):
        for number in range(150):
            data = bytearray(b"".join(computation(n) for n in range(3)))
            if number % 3 == 0:
                data = bytearray(rng.randbytes(rng.randrange(1, 4096)))
            for _ in range(number % 5):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with opened_end(attacker, graph) as end:
                send_some(end, bytes(data[: rng.randrange(1, len(data) + 1)]))
                if number % 2:
                    end.settimeout(SERVED_S_MAX)
                    end.shutdown(socket.SHUT_WR)
                    with suppress(ConnectionResetError):
                        while end.recv(1 << 16):
                            pass


def test_frames_that_are_cut_off_occupy_no_more_than_their_bound(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    with others_served(daemon) as process:
        before = process.memory_info().rss
        ends = [new_end(attacker, open_graph(attacker, "affine")) for _ in range(USER_MAX)]
        part = struct.pack("<I", FRAME_BYTES_MAX) + bytes(FRAME_BYTES_MAX - 1)
        unsent = [part] * len(ends)
        while any(unsent):
            for number, end in enumerate(ends):
                unsent[number] = unsent[number][send_some(end, unsent[number]) :]
        assert process.memory_info().rss - before <= 2 * USER_MAX * FRAME_BYTES_MAX + MEMORY_BYTES
        for end in ends:
            end.close()


def test_a_client_that_sends_without_reading_occupies_no_more_than_its_bound(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    large = computation(0, bytes(FRAME_BYTES_MAX // 4))  # does not fit: each is an error
    with others_served(daemon) as process:
        before = process.memory_info().rss
        ends = [new_end(attacker, open_graph(attacker, "affine")) for _ in range(USER_MAX // 2)]
        for _ in range(60):
            for end in ends:
                send_some(end, large * 4)
        assert process.memory_info().rss - before <= BYTES_MAX + MEMORY_BYTES
        for end in ends:
            end.close()


def test_large_outputs_that_nobody_reads_end_their_channels(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    graph = open_graph(attacker, "zeros")
    inputs = [["n", message_of(longs(1 << 20))]]  # an output of 4 MiB
    frames = b"".join(
        pack_frame([1, number, "compute", {"inputs": inputs}]) for number in range(REQUESTS_MAX)
    )
    with others_served(daemon, "zeros") as process:
        before = process.memory_info().rss
        with new_end(attacker, graph) as end:
            send_some(end, frames)
            over = threading.Event()
            most = [0]

            def watch() -> None:
                while not over.wait(0.01):
                    most[0] = max(most[0], process.memory_info().rss)

            thread = threading.Thread(target=watch)
            thread.start()
            try:
                wait_until(lambda: is_closed(end))
            finally:
                over.set()
                thread.join()
            assert most[0] - before <= 2 * 8 * CHANNEL_BYTES_MAX + MEMORY_BYTES


def is_closed(end: socket.socket) -> bool:
    """Return whether the process has closed the channel of *end*, without reading from it."""
    try:
        end.send(pack_frame([1, 1 << 40, "cancel", {"request": 1 << 41}]))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


def test_many_requests_with_mistakes_leave_others_their_turns(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    wrong = [["a", message_of(ROWS["a"]) | {"type": "fp23"}]]
    flood = b"".join(pack_frame([1, n, "compute", {"inputs": wrong}]) for n in range(5000))
    with others_served(daemon):
        ends = [new_end(attacker, open_graph(attacker, "affine")) for _ in range(USER_MAX)]
        for _ in range(3):
            for end in ends:
                send_some(end, flood)
                with suppress(BlockingIOError):
                    end.recv(1 << 20)
        for end in ends:
            end.close()


def test_the_most_channels_of_a_user_leave_others_theirs(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    with others_served(daemon):
        graphs = [open_graph(attacker, "affine") for _ in range(USER_MAX + 1)]
        ends = [new_end(attacker, graph) for graph in graphs[:-1]]
        with pytest.raises(QuotaExceeded):
            new_end(attacker, graphs[-1])
        for end in ends:
            end.close()
        opened_end(attacker, graphs[-1]).close()


def test_channels_that_are_opened_and_closed_at_random_leave_nothing(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    rng = random.Random(SEED)
    with others_served(daemon):
        graphs = [open_graph(attacker, "affine") for _ in range(8)]
        for _ in range(200):
            graph = rng.choice(graphs)
            ours, theirs = socket.socketpair()
            with ours, theirs:
                number = attacker.start_request(
                    "open_channel", [theirs.fileno()], graph=graph, fd=0
                )
                if rng.random() < 0.5:
                    theirs.close()
                send_some(ours, computation(1) * 2 if rng.random() < 0.1 else computation(1))
                if rng.random() < 0.5:
                    ours.close()
                with suppress(InferdError):
                    attacker.wait_result(number)
            if rng.random() < 0.1:
                attacker.call("unload", graph=graphs.pop(0))
                graphs.append(open_graph(attacker, "affine"))
    with (
        client_of(daemon, ADA) as again,
        RawChannel(again, open_graph(again, "affine")) as channel,
    ):
        assert channel.compute(ROWS)


def test_one_socket_twice_and_both_ends_of_a_pair_harm_nobody_else(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    with others_served(daemon):
        for _ in range(5):
            graphs = [open_graph(attacker, "affine") for _ in range(4)]
            ours, theirs = socket.socketpair()
            with ours, theirs:
                pass_socket(attacker, graphs[0], theirs)
                pass_socket(attacker, graphs[1], theirs)
                ours.sendall(b"".join(computation(number) for number in range(200)))
            ours, theirs = socket.socketpair()
            with ours, theirs:
                pass_socket(attacker, graphs[2], ours)
                ours.sendall(pack_frame([1, 1, "load", {}]))
                theirs.sendall(pack_frame([1, 1, "load", {}]))
                pass_socket(attacker, graphs[3], theirs)
            for graph in graphs:
                attacker.call("unload", graph=graph)


def test_lingering_sockets_in_a_channel_delay_nobody(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    """The kernel closes descriptors that are not read; that takes as long as their sender wants."""
    with LingeringSockets(LINGER_S) as lingering, others_served(daemon) as process:
        for first in (b"x", b"\xff" * 100):  # after the second one nothing more is read
            with new_end(attacker, open_graph(attacker, "affine")) as end:
                process.suspend()  # so that it has the last references
                for data in (first, b"x", b"x"):
                    with lingering.new_socket() as sock:
                        socket.send_fds(end, [data], [sock.fileno()])
                process.resume()
                end.settimeout(SERVED_S_MAX)
                while end.recv(1 << 16):  # the goodbye
                    pass


def test_a_socket_whose_mode_and_directions_change_harms_nobody_else(
    daemon: RunningDaemon, attacker: RawClient
) -> None:
    with others_served(daemon):
        for number in range(20):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                pass_socket(attacker, open_graph(attacker, "affine"), theirs)
                theirs.setblocking(True)
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 20)
                ours.setblocking(False)
                send_some(ours, b"".join(computation(n) for n in range(100)))
                if number % 3:
                    theirs.shutdown((socket.SHUT_RD, socket.SHUT_WR)[number % 2])


def test_a_connection_to_the_daemon_is_no_channel(daemon: RunningDaemon) -> None:
    """The process would keep its client's end open, also once the client has closed it."""
    with others_served(daemon), client_of(daemon, ADA) as own, client_of(daemon, ADA) as other:
        graph = open_graph(own, "affine")
        for one in (own, other):
            number = own.start_request("open_channel", [one.socket.fileno()], graph=graph, fd=0)
            with pytest.raises(InvalidArgument, match="is a connection to a server"):
                own.wait_result(number)
        assert own.call("models")["models"]
