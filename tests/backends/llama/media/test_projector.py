"""The pieces and embeddings of images and sounds, compared with libmtmd's helper."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inferd.backends import ModelSpec
from inferd.backends.errors import (
    LoadFailed,
    TooLarge,
    UnsupportedOperation,
)
from inferd.backends.llama.media.images import decode_image
from inferd.backends.llama.media.projector import MediaLimits, Projector, fitted_size, load_mtmd
from inferd.backends.media import MediaKind
from inferd.backends.media_process import ItemPiece, TextPiece
from tests.backends.llama.media.reference import Piece, Reference
from tests.media_samples import encoded_image, flac, mp3, picture, png, wav
from tests.tiny_gguf import EMBEDDING, write_tiny
from tests.tiny_projector import KINDS, write_pair, write_projector

IMAGE_KINDS = tuple(kind for kind in KINDS if kind != "ultravox")
BEFORE, AFTER = "Look: ", " What is it?"


def spec_of(model: Path, projector: Path) -> ModelSpec:
    return ModelSpec(name="tiny", path=str(model), mmproj=str(projector))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projectors")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def projector(kind: str, folder: Path) -> Iterator[Projector]:
    opened = Projector(spec_of(*write_pair(kind, folder)))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def reference(kind: str, folder: Path) -> Iterator[Reference]:
    found = Reference(*write_pair(kind, folder))
    yield found
    found.close()


def content_of(kind: str) -> tuple[bytes, MediaKind]:
    return (wav(2.0), "audio") if kind == "ultravox" else (png(), "image")


def memories(
    projector: Projector, data: bytes, kind: MediaKind, tokens_max: int = 0
) -> list[bytes]:
    """Return the contents of the memories of a content's items."""
    found = []
    for item in projector.encode(data, kind, tokens_max):
        size = os.fstat(item.descriptor).st_size
        found.append(os.pread(item.descriptor, size, 0))
        os.close(item.descriptor)
    return found


def sizes(pieces: list[Piece]) -> list[int]:
    return [piece.size for piece in pieces if isinstance(piece, ItemPiece)]


def joined(pieces: list[Piece]) -> list[Piece]:
    """Return *pieces* with neighbouring texts in one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece):
            found[-1] = TextPiece(last.tokens + piece.tokens)
        else:
            found.append(piece)
    return found


def test_pieces_and_logits_equal_those_of_the_helper(
    kind: str, projector: Projector, reference: Reference
) -> None:
    data, media = content_of(kind)
    if media == "image":
        image = decode_image(data)
        bitmap = reference.image(image.width, image.height, image.tobytes())
    else:
        bitmap = reference.sound(data)
    expected, logits, positions = reference.by_helper(BEFORE, bitmap, AFTER)
    around = [
        TextPiece(reference.tokens(BEFORE, bos=True)),
        *projector.read(data, media),
        TextPiece(reference.tokens(AFTER)),
    ]
    assert joined(around) == expected
    found, length = reference.by_embeddings(joined(around), memories(projector, data, media))
    assert length == positions
    assert np.array_equal(found, logits)


def test_embeddings_depend_on_the_content_alone(kind: str, projector: Projector) -> None:
    data, media = content_of(kind)
    other = wav(2.0, seed=9) if media == "audio" else png(seed=9)
    first = memories(projector, data, media)
    assert memories(projector, other, media) != first
    assert memories(projector, data, media) == first


def test_the_facts_are_those_of_the_file(kind: str, projector: Projector) -> None:
    facts = projector.facts
    assert (facts.kind, facts.width) == (kind, EMBEDDING)
    assert (facts.images, facts.sounds) == (kind != "ultravox", kind == "ultravox")
    assert facts.mrope == (kind == "qwen2vl_merger")
    assert facts.sample_rate == (16_000 if facts.sounds else 0)
    expected = {"mlp": 16, "gemma3": 16, "qwen2vl_merger": 4096, "ultravox": 0}
    assert facts.image_tokens_max == expected.get(kind, facts.image_tokens_max)
    assert facts.weights_bytes > 100_000 and len(facts.fingerprint) == 32


def test_the_measured_buffer_grows_with_the_projector_and_changes_no_embedding(
    kind: str, projector: Projector
) -> None:
    data, media = content_of(kind)
    before = memories(projector, data, media)
    assert 20_000 < projector.measure_buffer() < 4 << 30
    assert memories(projector, data, media) == before


def test_the_number_of_threads_changes_embeddings_by_rounding_only(
    kind: str, projector: Projector
) -> None:
    data, media = content_of(kind)
    count = sum(sizes(projector.read(data, media))) * EMBEDDING
    one = [np.frombuffer(b"".join(memories(projector, data, media)), np.float32)]
    projector.use_threads(2)
    two = np.frombuffer(b"".join(memories(projector, data, media)), np.float32)
    projector.use_threads(1)
    assert np.abs(one[0] - two)[:count].max() < 1e-4


def test_the_other_medium_is_refused(kind: str, projector: Projector) -> None:
    _, media = content_of(kind)
    data, other = (png(), "image") if media == "audio" else (wav(), "audio")
    with pytest.raises(UnsupportedOperation) as error:
        projector.read(data, other)  # type: ignore[arg-type]
    assert "reads" in error.value.message and error.value.hint


def test_shapes_of_tokens(folder: Path) -> None:
    found = {}
    for kind in KINDS:
        opened = Projector(spec_of(*write_pair(kind, folder)))
        data, media = content_of(kind)
        found[kind] = [p for p in opened.read(data, media) if isinstance(p, ItemPiece)]
        opened.close()
    assert found["mlp"] == [ItemPiece(16, 16)]
    assert found["gemma3"] == [ItemPiece(16, 16, causal=False)]
    assert found["idefics3"] == [ItemPiece(9, 9)] * len(found["idefics3"])
    assert len(found["idefics3"]) > 2
    assert found["qwen2vl_merger"] == [ItemPiece(12, 4)]
    assert found["ultravox"] == [ItemPiece(25, 25)]


@pytest.fixture(scope="module")
def grid(folder: Path) -> Iterator[Projector]:
    """Return a projector whose tokens depend on the image's size."""
    opened = Projector(spec_of(*write_pair("qwen2vl_merger", folder)))
    yield opened
    opened.close()


