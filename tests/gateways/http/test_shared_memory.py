"""Shared memory of callers in the Open Inference Protocol: Triton's client, other users' files,
files that change, and bounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as triton_memory
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from inferd.backends.errors import (
    Busy,
    InvalidArgument,
    PermissionDenied,
    QuotaExceeded,
    UnsupportedOperation,
)
from inferd.gateways.http.callers import new_key
from inferd.gateways.http.limits import FILES_RESERVED, clients_max_of
from inferd.gateways.http.shared_memory import (
    DIRECTORY,
    OWNER_BYTES_MAX,
    OWNER_REGIONS_MAX,
    REGIONS_MAX,
    RegionOwner,
    SharedRegions,
    open_file,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.other_users import ADA, BOB, as_user
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway
from tests.onnx_graphs import affine, identity, write_graphs
from tests.processes import open_descriptors

Keys = dict[str, dict[str, str]]
ENTRIES = {
    "ada": f'user = "{ADA}"\n',
    "ada-too": f'user = "{ADA}"\n',
    "bob": f'user = "{BOB}"\n',
    "eve": "",
    "own": 'user = ""\n',
    "root": 'user = "0"\n',
    "nobody": 'user = "65534"\n',
    "unknown": 'user = "no-such-user"\n',
}
UNKNOWN = "does not know which user of this system the caller is"
PATH = "/v2/systemsharedmemory"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    graphs = {"affine": affine(), "texts": identity("string"), "flags": identity("u8")}
    write_graphs(models, graphs)
    with running_daemon(models_dir=models) as running:
        yield running


@pytest.fixture(scope="module")
def keyed(
    daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningGateway, Keys]]:
    """A gateway with keys of users of this system and of others, and their headers."""
    made = {name: new_key(name) for name in ENTRIES}
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text("\n".join(entry + ENTRIES[name] for name, (_, entry) in made.items()))
    headers = {name: {"Authorization": f"Bearer {key}"} for name, (key, _) in made.items()}
    with gateway(daemon, "--keys", str(file), "--shared-memory") as running:
        yield running, headers


@pytest.fixture
def client(keyed: tuple[RunningGateway, Keys]) -> Iterator[Any]:
    running, headers = keyed
    with triton.InferenceServerClient(running.address, connection_timeout=CALL_S_MAX) as made:
        yield made
        for each in headers.values():
            with suppress(InferenceServerException):
                made.unregister_system_shared_memory(headers={**each})


@pytest.fixture
def ada(keyed: tuple[RunningGateway, Keys]) -> dict[str, str]:
    return keyed[1]["ada"]


@contextmanager
def memory(size: int, owner: int = ADA) -> Iterator[tuple[str, Any]]:
    """Make shared memory as Triton's package does; yield its key and its handle."""
    key = f"inferd-test-{os.getpid()}-{os.urandom(4).hex()}"
    handle = triton_memory.create_shared_memory_region(key, key, size)
    try:
        os.chown(f"{DIRECTORY}/{key}", owner, owner)
        yield f"/{key}", handle
    finally:
        triton_memory.destroy_shared_memory_region(handle)


@contextmanager
def opened(path: str) -> Iterator[None]:
    with open(path, "rb"):
        yield


def content_of(key: str) -> bytes:
    return Path(DIRECTORY + key).read_bytes()


@contextmanager
def file(make: Callable[[str], object], owner: int = ADA) -> Iterator[str]:
    """Make something else in the folder of shared memory; yield its key."""
    path = f"{DIRECTORY}/inferd-test-{os.getpid()}-{os.urandom(4).hex()}"
    make(path)
    try:
        os.chown(path, owner, owner, follow_symlinks=False)
        yield path.removeprefix(DIRECTORY)
    finally:
        Path(path).rmdir() if Path(path).is_dir() else Path(path).unlink()


def shared_input(
    name: str, shape: Sequence[int], kind: str, region: str, size: int, offset: int = 0
) -> Any:
    made = triton.InferInput(name, list(shape), kind)
    made.set_shared_memory(region, size, offset=offset)
    return made


def shared_output(name: str, region: str, size: int, offset: int = 0) -> Any:
    made = triton.InferRequestedOutput(name)
    made.set_shared_memory(region, size, offset=offset)
    return made


