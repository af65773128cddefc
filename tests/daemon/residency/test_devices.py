"""Layers on devices: fitted into the memory that a given list of devices has free."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from inferd import AsyncClient
from inferd.backends import Device, MemoryNeed, ModelSpec, Shape
from inferd.backends.errors import InvalidArgument, OutOfMemory
from inferd.backends.memory import check_devices
from inferd.backends.params import read_options
from inferd.backends.params.parameter_table import TENSOR_SPLIT_MAX
from inferd.daemon.residency.plan import (
    DeviceShortage,
    device_refusal,
    fewer_layers,
    find_device_shortage,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.raw import RawClient

GIB = 1 << 30
GPU0, GPU1 = Device("GPU0", 10 * GIB, 20 * GIB), Device("GPU1", 4 * GIB, 20 * GIB)
FLOOR, SHAPE = Shape(1, 512, 128, 0), Shape(4, 4096, 512, 33)


def need(**devices: int) -> MemoryNeed:
    return MemoryNeed(weights=1, devices=devices)


# Decisions.


def test_a_devices_free_bytes_exclude_headroom_and_reservations() -> None:
    both = [GPU0, GPU1]
    assert find_device_shortage(need(GPU0=9 * GIB, GPU1=3 * GIB), both, {}) is None
    short = find_device_shortage(need(GPU0=9 * GIB, GPU1=3 * GIB), both, {"GPU1": GIB})
    assert short == DeviceShortage(GPU1, 3 * GIB, 2 * GIB)
    assert short.missing == GIB


def test_the_device_that_lacks_most_is_reported() -> None:
    short = find_device_shortage(need(GPU0=11 * GIB, GPU1=8 * GIB), [GPU0, GPU1], {})
    assert short is not None and short.device is GPU1


def test_a_full_device_does_not_delay_a_model_that_does_not_need_it() -> None:
    assert find_device_shortage(need(), [Device("GPU0", 0, GIB)], {"GPU0": GIB}) is None


def test_layers_become_fewer_in_proportion_and_always_by_one_at_least() -> None:
    def layers(free: int, most: Shape = SHAPE, least: Shape = FLOOR) -> int | None:
        found = fewer_layers(most, least, DeviceShortage(GPU0, 100, free))
        return None if found is None else found.n_gpu_layers

    assert [layers(50), layers(99), layers(1), layers(0), layers(-7)] == [16, 32, 0, 0, 0]
    assert layers(0, least=Shape(1, 512, 128, 33)) is None, "it was asked for"
    assert layers(0, most=FLOOR) is None
    assert fewer_layers(SHAPE, FLOOR, DeviceShortage(GPU0, 100, 50)) == Shape(4, 4096, 512, 16)


def test_a_refusal_names_the_device_and_both_numbers() -> None:
    error = device_refusal("big", SHAPE, DeviceShortage(GPU0, 11 * 10**9, 9 * 10**9))
    assert "11 GB of GPU0's memory with 33 layers" in error.message
    assert "9 GB are free" in error.message and "n-gpu-layers to -1" in error.hint
    assert error.data["needed_bytes"] == 11 * 10**9 and error.data["free_bytes"] == 9 * 10**9
    assert (error.data["device"], error.data["total_bytes"]) == ("GPU0", 20 * GIB)


def test_missing_devices_are_refused_by_their_number() -> None:
    both = [GPU0, GPU1]
    check_devices(ModelSpec(name="m", main_gpu=1, tensor_split=(1, 2)), both)
    with pytest.raises(InvalidArgument, match="there are 2 devices, GPU0, GPU1") as caught:
        check_devices(ModelSpec(name="m", main_gpu=2), both)
    assert "0 to 1" in caught.value.hint
    with pytest.raises(InvalidArgument, match="3 parts for 2 devices"):
        check_devices(ModelSpec(name="m", tensor_split=(1, 2, 3)), both)
    check_devices(ModelSpec(name="m", main_gpu=2, tensor_split=(1, 2, 3)), [])


# Parameters.


def test_a_split_has_as_many_parts_as_llama_cpp_has_devices_at_most() -> None:
    parts = [1.0] * TENSOR_SPLIT_MAX
    assert read_options({"tensor-split": parts}).values == {"tensor-split": parts}
    for main in (-2, TENSOR_SPLIT_MAX):
        with pytest.raises(InvalidArgument, match="main-gpu"):
            read_options({"main-gpu": main})


# On real processes.


def model_with(name: str, devices: list[int], **keys: object) -> str:
    """Return the configuration of a model of 10 layers of 100 bytes, and its devices."""
    lines = [f"{key.replace('_', '-')} = {json.dumps(value)}" for key, value in keys.items()]
    return f"""
