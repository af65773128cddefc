from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inferd.backends import LanguageModel, ModelSpec
from inferd.backends.llama.model import LlamaModel
from tests.backends import tiny as tiny_models
from tests.backends.driving import load_language_model
from tests.models import short_smollm2, smollm2

SLOTS, CTX_SIZE, BATCH_SIZE = 4, 256, 32


@contextmanager
def _loaded(path: Path) -> Iterator[LanguageModel]:
    spec = ModelSpec(
        name="smollm2",
        path=str(path),
        slots=SLOTS,
        ctx_size=CTX_SIZE,
        batch_size=BATCH_SIZE,
        # With two threads, one busy process makes every step take 10 times as long.
        threads=1,
    )
    model = load_language_model(spec)
    yield model
    model.close()


@pytest.fixture(scope="session")
def _short_smollm2() -> Iterator[LanguageModel]:
    with _loaded(short_smollm2()) as model:
        yield model


@pytest.fixture
def llama(_short_smollm2: LanguageModel) -> LanguageModel:
    """Return a short SmolLM2 with empty slots."""
    for slot in range(SLOTS):
        _short_smollm2.trim(slot, 0)
    return _short_smollm2


@pytest.fixture(scope="module")
def whole_smollm2() -> Iterator[LanguageModel]:
    """Return SmolLM2, whose answers make sense."""
    with _loaded(smollm2()) as model:
        yield model


@pytest.fixture
def echo() -> LanguageModel:
    spec = ModelSpec(
        name="echo", backend="echo", slots=SLOTS, ctx_size=CTX_SIZE, batch_size=BATCH_SIZE
    )
    return load_language_model(spec)


@pytest.fixture(params=["echo", pytest.param("llama", marks=pytest.mark.model)])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    """Return each backend in turn; a new backend is added here."""
    found: LanguageModel = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module", params=tiny_models.KINDS)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LlamaModel]]:
    model = tiny_models.load_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    yield request.param, model
    model.close()


@pytest.fixture
def kind(loaded: tuple[str, LlamaModel]) -> str:
    """Return the kind of *tiny*, one of `tiny_models.KINDS`."""
    return loaded[0]


@pytest.fixture
def tiny(loaded: tuple[str, LlamaModel]) -> LlamaModel:
    """Return the tiny model of each kind in turn, with empty slots."""
    for slot in range(tiny_models.SLOTS):
        loaded[1].trim(slot, 0)
    return loaded[1]