def test_tritons_client_computes_in_shared_memory(client: Any, ada: dict[str, str]) -> None:
    extensions = client.get_server_metadata(headers={**ada})["extensions"]
    assert "system_shared_memory" in extensions and "cuda_shared_memory" not in extensions
    a, b = np.array([[1, 2]], np.float32), np.array([[10, 20]], np.float32)
    with memory(4096) as (key, handle):
        triton_memory.set_shared_memory_region(handle, [a, b], offset=64)
        client.register_system_shared_memory("data", key, 1024, offset=64, headers={**ada})
        region = {"name": "data", "key": key, "offset": 64, "byte_size": 1024}
        assert client.get_system_shared_memory_status(headers={**ada}) == [region]
        assert client.get_system_shared_memory_status("data", headers={**ada}) == [region]
        inputs = [
            shared_input("a", (1, 2), "FP32", "data", 8),
            shared_input("b", (1, 2), "FP32", "data", 8, offset=8),
        ]
        outputs = [shared_output("y", "data", 100, offset=128)]
        result = client.infer("affine", inputs, outputs=outputs, headers={**ada})
        assert result.get_output("y") == {
            "name": "y",
            "datatype": "FP32",
            "shape": [1, 2],
            "parameters": {
                "shared_memory_region": "data",
                "shared_memory_byte_size": 8,
                "shared_memory_offset": 128,
            },
        }
        found = triton_memory.get_contents_as_numpy(handle, np.float32, [1, 2], offset=64 + 128)
        assert found.tolist() == [[12, 24]]
        del found  # else its memory cannot be unmapped
        # Some tensors in shared memory, others in the request and the response.
        plain = triton.InferInput("b", [1, 2], "FP32")
        plain.set_data_from_numpy(b)
        mixed = client.infer("affine", [inputs[0], plain], headers={**ada})
        assert mixed.as_numpy("y").tolist() == [[12, 24]]
    # The memory stays while it is registered, as it does in Triton.
    assert client.infer("affine", [inputs[0], plain], headers={**ada}).as_numpy("y")[0, 0] == 12
    client.unregister_system_shared_memory("data", headers={**ada})
    client.unregister_system_shared_memory("data", headers={**ada})  # it may be gone
    assert client.get_system_shared_memory_status(headers={**ada}) == []
    with pytest.raises(InferenceServerException, match="there is no region 'data'"):
        client.infer("affine", inputs, headers={**ada})
    with pytest.raises(InferenceServerException, match="there is no region 'data'"):
        client.get_system_shared_memory_status("data", headers={**ada})


def test_strings_pass_through_shared_memory(client: Any, ada: dict[str, str]) -> None:
    texts = np.array(["one", "", "zwölf".encode()], object)
    packed = serialize_byte_tensor(texts)
    size = len(packed.item())
    with memory(4096) as (key, handle):
        triton_memory.set_shared_memory_region(handle, [packed])
        client.register_system_shared_memory("data", key, 4096, headers={**ada})
        inputs = [shared_input("x0", (3,), "BYTES", "data", size)]
        outputs = [shared_output("y0", "data", 1024, offset=1024)]
        client.infer("texts", inputs, outputs=outputs, headers={**ada})
        found = triton_memory.get_contents_as_numpy(handle, np.object_, [3], offset=1024)
        assert found.tolist() == [b"one", b"", "zwölf".encode()]
        inputs = [shared_input("x0", (3,), "BYTES", "data", size - 1)]
        with pytest.raises(InferenceServerException, match="are not strings"):
            client.infer("texts", inputs, headers={**ada})


