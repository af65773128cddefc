from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferd.backends import Model, ModelSpec, load_model
from inferd.backends.llama.model import LlamaModel
from tests.backends import tiny as tiny_models
from tests.models import short_smollm2

SLOTS, CTX_SIZE, BATCH_SIZE = 4, 256, 32


@pytest.fixture(scope="session")
def _smollm2() -> Iterator[Model]:
    spec = ModelSpec(
        name="smollm2",
        path=str(short_smollm2()),
        slots=SLOTS,
        ctx_size=CTX_SIZE,
        batch_size=BATCH_SIZE,
        # With two threads, one busy process makes every step take 10 times as long.
        threads=1,
    )
    model = load_model(spec, lambda _: True)
    yield model
    model.close()


@pytest.fixture
def llama(_smollm2: Model) -> Model:
    """Return SmolLM2 with empty slots."""
    for slot in range(SLOTS):
        _smollm2.trim(slot, 0)
    return _smollm2


@pytest.fixture
def echo() -> Model:
    spec = ModelSpec(
        name="echo", backend="echo", slots=SLOTS, ctx_size=CTX_SIZE, batch_size=BATCH_SIZE
    )
    return load_model(spec, lambda _: True)


@pytest.fixture(params=["echo", pytest.param("llama", marks=pytest.mark.model)])
def model(request: pytest.FixtureRequest) -> Model:
    """Return each backend in turn; a new backend is added here."""
    found: Model = request.getfixturevalue(request.param)
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
