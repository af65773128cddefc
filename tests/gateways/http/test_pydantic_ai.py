"""Agents of pydantic-ai on the gateway: tools, streams and structured output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pydantic_ai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway
from tests.models import ONE_THREAD, smollm2
from tests.slow_imports import loaded

pytestmark = [pytest.mark.model, pytest.mark.timeout(300), pytest.mark.asyncio]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
GREEDY: Any = {"temperature": 0, "max_tokens": 120}


class City(BaseModel):
    """A city in a country."""

    name: str
    population: int


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / "smollm2.gguf").symlink_to(smollm2())
    own = "[models.smollm2]\nctx-size = 1024\nslots = 2\n"
    config = ONE_THREAD + own + echo_model("echo", tool_format="hermes")
    with running_daemon(config, models_dir=models) as running:
        yield running


OpenModel = Callable[[str, str], Any]
"""Opens a model of the gateway by a name, as a class of pydantic-ai."""


@pytest_asyncio.fixture
async def open_model(http: RunningGateway) -> AsyncIterator[OpenModel]:
    loaded("pydantic_ai")
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai.AsyncOpenAI(
        base_url=f"{http.url}/v1", api_key="none", timeout=CALL_S_MAX, max_retries=0
    ) as client:
        provider = OpenAIProvider(openai_client=client)
        yield lambda kind, name: getattr(models, kind)(name, provider=provider)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_calls_its_tool_and_answers_with_the_result(
    open_model: OpenModel, kind: str, stream: bool
) -> None:
    """The echo model repeats the prompt, which is a call, and then the tool's result."""
    agent = pydantic_ai.Agent(open_model(kind, "echo"))
    asked: list[str] = []

    @agent.tool_plain
    def weather(city: str) -> str:
        asked.append(city)
        return f"sunny in {city}"

    if stream:
        async with agent.run_stream(CALL) as run:
            output = await run.get_output()
            usage = run.usage
    else:
        result = await agent.run(CALL, usage_limits=pydantic_ai.UsageLimits(request_limit=3))
        output, usage = result.output, result.usage
    assert (output, asked) == ("sunny in Rome", ["Rome"])
    assert usage.requests == 2 and usage.output_tokens > 0


async def test_structured_output_is_the_call_of_a_tool(open_model: OpenModel) -> None:
    model = open_model("OpenAIChatModel", "smollm2")
    agent = pydantic_ai.Agent(
        model, output_type=pydantic_ai.ToolOutput(City), model_settings=GREEDY
    )
    found = (await agent.run("Paris has 2000000 people. Name the city and its population.")).output
    assert isinstance(found, City) and found.name


async def test_structured_output_follows_a_schema(open_model: OpenModel) -> None:
    model = open_model("OpenAIChatModel", "smollm2")
    agent = pydantic_ai.Agent(
        model, output_type=pydantic_ai.NativeOutput(City), model_settings=GREEDY
    )
    found = (await agent.run("Paris has 2000000 people. Name the city and its population.")).output
    assert isinstance(found, City) and found.name


async def test_a_refusal_is_the_programs_error(open_model: OpenModel) -> None:
    agent = pydantic_ai.Agent(open_model("OpenAIChatModel", "nobody"))
    with pytest.raises(pydantic_ai.ModelHTTPError) as caught:
        await agent.run("hello")
    assert caught.value.status_code == 404 and "nobody" in str(caught.value.body)
