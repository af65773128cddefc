"""Clients of the gateway: two, many, too many, killed ones, garbage; and the gateway's own end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import struct
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from h2.connection import H2Connection
from h2.events import PingAckReceived

from inferd import Client
from inferd.gateways.nnrpc.limits import STOP_S_MAX
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd, inferd_process
from tests.echo import echo_model
from tests.gateways.nnrpc.driver import RpcError, WasmEdge, gateway, victim
from tests.waiting import wait_until

CONFIG = echo_model("slow", step_ms=20, slots=16)
LONG = "and so on " * 100
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_BYTES_MAX = 16384
SETTINGS, PING, MAX_CONCURRENT_STREAMS = 4, 6, 3
GUESTS = CALLS_MAX = 16
END_S_MAX = 60.0


def test_clients_have_handles_of_their_own(guest: WasmEdge, path: str) -> None:
    with WasmEdge(path) as other:
        first, second = guest.context(), other.context()
        assert first == second == 0
        guest.set_input(first, b"one")
        other.set_input(second, b"two")
        assert guest.compute(first) == 0 == other.compute(second)
        assert (guest.output(first), other.output(second)) == (b"one", b"two")
        guest.init(0)
        assert other.compute(1) == 1, "the other client's context is not this one's"


def test_sixteen_clients_compute_side_by_side(path: str, client: Client) -> None:
    guests = [WasmEdge(path) for _ in range(GUESTS)]
    calls = []
    for number, each in enumerate(guests):
        context = each.context("slow")
        each.set_input(context, b"guest %d" % number)
        calls.append(each.begin("Compute", resource_handle=context))
    for number, (each, call) in enumerate(zip(guests, calls, strict=True)):
        call.result()
        assert each.output(0) == b"guest %d" % number
    assert [model["name"] for model in client.models() if model["name"] == "slow"] == ["slow"]
    for each in guests:
        each.channel.close()
    wait_until_empty(client)


def begin_turn(guest: WasmEdge, client: Client, text: str = LONG) -> Any:
    """Begin a turn of the slow model, and return the call that computes it."""
    context = guest.context("slow")
    guest.set_input(context, text.encode())
    call = guest.begin("Compute", resource_handle=context)
    wait_until(client.queue)
    return call


def wait_until_empty(client: Client) -> float:
    """Wait until the daemon has neither sessions nor turns, and return the time that it took."""
    began = time.monotonic()
    while client.sessions() or client.queue():
        assert time.monotonic() - began < END_S_MAX
    return time.monotonic() - began


@pytest.mark.alone
@pytest.mark.parametrize("call", ["Compute", "ComputeSingle"])
def test_a_killed_client_leaves_nothing_after_50_ms(call: str, path: str, client: Client) -> None:
    with victim(path, "slow", call, LONG) as process:
        assert process.stdout is not None
        if call == "ComputeSingle":
            process.stdout.readline()  # after the first token
        wait_until(client.queue)
        assert len(client.sessions()) == 1
        process.kill()
        process.wait()
        assert wait_until_empty(client) <= 0.05
    assert [model["leases"] for model in client.models() if model["name"] == "slow"] == [0]


def test_a_killed_gateway_leaves_nothing(daemon: RunningDaemon, client: Client) -> None:
    listen = str(daemon.directory / "killed.sock")
    with gateway(daemon, listen=listen) as (path, process), WasmEdge(path) as guest:
        call = begin_turn(guest, client)
        process.kill()
        wait_until_empty(client)
        assert call.exception().code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ((), ["", ""]),
        (("--label", "wasm"), ["wasm", "wasm"]),
        (("--label-clients",), ["nnrpc-{victim}", "nnrpc-{test}"]),
        (("--label", "wasm", "--label-clients"), ["wasm-{victim}", "wasm-{test}"]),
    ],
    ids=["none", "one", "clients", "both"],
)
def test_clients_have_labels(
    options: tuple[str, ...], labels: list[str], daemon: RunningDaemon, client: Client
) -> None:
    with ExitStack() as stack:
        listen = str(daemon.directory / "labels.sock")
        path, _ = stack.enter_context(gateway(daemon, *options, listen=listen))
        process = stack.enter_context(victim(path, "slow", "Compute", LONG))
        stack.callback(process.kill)
        guest = stack.enter_context(WasmEdge(path))
        guest.context()
        pids = {"victim": process.pid, "test": os.getpid()}
        found = sorted(session["label"] for session in client.sessions())
        assert found == sorted(label.format(**pids) for label in labels)
    wait_until_empty(client)


# Bounds.


def test_contexts_and_graphs_of_a_client_are_bounded(daemon: RunningDaemon) -> None:
    listen = str(daemon.directory / "bounds.sock")
    with ExitStack() as stack:
        path, _ = stack.enter_context(gateway(daemon, "--contexts-max", "2", listen=listen))
        guest, other = (stack.enter_context(WasmEdge(path)) for _ in range(2))
        graph = guest.load()
        begun = [guest.begin("InitExecutionContext", resource_handle=graph) for _ in range(5)]
        errors = [RpcError(error) for call in begun if (error := call.exception())]
        assert [error.number for error in errors] == [4, 4, 4]
        other.context()
        configs = [f'{{"n-predict":{number}}}' for number in range(1, 65)]
        numbers = [
            guest.number("LoadByNameWithConfig", name="echo", config=text) for text in configs
        ]
        assert numbers == [0] * 63 + [4]


def test_connections_are_bounded(daemon: RunningDaemon) -> None:
    listen = str(daemon.directory / "few.sock")
    with ExitStack() as stack:
        path, _ = stack.enter_context(gateway(daemon, "--connections-max", "2", listen=listen))
        first, second, third = (stack.enter_context(WasmEdge(path)) for _ in range(3))
        assert first.load() == 0 == second.load()
        with pytest.raises(RpcError) as caught:
            third.load()
        assert caught.value.status == "UNAVAILABLE"
        second.channel.close()
        third.call("LoadByName", name="echo", wait=True)  # in the second's place
        assert first.load() == 1


def test_a_request_is_bounded(guest: WasmEdge, daemon: RunningDaemon) -> None:
    context = guest.context()
    allowed = (4 << 20) - 64
    assert guest.set_input(context, b" " * allowed) in (0, 102)
    assert guest.set_input(context, b" " * (allowed + 64)) == 7
    assert guest.set_input(context, b" " * (64 << 20)) == 7
    assert guest.set_input(context, b"ab") == 0 == guest.compute(context)


def test_cancelled_calls_keep_their_places(daemon: RunningDaemon) -> None:
    listen = str(daemon.directory / "places.sock")
    with ExitStack() as stack:
        path, _ = stack.enter_context(gateway(daemon, "--contexts-max", "2", listen=listen))
        guest = stack.enter_context(WasmEdge(path))
        graph = guest.load()
        os.kill(daemon.pid, signal.SIGSTOP)
        with pytest.raises(RpcError) as caught:
            guest.call("InitExecutionContext", resource_handle=graph, timeout=0.2)
        assert caught.value.status == "DEADLINE_EXCEEDED"
        os.kill(daemon.pid, signal.SIGCONT)
        guest.init(graph)
        assert guest.number("InitExecutionContext", resource_handle=graph) == 4


# Frames of HTTP/2.


def frame(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes((kind, flags))
        + struct.pack(">I", stream)
        + payload
    )


def test_the_number_of_calls_under_way_is_a_setting_of_http(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(PREFACE + frame(SETTINGS, 0, b""))
        data = b""
        while struct.pack(">HI", MAX_CONCURRENT_STREAMS, CALLS_MAX) not in data:
            received = sock.recv(FRAME_BYTES_MAX)
            assert received
            data += received


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        PREFACE + frame(SETTINGS, 0, b"\xff" * 7),
        PREFACE + frame(SETTINGS, 0, b"") + frame(1, 1, b"\xff\xff\xff", 4),
        PREFACE + frame(SETTINGS, 0, b"") + frame(0, 1, b"data of no call"),
        PREFACE + frame(SETTINGS, 0, b"") + frame(1, 2, b"\x82", 5),
    ],
    ids=["http/1", "bytes", "frames", "headers", "data", "stream"],
)
def test_garbage_ends_only_its_own_connection(garbage: bytes, path: str, guest: WasmEdge) -> None:
    context = guest.context()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(END_S_MAX)
        sock.connect(path)
        sock.sendall(garbage)
        while sock.recv(FRAME_BYTES_MAX):
            pass
    guest.set_input(context, b"ab")
    assert guest.compute(context) == 0


def test_a_client_that_does_not_read_is_disconnected(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(END_S_MAX)
        sock.connect(path)
        sock.sendall(PREFACE + frame(SETTINGS, 0, b""))
        with pytest.raises(OSError) as caught:
            while True:
                sock.sendall(frame(PING, 0, bytes(8)) * 1000)
        assert caught.value.errno in (errno.EPIPE, errno.ECONNRESET)


def test_calls_that_are_reset_at_once_leave_nothing(daemon: RunningDaemon) -> None:
    headers = (
        *((":method", "POST"), (":path", "/wasi_ephemeral_nn.Graph/LoadByName")),
        *((":scheme", "http"), (":authority", "localhost")),
        *(("content-type", "application/grpc"), ("te", "trailers")),
    )
    http = H2Connection()
    http.initiate_connection()
    listen = str(daemon.directory / "reset.sock")
    with gateway(daemon, listen=listen) as (path, process), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(END_S_MAX)
        sock.connect(path)
        for stream in range(1, 2001, 2):
            http.send_headers(stream, headers)
            http.reset_stream(stream)
        http.ping(bytes(8))
        sock.sendall(http.data_to_send())
        while not any(isinstance(e, PingAckReceived) for e in http.receive_data(received(sock))):
            pass
        process.terminate()
        assert process.wait(STOP_S_MAX / 2) == 0, "no call is under way"


def received(sock: socket.socket) -> bytes:
    data = sock.recv(FRAME_BYTES_MAX)
    assert data, "the connection stands"
    return data


# The socket, and the gateway's end.


def test_only_the_user_may_connect(path: str) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_the_mode_and_the_form_of_a_uri_can_be_chosen(daemon: RunningDaemon) -> None:
    listen = daemon.directory / "uri.sock"
    arguments = ("nnrpc", "--listen", f"unix://{listen}", "--mode", "0660")
    with inferd_process(*arguments, socket=daemon.socket) as process:
        assert process.stderr is not None and process.stderr.readline()
        assert stat.S_IMODE(os.stat(listen).st_mode) == 0o660
        process.terminate()
        assert process.wait() == 0
    assert not listen.exists()


def test_systemd_may_pass_the_socket(daemon: RunningDaemon) -> None:
    path = str(daemon.directory / "passed.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        started = f"""import os
