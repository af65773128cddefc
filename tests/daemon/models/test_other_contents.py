"""The reading of files that may hold something else than models."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest

from inferd.daemon.models import file_contents
from inferd.daemon.models.file_contents import OtherContents
from inferd.ipc.server.descriptors import BlockingThread


@pytest.mark.asyncio
async def test_a_file_is_read_again_after_a_change_only(tmp_path: Path) -> None:
    file, contents = tmp_path / "a.gguf", OtherContents()
    file.write_text("<html>")
    await contents.read([file])
    first = contents.of_file(file)
    assert first is not None and "web page" in first.reason
    await contents.read([file])
    assert contents.of_file(file) is first
    file.write_bytes(b"GGUF and more")
    await contents.read([file])
    assert contents.of_file(file) is None
    await contents.read([])
    assert contents.of_file(file) is None, "it was removed"


@pytest.mark.asyncio
async def test_callers_at_once_share_a_reading(tmp_path: Path) -> None:
    contents, files = OtherContents(), [tmp_path / f"{number}.gguf" for number in range(50)]
    for file in files:
        file.touch()
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(contents.read, files)
    assert all(contents.of_file(file) is not None for file in files)


@pytest.mark.asyncio
async def test_files_of_a_server_that_does_not_answer_are_awaited_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_contents, "KINDS_S_MAX", 0.05)
    thread, answer = BlockingThread("test"), threading.Event()

    def wait() -> None:
        answer.wait(60)

    thread.submit(wait)
    contents, file = OtherContents(thread), tmp_path / "a.gguf"
    file.touch()
    await contents.read([file])
    assert contents.of_file(file) is None, "unknown files count as models"
    monkeypatch.setattr(file_contents, "KINDS_S_MAX", 60.0)
    with anyio.fail_after(30):
        await contents.read([file])
    answer.set()
    read = threading.Event()
    thread.submit(read.set)
    await anyio.to_thread.run_sync(read.wait)
    await contents.read([file])
    found = contents.of_file(file)
    assert found is not None and "empty" in found.reason
