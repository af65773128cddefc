"""Images in models of llama.cpp's architectures, compared with those of mtmd's helper."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from inferd.backends.llama.loading.loader import load_llama
from tests.architectures.checks import CTX_SIZE, Subject
from tests.backends.pictures import Part, Picture, compute, picture, reference, size_of
from tests.backends.tiny import difference, tiny_spec
from tools.architectures.models import CHOSEN, MISSING, find_models

__all__ = ("check_images",)

pytestmark = pytest.mark.model

READERS = [name for name in CHOSEN if name not in ("dream-dense", "qwen4exp-moe")]


def check_images(path: Path) -> str:
    """Check images in a model; return the kind of its memory, or why it reads no images.

    :raises AssertionError: logits differ, or a state was not kept.
    """
    subject = Subject(path)
    with closing(subject):
        if not subject.model.info.generates:
            return "makes embeddings only"
        bound, bare = subject.bound, subject.bare
        spec = msgspec.structs.replace(tiny_spec(path, ctx_size=CTX_SIZE), mmproj="projector.gguf")
        with closing(load_llama(spec, lambda _: True)) as model:
            info = model.info
            if not info.media_width:
                return "reads no embeddings"

            def image(seed: int, rows: int, columns: int) -> Picture:
                return picture(seed, rows, columns, mrope=info.media_mrope, width=info.media_width)

            def equals(slot: int, parts: list[Part]) -> None:
                off = difference(model.logits(slot), reference(bare, parts))
                assert off < bound, f"the logits differ by {off:.2g}, and may by {bound:.2g}"

            parts: list[Part] = [subject.tokens(1, 20), image(1, 3, 4), subject.tokens(2, 9)]
            compute(model, 0, parts)
            equals(0, parts)
            state = model.save(0)
            more: list[Part] = [image(2, 5, 5), subject.tokens(3, 7)]
            compute(model, 0, more, 6)
            equals(0, [*parts, *more])
            assert model.restore(2, state) and model.length(2) == sum(map(size_of, parts))
            compute(model, 2, [image(3, 2, 6), subject.tokens(4, 3)])
            equals(2, [*parts, image(3, 2, 6), subject.tokens(4, 3)])
            for kept in (4, 3, 2, 1):
                whole = [*parts, *more]
                keep = sum(map(size_of, whole[:kept]))
                if model.trim(0, keep):
                    assert model.length(0) == keep
                    compute(model, 0, [subject.tokens(5, 4)])
                    equals(0, [*whole[:kept], subject.tokens(5, 4)])
                model.trim(0, 0)
                compute(model, 0, whole)
            if info.kv_kind == "hybrid":
                checkpoint = model.save_checkpoint(0)
                compute(model, 0, [image(4, 4, 4), subject.tokens(6, 3)])
                assert model.restore_checkpoint(0, checkpoint)
                compute(model, 0, [subject.tokens(5, 4)])
                equals(0, [*parts, *more, subject.tokens(5, 4)])
            return info.kv_kind


@pytest.mark.parametrize("name", READERS)
def test_images_equal_those_of_mtmds_helper(name: str) -> None:
    found = find_models([name])
    assert found is not None, MISSING
    assert check_images(found[0]) in ("plain", "window", "hybrid", "recurrent")


def test_images_that_would_depend_on_the_steps_are_refused() -> None:
    found = find_models(["qwen4exp-moe"])
    assert found is not None, MISSING
    assert check_images(found[0]) == "reads no embeddings"