def test_large_tensors_pass_through_shared_memory(client: Any, ada: dict[str, str]) -> None:
    size = 20 << 20
    with memory(2 * size) as (key, handle), memory(65 << 20) as (large, _):
        array = np.arange(size, dtype=np.uint8)
        triton_memory.set_shared_memory_region(handle, [array])
        client.register_system_shared_memory("data", key, 2 * size, headers={**ada})
        client.register_system_shared_memory("large", large, 65 << 20, headers={**ada})
        inputs = [shared_input("x0", (size,), "UINT8", "data", size)]
        outputs = [shared_output("y0", "data", size, offset=size)]
        client.infer("flags", inputs, outputs=outputs, headers={**ada})
        found = triton_memory.get_contents_as_numpy(handle, np.uint8, [size], offset=size)
        assert np.array_equal(found, array)
        del found
        both = [
            shared_input("x0", (65 << 20,), "UINT8", "large", 65 << 20),
            shared_input("x0", (size,), "UINT8", "data", size),
        ]
        with pytest.raises(InferenceServerException, match="the inputs in shared memory have"):
            client.infer("flags", both, headers={**ada})


def test_a_caller_uses_its_own_files_alone(client: Any, keyed: tuple[RunningGateway, Keys]) -> None:
    keys = keyed[1]
    with memory(64) as (mine, _), memory(64, BOB) as (bobs, _), memory(64, 0) as (roots, _):
        for name, key, message in (
            ("ada", bobs, "belongs to another user"),
            ("ada", roots, "belongs to another user"),
            ("bob", mine, "belongs to another user"),
            ("eve", mine, UNKNOWN),
            ("own", roots, UNKNOWN),
            ("root", roots, UNKNOWN),
            ("nobody", mine, "uid 65534 is shared"),
            ("unknown", mine, "no-such-user"),
        ):
            with pytest.raises(InferenceServerException, match=message):
                client.register_system_shared_memory("r", key, 64, headers={**keys[name]})
            assert client.get_system_shared_memory_status(headers={**keys[name]}) == []
        client.register_system_shared_memory("r", mine, 64, headers={**keys["ada"]})
        # The regions of a key are its own, also those with the same name or file.
        output = shared_output("y0", "r", 1)
        given = triton.InferInput("x0", [1], "UINT8")
        given.set_data_from_numpy(np.array([7], np.uint8))
        for name, message in (("bob", "there is no region"), ("ada-too", "there is no region")):
            assert client.get_system_shared_memory_status(headers={**keys[name]}) == []
            client.unregister_system_shared_memory(headers={**keys[name]})
            with pytest.raises(InferenceServerException, match=message):
                client.infer("flags", [given], outputs=[output], headers={**keys[name]})
        for name in ("eve", "own"):
            with pytest.raises(InferenceServerException, match=UNKNOWN):
                client.infer("flags", [given], outputs=[output], headers={**keys[name]})
        client.register_system_shared_memory("r", bobs, 64, headers={**keys["bob"]})
        client.infer("flags", [given], outputs=[output], headers={**keys["ada"]})
        assert content_of(mine)[:1] == b"\7"
        assert content_of(bobs)[:1] == b"\0"


def test_only_regular_files_are_opened(client: Any, ada: dict[str, str]) -> None:
    with (
        memory(64) as (key, _),
        file(os.mkfifo) as pipe,
        file(os.mkdir) as folder,
        file(lambda path: os.symlink(DIRECTORY + key, path)) as link,
    ):
        for wrong, message in (
            (pipe, "is not shared memory"),
            (folder, "is not shared memory"),
            (link, "is not shared memory"),
            ("/no-such-memory", "does not exist"),
            ("", "is not the key"),
            ("/", "is not the key"),
            ("/..", "is not shared memory"),
            (f"..{DIRECTORY}{key}", "is not the key"),
            ("x\0y", "is not the key"),
            ("x" * 256, "is not the key"),
        ):
            with pytest.raises(InferenceServerException, match=message):
                client.register_system_shared_memory("r", wrong, 64, headers={**ada})
        for size, offset in ((65, 0), (1, 64), (64, 1), (0, 0), (1, 1 << 62)):
            with pytest.raises(InferenceServerException, match="are not within the shared memory"):
                client.register_system_shared_memory("r", key, size, offset=offset, headers={**ada})
        client.register_system_shared_memory("r", key, 64, headers={**ada})
        with pytest.raises(InferenceServerException, match="is registered already"):
            client.register_system_shared_memory("r", key, 64, headers={**ada})