[models.{name}]
backend = "echo"
{chr(10).join(lines)}
[models.{name}.echo]
layers = 10
layer_bytes = 100
device_bytes = {devices}
"""


def daemon_with(devices: list[int], memory_bytes: int = 10_000, **keys: object) -> RunningDaemon:
    settings = f"[daemon]\nmemory-bytes = {memory_bytes}\n"
    return running_daemon(settings + model_with("m", devices, **keys))


def load(client: RawClient, config: str = "", name: str = "m") -> dict[str, Any]:
    result: dict[str, Any] = client.call("load_by_name_with_config", name=name, config=config)
    return result


def model(client: RawClient, name: str = "m") -> dict[str, Any]:
    (found,) = client.call("show", name=name)["models"]
    return dict(found)


FITTED: tuple[tuple[list[int], int, dict[str, int]], ...] = (
    ([2000], 10, {"echo0": 1000}),
    ([500], 4, {"echo0": 400}),
    ([10], 0, {}),
    ([600, 600], 10, {"echo0": 500, "echo1": 500}),
    ([900, 300], 10, {"echo0": 800, "echo1": 200}),
    ([], 0, {}),
)


def test_the_layers_that_fit_run_on_devices_and_the_others_on_the_cpu() -> None:
    models = "".join(model_with(f"m{i}", devices) for i, (devices, _, _) in enumerate(FITTED))
    with running_daemon(models) as daemon, RawClient(daemon.socket) as client:
        for number, (devices, layers, taken) in enumerate(FITTED):
            result = load(client, name=f"m{number}")
            found = model(client, f"m{number}")
            assert found["info"]["n_gpu_layers"] == layers
            assert found["memory"]["devices"] == taken
            assert found["memory"]["weights"] == 1000 - sum(taken.values())
            fewer = {"n-gpu-layers": layers} if devices and layers < 10 else {}
            assert result.get("not_applied", {}) == fewer


def test_a_requested_number_of_layers_holds_or_the_load_is_refused() -> None:
    with daemon_with([500]) as daemon, RawClient(daemon.socket) as client:
        with pytest.raises(OutOfMemory) as caught:
            load(client, '{"n-gpu-layers": 5}')
        assert (caught.value.data["needed_bytes"], caught.value.data["free_bytes"]) == (500, 475)
        assert "not_applied" not in load(client, '{"n-gpu-layers": 3}')
        assert model(client)["info"]["n_gpu_layers"] == 3


def test_a_configured_number_of_layers_holds_too() -> None:
    with (
        daemon_with([500], n_gpu_layers=5) as daemon,
        RawClient(daemon.socket) as client,
        pytest.raises(OutOfMemory, match="echo0's memory"),
    ):
        load(client, '{"n-gpu-layers": 2}')


def test_the_target_cpu_uses_no_device_and_a_missing_gpu_is_reported() -> None:
    for devices, target, layers, not_applied in (
        ([2000], "cpu", 0, {}),
        ([2000], "gpu", 10, {}),
        ([], "gpu", 0, {"n-gpu-layers": 0}),
        ([], "auto", 0, {}),
    ):
        with daemon_with(devices) as daemon, RawClient(daemon.socket) as client:
            result = client.call("load", builders=[b"m"], encoding="ggml", target=target)
            assert result.get("not_applied", {}) == not_applied
            assert model(client)["info"]["n_gpu_layers"] == layers


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        ({"main_gpu": 1}, {"echo1": 1000}),
        ({"tensor_split": [4, 1]}, {"echo0": 800, "echo1": 200}),
        ({"tensor_split": "1,4"}, {"echo0": 200, "echo1": 800}),
    ],
)
def test_the_operator_assigns_layers_to_devices(keys: dict[str, Any], taken: object) -> None:
    with daemon_with([2000, 2000], **keys) as daemon, RawClient(daemon.socket) as client:
        load(client)
        assert model(client)["memory"]["devices"] == taken


def test_a_missing_device_is_refused() -> None:
    with (
        daemon_with([2000], main_gpu=1) as daemon,
        RawClient(daemon.socket) as client,
        pytest.raises(InvalidArgument, match="there are 1 devices, echo0"),
    ):
        load(client)


def test_layers_without_memory_on_the_host_shrink_the_defaults() -> None:
    with daemon_with([500], memory_bytes=599) as daemon, RawClient(daemon.socket) as client:
        with pytest.raises(OutOfMemory) as caught:
            load(client)
        assert caught.value.data["needed_bytes"] == 600


TWO = """
[daemon]
memory-bytes = 10_000
""" + "".join(
    f"""
[models.{name}]
backend = "echo"
[models.{name}.echo]
load_ms = 200
layers = 10
layer_bytes = {layer_bytes}
device_bytes = [600]
"""
    for name, layer_bytes in (("small", 50), ("large", 100), ("other", 50))
)


async def layers(client: AsyncClient) -> dict[str, int]:
    """Return how many layers of each loaded model run on the device."""
    found = {m["name"]: m["info"] for m in await client.models()}
    return {name: info["n_gpu_layers"] for name, info in found.items() if info}


@pytest.mark.asyncio
async def test_an_idle_model_is_evicted_from_a_device_for_one_that_needs_it() -> None:
    """The free memory is read again: here it is unchanged, so there are fewer layers."""
    async with running_daemon(TWO) as daemon, AsyncClient(daemon.socket) as client:
        await client.unload(await client.load_by_name("small"), keep=True)
        assert await layers(client) == {"small": 10}
        await client.load_by_name("large")
        assert await layers(client) == {"large": 5}
        assert "for_model=large" in daemon.log


@pytest.mark.asyncio
async def test_two_loads_do_not_get_the_same_bytes_of_a_device() -> None:
    async with running_daemon(TWO) as daemon, AsyncClient(daemon.socket) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(client.load_by_name, "small")
            group.start_soon(client.load_by_name, "other")
        assert sorted((await layers(client)).values()) == [1, 10]
