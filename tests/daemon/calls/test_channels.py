"""Channels of clients to the processes of their graphs: results, bounds, use, ends, deaths."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.errors import (
    Cancelled,
    InferdError,
    InvalidArgument,
    QuotaExceeded,
    Timeout,
    TooLarge,
    WorkerCrashed,
)
from inferd.daemon.channels import USER_MAX
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.graph_calls import floats, integers, longs
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.onnx_graphs import affine, division, identity, loop, write_graphs, zeros
from tests.processes import running_children
from tests.raw import RawClient
from tests.raw_channel import ChannelEnded, RawChannel, message_of, open_graph, pass_socket
from tests.waiting import wait_until

FOREVER = 1 << 62
ROWS = {"a": floats(1, 2), "b": floats(10, 20)}
DOUBLED = floats(12, 24).data
DEADLY = {"a": integers(-(2**31)), "b": integers(-1)}
HARMLESS = {"a": integers(7), "b": integers(2)}
HANG_S = 2
GRAPHS = {
    "affine": affine(),
    "division": division(),
    "loop": loop(),
    "copy": identity("fp32", "bf16", "u8"),
    "strings": identity("string"),
    "zeros": zeros(),
    "other": affine(3),
}


def looped(times: int) -> dict[str, Any]:
    return {"x": floats(1, 2, dimensions=[2]), "times": longs(times, dimensions=[])}


def inputs_of(tensors: dict[str, Any]) -> list[list[Any]]:
    return [[name, message_of(tensor)] for name, tensor in tensors.items()]


def compute(client: RawClient, context: int, tensors: dict[str, Any], **params: Any) -> Any:
    """Return the outputs of a computation through the daemon by name."""
    inputs = inputs_of(tensors)
    return dict(client.call("compute", context=context, inputs=inputs, **params)["outputs"])


def context_of(client: RawClient, graph: int) -> int:
    return int(client.call("init_execution_context", graph=graph)["context"])


def shown(client: RawClient, name: str) -> dict[str, Any]:
    [found] = client.call("show", name=name)["models"]
    return dict(found)


def listed(client: RawClient, name: str) -> dict[str, Any]:
    [found] = [one for one in client.call("models")["models"] if one["name"] == name]
    return dict(found)


def counts(client: RawClient, name: str) -> tuple[int, int]:
    """Return how many computations of a model run and wait."""
    found = client.call("stats")["stats"]["models"].get(name, {})
    return found.get("computations_running", -1), found.get("computations_waiting", -1)


def wait_counts(client: RawClient, name: str, running: int, waiting: int) -> None:
    wait_until(lambda: counts(client, name) == (running, waiting))


def computed(client: RawClient, name: str) -> int:
    """Return the usage of a model's computations by the client's user."""
    rows = client.call("usage", by=["model"])["usage"]
    return sum(row["requests"] for row in rows if row["model"] == name)


def pid_of(client: RawClient, name: str) -> int:
    return int(shown(client, name)["pid"])


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def refusal(client: RawClient, fds: list[int], **params: Any) -> InferdError:
    with pytest.raises(InferdError) as caught:
        client.call("open_channel", fds, **params)
    assert caught.value.hint and caught.value.message.isprintable()
    return caught.value


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(models, GRAPHS)
    with running_daemon(
        "[daemon]\ncores = 2\n[defaults]\nthreads = 1\n", models_dir=models
    ) as running:
        yield running


# Results.


def test_a_channel_has_the_outputs_of_calls_through_the_daemon(raw: RawClient) -> None:
    copied = {
        "x0": floats(1, -2.5, dimensions=[2]),
        "x1": message_tensor(b"\x80\x3f\x00\x40", [2], "bf16"),
        "x2": message_tensor(b"abc", [3], "u8"),
    }
    for name, tensors in (("affine", ROWS), ("copy", copied), ("division", HARMLESS)):
        graph = open_graph(raw, name)
        expected = compute(raw, context_of(raw, graph), tensors)
        with RawChannel(raw, graph) as channel:
            found = channel.compute(tensors)
        assert {key: value | {"kept": 0} for key, value in found.items()} == {
            key: {name: value.get(name, default) for name, default in DEFAULTS.items()}
            for key, value in expected.items()
        }


DEFAULTS: dict[str, Any] = {"data": b"", "dimensions": [], "type": "u8", "kept": 0}


def message_tensor(data: bytes, dimensions: list[int], kind: str) -> Any:
    from inferd import Tensor

    return Tensor(data=data, dimensions=dimensions, type=kind)


def test_many_computations_may_be_under_way(raw: RawClient) -> None:
    with RawChannel(raw, open_graph(raw, "affine")) as channel:
        numbers = {
            channel.start({"a": floats(value, 0), "b": floats(0, 0)}): value for value in range(200)
        }
        for number, value in numbers.items():
            assert channel.wait(number)["y"]["data"] == floats(2 * value, 0).data


def test_errors_are_those_of_calls_through_the_daemon(raw: RawClient) -> None:
    graph = open_graph(raw, "affine")
    context = context_of(raw, graph)
    bad: list[dict[str, Any]] = [
        {},
        {"a": floats(1, 2)},
        ROWS | {"c": floats(1)},
        ROWS | {"a": integers(1, 2, dimensions=[1, 2])},
        ROWS | {"a": floats(1, 2, dimensions=[2])},
        ROWS | {"a": floats(1, 2, dimensions=[1, -2])},
        ROWS | {"a": floats(1, 2, dimensions=[1 << 62, 1 << 62])},
        ROWS | {"a": floats(1, 2, 3, dimensions=[1, 2])},
        ROWS
        | {"a": floats(1, 2, 3, 4, dimensions=[2, 2]), "b": floats(*[0] * 6, dimensions=[3, 2])},
    ]
    with RawChannel(raw, graph) as channel:
        for tensors in bad:
            with pytest.raises(InferdError) as caught:
                channel.compute(tensors)
            with pytest.raises(InferdError) as expected:
                compute(raw, context, tensors)
            for name in ("name", "message", "hint", "data"):
                assert getattr(caught.value, name) == getattr(expected.value, name)
        assert channel.compute(ROWS)["y"]["data"] == DOUBLED


def test_a_cancelled_computation_ends_and_its_process_stays(raw: RawClient) -> None:
    graph = open_graph(raw, "loop")
    pid = pid_of(raw, "loop")
    with RawChannel(raw, graph) as channel:
        running = channel.start(looped(FOREVER))
        wait_counts(raw, "loop", 1, 0)
        channel.wait(channel.start_request("cancel", request=running))
        with pytest.raises(Cancelled):
            channel.wait(running)
        assert channel.compute(looped(2))["y"]["data"] == floats(1, 2).data
    assert pid_of(raw, "loop") == pid


def test_a_computation_that_waits_for_too_long_is_refused(raw: RawClient) -> None:
    with RawChannel(raw, open_graph(raw, "loop")) as channel:
        running = channel.start(looped(FOREVER))
        wait_counts(raw, "loop", 1, 0)
        with pytest.raises(Timeout) as caught:
            channel.compute(looped(1), queue_timeout_s=0.05)
        assert caught.value.data == {"timeout": "queue"}
        channel.start_request("cancel", request=running)
        with pytest.raises(Cancelled):
            channel.wait(running)


def test_outputs_that_no_reply_takes_are_refused_as_by_the_daemon(raw: RawClient) -> None:
    many = {"n": longs(3 << 20)}
    graph = open_graph(raw, "zeros")
    with RawChannel(raw, graph) as channel:
        with pytest.raises(TooLarge) as caught:
            channel.compute(many)
        with pytest.raises(TooLarge) as expected:
            compute(raw, context_of(raw, graph), many)
        assert caught.value.data == expected.value.data
        found = channel.compute({"n": longs(1 << 20)})["y"]
        assert found["data"] == bytes(4 << 20)


# Opening.


def test_only_graphs_have_channels(raw: RawClient) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        graph = open_graph(raw, "echo")
        assert refusal(raw, [theirs.fileno()], graph=graph, fd=0).name == "UnsupportedOperation"


def test_a_graph_of_another_connection_is_unknown(daemon: RunningDaemon, raw: RawClient) -> None:
    graph = open_graph(raw, "affine")
    ours, theirs = socket.socketpair()
    with ours, theirs, RawClient(daemon.socket) as other:
        assert refusal(other, [theirs.fileno()], graph=graph, fd=0).name == "InvalidArgument"


def sockets_that_are_refused() -> dict[str, Callable[[], socket.socket]]:
    def unconnected() -> socket.socket:
        return socket.socket(socket.AF_UNIX)

    def listening() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind("\0inferd-test-channels" + str(os.getpid()))
        sock.listen()
        return sock

    def connected_tcp() -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return socket.create_connection(server.getsockname())

    def packets() -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.close()
        return theirs

    def datagrams() -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.close()
        return theirs

    return {
        "unconnected": unconnected,
        "listening": listening,
        "tcp": connected_tcp,
        "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "datagrams": datagrams,
        "packets": packets,
    }


@pytest.mark.parametrize("name", sockets_that_are_refused())
def test_only_a_connected_unix_stream_socket_is_a_channel(
    daemon: RunningDaemon, raw: RawClient, name: str
) -> None:
    graph = open_graph(raw, "affine")
    with sockets_that_are_refused()[name]() as passed:
        assert isinstance(refusal(raw, [passed.fileno()], graph=graph, fd=0), InvalidArgument)


def test_descriptors_that_are_no_sockets_are_refused_and_closed(
    daemon: RunningDaemon, raw: RawClient, tmp_path: Path
) -> None:
    graph = open_graph(raw, "affine")
    reader, writer = os.pipe()
    try:
        with open(tmp_path / "file", "wb") as file, open(os.devnull) as null:
            before = files_of(daemon.pid)
            for _ in range(10):
                for fd in (reader, file.fileno(), null.fileno()):
                    refused = refusal(raw, [fd], graph=graph, fd=0)
                    assert isinstance(refused, InvalidArgument)
            wait_until(lambda: files_of(daemon.pid) <= before)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_channel_needs_its_descriptor(raw: RawClient) -> None:
    graph = open_graph(raw, "affine")
    for fd in (0, -1):
        assert isinstance(refusal(raw, [], graph=graph, fd=fd), InvalidArgument)


def test_a_second_channel_of_a_graph_closes_the_first(raw: RawClient) -> None:
    graph = open_graph(raw, "loop")
    with RawChannel(raw, graph) as first:
        first.start(looped(FOREVER))
        wait_counts(raw, "loop", 1, 0)
        with RawChannel(raw, graph) as second:
            first.wait_end()
            assert second.compute(looped(1))["y"]["data"] == floats(1, 2).data


def test_two_graphs_of_a_model_have_channels_of_their_own(raw: RawClient) -> None:
    with (
        RawChannel(raw, open_graph(raw, "affine")) as one,
        RawChannel(raw, open_graph(raw, "affine")) as other,
    ):
        for channel in (one, other):
            assert channel.compute(ROWS)["y"]["data"] == DOUBLED


def test_the_channels_of_a_user_to_a_process_are_bounded(
    daemon: RunningDaemon, raw: RawClient
) -> None:
    channels = [RawChannel(raw, open_graph(raw, "affine")) for _ in range(USER_MAX)]
    graph = open_graph(raw, "affine")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        refused = refusal(raw, [theirs.fileno()], graph=graph, fd=0)
        assert isinstance(refused, QuotaExceeded) and refused.data == {"channels_max": USER_MAX}
    channels.pop().socket.close()
    channels.append(opened_at_last(raw, graph))
    for channel in channels:
        assert channel.compute(ROWS)["y"]["data"] == DOUBLED
        channel.socket.close()


def opened_at_last(client: RawClient, graph: int) -> RawChannel:
    """Open a channel as soon as that is not refused."""

    def try_open() -> RawChannel | None:
        try:
            return RawChannel(client, graph)
        except InferdError:
            return None

    return wait_until(try_open)


# Use.


def test_usage_and_metrics_count_the_computations_of_channels(
    daemon: RunningDaemon, raw: RawClient
) -> None:
    name, before = "other", computed(raw, "other")
    with RawChannel(raw, open_graph(raw, name)) as channel:
        for _ in range(5):
            channel.compute(ROWS)
        with pytest.raises(InferdError):
            channel.compute({"a": floats(1, 2)})
    wait_until(lambda: computed(raw, name) == before + 5)

    def metrics() -> dict[str, float]:
        found = raw.call("stats")["stats"]["metrics"]["computations"]
        return {s["outcome"]: s["value"] for s in found if s["model_name"] == name}

    wait_until(lambda: metrics().get("ok") == before + 5)


def test_the_models_list_shows_the_work_of_a_channel(raw: RawClient) -> None:
    with RawChannel(raw, open_graph(raw, "loop")) as channel:
        assert listed(raw, "loop")["tasks"] == 0
        number = channel.start(looped(FOREVER))
        wait_until(lambda: listed(raw, "loop")["tasks"] == 1)
        channel.start_request("cancel", request=number)
        wait_until(lambda: listed(raw, "loop")["tasks"] == 0)


def test_classes_are_bounded_by_the_highest_of_the_user(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"loop": loop()})
    config = (
        "priority-strict = true\n[defaults]\nthreads = 1\n[models.loop]\n"
        f"file = {json.dumps(str(tmp_path / 'loop.onnx'))}\n"
        f"[access.ada]\nusers = [{ADA}]\nallow = ['use']\npriority-max = 'low'\n"
    )
    with (
        daemon_for_all(config) as daemon,
        RawClient(daemon.socket) as root,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
        RawChannel(root, open_graph(root, "loop")) as first,
        RawChannel(ada, open_graph(ada, "loop")) as low,
        RawChannel(bob, open_graph(bob, "loop")) as normal,
    ):
        running = first.start(looped(FOREVER))
        wait_counts(root, "loop", 1, 0)
        low.start(looped(FOREVER), priority="urgent")
        wait_counts(root, "loop", 1, 1)
        others = [normal.start(looped(1)) for _ in range(2)]
        wait_counts(root, "loop", 1, 3)
        first.start_request("cancel", request=running)
        for number in others:
            normal.wait(number)  # before the one that does not end


# Ends.


@pytest.mark.parametrize("end", ["unload", "connection"])
def test_a_channel_ends_with_its_graph_or_connection(
    daemon: RunningDaemon, raw: RawClient, end: str
) -> None:
    with RawClient(daemon.socket) as own:
        graph = open_graph(own, "loop")
        with RawChannel(own, graph) as channel:
            channel.start(looped(FOREVER))
            wait_counts(raw, "loop", 1, 0)
            if end == "unload":
                own.call("unload", graph=graph)
            else:
                own.socket.close()
            channel.wait_end()
    wait_until(lambda: pid_of(raw, "loop") == 0 or counts(raw, "loop") == (0, 0))


@pytest.mark.parametrize("mode", ["migrate", "drain"])
def test_a_swap_closes_channels_and_computes_with_the_new_model(tmp_path: Path, mode: str) -> None:
    write_graphs(tmp_path, {"affine": affine(), "next": affine(3)})
    with running_daemon(models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        graph = open_graph(raw, "affine")
        with RawChannel(raw, graph) as channel:
            assert channel.compute(ROWS)["y"]["data"] == DOUBLED
            raw.call("swap", name="affine", to="next", mode=mode)
            channel.wait_end()
        with opened_at_last(raw, graph) as again:
            assert again.compute(ROWS)["y"]["data"] == floats(13, 26).data


def test_a_computation_under_way_in_a_swap_ends_with_the_old_model(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"loop": loop(), "next": loop()})
    with (
        running_daemon(models_dir=tmp_path) as daemon,
        RawClient(daemon.socket) as raw,
        RawClient(daemon.socket) as other,
        RawChannel(raw, open_graph(raw, "loop")) as channel,
    ):
        number = channel.start(looped(FOREVER))
        wait_until(lambda: listed(other, "loop")["tasks"] == 1)
        swap = raw.start_request("swap", name="loop", to="next", mode="migrate")
        raw.wait_result(swap)
        with suppress(ChannelEnded):  # it may have ended by now
            channel.start_request("cancel", request=number)
        channel.wait_end()


def test_a_draining_daemon_answers_the_computations_under_way(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"loop": loop()})
    with running_daemon(models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        with RawChannel(raw, open_graph(raw, "loop")) as channel:
            number = start_long(raw, channel)
            os.kill(daemon.pid, signal.SIGTERM)
            channel.wait_end()
            assert channel.wait(number)["y"]["data"] == floats(1, 2).data
        assert daemon.process is not None and daemon.process.wait() == 0


def start_long(client: RawClient, channel: RawChannel) -> int:
    """Start a computation that ends after a while, and return its number while it is under way. On
    a busy machine it may have ended when that is looked at; the next one then takes longer.
    """
    for times in (300_000 << doublings for doublings in range(6)):
        number = channel.start(looped(times))
        wait_until(partial(is_listed_or_answered, client, channel, number))
        if not channel.has_answer(number):
            return number
    raise AssertionError("all computations have ended before they were listed")


def is_listed_or_answered(client: RawClient, channel: RawChannel, number: int) -> bool:
    if listed(client, "loop")["tasks"] == 1:
        return True
    channel.socket.settimeout(0)
    try:
        while not channel.has_answer(number):
            channel._receive()
    except BlockingIOError:
        return False
    finally:
        channel.socket.settimeout(60)
    return True


def test_a_reload_of_the_configuration_closes_channels_and_checks_rights_again(
    tmp_path: Path,
) -> None:
    write_graphs(tmp_path, {"affine": affine()})
    before = f"[models.affine]\nfile = {json.dumps(str(tmp_path / 'affine.onnx'))}\n"
    with (
        daemon_for_all(before) as daemon,
        RawClient(daemon.socket) as root,
        client_of(daemon, ADA) as ada,
    ):
        graph = open_graph(ada, "affine")
        with RawChannel(ada, graph) as channel, RawChannel(root, open_graph(root, "affine")) as own:
            channel.compute(ROWS)
            path = daemon.directory / "config.toml"
            path.write_text(path.read_text() + f"[access.ada]\nusers = [{ADA}]\nallow = []\n")
            os.kill(daemon.pid, signal.SIGHUP)
            channel.wait_end()
            own.wait_end()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert refusal(ada, [theirs.fileno()], graph=graph, fd=0).name == "PermissionDenied"
        with opened_at_last(root, open_graph(root, "affine")) as again:
            assert again.compute(ROWS)["y"]["data"] == DOUBLED


def test_at_a_limit_of_usage_the_channel_ends_and_none_is_opened(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"loop": loop()})
    config = "[access.all]\nusers = [0]\nallow = ['use']\nseconds-per-day = 1\n"
    with running_daemon(config, models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        graph = open_graph(raw, "loop")
        context = context_of(raw, graph)
        with RawChannel(raw, graph) as channel, pytest.raises(ChannelEnded):
            while True:
                channel.compute(looped(100_000))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert isinstance(refusal(raw, [theirs.fileno()], graph=graph, fd=0), QuotaExceeded)
        with pytest.raises(QuotaExceeded):
            compute(raw, context, looped(1))


def test_a_busy_channel_does_not_keep_another_model_from_memory(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"affine": affine(), "other": affine(3)})
    with running_daemon(models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        open_graph(raw, "affine")
        need = shown(raw, "affine")["memory"]["total"]
    config = f"[daemon]\nmemory-bytes = {need + need // 2}\n"
    with (
        running_daemon(config, models_dir=tmp_path) as daemon,
        RawClient(daemon.socket) as raw,
        RawClient(daemon.socket) as other,
    ):
        graph = open_graph(raw, "affine")
        begun, ended = threading.Event(), threading.Event()

        def use() -> None:
            try:
                while True:
                    channel.compute(ROWS)
                    begun.set()
            except ChannelEnded:
                ended.set()

        with RawChannel(raw, graph) as channel:
            thread = threading.Thread(target=use)
            thread.start()
            begun.wait()
            found = compute(other, context_of(other, open_graph(other, "other")), ROWS)
            assert found["y"]["data"] == floats(13, 26).data
            assert not raw_state(other, "affine") and ended.wait(60)
            thread.join()
        assert compute(raw, context_of(raw, graph), ROWS)["y"]["data"] == DOUBLED


def raw_state(client: RawClient, name: str) -> bool:
    """Return whether a model is ready."""
    return bool(listed(client, name)["state"] == "ready")


# Deaths.


def test_an_input_that_ends_the_process_is_found_by_the_daemon(tmp_path: Path) -> None:
    with (
        channels_for_all(tmp_path, {"division": division()}) as daemon,
        RawClient(daemon.socket) as root,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        graph, other = open_graph(ada, "division"), open_graph(bob, "division")
        with RawChannel(ada, graph) as channel:
            channel.start(DEADLY)
            channel.wait_end()
        context = context_of(ada, graph)
        for _ in range(2):
            with pytest.raises(WorkerCrashed, match="this input crashes"):
                compute(ada, context, DEADLY)
        assert daemon.log.count("worker.died") == 2
        ours, theirs = socket.socketpair()
        with ours, theirs:
            refused = refusal(ada, [theirs.fileno()], graph=graph, fd=0)
            assert isinstance(refused, QuotaExceeded) and "have crashed" in refused.message
        assert compute(ada, context, HARMLESS)["y"]["data"] == integers(3).data
        with opened_at_last(bob, other) as served:
            assert served.compute(HARMLESS)["y"]["data"] == integers(3).data
        assert pid_of(root, "division")


def channels_for_all(folder: Path, graphs: dict[str, bytes], head: str = "") -> Any:
    write_graphs(folder, graphs)
    models = "".join(
        f"[models.{name}]\nfile = {json.dumps(str(folder / f'{name}.onnx'))}\nthreads = 1\n"
        for name in graphs
    )
    return daemon_for_all(head + models)


def test_a_user_whose_channel_crashed_the_process_has_none_before_the_input_is_known(
    raw: RawClient,
) -> None:
    graph = open_graph(raw, "division")
    with RawChannel(raw, graph) as channel:
        channel.start(DEADLY)
        channel.wait_end()
    compute(raw, context_of(raw, graph), HARMLESS)  # the next process is there
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert isinstance(refusal(raw, [theirs.fileno()], graph=graph, fd=0), QuotaExceeded)


def test_a_computation_in_a_channel_that_never_ends_is_killed(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"loop": loop()})
    config = f"[daemon]\nworker-hang-timeout-s = {HANG_S}\n[defaults]\nthreads = 1\n"
    with running_daemon(config, models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        graph = open_graph(raw, "loop")
        with RawChannel(raw, graph) as channel:
            channel.start(looped(FOREVER))
            channel.wait_end()
        wait_until(lambda: "worker.hung" in daemon.log)
        with pytest.raises(WorkerCrashed, match="this input crashes"):
            compute(raw, context_of(raw, graph), looped(FOREVER))
        assert daemon.log.count("worker.died") == 2


def test_a_kill_from_outside_blames_nobody(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"loop": loop()})
    with running_daemon(models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        graph = open_graph(raw, "loop")
        with RawChannel(raw, graph) as channel:
            channel.start(looped(FOREVER))
            wait_until(lambda: listed(raw, "loop")["tasks"] == 1)
            for child in running_children(daemon.pid):
                os.kill(child.pid, signal.SIGKILL)
            channel.wait_end()
        context = context_of(raw, graph)
        assert compute(raw, context, looped(1))["y"]["data"] == floats(1, 2).data
        with RawChannel(raw, graph) as again:
            assert again.compute(looped(1))["y"]["data"] == floats(1, 2).data


# Fair shares.


def test_a_flood_in_a_channel_leaves_another_user_its_turn(tmp_path: Path) -> None:
    with (
        channels_for_all(tmp_path, {"loop": loop()}) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
        RawChannel(ada, open_graph(ada, "loop")) as flood,
    ):
        context = context_of(bob, open_graph(bob, "loop"))
        numbers = [flood.start(looped(FOREVER)) for _ in range(100)]
        wait_counts(ada, "loop", 1, 99)
        number = bob.start_request("compute", context=context, inputs=inputs_of(looped(1)))
        wait_counts(ada, "loop", 1, 100)
        flood.start_request("cancel", request=numbers[0])
        assert bob.wait_result(number)["outputs"]  # before those that do not end


def test_an_urgent_call_waits_for_one_computation_of_a_channel_at_most(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"loop": loop()})
    config = "[defaults]\nthreads = 1\n"
    with running_daemon(config, models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        graph = open_graph(raw, "loop")
        context = context_of(raw, graph)
        with RawChannel(raw, graph) as channel:
            running = channel.start(looped(FOREVER), priority="low")
            wait_counts(raw, "loop", 1, 0)
            for _ in range(8):
                channel.start(looped(FOREVER), priority="low")
            wait_counts(raw, "loop", 1, 8)
            urgent = raw.start_request(
                "compute", context=context, inputs=inputs_of(looped(1)), priority="urgent"
            )
            wait_counts_of_others(daemon, 1, 9)
            channel.start_request("cancel", request=running)
            assert raw.wait_result(urgent)["outputs"]  # before those that do not end


def wait_counts_of_others(daemon: RunningDaemon, running: int, waiting: int) -> None:
    with RawClient(daemon.socket) as other:
        wait_counts(other, "loop", running, waiting)


def test_a_channel_alone_claims_the_cores(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"busy": loop()})
    config = "[daemon]\ncores = 2\n[models.slow]\nbackend = 'echo'\necho = { step-ms = 50 }\n"
    with (
        running_daemon(config, models_dir=tmp_path) as daemon,
        RawClient(daemon.socket) as raw,
        RawClient(daemon.socket) as other,
        RawChannel(raw, open_graph(raw, "busy")) as channel,
    ):
        context = other.context("slow")
        other.begin_stream(context, "word " * 600)

        def threads() -> int:
            return int(raw.call("stats")["stats"]["models"].get("busy", {}).get("threads", 0))

        numbers = [channel.start(looped(FOREVER)) for _ in range(3)]
        wait_until(lambda: threads() == 1)
        for number in numbers:
            channel.start_request("cancel", request=number)


def test_the_socket_of_a_channel_is_closed_in_the_daemon(
    daemon: RunningDaemon, raw: RawClient
) -> None:
    graph = open_graph(raw, "affine")
    with RawChannel(raw, graph) as channel:
        channel.compute(ROWS)
    before = files_of(daemon.pid)
    for _ in range(20):
        with RawChannel(raw, graph) as channel:
            channel.compute(ROWS)
    wait_until(lambda: files_of(daemon.pid) <= before)
    assert files_of(pid_of(raw, "affine")) < 64


def test_a_socket_that_was_passed_stays_the_clients(raw: RawClient) -> None:
    graph = open_graph(raw, "affine")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pass_socket(raw, graph, theirs)
        theirs.setblocking(True)
        ours.close()
    with opened_at_last(raw, graph) as channel:
        assert channel.compute(ROWS)["y"]["data"] == DOUBLED
