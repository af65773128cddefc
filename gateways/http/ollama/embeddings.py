"""`/api/embed` and `/api/embeddings`."""

from __future__ import annotations

import math
import time
from typing import Any

from ....backends.errors import InferdError
from ..exchange import Exchange
from ..fields import FieldTable, field_error
from ..turns import Embedded
from .fields import EMBED, EMBEDDINGS


async def answer_embed(exchange: Exchange) -> None:
    """Answer with the vectors of one or more texts."""
    embed, _ = exchange.read_fields(EMBED)
    texts = [embed.input] if isinstance(embed.input, str) else embed.input
    found: dict[str, Any] = {"model": embed.model, "embeddings": []}
    if texts:
        began = time.monotonic()
        vectors, load_s = await _embed(exchange, EMBED, embed.model, texts)
        found["embeddings"] = _shortened(vectors, embed.dimensions)
        found["total_duration"] = int(1e9 * (time.monotonic() - began))
        found["load_duration"] = int(1e9 * load_s)
        found["prompt_eval_count"] = sum(vectors.tokens)
    await exchange.send_json(found)


async def answer_embeddings(exchange: Exchange) -> None:
    """Answer with the vector of one text."""
    embed, _ = exchange.read_fields(EMBEDDINGS)
    found = await _embed(exchange, EMBEDDINGS, embed.model, [embed.prompt])
    [vector] = found.vectors
    await exchange.send_json({"embedding": vector})


async def _embed(
    exchange: Exchange, table: FieldTable[Any], model: str, texts: list[str]
) -> Embedded:
    caller = exchange.caller
    try:
        return await exchange.turns.embed(caller, model, texts, caller.class_of(None))
    except InferdError as exc:
        raise table.name_field(exc) from None


def _shortened(vectors: list[list[float]], dimensions: int | None) -> list[list[float]]:
    """Return the first *dimensions* numbers of each vector, scaled to length 1.

    :raises InvalidArgument: the vectors have fewer numbers.
    """
    if dimensions is None:
        return vectors
    size = len(vectors[0])
    if dimensions > size:
        raise field_error("dimensions", f"dimensions: {dimensions}; the vectors have {size}")
    found = []
    for vector in vectors:
        part = vector[:dimensions]
        length = math.hypot(*part) or 1.0
        found.append([number / length for number in part])
    return found
