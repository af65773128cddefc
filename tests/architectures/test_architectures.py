"""One architecture of llama.cpp for each kind of memory passes the checks of `make archs`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from inferd.backends import AdapterSpec
from inferd.backends.errors import UnsupportedOperation
from inferd.backends.llama.loading.loader import load_llama
from tests.architectures.checks import CHECKS, Subject
from tests.backends.driving import prefill
from tests.backends.tiny import difference, tiny_spec
from tests.tiny_lora import matrices, write_lora
from tools.architectures.models import CHOSEN, MISSING, find_models

pytestmark = pytest.mark.model

GENERATING = [name for name in CHOSEN if name != "dream-dense"]


def subject_of(name: str) -> Subject:
    found = find_models([name])
    # The test is not skipped: a run without the models would look as if it had passed.
    assert found is not None, MISSING
    return Subject(found[0])


@pytest.fixture(scope="module", params=GENERATING)
def loaded(request: pytest.FixtureRequest) -> Iterator[Subject]:
    subject = subject_of(request.param)
    assert subject.bound > 0, "measured first, because this uses slots"
    yield subject
    subject.close()


@pytest.fixture
def subject(loaded: Subject) -> Subject:
    loaded.clear()
    return loaded


@pytest.mark.parametrize("name", CHECKS)
def test_an_architecture_passes_a_check_or_refuses_it(subject: Subject, name: str) -> None:
    try:
        CHECKS[name](subject)
    except UnsupportedOperation:
        info = subject.model.info
        expected = {"shift": not info.can_shift, "embeddings": info.embedding is None}
        assert expected.get(name), "the check may not be refused"


def test_only_embeddings_past_their_end_are_refused(subject: Subject) -> None:
    has_embeddings = subject.model.info.embedding is not None
    assert has_embeddings == (subject.path.stem != "qwen4exp-moe")


def test_a_diffusion_model_is_refused() -> None:
    with pytest.raises(UnsupportedOperation, match="a diffusion process"):
        subject_of("dream-dense")


def test_an_adapter_that_llama_cpp_would_ignore_is_refused(tmp_path: Path) -> None:
    """It multiplies these weights of DeepSeek's attention without adapters."""
    subject = subject_of("deepseek2-moe")
    name = "blk.0.attn_kv_a_mqa.weight"
    rows, columns = reversed(subject.file.tensors[name].shape)
    tensors = matrices({name: (rows, columns)})
    path = write_lora(tmp_path / "a.gguf", tensors, architecture="deepseek2")
    with pytest.raises(UnsupportedOperation, match=r"attn_kv_a_mqa.*without adapters") as caught:
        subject.model.add_adapter(AdapterSpec(name="a", path=str(path)))
    assert caught.value.hint
    tokens = subject.tokens(1, 20)
    plain = subject.bare.decode(0, tokens)
    with subject.bare.adapter(path, 1.0):
        assert np.array_equal(subject.bare.decode(0, tokens), plain)
    subject.close()


@pytest.mark.parametrize(("name", "fits"), [("minicpm3-dense", False), ("llama-dense", True)])
def test_a_state_fits_another_context_unless_its_keys_are_rotated_otherwise(
    name: str, fits: bool
) -> None:
    """Models with LongRoPE rotate keys by other factors in contexts longer than the original."""
    subject = subject_of(name)
    tokens = subject.tokens(1, 100)
    spec = tiny_spec(subject.path, ctx_size=256)
    with closing(load_llama(spec, lambda _: True)) as smaller:
        prefill(smaller, 0, tokens)
        state = smaller.save(0)
        prefill(smaller, 0, [9], 100)
        assert subject.model.restore(0, state) == fits
        if fits:
            prefill(subject.model, 0, [9], 100)
            assert difference(subject.model.logits(0), smaller.logits(0)) < 1e-3
    subject.close()