def test_memory_that_is_cut_off_is_an_error(client: Any, ada: dict[str, str]) -> None:
    with file(lambda path: Path(path).write_bytes(bytes(64))) as key:
        client.register_system_shared_memory("r", key, 64, headers={**ada})
        inputs = [shared_input("x0", (64,), "UINT8", "r", 64)]
        outputs = [shared_output("y0", "r", 64)]
        client.infer("flags", inputs, outputs=outputs, headers={**ada})
        os.truncate(DIRECTORY + key, 63)
        for given in (None, outputs):
            with pytest.raises(InferenceServerException, match="was cut off"):
                client.infer("flags", inputs, outputs=given, headers={**ada})
        plain = triton.InferInput("x0", [64], "UINT8")
        plain.set_data_from_numpy(np.ones(64, np.uint8))
        with pytest.raises(InferenceServerException, match="was cut off"):
            client.infer("flags", [plain], outputs=outputs, headers={**ada})
        assert os.stat(DIRECTORY + key).st_size == 63


def test_places_are_checked(keyed: tuple[RunningGateway, Keys], client: Any) -> None:
    running, headers = keyed
    with (
        memory(64) as (key, _),
        httpx.Client(base_url=running.url, headers={**headers["ada"]}) as web,
    ):
        body: dict[str, Any] = {"key": key, "byte_size": 32}
        assert web.post(f"{PATH}/region/r/register", json=body).status_code == 200

        def infer(given: dict[str, Any], output: dict[str, Any] | None = None) -> str:
            one = {"name": "x0", "datatype": "UINT8", "shape": [8], **given}
            wanted = [] if output is None else [{"name": "y0", "parameters": output}]
            reply = web.post("/v2/models/flags/infer", json={"inputs": [one], "outputs": wanted})
            assert reply.status_code in (200, 400, 404), reply.text
            return str(reply.json().get("error", reply.json().get("outputs")))

        def place(**more: Any) -> dict[str, Any]:
            return {"shared_memory_region": "r", "shared_memory_byte_size": 8, **more}

        data = {"data": [1, 2, 3, 4, 5, 6, 7, 8]}
        for given, output, message in (
            (data, place(), "'shared_memory_byte_size': 8}"),
            ({"parameters": place()}, None, "'data': [1, 2, 3, 4, 5, 6, 7, 8]"),
            ({"parameters": place(shared_memory_byte_size=7)}, None, "its shape and type need 8"),
            ({"parameters": place(shared_memory_offset=25)}, None, "8 bytes at 25 are not within"),
            ({"parameters": place(shared_memory_offset=-1)}, None, "shared_memory_offset"),
            ({"parameters": {"shared_memory_region": "r"}}, None, "byte_size: it is absent"),
            ({"parameters": place(shared_memory_region="s")}, None, "there is no region 's'"),
            ({"parameters": place(), **data}, None, "has data and shared memory"),
            (data, place(shared_memory_byte_size=7), "has 8 bytes; its place in shared memory has"),
            (data, place(shared_memory_byte_size=33), "33 bytes at 0 are not within the region"),
            (data, place(classification=2), "are not written to shared memory"),
        ):
            assert message in infer(given, output), (given, output)
        for wrong in ({}, {"key": key}, {"key": 3, "byte_size": 1}, {"key": key, "byte_size": -1}):
            assert web.post(f"{PATH}/region/s/register", json=wrong).status_code == 400


def test_a_gateway_without_keys_knows_the_users_of_its_unix_socket(
    daemon: RunningDaemon,
) -> None:
    path = daemon.directory / "http"
    os.chmod(daemon.directory, 0o711)
    options = ("--shared-memory", "--mode", "0666")
    with gateway(daemon, *options, listen=f"unix:{path}"), memory(64) as (key, _):

        def post(uid: int, where: str, **body: Any) -> httpx.Response:
            transport = httpx.HTTPTransport(uds=str(path))
            with httpx.Client(transport=transport, base_url="http://x") as web, as_user(uid):
                return web.post(where, json=body, timeout=CALL_S_MAX)

        register = f"{PATH}/region/r/register"
        refused = post(BOB, register, key=key, byte_size=64)
        assert refused.status_code == 403 and "another user" in refused.json()["error"]
        assert post(ADA, register, key=key, byte_size=64).status_code == 200
        given = {"name": "x0", "datatype": "UINT8", "shape": [1], "data": [9]}
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 1}
        body = {"inputs": [given], "outputs": [{"name": "y0", "parameters": place}]}
        assert post(BOB, "/v2/models/flags/infer", **body).status_code == 404
        assert post(ADA, "/v2/models/flags/infer", **body).status_code == 200
        assert content_of(key)[:1] == b"\x09"


