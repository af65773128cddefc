"""Checks of langchain-openai: a chat model, its streams, tools and schemas, and embeddings."""

from __future__ import annotations

from checks import IMAGE, IMAGE_MODEL, KEY, MODEL, QUESTION, URL, run_checks
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, temperature=0, max_tokens=200)


class City(BaseModel):
    """A city in a country."""

    name: str
    country: str


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def whole() -> object:
    """chat"""
    return chat.invoke([("system", "Be brief."), ("user", QUESTION)]).content


def stream() -> object:
    """streamed chat, with its usage"""
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    usage = next(chunk.usage_metadata for chunk in reversed(chunks) if chunk.usage_metadata)
    assert len(chunks) > 3
    return "".join(chunk.text for chunk in chunks) + f" ({usage['output_tokens']} tokens)"


def responses() -> object:
    """response (`use_responses_api`)"""
    own = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, use_responses_api=True)
    return own.bind(max_output_tokens=40, temperature=0).invoke(QUESTION).text


def tools() -> object:
    """required call of a tool, its result, and the answer"""
    messages = [("user", "How is the weather in Rome?")]
    asked = chat.bind_tools([weather], tool_choice="required").invoke(messages)
    result = weather.invoke(asked.tool_calls[0])
    answer = chat.bind_tools([weather]).invoke([*messages, asked, result])
    return f"{asked.tool_calls[0]['args']} → {result.content} → {answer.content}"


def schema() -> object:
    """structured output by a JSON schema"""
    found = chat.with_structured_output(City, method="json_schema").invoke("Paris is in France.")
    assert isinstance(found, City)
    return found


def schema_by_tool() -> object:
    """structured output by a function"""
    own = chat.with_structured_output(City, method="function_calling")
    found = own.invoke("Paris is in France.")
    assert isinstance(found, City)
    return found


def logprobs() -> object:
    """logprobs"""
    found = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata
    return found["logprobs"]["content"][0]


def completion() -> object:
    """completion"""
    own = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=20, temperature=0)
    return own.invoke("The capital of France is")


def image() -> object:
    """image"""
    own = ChatOpenAI(model=IMAGE_MODEL, base_url=f"{URL}/v1", api_key=KEY)
    picture = {"type": "image", "base64": IMAGE, "mime_type": "image/png"}
    text = {"type": "text", "text": "a picture"}
    return own.invoke([{"role": "user", "content": [text, picture]}]).text


def embeddings() -> object:
    """embeddings"""
    own = OpenAIEmbeddings(
        model=MODEL, base_url=f"{URL}/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    vectors = own.embed_documents(["one", "two"])
    return f"{len(vectors)} vectors of {len(vectors[0])} numbers"


run_checks(
    *(whole, stream, responses, tools, schema, schema_by_tool, logprobs, completion),
    *(image, embeddings),
)
