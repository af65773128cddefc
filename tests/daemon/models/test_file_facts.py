"""The cache of facts about the models' files, and the thread that reads them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from inferd.backends.errors import LoadFailed
from inferd.daemon.models import file_contents
from inferd.daemon.models.file_contents import DeclaredTensorsCache, FileFactsCache
from tests.onnx_graphs import affine
from tests.tiny_gguf import write_tiny


@contextmanager
def held(cache: FileFactsCache) -> Iterator[None]:
    """Let the cache's thread wait, as for a file server that does not answer."""
    begun, released = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        released.wait()

    cache._thread.submit(wait)
    assert begun.wait(30)
    try:
        yield
    finally:
        released.set()


@pytest.mark.asyncio
async def test_a_file_is_read_once_and_again_after_a_change(tmp_path: Path) -> None:
    cache, file = FileFactsCache(), write_tiny("llama", tmp_path)
    first = await cache.facts_of([file])
    assert await cache.facts_of([file]) is first
    shutil.copy(write_tiny("mamba", tmp_path), file)
    assert (await cache.facts_of([file])).architecture == "mamba"


@pytest.mark.asyncio
async def test_a_file_that_does_not_answer_delays_a_caller_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, file = FileFactsCache(), write_tiny("llama", tmp_path)
    monkeypatch.setattr(file_contents, "HEADER_S_MAX", 0.01)
    with held(cache), pytest.raises(LoadFailed, match="no answer within"):
        await cache.facts_of([file])
    monkeypatch.undo()
    assert (await cache.facts_of([file])).architecture == "llama"


@pytest.mark.asyncio
async def test_known_facts_are_read_in_the_background_one_file_at_a_time(tmp_path: Path) -> None:
    cache, file = FileFactsCache(), write_tiny("llama", tmp_path)
    other = write_tiny("mamba", tmp_path)
    with held(cache):
        assert cache.known_facts([file]) is None and cache.known_facts([other]) is None
        assert list(cache._by_files) == [(file,)], "a caller of `show` waits for one file at most"
    facts = await cache.facts_of([file])
    assert cache.known_facts([file]) is facts
    assert cache.known_facts([other]) is None
    assert (await cache.facts_of([other])).architecture == "mamba"
    assert cache.known_facts([]) is None


@pytest.mark.asyncio
async def test_a_cancelled_caller_leaves_the_answer_to_the_others(tmp_path: Path) -> None:
    cache, file = FileFactsCache(), write_tiny("llama", tmp_path)
    found: list[object] = []

    async def wait() -> None:
        found.append(await cache.facts_of([file]))

    async with anyio.create_task_group() as group:
        with held(cache):
            group.start_soon(wait)
            with anyio.move_on_after(0):
                await cache.facts_of([file])
    assert len(found) == 1


@pytest.mark.asyncio
async def test_errors_name_the_file_and_the_reason(tmp_path: Path) -> None:
    cache = FileFactsCache()
    (tmp_path / "text.gguf").write_text("hello")
    for name, reason in (("text", "it is not a GGUF file"), ("none", "No such file")):
        with pytest.raises(LoadFailed, match=f"{name}.gguf cannot be read: {reason}"):
            await cache.facts_of([tmp_path / f"{name}.gguf"])


@pytest.mark.asyncio
async def test_the_facts_of_a_bounded_number_of_models_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_contents, "MODELS_MAX", 2)
    cache = FileFactsCache()
    for number in range(4):
        file = tmp_path / f"{number}.gguf"
        shutil.copy(write_tiny("llama", tmp_path), file)
        await cache.facts_of([file])
    assert len(cache._by_files) == 2


@pytest.mark.asyncio
async def test_the_tensors_of_a_graph_are_read_from_its_file(tmp_path: Path) -> None:
    cache, file = DeclaredTensorsCache(), tmp_path / "a.onnx"
    file.write_bytes(affine())
    found = await cache.tensors_of("onnx", file)
    assert found is not None and [info.name for info in found.inputs] == ["a", "b"]
    assert await cache.tensors_of("onnx", file) is found
    assert await cache.tensors_of("llama", file) is None
    file.write_bytes(b"\x08")
    with pytest.raises(LoadFailed, match="not an ONNX file"):
        await cache.tensors_of("onnx", file)