@pytest.mark.parametrize("tokens_max", [12, 20, 100, 1000])
def test_an_image_is_scaled_to_its_bound_of_tokens(grid: Projector, tokens_max: int) -> None:
    data = png(640, 480)
    (whole,) = sizes(grid.read(data, "image"))
    assert whole == 1200
    (found,) = sizes(grid.read(data, "image", tokens_max))
    assert 0.6 * tokens_max <= found <= tokens_max
    (memory,) = memories(grid, data, "image", tokens_max)
    assert len(memory) == found * (4 * EMBEDDING + 16)


def test_a_small_image_keeps_its_size(grid: Projector) -> None:
    assert grid.read(png(), "image", 100) == grid.read(png(), "image")


def test_positions_of_a_grid_are_its_rows_and_columns(grid: Projector) -> None:
    (memory,) = memories(grid, png(64, 48), "image")
    places = np.frombuffer(memory, np.int32, offset=12 * EMBEDDING * 4).reshape(12, 4)
    assert [tuple(place) for place in places] == [
        (0, row, column, 0) for row in range(3) for column in range(4)
    ]


@pytest.mark.parametrize("tokens_max", [0, 1, 10, 50, 500])
def test_the_fitted_size_has_most_tokens_within_the_bound(tokens_max: int) -> None:
    def count(width: int, height: int) -> int:
        return max(8, -(-width // 16) * -(-height // 16))

    width, height = fitted_size(1600, 900, tokens_max, count)
    assert count(width, height) <= (max(tokens_max, 8) if tokens_max else count(1600, 900))
    if tokens_max >= 50:
        assert count(width, height) > 0.7 * tokens_max
        assert abs(width / height - 1600 / 900) < 0.1


def test_an_image_whose_tokens_do_not_depend_on_its_size_keeps_it() -> None:
    assert fitted_size(1600, 900, 10, lambda _width, _height: 256) == (1600, 900)


def test_an_upright_image_and_a_turned_one_with_a_mark_have_equal_embeddings(
    folder: Path,
) -> None:
    opened = Projector(spec_of(*write_pair("mlp", folder)))
    image = picture()
    exif = image.getexif()
    exif[0x0112] = 6
    turned = encoded_image(image.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)
    assert memories(opened, turned, "image") == memories(opened, png(), "image")
    opened.close()


def test_formats_of_one_image_have_equal_embeddings(folder: Path) -> None:
    opened = Projector(spec_of(*write_pair("mlp", folder)))
    expected = memories(opened, png(), "image")
    image = picture()
    for name, options in (("BMP", {}), ("WEBP", {"lossless": True})):
        assert memories(opened, encoded_image(image, name, **options), "image") == expected
    for name in ("JPEG", "GIF"):
        (found,) = memories(opened, encoded_image(image, name), "image")
        difference = np.frombuffer(found, np.float32) - np.frombuffer(expected[0], np.float32)
        assert 0 < np.abs(difference).max() < 3
    opened.close()


@pytest.mark.parametrize("name", ["wav", "mp3", "flac", "wav-48k"])
def test_formats_of_sounds_are_read(name: str, folder: Path) -> None:
    data = {"wav": wav(), "mp3": mp3(), "flac": flac(), "wav-48k": wav(rate=48_000)}[name]
    opened = Projector(spec_of(*write_pair("ultravox", folder)))
    assert sizes(opened.read(data, "audio")) == [25]
    assert len(memories(opened, data, "audio")) == 1
    opened.close()


def test_a_long_sound_becomes_several_items(folder: Path) -> None:
    opened = Projector(spec_of(*write_pair("ultravox", folder)), limits=MediaLimits(seconds_max=70))
    assert sizes(opened.read(wav(65.0), "audio")) == [25, 25, 25]
    with pytest.raises(TooLarge):
        opened.read(wav(71.0), "audio")
    opened.close()


def test_too_many_items_are_refused(folder: Path) -> None:
    opened = Projector(spec_of(*write_pair("ultravox", folder)), limits=MediaLimits(items_max=2))
    assert sizes(opened.read(wav(59.0), "audio")) == [25, 25]
    with pytest.raises(TooLarge) as error:
        opened.read(wav(61.0), "audio")
    assert error.value.data == {"items": 3, "items_max": 2}
    opened.close()


def test_a_projector_of_another_model_is_refused_with_both_sides(folder: Path) -> None:
    wide = write_projector("mlp", folder / "..", width=96)
    with pytest.raises(LoadFailed) as error:
        Projector(spec_of(write_tiny("llama", folder), wide))
    assert "96" in error.value.message and "64" in error.value.message
    with pytest.raises(LoadFailed) as error:
        Projector(spec_of(write_tiny("gemma3", folder), write_projector("gemma3", folder)))
    assert "<start_of_image>" in error.value.message


def test_an_engine_without_libmtmd_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llama_cpp.mtmd_cpp", raising=False)
    monkeypatch.setenv("MTMD_CPP_LIB", "/nowhere")
    with pytest.raises(UnsupportedOperation) as error:
        load_mtmd()
    assert "libmtmd" in error.value.message and "install" in error.value.hint