os.dup2({listener.fileno()}, 3)
os.environ |= {{"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}}
from inferd.cli import main
main()
"""
        passed: dict[str, Any] = {"main": started, "pass_fds": (listener.fileno(),)}
        with (
            inferd_process("nnrpc", socket=daemon.socket, **passed) as process,
            WasmEdge(path) as guest,
        ):
            assert guest.load() == 0
            process.terminate()
            assert process.wait() == 0
    assert Path(path).exists(), "the path is systemd's"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ((), 1, "name one: --listen unix:PATH"),
        (("--listen", "localhost:80"), 2, "not of the form unix:PATH"),
        (("--listen", "unix:x", "--mode", "rw"), 2, "is not octal"),
        (("--listen", "unix:x", "--nn-preload", "m"), 1, "NAME:GGML:AUTO:MODEL"),
        (("--listen", "unix:x", "--label", "a b"), 1, "the label 'a b'"),
        (("--listen", "unix:x", "--label", "x" * 57, "--label-clients"), 1, "65 characters"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], status: int, text: str) -> None:
    result = inferd("nnrpc", *arguments)
    assert result.exit_code == status and text in result.stderr, result.stderr


def test_two_gateways_do_not_share_a_path(path: str) -> None:
    result = inferd("nnrpc", "--listen", f"unix:{path}")
    assert result.exit_code == 4 and "another program already answers" in result.stderr
    assert "another path with --listen" in result.stderr and "inferd stop" not in result.stderr
    result = inferd("nnrpc", "--listen", "unix:/proc/nn.sock")
    assert result.exit_code == 1 and "another path with --listen" in result.stderr


def test_a_gateway_stops_when_calls_under_way_have_ended(
    daemon: RunningDaemon, client: Client
) -> None:
    listen = str(daemon.directory / "stopped.sock")
    with ExitStack() as stack:
        path, process = stack.enter_context(gateway(daemon, listen=listen))
        guest, idle = (stack.enter_context(WasmEdge(path)) for _ in range(2))
        idle.context()
        call = begin_turn(guest, client, "a short text")
        process.terminate()
        call.result()
        assert process.wait(END_S_MAX) == 0
    assert not Path(listen).exists()


def test_a_second_signal_ends_calls(daemon: RunningDaemon, client: Client) -> None:
    listen = str(daemon.directory / "twice.sock")
    with gateway(daemon, listen=listen) as (path, process), WasmEdge(path) as guest:
        call = begin_turn(guest, client)
        for _ in range(2):
            process.terminate()
            assert process.stderr is not None
            process.stderr.readline()
        assert process.wait(END_S_MAX) == 0
        assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
    wait_until_empty(client)


def test_a_preload_names_the_models_of_all_clients(daemon: RunningDaemon) -> None:
    listen = str(daemon.directory / "preload.sock")
    options = ("--nn-preload", "default:GGML:AUTO:echo", "--allow-model", "slow")
    with gateway(daemon, *options, listen=listen) as (path, _), WasmEdge(path) as guest:
        context = guest.context("default")
        guest.set_input(context, b"ab")
        assert guest.compute(context) == 0
        assert guest.number("LoadByName", name="echo") == 8
        assert guest.load("slow") == 1


def test_without_the_extra_the_command_names_it() -> None:
    main = "import sys\nsys.modules['grpclib'] = None\nfrom inferd.cli import main\nmain()"
    with inferd_process("nnrpc", "--listen", "unix:/nonexistent/nn.sock", main=main) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert b"the gateway uses gRPC; grpclib" in errors and b"[nnrpc]" in errors
