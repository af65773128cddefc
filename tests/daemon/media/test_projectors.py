"""The encoder of a model with a real projector of llama.cpp."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from inferd.backends import ModelSpec
from inferd.backends.errors import InvalidArgument, TooLarge, UnsupportedOperation
from inferd.backends.media import MediaKind, item_size, items_of
from inferd.daemon.workers.process import start_spawner
from tests.media_samples import png, wav
from tests.tiny_projector import KINDS, write_pair

from .encoders import Scene, encoding, requester

pytestmark = [pytest.mark.asyncio, pytest.mark.process]


@pytest.fixture(autouse=True)
def spawner() -> None:
    start_spawner()  # its descriptors stay open


def scene_of(kind: str, folder: Path) -> Scene:
    model, projector = write_pair(kind, folder)
    spec = ModelSpec(name="m", path=str(model), mmproj=str(projector), threads=2)
    return Scene({}, spec=spec)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_content_is_read_and_encoded_as_its_items_say(kind: str, tmp_path: Path) -> None:
    content_kind: MediaKind = "audio" if kind == "ultravox" else "image"
    data = wav(1.0) if content_kind == "audio" else png(64, 48)
    async with encoding(scene_of(kind, tmp_path)) as scene:
        content = scene.add(data, kind=content_kind)
        [read] = await scene.encoder.read(requester(1), [content])
        facts = scene.encoder.facts
        assert facts is not None and facts.kind == kind and facts.fingerprint
        assert scene.encoder.kinds == {content_kind}
        found = items_of(read.tokens)
        assert [size for _, size in found] == [item.size for item in read.items]
        assert all(item_size(read.tokens, begin) == size for begin, size in found)
        for number, item in enumerate(read.items):
            encoded = await scene.encoder.embeddings(requester(1), item, by=1)
            entry_bytes = 4 * facts.width + (16 if facts.mrope else 0)
            assert os.fstat(encoded.fd).st_size == item.size * entry_bytes
            values = memoryview(os.pread(encoded.fd, 4 * facts.width, 0)).cast("f")
            os.close(encoded.fd)
            assert any(values) and all(map(math.isfinite, values))
            assert encoded.causal == (kind != "gemma3") and encoded.cached == (number > 0)
        whole = scene.encoder.caches.find_read(1, content)
        assert whole is not None and bool(whole.size_whole) == (kind == "gemma3")
        other: MediaKind = "image" if content_kind == "audio" else "audio"
        with pytest.raises(UnsupportedOperation) as refused:
            await scene.encoder.read(requester(1), [scene.add(data, kind=other)])
        assert "mmproj" in refused.value.hint and not scene.deaths


async def test_contents_that_are_no_images_are_refused_and_others_read(tmp_path: Path) -> None:
    async with encoding(scene_of("mlp", tmp_path)) as scene:
        contents = [scene.add(data) for data in (png(), b"%PDF-1.7 and more", png()[:60])]
        for index in (1, 2):
            with pytest.raises(InvalidArgument) as refused:
                await scene.encoder.read(requester(1), [contents[0], contents[index]])
            assert refused.value.data["item"] == 1
        assert await scene.encoder.read(requester(1), contents[:1]) and not scene.deaths


async def test_more_pixels_than_allowed_are_refused(tmp_path: Path) -> None:
    model, projector = write_pair("mlp", tmp_path)
    spec = ModelSpec(name="m", path=str(model), mmproj=str(projector), threads=1)
    async with encoding(Scene({}, spec=spec, pixels_max=100)) as scene:
        with pytest.raises(TooLarge):
            await scene.read_items(png(64, 48))


async def test_threads_change_between_contents(tmp_path: Path) -> None:
    async with encoding(scene_of("mlp", tmp_path)) as scene:
        first, _ = await scene.encode(png(seed=1))
        scene.encoder.set_threads(2, 0)
        second, _ = await scene.encode(png(seed=2))
        scene.encoder.caches.clear()
        again, _ = await scene.encode(png(seed=1))
        assert first != second and not scene.deaths
        assert len(again) == len(first)
