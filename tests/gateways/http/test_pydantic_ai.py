"""Agents of pydantic-ai on the gateway: tools, streams and structured output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway
from tests.models import ONE_THREAD, smollm2

pytestmark = [pytest.mark.model, pytest.mark.timeout(300), pytest.mark.asyncio]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
GREEDY = ModelSettings(temperature=0, max_tokens=120)


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


@pytest_asyncio.fixture
async def provider(http: RunningGateway) -> AsyncIterator[OpenAIProvider]:
    async with openai.AsyncOpenAI(
        base_url=f"{http.url}/v1", api_key="none", timeout=CALL_S_MAX, max_retries=0
    ) as client:
        yield OpenAIProvider(openai_client=client)


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_calls_its_tool_and_answers_with_the_result(
    provider: OpenAIProvider, kind: type[OpenAIChatModel | OpenAIResponsesModel], stream: bool
) -> None:
    """The echo model repeats the prompt, which is a call, and then the tool's result."""
    agent = Agent(kind("echo", provider=provider))
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
        result = await agent.run(CALL, usage_limits=UsageLimits(request_limit=3))
        output, usage = result.output, result.usage
    assert (output, asked) == ("sunny in Rome", ["Rome"])
    assert usage.requests == 2 and usage.output_tokens > 0


async def test_structured_output_is_the_call_of_a_tool(provider: OpenAIProvider) -> None:
    model = OpenAIChatModel("smollm2", provider=provider)
    agent = Agent(model, output_type=ToolOutput(City), model_settings=GREEDY)
    found = (await agent.run("Paris has 2000000 people. Name the city and its population.")).output
    assert isinstance(found, City) and found.name


async def test_structured_output_follows_a_schema(provider: OpenAIProvider) -> None:
    model = OpenAIChatModel("smollm2", provider=provider)
    agent = Agent(model, output_type=NativeOutput(City), model_settings=GREEDY)
    found = (await agent.run("Paris has 2000000 people. Name the city and its population.")).output
    assert isinstance(found, City) and found.name


async def test_a_refusal_is_the_programs_error(provider: OpenAIProvider) -> None:
    agent = Agent(OpenAIChatModel("nobody", provider=provider))
    with pytest.raises(ModelHTTPError) as caught:
        await agent.run("hello")
    assert caught.value.status_code == 404 and "nobody" in str(caught.value.body)