def test_other_callers_are_refused(daemon: RunningDaemon) -> None:
    for options, message in ((("--shared-memory",), UNKNOWN), ((), "serves no shared memory")):
        with (
            gateway(daemon, *options) as running,
            triton.InferenceServerClient(running.address) as client,
        ):
            shown = "system_shared_memory" in client.get_server_metadata()["extensions"]
            assert shown == bool(options)
            with pytest.raises(InferenceServerException, match=message):
                client.register_system_shared_memory("r", "/x", 1)
            inputs = [shared_input("x0", (1,), "UINT8", "r", 1)]
            with pytest.raises(InferenceServerException, match=message):
                client.infer("flags", inputs)
            client.unregister_system_shared_memory()
            assert client.get_system_shared_memory_status() == []


@pytest.mark.asyncio
async def test_regions_are_bounded() -> None:
    regions, owner = SharedRegions(enabled=True), RegionOwner("", str(ADA))
    with file(lambda path: Path(path).touch()) as key:
        os.truncate(DIRECTORY + key, OWNER_BYTES_MAX + 1)
        with pytest.raises(QuotaExceeded, match="would exceed the limit of"):
            await regions.register(owner, "r", key, 0, OWNER_BYTES_MAX + 1)
        await regions.register(owner, "r", key, 0, OWNER_BYTES_MAX - OWNER_REGIONS_MAX + 1)
        for number in range(OWNER_REGIONS_MAX - 1):
            await regions.register(owner, str(number), key, 0, 1)
        with pytest.raises(QuotaExceeded, match=f"has {OWNER_REGIONS_MAX} regions, its maximum"):
            await regions.register(owner, "one more", key, 0, 1)
        regions.unregister(owner, "0")
        await regions.register(owner, "one more", key, 0, 1)
        for number in range(1, REGIONS_MAX // OWNER_REGIONS_MAX):
            for name in map(str, range(OWNER_REGIONS_MAX)):
                await regions.register(RegionOwner(str(number), str(ADA)), name, key, 0, 1)
        with pytest.raises(Busy, match=f"has {REGIONS_MAX} regions, its maximum"):
            await regions.register(RegionOwner("last", str(ADA)), "r", key, 0, 1)
        before = len(open_descriptors())
        regions.unregister(owner)
        assert len(open_descriptors()) == before - OWNER_REGIONS_MAX
        assert regions.regions_of(owner) == {}


@pytest.mark.asyncio
async def test_a_request_ends_with_the_region_that_was_unregistered_meanwhile() -> None:
    regions, owner = SharedRegions(enabled=True), RegionOwner("", str(ADA))
    with file(lambda path: Path(path).write_bytes(b"12345678")) as key:
        await regions.register(owner, "r", key, 2, 4)
        part = regions.find_region(owner, "r").part(1, 2)
        regions.unregister(owner)
        with opened("/dev/null"):  # would take the descriptor of a closed region
            assert await part.read() == b"45"
            await part.write(b"xy")
        assert content_of(key) == b"123xy678"


def test_no_descriptor_stays_open_after_a_refusal() -> None:
    owner = RegionOwner("", str(ADA))
    with memory(64, BOB) as (key, _):
        before = open_descriptors()
        for _ in range(3):
            with pytest.raises(PermissionDenied):
                open_file(owner, key, 0, 64)
        assert len(open_descriptors()) == len(before)


def test_the_gateway_may_be_without_shared_memory() -> None:
    with pytest.raises(UnsupportedOperation, match="serves no shared memory"):
        SharedRegions().check_enabled()
    assert clients_max_of(None, 600, 1024, REGIONS_MAX) == 1024 - FILES_RESERVED - REGIONS_MAX
    with pytest.raises(InvalidArgument, match=str(1024 + FILES_RESERVED + REGIONS_MAX)):
        clients_max_of(1024, 600, 1024, REGIONS_MAX)
