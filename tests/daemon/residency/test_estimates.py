"""A model's memory is estimated once per file, and again when the file has changed."""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import closing
from pathlib import Path

import anyio
import msgspec
import pytest

from inferd.backends import Device, MemoryNeed, ModelSpec, Shape
from inferd.backends.tuning_choice import UNKNOWN_CPU, LoadTuning, ModelShape, Setting, TuningRecord
from inferd.daemon.config.sources import load_config
from inferd.daemon.models.model_files import signature_of
from inferd.daemon.models.registry import Registry
from inferd.daemon.models.specs import ESTIMATED_MODELS_MAX, SHAPES_MAX, EstimateCache
from inferd.scheduler import messages as m
from inferd.scheduler import worker
from inferd.scheduler.worker import SocketLink
from inferd.testing import running_daemon
from inferd.wire.frames import pack_frame
from tests.raw import RawClient
from tests.tiny_gguf import write_tiny

SPEC = ModelSpec(name="m", path="/m.gguf")
SIGNATURE = ((1, 2, 3),)


def report(slots: int = 4, **fields: object) -> m.MemoryEstimate:
    return m.MemoryEstimate(Shape(slots, 4096, 512), MemoryNeed(weights=slots), **fields)  # type: ignore[arg-type]


def test_estimates_hold_for_the_same_files_and_spec() -> None:
    cache = EstimateCache()
    for slots in (4, 2, 2, 1):
        cache.store_estimate(SPEC, SIGNATURE, report(slots))
    assert cache.estimates_of(SPEC, SIGNATURE) == [report(4), report(2), report(1)]
    assert cache.estimates_of(SPEC, ((1, 2, 4),)) == []
    assert cache.estimates_of(msgspec.structs.replace(SPEC, slots=3), SIGNATURE) == []
    assert cache.estimates_of(msgspec.structs.replace(SPEC, path="/n.gguf"), SIGNATURE) == []
    renamed = msgspec.structs.replace(SPEC, name="n")
    assert cache.estimates_of(renamed, SIGNATURE) == [report(4), report(2), report(1)]


def test_another_file_replaces_the_previous_one() -> None:
    cache = EstimateCache()
    cache.store_estimate(SPEC, SIGNATURE, report(4))
    cache.store_estimate(SPEC, ((9,),), report(2))
    assert cache.estimates_of(SPEC, SIGNATURE) == []
    assert cache.estimates_of(SPEC, ((9,),)) == [report(2)]


def test_estimates_for_devices_or_descriptors_are_not_stored() -> None:
    cache = EstimateCache()
    cache.store_estimate(SPEC, SIGNATURE, report(devices=[Device("GPU0", 1, 2)]))
    cache.store_estimate(msgspec.structs.replace(SPEC, fd=3), SIGNATURE, report())
    assert cache.estimates_of(SPEC, SIGNATURE) == []
    assert cache.estimates_of(msgspec.structs.replace(SPEC, fd=3), SIGNATURE) == []


def test_another_measured_setting_needs_another_estimate() -> None:
    cache = EstimateCache()
    cache.store_estimate(SPEC, SIGNATURE, report(4))
    shape = ModelShape(
        architecture="llama", layers=1, embedding=1, heads=1, kv_heads=1, head_k=1, head_v=1,
        size_bytes=1,
    )  # fmt: skip
    chosen = Setting(flash_attn=True)
    records = (TuningRecord(shape=shape, cpu="c", build="b", chosen=chosen, reason="r"),)
    tuned = msgspec.structs.replace(SPEC, tuning=LoadTuning(cpu=UNKNOWN_CPU, records=records))
    assert cache.estimates_of(tuned, SIGNATURE) == []
    cache.store_estimate(tuned, SIGNATURE, report(2))
    assert cache.estimates_of(tuned, SIGNATURE) == [report(2)]
    assert cache.estimates_of(SPEC, SIGNATURE) == [report(4)]


