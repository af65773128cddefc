"""Tensors in descriptors over a fleet: the relay makes them anew; models in them are refused."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from inferd import Client, Image
from inferd.backends.errors import (
    InferdError,
    InvalidArgument,
    PromptTooLong,
    TooLarge,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.gateways.fleet.link import CONTENTS_BYTES_MAX, CONTENTS_MAX, PART_BYTES
from inferd.ipc.messages import TENSOR_BYTES_MAX
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.pictures import png
from tests.raw import Closed, RawClient
from tests.waiting import wait_until

CONFIG = echo_model("echo", slots=2, ctx_size=4096) + echo_model("eyes", media=True)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with running_fleet(folder, CONFIG, "a", "b") as running:
        yield running


@pytest.fixture
def raw(fleet: RunningFleet) -> Iterator[RawClient]:
    with RawClient(fleet.socket) as connected:
        yield connected


def memfd(data: bytes = b"", size: int | None = None) -> int:
    """Return a memfd with *data*, or of a *size* without any."""
    descriptor = os.memfd_create("test")
    os.write(descriptor, data)
    if size is not None:
        os.truncate(descriptor, size)
    return descriptor


def opened(client: RawClient) -> int:
    graph = client.call("load_by_name", name="echo")["graph"]
    return int(client.call("init_execution_context", graph=graph)["context"])


def start(client: RawClient, context: int, *descriptors: int) -> int:
    """Send tensors that the echo model returns, each in a descriptor, and close these."""
    inputs = [[f"t{n}", {"fd": 0, "type": "u8"}] for n in range(len(descriptors))]
    number = client.start_request("compute", descriptors, context=context, inputs=inputs)
    for descriptor in descriptors:
        os.close(descriptor)
    return number


def outputs(client: RawClient, number: int) -> list[bytes]:
    return [tensor["data"] for _, tensor in client.wait_result(number)["outputs"]]


def test_a_large_tensor_of_the_client_reaches_the_model(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        context = client.init_execution_context(client.load_by_name("echo"))
        client.set_input(context, 0, b"x" * TENSOR_BYTES_MAX)
        with pytest.raises(PromptTooLong) as caught:
            client.compute(context)
        assert caught.value.data["prompt_bytes"] == TENSOR_BYTES_MAX


def test_a_tensor_in_several_parts_keeps_its_bytes(raw: RawClient) -> None:
    context = opened(raw)
    padding = b" " * (3 * PART_BYTES)
    options = memfd(b'{"n-predict":' + padding + b"4}")
    inputs = [["metadata", {"fd": 0}], ["prompt", {"fd": 0}]]
    prompt = memfd(b"some text")
    raw.call("compute", [options, prompt], context=context, inputs=inputs)
    for descriptor in (options, prompt):
        os.close(descriptor)
    assert raw.output(context) == b"some"


def test_requests_get_their_own_descriptors_without_waiting(raw: RawClient) -> None:
    contexts = [opened(raw) for _ in range(8)]
    texts = [b"%d" % number * 100 for number in range(len(contexts))]
    numbers = [
        start(raw, context, memfd(text), memfd(b"second"))
        for context, text in zip(contexts, texts, strict=True)
    ]
    plain = raw.start_request("models")
    assert [outputs(raw, n) for n in numbers] == [[text, b"second"] for text in texts]
    assert raw.wait_result(plain)["models"]


def test_large_images_of_the_client_reach_the_model(fleet: RunningFleet) -> None:
    images = [png(1, 1, text=b"%d" % number, padding=3 * PART_BYTES) for number in range(2)]
    hashes = [hashlib.sha256(image).hexdigest() for image in images]
    with Client(fleet.socket) as client, client.session("eyes", session_id="album") as session:
        session.chat([*(Image(image, tokens_max=64) for image in images), "What?"])
        content = session.history().messages[0]["content"]
        assert [part["sha256"] for part in content[:2]] == hashes
        assert session.media(hashes[1]).data == images[1]
        with Client(fleet.socket) as other:
            assert other.session_media(hashes[0], session_id="album").data == images[0]
        session.delete()


def test_an_image_in_a_descriptor_needs_a_context(raw: RawClient) -> None:
    graph = raw.call("load_by_name", name="eyes")["graph"]
    for data, fds in (({"fd": 0}, (memfd(png(1, 1)),)), (png(1, 1), ())):
        content = [{"type": "image", "data": data}]
        params = {"graph": graph, "messages": [{"role": "user", "content": content}]}
        if fds:
            with pytest.raises(UnsupportedOperation, match="only in calls on a context"):
                raw.call("apply_template", fds, **params)
            os.close(fds[0])
        else:
            assert raw.call("apply_template", **params)["tokens"] > 0


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


@pytest.mark.parametrize(
    ("descriptors", "error"),
    [
        (lambda: [pipe()], InvalidArgument),
        (lambda: [os.open("/", os.O_RDONLY)], InvalidArgument),
        (lambda: [memfd(size=TENSOR_BYTES_MAX + 1)], TooLarge),
        (lambda: [memfd(b"good"), pipe()], InvalidArgument),
        (lambda: [memfd(size=TENSOR_BYTES_MAX)] * 5, TooLarge),
        (lambda: [os.open("/dev/null", os.O_WRONLY)], InvalidArgument),
    ],
)
def test_a_bad_descriptor_fails_its_request_alone(
    raw: RawClient, descriptors: object, error: type[InferdError]
) -> None:
    assert callable(descriptors)
    context, passed = opened(raw), descriptors()
    inputs = [[f"t{n}", {"fd": 0, "type": "u8"}] for n in range(len(passed))]
    bad = raw.start_request("compute", passed, context=context, inputs=inputs)
    for descriptor in set(passed):
        os.close(descriptor)
    good = start(raw, context, memfd(b"another"), memfd(b"one"))
    with pytest.raises(error):
        raw.wait_result(bad)
    assert outputs(raw, good) == [b"another", b"one"]
    assert 5 * TENSOR_BYTES_MAX > CONTENTS_BYTES_MAX


def test_a_request_without_its_descriptor_is_refused(raw: RawClient) -> None:
    context = opened(raw)
    inputs = [["t", {"fd": 0}]]
    with pytest.raises(InvalidArgument, match="refers to 1 descriptors, but 0 were passed"):
        raw.call("compute", context=context, inputs=inputs)
    unknown = raw.start_request("no_such_call", [descriptor := memfd(b"x")])
    os.close(descriptor)
    with pytest.raises(UnsupportedOperation):
        raw.wait_result(unknown)
    with pytest.raises(InvalidArgument, match="0 were passed"):
        raw.call("compute", context=context, inputs=inputs)


def test_descriptors_that_no_request_takes_end_the_connection(raw: RawClient) -> None:
    descriptor = memfd(b"x")
    with pytest.raises((Closed, InferdError)):
        for _ in range(CONTENTS_MAX + 1):
            raw.call("models", [descriptor])
    os.close(descriptor)


def test_a_model_in_a_descriptor_is_refused_with_a_hint(raw: RawClient) -> None:
    descriptor = memfd(b"GGUF")
    with pytest.raises(UnsupportedOperation, match="models directory of each node"):
        raw.call("load", [descriptor], fd=0)
    os.close(descriptor)
    assert outputs(raw, start(raw, opened(raw), memfd(b"later"))) == [b"later"]


def test_no_member_keeps_descriptors(fleet: RunningFleet) -> None:
    pids = [fleet.entry.pid, *(relay.process.pid for relay in fleet.relays.values())]
    pids += [daemon.pid for daemon in fleet.daemons.values()]

    def files() -> list[int]:
        found = [os.listdir(f"/proc/{pid}/fd") for pid in pids]
        names = [
            [n for n in listed if "memfd" in link(f"/proc/{pid}/fd/{n}")]
            for pid, listed in zip(pids, found, strict=True)
        ]
        return [len(listed) for listed in names]

    def link(path: str) -> str:
        try:
            return os.readlink(path)
        except FileNotFoundError:
            return ""

    before = files()
    with RawClient(fleet.socket) as client:
        context = opened(client)
        for _ in range(5):
            assert len(outputs(client, start(client, context, memfd(b"a"), memfd(b"b")))) == 2
        with pytest.raises(InvalidArgument):
            client.wait_result(start(client, context, memfd(b"a"), pipe()))
    wait_until(lambda: files() == before)


def test_a_node_that_is_lost_meanwhile_fails_the_request(fleet: RunningFleet) -> None:
    with RawClient(fleet.socket) as client:
        context = opened(client)
        (session,) = client.call("sessions")["sessions"]
        node = session["node"]
        hanging: subprocess.Popen[bytes] = fleet.relays[node].process
        os.kill(hanging.pid, signal.SIGSTOP)
        full = [memfd(size=TENSOR_BYTES_MAX) for _ in range(3)]
        number = start(client, context, *full)
        behind = client.start_request("models")
        fleet.kill_relay(node)
        with pytest.raises(WorkerCrashed) as caught:
            client.wait_result(number)
        assert caught.value.data["node"] == node
        assert client.wait_result(behind)["models"]
    fleet.until_noted(f"node {node} is lost")
    fleet.start_relay(node)
    fleet.until_noted(f"node {node} serves")
