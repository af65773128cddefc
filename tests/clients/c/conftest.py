from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.tiny_gguf import write_tiny

MODELS = (
    echo_model("slow", step_ms=100, fim=True)
    + echo_model("echo")
    + echo_model("rank", ranks=True)
    + echo_model("eyes", media=True, ctx_size=65_536)
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GGUF file that llama.cpp runs."""
    return write_tiny("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def daemon(tiny: Path) -> Iterator[RunningDaemon]:
    config = "[daemon]\nsessions-max = 16\n" + MODELS + f'[models.tiny]\nfile = "{tiny}"\n'
    with running_daemon(config) as running:
        yield running