def test_models_and_shapes_are_bounded() -> None:
    cache = EstimateCache()
    for number in range(ESTIMATED_MODELS_MAX + 1):
        cache.store_estimate(msgspec.structs.replace(SPEC, path=f"m{number}"), SIGNATURE, report())
    assert not cache.estimates_of(msgspec.structs.replace(SPEC, path="m0"), SIGNATURE)
    assert cache.estimates_of(msgspec.structs.replace(SPEC, path="m1"), SIGNATURE)
    for slots in range(1, SHAPES_MAX + 9):
        cache.store_estimate(SPEC, SIGNATURE, report(slots))
    assert len(cache.estimates_of(SPEC, SIGNATURE)) == SHAPES_MAX


def test_a_written_or_replaced_file_has_another_signature(tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_bytes(b"GGUF")
    before = signature_of([file])
    assert signature_of([file]) == before
    os.utime(file, ns=(1, 1))
    assert signature_of([file]) != before
    file.unlink()
    assert signature_of([file]) != before


@pytest.mark.parametrize("known", [True, False])
def test_a_worker_reads_the_file_only_for_unknown_estimates(known: bool, tmp_path: Path) -> None:
    """The file is missing: reading it fails."""
    ours, theirs = socket.socketpair()
    spec = ModelSpec(name="m", path=str(tmp_path / "none.gguf"))
    thread = threading.Thread(target=worker.run_worker, args=(SocketLink(theirs),))
    thread.start()
    with theirs, ours, closing(Reports(ours)) as reader:
        ours.sendall(
            pack_frame([m.LoadModel(spec, {}, "", [report(4), report(2)] if known else [])])
        )
        if known:
            ours.sendall(pack_frame([m.EstimateMemory(Shape(2, 4096, 512))]))
            assert reader.next() == report(2)
            ours.sendall(pack_frame([m.EstimateMemory(Shape(1, 4096, 512))]))
        failed = reader.next()
        assert isinstance(failed, m.ModelNotLoaded) and "none.gguf" in failed.error["message"]
        thread.join(60)
        assert not thread.is_alive()


class Reports:
    """The reports of a worker, one by one."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(30)
        self._file = sock.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(list[m.Report])
        self._waiting: list[m.Report] = []

    def next(self) -> m.Report:
        while not self._waiting:
            size = int.from_bytes(self._file.read(4), "little")
            self._waiting += self._decoder.decode(self._file.read(size))
        return self._waiting.pop(0)

    def close(self) -> None:
        self._file.close()


def test_a_reload_reads_only_changed_files() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        models = daemon.directory / "models"
        write_tiny("llama", models).rename(models / "m.gguf")

        def weights() -> int:
            graph = client.call("load_by_name", name="m")["graph"]
            (found,) = client.call("show", name="m")["models"]
            client.call("unload", graph=graph)
            return int(found["memory"]["weights"])

        first, again = weights(), weights()
        write_tiny("mamba", models).rename(models / "m.gguf")
        changed = weights()
        assert first == again != changed
        assert re.findall(r"model.loading .*cached=(\w+)", daemon.log) == [
            "False",
            "True",
            "False",
        ]


@pytest.mark.asyncio
async def test_a_stored_estimate_is_decided_on_before_the_process_runs(tmp_path: Path) -> None:
    """A request that arrives during another model's unload is thus considered in time."""
    config = load_config({"state_dir": tmp_path, "models_dir": tmp_path}, {})
    async with anyio.create_task_group() as group:
        registry = Registry(config, group, lambda: None)
        model = registry.catalog.get("echo", 0)
        first = registry.loader.start_worker(model)
        assert registry.reservations.of_worker(first) is None
        await first.loaded.wait()
        need = registry.reservations.of_worker(first)
        await model.unload()

        again = registry.loader.start_worker(model)
        assert again.pid == 0
        assert registry.reservations.of_worker(again) == need is not None
        await again.loaded.wait()
        assert again.error is None and again.info == first.info
        await registry.close()
