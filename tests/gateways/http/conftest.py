from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from inferd.testing import RunningDaemon
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway

HELD = ("--hold-headers", "30")


@pytest.fixture(scope="module")
def http(request: pytest.FixtureRequest, daemon: RunningDaemon) -> Iterator[RunningGateway]:
    """A gateway for a module's tests, with the module's `OPTIONS` if it has some.

    Otherwise headers are held for longer than any early error takes on a busy machine.
    """
    with gateway(daemon, *getattr(request.module, "OPTIONS", HELD)) as running:
        yield running


@pytest.fixture(scope="module")
def api(http: RunningGateway) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(
        base_url=f"{http.url}/v1", api_key="none", timeout=CALL_S_MAX, max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def web(http: RunningGateway) -> Iterator[httpx.Client]:
    """A client for requests that no official client sends."""
    with httpx.Client(base_url=http.url, timeout=CALL_S_MAX) as client:
        yield client
