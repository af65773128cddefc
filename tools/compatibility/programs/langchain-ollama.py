"""Checks of langchain-ollama: a chat model, its streams and schemas, and embeddings."""

from __future__ import annotations

from checks import IMAGE_MODEL, IMAGE_URL, MODEL, QUESTION, URL, run_checks
from langchain_ollama import ChatOllama, OllamaEmbeddings
from pydantic import BaseModel

chat = ChatOllama(model=MODEL, base_url=URL, temperature=0, num_predict=100)


class City(BaseModel):
    """A city in a country."""

    name: str
    country: str


def whole() -> object:
    """chat"""
    return chat.invoke([("system", "Be brief."), ("user", QUESTION)]).content


def stream() -> object:
    """streamed chat"""
    chunks = list(chat.stream(QUESTION))
    assert len(chunks) > 3
    return "".join(chunk.text for chunk in chunks)


def schema() -> object:
    """structured output"""
    found = chat.with_structured_output(City).invoke("Paris is in France.")
    assert isinstance(found, City)
    return found


def image() -> object:
    """image"""
    own = ChatOllama(model=IMAGE_MODEL, base_url=URL)
    content = [{"type": "text", "text": "a picture"}, {"type": "image_url", "image_url": IMAGE_URL}]
    return own.invoke([{"role": "user", "content": content}]).content


def embeddings() -> object:
    """embeddings"""
    vectors = OllamaEmbeddings(model=MODEL, base_url=URL).embed_documents(["one", "two"])
    return f"{len(vectors)} vectors of {len(vectors[0])} numbers"


run_checks(whole, stream, schema, image, embeddings)
