"""Checks of litellm: the gateway as a provider of OpenAI's, Anthropic's and Ollama's API."""

from __future__ import annotations

import os
import sys

sys.path.append(sys.path.pop(0))  # this file has the name of the package
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched
import litellm
from checks import IMAGE_MODEL, IMAGE_URL, KEY, MODEL, QUESTION, URL, run_checks
from pydantic import BaseModel

OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY}
OLLAMA = {"model": f"ollama_chat/{MODEL}", "api_base": URL}
GREEDY = {"temperature": 0, "max_tokens": 100}
MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """A city in a country."""

    name: str
    country: str


def whole_of(provider: dict) -> object:
    done = litellm.completion(**provider, **GREEDY, messages=MESSAGES)
    assert done.usage.completion_tokens
    return done.choices[0].message.content


def stream_of(provider: dict) -> object:
    chunks = list(litellm.completion(**provider, **GREEDY, messages=MESSAGES, stream=True))
    assert len(chunks) > 3
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tools_of(provider: dict) -> object:
    keywords = {"tools": [WEATHER], "tool_choice": "required"}
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    done = litellm.completion(**provider, **GREEDY, messages=messages, **keywords)
    [call, *_] = done.choices[0].message.tool_calls
    return f"{call.function.name} {call.function.arguments}"


def image_of(provider: dict) -> object:
    own = {**provider, "model": provider["model"].replace(MODEL, IMAGE_MODEL)}
    text = {"type": "text", "text": "a picture"}
    image = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
    messages = [{"role": "user", "content": [text, image]}]
    done = litellm.completion(**own, max_tokens=100, messages=messages)
    return f"{done.choices[0].message.content} ({done.usage.prompt_tokens} tokens)"


def openai_image() -> object:
    """image, by OpenAI's API"""
    return image_of(OPENAI)


def anthropic_image() -> object:
    """image, by Anthropic's API"""
    return image_of(ANTHROPIC)


def ollama_image() -> object:
    """image, by Ollama's API"""
    return image_of(OLLAMA)


def openai_whole() -> object:
    """chat, by OpenAI's API"""
    return whole_of(OPENAI)


def openai_stream() -> object:
    """streamed chat, by OpenAI's API"""
    return stream_of(OPENAI)


def openai_tools() -> object:
    """required call of a tool, by OpenAI's API"""
    return tools_of(OPENAI)


def openai_schema() -> object:
    """structured output, by OpenAI's API"""
    done = litellm.completion(**OPENAI, **GREEDY, messages=MESSAGES, response_format=City)
    return City.model_validate_json(done.choices[0].message.content)


def openai_responses() -> object:
    """response"""
    return (
        litellm.responses(**OPENAI, input=QUESTION, max_output_tokens=40, temperature=0)
        .output[0]
        .content[0]
        .text
    )


def embeddings() -> object:
    """embeddings, by OpenAI's API"""
    found = litellm.embedding(**OPENAI, input=["one", "two"])
    return f"{len(found.data)} vectors of {len(found.data[0]['embedding'])} numbers"


def anthropic_whole() -> object:
    """chat, by Anthropic's API"""
    return whole_of(ANTHROPIC)


def anthropic_stream() -> object:
    """streamed chat, by Anthropic's API"""
    return stream_of(ANTHROPIC)


def anthropic_tools() -> object:
    """required call of a tool, by Anthropic's API"""
    return tools_of(ANTHROPIC)


def ollama_whole() -> object:
    """chat, by Ollama's API"""
    return whole_of(OLLAMA)


def ollama_stream() -> object:
    """streamed chat, by Ollama's API"""
    return stream_of(OLLAMA)


def ollama_embeddings() -> object:
    """embeddings, by Ollama's API"""
    found = litellm.embedding(model=f"ollama/{MODEL}", api_base=URL, input=["one", "two"])
    return f"{len(found.data)} vectors of {len(found.data[0]['embedding'])} numbers"


run_checks(
    *(openai_whole, openai_stream, openai_tools, openai_schema, openai_responses, embeddings),
    *(anthropic_whole, anthropic_stream, anthropic_tools),
    *(ollama_whole, ollama_stream, ollama_embeddings),
    *(openai_image, anthropic_image, ollama_image),
)
