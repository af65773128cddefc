"""Checks of openai-agents: agents with tools, by chat completions and by responses."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import KEY, MODEL, QUESTION, URL, run_checks
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
settings = ModelSettings(temperature=0, max_tokens=200)
forced = ModelSettings(temperature=0, max_tokens=200, tool_choice="required")


class City(BaseModel):
    """A city in a country."""

    name: str
    country: str


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def agent(kind: type, **keywords: object) -> Agent:
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))
    return Agent("helper", model=model, **{"model_settings": settings, **keywords})


def whole() -> object:
    """agent, by chat completions"""
    return Runner.run_sync(agent(OpenAIChatCompletionsModel), QUESTION).final_output


def responses() -> object:
    """agent, by responses"""
    return Runner.run_sync(agent(OpenAIResponsesModel), QUESTION).final_output


def stream() -> object:
    """streamed agent"""

    async def read() -> str:
        run = Runner.run_streamed(agent(OpenAIResponsesModel), QUESTION)
        kinds = [event.data.type async for event in run.stream_events() if hasattr(event, "data")]
        assert kinds[-1] == "response.completed"
        return f"{len(kinds)} events: {run.final_output}"

    return asyncio.run(read())


def tools_of(kind: type) -> object:
    own = agent(kind, tools=[weather], model_settings=forced)
    run = Runner.run_sync(own, "How is the weather in Rome?", max_turns=4)
    called = [item.output for item in run.new_items if item.type == "tool_call_output_item"]
    assert called
    return f"{called[0]} → {run.final_output}"


def tools() -> object:
    """required call of a tool, its result, and the answer, by chat completions"""
    return tools_of(OpenAIChatCompletionsModel)


def tools_by_responses() -> object:
    """required call of a tool, its result, and the answer, by responses"""
    return tools_of(OpenAIResponsesModel)


def schema() -> object:
    """structured output"""
    own = agent(OpenAIResponsesModel, output_type=City)
    found = Runner.run_sync(own, "Paris is in France.").final_output
    assert isinstance(found, City)
    return found


run_checks(whole, responses, stream, tools, tools_by_responses, schema)
